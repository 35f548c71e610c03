"""Interception of a loaded model, and the probe that refuses it if its attention is not what we expect.

Everything is observed, nothing is looked up by architecture: with an attention that returns zeros, hidden states do not
depend on queries and keys, so the difference that one source of cos and sin makes to a layer's keys is its rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvstore.connector import NullConnector
from kvstore.engine.model.interception import (
    ATTENTION,
    ModelSpec,
    PositionFreeModel,
    RotaryTap,
    StepCarrier,
    run_step,
)
from kvstore.engine.model.lean import lean_layers
from kvstore.engine.model.packing import pack as pack_modules
from kvstore.engine.model.parallel.group import Group, Part
from kvstore.engine.model.parallel.stages import Pipeline, own_layers
from kvstore.errors import UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.rope.rotary import Rotation, Style, TableLayout, match_rotation

_NUM_TOKENS = 40
_GROUPED_BYTES = 16  # torch's grouped products, which compute experts by default, take only rows of whole ones
_CHUNKS = (17, 22, 1)
_TOLERANCE = {torch.float32: 1e-3}  # relative error of the logits; 16-bit models get the coarser one below
_TOLERANCE_16_BIT = 0.15


class Recorder:
    """An attention step that keeps each layer's raw query and key and attends to nothing."""

    sample_rows = None

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if layer in self.keys:
            raise UnsupportedModelError(f"layer {layer} attends twice in one forward pass")
        self.queries[layer], self.keys[layer], self.values[layer] = query.clone(), key.clone(), value
        self.windows[layer] = scoring.window
        return torch.zeros_like(query)


def intercept(network: Any, max_model_len: int, pack: bool = False, part: Part | None = None) -> PositionFreeModel:
    """Replace attention and rotation of `network`, in place, and check that its logits stay what they were.

    pack: also replace modules by faster ones (see `kvstore.engine.model.packing`), and check again. part: the part
    of the model that the network is, None for all of it; all ranks call this. Raises UnsupportedModelError if no
    rotation is found, if keys depend on position in another way, if layers have state that is not KV or KV of different
    shapes, or if the logits differ.
    """
    name = type(network).__name__
    try:
        modules = [m for m in network.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        if not modules:
            raise UnsupportedModelError("it has no rotary position embedding")
        with torch.inference_mode():
            taps = [RotaryTap(module, max_model_len) for module in modules]
            return _intercept(network, taps, max_model_len, pack, part or Part())
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} cannot be served: its forward is not a decoder's: {error}") from error


def _intercept(network: Any, taps: list[RotaryTap], max_model_len: int, pack: bool, part: Part) -> PositionFreeModel:
    vocab_size = network.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(_NUM_TOKENS, max_model_len)
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator).to(network.device)
    positions = torch.arange(num_tokens, device=network.device)
    pipeline = None if part.pipe is None else Pipeline(network, part.pipe)
    experts = (weight for weight in network.parameters() if weight.dim() == 3)  # [num_experts, width, width]
    if any(width * weight.itemsize % _GROUPED_BYTES for weight in experts for width in weight.shape[1:]):
        network.set_experts_implementation("eager")
    if pipeline is not None:
        expected = pipeline.first(token_ids, positions)
    else:
        expected = network(input_ids=token_ids[None], position_ids=positions[None], use_cache=False).logits[0]

    network.set_attn_implementation(ATTENTION)
    StepCarrier(network, part, pipeline)
    for tap in taps:
        tap.revealed = None
    plain = _record(network, token_ids, positions)
    spec = _spec(network, plain, vocab_size, max_model_len, part)
    _check_positions(network, token_ids, positions, plain, max_model_len)
    kinds = _observe_rotations(network, taps, token_ids, plain, spec)
    if part.pipe is not None:
        kinds = part.pipe.sum(kinds)
    rotations = _rotations_of(kinds, taps)
    model = PositionFreeModel(network, spec, rotations)
    _check_logits(model, token_ids, expected)
    if pack:
        is_cpu = _is_on_cpu(network)
        pack_modules(network, is_cpu)
        if pipeline is not None:
            pipeline.assemble()
        if is_cpu and part.group is None:  # a lean layer adds its input to a product that ranks would have to sum first
            lean_layers(network, lambda: run_step(network, token_ids, positions, Recorder(), positions, alone=True))
        _check_logits(model, token_ids, expected)
        _check_pruning(model, token_ids, expected)
    return model


def _is_on_cpu(network: Any) -> bool:
    return network.device.type == "cpu"


def _record(network: Any, token_ids: Tensor, positions: Tensor) -> Recorder:
    recorder = Recorder()
    run_step(network, token_ids, positions, recorder, torch.zeros_like(positions[:1]), alone=True)
    return recorder


def _spec(network: Any, recorder: Recorder, vocab_size: int, max_model_len: int, part: Part) -> ModelSpec:
    config = network.config.get_text_config()
    num_layers, num_parts = config.num_hidden_layers, 1 if part.group is None else part.group.size
    own = None if part.pipe is None else own_layers(num_layers, part.pipe)
    layers = own or range(num_layers)
    if sorted(recorder.keys) != list(layers):
        raise UnsupportedModelError(
            f"{len(recorder.keys)} of its {len(layers)} layers have attention; the others' state is not KV"
        )
    shapes = {tuple(t.shape[1:]) for part in (recorder.keys, recorder.values) for t in part.values()}
    if len(shapes) != 1:
        raise UnsupportedModelError(f"its layers have keys and values of different shapes: {sorted(shapes)}")
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    for layer in layers:
        kind = types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer {layer} has {kind}, which is not served")
        if kind == "sliding_attention" and recorder.windows[layer] is None:
            raise UnsupportedModelError(f"layer {layer} has a sliding window that it does not tell its attention")
    ((num_own_heads, head_dim),) = shapes
    num_kv_heads = num_own_heads * num_parts
    if num_parts > 1 and recorder.queries[layers[0]].shape[1] * num_parts != config.num_attention_heads:
        raise UnsupportedModelError("its plan of tensor parallelism does not divide its attention heads")
    dtype = recorder.keys[layers[0]].dtype
    if part.pipe is not None:
        _check_same(part.pipe, (num_kv_heads, head_dim, dtype.itemsize))
    return ModelSpec(num_layers, num_kv_heads, head_dim, dtype, vocab_size, max_model_len, num_parts, own)


def _check_same(pipe: Group, shape: tuple[int, ...]) -> None:
    """Check that all stages have keys and values of one shape."""
    shapes = pipe.gather(torch.tensor([shape]).T)
    if not torch.equal(shapes, shapes[:, :1].expand_as(shapes)):
        raise UnsupportedModelError(f"its layers have keys and values of different shapes: {shapes.T.tolist()}")


def _check_positions(network: Any, token_ids: Tensor, positions: Tensor, plain: Recorder, max_model_len: int) -> None:
    """Raw keys must not change when all positions move."""
    moved = _record(network, token_ids, positions.flip(0) if len(positions) == max_model_len else positions + 1)
    for layer, key in plain.keys.items():
        if not key.isfinite().all():
            why = "its weights are damaged, or the dtype is too small for them"
            raise UnsupportedModelError(f"keys of layer {layer} are no finite numbers: {why}")
        if not torch.equal(moved.keys[layer], key):
            raise UnsupportedModelError(f"keys of layer {layer} depend on position beside their rotation")


def _observe_rotations(
    network: Any, taps: list[RotaryTap], token_ids: Tensor, plain: Recorder, spec: ModelSpec
) -> Tensor:  # [num_layers, 5]
    """The rotation that the model applies in each layer, found by revealing one source of cos and sin at a time.

    As numbers: its tap, counted from 1, its source, layout and style, and whether it is computed in float32. Zeros for
    a layer that does not rotate, or that another rank has.
    """
    found = torch.zeros(spec.num_layers, 5, dtype=torch.int64)
    positions = torch.linspace(0, spec.max_model_len - 1, len(token_ids), device=token_ids.device).long()
    for number, tap in enumerate(taps, start=1):
        for index, source in enumerate(list(tap.tables)):
            tap.revealed = source
            shown = _record(network, token_ids, positions)
            tap.revealed = None
            cos, sin = tap.tables[source]
            for layer, key in plain.keys.items():
                if torch.equal(shown.keys[layer], key):
                    continue
                match = match_rotation(key, shown.keys[layer], cos[positions], sin[positions])
                query = plain.queries[layer]
                is_same = match is not None and torch.equal(match.apply(query), shown.queries[layer])
                if match is None or found[layer, 0] or not is_same:
                    raise UnsupportedModelError(f"the rotation of layer {layer} is of a kind that is not known here")
                numbers = list(TableLayout).index(match.layout), list(Style).index(match.style)
                found[layer] = torch.tensor([number, index, *numbers, match.upcast])
    return found


def _rotations_of(found: Tensor, taps: list[RotaryTap]) -> list[Rotation | None]:
    """The rotation of every layer. Layers that rotate alike share the object."""
    made: dict[tuple[int, ...], Rotation | None] = {}
    for kind in map(tuple, found.tolist()):
        number, source, layout, style, upcast = kind
        if kind not in made and number:
            cos, sin = list(taps[number - 1].tables.values())[source]
            own_layout = list(TableLayout)[layout]
            made[kind] = Rotation(
                own_layout.pick(cos), own_layout.pick(sin), list(Style)[style], bool(upcast), own_layout
            )
    if not made:
        raise UnsupportedModelError("its rotary embedding does not reach any layer's keys")
    return [made.get(kind) for kind in map(tuple, found.tolist())]


def _check_pruning(model: PositionFreeModel, token_ids: Tensor, expected: Tensor) -> None:
    """Check the logits of a last layer that computes only the samples; if they are wrong, it computes all tokens."""
    carrier = model.network.kvstore_carrier
    if carrier.pruned_layer is not None or carrier.pipeline is not None:  # in a pipeline, all stages try
        try:
            _check_logits(model, token_ids, expected, last_only=True)
        except UnsupportedModelError:
            carrier.pruned_layer = None


def _check_logits(model: PositionFreeModel, token_ids: Tensor, expected: Tensor, last_only: bool = False) -> None:
    """Check that the paged cache, in chunks and one decode step, gives the logits of the untouched model.

    last_only: only the last token of each chunk is sampled, as in a prefill.
    """
    block_size, count, start, logits, ends = 16, len(token_ids), 0, [], list[int]()
    num_blocks = -(-count // block_size)
    caches = model.new_caches(num_blocks, block_size)
    for chunk in _CHUNKS:
        end = min(start + chunk, count)
        if end == start:
            break
        positions = torch.arange(start, end, device=token_ids.device)
        table = torch.arange(num_blocks).unsqueeze(0)
        batch = PagedBatch([0, end - start], [end], table, positions, block_size)
        asked = torch.arange(end - start, device=token_ids.device)[-1 if last_only else 0 :]
        logits.append(model.forward(token_ids[start:end], positions, batch, caches, NullConnector(), asked))
        ends.extend((asked + start).tolist())
        start = end
    got, want = torch.cat(logits).float(), expected[ends].float()
    error = float((got - want).norm() / want.norm().clamp_min(1e-9))
    if not error <= _TOLERANCE.get(model.spec.dtype, _TOLERANCE_16_BIT):
        raise UnsupportedModelError(f"through paged attention its logits differ by {error:.2g} of their size")
