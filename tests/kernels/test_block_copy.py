"""Blocks between arena and paged cache on a CPU: bit-identical to what computing at the position writes, no more."""

from contextlib import nullcontext

import pytest
import torch

from kvstore.kernels import reference
from kvstore.kernels.kv import BlockLoad, save_layers, write_kv
from tests.support.arenas import layers_of
from tests.support.native import no_compiler
from tests.support.rotations import KINDS, kinds

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ARENA_BLOCKS, NUM_BLOCKS, NUM_LAYERS, HEADS, HEAD_DIM = 11, 13, 3, 2, 32


BLOCKS = {  # arena blocks, HBM blocks: runs or not
    "runs": ([2, 3, 4, 5, 6], [4, 5, 6, 7, 8]),
    "arena blocks permuted": ([9, 0, 4, 10, 3], [4, 5, 6, 7, 8]),
    "HBM blocks permuted": ([2, 3, 4, 5, 6], [12, 1, 0, 7, 3]),
    "both permuted": ([9, 0, 4, 10, 3], [12, 1, 0, 7, 3]),
}


def raw_keys(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(NUM_LAYERS, num_tokens, HEADS, HEAD_DIM, generator=generator)
    keys[:, 1::2] *= 2.0**-120  # products that underflow
    return list(keys.to(dtype))


def values_of(key: torch.Tensor) -> torch.Tensor:
    return key * -0.5 + 3


def new_arena(block_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((NUM_ARENA_BLOCKS, NUM_LAYERS, 2, block_size, HEADS, HEAD_DIM), 7.0, dtype=dtype)


def new_caches(block_size: int, dtype: torch.dtype, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (NUM_BLOCKS, block_size, HEADS, HEAD_DIM)
    return [tuple(torch.full(shape, 5.0, dtype=dtype, device=device) for _ in range(2)) for _ in range(NUM_LAYERS)]


def places_of(blocks: list[int], block_size: int) -> torch.Tensor:
    return (torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)).flatten()


def computed(keys, rotations, blocks, block_size, positions):
    """Caches as the model's forward writes them."""
    caches = new_caches(block_size, keys[0].dtype)
    at = places_of(positions, 1)[:, None] + torch.arange(block_size)
    for key, turn, (key_cache, value_cache) in zip(keys, rotations, caches, strict=True):
        rotated = key if turn is None else turn.at(at.flatten()).apply(key)
        write_kv(rotated, values_of(key), key_cache, value_cache, places_of(blocks, block_size))
    return caches


def assert_same(caches, expected):
    for pair, wanted in zip(caches, expected, strict=True):
        for cache, want in zip(pair, wanted, strict=True):
            assert torch.equal(cache.cpu().view(torch.uint8), want.view(torch.uint8))  # the sign of zero included


def saved(keys, arena_blocks, block_size) -> torch.Tensor:
    arena = new_arena(block_size, keys[0].dtype)
    places = places_of(arena_blocks, block_size)
    save_layers(layers_of(arena), [(layer, key, values_of(key)) for layer, key in enumerate(keys)], None, places)
    return arena


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block_size", [16, 7])
@torch.inference_mode()
def test_what_comes_back_is_what_was_computed(dtype, name, block_size):
    """At its old position and at a new one, into runs and into scattered blocks, with and without compiled code."""
    rotations, keys = kinds(dtype)[name], raw_keys(5 * block_size, dtype)
    for compiled in (nullcontext(), no_compiler()):
        with compiled:
            for arena_blocks, blocks in BLOCKS.values():
                arena = saved(keys, arena_blocks, block_size)
                for first in (0, 101):
                    positions = [first + i * block_size for i in range(5)]
                    expected = computed(keys, rotations, blocks, block_size, positions)
                    caches = new_caches(block_size, dtype)
                    BlockLoad(layers_of(arena), arena_blocks, blocks, positions, rotations).load_layers(0, caches)
                    assert_same(caches, expected)  # blocks that were not loaded included


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 150])
@pytest.mark.parametrize("strides", ["contiguous", "packed", "transposed", "odd"])
def test_saves_take_views_and_parts_of_a_step(dtype, num_tokens, strides):
    """Several layers at once, one at a time and the twin give the same arena; other tokens keep their bytes."""
    generator = torch.Generator().manual_seed(num_tokens)
    width = {"packed": 2 * HEADS * HEAD_DIM + 64, "odd": 2 * HEADS * HEAD_DIM + 3}.get(strides, 2 * HEADS * HEAD_DIM)
    layers = []
    for layer in (2, 0):
        product = torch.randn(170, width, generator=generator).to(dtype)
        pair = [product[:, i * HEADS * HEAD_DIM :][:, : HEADS * HEAD_DIM].view(170, HEADS, HEAD_DIM) for i in (0, 1)]
        if strides == "transposed":
            pair = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in pair]
        layers.append((layer, *pair))
    places = torch.randperm(NUM_ARENA_BLOCKS * 16, generator=generator)[:num_tokens]
    for rows in (None, torch.arange(3, 3 + num_tokens), torch.randperm(170, generator=generator)[:num_tokens]):
        part = [(layer, *(t[:num_tokens] if rows is None else t for t in pair)) for layer, *pair in layers]
        arena, one, twin = (new_arena(16, dtype) for _ in range(3))
        save_layers(layers_of(arena), part, rows, places)
        for layer, key, value in part:
            key, value = (key, value) if rows is None else (key[rows], value[rows])
            save_layers(layers_of(one), [(layer, key, value)], None, places)
            reference.save_tokens(layers_of(twin)[layer], key, value, places)
        assert torch.equal(arena, twin) and torch.equal(one, twin)
        untouched = torch.ones(NUM_ARENA_BLOCKS * 16, dtype=torch.bool).index_fill(0, places, False)
        assert (arena[:, 0].transpose(1, 2).flatten(0, 1)[untouched] == 7).all()
        assert (arena[:, 1] == 7).all()


def test_nothing_to_load_is_nothing():
    caches = new_caches(16, torch.float32)
    load = BlockLoad(layers_of(new_arena(16, torch.float32)), [], [], [], kinds(torch.float32)["half"])
    load.load_layer(0, *caches[0])
    assert_same(caches, new_caches(16, torch.float32))


def test_nothing_to_save_is_nothing():
    arena = new_arena(16, torch.float32)
    layers = layers_of(arena)
    save_layers(layers, [], None, torch.tensor([3]))
    save_layers(layers, [(0, *torch.randn(2, 4, HEADS, HEAD_DIM))], torch.tensor([]).long(), torch.tensor([]).long())
    assert (arena == 7).all()
