"""Layers that keep a state instead of KV: linear attention, Mamba, convolutions. Their modules compute as they are.

A request's state is one row of bytes in a pool, so that it is copied, saved and restored as a whole. Which modules keep
a state is observed: those that update a cache of transformers while a prompt is computed. Their forward is replaced by
one that cuts the flat row of a step: chunks of prompts are computed one by one, single tokens together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kvstore.errors import UnsupportedModelError

_ALIGNMENT = 16  # bytes
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

    def packed(self, slot: int) -> Tensor:
        """The state as it is stored, [num_bytes] uint8: its own memory, unless it is stored in another dtype."""
        if self._spec.stored_dtype is None:
            return self.rows[slot]
        packed = torch.zeros(self._stored.num_bytes, dtype=torch.uint8, device=self.rows.device)
        for part, stored in zip(self._spec.parts, self._stored.parts, strict=True):
            _part_of(packed, stored).copy_(_part_of(self.rows[slot], part))
        return packed

    def unpack(self, slot: int, packed: Tensor) -> None:
        """Take in what `packed` gave, after it was overwritten with a stored state."""
        if self._spec.stored_dtype is not None:
            for part, stored in zip(self._spec.parts, self._stored.parts, strict=True):
                _part_of(self.rows[slot], part).copy_(_part_of(packed, stored))

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


class StepStates:
    """Which tokens of one step go on from which state in the pool. chunks: every request of the step has one."""

    def __init__(self, pool: StatePool, chunks: Sequence[Chunk]) -> None:
        self.pool = pool
        singles = [chunk for chunk in chunks if chunk.end - chunk.start == 1 and not chunk.is_first]
        alone = set(singles) if len(singles) > 1 else set()
        self.chunks = [chunk for chunk in chunks if chunk not in alone]
        device = pool.rows.device
        self.rows = torch.tensor([chunk.start for chunk in chunks if chunk in alone], device=device)
        self.slots = torch.tensor([chunk.slot for chunk in chunks if chunk in alone], device=device)


class StateMixer:
    """The forward of one module that keeps a state."""

    def __init__(self, module: nn.Module, carrier: Any, layer: int, num_layers: int) -> None:
        self._forward: Callable[..., Tensor] = module.forward
        self._carrier, self._layer = carrier, layer
        parameters = inspect.signature(self._forward).parameters
        arguments = [name for name in _CACHE_ARGUMENTS if name in parameters]
        if not arguments:
            raise UnsupportedModelError(f"layer {layer} keeps a state that it is not given")
        self._argument = arguments[0]
        self._cache = DynamicCache()
        self._cache.layers = [
            LinearAttentionLayer()
        ] * num_layers  # some modules ask any layer whether there is a state

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # [1, num_tokens, hidden_size]
        states: StepStates | None = self._carrier.states
        if states is None:
            return self._forward(hidden_states, **kwargs)
        out = torch.empty_like(hidden_states)
        tensors = states.pool.tensors[self._layer]
        if len(states.rows):
            held = [(part, tensor[states.slots]) for part, tensor in tensors]
            out[0, states.rows] = self._run(hidden_states[0, states.rows, None], held, False, kwargs)[:, 0]
            for (_, tensor), (_, changed) in zip(tensors, held, strict=True):
                tensor[states.slots] = changed
        for chunk in states.chunks:
            held = [(part, tensor[chunk.slot : chunk.slot + 1]) for part, tensor in tensors]
            own = slice(chunk.start, chunk.end)
            out[:, own] = self._run(hidden_states[:, own], held, chunk.is_first, kwargs)
        return out

    def _run(self, x: Tensor, held: list[tuple[StatePart, Tensor]], is_first: bool, kwargs: dict[str, Any]) -> Tensor:
        """Compute [num_requests, num_tokens, hidden_size] and change the states that are held, in place."""
        layer: Any = self._cache.layers[0]
        for part, tensor in held:
            getattr(layer, part.kind)[part.index] = tensor
            getattr(layer, f"is_{part.kind}_initialized")[part.index] = True
            layer.has_previous_state[part.index] = not is_first
            if part.kind == "conv_states":
                layer.conv_kernel_size[part.index] = part.shape[-1]
        layer.dtype, layer.device = held[0][1].dtype, held[0][1].device
        return self._forward(x, **{**kwargs, self._argument: self._cache})


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
        raise UnsupportedModelError(f"it does not keep its states as others do: {error}") from error
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
