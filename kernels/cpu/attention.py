"""Attention over pages on a CPU by C, with the rotation and write of any step.

`decode.c`: rotation and write, and all of a decode step's attention in one call per layer. `prefill.c`: attention of
many tokens of a request, on a CPU with tiles (AMX) or vectors of bfloat16. Torch twins: `kvstore.kernels.reference`,
and `kvstore.kernels.attention`, which gathers the pages of a request first.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvstore.kernels.cpu import layer as layer_native
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.threads import num_threads
from kvstore.kernels.paged_batch import PagedBatch, Scoring
from kvstore.rope.rotary import Rotation

MAX_REQUESTS = 64  # they are rotated one by one; with more, torch's matrix products are as fast
MAX_HEAD_DIM = 256
_HEAD_UNIT = 16  # numbers in a vector; a head must be a multiple
CODES = {torch.float32: 0, torch.bfloat16: 1}
_Number, _Address = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "kv_decode": [_Address, *[_Address, _Number] * 3, *[_Address] * 4, ctypes.c_float, _Number, _Address],
    "kv_decode_fits": [_Address],
    "kv_write": [_Address, *[_Address, _Number] * 3, *[_Address] * 6],
}
UNIT_TOKENS = 64  # per unit of work of a thread, for one KV head; more would read keys and values less often
FEW_UNIT_TOKENS = 32  # if there would not be enough units for all threads
_DIM_UNIT = 32
_NUMBERS = (
    *("query_stride", "num_tokens", "context_len", "num_heads", "num_kv_heads", "head_dim"),
    *("num_blocks", "block_size", "window", "unit_tokens", "scratch_bytes"),
)


class Step(ctypes.Structure):
    """`struct kv_step`."""

    _fields_ = (
        *((name, _Number) for name in ("num_requests", "num_heads", "num_kv_heads", "head_dim", "dtype")),
        *((name, _Number) for name in ("num_blocks", "block_size", "max_blocks", "table_stride", "num_threads")),
        *((name, _Address) for name in ("block_table", "context_lens", "slots")),
    )


@cache
def _functions(library: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    return native.declared(library, _ARGUMENTS)


def is_in_rows(tensor: Tensor) -> bool:
    """Whether the numbers of each row of [rows, heads, width] follow one another. Rows may be strided."""
    (_, num_heads, width), strides = tensor.shape, tensor.stride()
    return strides[2] == 1 and (num_heads == 1 or strides[1] == width)


class DecodeStep:
    """One step whose requests have one token each. Holds what its layers share, and keeps it alive while C reads it."""

    def __init__(
        self, function: Callable[..., int], step: Step, kept: tuple[Tensor, ...], tables: list[tuple[int, int] | None]
    ) -> None:
        self._function, self._step, self._kept, self._tables = function, step, kept, tables
        self._at = ctypes.addressof(step)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor,
        scoring: Scoring,
    ) -> Tensor | None:  # [num_tokens, num_heads, head_dim]  # fmt: skip
        """Rotate, write and attend, as `kv.rotate_and_write` and `attention.paged_attention` after it.

        query: [num_tokens, num_heads, head_dim], key and value with num_kv_heads, raw; rows may be strided. Returns
        None and writes nothing for a layer with softcap, sinks, a rotation other than of halves, or heads whose size C
        does not know.
        """
        table, step = self._tables[layer], self._step
        shape, tensors = query.shape, (query, key, value)
        if table is None or not scoring.plain or any(one.dtype != key_cache.dtype for one in tensors):
            return None
        step.num_kv_heads, step.head_dim = key_cache.shape[2:]
        if not all(map(is_in_rows, tensors)) or shape[1] % step.num_kv_heads or shape[2] != step.head_dim:
            return None
        starts = query.stride(), key.stride(), value.stride()
        step.num_heads = shape[1]
        out = torch.empty(shape, dtype=query.dtype)
        self._function(
            self._at, query.data_ptr(), starts[0][0], key.data_ptr(), starts[1][0], value.data_ptr(), starts[2][0],
            key_cache.data_ptr(), value_cache.data_ptr(), *table, scoring.scale, scoring.window or 0, out.data_ptr(),
        )  # fmt: skip
        return out


def decode_step(
    batch: PagedBatch, caches: Sequence[tuple[Tensor, Tensor]], rotations: Sequence[Rotation | None], first: int = 0
) -> DecodeStep | None:
    """What the layers of this step share; None if torch operations are to compute the step.

    caches: per layer, [num_blocks, block_size, num_kv_heads, head_dim] each. rotations: per layer, at the step's
    positions (see `Rotation.spread_out`). first: a layer that has the batch; of those, all have as many blocks.
    """
    num_requests, cache = len(batch.context_lens), caches[first][0]
    if cache.device.type != "cpu" or cache.dtype not in CODES or not 0 < num_requests <= MAX_REQUESTS:
        return None
    if batch.num_decodes != num_requests or len(batch.slots) != num_requests or not cache.is_contiguous():
        return None
    library = native.library()
    tables = [
        _tables_of(r, keys) if _has_known_heads(keys, values) else None
        for r, (keys, values) in zip(rotations, caches, strict=True)
    ]
    if library is None or not any(tables):
        return None
    lens, table, slots = torch.tensor(batch.context_lens), batch.block_table, batch.slots.contiguous()
    if table.dtype != torch.int64 or table.stride(1) != 1:
        table = table.long().contiguous()
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    step = Step(
        num_requests, num_kv_heads, num_kv_heads, head_dim, CODES[cache.dtype],
        num_blocks, block_size, table.shape[1], table.stride(0), num_threads(),
        table.data_ptr(), lens.data_ptr(), slots.data_ptr(),
    )  # fmt: skip
    functions = _functions(library)
    if not functions["kv_decode_fits"](ctypes.addressof(step)):
        return None
    spread = [r.spread for r in rotations if r is not None and r.spread is not None]
    kept = (lens, table, slots, *(tensor for s in spread for tensor in (s.cos, s.sin)))
    return DecodeStep(functions["kv_decode"], step, kept, tables)


def _has_known_heads(key_cache: Tensor, value_cache: Tensor) -> bool:
    head_dim = key_cache.shape[3]
    return head_dim % _HEAD_UNIT == 0 and head_dim <= MAX_HEAD_DIM and value_cache.shape[3] == head_dim


def _tables_of(rotation: Rotation | None, cache: Tensor) -> tuple[int, int] | None:
    """Addresses of cos and sin, 0 for a layer without rotation; None for a rotation that C does not know."""
    if rotation is None:
        return 0, 0
    spread = rotation.spread
    if spread is None or spread.cos.dtype != cache.dtype:
        return None
    if spread.cos.shape[-1] != cache.shape[-1] or not (spread.cos.is_contiguous() and spread.sin.is_contiguous()):
        return None
    return spread.cos.data_ptr(), spread.sin.data_ptr()


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor] | None:  # query and key, rotated
    """As `kv.rotate_and_write`, but returns None and writes nothing for tensors that C does not know."""
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    library = native.library() if key.device.type == "cpu" else None
    if library is None or key_cache.dtype not in CODES:
        return None
    if any(tensor.dtype != key_cache.dtype for tensor in (query, key, value, value_cache)):
        return None
    if key.shape != (len(query), num_kv_heads, head_dim) or value.shape != key.shape or query.shape[2] != head_dim:
        return None
    if not all(map(is_in_rows, (query, key, value))) or len(slots) != len(query):
        return None
    starts = query.stride(), key.stride(), value.stride()
    tables = _tables_of(rotation, key_cache)
    if tables is None or not (key_cache.is_contiguous() and value_cache.is_contiguous() and slots.is_contiguous()):
        return None
    step = Step(
        len(query), query.shape[1], num_kv_heads, head_dim, CODES[key_cache.dtype],
        num_blocks, block_size, 0, 0, num_threads(), 0, 0, slots.data_ptr(),
    )  # fmt: skip
    turned, rotated = torch.empty(query.shape, dtype=query.dtype), torch.empty(key.shape, dtype=key.dtype)
    status = _functions(library)["kv_write"](
        ctypes.addressof(step), query.data_ptr(), starts[0][0], key.data_ptr(), starts[1][0], value.data_ptr(),
        starts[2][0], key_cache.data_ptr(), value_cache.data_ptr(), *tables, turned.data_ptr(), rotated.data_ptr(),
    )  # fmt: skip
    return (turned, rotated) if status == 0 else None


class _Prefill(ctypes.Structure):
    """`struct prefill`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key_cache", "value_cache", "blocks", "out", "scratch")),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled code if it multiplies bfloat16."""
    library = native.library()
    if library is None or not layer_native.num_columns():
        return None
    library.kv_prefill.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.kv_prefill_scratch.argtypes = [ctypes.c_int64] * 4
    library.kv_prefill_scratch.restype = ctypes.c_int64
    return library


class _Scratch(threading.local):
    """Scratch memory of each calling thread. It is kept, because new memory costs more than a layer's attention."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> torch.Tensor:
        if len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self.memory


_scratch = _Scratch()


def knows(scoring: Scoring, head_dim: int) -> bool:
    """Whether C knows this scoring and heads of this width; not whether it runs on this machine."""
    return scoring.plain and head_dim % _DIM_UNIT == 0 and head_dim <= MAX_HEAD_DIM


def prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    request: int,
    scoring: Scoring,
    out: torch.Tensor,
) -> bool:
    """Attention of this request's tokens over its whole context, which is in the caches. False if C cannot do it.

    query, out: the request's, [num_tokens, num_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads,
    head_dim], bfloat16.
    """
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    num_tokens, num_heads, _ = query.shape
    tensors = (query, key_cache, value_cache, out)
    if not knows(scoring, head_dim) or any(t.dtype != torch.bfloat16 for t in tensors) or num_heads % num_kv_heads:
        return False
    if not is_in_rows(query):
        return False
    if value_cache.shape != key_cache.shape or out.shape != query.shape:
        return False
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous()):
        return False
    library = _library() if query.device.type == "cpu" else None
    if library is None:
        return False
    threads = num_threads()
    num_units = num_kv_heads * -(-num_tokens // UNIT_TOKENS)
    unit_tokens = UNIT_TOKENS if num_units >= 2 * threads else FEW_UNIT_TOKENS
    scratch_bytes = library.kv_prefill_scratch(num_heads, num_kv_heads, head_dim, unit_tokens)
    scratch = _scratch.at_least(threads * scratch_bytes)
    context_len = batch.context_lens[request]
    blocks = batch.block_table[request, : -(-context_len // block_size)]
    if len(blocks) * block_size < context_len:
        return False
    if blocks.dtype != torch.int64 or not blocks.is_contiguous():
        blocks = blocks.long().contiguous()
    job = _Prefill(
        query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), blocks.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), query.stride(0), num_tokens, context_len, num_heads, num_kv_heads, head_dim,
        num_blocks, block_size, scoring.window or 0, unit_tokens, scratch_bytes, scoring.scale,
    )  # fmt: skip
    return library.kv_prefill(ctypes.addressof(job), threads) == 0
