"""What the remote tier is known to have, and for how long a request waits to hear it."""

import pytest

from kvstore.remote.tier import Asked, RemoteTier
from kvstore.store import remote
from kvstore.store.remote import KNOWN_S, MOST_KNOWN, RemoteContents
from tests.support.faults import constants
from tests.support.store.memory_shared import MemoryShared, ended
from tests.support.store.prefetch_bench import Bench
from tests.support.waiting import TIMEOUT_S, wait_until

ANSWER_S = 1000.0  # by the clock of these tests; by that of the threads which ask it is never over


@pytest.fixture(autouse=True)
def answer_s():
    with constants(remote, ANSWER_S=ANSWER_S):
        yield


class Contents(RemoteContents):
    """With a clock of its own, and who was answered."""

    def __init__(self, always: bool = False) -> None:
        self.now_s, self.told = 0.0, []
        self.shared = MemoryShared()
        self.tier = RemoteTier(self.shared, lambda: None)
        self.bench = Bench(8)
        super().__init__(self.tier, lambda: self.now_s, self.told.append, always)

    def hear(self) -> None:
        (asked,) = ended(self.tier, Asked)
        self.asked(asked)


@pytest.fixture
def contents():
    found = Contents()
    yield found
    found.shared.may_answer.set()
    assert found.tier.close(TIMEOUT_S)


def test_what_is_there_is_known_and_who_asked_is_told(contents):
    request = contents.bench.request(5, stored=False)
    contents.shared.blocks = dict.fromkeys(request.chain[:3], b"")
    contents.ask(request)
    assert contents.is_asking(request)
    contents.hear()
    assert [contents.contains(one) for one in request.chain] == [True] * 3 + [False] * 2
    assert contents.told == [request] and not contents.is_asking(request)
    assert len(contents) == 3
    contents.lose(request.chain[2:])
    assert [contents.contains(one) for one in request.chain] == [True] * 2 + [False] * 3


def test_nobody_waits_for_long_and_a_late_answer_is_known_all_the_same(contents):
    request = contents.bench.request(2, stored=False)
    contents.shared.blocks = dict.fromkeys(request.chain, b"")
    contents.shared.may_answer.clear()
    contents.ask(request)
    contents.now_s += ANSWER_S / 2
    assert contents.is_asking(request)
    contents.now_s += ANSWER_S
    assert not contents.is_asking(request)
    contents.shared.may_answer.set()
    contents.hear()
    assert contents.told == []
    assert all(map(contents.contains, request.chain))


def test_nobody_waits_where_another_has_waited_in_vain(contents):
    first, second = contents.bench.request(1, stored=False), contents.bench.request(2, stored=False)
    contents.shared.may_answer.clear()
    contents.ask(first)
    wait_until(lambda: contents.tier.asks.running_s > 0.1)
    with constants(remote, ANSWER_S=0.1):
        contents.ask(second)
    assert contents.is_asking(second, is_next=False), "while it is in the queue, it may hear a late answer"
    assert contents.is_asking(first) and not contents.is_asking(second)
    contents.shared.may_answer.set()
    assert len(ended(contents.tier, Asked, 2)) == 2
    wait_until(lambda: contents.tier.asks.running_s == 0.0)
    contents.shared.may_answer.clear()
    contents.ask(first)
    assert contents.is_asking(first), "it answers again"


def test_a_request_in_the_queue_hears_a_late_answer(contents):
    """Looking what can be read ahead for it gives up no question: only the scheduler does."""
    bench = contents.bench
    bench.requests.is_asking = contents.is_asking
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
    assert not contents.is_asking(request)
    contents.shared.fails = None
    wait_until(lambda: not contents.tier.breaker.is_open)
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
    assert contents.is_asking(request)
    contents.shared.may_answer.set()
    contents.hear()
    assert not contents.is_asking(request)
    assert contents.tier.close(TIMEOUT_S)


def test_what_is_known_is_bounded(contents):
    for number in range(MOST_KNOWN + 5):
        contents.learn(number.to_bytes(32, "big"))
    assert len(contents) == MOST_KNOWN
    assert [contents.contains(number.to_bytes(32, "big")) for number in (4, 5)] == [False, True]
