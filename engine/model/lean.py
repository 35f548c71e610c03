"""Decoder layers on a CPU in few operations: residual sums and gates are computed inside the products.

A step of few rows takes two calls of C around its attention if possible (`kvstore.kernels.cpu.layer`); so does any
step on a CPU that has vectors of bfloat16 but no tiles. Otherwise oneDNN computes all products.

Recognises the plain layer (norm, attention, sum, norm, gated MLP, sum) by its parts, and takes it over only if it then
computes the same from the same input. Every other layer stays as its authors wrote it. Figures: bench/LOG.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvstore.engine.model.packing import FusedRMSNorm, PackedLinear, ProjectionSlice, are_close
from kvstore.kernels.cpu.attention import knows
from kvstore.kernels.cpu.layer import NativeLayer, max_rows, native_layer
from kvstore.kernels.paged_batch import Scoring

_ULPS = 24  # a layer may differ by so many roundings of a row's largest value: sums and gates round less often here
_ULPS_ADDED = 12  # and on the whole by so many of what it adds to its input, and one of the result
MANY_ROWS = 1 << 20  # more than any step has
PIECE_TOKENS = 256  # of a prefill at a time: intermediate results then stay in cache, and long products are slow
_ACTIVATIONS = {"SiLUActivation": ("swish", ""), "SiLU": ("swish", ""), "GELUTanh": ("gelu", "tanh")}


class LeanMLP:
    """down(act(gate(x)) * up(x)) + residual in three products."""

    def __init__(self, mlp: nn.Module, activation: tuple[str, str]) -> None:
        self._gate, self._up, self._down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.products = self._gate.native, self._up.native, self._down.native
        self.is_gelu = activation[0] == "gelu"
        self._activation, self._algorithm = activation
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_with = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        gate = self._linear(x, self._gate.packed, self._gate.bias, self._activation, [], self._algorithm)
        hidden = self._linear_with(x, gate, self._up.packed, self._up.bias, "mul")
        return self._linear_with(hidden, residual, self._down.packed, self._down.bias, "add")


class LeanLayer:
    """The forward of one decoder layer, made from what the layer's own forward was observed to pass to its attention.

    carrier: brings the step. A model's last layer returns only the rows of `step.sample_rows`, if they are set.
    """

    def __init__(self, layer: nn.Module, carrier: Any, shapes: tuple[int, int, int], scoring: Scoring) -> None:
        attention = layer.self_attn
        self.layer_idx: int = attention.layer_idx
        self.kv_layer: int = attention.kvstore_layer
        self._carrier = carrier
        num_heads, num_kv_heads, head_dim = shapes
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self._heads = (-1, sum(self._split), head_dim)
        self._scoring = scoring
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = _head_norms(attention, head_dim)
        self._projection: PackedLinear = attention.q_proj.shared.linear
        self._out: PackedLinear = attention.o_proj
        self._linear_with = torch.ops.mkldnn._linear_pointwise.binary
        mlp = _lean_mlp(layer.mlp)
        self._mlp: Callable[[Tensor, Tensor], Tensor] = mlp or (lambda x, residual: layer.mlp(x).add_(residual))
        self.native: NativeLayer | None = None
        if mlp is not None:
            products = (self._projection.native, self._out.native, *mlp.products)
            self.native = native_layer([norm.native for norm in self._norms], products, mlp.is_gelu)

    @property
    def attends_natively(self) -> bool:
        return knows(self._scoring, self._heads[2])

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # [1, num_tokens, hidden_size]
        step, native = self._carrier.step, self.native
        if native is not None and not native.takes(hidden_states):
            native = None
        if native is not None:
            projected = native.before_attention(hidden_states)
        else:
            projected = self._projection(self._norms[0](hidden_states))
        query, key, value = projected.view(self._heads).split(self._split, 1)
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        attended = step.attend(self.kv_layer, query, key, value, self._scoring)
        if attended.shape[0] != hidden_states.shape[1]:  # the last layer, which returns only the samples
            hidden_states = hidden_states[:, step.sample_rows]
        if not len(attended):
            return hidden_states
        attended = attended.reshape(1, attended.shape[0], -1)
        if self.native is not None and self.native.takes(hidden_states):
            return self.native.after_attention(attended.contiguous(), hidden_states)
        if hidden_states.shape[1] <= PIECE_TOKENS:
            return self._after(attended, hidden_states)
        pieces = zip(attended.split(PIECE_TOKENS, 1), hidden_states.split(PIECE_TOKENS, 1), strict=True)
        return torch.cat([self._after(*piece) for piece in pieces], 1)

    def _after(self, attended: Tensor, residual: Tensor) -> Tensor:
        """What follows the attention, for some tokens: projection, norm and MLP with their sums."""
        x = self._linear_with(attended, residual, self._out.packed, self._out.bias, "add")
        return self._mlp(self._norms[1](x), x)


def _lean_mlp(mlp: nn.Module) -> LeanMLP | None:
    activation = _ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    linears = [mlp._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if activation is None or not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    return LeanMLP(mlp, activation)


def _head_norms(attention: nn.Module, head_dim: int) -> tuple[nn.Module, nn.Module] | None:
    norms = attention._modules.get("q_norm"), attention._modules.get("k_norm")
    if any(norm is None or norm.weight.shape != (head_dim,) for norm in norms):
        return None
    return norms


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer has the parts that a lean layer needs."""
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if layer._modules.keys() != parts:
        return False
    attention = layer._modules["self_attn"]
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    return (
        attention is not None
        and attention._modules.keys() <= known
        and isinstance(attention._modules.get("q_proj"), ProjectionSlice)
        and isinstance(attention._modules.get("o_proj"), PackedLinear)
        and all(isinstance(layer._modules[name], FusedRMSNorm) for name in parts if name.endswith("layernorm"))
    )


class _Trial:
    """An attention step that mixes all its inputs into its result and remembers them, if keys and values are alike."""

    sample_rows = None

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor, Scoring]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if key.shape != value.shape:
            return query.new_zeros(*query.shape[:2], value.shape[2])
        self.seen.append((query, key, value, scoring))
        group = query.shape[1] // key.shape[1]
        mixed = key.repeat_interleave(group, 1) * 0.5 + value.repeat_interleave(group, 1)
        return (query * 0.25 + mixed).contiguous()


class _Witness:
    """Replaces a layer's forward for one pass: returns what that computes, and tries the lean one beside it."""

    def __init__(self, layer: nn.Module, carrier: Any) -> None:
        self.layer, self.carrier = layer, carrier
        self.forward: Callable[..., Tensor] = layer.forward
        self.lean: LeanLayer | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = _Trial()
        self.carrier.step = own
        expected = self.forward(hidden_states, *args, **kwargs)
        if isinstance(expected, Tensor) and len(own.seen) == 1:
            self.lean = self._tried(hidden_states, expected, own)
        return expected

    def _tried(self, hidden_states: Tensor, expected: Tensor, own: _Trial) -> LeanLayer | None:
        query, key, _, scoring = own.seen[0]
        shapes = (query.shape[1], key.shape[1], key.shape[2])
        candidate = LeanLayer(self.layer, self.carrier, shapes, scoring)
        native, candidate.native = candidate.native, None
        trial = _Trial()
        self.carrier.step = trial
        try:
            found = candidate(hidden_states)
        except (RuntimeError, TypeError, AttributeError):
            return None
        pairs = zip((expected, *own.seen[0][:3]), (found, *trial.seen[0][:3]), strict=True)
        if not all(are_close(a, b, _ULPS) for a, b in pairs) or not _adds_the_same(hidden_states, expected, found):
            return None
        candidate.native = native
        if native is not None and not self._agrees(candidate, hidden_states[:, : max_rows()], found):
            candidate.native = None
        return candidate

    def _agrees(self, candidate: LeanLayer, hidden_states: Tensor, expected: Tensor) -> bool:
        """Whether a few rows give the same results alone as among all."""
        trial = _Trial()
        self.carrier.step = trial
        return are_close(expected[:, : hidden_states.shape[1]], candidate(hidden_states), _ULPS)


def _adds_the_same(before: Tensor, expected: Tensor, found: Tensor) -> bool:
    """A row's largest value is no measure of what a layer adds, which may be little beside it."""
    eps, result = torch.finfo(found.dtype).eps, expected.float()
    added = (result - before.float()).norm()
    return bool((result - found.float()).norm() <= (_ULPS_ADDED * added + result.norm()) * eps)


def lean_layers(network: Any, run: Callable[[], Tensor]) -> None:
    """Take over the plain layers. Call it after `kvstore.engine.model.packing.pack`.

    run: runs the intercepted network over a few tokens and returns logits. Its attention is replaced while the layers
    are tried.
    """
    carrier = network.kvstore_carrier
    found = [layer for layer in network.modules() if _is_plain(layer)]
    witnesses = [_Witness(layer, carrier) for layer in found]
    for layer, witness in zip(found, witnesses, strict=True):
        layer.__dict__["forward"] = witness
    try:
        run()
    finally:
        for layer in found:
            del layer.__dict__["forward"]
    lean = [witness.lean for witness in witnesses if witness.lean is not None]
    for witness in witnesses:
        if witness.lean is not None:
            witness.layer.__dict__["forward"] = witness.lean
    last = network.config.get_text_config().num_hidden_layers - 1
    if lean and lean[-1].layer_idx == last:
        carrier.pruned_layer = lean[-1].kv_layer
    if [layer.layer_idx for layer in lean] == list(range(last + 1)):
        carrier.lean = _whole(network, lean, run)


class LeanNetwork:
    """Runs embedding, lean layers, norm and head, without the many checks of the network's own forward."""

    def __init__(self, network: Any, layers: Sequence[LeanLayer]) -> None:
        self._embed = network.get_input_embeddings()
        self._layers = layers
        self._norm = network.base_model.norm
        self._head = network.get_output_embeddings()

    @property
    def is_native(self) -> bool:
        """Whether C computes all products, for any number of rows, and the attention."""
        native = [*(layer.native for layer in self._layers), getattr(self._head, "native", None)]
        return None not in native and max_rows() >= MANY_ROWS and all(layer.attends_natively for layer in self._layers)

    def __call__(self, token_ids: Tensor, sample_tokens: Tensor) -> Tensor:  # [num_samples, vocab_size]
        """token_ids: [num_tokens]; sample_tokens: those whose logits are wanted. The last layer may skip others."""
        x = self._embed(token_ids).unsqueeze(0)
        for layer in self._layers:
            x = layer(x)
        if x.shape[1] != len(sample_tokens):
            x = x[:, sample_tokens]
        if not x.shape[1]:
            return x.new_empty(0, len(self._embed.weight))
        return self._head(self._norm(x))[0]


def _whole(network: Any, layers: Sequence[LeanLayer], run: Callable[[], Tensor]) -> LeanNetwork | None:
    """The lean network, if its logits equal those of the network bit for bit. By now both have the same layers."""
    if not isinstance(getattr(network.base_model, "norm", None), FusedRMSNorm):
        return None
    expected = run()
    network.kvstore_carrier.lean = LeanNetwork(network, layers)
    try:
        found = run()
    except (RuntimeError, TypeError, AttributeError):
        return None
    finally:
        lean, network.kvstore_carrier.lean = network.kvstore_carrier.lean, None
    return lean if torch.equal(expected, found) else None
