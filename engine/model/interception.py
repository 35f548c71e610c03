"""A Hugging Face causal LM whose keys reach us without position: one interception serves every RoPE decoder.

Its attention function is replaced by ours, and its rotary modules return cos = 1, sin = 0, so that the keys it hands
over are raw. Which layer rotates how is observed at load, and a probe refuses models for which that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvstore.errors import UnsupportedModelError
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.cpu.decode import DecodeStep, decode_step
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.kernels.write_kv import rotate_and_write, write_kv
from kvstore.rope.rotary import Rotation

ATTENTION = "kvstore_paged"
MIN_PRUNED_TOKENS = 16  # so many tokens less make up for attending in a batch of their own


class AttentionStep(Protocol):
    """What travels through `forward` as the keyword argument `kvstore_step`: one step's attention, layer by layer."""

    @property
    def sample_rows(self) -> Tensor | None:
        """Tokens whose logits are asked for, [num_samples], where the last layer is to give these alone."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Raw query, key and value, [num_tokens, heads, head_dim], to the attention's output, shaped as query."""
        ...


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, kvstore_step: AttentionStep | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function that Hugging Face calls, [1, heads, num_tokens, head_dim] each."""
    if kvstore_step is None:
        kvstore_step = module.kvstore_carrier.step  # StableLM and Nemotron do not pass keyword arguments on
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    out = kvstore_step.attend(module.layer_idx, query, key, value, scoring)
    return out.unsqueeze(0), None


# No function for the mask is registered: then no model makes one, nor looks in the positions for where sequences begin,
# which on CUDA would wait for the device. Block tables say who sees what.
AttentionInterface.register(ATTENTION, _attention)


class StepCarrier:
    """Brings the step to the attention modules of one model whose layers drop unknown keyword arguments."""

    def __init__(self, network: Any) -> None:
        self.step: AttentionStep | None = None
        self.pruned_layer: int | None = None  # the last one, if it can leave out tokens that are not sampled
        self.lean: Callable[[Tensor, Tensor], Tensor] | None = None  # see `kvstore.engine.model.lean`
        network.kvstore_carrier = self
        for module in network.modules():
            if hasattr(module, "layer_idx"):
                module.kvstore_carrier = self


SourceKey = tuple[object, ...]  # arguments of a rotary module beside x and position_ids, such as the layer type


class RotaryTap:
    """Stands in for the forward of one rotary module and decides what its model gets to see.

    tables: by key, the module's real cos and sin at every position, [max_model_len, width] each.
    revealed: None (cos = 1, sin = 0), "all", or one key: whose real values are returned.
    """

    def __init__(self, module: torch.nn.Module, max_model_len: int) -> None:
        self.original = module.forward
        self.max_model_len = max_model_len
        self.tables: dict[SourceKey, tuple[Tensor, Tensor]] = {}
        self.revealed: SourceKey | str | None = "all"
        module.forward = self

    def __call__(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        key: SourceKey = (*args, *kwargs.values())
        if key not in self.tables:
            self.tables[key] = self._table(x, args, kwargs)
        cos, sin = self.tables[key]
        if self.revealed == "all" or self.revealed == key:
            return cos[position_ids], sin[position_ids]
        shape = (*position_ids.shape, cos.shape[-1])
        return cos.new_ones(1).expand(shape), cos.new_zeros(1).expand(shape)

    def _table(self, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Tensor, Tensor]:
        """All positions at once: a frequency that depends on the length is thereby fixed by max_model_len."""
        positions = torch.arange(self.max_model_len, device=x.device).unsqueeze(0)
        values = self.original(x[:, :1], positions, *args, **kwargs)
        if not isinstance(values, tuple) or len(values) != 2 or values[0].dim() != 3:
            raise UnsupportedModelError("its rotary module does not return (cos, sin) of shape [1, tokens, width]")
        return values[0][0].contiguous(), values[1][0].contiguous()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a model's KV, and what bounds its input."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def run_step(
    network: Any, token_ids: Tensor, positions: Tensor, step: AttentionStep, sample_tokens: Tensor
) -> Tensor:  # [num_samples, vocab_size]
    """The intercepted network's forward over one flat row of tokens, [num_tokens], with `step` as its attention."""
    carrier = network.kvstore_carrier
    carrier.step = step
    try:
        if carrier.lean is not None:
            return carrier.lean(token_ids, sample_tokens)
        return network(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False,
            logits_to_keep=sample_tokens if step.sample_rows is None else 0, kvstore_step=step,
        ).logits[0]  # fmt: skip
    finally:
        carrier.step = None


class LayerConnector(Protocol):
    """What a forward needs of a `KVConnector`."""

    def save_kv_layer(self, layer: int, raw_key: Tensor, value: Tensor) -> None: ...

    def wait_for_layer_load(self, layer: int) -> None: ...


KVCaches = list[tuple[Tensor, Tensor]]  # per layer, [num_blocks, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step of the engine: save the raw keys, rotate, write to the paged cache, attend."""

    batch: PagedBatch
    caches: KVCaches
    rotations: Sequence[Rotation | None]  # per layer, at this step's positions
    connector: LayerConnector
    sample_rows: Tensor | None = None  # [num_samples], where `pruned_layer` computes the output of these alone
    pruned_layer: int | None = None
    decode: DecodeStep | None = None  # computes what of a step of single tokens it knows, on a CPU

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.connector.save_kv_layer(layer, key, value)
        key_cache, value_cache = self.caches[layer]
        slots, rotation = self.batch.slots, self.rotations[layer]
        if self.sample_rows is not None and layer == self.pruned_layer:
            rows = self.sample_rows
            query = query[rows]
            if rotation is not None:
                query, key = rotation.at(rows).apply(query), rotation.apply(key)
            write_kv(key, value, key_cache, value_cache, slots)
            self.connector.wait_for_layer_load(layer)
            if not len(rows):  # a part of a prefill that samples nothing
                return query
            return paged_attention(query, key, value, key_cache, value_cache, self.batch.at(rows), scoring)
        if self.decode is not None:
            self.connector.wait_for_layer_load(layer)
            attended = self.decode.attend(layer, query, key, value, key_cache, value_cache, scoring)
            if attended is not None:
                return attended
        query, key = rotate_and_write(query, key, value, key_cache, value_cache, slots, rotation)
        self.connector.wait_for_layer_load(layer)
        return paged_attention(query, key, value, key_cache, value_cache, self.batch, scoring)


class PositionFreeModel:
    """A loaded model after interception; made by `kvstore.engine.model.probe.intercept`, which finds spec and
    rotations.

    rotations: per layer, the full table (None for a layer without rotation). Layers that share one share the object.
    """

    def __init__(self, network: Any, spec: ModelSpec, rotations: Sequence[Rotation | None]) -> None:
        self.network = network
        self.spec = spec
        self.rotations = tuple(rotations)
        self.device: torch.device = network.device

    @property
    def is_native(self) -> bool:
        """Whether compiled code computes all products on a CPU: then its threads are of no use to torch."""
        return getattr(self.network.kvstore_carrier.lean, "is_native", False)

    def new_caches(self, num_blocks: int, block_size: int) -> KVCaches:
        """Zeroed paged caches: what was never written must be finite, since masked scores still pass through it."""
        shape = (num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_dim)
        options = {"dtype": self.spec.dtype, "device": self.device}
        with torch.inference_mode(False):  # whatever its caller is in: threads outside of it write here too
            return [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(self.spec.num_layers)]

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: PagedBatch, caches: KVCaches, connector: LayerConnector,
        sample_tokens: Tensor,
    ) -> Tensor:  # [num_samples, vocab_size]  # fmt: skip
        """Compute one step's tokens, [num_tokens], of all requests in one row; logits of `sample_tokens` only."""
        at = {id(r): r.at(positions).spread_out() for r in self.rotations if r is not None}
        rotations = [None if r is None else at[id(r)] for r in self.rotations]
        decode = decode_step(batch, caches[0][0], rotations)
        step = PagedStep(batch, caches, rotations, connector, *self._pruned(token_ids, sample_tokens), decode)
        with torch.cuda.device_of(token_ids):  # where Triton launches; a CPU changes nothing
            return run_step(self.network, token_ids, positions, step, sample_tokens)

    def _pruned(self, token_ids: Tensor, sample_tokens: Tensor) -> tuple[Tensor | None, int | None]:
        """The samples and the layer that computes these alone, where that leaves out enough tokens to pay."""
        carrier = self.network.kvstore_carrier
        layer = carrier.pruned_layer
        if not len(sample_tokens) and carrier.lean is None:  # a network's own forward may not like an empty input
            return None, None
        if layer is None or len(token_ids) - len(sample_tokens) < MIN_PRUNED_TOKENS:
            return None, None
        return sample_tokens, layer
