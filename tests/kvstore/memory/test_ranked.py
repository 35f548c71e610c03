"""One arena, two ranks: each moves its heads, and a step's transfers end when both have ended theirs."""

import os
import threading

import pytest
import torch

from kvstore.blocks.records import Load, Save, StatePiece, TransferPlan, Transferred
from kvstore.engine.model.windows import WindowStates
from kvstore.errors import EngineDiedError
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout, OwnPart
from kvstore.memory.ranked import DataPlane, FarBlocks, FarTransfer, RankedTransfer, rank_transfer
from kvstore.memory.streams import Queue
from kvstore.memory.transfer import Arena, Transfer
from tests.support.arenas import alike, whole
from tests.support.simulated_streams import SimulatedStreams
from tests.support.waiting import TIMEOUT_S

LAYERS, BLOCK, HEADS, DIM, ARENA_BLOCKS = 2, 4, 4, 8, 6
SHAPE = (alike(LAYERS, HEADS, DIM), BLOCK, torch.float32, (None, None))
FIRST, LAST = OwnPart((0, LAYERS), (0, 2)), OwnPart((0, LAYERS), (2, 4))
SAVE = TransferPlan((), (Save(0, 0, BLOCK, 3, 0),), 1)
LOAD = TransferPlan((Load(1, 3, 0, b""),), (), 2)


class OtherRank:
    """An `OtherRanks` of one, in this process: what it does is said by the test."""

    num_others = 1

    def __init__(self, descriptor: int) -> None:
        self.arena_descriptor = descriptor
        self.loss: str | None = None
        self.own: DataPlane | None = None
        self.told: list[Transferred] = []
        self.plan: TransferPlan | None = None
        self.on_wait = lambda: None

    def open(self) -> None:
        layout = KVLayout(*SHAPE, LAST)
        self.own = rank_transfer(layout, self.arena_descriptor, torch.device("cpu"), lambda: None)

    def begin_transfers(self, plan, row_starts) -> None:
        self.plan = plan

    def step(self, layers=()) -> None:
        """It gets the step, and ends it."""
        plan, self.plan = self.plan, None
        self.own.begin(plan, [0])
        for layer, key, value in layers:
            self.own.save_kv_layer(layer, key, value)
        self.own.end()
        self.told += self.own.completed()

    def save_states(self, plan) -> None:
        self.plan = plan

    def end_transfers(self) -> bool:
        plan, self.plan = self.plan, None
        return plan is None

    def transferred(self) -> list[Transferred]:
        told, self.told = self.told, []
        return told

    def wait(self, timeout_s: float) -> None:
        self.on_wait()
        if self.loss is not None:
            raise EngineDiedError(self.loss)


@pytest.fixture
def ranks():
    descriptor = os.memfd_create("test")
    other = OtherRank(descriptor)
    arena = Arena(KVLayout(*SHAPE, FIRST), ARENA_BLOCKS, pin=False, descriptor=descriptor)
    other.open()
    yield RankedTransfer(Transfer(arena), other), other, arena
    os.close(descriptor)


def caches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(3, BLOCK, 2, DIM), torch.zeros(3, BLOCK, 2, DIM)) for _ in range(LAYERS)]


def test_a_block_is_whole_when_both_have_saved_their_heads_and_each_loads_its_own(ranks):
    first, other, arena = ranks
    block = torch.rand(LAYERS, 2, BLOCK, HEADS, DIM)
    own, others = caches(), caches()
    first.register(own)
    other.own.register(others)
    first.begin(SAVE, [0])
    other.step([(layer, *block[layer, :, :, 2:]) for layer in range(LAYERS)])
    assert not whole(arena)[3, :, :, :, :2].any()
    for layer in range(LAYERS):
        first.save_kv_layer(layer, *block[layer, :, :, :2])
    first.end()
    assert first.completed() == [Transferred(1, False, True)]
    assert torch.equal(whole(arena)[3], block)
    assert bytes(arena.view(3)) == block.numpy().tobytes()  # as one process stores it

    first.begin(LOAD, [0])
    other.step()
    for layer in range(LAYERS):
        first.wait_for_layer_load(layer)
    first.end()
    assert [done.succeeded for done in first.completed()] == [True]
    for layer in range(LAYERS):
        for part in range(2):
            found = torch.cat([own[layer][part][1], others[layer][part][1]], 1)
            assert torch.equal(found, block[layer, part])


def test_a_save_has_ended_when_the_last_rank_says_so(ranks):
    first, other, _ = ranks
    first.begin(SAVE, [0])
    other.plan = None  # it has the step, and is slow
    first.end()
    assert first.completed() == []
    other.told = [Transferred(1, False, True)]
    assert first.completed() == [Transferred(1, False, True)] and first.completed() == []


@pytest.mark.parametrize("plan", [SAVE, LOAD])
def test_what_fails_on_one_rank_has_failed(ranks, plan):
    first, other, _ = ranks
    first.register(caches())
    first.begin(plan, [0])
    other.plan = None
    other.told = [Transferred(plan.ticket, bool(plan.loads), False)]
    first.end()
    assert [(done.ticket, done.succeeded) for done in first.completed()] == [(plan.ticket, False)]


def test_a_step_ends_when_all_ranks_have_loaded(ranks):
    first, other, _ = ranks
    first.register(caches())
    waits = []

    def waited() -> None:
        waits.append(len(waits))
        if len(waits) == 3:
            other.told = [Transferred(2, True, True)]

    other.on_wait = waited
    first.begin(LOAD, [0])
    other.plan = None
    first.end()
    assert len(waits) == 3 and [done.succeeded for done in first.completed()] == [True]


def test_a_step_that_the_others_never_got_waits_for_nobody(ranks):
    first, _, _ = ranks
    first.register(caches())
    first.begin(LOAD, [0])
    first.end(succeeded=False)  # something else raised before it was sent
    assert [done.ticket for done in first.completed()] == [2]


def test_when_a_rank_is_lost_nothing_waits_and_nothing_counts(ranks):
    first, other, _ = ranks
    first.register(caches())
    first.begin(SAVE, [0])
    other.plan = None
    first.end()
    first.begin(LOAD, [0])
    other.plan = None
    other.loss = "rank 1 of 2 ended"
    with pytest.raises(EngineDiedError):
        first.end()
    assert sorted((done.ticket, done.succeeded) for done in first.completed()) == [(1, False), (2, False)]
    other.told = [Transferred(1, False, True)]  # of a third one, late
    assert first.completed() == []


@pytest.mark.parametrize("plan", [SAVE, LOAD])
def test_what_a_device_moves_has_ended_when_it_says_so(ranks, plan):
    """Not when the step has been launched there."""
    first, other, arena = ranks
    streams, go, has_told = SimulatedStreams(), threading.Event(), threading.Event()

    def tell() -> None:
        other.told += other.own.completed()
        if other.told:
            has_told.set()

    share = Arena(KVLayout(*SHAPE, LAST), ARENA_BLOCKS, pin=False, descriptor=other.arena_descriptor)
    transfer = DeviceTransfer(share, streams, tell)
    other.own = transfer
    first.register(caches())
    other.own.register(caches())
    streams.launch(Queue.SAVE if plan.saves else Queue.LOAD, lambda: go.wait(TIMEOUT_S))
    first.begin(plan, [0])
    other.step([(layer, *torch.rand(2, BLOCK, 2, DIM)) for layer in range(LAYERS)])
    if plan.loads:
        other.on_wait = lambda: (go.set(), has_told.wait(TIMEOUT_S))
    assert not other.told
    first.end()
    if plan.saves:
        assert first.completed() == [] and not whole(arena)[3, ..., 2:, :].any()
        go.set()
        assert has_told.wait(TIMEOUT_S) and whole(arena)[3, ..., 2:, :].all()
    assert [(done.ticket, done.succeeded) for done in first.completed()] == [(plan.ticket, True)]
    transfer.close()
    streams.close()


def test_what_a_device_cannot_load_is_told_at_the_end_of_the_step(ranks):
    first, other, _ = ranks
    streams, share = SimulatedStreams(), KVLayout(*SHAPE, LAST)
    arena = Arena(share, ARENA_BLOCKS, pin=False, descriptor=other.arena_descriptor)
    transfer = DeviceTransfer(arena, streams, lambda: None)
    other.own = transfer
    first.register(caches())
    other.own.register(caches())

    def fail(place: Queue) -> None:
        raise MemoryError("injected")

    streams.fail_launch = fail
    first.begin(LOAD, [0])
    other.step()
    first.end()
    assert [(done.ticket, done.succeeded) for done in first.completed()] == [(2, False)]
    transfer.close()
    streams.close()


def test_what_all_had_moved_when_a_rank_was_lost_does_not_count(ranks):
    """This one's device has gone on, perhaps with sums that were never made."""
    first, other, _ = ranks
    first.begin(SAVE, [0])
    other.plan = None
    first.end()
    other.told, other.loss = [Transferred(1, False, True)], "rank 1 of 2 ended"
    assert first.completed() == [Transferred(1, False, False)]


# -- states of layers with a window ------------------------------------------------------------------------------------
NUM_WINDOWED, NUM_SLOTS = 5, 4  # a state is in three blocks of two layers each, of which the last is half empty
PIECES = tuple(
    StatePiece(row, index, block) for row, *blocks in ((3, 5, 2, 0), (1, 4, 1, 3)) for index, block in enumerate(blocks)
)
DIVISIONS = {
    "heads": [OwnPart((0, 2), heads, (0, 5)) for heads in ((0, 1), (1, 4))],
    "layers": [OwnPart((0, 1), (0, HEADS), (0, 3)), OwnPart((1, 2), (0, HEADS), (3, 5))],
    "both": [
        OwnPart((at, at + 1), heads, windows)
        for at, windows in enumerate(((0, 1), (1, 5)))
        for heads in ((0, 2), (2, 4))
    ],
}


def windowed_layout(own: OwnPart | None) -> KVLayout:
    windowed = KVLayout(alike(NUM_WINDOWED, HEADS, DIM), *SHAPE[1:3], (None,) * NUM_WINDOWED)
    return KVLayout(*SHAPE, own, windowed.block_bytes, 1, windowed)


def window_caches(num_heads: int, num_layers: int = NUM_WINDOWED):
    shape = NUM_SLOTS, BLOCK, num_heads, DIM
    return [(torch.rand(shape), torch.rand(shape)) for _ in range(num_layers)]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_save_of_states_has_ended_when_the_last_rank_says_so(ranks, succeeded):
    first, other, arena = ranks
    arena.layout = windowed_layout(OwnPart((0, LAYERS), (0, 2), (0, NUM_WINDOWED)))
    first.register(caches(), WindowStates(window_caches(HEADS // 2)))
    first.save_states(TransferPlan(ticket=4, states=PIECES))
    assert other.plan.states == PIECES and first.completed() == []
    other.told = [Transferred(4, False, succeeded)]
    assert first.completed() == [Transferred(4, False, succeeded)] and first.completed() == []


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
def test_states_are_stored_as_one_process_does_and_each_rank_loads_its_part(division, is_far):
    """Nothing is left in their blocks of what was there before, and other blocks stay as they are."""
    arena, filled = Arena(windowed_layout(None), 9, pin=False), window_caches(HEADS)
    arena.tensor.copy_(torch.rand(arena.tensor.shape))
    expected = Arena(windowed_layout(None), 9, pin=False)
    expected.tensor.copy_(arena.tensor)
    expected.save_states(PIECES, WindowStates(filled))
    states = [layer.nbytes for pair in filled for layer in (pair[0][0], pair[1][0])]
    stored = torch.cat([expected.rows[block] for block in (5, 2, 0)])
    assert torch.equal(stored[: sum(states)], WindowStates(filled).packed([3])[0]) and not stored[sum(states) :].any()

    plan = TransferPlan((Load(0, 8, 0, b""),), (), 4, PIECES)
    for part in DIVISIONS[division]:
        heads, windows = slice(*part.heads), slice(*part.windows)
        own = [tuple(cache[:, :, heads].clone() for cache in pair) for pair in filled[windows]]
        empty = [tuple(torch.zeros_like(cache) for cache in pair) for pair in own]
        if is_far:
            far, blocks, save = FarTransfer(windowed_layout(part)), FarBlocks(arena), TransferPlan((), (), 3, PIECES)
            far.register((), WindowStates(own))
            blocks.put(part, save, far.saved_states(save))
            far.register((), WindowStates(empty))
            far.begin(plan, [0], FarBlocks(expected).loaded(part, plan))
        else:
            arena.layout = windowed_layout(part)
            arena.save_states(PIECES, WindowStates(own))
            expected.layout = arena.layout
            expected.load_states(PIECES, WindowStates(empty))
        for pairs in zip(own, empty, strict=True):
            assert all(torch.equal(mine[[1, 3]], found[[1, 3]]) for mine, found in zip(*pairs, strict=True))
            assert not any(found[[0, 2]].any() for found in pairs[1])
    assert torch.equal(arena.rows, expected.rows)


def test_where_states_cannot_be_loaded_the_loads_of_all_ranks_have_failed(ranks):
    first, other, arena = ranks
    arena.layout = windowed_layout(OwnPart((0, LAYERS), (0, 2), (0, NUM_WINDOWED)))
    first.register(caches(), NoMemory(window_caches(HEADS // 2)))
    first.begin(TransferPlan(LOAD.loads, (), 4, PIECES), [0])
    other.told, other.plan = [Transferred(4, True, True)], None
    first.end()
    assert [(done.is_load, done.succeeded) for done in first.completed()] == [(True, False)]


class NoMemory(WindowStates):
    def blank(self, num_rows):
        raise MemoryError
