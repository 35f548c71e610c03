"""What goes to the remote tier, from disk or from memory: chains whose requests have ended, and states."""

import pytest

from kvstore.blocks.ids import NO_TOKENS, Lineage, state_chain
from kvstore.blocks.records import ReadResult
from kvstore.memory.tier import ArenaBlockState
from kvstore.remote.spread import BelievedContents, SpreadTier
from kvstore.store import remote_stores
from kvstore.store.remote_stores import OFFER_S, RemoteStores
from kvstore.store.requests import Tracked
from kvstore.store.stored import Deletions
from kvstore.tiers.port import WriteDone
from tests.support.faults import constants
from tests.support.store.memory_shared import MemoryShared, ended, worker_of
from tests.support.store.prefetch_bench import SIZE, Bench
from tests.support.waiting import TIMEOUT_S

NUM_ARENA_BLOCKS = 32


class Stores(RemoteStores):
    """block_bytes: of each arena block, all of them the first byte of the block's id."""

    def __init__(self, has_disk: bool = True, block_bytes: int = 8) -> None:
        self.now_s, self.broken = 0.0, set[bytes]()
        self.shared = MemoryShared()
        self.tier = worker_of(self.shared)
        self.bench = Bench(NUM_ARENA_BLOCKS)
        view = lambda arena_block: memoryview(bytes([arena_block]) * block_bytes)  # noqa: E731
        self.deletions = Deletions(self.tier)
        super().__init__(
            self.tier, self.bench.cpu, self.bench.stored, self._read_block if has_disk else None, view,
            lambda: self.now_s, self.deletions,
        )  # fmt: skip

    def _read_block(self, record, into):
        into[:] = record.block_id[:1] * len(into)
        return ReadResult.CORRUPT if record.block_id in self.broken else ReadResult.OK

    def offered(self, num_blocks: int, num_known: int = 0, stored: bool = True):
        request = self.bench.request(num_blocks, stored=stored)
        self.offer(request, request.turn_starts, set(request.chain[:num_known]).__contains__)
        return request

    def move(self) -> list[bytes]:
        """Until nothing moves; returns what is there."""
        stored = []
        self.pump()
        while self._batches:
            for done in ended(self.tier, WriteDone):
                stored += self.ended(done)
            self.pump()
        return stored


@pytest.fixture
def stores():
    found = Stores()
    yield found
    found.shared.may_answer.set()
    assert found.tier.close(TIMEOUT_S)


def test_a_chain_goes_from_disk_as_far_as_it_is_not_known_to_be_there(stores):
    request = stores.offered(6, num_known=2)
    assert stores.num_waiting == 4 and not stores.is_drained
    assert stores.move() == request.chain[2:]
    assert stores.shared.blocks == {one: one[:1] * 8 for one in request.chain[2:]}
    assert stores.is_drained and stores.num_dropped == stores.num_waiting == 0
    stores.offered(3, num_known=3)
    assert stores.is_drained


def test_batches_begin_where_groups_do():
    stores = Stores(block_bytes=1 << 20)  # four to a batch
    stores.offered(11, num_known=2)
    stores.move()
    assert stores.shared.batches == [[2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert stores.tier.close(TIMEOUT_S)


def test_what_is_not_on_disk_yet_is_waited_for_but_not_for_ever(stores):
    request = stores.offered(4, stored=False)
    stores.bench.disk.stored |= set(request.chain[:2])
    stores.bench.in_memory(request)
    assert stores.move() == request.chain[:2]
    assert stores.num_waiting == 2
    stores.bench.disk.stored.add(request.chain[2])
    assert stores.move() == request.chain[2:3]
    stores.now_s += OFFER_S + 1
    assert stores.move() == []
    assert (stores.num_waiting, stores.num_dropped) == (0, 1)


def test_what_is_gone_or_damaged_is_counted_and_the_rest_goes(stores):
    request = stores.offered(4)
    stores.broken = {request.chain[1]}
    assert stores.move() == [request.chain[0], *request.chain[2:]]
    assert stores.num_dropped == 1
    stores.offered(3, stored=False)
    assert stores.move() == []
    assert (stores.num_dropped, stores.num_waiting) == (4, 0)


def test_what_a_store_refuses_is_counted_and_offered_again(stores):
    request = stores.offered(3)
    stores.shared.fails = "away"
    assert stores.move() == []
    assert stores.num_dropped == 3 and stores.is_drained
    with constants(remote_stores, MOST_OFFERED=7):
        for num_waiting in (3, 6, 6):
            stores.offer(request, (), lambda block_id: False)
            assert stores.num_waiting == num_waiting
    assert stores.num_dropped == 6, "there are enough"
    assert stores.is_drained, "nothing can be done now"


def test_what_is_stored_anew_is_deleted_no_more(stores):
    """A deletion that still waits for the server is one no more: nobody would ever confirm it."""
    stores.shared.may_answer.clear()
    stores.offered(1)
    stores.pump()
    request = stores.offered(3)
    for one in request.chain:
        stores.deletions.add(one)
    stores.deletions.pump()
    stores.pump()
    assert not stores.deletions.in_flight()
    stores.shared.may_answer.set()
    stores.move()
    assert set(request.chain) <= set(stores.shared.blocks)


def test_what_was_to_be_deleted_still_is_where_it_cannot_be_stored_anew(stores):
    request, deletes = stores.offered(2), stores.deletions
    stores.move()
    for one in request.chain:
        deletes.add(one)
    stores.shared.fails = "away"
    stores.offered(2)
    assert stores.move() == [] and set(deletes.sizes) == set(request.chain)


def test_a_deletion_that_comes_while_an_earlier_one_runs_is_carried_out_too(stores):
    request, deletes = stores.offered(1), stores.deletions
    stores.move()
    deletes.add(request.chain[0])
    deletes.pump()
    deletes.add(request.chain[0])  # of what was stored anew
    deletes.ended(request.chain, None)
    assert deletes.has_some(request.chain) and deletes.pump()
    deletes.ended(request.chain, None)
    assert not deletes.has_some(request.chain)


def test_a_chain_is_being_stored_while_a_state_behind_it_is(stores):
    request = stores.offered(2)
    stores.move()
    assert not stores.is_storing(set(request.chain))
    state = Tracked(state_chain(request.chain[1], 2, SIZE), NO_TOKENS * SIZE * 2, Lineage(request.chain[1]), "")
    stores.bench.disk.stored |= set(state.chain)
    stores.offer(state, (2,), lambda one: False)
    assert stores.is_storing(set(request.chain)) and not stores.is_storing({request.chain[0]})
    stores.shared.may_answer.clear()
    stores.pump()
    assert stores.num_waiting == 0 and stores.is_storing(set(request.chain))
    stores.shared.may_answer.set()
    stores.move()
    assert set(state.chain) <= set(stores.shared.blocks) and not stores.is_storing(set(request.chain))


def test_without_a_disk_arena_blocks_are_lent_and_come_back():
    stores = Stores(has_disk=False)
    request = stores.offered(10, stored=False)
    stores.bench.in_memory(request)
    stores.shared.may_answer.clear()
    stores.pump()
    pool = stores.bench.cpu.pool
    arena_blocks = [stores.bench.cpu.arena_block_of(one) for one in request.chain]
    assert [pool.ref_count(arena_block) for arena_block in arena_blocks] == [1] * 4 + [0] * 6, "an eighth of them"
    stores.pump()
    assert [pool.ref_count(arena_block) for arena_block in arena_blocks] == [1] * 4 + [0] * 6
    stores.shared.may_answer.set()
    assert stores.move() == request.chain
    assert [pool.ref_count(arena_block) for arena_block in arena_blocks] == [0] * 10
    assert all(stores.bench.cpu.state(arena_block) is ArenaBlockState.READY for arena_block in arena_blocks)
    assert set(map(len, stores.shared.blocks.values())) == {8}
    assert stores.tier.close(TIMEOUT_S)


def test_of_two_servers_each_gives_back_what_is_lent_to_it_and_one_that_is_away_has_nothing():
    stores, slow = Stores(has_disk=False), MemoryShared("memory://slow")
    both = stores._tier = SpreadTier([stores.tier, worker_of(slow)])
    request = stores.offered(4, stored=False)
    stores.bench.in_memory(request)
    its_own = [one for one in request.chain if both.home(one) is not stores.tier]
    assert 0 < len(its_own) < 4
    slow.may_answer.clear()
    slow.fails = "away"
    stores.pump()
    cpu = stores.bench.cpu

    def lent() -> list[bytes]:
        return [one for one in request.chain if cpu.pool.ref_count(cpu.arena_block_of(one))]

    assert lent() == request.chain
    assert len(stores.ended(*ended(both, WriteDone))) == 4 - len(its_own)
    assert lent() == its_own and not stores.is_drained
    slow.may_answer.set()
    assert stores.ended(*ended(both, WriteDone)) == []
    assert lent() == [] and stores.is_drained and stores.num_dropped == len(its_own)
    contents = BelievedContents(both, lambda: 0.0)
    for one in request.chain:
        contents.learn(one)
    assert [one for one in request.chain if not contents.contains(one)] == its_own
    assert both.as_dict()["degraded"] == "1 of 2: away"
    assert both.close(TIMEOUT_S)
