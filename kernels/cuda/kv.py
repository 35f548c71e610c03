"""Triton kernels that move KV: from a step or from arena blocks to the paged cache, and from a step to the arena.

The arena is host memory that the device reads and writes directly over the bus. Keys are rotated in registers with the
rounding of `kvstore.rope.rotary.rotate`: products and sum are computed in float32 and rounded each, never fused. All
kernels have twins in `kvstore.kernels.reference`. Callers take care of the order of streams.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstore.kernels.paged_batch import to_device
from kvstore.rope.rotary import Rotation, Style

# The bus, not the device, limits loads and saves. A read over PCIe takes 1 to 2 us, so 55 GB/s need about 100 KB in
# flight. 16 programs have 64 bytes per thread, 256 KB, and leave all but 16 multiprocessors to the computation.
NUM_PROGRAMS = 16
NUM_WARPS = 8
TILE = 4096  # elements of keys, and of values, that a program moves at a time: two 16-byte loads per thread for each

RawLayer = tuple[int, Tensor, Tensor]  # layer, raw keys and values, [num_tokens, num_kv_heads, head_dim]
CachedLayer = tuple[int, Tensor, Tensor]  # layer, key and value cache


# -- parts of kernels: `rows`, [n, 1], are pointers to the first element of heads --------------------------------------
@triton.jit
def _load_pairs(rows, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two elements of each pair, [n, HALF padded] each."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * triton.next_power_of_2(HALF))[None, :]
        pairs = tl.load(rows + both, mask=mask & (both < 2 * HALF))
        first, second = tl.split(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 2, 2)))
    else:
        pair = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        first = tl.load(rows + pair, mask=mask & (pair < HALF))
        second = tl.load(rows + HALF + pair, mask=mask & (pair < HALF))
    return first, second


@triton.jit
def _store_pairs(rows, mask, first, second, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.arange(0, 2 * triton.next_power_of_2(HALF))[None, :]
        pairs = tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))
        tl.store(rows + both, pairs, mask=mask & (both < 2 * HALF))
    else:
        pair = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        tl.store(rows + pair, first, mask=mask & (pair < HALF))
        tl.store(rows + HALF + pair, second, mask=mask & (pair < HALF))


@triton.jit
def _load_angles(rows, mask, HALF: tl.constexpr):
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    return tl.load(rows + pair, mask=mask & (pair < HALF)).to(tl.float32)


@triton.jit
def _turn(first, second, cos, sin, ROUNDS_ONCE: tl.constexpr):
    dtype: tl.constexpr = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    a_cos, b_sin, b_cos, a_sin = a * cos, b * sin, b * cos, a * sin
    if not ROUNDS_ONCE:
        a_cos, b_sin = a_cos.to(dtype).to(tl.float32), b_sin.to(dtype).to(tl.float32)
        b_cos, a_sin = b_cos.to(dtype).to(tl.float32), a_sin.to(dtype).to(tl.float32)
    return (a_cos - b_sin).to(dtype), (b_cos + a_sin).to(dtype)


@triton.jit
def _load_rest(rows, mask, START: tl.constexpr, END: tl.constexpr):
    element = START + tl.arange(0, triton.next_power_of_2(END - START))[None, :]
    return tl.load(rows + element, mask=mask & (element < END))


@triton.jit
def _store_rest(rows, mask, values, START: tl.constexpr, END: tl.constexpr):
    element = START + tl.arange(0, triton.next_power_of_2(END - START))[None, :]
    tl.store(rows + element, values, mask=mask & (element < END))


# -- a step's keys and values into the paged cache ---------------------------------------------------------------------
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    query, key, value, new_query, new_key, key_cache, value_cache, slots, cos, sin,
    query_token, query_head, key_token, key_head, value_token, value_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per token, for all its heads. HALF: pairs of a head that are rotated; 0: only write."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    kv_head = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))[:, None]
    is_kv_head = kv_head < NUM_KV_HEADS
    is_written = is_kv_head & (slot >= 0)
    key_rows = key + token * key_token + kv_head * key_head
    value_rows = value + token * value_token + kv_head * value_head
    cached = slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    values = _load_rest(value_rows, is_kv_head, 0, VALUE_DIM)
    if HALF > 0:
        head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
        is_head = head < NUM_HEADS
        query_rows = query + token * query_token + head * query_head
        query_out = new_query + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
        key_out = new_key + token * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        first, second = _load_pairs(key_rows, is_kv_head, HALF, INTERLEAVED)
        query_first, query_second = _load_pairs(query_rows, is_head, HALF, INTERLEAVED)
        # Each head loads the angles again, from L1: one row for all heads would go through shared memory.
        angle, query_angle = token * HALF + kv_head * 0, token * HALF + head * 0
        cosines, sines = _load_angles(cos + angle, is_kv_head, HALF), _load_angles(sin + angle, is_kv_head, HALF)
        first, second = _turn(first, second, cosines, sines, ROUNDS_ONCE)
        _store_pairs(key_out, is_kv_head, first, second, HALF, INTERLEAVED)
        _store_pairs(key_cache + cached, is_written, first, second, HALF, INTERLEAVED)
        cosines, sines = _load_angles(cos + query_angle, is_head, HALF), _load_angles(sin + query_angle, is_head, HALF)
        query_first, query_second = _turn(query_first, query_second, cosines, sines, ROUNDS_ONCE)
        _store_pairs(query_out, is_head, query_first, query_second, HALF, INTERLEAVED)
        if 2 * HALF < HEAD_DIM:
            _store_rest(query_out, is_head, _load_rest(query_rows, is_head, 2 * HALF, HEAD_DIM), 2 * HALF, HEAD_DIM)
    if 2 * HALF < HEAD_DIM:
        rest = _load_rest(key_rows, is_kv_head, 2 * HALF, HEAD_DIM)
        _store_rest(key_cache + cached, is_written, rest, 2 * HALF, HEAD_DIM)
        if HALF > 0:
            _store_rest(key_out, is_kv_head, rest, 2 * HALF, HEAD_DIM)
    cached_values = slot * (NUM_KV_HEADS * VALUE_DIM) + kv_head * VALUE_DIM
    _store_rest(value_cache + cached_values, is_written, values, 0, VALUE_DIM)


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `kvstore.kernels.kv.rotate_and_write`: rotated query and key, new and contiguous. Without a
    rotation they are returned as they are."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], 0 if rotation is None else rotation.cos.shape[-1]
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and slots.dtype == torch.int64
    assert rotation is None or (rotation.cos.is_contiguous() and rotation.sin.is_contiguous())
    assert rotation is None or len(rotation.cos) == num_tokens
    query_in, key_in, value_in = _rows_of(query), _rows_of(key), _rows_of(value)
    new_query, new_key = query, key
    if rotation is not None:
        new_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        new_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    if not num_tokens:
        return new_query, new_key
    pairs = max(num_kv_heads, num_heads // 4)  # the tile of queries is in registers, too
    pairs = triton.next_power_of_2(pairs) * triton.next_power_of_2(half or head_dim)
    _write_kernel[(num_tokens,)](
        query_in, key_in, value_in, new_query, new_key, key_cache, value_cache, slots,
        None if rotation is None else rotation.cos, None if rotation is None else rotation.sin,
        *query_in.stride()[:2], *key_in.stride()[:2], *value_in.stride()[:2],
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value.shape[2],
        HALF=half, INTERLEAVED=rotation is not None and rotation.style is Style.INTERLEAVED,
        ROUNDS_ONCE=rotation is not None and rotation.rounds_once(key.dtype),
        num_warps=min(max(pairs // 256, 1), 8),  # so that each thread has 16 bytes of a tile of keys
        enable_fp_fusion=False,
    )  # fmt: skip
    return new_query, new_key


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As `kvstore.kernels.reference.write_kv`."""
    rotate_and_write(key, key, value, key_cache, value_cache, slots, None)


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# -- blocks of the arena into the paged cache --------------------------------------------------------------------------
@triton.jit(do_not_specialize=["num_blocks", "num_layers"])
def _load_kernel(
    arena, layers, blocks, cos, sin, num_blocks, num_layers, arena_block_stride, ALL_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUNDS_ONCE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Items are NUM_ROWS heads of a block in one layer, keys and values. Programs take items in turn.

    layers: (where keys begin after `arena`, and values, address of the key cache, of the value cache). ALL_HEADS: of a
    token in the arena.
    """
    BLOCK_ROWS: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    NUM_PARTS: tl.constexpr = triton.cdiv(BLOCK_ROWS, NUM_ROWS)
    layer_items = num_blocks * NUM_PARTS
    item = tl.program_id(0)
    while item < num_layers * layer_items:
        layer = layers + item // layer_items * 4
        keys, values = tl.load(layer), tl.load(layer + 1)
        key_cache, value_cache = tl.load(layer + 2).to(arena.dtype), tl.load(layer + 3).to(arena.dtype)
        if ALIGNED:
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
            key_cache, value_cache = tl.multiple_of(key_cache, 16), tl.multiple_of(value_cache, 16)
        keys, values = arena + keys, arena + values
        block = blocks + item % layer_items // NUM_PARTS
        arena_block, number, position = tl.load(block), tl.load(block + num_blocks), tl.load(block + 2 * num_blocks)
        row = item % NUM_PARTS * NUM_ROWS + tl.arange(0, NUM_ROWS)[:, None]
        mask = row < BLOCK_ROWS
        token = row // NUM_KV_HEADS
        arena_row = token * ALL_HEADS + row % NUM_KV_HEADS
        source = arena_block * arena_block_stride + arena_row * HEAD_DIM
        target = number * (BLOCK_ROWS * HEAD_DIM) + row * HEAD_DIM
        value = _load_rest(values + arena_block * arena_block_stride + arena_row * VALUE_DIM, mask, 0, VALUE_DIM)
        if HALF > 0:
            first, second = _load_pairs(keys + source, mask, HALF, INTERLEAVED)
            angle = (position + token) * HALF
            cosines, sines = _load_angles(cos + angle, mask, HALF), _load_angles(sin + angle, mask, HALF)
            first, second = _turn(first, second, cosines, sines, ROUNDS_ONCE)
            _store_pairs(key_cache + target, mask, first, second, HALF, INTERLEAVED)
        if 2 * HALF < HEAD_DIM:
            rest = _load_rest(keys + source, mask, 2 * HALF, HEAD_DIM)
            _store_rest(key_cache + target, mask, rest, 2 * HALF, HEAD_DIM)
        _store_rest(value_cache + number * (BLOCK_ROWS * VALUE_DIM) + row * VALUE_DIM, mask, value, 0, VALUE_DIM)
        item += tl.num_programs(0)


def load(
    arena: Sequence[tuple[Tensor, Tensor]], layers: Sequence[CachedLayer], blocks: Tensor, rotation: Rotation | None
) -> None:
    """Load N blocks of some layers of one shape, in order. Arena: see `kvstore.kernels.kv`; it is pinned host memory.
    Caches as in `kvstore.kernels.reference.load_blocks`.

    blocks: [3, N] int64 on the device: arena block, HBM block, and the position of each block's first token. rotation:
    the layers' full table, on the device.
    """
    num_blocks = blocks.shape[1]
    half = 0 if rotation is None else rotation.cos.shape[-1]
    assert blocks.is_contiguous() and blocks.dtype == torch.int64
    assert rotation is None or (rotation.cos.is_contiguous() and rotation.sin.is_contiguous())
    if not num_blocks or not layers:
        return
    base = arena[0][0]
    numbers: list[int] = []
    for layer in layers:
        assert all(cache.is_contiguous() and cache.dtype == base.dtype for cache in layer[1:])
        numbers += _addresses(arena, layer)
    (_, block_size, num_kv_heads, head_dim), value_dim = layers[0][1].shape, layers[0][2].shape[3]
    num_rows = min(_tile_rows(max(head_dim, value_dim)), triton.next_power_of_2(block_size * num_kv_heads))
    num_items = len(layers) * num_blocks * triton.cdiv(block_size * num_kv_heads, num_rows)
    _load_kernel[(min(num_items, NUM_PROGRAMS),)](
        base, _numbers_on(blocks.device, _stream(blocks), tuple(numbers)), blocks,
        None if rotation is None else rotation.cos, None if rotation is None else rotation.sin,
        num_blocks, len(layers), base.stride(0), ALL_HEADS=_all_heads(arena, layers[0][0]),
        BLOCK_SIZE=block_size, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, NUM_ROWS=num_rows,
        HALF=half, INTERLEAVED=rotation is not None and rotation.style is Style.INTERLEAVED,
        ROUNDS_ONCE=rotation is not None and rotation.rounds_once(base.dtype),
        ALIGNED=not any(number % 16 for number in numbers),
        num_warps=min(max(num_rows * triton.next_power_of_2(half or head_dim) // 256, 1), NUM_WARPS),
        enable_fp_fusion=False,
    )  # fmt: skip


def _addresses(arena: Sequence[tuple[Tensor, Tensor]], layer: tuple[int, Tensor, Tensor]) -> list[int]:
    """Where a layer's keys and values begin in the arena, in numbers after the first layer's keys; and the addresses of
    those that it is read from or written to.
    """
    number, *pair = layer
    begin = arena[0][0].storage_offset()
    return [*(part.storage_offset() - begin for part in arena[number]), *(tensor.data_ptr() for tensor in pair)]


def _all_heads(arena: Sequence[tuple[Tensor, Tensor]], layer: int) -> int:
    """How many heads a token has in the arena, of which these views may have a part. They lie one after the other."""
    keys, values = arena[layer]
    count = keys.stride(1) // keys.shape[3]
    for part in (keys, values):
        assert part.stride()[1:] == (count * part.shape[3], part.shape[3], 1)
    return count


def _tile_rows(head_dim: int) -> int:
    return max(1, TILE // triton.next_power_of_2(head_dim))


# -- a step's raw keys and values into the arena -----------------------------------------------------------------------
@triton.jit(do_not_specialize=["num_tokens", "num_layers"], do_not_specialize_on_alignment=["places", "rows"])
def _save_kernel(
    arena, layers, rows, places, num_tokens, num_layers,
    key_token, key_head, value_token, value_head, arena_block_stride, ALL_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Items are NUM_ROWS heads of consecutive tokens in one layer. layers: (where keys begin after `arena`, and values,
    key's address, value's address).
    """
    num_parts = tl.cdiv(num_tokens * NUM_KV_HEADS, NUM_ROWS)
    item = tl.program_id(0)
    while item < num_layers * num_parts:
        layer = layers + item // num_parts * 4
        saved_keys, saved_values = tl.load(layer), tl.load(layer + 1)
        keys, values = tl.load(layer + 2).to(arena.dtype), tl.load(layer + 3).to(arena.dtype)
        if ALIGNED:
            saved_keys, saved_values = tl.multiple_of(saved_keys, 16), tl.multiple_of(saved_values, 16)
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        row = item % num_parts * NUM_ROWS + tl.arange(0, NUM_ROWS)
        token, head = row // NUM_KV_HEADS, (row % NUM_KV_HEADS)[:, None]
        place = tl.load(places + token, mask=token < num_tokens, other=-1)[:, None]
        mask = place >= 0
        if rows is not None:
            token = tl.load(rows + token, mask=token < num_tokens, other=0)
        token = token.to(tl.int64)[:, None]
        key = _load_rest(keys + token * key_token + head * key_head, mask, 0, HEAD_DIM)
        value = _load_rest(values + token * value_token + head * value_head, mask, 0, VALUE_DIM)
        block, arena_row = place // BLOCK_SIZE * arena_block_stride, place % BLOCK_SIZE * ALL_HEADS + head
        _store_rest(arena + saved_keys + block + arena_row * HEAD_DIM, mask, key, 0, HEAD_DIM)
        _store_rest(arena + saved_values + block + arena_row * VALUE_DIM, mask, value, 0, VALUE_DIM)
        item += tl.num_programs(0)


def save(
    arena: Sequence[tuple[Tensor, Tensor]], layers: Sequence[RawLayer], rows: Tensor | None, places: Tensor
) -> None:
    """As `kvstore.kernels.kv.save_to_arena`, with one launch for all layers whose keys and values have the same shapes
    and strides."""
    if not layers or not len(places):
        return
    assert places.is_contiguous() and places.dtype == torch.int64
    assert rows is None or (rows.is_contiguous() and rows.dtype == torch.int64)
    base, block_size = arena[0][0], arena[0][0].shape[1]
    readable = [(layer, _rows_of(key), _rows_of(value)) for layer, key, value in layers]
    for kind, group in groupby(readable, lambda one: _kind_of(arena, one)):
        numbers = [number for layer in group for number in _addresses(arena, layer)]
        num_rows = _tile_rows(max(kind.head_dim, kind.value_dim))
        num_items = len(numbers) // 4 * triton.cdiv(len(places) * kind.num_kv_heads, num_rows)
        _save_kernel[(min(num_items, NUM_PROGRAMS),)](
            base, _numbers_on(places.device, _stream(places), tuple(numbers)), rows, places,
            len(places), len(numbers) // 4, *kind.strides, base.stride(0), ALL_HEADS=kind.all_heads,
            BLOCK_SIZE=block_size, NUM_KV_HEADS=kind.num_kv_heads, HEAD_DIM=kind.head_dim, VALUE_DIM=kind.value_dim,
            NUM_ROWS=num_rows, ALIGNED=kind.aligned, num_warps=NUM_WARPS,
        )  # fmt: skip


class _Kind(NamedTuple):
    """What layers of one launch have in common. aligned: all addresses are multiples of 16."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    all_heads: int
    strides: tuple[int, int, int, int]  # from token to token and from head to head, of keys and of values
    aligned: bool


def _kind_of(arena: Sequence[tuple[Tensor, Tensor]], layer: RawLayer) -> _Kind:
    number, key, value = layer
    aligned, strides = not any(one % 16 for one in _addresses(arena, layer)), (*key.stride()[:2], *value.stride()[:2])
    return _Kind(key.shape[1], key.shape[2], value.shape[2], _all_heads(arena, number), strides, aligned)


@lru_cache(maxsize=512)
def _numbers_on(device: torch.device, stream: int, numbers: tuple[int, ...]) -> Tensor:
    """These numbers as a tensor on the device. Kept, because buffers often come back: then a save copies nothing.

    stream: of the save, which orders the copy; the result may only be used there.
    """
    return to_device(torch.tensor(numbers), device)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
