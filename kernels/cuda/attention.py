"""Paged attention on CUDA: one Triton kernel for decode and prefill, and a small one that joins split contexts.

A program owns a tile of rows: a few tokens of one request times the query heads that share a KV head, so that each key
is read once for all of them. It walks the tiles of keys that these rows see, page by page through the block table, with
a running softmax in float32 (FlashAttention: Dao et al., 2022). If there are too few programs for the device, several
share the keys; each leaves a partial result, and `_join` adds them (Flash-Decoding: Dao et al., 2023). Launches depend
only on shapes, never on the contents of device tensors, so decode can be captured in a CUDA graph.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstore.kernels.paged_batch import DeviceBatch, Scoring

LOG2E = math.log2(math.e)
DEFAULT_SMS = 132  # of H100 and H200; for devices that do not tell
MAX_SPLITS = 128
SPLITS_PER_READ = 32


@triton.jit
def _request_of(query_start, tile, first, num_requests, TILE_TOKENS: tl.constexpr):
    """The request that owns a tile. Request r starts at tile `(query_start[r] - r) // TILE_TOKENS + r - first`: its
    n tokens need (n - 1) // TILE_TOKENS + 1 tiles, and get at least as many. The first `first` requests have one token.
    """
    low, high = first, num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(query_start + middle) - middle) // TILE_TOKENS + middle - first <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _walk(
    acc, peak, total, query, own, keys, values, table, begin, end, first, last, factor, inner,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys at positions begin .. end - 1 into the running softmax of a tile of rows.

    MASKED: only positions first .. last - 1 are read, and no row sees a position after its own. Else all rows see all.
    """
    dims, value_dims = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    for start in tl.range(begin, end, TILE_KEYS):
        positions = start + tl.arange(0, TILE_KEYS)
        real = (positions >= first) & (positions < last)
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=real, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE)
        tokens = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # pools have more than 2**31 elements
        offsets = tokens[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :]
        value_offsets = tokens[:, None] * (KV_HEADS * VALUE_DIM) + value_dims[None, :]
        if MASKED:  # the rest of a page may contain anything, even NaN
            key = tl.load(keys + offsets, mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            there = real[:, None] & (value_dims < VALUE_DIM)[None, :]
            value = tl.load(values + value_offsets, mask=there, other=0.0)
        elif WIDTH != HEAD_DIM or VALUE_WIDTH != VALUE_DIM:
            key = tl.load(keys + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(values + value_offsets, mask=(value_dims < VALUE_DIM)[None, :], other=0.0)
        else:
            key = tl.load(keys + offsets)
            value = tl.load(values + value_offsets)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            scores = 1 - 2 / (tl.exp2(scores * inner) + 1)  # tanh
        if MASKED:
            seen = real[None, :] & (positions[None, :] <= own[:, None])
            if WINDOW > 0:
                seen &= positions[None, :] > own[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak  # a row may see nothing
        weights = tl.exp2(scores * factor - anchor[:, None])
        fade = tl.exp2(peak - anchor)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(  # arguments that change from step to step must not cause a compilation
    do_not_specialize=["first", "num_requests", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def _attend(
    query, key_cache, value_cache, query_start, context_lens, block_table, sinks, out, partial, logsum,
    first, num_requests, num_splits, table_stride, query_token_stride, query_head_stride, factor, inner,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, num_kv_heads, num_splits). Requests from `first` on; with ONE_TOKEN each is one tile.

    `out` is written, or with `partial` [num_tokens, num_heads, num_splits, VALUE_DIM] and `logsum` [num_tokens,
    num_heads, num_splits] (base 2) the part of one split. `sinks` may be None; with splits `_join` adds them.
    """
    TILE_TOKENS: tl.constexpr = 1 if ONE_TOKEN else TILE_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a long prefill see most keys, so they go first
    kv_head, split = tl.program_id(1), tl.program_id(2)
    request = first + tile
    if not ONE_TOKEN:
        request = _request_of(query_start, tile, first, num_requests, TILE_TOKENS)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    context_len = tl.load(context_lens + request)
    token = start + (tile - (start - request) // TILE_TOKENS - request + first) * TILE_TOKENS
    if token >= end:
        return

    rows = tl.arange(0, TILE_ROWS)
    tokens, heads = token + rows // GROUP, kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, WIDTH)
    ours = (rows < TILE_TOKENS * GROUP) & (tokens < end)
    there = ours[:, None] & (dims < HEAD_DIM)[None, :]
    places = tokens.to(tl.int64) * query_token_stride + heads * query_head_stride
    queries = tl.load(query + places[:, None] + dims[None, :], mask=there, other=0.0)

    own, lowest = context_len - end + tokens, context_len - end + token  # the position of each row, and of the first
    oldest = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else 0
    newest = tl.minimum(lowest + TILE_TOKENS, context_len)
    share = tl.maximum(tl.cdiv(tl.cdiv(newest, TILE_KEYS) - oldest // TILE_KEYS, num_splits), MIN_TILES) * TILE_KEYS
    begin = oldest // TILE_KEYS * TILE_KEYS + split * share
    finish = tl.minimum(begin + share, newest)
    edge = begin  # up to here all rows see all keys; no loop of its own, as only the loads cost time
    if not (WINDOW > 0 or ONE_TOKEN):
        edge = tl.maximum(tl.minimum((lowest + 1) // TILE_KEYS * TILE_KEYS, finish), begin)

    peak = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    if sinks is not None and partial is None:  # a score that enters the softmax but has no value
        peak = tl.load(sinks + heads, mask=ours, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([TILE_ROWS, VALUE_WIDTH], dtype=tl.float32)
    keys, values, table = key_cache + kv_head * HEAD_DIM, value_cache + kv_head * VALUE_DIM, block_table
    table += request.to(tl.int64) * table_stride
    if not (WINDOW > 0 or ONE_TOKEN):
        acc, peak, total = _walk(
            acc, peak, total, queries, own, keys, values, table, begin, edge, oldest, newest, factor, inner,
            KV_HEADS, HEAD_DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_SIZE, TILE_KEYS, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, queries, own, keys, values, table, edge, finish, oldest, newest, factor, inner,
        KV_HEADS, HEAD_DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_SIZE, TILE_KEYS, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    total = tl.where(total == 0, 1.0, total)  # a row that sees nothing gets zeros
    acc = acc / total[:, None]
    dims = tl.arange(0, VALUE_WIDTH)
    there = ours[:, None] & (dims < VALUE_DIM)[None, :]
    if partial is None:
        target = (tokens * KV_HEADS * GROUP + heads).to(tl.int64) * VALUE_DIM
        tl.store(out + target[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=there)
    else:
        target = ((tokens - first) * KV_HEADS * GROUP + heads).to(tl.int64) * num_splits + split
        tl.store(partial + target[:, None] * VALUE_DIM + dims[None, :], acc, mask=there)
        tl.store(logsum + target, peak + tl.log2(total), mask=ours)


@triton.jit(do_not_specialize=["first", "num_splits"])
def _join(
    partial, logsum, sinks, out, first, num_splits,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens, num_heads). Adds the splits of one token and head, each with the weight of its softmax."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    dims = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    peak, total = float("-inf"), 0.0
    if sinks is not None:
        peak, total = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0
    for start in range(0, num_splits, CHUNK):
        splits = start + tl.arange(0, CHUNK)
        sums = tl.load(logsum + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        used = (sums > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0)
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, fade = tl.exp2(sums - anchor), tl.exp2(peak - anchor)
        acc = acc * fade + tl.sum(parts * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        peak = new_peak
    acc = acc / tl.where(total == 0, 1.0, total)
    target = (row + first.to(tl.int64) * tl.num_programs(1)) * HEAD_DIM
    tl.store(out + target + dims, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: DeviceBatch, scoring: Scoring, out: Tensor
) -> None:
    """Attention of the requests with one token. Launches depend only on the layout's host numbers: may be captured."""
    _launch(query, key_cache, value_cache, layout, scoring, out, 0, layout.num_decodes, 1)


def prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: DeviceBatch, scoring: Scoring, out: Tensor
) -> None:
    """Attention of the requests after those with one token."""
    first = layout.num_decodes
    _launch(query, key_cache, value_cache, layout, scoring, out, first, layout.num_requests, layout.max_query_len)


def _launch(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: DeviceBatch, scoring: Scoring, out: Tensor,
    first: int, end: int, max_query_len: int,
) -> None:  # fmt: skip
    """Launch for requests first .. end - 1, none longer than `max_query_len`. Those before them have one token each.

    out: [num_tokens, num_heads, head_dim of the values].
    """
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and out.is_contiguous() and query.stride(2) == 1
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    group, width = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    value_width = max(16, triton.next_power_of_2(value_dim))
    num_tokens = end if max_query_len == 1 else query.shape[0]
    shape = tile_shape(max_query_len * group, group, max(width, value_width), query.dtype)
    tile_tokens = 1 if max_query_len == 1 else shape.rows // group
    num_tiles = (num_tokens - end) // tile_tokens + end - first  # an upper bound; see _request_of
    num_splits = _num_splits(num_tiles * num_kv_heads, layout.max_context_len, shape, scoring.window, query.device)
    partial = logsum = None
    if num_splits > 1:
        sums = (num_tokens - first, num_heads, num_splits)
        partial = torch.empty((*sums, value_dim), dtype=torch.float32, device=query.device)
        logsum = torch.empty(sums, dtype=torch.float32, device=query.device)
    num_stages = shape.num_stages if partial is None else min(shape.num_stages, 3)  # a part is short
    softcap = scoring.softcap
    _attend[(num_tiles, num_kv_heads, num_splits)](
        query, key_cache, value_cache, layout.query_start, layout.context_lens, layout.block_table,
        scoring.sinks, out, partial, logsum, first, end, num_splits,
        layout.block_table.stride(0), query.stride(0), query.stride(1),
        LOG2E * (scoring.scale if softcap is None else softcap),
        0.0 if softcap is None else 2 * LOG2E * scoring.scale / softcap,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, WIDTH=width, VALUE_DIM=value_dim,
        VALUE_WIDTH=value_width, BLOCK_SIZE=block_size, TILE_ROWS=shape.rows, TILE_KEYS=shape.keys,
        MIN_TILES=shape.min_split // shape.keys, WINDOW=scoring.window or 0, SOFTCAP=softcap is not None,
        ONE_TOKEN=max_query_len == 1, num_warps=shape.num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _join[(num_tokens - first, num_heads)](
            partial, logsum, scoring.sinks, out, first, num_splits,
            HEAD_DIM=value_dim, WIDTH=value_width, CHUNK=SPLITS_PER_READ, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a program works on at a time."""

    rows: int  # tokens times heads of a group
    keys: int
    num_warps: int
    num_stages: int
    min_split: int  # keys of a split, at least


def tile_shape(max_rows: int, group: int, width: int, dtype: torch.dtype) -> TileShape:
    """The tiles for requests of up to `max_rows` rows and heads of `width` elements, a power of two.

    For an H200. Decode: 4.8 TB/s with a latency of 1 us means 36 KB in flight per SM; a tile of 128 keys of two
    programs is 64 KB. Prefill: 128 rows need 4 TB/s of the L2 cache at 500 TFLOP/s; 64 rows would need twice that,
    which it does not have. A load that waits for the block table takes two stages: 3 stages read one tile ahead, 5 read
    two.
    """
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:  # exact products: no tensor cores
        return TileShape(max(16, least), 32, 4, 1, 128)
    if max(max_rows, least) <= 16:
        return TileShape(16, 128 if width <= 128 else 64, 4, 3, 128)
    if max(max_rows, least) <= 64 or width > 128:
        return TileShape(max(64, least), 64 if width <= 128 else 32, 8, 3, 512)
    return TileShape(max(128, least), 64, 8, 5, 512)


def _num_splits(
    num_programs: int, max_context_len: int, shape: TileShape, window: int | None, device: torch.device
) -> int:
    """How many programs share the keys of one tile of rows: enough to fill the device once."""
    per_sm = 2 if shape.num_warps == 4 else 1
    length = max_context_len if window is None else min(max_context_len, window + shape.rows + shape.keys)
    return max(1, min(num_sms(device) * per_sm // num_programs, -(-length // shape.min_split), MAX_SPLITS))


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else DEFAULT_SMS
