"""One arena, two ranks: each moves its heads, and a step's transfers end when both have ended theirs."""

import os
import threading

import pytest
import torch

from kvstore.blocks.records import Load, Save, TransferPlan, Transferred
from kvstore.errors import EngineDiedError
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout
from kvstore.memory.ranked import DataPlane, RankedTransfer, rank_transfer
from kvstore.memory.streams import Queue
from kvstore.memory.transfer import Arena, Transfer
from tests.support.arenas import alike, whole
from tests.support.simulated_streams import SimulatedStreams
from tests.support.waiting import TIMEOUT_S

LAYERS, BLOCK, HEADS, DIM, ARENA_BLOCKS = 2, 4, 4, 8, 6
SHAPE = (alike(LAYERS, HEADS, DIM), BLOCK, torch.float32, (None, None))
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
        layout = KVLayout(*SHAPE, slice(2, 4))
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
    arena = Arena(KVLayout(*SHAPE, slice(0, 2)), ARENA_BLOCKS, pin=False, descriptor=descriptor)
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

    share = Arena(KVLayout(*SHAPE, slice(2, 4)), ARENA_BLOCKS, pin=False, descriptor=other.arena_descriptor)
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
    streams, share = SimulatedStreams(), KVLayout(*SHAPE, slice(2, 4))
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
