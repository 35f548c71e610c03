"""Interception of a loaded model, and the probe that refuses it if its attention is not what we expect.

Everything is observed, nothing is looked up by architecture: with an attention that returns zeros, hidden states do not
depend on queries and keys, so the difference that one source of cos and sin makes to a layer's keys is its rotation.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
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
from kvstore.engine.model.packing import are_close
from kvstore.engine.model.packing import pack as pack_modules
from kvstore.engine.model.parallel.cutting import WHOLE_LAYERS
from kvstore.engine.model.parallel.group import Group, Part
from kvstore.engine.model.parallel.stages import ONE_STAGE, Pipeline, own_layers
from kvstore.engine.model.states import Chunk, StateMixer, StatePool, StepStates, observe_states
from kvstore.errors import UnsupportedModelError
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.memory.layout import LayerShape
from kvstore.rope.rotary import Rotation, Style, TableLayout, match_rotation

_NUM_TOKENS = 40
_GROUPED_BYTES = 16  # torch's grouped products, which compute experts by default, take only rows of whole ones
_CHUNKS = (17, 22, 1)
_TOLERANCE = {torch.float32: 1e-3}  # relative error of the logits; 16-bit models get the coarser one below
_TOLERANCE_16_BIT = 0.15
_MOST_16_BIT = 0.7  # where rounding alone changes logits by as much; those of another model differ by more than 1


class Recorder:
    """An attention step that keeps each layer's raw query and key and attends to nothing."""

    sample_rows = None

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        self.counts: dict[int, int] = {}  # how often a layer attended
        self.owners: dict[int, int] = {}  # the first layer with the same keys and values, mostly the layer itself
        self._given: dict[int, tuple[tuple[Tensor, Tensor], tuple[int, int]]] = {}  # kept, so that no memory is reused

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.counts[layer] = self.counts.get(layer, 0) + 1
        place = key.data_ptr(), value.data_ptr()
        self.owners[layer] = next((other for other, (_, at) in self._given.items() if at == place), layer)
        self._given[layer] = (key, value), place
        self.queries[layer], self.keys[layer], self.values[layer] = query.clone(), key.clone(), value
        self.windows[layer] = scoring.window
        return query.new_zeros(*query.shape[:2], value.shape[2])


def intercept(network: Any, max_model_len: int, pack: bool = False, part: Part | None = None) -> PositionFreeModel:
    """Replace attention and rotation of `network`, in place, and check that its logits stay what they were.

    pack: also replace modules by faster ones (see `kvstore.engine.model.packing`), and check again. part: the part
    of the model that the network is, None for all of it; all ranks call this. Raises UnsupportedModelError if no
    rotation is found, if keys depend on position in another way, if layers have state that is not KV, or if the logits
    differ.
    """
    name = type(network).__name__
    try:
        modules = [m for m in network.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        with torch.inference_mode():
            taps = [RotaryTap(module, max_model_len) for module in modules]
            return _intercept(network, taps, max_model_len, pack, part or Part())
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of its own code, which may expect anything
        raise UnsupportedModelError(f"{name} cannot be served: its forward is not a decoder's: {error}") from error


def _intercept(network: Any, taps: list[RotaryTap], max_model_len: int, pack: bool, part: Part) -> PositionFreeModel:
    if "chunked_attention" in (getattr(network.config.get_text_config(), "layer_types", None) or ()):
        raise UnsupportedModelError("its layers attend within chunks of the context, which is not served")
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
    states = None if pipeline is not None else observe_states(network, token_ids, positions)

    network.set_attn_implementation(ATTENTION)
    carrier = StepCarrier(network, part, pipeline)
    for tap in taps:
        tap.revealed = None
    plain = _record(network, token_ids, positions)
    spec = _spec(network, plain, vocab_size, max_model_len, part)
    # From the window's end down to its beginning: all positions move, also where there are no more than tokens.
    far = torch.linspace(max_model_len - 1, 0, len(token_ids), device=token_ids.device).long()
    moved = _record(network, token_ids, far)
    moves_queries = _check_positions(plain, moved, bool(taps))
    kinds = _observe_rotations(network, taps, token_ids, far, moved)
    if part.pipe is not None:
        kinds = part.pipe.sum(kinds)
    else:
        kinds = kinds[sorted(set(plain.owners.values()))]
        carrier.number_layers(network, plain.owners)
    rotations = _rotations_of(kinds, taps)
    if states is not None:
        state, mixers = states
        spec = replace(spec, state=state, windows=())  # one kind of state behind a block
        for layer, module in mixers.items():
            module.__dict__["forward"] = StateMixer(module, carrier, layer, network.config.num_hidden_layers)
    model = PositionFreeModel(network, spec, rotations)
    _check_logits(model, token_ids, expected)
    if pack:
        is_cpu = _is_on_cpu(network)
        pack_modules(network, is_cpu)
        if pipeline is not None:
            pipeline.assemble()
        if is_cpu and states is not None:
            pool, x = StatePool(states[0], 2, network.device), network.get_input_embeddings()(token_ids[None])
            for module in states[1].values():
                module.forward.use_kernels(pool, x)
        # A lean layer knows no positions, and adds its input to a product that ranks would have to sum first.
        if is_cpu and part.group is None and not moves_queries:
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
    if not recorder.keys:
        raise UnsupportedModelError("its attention does not go through transformers' interface, and cannot be replaced")
    if part.pipe is not None and sorted(recorder.keys) != list(layers):
        raise UnsupportedModelError("not every layer has attention of its own", ONE_STAGE)
    if max(recorder.counts.values()) > 1:
        raise UnsupportedModelError("a layer attends twice in one forward pass")
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    for layer in recorder.keys:
        kind = types[layer]
        if "sliding" in kind and recorder.windows[layer] is None:
            raise UnsupportedModelError(f"layer {layer} has a sliding window that it does not tell its attention")
    first = min(recorder.keys)
    if num_parts > 1 and recorder.queries[first].shape[1] * num_parts != config.num_attention_heads:
        raise UnsupportedModelError("its plan of tensor parallelism does not divide its attention heads")
    owners, dtype = sorted(set(recorder.owners.values())), recorder.keys[first].dtype
    shapes = [_shape_of(recorder.keys[owner], recorder.values[owner], num_parts) for owner in owners]
    if part.group is not None or part.pipe is not None:
        _check_alike(shapes, part.pipe)
        shapes = shapes[:1] * (len(shapes) if part.pipe is None else num_layers)
    windows = _windows_of(recorder, max_model_len)
    if part.pipe is not None:
        windows = _windows_of_all(windows, layers, num_layers, part, part.pipe)
    return ModelSpec(tuple(shapes), dtype, vocab_size, max_model_len, num_parts, own, None, windows)


def _windows_of(recorder: Recorder, max_model_len: int) -> tuple[int | None, ...]:
    """The window of each layer that owns KV; empty if all of them have one, or none."""
    windows: dict[int, int | None] = {}
    for layer, owner in sorted(recorder.owners.items()):
        own, seen = recorder.windows[layer], windows.get(owner, 1)
        wide = own is None or seen is None or own >= max_model_len
        windows[owner] = None if wide else max(own, seen)  # type: ignore[type-var]
    found = tuple(windows[owner] for owner in sorted(windows))
    return found if None in found and any(found) else ()


def _windows_of_all(
    own: tuple[int | None, ...], layers: range, num_layers: int, part: Part, pipe: Group
) -> tuple[int | None, ...]:
    """The windows of the layers of all stages. own: what `_windows_of` finds in this one. Empty if it finds
    none in one of them.
    """
    if not part.least(len(own)):
        return ()
    found = torch.zeros(num_layers, dtype=torch.int64)
    found[layers.start : layers.stop] = torch.tensor([window or 0 for window in own])
    return tuple(window or None for window in pipe.sum(found).tolist())


def _shape_of(key: Tensor, value: Tensor, num_parts: int) -> LayerShape:
    return LayerShape(key.shape[1] * num_parts, key.shape[2], value.shape[2])


def _check_alike(shapes: list[LayerShape], pipe: Group | None) -> None:
    """Check that the keys and values of all layers, also of other stages, have one shape: ranks have a part of each
    block.
    """
    first, is_alike = shapes[0], len(set(shapes)) == 1 and shapes[0].key_dim == shapes[0].value_dim
    if is_alike and pipe is not None:
        of_all = pipe.gather(torch.tensor([[first.num_kv_heads, first.key_dim]]).T)
        is_alike = torch.equal(of_all, of_all[:, :1].expand_as(of_all))
    if not is_alike:
        raise UnsupportedModelError(
            "its keys and values, or those of its layers, have different shapes", WHOLE_LAYERS | ONE_STAGE
        )


def _check_positions(plain: Recorder, moved: Recorder, rotates: bool) -> bool:
    """Raw keys must not change when all positions move. Returns whether queries do, as those of Ministral 3."""
    for layer, key in plain.keys.items():
        if not key.isfinite().all():
            why = "its weights are damaged, or the dtype is too small for them"
            raise UnsupportedModelError(f"keys of layer {layer} are no finite numbers: {why}")
        if not torch.equal(moved.keys[layer], key):
            beside = "beside their rotation" if rotates else "and it has no rotary position embedding"
            raise UnsupportedModelError(f"keys of layer {layer} depend on position {beside}")
    return any(not torch.equal(moved.queries[layer], query) for layer, query in plain.queries.items())


def _observe_rotations(
    network: Any, taps: list[RotaryTap], token_ids: Tensor, positions: Tensor, plain: Recorder
) -> Tensor:  # [num_hidden_layers, 5]
    """The rotation that the model applies in each layer, found by revealing one source of cos and sin at a time.

    As numbers: its tap, counted from 1, its source, layout and style, and whether it is computed in float32. Zeros for
    a layer that does not rotate, or that another rank has.
    """
    found = torch.zeros(network.config.get_text_config().num_hidden_layers, 5, dtype=torch.int64)
    for number, tap in enumerate(taps, start=1):
        for index, source in enumerate(tap.sources):
            tap.revealed = source
            shown = _record(network, token_ids, positions)
            tap.revealed = None
            cos, sin = tap.tables[source]
            for layer, key in plain.keys.items():
                if torch.equal(shown.keys[layer], key):
                    continue
                match = match_rotation(key, shown.keys[layer], cos[positions], sin[positions])
                query = plain.queries[layer]
                is_same = match is not None and are_close(shown.queries[layer], match.apply(query), ulps=4)
                if match is None or found[layer, 0] or not is_same:
                    tap.tables[source], tap.revealed = (2 * cos, 2 * sin), source
                    doubled = _record(network, token_ids, positions).keys[layer]
                    is_normed = torch.allclose(doubled, shown.keys[layer], rtol=0.02, atol=1e-3)  # which has undone it
                    why = "a norm follows it" if is_normed else "it is of a kind that is not known here"
                    raise UnsupportedModelError(f"the keys of layer {layer} cannot be told from their rotation: {why}")
                numbers = list(TableLayout).index(match.layout), list(Style).index(match.style)
                found[layer] = torch.tensor([number, index, *numbers, match.upcast])
    return found


def _rotations_of(found: Tensor, taps: list[RotaryTap]) -> list[Rotation | None]:
    """The rotation of every layer. Layers that rotate alike share the object."""
    made: dict[tuple[int, ...], Rotation | None] = {}
    for kind in map(tuple, found.tolist()):
        number, source, layout, style, upcast = kind
        if kind not in made and number:
            tap = taps[number - 1]
            cos, sin = tap.tables[tap.sources[source]]
            own_layout = list(TableLayout)[layout]
            made[kind] = Rotation(
                own_layout.pick(cos), own_layout.pick(sin), list(Style)[style], bool(upcast), own_layout
            )
    if taps and not made:
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
    got, ends = _paged_logits(model, token_ids, last_only)
    error = _relative_error(got, expected[ends])
    most = _TOLERANCE.get(model.spec.dtype, _TOLERANCE_16_BIT)
    if error > most and model.spec.dtype not in _TOLERANCE:
        most = max(most, min(2 * _sensitivity(model, token_ids, last_only, got), _MOST_16_BIT))
    if not error <= most:
        how = "computed in pieces, with its states" if model.spec.state is not None else "through paged attention"
        raise UnsupportedModelError(f"{how} its logits differ by {error:.2g} of their size")


def _sensitivity(model: PositionFreeModel, token_ids: Tensor, last_only: bool, logits: Tensor) -> float:
    """How much the logits change if each number of the embeddings may be the next one of its type: a router of experts
    that are nearly as good chooses others then. All layers round, so twice as much is nothing that tells models apart.
    """

    def rounded(_: object, __: object, embedded: Tensor) -> Tensor:
        steps = torch.randint(-1, 2, embedded.shape, generator=torch.Generator().manual_seed(0))
        return embedded * (1 + steps.to(embedded) * torch.finfo(embedded.dtype).eps)

    hook = model.network.get_input_embeddings().register_forward_hook(rounded)
    try:
        return _relative_error(_paged_logits(model, token_ids, last_only)[0], logits)
    finally:
        hook.remove()


def _relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9))


def _paged_logits(model: PositionFreeModel, token_ids: Tensor, last_only: bool) -> tuple[Tensor, list[int]]:
    """Logits through the paged cache, and of which tokens; see `_check_logits`."""
    block_size, count, start, logits, ends = 16, len(token_ids), 0, [], list[int]()
    num_blocks, num_requests = -(-count // block_size), 1 if model.spec.state is None else 2  # states: in a batch, too
    caches, device = model.new_caches(num_requests * num_blocks, block_size), token_ids.device
    table = torch.arange(num_requests * num_blocks).view(num_requests, num_blocks)
    pool = None if model.spec.state is None else StatePool(model.spec.state, num_requests, model.device)
    for chunk in _CHUNKS:
        end = min(start + chunk, count)
        if end == start:
            break
        starts = [(end - start) * request for request in range(num_requests + 1)]
        slots = torch.cat([torch.arange(start, end) + row[0] * block_size for row in table.tolist()]).to(device)
        batch = PagedBatch(starts, [end] * num_requests, table, slots, block_size)
        asked = torch.arange(end - start)[-1 if last_only else 0 :]
        rows = torch.cat([asked + first for first in starts[:-1]]).to(device)
        chunks = [Chunk(*pair, slot, not start) for slot, pair in enumerate(itertools.pairwise(starts))]
        states = None if pool is None else StepStates(pool, chunks)
        own, positions = token_ids[start:end].repeat(num_requests), torch.arange(start, end, device=device)
        places = positions.repeat(num_requests)
        logits.append(model.forward(own, places, batch, caches, NullConnector(), rows, states))
        ends.extend((asked + start).tolist() * num_requests)
        start = end
    return torch.cat(logits), ends
