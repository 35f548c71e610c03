"""A Hugging Face causal LM whose keys reach us without position: one interception serves every RoPE decoder.

Its attention function is replaced by ours, and its rotary modules return cos = 1, sin = 0, so that the keys it hands
over are raw. Which layer rotates how is observed at load, and a probe refuses models for which that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, compress
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvstore.engine.model.parallel.cutting import GatheredLinear, part_of
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.parallel.stages import Pipeline
from kvstore.engine.model.states import StateSpec, StepStates
from kvstore.errors import UnsupportedModelError
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.cpu.attention import DecodeStep, decode_step
from kvstore.kernels.kv import rotate_and_write
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.memory.layout import KVLayout, LayerShape, OwnPart
from kvstore.rope.rotary import Rotation

ATTENTION = "kvstore_paged"
MIN_PRUNED_TOKENS = 16  # fewer saved tokens do not make up for a second batch of attention


class AttentionStep(Protocol):
    """The attention of one step, layer by layer."""

    @property
    def sample_rows(self) -> Tensor | None:
        """Tokens whose logits are wanted, [num_samples], if the last layer is to compute only these; else None."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """The attention of raw query, key and value, [num_tokens, heads, head_dim]. Returns
        [num_tokens, heads of query, head_dim of value].
        """
        ...


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that Hugging Face calls, with tensors of [1, heads, num_tokens, head_dim]."""
    carrier = module.kvstore_carrier
    if module.kvstore_gathers:  # only this rank's heads attend, as the next module expects a part
        rank, size = carrier.group.rank, carrier.group.size
        query, key, value = (t[:, part_of(t.shape[1], rank, size, "heads")] for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    out = carrier.step.attend(module.kvstore_layer, query, key, value, scoring)
    return out.unsqueeze(0), None


# No function for masks is registered, so no model makes a mask, or searches the positions for the beginnings of
# sequences, which would wait for the device on CUDA. Block tables say which token sees which.
AttentionInterface.register(ATTENTION, _attention)


class StepCarrier:
    """Brings the step to the attention modules of one model.

    part: the part of the model that the network is. pipeline: computes it with the other stages, None without any.
    """

    def __init__(self, network: Any, part: Part, pipeline: Pipeline | None = None) -> None:
        self.part, self.group, self.pipeline = part, part.group, pipeline
        self.step: AttentionStep | None = None
        self.pruned_layer: int | None = None  # the last layer, if it can leave out tokens that are not sampled
        self.lean: Callable[[Tensor, Tensor], Tensor] | None = None  # see `kvstore.engine.model.lean`
        self.states: StepStates | None = None  # of the step; None while the model is observed
        network.kvstore_carrier = self
        for module in network.modules():
            if hasattr(module, "layer_idx"):
                module.kvstore_carrier, module.kvstore_layer = self, module.layer_idx
                module.kvstore_gathers = any(isinstance(child, GatheredLinear) for child in module.children())

    def number_layers(self, network: Any, owners: Mapping[int, int]) -> None:
        """owners: the layer whose KV a layer attends to, mostly its own. From now on only layers that own KV count."""
        numbers = {layer: number for number, layer in enumerate(sorted(set(owners.values())))}
        for module in network.modules():
            if getattr(module, "layer_idx", None) in owners:
                module.kvstore_layer = numbers[owners[module.layer_idx]]


SourceKey = tuple[object, ...]  # arguments of a rotary module beside x and position_ids, such as the layer type


class RotaryTap:
    """Replaces the forward of one rotary module and decides which values its model sees."""

    def __init__(self, module: torch.nn.Module, max_model_len: int) -> None:
        self.original = module.forward
        self.max_model_len = max_model_len
        # By key: the module's real cos and sin at every position, [max_model_len, width] each.
        self.tables: dict[SourceKey, tuple[Tensor, Tensor]] = {}
        self._is_of_three = False  # it makes a table each for time, height and width, which are one for text
        self.revealed: SourceKey | str | None = "all"  # keys that get the real values; None: all get cos = 1, sin = 0
        module.forward = self

    def __call__(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        key: SourceKey = (*args, *kwargs.values())
        if key not in self.tables:
            self.tables[key] = self._table(x, position_ids, args, kwargs)
        cos, sin = self.tables[key]
        if position_ids.dim() == 3 and not self._is_of_three:
            position_ids = position_ids[0]
        if self.revealed == "all" or self.revealed == key:
            return cos[position_ids], sin[position_ids]
        shape = (*position_ids.shape, cos.shape[-1])
        return cos.new_ones(shape), cos.new_zeros(shape)  # views of one number would make the model's rotation slow

    @property
    def sources(self) -> list[SourceKey]:
        """The keys of all tables, in an order that is the same in all processes: models call it in a set's."""
        return sorted(self.tables, key=repr)

    def _table(
        self, x: Tensor, position_ids: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Tensor, Tensor]:
        """Cos and sin at all positions. So max_model_len fixes the frequencies that depend on the length."""
        positions = torch.arange(self.max_model_len, device=x.device).expand(*position_ids.shape[:-1], -1)
        values = self.original(x[:, :1], positions, *args, **kwargs)
        self._is_of_three = isinstance(values, tuple) and values[0].shape[:-2] == (3, 1)
        if not isinstance(values, tuple) or len(values) != 2 or not (self._is_of_three or values[0].dim() == 3):
            raise UnsupportedModelError("its rotary module does not return (cos, sin) of shape [1, tokens, width]")
        cos, sin = (value[0, 0] if self._is_of_three else value[0] for value in values)
        return cos.contiguous(), sin.contiguous()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a model's KV, and the limits of its input."""

    shapes: tuple[LayerShape, ...]  # of the layers that own KV; others have none, or attend to that of an earlier one
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    num_parts: int = 1  # ranks that share its KV heads
    own_layers: range | None = None  # the layers that this rank has, None for all
    state: StateSpec | None = None  # what layers without KV keep of a request, None if there are none
    windows: tuple[int | None, ...] = ()  # of the layers, None: the whole context; empty if all KV is to be stored

    @property
    def layers(self) -> range:
        """The layers that this rank has."""
        return range(len(self.shapes)) if self.own_layers is None else self.own_layers

    @property
    def numbers(self) -> list[int | None]:
        """For each layer of this rank its number among those whose KV is stored for all tokens; None if it is not."""
        return _numbers(self.windows[self.layers.start : self.layers.stop] or (None,) * len(self.layers))

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(sum(shape.widths) for shape in self.shapes) * self.dtype.itemsize

    @property
    def hbm_bytes_per_token(self) -> tuple[int, int]:
        """The bytes of a token in this rank's pool: in a block, and in a window slot."""
        sizes = [sum(shape.widths) * self.dtype.itemsize // self.num_parts for shape in self.shapes]
        own = zip(self.numbers, sizes[self.layers.start : self.layers.stop], strict=True)
        of_layers = [(0, size) if number is None else (size, 0) for number, size in own]
        return sum(full for full, _ in of_layers), sum(windowed for _, windowed in of_layers)


@lru_cache(maxsize=4)  # asked for in every step
def _numbers(windows: tuple[int | None, ...]) -> list[int | None]:
    full = accumulate((window is None for window in windows), initial=0)
    return [number if window is None else None for number, window in zip(full, windows, strict=False)]


def run_step(
    network: Any, token_ids: Tensor, positions: Tensor, step: AttentionStep, sample_tokens: Tensor, alone: bool = False
) -> Tensor:  # [num_samples, vocab_size]
    """The intercepted network's forward over one flat row of tokens, [num_tokens], with `step` as its attention.

    In a pipeline, the forward of this rank's stage, which returns hidden states. alone: without the other stages.
    """
    carrier = network.kvstore_carrier
    carrier.step = step
    try:
        if carrier.pipeline is not None:
            run = carrier.pipeline.run_alone if alone else carrier.pipeline.begin
            hidden: Tensor = run(token_ids, positions, sample_tokens, step.sample_rows is not None)
            return hidden
        if carrier.lean is not None:
            return carrier.lean(token_ids, sample_tokens)
        return network(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False,
            logits_to_keep=sample_tokens if step.sample_rows is None else 0,
        ).logits[0]  # fmt: skip
    finally:
        carrier.step = None


class LayerConnector(Protocol):
    """The verbs of a `KVConnector` that a forward needs."""

    def save_kv_layer(self, layer: int, raw_key: Tensor, value: Tensor) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...


KVCaches = list[tuple[Tensor, Tensor]]  # per layer, [blocks or window slots, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step of the engine: save the raw keys, rotate, write to the paged cache, attend."""

    batches: Sequence[PagedBatch]  # per layer of this rank
    caches: KVCaches
    rotations: Sequence[Rotation | None]  # the same, at this step's positions
    connector: LayerConnector
    numbers: Sequence[int | None]  # of these layers, to the connector; None: it does not move them
    sample_rows: Tensor | None = None  # [num_samples], if `pruned_layer` computes the output of only these
    pruned_layer: int | None = None
    decodes: Sequence[DecodeStep | None] = ()  # per layer: computes single tokens on a CPU, as far as it can
    first_layer: int = 0  # caches and rotations count layers from this one
    saved: set[int] = field(default_factory=set)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        rows = self.sample_rows if layer == self.pruned_layer else None
        layer -= self.first_layer
        number = self.numbers[layer]
        if number is not None and layer not in self.saved:  # else it is that of an earlier layer
            self.saved.add(layer)
            self.connector.save_kv_layer(number, key, value)
        key_cache, value_cache = self.caches[layer]
        decode = self.decodes[layer]
        if decode is not None and rows is None:
            self._wait(number)
            attended = decode.attend(layer, query, key, value, key_cache, value_cache, scoring)
            if attended is not None:
                return attended
        batch, rotation = self.batches[layer], self.rotations[layer]
        query, key = rotate_and_write(query, key, value, key_cache, value_cache, batch.slots, rotation)
        self._wait(number)
        if rows is not None:
            query, batch = query[rows], batch.at(rows)
        if not len(query):  # a part of a prefill that samples nothing
            return value.new_empty(0, query.shape[1], value.shape[2])
        return paged_attention(query, key, value, key_cache, value_cache, batch, scoring)

    def _wait(self, number: int | None) -> None:
        if number is not None:
            self.connector.wait_for_layer_load(number)


class PositionFreeModel:
    """A loaded model after interception. `kvstore.engine.model.probe.intercept` makes it and finds spec and rotations.

    rotations: the full table of each layer, None for a layer without rotation. Layers with the same table share the
    object.
    """

    def __init__(self, network: Any, spec: ModelSpec, rotations: Sequence[Rotation | None]) -> None:
        self.network = network
        self.spec = spec
        self.rotations = tuple(rotations)
        self.device: torch.device = network.device

    @property
    def is_native(self) -> bool:
        """Whether compiled code computes all products on a CPU, so that torch needs no threads of its own."""
        return getattr(self.network.kvstore_carrier.lean, "is_native", False)

    def layout(self, block_size: int) -> KVLayout:
        """The layout of its stored KV, and which layers and heads this rank has."""
        spec, group = self.spec, self.network.kvstore_carrier.group
        if spec.state is not None:
            stored_bytes = spec.state.stored.num_bytes
            return KVLayout(spec.shapes, block_size, spec.dtype, self.rotations, state_bytes=stored_bytes)
        is_full = [window is None for window in spec.windows or (None,) * len(spec.shapes)]
        full, windowed = (
            KVLayout(
                tuple(compress(spec.shapes, which)), block_size, spec.dtype, tuple(compress(self.rotations, which))
            )
            for which in (is_full, [not one for one in is_full])
        )
        if group is not None or spec.own_layers is not None:
            num_kv_heads = spec.shapes[0].num_kv_heads  # that ranks share: then all layers have one shape
            heads = slice(0, num_kv_heads)
            if group is not None:
                heads = part_of(num_kv_heads, group.rank, group.size, "KV heads")
            first, last = (sum(is_full[:layer]) for layer in (spec.layers.start, spec.layers.stop))
            windows = spec.layers.start - first, spec.layers.stop - last
            full = replace(full, own=OwnPart((first, last), (heads.start, heads.stop), windows))
        if not spec.windows:
            return full
        seen = max(window for window in spec.windows if window is not None) - 1  # before the next token
        return replace(full, state_bytes=windowed.block_bytes, window_blocks=-(-seen // block_size), windowed=windowed)

    def new_caches(self, num_blocks: int, block_size: int, num_window_slots: int = 0) -> KVCaches:
        """Zeroed paged caches. Values that were never written must be finite, as masked scores still multiply them.

        num_window_slots: so many blocks, and one that is never written, for each layer with a window; 0: as for others.
        """
        spec, caches = self.spec, KVCaches()
        shapes = spec.shapes[spec.layers.start : spec.layers.stop]
        with torch.inference_mode(False):  # threads outside of inference mode write here, too
            for shape, number in zip(shapes, spec.numbers, strict=True):
                count = num_window_slots + 1 if num_window_slots and number is None else num_blocks
                tokens = (count, block_size, shape.num_kv_heads // spec.num_parts)
                key_cache, value_cache = (
                    torch.zeros(*tokens, dim, dtype=spec.dtype, device=self.device)
                    for dim in (shape.key_dim, shape.value_dim)
                )
                caches.append((key_cache, value_cache))
        return caches

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: PagedBatch, caches: KVCaches, connector: LayerConnector,
        sample_tokens: Tensor, states: StepStates | None = None,
    ) -> Tensor:  # [num_samples, vocab_size]  # fmt: skip
        """Compute one step's tokens, [num_tokens], of all requests in one row; logits of `sample_tokens` only."""
        logits = self.begin(token_ids, positions, batch, caches, connector, sample_tokens, states)
        return self.end(len(sample_tokens)) if logits is None else logits

    def begin(
        self, token_ids: Tensor, positions: Tensor, batch: PagedBatch, caches: KVCaches, connector: LayerConnector,
        sample_tokens: Tensor, states: StepStates | None = None,
    ) -> Tensor | None:  # [num_samples, vocab_size]  # fmt: skip
        """Like `forward`, but in a pipeline the first stage returns None, and `end` the logits; later stages return
        hidden states.

        states: of the step's requests, if the model has any.
        """
        self.network.kvstore_carrier.states = states
        layers = self.spec.layers
        own = self.rotations[layers.start : layers.stop]
        each = {id(r): r for r in own if r is not None}
        at = {name: r.at(positions).spread_out() for name, r in each.items()}
        rotations = [None if r is None else at[id(r)] for r in own]
        numbers, windowed = self.spec.numbers, batch.windowed or batch
        batches = [windowed if number is None else batch for number in numbers]
        found = {id(one): decode_step(one, caches, rotations, batches.index(one)) for one in {*batches}}
        decodes = [found[id(one)] for one in batches]
        pruned = self._pruned(token_ids, sample_tokens)
        step = PagedStep(batches, caches, rotations, connector, numbers, *pruned, decodes, layers.start)
        with torch.cuda.device_of(token_ids):  # Triton launches on the current device; without effect on a CPU
            out = run_step(self.network, token_ids, positions, step, sample_tokens)
        pipeline: Pipeline | None = self.network.kvstore_carrier.pipeline
        return None if pipeline is not None and pipeline.is_first else out

    def end(self, num_samples: int) -> Tensor:  # [num_samples, vocab_size]
        """Wait for the logits of the oldest forward that has not ended."""
        logits: Tensor = self.network.kvstore_carrier.pipeline.end(num_samples)
        return logits

    def _pruned(self, token_ids: Tensor, sample_tokens: Tensor) -> tuple[Tensor | None, int | None]:
        """The samples, and the layer that computes only them, if that saves enough tokens to pay."""
        carrier = self.network.kvstore_carrier
        layer = carrier.pruned_layer
        if not len(sample_tokens) and carrier.lean is None and carrier.pipeline is None:
            # A network's own norm and head may not like an empty input.
            return None, None
        if layer is None or len(token_ids) - len(sample_tokens) < MIN_PRUNED_TOKENS:
            return None, None
        return sample_tokens, layer
