"""Makes the eager forward of a Hugging Face model faster by replacing modules in place; knows no architecture.

`pack_for_cpu` packs linear weights for oneDNN, joins q/k/v and shortens RMS norms and submodule lookups.
`pack_for_cuda` joins q/k/v, shortens lookups and turns an RMS norm into one kernel.
`skip_rotation` removes the attention's own rotation where the caller makes it a no-op.
A module that cannot be replaced exactly (to rounding) is left as it is. Figures: bench/LOG.md.
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvstore.kernels.cpu.layer import native_product, native_rms_norm

# Below this many elements a float32 weight stays in cache and MKL's gemv beats oneDNN's call overhead.
MIN_FLOAT32_ELEMENTS = 256 * 1024
MIN_BFLOAT16_ELEMENTS = 4 * 1024
MIN_WIDENED_ELEMENTS = 16 * 1024  # of an input that is widened to float32 before it is normalised
_ROTATION_NAME = re.compile(r"_?apply_\w*rotary\w*")


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
    """Root mean square norm in one pass of C, or in 5 operations of torch instead of 8; stores no squares.

    wide: the scale is float32 and is applied before rounding to the input's dtype (Gemma, OLMo 2), otherwise after
    (Llama).
    """

    def __init__(self, weight: nn.Parameter, scale: Tensor, eps: float, wide: bool) -> None:
        super().__init__()
        self.weight = weight
        self._scale, self._wide = scale, wide
        self._eps = torch.tensor(eps, dtype=torch.float32)
        self._mean = 1.0 / weight.shape[0]
        self.native = native_rms_norm(scale, weight.dtype, eps, wide)

    def forward(self, x: Tensor) -> Tensor:
        if self.native is not None:
            normed = self.native(x)
            if normed is not None:
                return normed
        if x.dtype != torch.float32 and x.numel() >= MIN_WIDENED_ELEMENTS:
            wide = x.float()  # a product of mixed types is computed element by element
            normed = wide.mul_(self._inverse(wide))
        else:
            normed = x * self._inverse(x)
        if self._wide:
            return normed.mul_(self._scale).to(x.dtype)
        return normed.to(x.dtype).mul_(self._scale)

    __call__ = forward

    def _inverse(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return torch.addcmul(self._eps, norm, norm, value=self._mean).rsqrt_()


class TorchRMSNorm(nn.Module):
    """Root mean square norm by torch's own function: one kernel on CUDA if input and scale have the same dtype.

    The scale is applied before rounding; a float32 scale for a narrower input (Gemma) takes a kernel before and after.
    """

    def __init__(self, weight: nn.Parameter, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._scale, self._eps = scale, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self._scale.dtype), self._scale.shape, self._scale, self._eps).to(x.dtype)

    __call__ = forward


class DirectLayers(nn.ModuleList):
    """A list instead of a ModuleList: decoders iterate over `self.layers[:n]`, which builds one in every forward."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._modules.values())[index]
        return super().__getitem__(index)


@torch.no_grad()
def pack_for_cpu(model: nn.Module) -> None:
    """Replace modules of `model` (on CPU, `eval`) in place so that its eager forward is faster; the mathematics stay.

    A module is only replaced if the replacement gives the same on random input. Linears of float16, or of another dtype
    that oneDNN refuses on this CPU, stay. Weights tied to an embedding are copied, others are freed, so whatever reads
    parameters (a fingerprint, `save_pretrained`, `state_dict`) must come before. Hooks on replaced modules are dropped.
    q, k and v from a joined product are views of it: their rows are strided, and each of them keeps all three alive.
    """
    for module in list(model.modules()):
        _join_qkv(module, _is_packable, PackedLinear)
    _replace(model, _packed_linear)
    _replace(model, _fused_norm)
    _shorten_lookups(model)


@torch.no_grad()
def pack_for_cuda(model: nn.Module) -> None:
    """As `pack_for_cpu`, for a device where the number of kernels counts, as it does when few requests decode.

    Weights stay as they are, except that those of q, k and v become one.
    """
    for module in list(model.modules()):
        _join_qkv(module, _is_plain, _plain_linear)
    _replace(model, _torch_norm)
    _shorten_lookups(model)


def skip_rotation(attention: nn.Module) -> bool:
    """Give this instance a forward in which `apply_rotary_pos_emb(q, k, ...)` returns q and k as they are.

    Only for a model whose rotary modules return cos = 1 and sin = 0. Returns False and changes nothing if the forward
    calls no such function, if that is not the identity for cos = 1 and sin = 0, or if somebody else has patched the
    forward. Neither the class nor its other instances are touched. Query and key then reach the attention function as
    strided views; the rotation would have made new tensors.
    """
    if "forward" in attention.__dict__:
        return False
    rebound = _without_rotation(inspect.unwrap(type(attention).forward), type(attention).forward)
    if rebound is None:
        return False
    attention.__dict__["forward"] = types.MethodType(rebound, attention)
    return True


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


def _is_rms_norm(norm: Any) -> bool:
    """Whether a module looks like an RMS norm that was not replaced yet: a row in, a row out."""
    if not type(norm).__name__.endswith("RMSNorm") or isinstance(norm, FusedRMSNorm | TorchRMSNorm):
        return False
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(_eps_of(norm), float):
        return False
    return len(inspect.signature(norm.forward).parameters) == 1


def _eps_of(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _torch_norm(norm: Any) -> nn.Module | None:
    if not _is_rms_norm(norm):
        return None
    weight, eps = norm.weight, _eps_of(norm)
    x, wide = _samples(weight.shape[0], weight.dtype).to(weight.device), weight.detach().float()
    candidates = (TorchRMSNorm(weight, scale, eps) for scale in (weight.detach(), 1.0 + wide))
    return next((candidate for candidate in candidates if _agrees(candidate, norm, x)), None)


def _fused_norm(norm: Any) -> nn.Module | None:
    if not _is_rms_norm(norm) or norm.weight.device.type != "cpu":
        return None
    weight, eps = norm.weight, _eps_of(norm)
    scale, wide = weight.detach(), weight.detach().float()
    candidates = [
        FusedRMSNorm(weight, scale, eps, wide=False),
        FusedRMSNorm(weight, wide, eps, wide=True),
        FusedRMSNorm(weight, 1.0 + wide, eps, wide=True),
    ]
    x = _samples(weight.shape[0], weight.dtype)
    expected = norm(x).float()
    errors = [float((candidate(x).float() - expected).abs().sum()) for candidate in candidates]
    best = candidates[errors.index(min(errors))]
    return best if _agrees(best, norm, x) else None


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


def _agrees(candidate: nn.Module, original: nn.Module, x: Tensor) -> bool:
    try:
        return are_close(original(x), candidate(x), ulps=2)
    except (RuntimeError, TypeError):
        return False


def _shorten_lookups(model: nn.Module) -> None:
    """Enter submodules in each instance's dict, past nn.Module.__getattr__; assigning another removes the entry."""
    for module in list(model.modules()):
        if type(module) is nn.ModuleList:
            module.__class__ = DirectLayers
        module.__dict__.update({name: child for name, child in module._modules.items() if child is not None})


def _unrotated(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q, k


def _without_rotation(inner: types.FunctionType, outer: types.FunctionType) -> types.FunctionType | None:
    """`outer`, rebuilt around a copy of `inner`, which it wraps or is, without calls of a rotation."""
    names = [name for name in inner.__code__.co_names if _ROTATION_NAME.fullmatch(name)]
    names = [name for name in names if name in inner.__globals__]
    if not names or not all(_is_identity_unrotated(inner.__globals__[name]) for name in names):
        return None
    copies = {id(inner): _copy(inner, inner.__globals__ | dict.fromkeys(names, _unrotated), inner.__closure__)}
    for wrapper in reversed(list(_wrappers(outer))):
        cells = [cell.cell_contents for cell in wrapper.__closure__ or ()]
        if not any(id(content) in copies for content in cells):
            return None
        closure = tuple(types.CellType(copies.get(id(content), content)) for content in cells)
        copies[id(wrapper)] = _copy(wrapper, wrapper.__globals__, closure)
    return copies[id(outer)]


def _wrappers(function: Any) -> Iterator[types.FunctionType]:
    while hasattr(function, "__wrapped__"):
        yield function
        function = function.__wrapped__


def _copy(function: types.FunctionType, namespace: dict[str, Any], closure: Any) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _is_identity_unrotated(rotate: Any) -> bool:
    """Whether `rotate(q, k, 1, 0)` is (q, k). Cos and sin mostly have the head's width, half of it in gpt-oss."""
    q, k = torch.arange(1.0, 49.0).view(1, 2, 3, 8), torch.arange(1.0, 25.0).view(1, 1, 3, 8)
    for width in (8, 4):
        try:
            rotated_q, rotated_k = rotate(q, k, torch.ones(1, 3, width), torch.zeros(1, 3, width))
        except (RuntimeError, TypeError, ValueError):
            continue
        return torch.equal(rotated_q, q) and torch.equal(rotated_k, k)
    return False
