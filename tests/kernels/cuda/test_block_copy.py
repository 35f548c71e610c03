"""Blocks between the pinned arena and a device's paged cache, by kernels: the bits of the twins.

Without a CUDA device the kernels run in Triton's interpreter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels import reference
from kvstore.kernels.kv import BlockLoad, save_to_arena
from kvstore.memory.layout import KVLayout, LayerShape, OwnPart
from kvstore.memory.transfer import Arena
from kvstore.rope.rotary import Style
from tests.support.arenas import alike
from tests.support.rotations import KINDS, kinds, moved, rotation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ARENA_BLOCKS, NUM_BLOCKS, NUM_LAYERS = 11, 13, 3


class Memory:
    """An arena, full of values of their own, and caches full of 5. shape: block_size, num_kv_heads, head_dim.

    num_ranks: so many share the heads, and this is the middle one; others have the layers before and after.
    """

    def __init__(self, shape, dtype, device, seed=0, num_ranks=1) -> None:
        block_size, heads, head_dim = shape
        first = num_ranks // 2
        own = OwnPart((first, first + NUM_LAYERS), (first * heads, (first + 1) * heads))
        num_layers = NUM_LAYERS + num_ranks - 1
        rotations = (None,) * num_layers
        shapes = alike(num_layers, num_ranks * heads, head_dim)
        layout = KVLayout(shapes, block_size, dtype, rotations, own)
        self.arena = Arena(layout, NUM_ARENA_BLOCKS, pin=device == "cuda")
        generator = torch.Generator().manual_seed(seed)
        self.arena.tensor.copy_(torch.randn(self.arena.tensor.shape, generator=generator).to(dtype))
        self.device = device
        self.shape = (NUM_BLOCKS, *shape)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        key_cache, value_cache = (torch.full(self.shape, 5.0, dtype=self.arena.layout.dtype) for _ in range(2))
        return key_cache.to(self.device), value_cache.to(self.device)

    def check_load(self, rotations, arena_blocks, blocks, positions) -> None:
        """Every layer, every element of the caches, on the CPU's own arithmetic."""
        on_device = {id(r): r and moved(r, self.device) for r in rotations}
        load = BlockLoad(self.arena.layers, arena_blocks, blocks, positions, [on_device[id(r)] for r in rotations])
        numbers = [torch.tensor(n, dtype=torch.int64) for n in (arena_blocks, blocks, positions)]
        loaded = [self.caches() for _ in rotations]
        load.load_by_kernel(0, loaded[:2])  # several layers in one call, and one by itself
        load.load_by_kernel(2, loaded[2:])
        for layer, (turn, caches) in enumerate(zip(rotations, loaded, strict=True)):
            twins = [cache.cpu() for cache in self.caches()]
            reference.load_blocks(self.arena.layers[layer], numbers[0], *twins, *numbers[1:], turn)
            for cache, wanted in zip(caches, twins, strict=True):
                assert torch.equal(cache.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", KINDS)
def test_a_load_gives_the_bits_of_the_twin(name, kernel_device):
    memory = Memory((16, 2, 32), torch.bfloat16, kernel_device)
    memory.check_load(kinds(torch.bfloat16)[name], [9, 0, 4, 10, 3], [12, 1, 0, 7, 3], [160, 0, 16, 57, 3])


@pytest.mark.parametrize("shape", [(1, 1, 20), (7, 3, 48), (16, 8, 128), (5, 2, 8)], ids=str)
@pytest.mark.parametrize("num_blocks", [0, 1, 6])
def test_a_kernel_loads_any_shape(shape, num_blocks, kernel_device):
    memory = Memory(shape, torch.bfloat16, kernel_device)
    arena_blocks, blocks = [9, 0, 4, 10, 3, 7][:num_blocks], [2, 12, 0, 1, 8, 6][:num_blocks]
    rotations = [kinds(torch.bfloat16, shape[2])[name][0] for name in ("half", "partial upcast", "none")]
    memory.check_load(rotations, arena_blocks, blocks, [16 * i for i in range(num_blocks)])


@settings(max_examples=10)
@given(
    st.integers(1, NUM_ARENA_BLOCKS), st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 12)),
    st.sampled_from(DTYPES), st.sampled_from(list(Style)), st.booleans(), st.integers(1, 12),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_load(kernel_device, num_blocks, shape, dtype, style, upcast, half, random):
    block_size, num_kv_heads, half_dim = shape
    memory = Memory((block_size, num_kv_heads, 2 * half_dim), dtype, kernel_device)
    arena_blocks, blocks = (random.sample(range(n), num_blocks) for n in (NUM_ARENA_BLOCKS, NUM_BLOCKS))
    turns = [rotation(dtype, style, upcast, 2 * min(half, half_dim), base) for base in (10000.0, 500.0)]
    positions = [random.randrange(200) for _ in arena_blocks]
    memory.check_load([turns[0], None, turns[1]], arena_blocks, blocks, positions)


class Saving:
    """Raw keys and values of 40 tokens in layers 2 and 0, with given strides; values follow from keys."""

    def __init__(self, memory, strides, seed=0) -> None:
        _, _, num_kv_heads, head_dim = memory.shape
        size, generator = num_kv_heads * head_dim, torch.Generator().manual_seed(seed)
        width = 2 * size + {"packed": 64, "odd": 3}.get(strides, 0)
        self.memory = memory
        self.layers = []
        for layer in (2, 0):
            product = torch.randn(40, width, generator=generator).to(memory.arena.layout.dtype).to(memory.device)
            product[:, size : 2 * size] = product[:, :size] * -0.5 + 3
            pair = [part.unflatten(1, (num_kv_heads, head_dim)) for part in product[:, : 2 * size].split(size, dim=1)]
            if strides == "transposed" or (strides == "mixed" and layer == 0):
                pair = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in pair]
            if strides == "scattered":  # elements of a head apart
                pair = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in pair]
            self.layers.append((layer, *pair))

    def check(self, rows, places) -> None:
        """rows: list or None; places: of as many tokens, or of the first of all."""
        arena = self.memory.arena
        twin = Arena(arena.layout, NUM_ARENA_BLOCKS, pin=False)
        twin.tensor.copy_(arena.tensor)
        at = torch.tensor(places, dtype=torch.int64)
        for layer, *pair in self.layers:
            key, value = (t[: len(places)].cpu() if rows is None else t[rows].cpu() for t in pair)
            reference.save_tokens(twin.layers[layer], key, value, at)
        device = self.memory.device
        picked = None if rows is None else torch.tensor(rows, dtype=torch.int64).to(device)
        save_by_kernel(arena.layers, self.layers, picked, at.to(device))
        assert torch.equal(arena.tensor, twin.tensor)


def save_by_kernel(arena, layers, rows, places):
    """On a device through the door that is used; in the interpreter that door would take the twin."""
    from kvstore.kernels.cuda import kv as kv_triton

    if places.is_cuda:
        save_to_arena(arena, layers, rows, places)
        torch.cuda.synchronize()
    else:
        kv_triton.save(arena, layers, rows, places)


@pytest.mark.parametrize("strides", ["contiguous", "packed", "transposed", "odd", "mixed", "scattered"])
def test_a_save_gives_the_bits_of_the_twin(strides, kernel_device):
    saving = Saving(Memory((16, 2, 32), torch.bfloat16, kernel_device), strides)
    places = torch.randperm(NUM_ARENA_BLOCKS * 16, generator=torch.Generator().manual_seed(3)).tolist()
    for num_tokens in (0, 1, 5, 40):
        saving.check(None, places[:num_tokens])
    saving.check([3, 4, 5, 6], places[40:44])
    saving.check([39, 0, 17], [places[50], -1, places[51]])


@settings(max_examples=10)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 24)), st.sampled_from(DTYPES),
    st.sampled_from(["packed", "transposed", "odd", "mixed"]), st.integers(0, 9), st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_save(kernel_device, shape, dtype, strides, num_tokens, random):
    saving = Saving(Memory(shape, dtype, kernel_device), strides)
    places = random.sample(range(NUM_ARENA_BLOCKS * shape[0]), num_tokens)
    saving.check(random.sample(range(40), num_tokens), [-1 if random.random() < 0.2 else place for place in places])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [(16, 2, 32), (7, 1, 20)], ids=str)
def test_a_rank_moves_its_layers_and_heads_alone(num_ranks, shape, kernel_device):
    memory = Memory(shape, torch.bfloat16, kernel_device, num_ranks=num_ranks)
    rotations = [kinds(torch.bfloat16, shape[2])[name][0] for name in ("half", "partial upcast", "none")]
    memory.check_load(rotations, [9, 0, 4], [2, 12, 0], [160, 0, 57])
    saving = Saving(memory, "packed")
    saving.check([3, 4, 17, 6], [0, shape[0], -1, 5 * shape[0] + 3])


def test_layers_of_different_shapes(kernel_device):
    """Two of one shape, and two between them and after them; saved in one call, loaded in one call."""
    other = LayerShape(1, 48, 16)
    layout = KVLayout((*alike(2, 2, 32), other, *alike(1, 2, 32), other), 16, torch.bfloat16, (None,) * 5)
    arena, twin = (Arena(layout, NUM_ARENA_BLOCKS, pin=kernel_device == "cuda") for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    steps = [
        (layer, *(torch.randn(40, *part.shape[2:], generator=generator).bfloat16() for part in pair))
        for layer, pair in enumerate(arena.layers)
    ]
    places = torch.arange(7 * 16, 7 * 16 + 40)
    on_device = [(layer, *(part.to(kernel_device) for part in pair)) for layer, *pair in steps]
    save_by_kernel(arena.layers, on_device, None, places.to(kernel_device))
    for layer, *pair in steps:
        reference.save_tokens(twin.layers[layer], *pair, places)
    assert torch.equal(arena.tensor, twin.tensor)
    turns = {48: kinds(torch.bfloat16, 48)["half"][0], 32: None}
    rotations = [turns[shape.key_dim] for shape in layout.shapes]
    at = [7, 8], [4, 2], [101, 117]
    load = BlockLoad(arena.layers, *at, [turn and moved(turn, kernel_device) for turn in rotations])
    loaded = [
        [torch.full((NUM_BLOCKS, *part.shape[1:]), 5.0, dtype=part.dtype, device=kernel_device) for part in pair]
        for pair in arena.layers
    ]
    twins = [[cache.cpu().clone() for cache in pair] for pair in loaded]
    load.load_by_kernel(0, loaded)
    numbers = [torch.tensor(one) for one in at]
    for layer, pair, turn in zip(arena.layers, twins, rotations, strict=True):
        reference.load_blocks(layer, numbers[0], *pair, *numbers[1:], turn)
    for pair, wanted in zip(loaded, twins, strict=True):
        assert all(torch.equal(cache.cpu(), want) for cache, want in zip(pair, wanted, strict=True))


def test_what_was_saved_is_loaded(kernel_device):
    """Save by kernel, load by kernel at another position: what the model writes when it computes there."""
    memory, turn = Memory((16, 2, 32), torch.bfloat16, kernel_device), kinds(torch.bfloat16)["half"][0]
    saving = Saving(memory, "packed")
    save_by_kernel(memory.arena.layers, saving.layers, None, torch.arange(7 * 16, 9 * 16, device=kernel_device))
    on_device = moved(turn, kernel_device)
    load = BlockLoad(memory.arena.layers, [7, 8], [4, 2], [101, 117], [on_device, None, on_device])
    for layer, key, value in saving.layers:
        caches = memory.caches()
        load.load_by_kernel(layer, [caches])
        wanted = turn.at(torch.arange(101, 133)).apply(key[:32].cpu())
        assert torch.equal(caches[0][[4, 2]].flatten(0, 1).cpu(), wanted)
        assert torch.equal(caches[1][[4, 2]].flatten(0, 1).cpu(), value[:32].cpu())


def test_the_same_buffers_are_described_once(kernel_device):
    """A graph's buffers are saved after each replay; their addresses travel to the device the first time only."""
    from kvstore.kernels.cuda import kv as kv_triton

    saving = Saving(Memory((16, 2, 32), torch.bfloat16, kernel_device), "packed")
    saving.check(None, [5])
    before = kv_triton._numbers_on.cache_info()
    saving.check(None, [6])
    after = kv_triton._numbers_on.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_load_layers_on_a_device(name):
    """Through the door that transfers use."""
    memory = Memory((16, 2, 32), torch.bfloat16, "cuda")
    rotations = kinds(torch.bfloat16, device="cuda")[name]
    load = BlockLoad(memory.arena.layers, [9, 0], [12, 1], [160, 3], rotations)
    for layer, turn in enumerate(kinds(torch.bfloat16)[name]):
        caches, twins = memory.caches(), [cache.cpu() for cache in memory.caches()]
        load.load_layers(layer, [caches])
        numbers = (torch.tensor([12, 1]), torch.tensor([160, 3]))
        reference.load_blocks(memory.arena.layers[layer], torch.tensor([9, 0]), *twins, *numbers, turn)
        assert all(torch.equal(cache.cpu(), wanted) for cache, wanted in zip(caches, twins, strict=True))
