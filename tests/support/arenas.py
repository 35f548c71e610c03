"""A small arena and HBM: what is loaded and saved follows from a seed, and what comes of it is known from the twins."""

import torch

from kvstore.blocks.records import Load, Save
from kvstore.kernels import reference
from kvstore.memory.layout import KVLayout, LayerShape
from kvstore.memory.transfer import Arena
from kvstore.rope.rotary import Rotation, Style

NUM_LAYERS, BLOCK_SIZE, HEAD_DIM = 3, 4, 8
SHAPES = (LayerShape(2, HEAD_DIM, HEAD_DIM), LayerShape(1, 16, 4), LayerShape(2, HEAD_DIM, HEAD_DIM))
NUM_ARENA_BLOCKS, NUM_BLOCKS = 8, 6
LOADS = (Load(4, 1, 8, b""), Load(2, 5, 0, b""))
SAVES = (Save(0, 0, 4, 3, 0), Save(1, 1, 2, 6, 1))  # rows 0 .. 3 and 7, 8 of the step
ROW_STARTS = (0, 6)


def alike(num_layers: int, num_kv_heads: int, head_dim: int) -> tuple[LayerShape, ...]:
    """Layers of one shape, whose values have the keys' size."""
    return (LayerShape(num_kv_heads, head_dim, head_dim),) * num_layers


def layers_of(arena: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An arena of [num_arena_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] as kernels take it."""
    return [tuple(layer.unbind(1)) for layer in arena.unbind(1)]


def whole(arena: Arena) -> torch.Tensor:
    """All of an arena whose layers are alike: [num_arena_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    shapes, block_size = arena.layout.shapes, arena.layout.block_size
    return arena.tensor.view(-1, len(shapes), 2, block_size, shapes[0].num_kv_heads, shapes[0].key_dim)


def make_rotation(seed: int) -> Rotation:
    angles = torch.rand(64, HEAD_DIM // 2, generator=torch.Generator().manual_seed(seed))
    return Rotation(angles.cos(), angles.sin(), Style.HALF)


class SmallArena:
    """step: keys and values of 9 tokens, of each layer. expected: caches after LOADS, and the arena after SAVES."""

    def __init__(self, transfer_of) -> None:
        """transfer_of: makes what moves blocks between this arena and HBM, which may change neither."""
        generator = torch.Generator().manual_seed(7)
        rotations = (make_rotation(1), None, make_rotation(2))
        layout = KVLayout(SHAPES, BLOCK_SIZE, torch.float32, rotations)
        self.arena = Arena(layout, NUM_ARENA_BLOCKS, pin=False)
        self.caches = [
            tuple(
                torch.zeros(NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, dim) for dim in (shape.key_dim, shape.value_dim)
            )
            for shape in SHAPES
        ]
        self.transfer = transfer_of(self.arena)
        self.transfer.register(self.caches)
        assert not any(cache.any() for pair in self.caches for cache in pair) and not self.arena.tensor.any()
        self.arena.tensor.copy_(torch.rand(self.arena.tensor.shape, generator=generator))
        self.step = [
            tuple(torch.rand(9, *cache.shape[2:], generator=generator) for cache in pair) for pair in self.caches
        ]
        self.expected = self._expected_caches(), self._expected_arena()

    def _expected_caches(self):
        found = [(key.clone(), value.clone()) for key, value in self.caches]
        arena_blocks, numbers, positions = (torch.tensor(one) for one in ([1, 5], [4, 2], [8, 0]))
        for layer, pair in enumerate(found):
            rotation = self.arena.layout.rotations[layer]
            reference.load_blocks(self.arena.layers[layer], arena_blocks, *pair, numbers, positions, rotation)
        return found

    def _expected_arena(self):
        found = Arena(self.arena.layout, NUM_ARENA_BLOCKS, pin=False)
        found.tensor.copy_(self.arena.tensor)
        rows, places = torch.tensor([0, 1, 2, 3, 7, 8]), torch.tensor([12, 13, 14, 15, 25, 26])
        for layer, (key, value) in zip(found.layers, self.step, strict=True):
            reference.save_tokens(layer, key[rows], value[rows], places)
        return found.tensor

    def landed(self) -> list[bool]:
        """Of each layer: whether all that is loaded is there."""
        return [
            all(torch.equal(*both) for both in zip(pair, expected, strict=True))
            for pair, expected in zip(self.caches, self.expected[0], strict=True)
        ]

    def has_saved(self) -> bool:
        return torch.equal(self.arena.tensor, self.expected[1])

    def outcomes(self) -> dict[str, bool]:
        """By kind of what has ended: whether it has succeeded."""
        return {("load" if done.is_load else "save"): done.succeeded for done in self.transfer.completed()}
