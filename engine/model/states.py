"""Layers that keep a state instead of KV: linear attention, Mamba, convolutions. Their modules compute as they are.

A request's state is one row of bytes in a pool, so that it is copied, saved and restored as a whole. Which modules keep
a state is observed: those that update a cache of transformers while a prompt is computed. Their forward is replaced by
one that cuts the flat row of a step: chunks of prompts are computed one by one, single tokens together. On a CPU,
compiled code replaces functions that transformers' models share, and changes states where they lie in the pool.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kvstore.errors import UnsupportedModelError
from kvstore.kernels.cpu.states import StateKernels, state_kernels
from kvstore.kernels.paged_batch import to_device

_ALIGNMENT = 16  # bytes
# What kernels compute in place of transformers' functions, by the states that these change.
_FUNCTIONS = {
    "conv_states": {"causal_conv1d_fn": "convolve", "causal_conv1d_update": "convolve_step"},
    "recurrent_states": dict.fromkeys(
        ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), "apply_delta_rule"
    ),
}
_TOLERANCE, _TOLERANCE_16_BIT = {torch.float32: 1e-4}, 0.05  # of what kernels compute
_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value", "cache")


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state: of which layer, and where in the row it lies. kind: as transformers' cache names it."""

    layer: int
    kind: str  # conv_states or recurrent_states
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # bytes

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one request. stored_dtype: of what is float32 in it, below HBM; None: the same."""

    parts: tuple[StatePart, ...]
    stored_dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        return _aligned(self.parts[-1].end)

    @property
    def stored(self) -> StateSpec:
        """The state as it is stored."""
        parts, start = list[StatePart](), 0
        for part in self.parts:
            is_changed = self.stored_dtype is not None and part.dtype == torch.float32
            parts.append(replace(part, start=start, dtype=self.stored_dtype if is_changed else part.dtype))
            start = _aligned(parts[-1].end)
        return StateSpec(tuple(parts))


class StatePool:
    """States of requests, one in each slot."""

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_slots, spec.num_bytes, dtype=torch.uint8, device=device)
        self.tensors: dict[int, list[tuple[StatePart, Tensor]]] = {}  # by layer; [num_slots, *shape]
        for part in spec.parts:
            self.tensors.setdefault(part.layer, []).append((part, _part_of(self.rows, part)))
        self._spec, self._stored = spec, spec.stored

    def packed(self, slots: Sequence[int]) -> Tensor:
        """A copy of states as they are stored, [num_states, num_bytes] uint8."""
        rows = self.rows[to_device(torch.tensor(slots, dtype=torch.int64), self.rows.device)]
        if self._spec.stored_dtype is None:
            return rows
        packed = self.blank(len(slots)).zero_()
        for part, stored in zip(self._spec.parts, self._stored.parts, strict=True):
            _part_of(packed, stored).copy_(_part_of(rows, part))
        return packed

    def blank(self, num_states: int) -> Tensor:
        return torch.empty(num_states, self._stored.num_bytes, dtype=torch.uint8, device=self.rows.device)

    def unpack(self, slots: Sequence[int], packed: Tensor) -> None:
        """Take in what is packed."""
        for slot, own in zip(slots, packed, strict=True):
            for part, stored in zip(self._spec.parts, self._stored.parts, strict=True):
                _part_of(self.rows[slot], part).copy_(_part_of(own, stored))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states, one after the other: (source, destination)."""
        for source, destination in copies:
            self.rows[destination].copy_(self.rows[source])

    def overwrite(self, slots: Sequence[int]) -> None:
        """Overwrite these states with zeros."""
        for slot in slots:
            self.rows[slot].zero_()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a step's flat row, all of one request. is_first: it has no state yet."""

    start: int
    end: int
    slot: int
    is_first: bool

    @property
    def is_single(self) -> bool:
        """Whether it can be computed together with others."""
        return self.end - self.start == 1 and not self.is_first


@dataclass(frozen=True, slots=True)
class Together:
    """Neighbours in a step's flat row that are computed in one call, with equally many tokens of each request.

    slots: [num_requests]. place: the same as an index, a slice if they follow one another.
    """

    tokens: slice
    slots: Tensor
    place: Tensor | slice
    is_first: bool


class StepStates:
    """Which tokens of one step go on from which state in the pool. chunks: every request of the step has one."""

    def __init__(self, pool: StatePool, chunks: Sequence[Chunk]) -> None:
        self.pool = pool
        self.calls: list[Together] = []
        for is_single, group in itertools.groupby(chunks, lambda chunk: chunk.is_single):
            chosen = list(group)
            for own in [chosen] if is_single else [[chunk] for chunk in chosen]:
                numbers = [chunk.slot for chunk in own]
                slots = to_device(torch.tensor(numbers), pool.rows.device)
                run = range(numbers[0], numbers[0] + len(numbers))
                place = slice(run.start, run.stop) if numbers == list(run) else slots
                self.calls.append(Together(slice(own[0].start, own[-1].end), slots, place, own[0].is_first))


class _PooledLayer(LinearAttentionLayer):
    """transformers' cache of a layer over a pool. place: of the requests of a call, if the layer has all states."""

    place: Tensor | slice | None = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As its parent, but the states of other requests stay, and the result lies token by token in memory."""
        if self.place is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        pool, rows = self.conv_states[state_idx], conv_states.transpose(1, 2)
        before = pool[self.place].transpose(1, 2)
        if not self.has_previous_state[state_idx]:
            before = torch.zeros_like(before[:, rows.shape[1] :])
        whole = torch.cat([before, rows], 1).transpose(1, 2) if before.shape[1] else conv_states
        pool[self.place] = whole[..., -pool.shape[-1] :]
        self.has_previous_state[state_idx] = True
        return whole


class StateMixer:
    """The forward of one module that keeps a state."""

    def __init__(self, module: nn.Module, carrier: Any, layer: int, num_layers: int) -> None:
        self._authors: Any = module.forward
        self._forward: Callable[..., Tensor] = self._authors
        self._carrier, self._layer = carrier, layer
        parameters = inspect.signature(self._authors).parameters
        arguments = [name for name in _CACHE_ARGUMENTS if name in parameters]
        if not arguments:
            raise UnsupportedModelError(f"layer {layer} keeps a state that it is not given")
        self._argument = arguments[0]
        self._cache = DynamicCache()
        self._cache.layers = [_PooledLayer()] * num_layers  # some modules ask any layer whether there is a state
        self._kernels: StateKernels | None = None
        self._pooled = set[str]()  # the kinds of states that kernels change in the pool

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # [1, num_tokens, hidden_size]
        states: StepStates | None = self._carrier.states
        if states is None:
            return self._authors(hidden_states, **kwargs)
        tensors, found = states.pool.tensors[self._layer], list[Tensor]()
        for call in states.calls:
            x = hidden_states[0, call.tokens].unflatten(0, (len(call.slots), -1))
            found.append(self._run(x, tensors, call, kwargs).flatten(0, 1))
        return (found[0] if len(found) == 1 else torch.cat(found)).unsqueeze(0)

    def use_kernels(self, pool: StatePool, x: Tensor) -> bool:
        """Compute on a CPU with compiled code what that knows, if it gives the same. Returns whether there is anything.

        pool: to try it, with two slots; x: a few tokens, [1, num_tokens, hidden_size].
        """
        kernels = state_kernels()
        authors: Any = inspect.unwrap(self._authors.__func__)
        kinds = [kind for kind, names in _FUNCTIONS.items() if names.keys() <= set(authors.__code__.co_names)]
        if kernels is None or not kinds:
            return False
        replaced = {name: getattr(kernels, own) for kind in kinds for name, own in _FUNCTIONS[kind].items()}
        function = FunctionType(authors.__code__, authors.__globals__ | replaced, closure=authors.__closure__)
        function.__defaults__, function.__kwdefaults__ = authors.__defaults__, authors.__kwdefaults__
        expected = self._tried(pool, x)
        self._forward, self._kernels, self._pooled = MethodType(function, self._authors.__self__), kernels, set(kinds)
        tolerance = _TOLERANCE.get(x.dtype, _TOLERANCE_16_BIT)
        try:
            found = self._tried(pool, x)
            if all((a - b).norm() <= b.norm() * tolerance for a, b in zip(found, expected, strict=True)):
                return True
        except TypeError:  # for dtypes or sizes that C does not know
            pass
        self._forward, self._kernels, self._pooled = self._authors, None, set()
        return False

    def _tried(self, pool: StatePool, x: Tensor) -> list[Tensor]:
        """The results for tokens of two requests, in two pieces and then one by one, and the states after them."""
        found = []
        for length, is_first in ((5, True), (3, False), (1, False)):
            chunks = [Chunk(0, length, 1, is_first), Chunk(length, 2 * length, 0, is_first)]
            self._carrier.states = StepStates(pool, chunks)
            found.append(self(x[:, : 2 * length]).float())
        self._carrier.states = None
        return found + [tensor.float().clone() for _, tensor in pool.tensors[self._layer]]

    def _run(
        self, x: Tensor, tensors: list[tuple[StatePart, Tensor]], call: Together, kwargs: dict[str, Any]
    ) -> Tensor:
        """Compute [num_requests, num_tokens, hidden_size] and change the states of the call in the pool."""
        layer: Any = self._cache.layers[0]
        gathered = list[tuple[Tensor, Tensor]]()
        for part, tensor in tensors:
            held = tensor
            if part.kind not in self._pooled:
                held = tensor[call.place]
                if call.place is call.slots:
                    gathered.append((tensor, held))
            getattr(layer, part.kind)[part.index] = held
            getattr(layer, f"is_{part.kind}_initialized")[part.index] = True
            layer.has_previous_state[part.index] = not call.is_first
            if part.kind == "conv_states":
                layer.conv_kernel_size[part.index] = part.shape[-1]
        layer.dtype, layer.device = held.dtype, held.device
        layer.place = call.place if "conv_states" in self._pooled else None
        if self._kernels is not None:
            self._kernels.slots, self._kernels.recurrent = call.slots, held
        out = self._forward(x, **{**kwargs, self._argument: self._cache})
        for tensor, changed in gathered:
            tensor[call.slots] = changed
        return out


class _Spy(DynamicCache):
    """Notes in which module the state of a layer is updated: the innermost of those that do all of it."""

    def __init__(self, config: Any, running: list[nn.Module]) -> None:
        super().__init__(config=config)
        self._running = running
        self.mixers: dict[int, list[nn.Module]] = {}  # by layer: the module, and those around it

    def _note(self, layer: int) -> None:
        known = self.mixers.get(layer, self._running)
        self.mixers[layer] = [module for module in known if module in self._running]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._note(layer_idx)
        return super().update_recurrent_state(states, layer_idx, state_idx, **kwargs)


def keeps_states(config: Any) -> bool:
    """Whether transformers' cache for a model has a layer with a state."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError):  # layers that it does not know; what they keep shows in the logits
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def observe_states(network: Any, token_ids: Tensor, positions: Tensor) -> tuple[StateSpec, dict[int, nn.Module]] | None:
    """The state of a request, and the module of each layer that keeps a part of it; None if no layer does.

    The network is still its authors'. token_ids, positions: [num_tokens].
    """
    if not keeps_states(network.config):
        return None
    running: list[nn.Module] = []
    spy = _Spy(network.config, running)
    hooks = []
    for module in network.modules():
        if hasattr(module, "layer_idx"):
            hooks.append(module.register_forward_pre_hook(lambda module, _: running.append(module)))
            hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        network(input_ids=token_ids[None], position_ids=positions[None], past_key_values=spy, use_cache=True)
    except ValueError as error:  # it says that it has a cache of its own
        why = str(error).partition(" and is not compatible")[0]
        raise UnsupportedModelError(f"it does not keep its states as others do: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()
    parts, start = list[StatePart](), 0
    for number in sorted(spy.mixers):
        layer: Any = spy.layers[number]
        for kind in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(layer, kind).items():
                if tensor is not None:
                    parts.append(StatePart(number, kind, index, tuple(tensor.shape[1:]), tensor.dtype, start))
                    start = _aligned(parts[-1].end)
    return StateSpec(tuple(parts)), {number: modules[-1] for number, modules in spy.mixers.items()}


def _part_of(rows: Tensor, part: StatePart) -> Tensor:
    """This part of states, [..., num_bytes] -> [..., *shape]."""
    return rows[..., part.start : part.end].view(part.dtype).unflatten(-1, part.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
