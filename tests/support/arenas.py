"""A small arena and HBM: what is loaded and saved follows from a seed, and what comes of it is known from the twins."""

import torch

from kvstore.blocks.records import Load, Save
from kvstore.kernels import reference
from kvstore.memory.layout import KVLayout
from kvstore.memory.transfer import Arena
from kvstore.rope.rotary import Rotation, Style

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 8
NUM_ARENA_BLOCKS, NUM_BLOCKS = 8, 6
LOADS = (Load(4, 1, 8, b""), Load(2, 5, 0, b""))
SAVES = (Save(0, 0, 4, 3, 0), Save(1, 1, 2, 6, 1))  # rows 0 .. 3 and 7, 8 of the step
ROW_STARTS = (0, 6)


def make_rotation(seed: int) -> Rotation:
    angles = torch.rand(64, HEAD_DIM // 2, generator=torch.Generator().manual_seed(seed))
    return Rotation(angles.cos(), angles.sin(), Style.HALF)


class SmallArena:
    """step: keys and values of 9 tokens, of each layer. expected: caches after LOADS, and the arena after SAVES."""

    def __init__(self, transfer_of) -> None:
        """transfer_of: makes what moves blocks between this arena and HBM, which may change neither."""
        generator = torch.Generator().manual_seed(7)
        rotations = (make_rotation(1), None, make_rotation(2))
        layout = KVLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, rotations)
        self.arena = Arena(layout, NUM_ARENA_BLOCKS, pin=False)
        shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(NUM_LAYERS)]
        self.transfer = transfer_of(self.arena)
        self.transfer.register(self.caches)
        assert not any(cache.any() for pair in self.caches for cache in pair) and not self.arena.tensor.any()
        self.arena.tensor.copy_(torch.rand(self.arena.tensor.shape, generator=generator))
        self.step = [tuple(torch.rand(9, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in "kv") for _ in "012"]
        self.expected = self._expected_caches(), self._expected_arena()

    def _expected_caches(self):
        found = [(key.clone(), value.clone()) for key, value in self.caches]
        arena_blocks, numbers, positions = (torch.tensor(one) for one in ([1, 5], [4, 2], [8, 0]))
        for layer, pair in enumerate(found):
            rotation = self.arena.layout.rotations[layer]
            reference.load_blocks(self.arena.tensor, layer, arena_blocks, *pair, numbers, positions, rotation)
        return found

    def _expected_arena(self):
        found = self.arena.tensor.clone()
        rows, places = torch.tensor([0, 1, 2, 3, 7, 8]), torch.tensor([12, 13, 14, 15, 25, 26])
        for layer, (key, value) in enumerate(self.step):
            reference.save_tokens(found, layer, key[rows], value[rows], places)
        return found

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
