"""Transfers on a CPU: layers land before they are attended to, and what was cut off in its end can be ended again."""

import pytest
import torch

from kvstore.blocks.records import Load, Save, TransferPlan
from kvstore.kernels import reference
from kvstore.memory.layout import KVLayout
from kvstore.memory.transfer import Arena, Transfer
from kvstore.rope.rotary import Rotation, Style
from tests.support.faults import before_each_load

NUM_LAYERS, NUM_ARENA_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 3, 6, 7, 4, 2, 8
PLAN = TransferPlan((Load(4, 1, 8, b"a" * 32), Load(2, 5, 0, b"b" * 32)), (Save(0, 0, 4, 3, 0),), 9)


def make_rotation(seed: int) -> Rotation:
    angles = torch.rand(64, HEAD_DIM // 2, generator=torch.Generator().manual_seed(seed))
    return Rotation(angles.cos(), angles.sin(), Style.HALF)


class Part:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        rotations = (make_rotation(1), None, make_rotation(2))
        layout = KVLayout(NUM_LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, rotations)
        self.arena = Arena(layout, NUM_ARENA_BLOCKS, pin=False)
        self.arena.tensor.copy_(torch.rand(self.arena.tensor.shape, generator=generator))
        shape = (NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(NUM_LAYERS)]
        self.expected = [(key.clone(), value.clone()) for key, value in self.caches]
        arena_blocks, numbers, positions = (torch.tensor(one) for one in ([1, 5], [4, 2], [8, 0]))
        for layer, pair in enumerate(self.expected):
            reference.load_blocks(self.arena.tensor, layer, arena_blocks, *pair, numbers, positions, rotations[layer])
        self.step = [torch.rand(4, HEADS, HEAD_DIM, generator=generator) for _ in range(2 * NUM_LAYERS)]
        self.transfer = Transfer(self.arena)
        self.transfer.register(self.caches)
        self.transfer.begin(PLAN, (0,))

    def landed(self) -> list[bool]:
        """Of each layer: all of its blocks, or none of them."""
        found = []
        for pair, expected in zip(self.caches, self.expected, strict=True):
            is_there = all(torch.equal(*both) for both in zip(pair, expected, strict=True))
            assert is_there or not any(cache.any() for cache in pair)
            found.append(is_there)
        return found

    def save(self) -> None:
        for layer in range(NUM_LAYERS):
            self.transfer.save_layer(layer, *self.step[2 * layer : 2 * layer + 2])

    def has_saved(self) -> bool:
        arena_block = self.arena.tensor[3]
        return all(torch.equal(arena_block[i // 2, i % 2], one) for i, one in enumerate(self.step))

    def outcome(self) -> list[tuple[bool, bool]]:
        return [(done.is_load, done.succeeded) for done in self.transfer.completed()]


@pytest.fixture
def part() -> Part:
    return Part()


def test_a_layer_lands_when_it_is_asked_for_and_the_rest_at_the_end(part):
    assert part.landed() == [False, False, False]
    part.transfer.wait_for_layer(0)
    assert part.landed() == [True, False, False]
    part.transfer.wait_for_layer(0)
    part.transfer.wait_for_layer(1)
    assert part.landed() == [True, True, False] and part.outcome() == []
    part.save()
    part.transfer.end()
    assert part.landed() == [True] * 3 and part.has_saved() and part.outcome() == [(True, True), (False, True)]
    part.transfer.end()
    assert part.outcome() == []


def test_of_a_forward_that_failed_the_loads_count_and_the_saves_do_not(part):
    part.save()
    part.transfer.end(succeeded=False)
    assert part.landed() == [True] * 3 and part.outcome() == [(True, True), (False, False)]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_load_that_fails_is_told_once_and_not_tried_again(part, layer):
    asked = []

    def fault(this, tear):
        asked.append(this)
        if this == layer:
            raise MemoryError

    with before_each_load(fault):
        for this in range(NUM_LAYERS):
            part.transfer.wait_for_layer(this)
        part.transfer.end()
    assert asked == list(range(layer + 1)) and part.outcome()[0] == (True, False)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_an_end_that_was_interrupted_can_be_repeated(part, layer):
    part.save()

    def fault(this, tear):
        if this == layer:
            raise KeyboardInterrupt

    with before_each_load(fault), pytest.raises(KeyboardInterrupt):
        part.transfer.end()
    assert part.outcome() == []
    part.transfer.end(succeeded=False)
    assert part.landed() == [True] * 3 and part.outcome() == [(True, True), (False, False)]
