"""The remote tier as the store sees it, without a disk: what is known to be there and for how long a request waits to
hear it, what is read and deleted.
"""

from dataclasses import replace

import pytest

from kvstore.blocks.ids import state_chain
from kvstore.memory.tier import ArenaBlockState
from kvstore.policy.planner import Planner
from kvstore.remote.spread import KNOWN_S, MOST_KNOWN, BelievedContents
from kvstore.store import remote
from kvstore.store.context import Identity
from kvstore.store.prefetch import Prefetcher
from kvstore.store.remote import Questions, RemoteBlocks, RemoteSource
from kvstore.store.requests import Requests
from kvstore.store.stored import Deletions, StoredBlocks, TierReads
from kvstore.tiers.port import Asked, WriteDone
from kvstore.tiers.worker import TierWorker
from tests.support.faults import constants
from tests.support.store.memory_shared import MemoryShared, ended, worker_of
from tests.support.store.prefetch_bench import SIZE, Bench
from tests.support.waiting import TIMEOUT_S, wait_until

PAYLOAD = b"12345678"


def end(tier: TierWorker, shared: MemoryShared) -> None:
    shared.may_answer.set()
    assert tier.close(TIMEOUT_S)


class RemoteBench(Bench):
    """Who asks waits until there is an answer."""

    def __init__(self) -> None:
        super().__init__(16)
        self.shared, self.now_s = MemoryShared(), 0.0
        self.tier = worker_of(self.shared)
        self.arena = [memoryview(bytearray(8)) for _ in range(16)]
        context = replace(self.context, view=self.arena.__getitem__, clock=lambda: self.now_s)
        self.reads = TierReads(context, [self.tier])
        contents = BelievedContents(self.tier, lambda: self.now_s)
        identity = Identity(b"f" * 32, "model", SIZE)
        self.stored = StoredBlocks(context, None, self.reads, identity, contents)
        self.requests = Requests(self.cpu, self.stored, self.reads, self.stats)
        self.prefetcher = Prefetcher(context, self.requests, self.planner, self.reads, 1000)
        source = RemoteSource(self.tier, None)
        self.remote = RemoteBlocks(
            context, self.planner, source, contents, None, self.stored, self.reads, self.prefetcher.answered
        )

    def come(self, num_blocks: int, num_there: int):
        request = self.request(num_blocks, stored=False)
        self.shared.blocks |= dict.fromkeys(request.chain[:num_there], PAYLOAD)
        self.remote.arrive(request)
        return self.arrive(request)

    def until(self, is_so) -> None:
        """Polled meanwhile, as by a step loop."""

        def poll() -> bool:
            if self.remote.poll():
                self.prefetcher.landed()
            self.prefetcher.poll()
            return is_so()

        wait_until(poll)

    def states(self, request) -> list[ArenaBlockState | None]:
        arena_blocks = [self.cpu.arena_block_of(one) for one in request.chain]
        return [None if arena_block is None else self.cpu.state(arena_block) for arena_block in arena_blocks]


@pytest.fixture
def bench():
    found = RemoteBench()
    yield found
    end(found.tier, found.shared)


def test_what_is_there_is_read_for_whoever_asked(bench):
    request = bench.come(6, num_there=4)
    assert request.is_waiting(bench.now_s)
    bench.until(lambda: bench.stats.remote_read == 4)
    assert bench.states(request) == [ArenaBlockState.READY] * 4 + [None] * 2
    assert all(bench.arena[bench.cpu.arena_block_of(one)] == PAYLOAD for one in request.chain[:4])
    assert not request.is_waiting(bench.now_s) and not bench.reads
    assert bench.remote.as_dict()["known_blocks"] == 4
    bench.remove(request)


def test_what_is_gone_meanwhile_is_counted_and_not_known_any_more(bench):
    request = bench.request(3, stored=False)
    for one in request.chain:
        bench.remote.contents.learn(one)
    bench.shared.blocks = dict.fromkeys(request.chain[:1], PAYLOAD)
    bench.arrive(request)
    bench.until(lambda: bench.stats.remote_read_failures.get("missing", 0) > 0 and not bench.reads)
    assert bench.states(request)[1:] == [None, None]
    assert not bench.remote.contents.contains(request.chain[1])
    bench.remove(request)


def test_deleted_blocks_are_not_read_again_and_go_from_there(bench):
    request = bench.come(3, num_there=3)
    bench.until(lambda: bench.stats.remote_read == 3)
    bench.remove(request)
    bench.remote.forget(request.chain[1:])
    assert [bench.remote.contents.contains(one) for one in request.chain] == [True, False, False]
    assert not bench.remote.is_idle
    bench.until(lambda: bench.remote.is_idle)
    assert set(bench.shared.blocks) == {request.chain[0]}


def test_states_behind_deleted_blocks_go_too_a_few_at_a_time(bench):
    """There are a hundred names of blocks behind each that is deleted, as nobody knows where there is a state."""
    request = bench.come(6, num_there=6)
    bench.until(lambda: bench.stats.remote_read == 6)
    bench.remove(request)
    bench.stored.num_state_blocks = 100
    states = [state_chain(one, 100, SIZE) for one in request.chain]
    bench.shared.blocks |= dict.fromkeys([*states[3], *states[5]], PAYLOAD)
    with constants(remote, MOST_NAMED=150):
        bench.remote.forget(request.chain)
        most = 0
        while bench.remote.is_deleting(request.chain):
            bench.remote.poll()
            most = max(most, len(bench.remote.deletes.sizes))
        bench.until(lambda: bench.remote.is_idle)
    assert not bench.shared.blocks and most < 250


# -- what is known ---------------------------------------------------------------------------------------------------
ANSWER_S = 1000.0  # by the clock of these tests; by that of the threads which ask it is never over


@pytest.fixture(autouse=True)
def answer_s():
    with constants(remote, ANSWER_S=ANSWER_S):
        yield


class Contents(BelievedContents):
    """With a clock of its own, questions, and who was answered."""

    def __init__(self, always: bool = False) -> None:
        self.now_s, self.told = 0.0, []
        self.shared = MemoryShared()
        self.tier = worker_of(self.shared)
        self.bench = Bench(8)
        super().__init__(self.tier, lambda: self.now_s)
        self.planner = Planner(1000, SIZE, always)
        self.questions = Questions(self.tier, self.bench.stored, lambda: self.now_s, self.planner)
        self.ask = self.questions.ask

    def hear(self) -> None:
        (asked,) = ended(self.tier, Asked)
        self.answered(asked)
        if (request := self.questions.answered(asked)) is not None:
            self.told.append(request)


@pytest.fixture
def contents():
    found = Contents()
    yield found
    end(found.tier, found.shared)


def test_what_is_there_is_known_and_who_asked_is_told(contents):
    request = contents.bench.request(5, stored=False)
    contents.shared.blocks = dict.fromkeys(request.chain[:3], b"")
    contents.ask(request)
    assert request.is_waiting(contents.now_s)
    contents.hear()
    assert [contents.contains(one) for one in request.chain] == [True] * 3 + [False] * 2
    assert contents.told == [request] and not request.is_waiting(contents.now_s)
    assert len(contents) == 3
    contents.lose(request.chain[2:])
    assert [contents.contains(one) for one in request.chain] == [True] * 2 + [False] * 3


def test_nobody_waits_for_long_and_a_late_answer_is_known_all_the_same(contents):
    request = contents.bench.request(2, stored=False)
    contents.shared.blocks = dict.fromkeys(request.chain, b"")
    contents.shared.may_answer.clear()
    contents.ask(request)
    contents.now_s += ANSWER_S / 2
    assert request.is_waiting(contents.now_s)
    contents.now_s += ANSWER_S
    assert not request.is_waiting(contents.now_s)
    contents.shared.may_answer.set()
    contents.hear()
    assert contents.told == []
    assert all(map(contents.contains, request.chain))


def test_who_would_compute_for_long_waits_longer(contents):
    contents.planner.computed(10 * SIZE, 10 * ANSWER_S)
    short, long = contents.bench.request(2, stored=False), contents.bench.request(200, stored=False)
    contents.shared.may_answer.clear()
    for request in (short, long):
        contents.ask(request)
    contents.now_s += 19 * ANSWER_S
    assert long.is_waiting(contents.now_s) and not short.is_waiting(contents.now_s)
    contents.now_s += 2 * ANSWER_S
    assert not long.is_waiting(contents.now_s)


def test_nobody_waits_where_another_has_waited_in_vain(contents):
    first, second = contents.bench.request(1, stored=False), contents.bench.request(2, stored=False)
    contents.shared.may_answer.clear()
    contents.ask(first)
    wait_until(lambda: contents.tier.asking_s > 0.1)
    with constants(remote, ANSWER_S=0.1):
        contents.ask(second)
    assert second.waits_until_s is not None, "while it is in the queue, it may hear a late answer"
    assert first.is_waiting(contents.now_s) and not second.is_waiting(contents.now_s)
    contents.shared.may_answer.set()
    assert len(ended(contents.tier, Asked, 2)) == 2
    wait_until(lambda: contents.tier.asking_s == 0.0)
    contents.shared.may_answer.clear()
    contents.ask(first)
    assert first.is_waiting(contents.now_s), "it answers again"


def test_a_request_in_the_queue_hears_a_late_answer(contents):
    """Looking what can be read ahead for it gives up no question: only the scheduler does."""
    bench = contents.bench
    request = bench.request(4, stored=False)
    bench.disk.stored |= set(request.chain[:2])
    contents.shared.blocks = dict.fromkeys(request.chain, b"")
    contents.shared.may_answer.clear()
    contents.ask(request)
    contents.now_s += 2 * ANSWER_S
    bench.arrive(request)
    assert not request.wanted.arena_blocks, "what is read ahead would end where the disk's blocks end"
    contents.shared.may_answer.set()
    contents.hear()
    assert contents.told == [request]
    bench.prefetcher.landed()
    bench.prefetcher.poll()
    assert len(request.wanted.arena_blocks) == 2
    bench.remove(request)


def test_what_was_heard_long_ago_or_is_behind_an_open_breaker_is_not_believed(contents):
    request = contents.bench.request(1, stored=False)
    contents.learn(request.chain[0])
    contents.now_s += KNOWN_S - 1
    assert contents.contains(request.chain[0])
    contents.now_s += 2
    assert not contents.contains(request.chain[0])
    contents.learn(request.chain[0])
    contents.shared.fails = "away"
    contents.ask(request)
    contents.hear()
    assert contents.told == [request], "that there is no answer is one, too"
    assert not contents.contains(request.chain[0])
    contents.ask(request)
    assert not request.is_waiting(contents.now_s)
    contents.shared.fails = None
    wait_until(lambda: not contents.tier.is_away)
    assert contents.contains(request.chain[0])


def test_a_block_that_is_not_there_any_more_is_unlearned(contents):
    request = contents.bench.request(2, stored=False)
    contents.learn(request.chain[1])
    contents.ask(request)
    contents.hear()
    assert not contents.contains(request.chain[1])


def test_it_always_waits_where_everything_is_to_be_loaded():
    contents = Contents(always=True)
    request = contents.bench.request(1, stored=False)
    contents.shared.may_answer.clear()
    contents.ask(request)
    contents.now_s += 1e6
    assert request.is_waiting(contents.now_s)
    contents.shared.may_answer.set()
    contents.hear()
    assert not request.is_waiting(contents.now_s)
    assert contents.tier.close(TIMEOUT_S)


def test_what_is_known_is_bounded(contents):
    for number in range(MOST_KNOWN + 5):
        contents.learn(number.to_bytes(32, "big"))
    assert len(contents) == MOST_KNOWN
    assert [contents.contains(number.to_bytes(32, "big")) for number in (4, 5)] == [False, True]


# -- deletions -------------------------------------------------------------------------------------------------------
IDS = [bytes([i]) * 32 for i in range(5)]


@pytest.fixture
def shared():
    return MemoryShared()


@pytest.fixture
def tier(shared):
    tier = worker_of(shared)
    yield tier
    end(tier, shared)


def given_up(tier: TierWorker, ids: list[bytes]) -> Deletions:
    deletes = Deletions(tier, most=len(IDS))
    for one in ids:
        deletes.add(one, 10)
    return deletes


def hear(deletes: Deletions, tier: TierWorker) -> None:
    (done,) = ended(tier, WriteDone)
    deletes.ended(done.batch.deletes, done.error)


def test_what_is_confirmed_is_gone(shared, tier):
    shared.blocks = dict.fromkeys(IDS, b"")
    deletes = given_up(tier, IDS[:3])
    assert deletes.num_bytes == 30 and IDS[0] in deletes.sizes and IDS[3] not in deletes.sizes
    shared.may_answer.clear()
    assert deletes.pump() and not deletes.pump()
    deletes.add(IDS[3])
    assert deletes.has_some({IDS[0]}) and deletes.has_some({IDS[3]}) and not deletes.has_some({IDS[4]})
    assert deletes.have_failed(IDS) and not deletes.have_failed(IDS[:3])
    shared.may_answer.set()
    hear(deletes, tier)
    assert not deletes.has_some(set(IDS[:3])) and deletes.has_some(set(IDS))
    deletes.pump()
    hear(deletes, tier)
    assert not deletes.in_flight() and set(shared.blocks) == {IDS[4]}


def test_what_fails_is_tried_again_when_it_answers(shared, tier):
    shared.blocks = dict.fromkeys(IDS, b"")
    shared.fails = "away"
    deletes = given_up(tier, IDS)
    deletes.pump()
    hear(deletes, tier)
    assert deletes.has_some({IDS[0]}), "it is not forgotten"
    assert not deletes.in_flight(), "but nothing can be done about it now"
    assert not deletes.pump()
    shared.fails = None
    wait_until(lambda: not tier.is_away)
    assert deletes.in_flight()
    deletes.drop(IDS[0])
    deletes.pump()
    hear(deletes, tier)
    assert not deletes.in_flight() and list(shared.blocks) == IDS[:1], "it was written again meanwhile"


def test_what_waits_is_bounded_and_the_oldest_is_left_to_its_time_to_live(shared, tier):
    shared.fails = "away"
    deletes = given_up(tier, IDS)
    assert len(deletes.sizes) == len(IDS)
    deletes.add(b"x" * 32)
    assert IDS[0] not in deletes.sizes and IDS[1] in deletes.sizes and b"x" * 32 in deletes.sizes
