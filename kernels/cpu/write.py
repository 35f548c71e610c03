"""Rotation of a step's queries and keys, and the write of keys and values into their pages, by C code on a CPU.

The torch twin: `kvstore.rope.rotary.Spread` and `reference.write_kv`, bit for bit.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.decode import CODES, Step, tables_of
from kvstore.rope.rotary import Rotation

_Number, _Address = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS: list[Any] = [_Address, *[_Address, _Number] * 3, *[_Address] * 6]


@cache
def _function(library: ctypes.CDLL) -> Callable[..., int]:
    return native.declared(library, {"kv_write": _ARGUMENTS})["kv_write"]


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # query and key, rotated
    """As `write_kv.rotate_and_write`; None, and nothing written, for what is not known here."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    library = native.library() if key.device.type == "cpu" else None
    if library is None or key_cache.dtype not in CODES:
        return None
    if any(tensor.dtype != key_cache.dtype for tensor in (query, key, value, value_cache)):
        return None
    if key.shape != (len(query), num_kv_heads, head_dim) or value.shape != key.shape or query.shape[2] != head_dim:
        return None
    if value_cache.shape != key_cache.shape:
        return None
    starts = query.stride(), key.stride(), value.stride()
    if any(stride[1:] != (head_dim, 1) for stride in starts) or len(slots) != len(query):
        return None
    tables = tables_of(rotation, key_cache)
    if tables is None or not (key_cache.is_contiguous() and value_cache.is_contiguous() and slots.is_contiguous()):
        return None
    step = Step(
        len(query), query.shape[1], num_kv_heads, head_dim, CODES[key_cache.dtype],
        num_blocks, block_size, 0, 0, torch.get_num_threads(), 0, 0, slots.data_ptr(),
    )  # fmt: skip
    turned, rotated = torch.empty(query.shape, dtype=query.dtype), torch.empty(key.shape, dtype=key.dtype)
    status = _function(library)(
        ctypes.addressof(step), query.data_ptr(), starts[0][0], key.data_ptr(), starts[1][0], value.data_ptr(),
        starts[2][0], key_cache.data_ptr(), value_cache.data_ptr(), *tables, turned.data_ptr(), rotated.data_ptr(),
    )  # fmt: skip
    return (turned, rotated) if status == 0 else None
