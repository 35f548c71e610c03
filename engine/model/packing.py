"""Makes the eager forward of a Hugging Face model faster by replacing modules in place; knows no architecture.

`pack` packs linear weights for oneDNN (on a CPU), joins q, k and v, and makes one pass of an RMS norm. A module that
cannot be replaced exactly (to rounding) is left as it is. Figures: bench/LOG.md.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvstore.kernels.cpu.layer import NativeRMSNorm, native_product, native_rms_norm

# Below this many elements a float32 weight stays in cache and MKL's gemv beats oneDNN's call overhead.
MIN_FLOAT32_ELEMENTS = 256 * 1024
MIN_BFLOAT16_ELEMENTS = 4 * 1024


class PackedLinear(nn.Module):
    """`nn.Linear` over a weight in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # No batch size hint: on bf16 it changes nothing, on float32 a hint of 1 makes 8 rows 1.5 times slower.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = None if bias is None else bias.detach()
        self.native = native_product(self.packed, weight.detach(), self.bias)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> Tensor:
        """An unpacked copy, for code that looks at a layer's weight; not for a hot path."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if self.native is not None:
            product = self.native(x)
            if product is not None:
                return product
        return self._linear(x, self.packed, self.bias, "none", [], "")

    __call__ = forward  # No hooks on these: nn.Module's dispatch costs a microsecond per call.


class SharedProjection:
    """Computes q, k and v in one product when asked for q; returns k and v when asked with the same input tensor.

    Between the calls of one attention forward it holds the input and the parts that were not fetched yet.
    """

    def __init__(self, linears: list[nn.Linear], make: Callable[[Tensor, Tensor | None], Any]) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.linear = make(weight, torch.cat(biases) if biases else None)
        self.sizes = [linear.out_features for linear in linears]
        self._source: Tensor | None = None
        self._pending: dict[int, Tensor] = {}

    def project(self, x: Tensor, index: int) -> Tensor:
        if x is self._source and index in self._pending:
            part = self._pending.pop(index)
            if not self._pending:
                self._source = None
            return part
        parts = self.linear(x).split(self.sizes, -1)
        if index == 0:
            self._source = x
            self._pending = {i: part for i, part in enumerate(parts) if i > 0}
        return parts[index]


class ProjectionSlice(nn.Module):
    """Replaces q_proj, k_proj or v_proj. Its result is a view of the joined product."""

    def __init__(self, shared: SharedProjection, index: int) -> None:
        super().__init__()
        self.shared, self._index = shared, index
        self.in_features, self.out_features = shared.linear.in_features, shared.sizes[index]

    @property
    def weight(self) -> Tensor:
        return self.shared.linear.weight.split(self.shared.sizes)[self._index]

    @property
    def bias(self) -> Tensor | None:
        bias = self.shared.linear.bias
        return None if bias is None else bias.split(self.shared.sizes)[self._index]

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.project(x, self._index)

    __call__ = forward


class FusedRMSNorm(nn.Module):
    """Root mean square norm in one pass: of C on a CPU, else by torch's own function.

    On CUDA that is one kernel if input and scale have the same dtype; with another scale (Gemma) there are two more.

    wide: the scale is float32 and is applied before rounding to the input's dtype (Gemma, OLMo 2), otherwise after
    (Llama); torch's function always applies it before.
    """

    def __init__(self, weight: nn.Parameter, scale: Tensor, eps: float, wide: bool) -> None:
        super().__init__()
        self.weight = weight
        self._scale, self._eps = scale, eps
        self.native = native_rms_norm(scale, weight.dtype, eps, wide)

    def forward(self, x: Tensor) -> Tensor:
        if self.native is not None and (normed := self.native(x)) is not None:
            return normed
        return F.rms_norm(x.to(self._scale.dtype), self._scale.shape, self._scale, self._eps).to(x.dtype)

    __call__ = forward


class FusedGatedNorm(nn.Module):
    """Root mean square norm of rows by silu of a gate in one pass of C. own: computes what C does not know."""

    def __init__(self, own: nn.Module, native: NativeRMSNorm) -> None:
        super().__init__()
        self._own, self._native = own, native

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [num_rows, width]
        normed = self._native(x.unsqueeze(0), gate) if x.dim() == 2 and x.shape == gate.shape else None
        return self._own(x, gate) if normed is None else normed[0]

    __call__ = forward


@torch.no_grad()
def pack(model: nn.Module, for_cpu: bool) -> None:
    """Replace modules of `model` (in `eval`) in place so that its eager forward is faster; the mathematics stay.

    A module is only replaced if the replacement gives the same on random input. For CUDA weights stay as they are,
    except that those of q, k and v become one. On a CPU linears of float16, or of another dtype that oneDNN refuses,
    stay. Weights tied to an embedding are copied, others are freed, so whatever reads parameters (a fingerprint,
    `save_pretrained`, `state_dict`) must come before. Hooks on replaced modules are dropped. q, k and v from a joined
    product are views of it: their rows are strided, and each of them keeps all three alive.
    """
    for module in list(model.modules()):
        _join_qkv(module, *((_is_packable, PackedLinear) if for_cpu else (_is_plain, _plain_linear)))
    if for_cpu:
        _replace(model, _packed_linear)
        _replace(model, _gated_norm)
    _replace(model, _fused_norm)


def _replace(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every child for which `make(child)` is not None. A replaced module is freed at once."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    while places:
        child, where = places.popitem()
        replacement = make(child)
        if replacement is not None:
            for parent, name in where:
                setattr(parent, name, replacement)


@functools.cache
def packs_weights(dtype: torch.dtype) -> bool:
    """Whether this build and this CPU have the packed product for `dtype`; tried once on a small product."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = (torch.arange(64 * 48).reshape(64, 48) % 7 - 3).to(dtype)
    x = (torch.arange(5 * 48).reshape(5, 48) % 5 - 2).to(dtype)
    try:
        return torch.equal(PackedLinear(weight, weight[:, 0].contiguous())(x), F.linear(x, weight, weight[:, 0]))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks


def _plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _is_packable(module: Any) -> bool:
    if not _is_plain(module) or module.weight.device.type != "cpu":
        return False
    minimum = {torch.float32: MIN_FLOAT32_ELEMENTS, torch.bfloat16: MIN_BFLOAT16_ELEMENTS}.get(module.weight.dtype, 0)
    return module.weight.numel() >= minimum and packs_weights(module.weight.dtype)


def _packed_linear(module: nn.Module) -> nn.Module | None:
    return PackedLinear(module.weight, module.bias) if _is_packable(module) else None


def _join_qkv(attention: nn.Module, can_join: Callable[[Any], bool], make: Callable[..., nn.Module]) -> None:
    """Join the three projections if forward uses q_proj first, then the others, and they differ in nothing else."""
    names = ("q_proj", "k_proj", "v_proj")
    linears = [attention._modules.get(name) for name in names]
    if not all(can_join(linear) for linear in linears) or getattr(attention, "is_kv_shared_layer", False):
        return
    if len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}) != 1:
        return
    used = [name for name in inspect.unwrap(type(attention).forward).__code__.co_names if name in names]
    if set(used) != set(names) or used[0] != "q_proj":
        return
    shared = SharedProjection(linears, make)
    for index, name in enumerate(names):
        setattr(attention, name, ProjectionSlice(shared, index))


def _fused_norm(norm: Any) -> nn.Module | None:
    """The replacement of what looks like an RMS norm that was not replaced yet: a row in, a row out."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or isinstance(norm, FusedRMSNorm):
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(norm.forward).parameters) != 1:
        return None
    scale, wide = weight.detach(), weight.detach().float()
    candidates = [
        FusedRMSNorm(weight, scale, eps, wide=False),
        FusedRMSNorm(weight, wide, eps, wide=True),
        FusedRMSNorm(weight, 1.0 + wide, eps, wide=True),
    ]
    x = _samples(weight.shape[0], weight.dtype).to(weight.device)
    expected = norm(x).float()
    errors = [float((candidate(x).float() - expected).abs().sum()) for candidate in candidates]
    best = candidates[errors.index(min(errors))]
    return best if _agrees(best, norm, x) else None


def _gated_norm(norm: Any) -> nn.Module | None:
    """The replacement of what looks like a norm of rows with a gate: a row and a gate in, a row out."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not type(norm).__name__.endswith("RMSNormGated") or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    native = native_rms_norm(weight.detach(), weight.dtype, eps, wide=False) if isinstance(eps, float) else None
    if native is None or len(inspect.signature(norm.forward).parameters) != 2:
        return None
    candidate, x = FusedGatedNorm(norm, native), _samples(weight.shape[0], weight.dtype)[0]
    return candidate if _agrees(candidate, norm, x, x.flip(0) * 0.5) else None


def _samples(width: int, dtype: torch.dtype) -> Tensor:
    """Rows of several magnitudes, from a generator of their own, so that the process's random state does not change."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 6, width, generator=generator) * torch.tensor([1e-3, 0.1, 1.0, 1.0, 3.0, 30.0])[:, None]
    return rows.to(dtype)


def are_close(expected: Tensor, found: Tensor, ulps: int) -> bool:
    """Whether all rows agree to `ulps` roundings of the row's largest value."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    a, b = expected.float(), found.float()
    return bool(((a - b).abs().amax(-1) <= a.abs().amax(-1) * torch.finfo(found.dtype).eps * ulps).all())


def _agrees(candidate: nn.Module, original: nn.Module, *given: Tensor) -> bool:
    try:
        return are_close(original(*given), candidate(*given), ulps=2)
    except (RuntimeError, TypeError):
        return False
