"""The remote tier as the store sees it, without a disk: what is asked, read, missing and deleted there."""

import pytest

from kvstore.memory.tier import ArenaBlockState
from kvstore.remote.tier import RemoteTier
from kvstore.store import remote
from kvstore.store.control_plane import choose
from kvstore.store.prefetch import Prefetcher
from kvstore.store.remote import RemoteBlocks, RemoteSource
from kvstore.store.requests import Requests
from kvstore.store.stored import DiskReads, Identity, StoredBlocks
from tests.support.faults import constants
from tests.support.store.memory_shared import MemoryShared
from tests.support.store.prefetch_bench import SIZE, Bench
from tests.support.waiting import TIMEOUT_S, wait_until

PAYLOAD = b"12345678"


class RemoteBench(Bench):
    """Who asks waits until there is an answer."""

    def __init__(self) -> None:
        super().__init__(16)
        self.shared, self.now_s = MemoryShared(), 0.0
        self.tier = RemoteTier(self.shared, lambda: None)
        self.arena = [memoryview(bytearray(8)) for _ in range(16)]
        self.reads = DiskReads(self.cpu, self.io, self.arena.__getitem__, self.stats)
        self.reads.remote = self.tier.reads
        source = RemoteSource(self.tier, self.reads, None, self.arena.__getitem__, lambda: self.now_s)
        self.remote = RemoteBlocks(source, self.cpu, None, self.stats)
        identity = Identity(b"f" * 32, "model", SIZE)
        self.stored = StoredBlocks(
            self.cpu, None, self.reads, identity, self.stats, lambda: 0.0, self.remote.is_known
        )  # fmt: skip
        self.requests = Requests(self.cpu, self.stored, self.reads, self.stats, self.remote.is_asking)
        self.prefetcher = Prefetcher(
            self.cpu, self.requests, lambda request: choose(request, self.planner, self.reads), 1000, lambda one: None
        )
        self.remote.connect(self.stored, self.planner, self.requests, self.prefetcher)

    def come(self, num_blocks: int, num_there: int):
        request = self.request(num_blocks, stored=False)
        self.shared.blocks |= dict.fromkeys(request.chain[:num_there], PAYLOAD)
        self.remote.arrive(request)
        return self.arrive(request)

    def until(self, is_so) -> None:
        """Polled meanwhile, as by a step loop."""

        def poll() -> bool:
            self.remote.poll()
            self.prefetcher.poll()
            return is_so()

        wait_until(poll)

    def states(self, request) -> list[ArenaBlockState | None]:
        arena_blocks = [self.cpu.arena_block_of(one) for one in request.chain]
        return [None if arena_block is None else self.cpu.state(arena_block) for arena_block in arena_blocks]


@pytest.fixture
def bench():
    found = RemoteBench()
    with constants(remote, ANSWER_S=1000.0):  # of the threads' clock; the bench's stands still
        yield found
    found.shared.may_answer.set()
    assert found.tier.close(TIMEOUT_S)


def test_what_is_there_is_read_for_whoever_asked(bench):
    request = bench.come(6, num_there=4)
    assert bench.remote.is_asking(request, is_next=True)
    bench.until(lambda: bench.stats.remote_read == 4)
    assert bench.states(request) == [ArenaBlockState.READY] * 4 + [None] * 2
    assert all(bench.arena[bench.cpu.arena_block_of(one)] == PAYLOAD for one in request.chain[:4])
    assert not bench.remote.is_asking(request, is_next=True) and not bench.remote.reads
    assert bench.remote.as_dict()["known_blocks"] == 4
    bench.remove(request)


def test_what_is_gone_meanwhile_is_counted_and_not_known_any_more(bench):
    request = bench.request(3, stored=False)
    for one in request.chain:
        bench.remote.contents.learn(one)
    bench.shared.blocks = dict.fromkeys(request.chain[:1], PAYLOAD)
    bench.arrive(request)
    bench.until(lambda: bench.stats.remote_read_failures.get("missing", 0) > 0 and not bench.remote.reads)
    assert bench.states(request)[1:] == [None, None]
    assert not bench.remote.is_known(request.chain[1])
    bench.remove(request)


def test_deleted_blocks_are_not_read_again_and_go_from_there(bench):
    request = bench.come(3, num_there=3)
    bench.until(lambda: bench.stats.remote_read == 3)
    bench.remove(request)
    bench.remote.forget(request.chain[1:])
    assert [bench.remote.is_known(one) for one in request.chain] == [True, False, False]
    assert not bench.remote.is_idle
    bench.until(lambda: bench.remote.is_idle)
    assert set(bench.shared.blocks) == {request.chain[0]}


def test_a_tier_that_is_away_is_said_and_nobody_waits(bench):
    bench.shared.fails = "away"
    request = bench.come(3, num_there=3)
    bench.until(lambda: not bench.remote.is_asking(request, is_next=True))
    bench.until(lambda: bench.remote.degraded is not None)
    assert bench.remote.degraded == "away" and bench.remote.is_idle
    later = bench.come(2, num_there=2)
    assert not bench.remote.is_asking(later, is_next=True) and bench.stats.remote_read == 0
    for one in (request, later):
        bench.remove(one)
