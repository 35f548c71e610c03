"""Norms and products on a CPU by the C code of `layer.c`, whose structs are declared here.

Torch twins: `kvstore.engine.model.packing.FusedRMSNorm`, oneDNN's products, and the torch operations of
`kvstore.engine.model.lean`.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.threads import num_threads

_TRIED_ROWS = (1, 5, 16, 17, 32, 65)
_CODES = {torch.float32: 0, torch.bfloat16: 1}

_Number, _Address = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [*[_Address] * 4, *[_Number] * 4, ctypes.c_float, ctypes.c_int, ctypes.c_int],
    "kv_has_tiles": [],
    "kv_product_rows": [],
    "kv_product_columns": [],
    "kv_product": [*[_Address] * 3, _Number, ctypes.c_int],
    "kv_before_attention": [*[_Address] * 4, _Number, ctypes.c_int],
    "kv_after_attention": [*[_Address] * 5, _Number, ctypes.c_int],
}


class _Product(ctypes.Structure):
    _fields_ = (("weight", _Address), ("bias", _Address), ("num_in", _Number), ("num_out", _Number))


class _Norm(ctypes.Structure):
    _fields_ = (("scale", _Address), ("eps", ctypes.c_float), ("width", _Number), ("wide", _Number))


class _LayerParts(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "between")),
        *((name, _Product) for name in ("qkv", "out", "gate", "up", "down")),
        ("gelu", _Number),
    )


@cache
def _functions(library: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    return native.declared(library, _ARGUMENTS)


@cache
def has_tiles() -> bool:
    """Whether tiles (AMX) can be used here and compute the same as torch."""
    library = native.library()
    return library is not None and bool(_functions(library)["kv_has_tiles"]()) and num_columns() > 0


@cache
def num_columns() -> int:
    """How many columns of a weight are stored together for products by tiles or vectors; 0 if there are no products."""
    library = native.library()
    if library is None:
        return 0
    functions = _functions(library)
    found = functions["kv_product_columns"]()
    return found if found and _multiplies(functions["kv_product"], found, functions["kv_product_rows"]()) else 0


@cache
def max_rows() -> int:
    """How many rows a product takes: 32 with tiles, as oneDNN is faster with more; any number with vectors."""
    library = native.library()
    return _functions(library)["kv_product_rows"]() if library is not None and num_columns() else 0


def _multiplies(function: Callable[..., int], columns: int, most: int) -> bool:
    """Whether products are right. Tried once, with few rows and many: compilers differ in how they read arguments."""
    numbers = torch.arange(128 * 64) * 37 % 17 - 8  # small whole numbers, so that every sum is exact
    x, weight = numbers.view(-1, 64).bfloat16(), numbers.roll(5).view(-1, 64).bfloat16()[:columns]
    packed = weight.view(columns, 32, 2).transpose(0, 1).contiguous()
    product = _Product(packed.data_ptr(), 0, 64, columns)
    for num_rows in (count for count in _TRIED_ROWS if count <= most):
        found = torch.full((num_rows, columns), float("nan"), dtype=x.dtype)  # for rows left out
        function(ctypes.addressof(product), x.data_ptr(), found.data_ptr(), num_rows, num_threads())
        if not torch.equal(found, (x[:num_rows].float() @ weight.float().T).to(x.dtype)):
            return False
    return True


class NativeRMSNorm:
    """Root mean square norm over the last dimension in one pass; `wide` as in
    `kvstore.engine.model.packing.FusedRMSNorm`.

    scale: [width], contiguous; float32 if wide, else of the input's dtype. The result has the input's dtype.
    """

    def __init__(self, function: Callable[..., int], scale: Tensor, dtype: torch.dtype, eps: float, wide: bool) -> None:
        self._function = function
        self._scale, self._address, self.width = scale, scale.data_ptr(), len(scale)
        self.dtype, self._eps = dtype, eps
        self.struct = _Norm(self._address, eps, self.width, wide)
        self._variant = _CODES[dtype] + 2 * wide

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor | None:
        """x: [outer, inner, width], of which the outer dimension may be strided. gate: contiguous; silu of it
        multiplies the result. None for another layout.
        """
        if x.dim() != 3 or x.dtype != self.dtype:
            return None
        if gate is not None and (self.width % 16 or gate.dtype != x.dtype or not gate.is_contiguous()):
            return None
        outer, inner, width = x.shape
        stride, row, one = x.stride()
        if one != 1 or row != width or width != self.width:
            return None
        out = torch.empty((outer, inner, width), dtype=x.dtype)
        self._function(
            x.data_ptr(), None if gate is None else gate.data_ptr(), self._address, out.data_ptr(), outer * inner,
            inner, stride, width, self._eps, self._variant, num_threads(),
        )  # fmt: skip
        return out


def native_rms_norm(scale: Tensor, dtype: torch.dtype, eps: float, wide: bool) -> NativeRMSNorm | None:
    """None without the C code, or for a dtype that it does not know."""
    fits = dtype in _CODES and scale.is_contiguous() and scale.dtype == (torch.float32 if wide else dtype)
    library = native.library() if fits and scale.device.type == "cpu" else None
    return None if library is None else NativeRMSNorm(_functions(library)["rms_norm"], scale, dtype, eps, wide)


class NativeProduct:
    """x * weight + bias for up to `max_rows()` rows, with a weight as oneDNN has packed it. Keeps both alive."""

    def __init__(self, function: Callable[..., int], packed: Tensor, bias: Tensor | None, shape: Sequence[int]) -> None:
        self._function, self._kept = function, (packed, bias)
        self.num_out, self.num_in = shape
        bias_at = 0 if bias is None else bias.data_ptr()
        self.struct = _Product(torch.ops.mkldnn.data_ptr(packed), bias_at, self.num_in, self.num_out)
        self._at, self._max_rows = ctypes.addressof(self.struct), max_rows()

    def __call__(self, x: Tensor) -> Tensor | None:  # [..., out]
        """x: [..., in]. None for more rows, or for an input that is not contiguous or not bfloat16."""
        num_rows = x.numel() // self.num_in
        if not 0 < num_rows <= self._max_rows or x.dtype != torch.bfloat16 or not x.is_contiguous():
            return None
        if x.shape[-1] != self.num_in:
            return None
        out = torch.empty((*x.shape[:-1], self.num_out), dtype=torch.bfloat16)
        self._function(self._at, x.data_ptr(), out.data_ptr(), num_rows, num_threads())
        return out


def native_product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> NativeProduct | None:
    """None if C cannot compute the product: because of the dtype, the processor or an unknown layout of the weight.

    packed: weight, [out, in], as oneDNN has packed it; weight itself is only compared. bias: [out], contiguous.
    """
    columns = num_columns() if weight.dtype == torch.bfloat16 and weight.dim() == 2 else 0
    if not columns or weight.shape[0] % 16 or weight.shape[1] % 32:
        return None
    if bias is not None and (bias.dtype != weight.dtype or not bias.is_contiguous()):
        return None
    library = native.library()
    if library is None or not _is_as_known(packed, weight.contiguous(), columns):
        return None
    return NativeProduct(_functions(library)["kv_product"], packed, bias, weight.shape)


def _is_as_known(packed: Tensor, weight: Tensor, columns: int) -> bool:
    """Whether the packed weight is [out / columns][in / 2][columns][2], padded. oneDNN chooses its layout."""
    try:
        address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except (AttributeError, RuntimeError, TypeError):
        return False
    num_out, num_in = weight.shape
    if size != -(-num_out // columns) * columns * num_in * weight.itemsize:
        return False
    memory = (ctypes.c_char * size).from_address(address)
    found = torch.frombuffer(memory, dtype=weight.dtype).view(-1, num_in // 2, columns, 2)
    blocks = zip(found, (F.pad(own, (0, 0, 0, columns - len(own))) for own in weight.split(columns)), strict=True)
    return all(torch.equal(block, own.view(columns, -1, 2).transpose(0, 1)) for block, own in blocks)


class NativeLayer:
    """A decoder layer without its attention, for up to `max_rows()` rows, in two calls.

    norms: before and after the attention; products: q, k and v joined, output, gate, up, down. All of them stay alive
    and in place as long as this object.
    """

    def __init__(self, norms: Sequence[NativeRMSNorm], products: Sequence[NativeProduct], gelu: bool) -> None:
        library = native.library()
        assert library is not None, "products are compiled code"
        functions = _functions(library)
        self._before, self._after = functions["kv_before_attention"], functions["kv_after_attention"]
        self._kept = (*norms, *products)
        self._parts = _LayerParts(*(norm.struct for norm in norms), *(one.struct for one in products), gelu)
        self._at = ctypes.addressof(self._parts)
        qkv, out, gate, _, _ = products
        self._num_hidden, self._num_qkv = qkv.num_in, qkv.num_out
        self._num_scratch = 2 * out.num_out + gate.num_out
        self._max_rows = max_rows()

    def takes(self, x: Tensor) -> bool:
        """Whether C computes x, [1, rows, hidden]."""
        num_requests, num_rows, width = x.shape
        fits = num_requests == 1 and 0 < num_rows <= self._max_rows and width == self._num_hidden
        return fits and x.dtype == torch.bfloat16 and x.is_contiguous()

    def before_attention(self, x: Tensor) -> Tensor:  # [rows, out of q, k and v]
        """x: [1, rows, hidden], for which `takes` is true."""
        num_rows = x.shape[1]
        scratch = torch.empty(num_rows * self._num_hidden, dtype=x.dtype)
        out = torch.empty((num_rows, self._num_qkv), dtype=x.dtype)
        threads = num_threads()
        self._before(self._at, x.data_ptr(), scratch.data_ptr(), out.data_ptr(), num_rows, threads)
        return out

    def after_attention(self, attended: Tensor, x: Tensor) -> Tensor:  # [1, rows, hidden]
        """attended: [1, rows, in of the output's product], contiguous; x: as in `before_attention`."""
        num_rows = x.shape[1]
        scratch = torch.empty(num_rows * self._num_scratch, dtype=x.dtype)
        out = torch.empty_like(x)
        at, threads = attended.data_ptr(), num_threads()
        self._after(self._at, at, x.data_ptr(), scratch.data_ptr(), out.data_ptr(), num_rows, threads)
        return out


def native_layer(
    norms: Sequence[NativeRMSNorm | None], products: Sequence[NativeProduct | None], gelu: bool
) -> NativeLayer | None:
    """None if one of its parts is missing, or if they do not fit together."""
    known_norms = [norm for norm in norms if norm is not None and norm.dtype == torch.bfloat16]
    known = [product for product in products if product is not None]
    if len(known_norms) != 2 or len(known) != 5:
        return None
    qkv, out, gate, up, down = known
    hidden = {norm.width for norm in known_norms} | {qkv.num_in, out.num_out, gate.num_in, up.num_in, down.num_out}
    if len(hidden) != 1 or len({gate.num_out, up.num_out, down.num_in}) != 1:
        return None
    return NativeLayer(known_norms, known, gelu)
