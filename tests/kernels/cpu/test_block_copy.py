"""Blocks and tokens by compiled code: large loads, numbers that are none, and nothing out of range."""

import pytest
import torch

from kvstore.kernels import reference
from kvstore.kernels.cpu import block_copy as copy_native
from kvstore.kernels.kv import BlockLoad, save_layers
from tests.support.arenas import layers_of
from tests.support.native import needs_compiler
from tests.support.rotations import kinds

pytestmark = needs_compiler

NUM_ARENA_BLOCKS, NUM_BLOCKS = 9, 11


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def some_blocks(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    arena_blocks, numbers = (torch.randperm(n, generator=generator)[:count] for n in (NUM_ARENA_BLOCKS, NUM_BLOCKS))
    return [arena_blocks, numbers, torch.randint(200, (count,), generator=generator)]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [3, 9, 256])
def test_a_large_load_has_the_bits_of_its_twin(use_threads, num_threads, count):
    """A layer is shared between threads from 128 KiB on, and from 4 MiB on written past the caches."""
    use_threads(num_threads)
    arena = random(count, 1, 2, 16, 4, 64, dtype=torch.bfloat16)
    arena_blocks, positions = torch.arange(count).flip(0), torch.arange(count) % 200
    for rotation in (None, kinds(torch.bfloat16, 64)["half"][0]):
        caches, twins = (torch.zeros(2, count, 16, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        BlockLoad(layers_of(arena), arena_blocks, arena_blocks.roll(1), positions, [rotation]).load_layer(0, *caches)
        reference.load_blocks(layers_of(arena)[0], arena_blocks, *twins, arena_blocks.roll(1), positions, rotation)
        assert torch.equal(bits(caches), bits(twins))


def test_infinities_and_nans_stay_what_they_are():
    arena = random(2, 1, 2, 16, 2, 32, dtype=torch.bfloat16)
    arena[0, 0, 0, :, :, ::3] = float("inf")
    arena[1, 0, 0] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)  # a NaN of ones
    for name in ("half", "upcast"):
        caches, twins = (torch.zeros(2, 2, 16, 2, 32, dtype=torch.bfloat16) for _ in range(2))
        arguments = torch.arange(2), torch.arange(2), torch.tensor([3, 40]), kinds(torch.bfloat16)[name]
        BlockLoad(layers_of(arena), *arguments).load_layer(0, *caches)
        reference.load_blocks(layers_of(arena)[0], arguments[0], *twins, *arguments[1:3], arguments[3][0])
        assert torch.equal(caches.isnan(), twins.isnan()) and torch.equal(caches.nan_to_num(1), twins.nan_to_num(1))


@pytest.mark.parametrize("wrong", range(3), ids=["arena block", "HBM block", "position"])
@pytest.mark.parametrize("number", [-1, 1000])
def test_a_load_out_of_range_writes_nothing(wrong, number):
    arena = random(NUM_ARENA_BLOCKS, 3, 2, 16, 2, 32, dtype=torch.float32)
    where = some_blocks(4)
    where[wrong][3] = number
    caches = torch.zeros(2, NUM_BLOCKS, 16, 2, 32)
    with pytest.raises(IndexError):
        BlockLoad(layers_of(arena), *where, kinds(torch.float32)["half"]).load_layer(0, *caches)
    assert not caches.any()


@pytest.mark.parametrize(
    ("rows", "places"), [([0, 5], [1, 2]), ([-1, 0], [1, 2]), ([0, 1], [1, 64]), ([0, 1], [-1, 2])]
)
def test_a_save_out_of_range_writes_nothing(rows, places):
    arena, layers = torch.zeros(4, 1, 2, 16, 2, 32), [(0, torch.ones(5, 2, 32), torch.ones(5, 2, 32))]
    with pytest.raises(IndexError):
        save_layers(layers_of(arena), layers, torch.tensor(rows), torch.tensor(places))
    assert not arena.any()


def test_what_is_not_for_it():
    half, caches = torch.float16, torch.zeros(2, NUM_BLOCKS, 16, 2, 32)
    load, [layer] = copy_native.NativeLoad(*some_blocks(2)), layers_of(torch.zeros(NUM_ARENA_BLOCKS, 1, 2, 16, 2, 32))
    assert load.load_layer(layer, *caches, None)
    assert not load.load_layer(layer, *caches.to(half), None)
    assert not load.load_layer(layer, *caches.transpose(1, 2), None)
    assert not load.load_layer(layer, *caches, kinds(half)["half"][0])
    arena, ones, places = layers_of(torch.zeros(4, 1, 2, 16, 2, 32)), torch.ones(5, 2, 32), torch.tensor([3])
    assert copy_native.save_layers(arena, [(0, ones, ones)], None, places)
    for other in (ones.to(half), ones.transpose(1, 2).contiguous().transpose(1, 2), ones[:, :1]):
        assert not copy_native.save_layers(arena, [(0, ones, other)], None, places)
