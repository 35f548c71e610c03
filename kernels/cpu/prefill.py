"""Attention of many tokens of a request on a CPU with tiles (AMX) or vectors of bfloat16 by the C code of `prefill.c`.

Torch twin: `attention_torch`, which gathers the pages of a request first.
"""

import ctypes
import threading
from functools import cache

import torch

from kvstore.kernels.cpu import layer as layer_native
from kvstore.kernels.cpu import native
from kvstore.kernels.cpu.threads import num_threads
from kvstore.kernels.paged_batch import PagedBatch, Scoring

MAX_HEAD_DIM = 256
UNIT_TOKENS = 64  # per unit of work of a thread, for one KV head; more would read keys and values less often
FEW_UNIT_TOKENS = 32  # if there would not be enough units for all threads
_DIM_UNIT = 32

_NUMBERS = (
    *("query_stride", "num_tokens", "context_len", "num_heads", "num_kv_heads", "head_dim"),
    *("num_blocks", "block_size", "window", "unit_tokens", "scratch_bytes"),
)


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
    if query.stride()[1:] != (head_dim, 1):
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
