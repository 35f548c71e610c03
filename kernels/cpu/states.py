"""What layers with a state compute, by the C code of `states.c`, whose structs are declared here.

Torch twins: transformers' functions of the same names, which all its models with a state share.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.threads import num_threads

_MAX_DIM = 256
_MAX_WIDTH = 8
_UNIT = 16  # numbers in a vector; heads and channels must be multiples
_DTYPES = torch.float32, torch.bfloat16
_ACTIVATIONS = {None: False, "silu": True, "swish": True}  # after a convolution: whether it is silu
_Number, _Address = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {name: [_Address, ctypes.c_int] for name in ("kv_delta_rule", "kv_convolve")}


class _DeltaRule(ctypes.Structure):
    _fields_ = (
        *((name, _Address) for name in ("query", "key", "value")),
        *((f"{name}_strides", _Number * 3) for name in ("query", "key", "value")),
        *((name, _Address) for name in ("decay", "beta", "states", "slots", "out")),
        *((name, _Number) for name in ("state_stride", "num_requests", "num_tokens", "num_heads", "key_dim")),
        *((name, _Number) for name in ("value_dim", "narrow", "normed", "fresh")),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        *((name, _Address) for name in ("x", "weight", "bias")),
        ("strides", _Number * 2),
        *((name, _Address) for name in ("states", "slots", "out")),
        *((name, _Number) for name in ("state_stride", "num_requests", "num_tokens", "num_channels", "width")),
        *((name, _Number) for name in ("narrow", "activated")),
    )


@cache
def _functions(library: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    return native.declared(library, _ARGUMENTS)


class StateKernels:
    """transformers' functions for layers with a state, which change states of a pool in place.

    They raise TypeError, and change nothing, for dtypes and sizes that C does not know.

    slots: of the requests of a call, [num_requests]; recurrent: their states, [num_slots, num_heads, key_dim,
    value_dim], float32. Whoever calls sets both before.
    """

    def __init__(self, functions: Mapping[str, Callable[..., int]]) -> None:
        self._functions = functions
        self.slots: Tensor | None = None
        self.recurrent: Tensor | None = None

    def apply_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False, **_: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gated delta rule over one token or many of each request.

        query, key, value: [num_requests, num_tokens, num_heads, dim], g and beta without dim. initial_state: None for
        requests that have no state yet, else it is `recurrent`. Returns [num_requests, num_tokens, num_heads,
        value_dim], and `recurrent`.
        """
        states, slots = self.recurrent, self.slots
        assert states is not None and slots is not None
        num_requests, num_tokens, num_heads, key_dim = query.shape
        if (
            states.dtype != torch.float32
            or states.dim() != 4
            or any(dim % _UNIT or dim > _MAX_DIM for dim in states.shape[2:])
        ):
            raise TypeError(f"states of {states.dtype}, {states.shape}")
        if value.dtype not in _DTYPES or {query.dtype, key.dtype} != {value.dtype}:
            raise TypeError(f"the delta rule with {query.dtype}, {key.dtype}, {value.dtype}")
        query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
        decay, beta = g.float().contiguous(), beta.float().contiguous()
        out = torch.empty(value.shape, dtype=value.dtype)
        rule = _DeltaRule(
            query.data_ptr(), key.data_ptr(), value.data_ptr(),
            *((_Number * 3)(*one.stride()[:3]) for one in (query, key, value)),
            decay.data_ptr(), beta.data_ptr(), states.data_ptr(), slots.data_ptr(), out.data_ptr(),
            states.stride(0), num_requests, num_tokens, num_heads, key_dim, value.shape[-1],
            value.dtype == torch.bfloat16, use_qk_l2norm_in_kernel, initial_state is None,
        )  # fmt: skip
        self._functions["kv_delta_rule"](ctypes.addressof(rule), num_threads())
        return out, states

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        states: Tensor | None = None, **_: object,
    ) -> Tensor:  # fmt: skip
        """A short causal convolution over each channel. The result lies token by token in memory.

        x: [num_requests, num_channels, num_tokens], after zeros, or one token after the inputs in states, [num_slots,
        num_channels, width], which are changed. weight: [num_channels, width].
        """
        rows, weight = x.transpose(1, 2), weight.contiguous()
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=x.dtype)
        if weight.dtype not in _DTYPES or len(weight) % _UNIT or weight.shape[1] > _MAX_WIDTH:
            raise TypeError(f"a convolution of {weight.dtype}, {weight.shape}")
        if x.dtype != weight.dtype or activation not in _ACTIVATIONS:
            raise TypeError(f"a convolution with {x.dtype}, {activation}")
        slots = None if states is None else self.slots
        convolution = _Convolution(
            rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            (_Number * 2)(*rows.stride()[:2]), None if states is None else states.data_ptr(),
            None if slots is None else slots.data_ptr(), out.data_ptr(), 0 if states is None else states.stride(0),
            rows.shape[0], rows.shape[1], *weight.shape, x.dtype == torch.bfloat16, _ACTIVATIONS[activation],
        )  # fmt: skip
        self._functions["kv_convolve"](ctypes.addressof(convolution), num_threads())
        return out.transpose(1, 2)

    def convolve_step(
        self, x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        return self.convolve(x, weight, bias, activation, states)


def state_kernels() -> StateKernels | None:
    """None without the C code."""
    library = native.library()
    return None if library is None else StateKernels(_functions(library))
