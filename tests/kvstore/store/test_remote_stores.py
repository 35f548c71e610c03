"""What goes to the remote tier when a request has ended: from disk, or lent from memory where there is none."""

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.memory.tier import ArenaBlockState
from kvstore.remote.tier import PutsDone, RemoteTier
from kvstore.store.remote_stores import MOST_OFFERS, OFFER_S, RemoteStores
from tests.support.store.memory_shared import MemoryShared, ended
from tests.support.store.prefetch_bench import Bench
from tests.support.waiting import TIMEOUT_S

NUM_ARENA_BLOCKS = 32


class Stores(RemoteStores):
    """block_bytes: of each arena block, all of them the first byte of the block's id."""

    def __init__(self, has_disk: bool = True, block_bytes: int = 8) -> None:
        self.now_s, self.broken = 0.0, set[bytes]()
        self.shared = MemoryShared()
        self.tier = RemoteTier(self.shared, lambda: None)
        self.bench = Bench(NUM_ARENA_BLOCKS)
        view = lambda arena_block: memoryview(bytes([arena_block]) * block_bytes)  # noqa: E731
        super().__init__(
            self.tier, self.bench.cpu, self.bench.stored, self._read_block if has_disk else None, view,
            lambda: self.now_s,
        )  # fmt: skip

    def _read_block(self, record, into):
        into[:] = record.block_id[:1] * len(into)
        return ReadResult.CORRUPT if record.block_id in self.broken else ReadResult.OK

    def offered(self, num_blocks: int, num_known: int = 0, stored: bool = True):
        request = self.bench.request(num_blocks, stored=stored)
        self.offer(request, set(request.chain[:num_known]).__contains__)
        return request

    def move(self) -> list[bytes]:
        """Until nothing moves; returns what is there."""
        stored = []
        self.pump()
        while self._batches:
            for done in ended(self.tier, PutsDone):
                stored += self.put_done(done)
            self.pump()
        return stored

    def in_memory(self, request, end: int | None = None):
        """Its blocks are in the CPU tier, and READY."""
        for index in range(len(request.chain[:end])):
            arena_block = self.bench.cpu.reserve()
            assert self.bench.cpu.announce(arena_block, self.bench.stored.record(request, index))
            self.bench.cpu.publish(arena_block)
            self.bench.cpu.release(arena_block)


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
    stores.in_memory(request)
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
    for _ in range(MOST_OFFERS):
        stores.offer(request, lambda block_id: False)
    assert stores.num_dropped == 3
    stores.offer(request, lambda block_id: False)
    assert stores.num_dropped == 6, "there are enough"
    assert stores.is_drained, "nothing can be done now"


def test_without_a_disk_arena_blocks_are_lent_and_come_back():
    stores = Stores(has_disk=False)
    request = stores.offered(10, stored=False)
    stores.in_memory(request)
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
