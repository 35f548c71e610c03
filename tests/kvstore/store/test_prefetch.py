"""Whose blocks are read, in which order, who gives arena blocks back to whom, and what becomes of unwanted reads."""

import random

import pytest

from kvstore.blocks.ids import Lineage, SpliceRun
from kvstore.store.requests import Tracked
from kvstore.store.seam import Lookup, Match
from kvstore.tiers.port import AS_HINT, AT_ONCE, rank_of_request
from tests.support.store.prefetch_bench import ROOT, SIZE, Bench


@pytest.fixture
def made():
    """Makes benches. At the end all requests go away, and nothing may be held."""
    benches = []
    yield lambda *args, **rates: benches.append(Bench(*args, **rates)) or benches[-1]
    for bench in benches:
        for request in list(bench.requests.by_id.values()):
            bench.remove(request)
        bench.check_idle()


# -- order and window ------------------------------------------------------------------------------------------------
def test_reads_go_in_the_order_of_expected_start_and_each_tail_first(made):
    bench = made(64)
    first, second = bench.arrive(bench.request(3)), bench.arrive(bench.request(3))
    urgent = bench.arrive(bench.request(2, priority=-1))
    assert bench.read() == urgent.chain[::-1] + first.chain[::-1] + second.chain[::-1]
    assert bench.stats.prefetched == 8
    for request in (urgent, first, second):
        assert bench.match(request) == Match(Lookup.HIT, len(request.chain) * SIZE)
        bench.remove(request)
    assert bench.stats.prefetch_hits == 8 and bench.stats.prefetch_wasted == 8, "they left without loading"


def test_only_as_many_as_fit_are_read_ahead_and_the_next_one_when_the_first_has_started(made):
    bench = made(8)
    requests = [bench.arrive(bench.request(3)) for _ in range(4)]
    assert [len(request.wanted.arena_blocks) for request in requests] == [3, 3, 0, 0]
    bench.read()
    bench.load(requests[0], 0, bench.match(requests[0]))
    bench.prefetcher.start(requests[0])
    bench.prefetcher.poll()
    assert [len(request.wanted.arena_blocks) for request in requests] == [0, 3, 3, 0]


def test_what_others_hold_is_not_filled(made):
    bench = made(8)
    held = [bench.cpu.reserve() for _ in range(4)]
    requests = [bench.arrive(bench.request(3)) for _ in range(2)]
    assert [len(request.wanted.arena_blocks) for request in requests] == [3, 0]
    for arena_block in held:
        bench.cpu.release(arena_block)
    bench.remove(requests[0])
    bench.prefetcher.poll()
    assert len(requests[1].wanted.arena_blocks) == 3
    bench.remove(requests[1])


def test_the_first_in_the_queue_takes_arena_blocks_back_from_those_who_wait_behind_it(made):
    bench = made(8)
    behind = [bench.arrive(bench.request(4, sequence=10 + i)) for i in range(2)]
    bench.read(2)  # of the earlier of the two
    urgent = bench.arrive(bench.request(6, priority=-1))
    assert len(urgent.wanted.arena_blocks) == 6 and [len(other.wanted.arena_blocks) for other in behind] == [0, 0]
    assert set(bench.io.queued.values()) == {urgent.rank}, "reads of those behind were dropped"
    assert bench.stats.cancelled_reads == 6
    assert bench.match(behind[0]).lookup is Lookup.PENDING, "it waits, and does not disturb"
    assert len(urgent.wanted.arena_blocks) == 6
    bench.read()
    bench.load(urgent, 0, bench.match(urgent))
    bench.prefetcher.start(urgent)
    bench.prefetcher.poll()
    assert [len(other.wanted.arena_blocks) for other in behind] == [4, 4]


def test_a_request_that_waits_for_arena_blocks_of_an_earlier_one_goes_on_with_what_there_is_when_none_come_back(made):
    bench = made(4)
    held = [bench.cpu.reserve() for _ in range(2)]  # say, blocks that cannot be written
    request = bench.arrive(bench.request(3))
    assert bench.match(request).lookup is Lookup.PENDING and len(request.wanted.arena_blocks) == 2
    assert bench.read() == request.chain[1::-1]
    assert bench.match(request) == Match(Lookup.HIT, 2 * SIZE)
    bench.remove(request)
    for arena_block in held:
        bench.cpu.release(arena_block)


def test_a_request_in_flight_does_not_keep_those_behind_from_what_is_there(made):
    bench = made(16)
    behind = bench.request(2)
    bench.arrive(behind)
    bench.read()
    first = bench.arrive(bench.request(4, priority=-1))
    assert bench.match(first).lookup is Lookup.PENDING
    assert bench.match(behind) == Match(Lookup.HIT, 2 * SIZE)


# -- cancelling ------------------------------------------------------------------------------------------------------
def test_reads_of_a_request_that_goes_away_are_dropped_and_one_that_runs_ends_unused(made):
    bench = made(16)
    request = bench.arrive(bench.request(5))
    bench.read(2)
    running = bench.next_read()
    bench.remove(request)
    assert not bench.io.queued and bench.stats.cancelled_reads == 2
    bench.end_read(running)
    bench.check_idle()
    again = bench.arrive(bench.request(1))
    assert bench.read() == again.chain


def test_reads_that_another_request_wants_too_go_on_as_urgently_as_it_needs_them(made):
    bench = made(16)
    one = bench.arrive(bench.request(4, sequence=5))
    other = bench.same(one, "other", (0, 3))
    bench.arrive(other)
    assert set(bench.io.queued.values()) == {other.rank}, "the earlier of the two says how urgent they are"
    bench.remove(one)
    assert len(bench.io.queued) == 4 and not bench.stats.cancelled_reads
    bench.read()
    assert bench.match(other) == Match(Lookup.HIT, 4 * SIZE)


def test_a_failed_read_ends_what_is_loaded_and_drops_what_is_behind_it(made):
    bench = made(16)
    request = bench.arrive(bench.request(6))
    bench.read(2)
    bench.end_read(bench.next_read(), succeeded=False)  # block 3
    assert bench.match(request).lookup is Lookup.PENDING and request.wanted.end == 3
    bench.read()
    assert bench.match(request) == Match(Lookup.HIT, 3 * SIZE)


# -- hints -----------------------------------------------------------------------------------------------------------
def test_a_hint_is_read_after_what_anybody_waits_for(made):
    bench = made(64)
    hinted = bench.request(3)
    assert bench.hint(hinted) == 3
    waiting = bench.arrive(bench.request(2))
    assert bench.read() == waiting.chain[::-1] + hinted.chain[::-1]
    assert not any(bench.cpu.pool.ref_count(arena_block) for arena_block in map(bench.cpu.arena_block_of, hinted.chain))


def test_a_request_for_what_a_hint_is_reading_makes_that_urgent(made):
    bench = made(64)
    hinted = bench.request(3)
    bench.hint(hinted)
    assert set(bench.io.queued.values()) == {AS_HINT}
    request = bench.arrive(bench.same(hinted, "r", (0, 9)))
    assert request.arrival == ["disk"] * 3 and set(bench.io.queued.values()) == {rank_of_request((0, 9))}
    bench.read()
    assert bench.match(request) == Match(Lookup.HIT, 3 * SIZE)


def test_a_hint_never_takes_what_a_waiting_request_needs_and_gives_way_to_one(made):
    bench = made(16)
    waiting = bench.arrive(bench.request(8))
    hinted = bench.request(8)
    assert bench.hint(hinted) == 4, "a quarter stays free"
    late = bench.arrive(bench.request(8))
    assert len(late.wanted.arena_blocks) == 8 and len(waiting.wanted.arena_blocks) == 8
    assert bench.stats.cancelled_reads == 4


def test_conversations_in_the_window_are_marked_as_wanted_until_they_start(made):
    bench = made(16)
    request = bench.arrive(bench.request(4))
    bench.prefetcher.poll()
    assert request.conversation.wanted == request.key and request.conversation in bench.refreshed
    bench.read()
    bench.load(request, 0, bench.match(request))
    bench.prefetcher.start(request)
    bench.prefetcher.poll()
    assert request.conversation.wanted is None


# -- what is kept blank ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_arena_blocks", "num_blank"), [(8, 0), (63, 0), (64, 4), (160, 10)])
def test_a_share_of_the_tier_is_kept_blank_for_reads(made, num_arena_blocks, num_blank):
    bench = made(num_arena_blocks)
    for index in range(num_arena_blocks):
        arena_block = bench.cpu.reserve()
        bench.cpu.announce(arena_block, bench.stored.record(bench.request(1, stored=False), 0))
        bench.cpu.publish(arena_block)
        bench.cpu.release(arena_block)
        bench.prefetcher.poll()
        assert index < num_arena_blocks - num_blank or bench.cpu.pool.num_blank == num_blank
    assert bench.cpu.pool.num_blank == num_blank == bench.prefetcher.num_blank


# -- load or compute -------------------------------------------------------------------------------------------------
def test_what_is_better_computed_is_not_read(made):
    bench = made(64, load_s=1.0, compute_s=0.001)
    request = bench.arrive(bench.request(30))
    assert not bench.io.queued
    assert bench.match(request) == Match(Lookup.MISS)
    assert set(bench.io.queued.values()) <= {AS_HINT}, "but a few, to see whether the disk is still so slow"
    assert len(bench.io.queued) == 16
    assert bench.match(request) == Match(Lookup.MISS)


def test_the_head_is_computed_while_the_tail_is_read_until_they_meet(made):
    """Computing and reading take 10 ms a block: of 128 blocks half are computed."""
    bench = made(200, load_s=0.01, compute_s=0.01)
    request = bench.arrive(bench.request(128))
    assert len(bench.io.queued) == 64
    frontier = 0
    match = bench.match(request)
    assert match == Match(Lookup.MISS, 0, 48 * SIZE) and request.wanted.is_open
    bench.prefetcher.start(request)
    assert len(request.wanted.arena_blocks) == 64, "it holds what it will load"
    while match.lookup is not Lookup.HIT:
        assert match.lookup is Lookup.MISS and match.num_compute_tokens
        frontier += match.num_compute_tokens // SIZE
        bench.read(match.num_compute_tokens // SIZE)
        match = bench.match(request, frontier)
    assert 64 <= frontier <= 70 and match == Match(Lookup.HIT, (128 - frontier) * SIZE)
    bench.load(request, frontier, match)
    assert not request.wanted.arena_blocks and bench.stats.split_prefills == 1


def test_a_disk_that_is_faster_than_predicted_reads_more_of_the_head(made):
    bench = made(200, load_s=0.01, compute_s=0.01)
    request = bench.arrive(bench.request(128))
    for _ in range(200):
        bench.planner.read(1000, 0.0005)
    bench.read(50)
    assert len(request.wanted.arena_blocks) > 64, "while it waits, more is read than was planned"
    match = bench.match(request)
    assert match.lookup is Lookup.PENDING, "what is left will be read sooner than it could be computed"
    bench.read()
    assert bench.match(request) == Match(Lookup.HIT, 128 * SIZE)


def test_a_disk_that_becomes_slow_while_a_request_waits_for_it_makes_it_compute(made):
    bench = made(200, load_s=0.0001, compute_s=0.01)
    request = bench.arrive(bench.request(100))
    assert len(bench.io.queued) == 100 and bench.match(request).lookup is Lookup.PENDING
    bench.read(40)
    bench.io.stalled_s = 30.0
    match = bench.match(request)
    assert match.lookup is Lookup.MISS and match.num_compute_tokens, "the tail that is there is loaded later"
    frontier = 0
    while match.lookup is Lookup.MISS:
        frontier += match.num_compute_tokens // SIZE
        match = bench.match(request, frontier)
    assert frontier == 60 and match == Match(Lookup.HIT, 40 * SIZE)
    bench.load(request, frontier, match)
    bench.remove(request)
    bench.io.stalled_s = 0.0


def test_what_lies_in_memory_is_loaded_before_the_rest_is_computed(made):
    bench = made(200, load_s=1.0, compute_s=0.01)
    request = bench.request(100)
    head = bench.same(request, "head", (0, 99), 40)
    bench.disk.stored -= set(request.chain[40:])
    bench.hint(head)
    bench.read()
    bench.disk.stored |= set(request.chain)
    bench.arrive(request)
    assert request.arrival == ["cpu"] * 40 + ["disk"] * 60
    match = bench.match(request)
    assert match == Match(Lookup.HIT, 40 * SIZE), "and nothing more is to be asked for"
    bench.load(request, 0, match)


def test_a_request_that_was_split_and_goes_away_leaves_nothing_behind(made):
    bench = made(200, load_s=0.01, compute_s=0.01)
    request = bench.arrive(bench.request(128))
    bench.match(request)
    bench.prefetcher.start(request)
    bench.read(20)
    running = bench.next_read()
    bench.remove(request)
    assert not bench.io.queued and bench.stats.cancelled_reads == 43
    bench.end_read(running)


def test_what_was_passed_by_the_frontier_is_read_last_if_blocks_in_use_build_on_it(made):
    bench = made(200, load_s=0.01, compute_s=0.01)
    request = bench.arrive(bench.request(128))
    bench.match(request)
    bench.prefetcher.start(request)
    bench.read(40)
    assert bench.match(request, 88) == Match(Lookup.HIT, 40 * SIZE)
    loads = bench.requests.hand_out(request, range(40), 88, 40)
    assert len(bench.io.queued) == 24 and set(bench.io.queued.values()) == {AS_HINT}
    bench.reads.finish()
    assert len(bench.io.queued) == 24
    assert bench.cpu.arena_block_of(request.chain[-1]) is not None, "what is in use stays"
    for load in reversed(loads):
        bench.cpu.release(load.arena_block)
    bench.reads.finish()
    assert not bench.io.queued


def test_a_spliced_chain_is_loaded_as_a_whole_or_not_at_all(made):
    bench = made(64, load_s=1.0, compute_s=0.001)
    request = bench.request(10)
    request.lineage = Lineage(ROOT, (SpliceRun(0, ROOT, 10),))
    bench.arrive(request)
    assert len(bench.io.queued) == 10 and bench.match(request).lookup is Lookup.PENDING
    bench.read()
    assert bench.match(request) == Match(Lookup.HIT, 10 * SIZE)


def test_hbm_may_lose_blocks_and_get_others_while_a_request_waits(made):
    bench = made(64)
    request = bench.request(8)
    bench.arrive(request, 4)
    bench.read()
    assert bench.match(request, 2).lookup is Lookup.PENDING and request.wanted.first == 2
    assert bench.read() == request.chain[3:1:-1]
    assert bench.match(request, 2) == Match(Lookup.HIT, 6 * SIZE)
    assert bench.match(request, 6) == Match(Lookup.HIT, 2 * SIZE)
    assert bench.match(request, 8) == Match(Lookup.MISS)


def test_ranks_are_in_order():
    assert AT_ONCE < rank_of_request((-5, 3)) < rank_of_request((0, 1)) < rank_of_request((0, 2)) < AS_HINT


# -- random traffic: nobody waits for ever, nothing stays held -------------------------------------------------------
class Traffic:
    """Requests of shared stems on a small tier, with reads that end late, fail, or are cancelled; two run at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(self.rng.choice([6, 20, 70]), *self.rng.choice([(0.01, 0.01), (None, None), (0.5, 0.01)]))
        self.bench.planner.should_load = lambda num_tokens, num_state=0: True
        self.stems = [self.bench.request(self.rng.randrange(1, 40)) for _ in range(4)]
        self.waiting: list[Tracked] = []
        self.running: list[tuple[Tracked, int, int | None]] = []  # and its frontier, and where it asks again
        self.num_ended = 0

    def step(self) -> None:
        rng, bench = self.rng, self.bench
        for action in rng.sample([self.come, self.go, self.hint, self.schedule, self.read, self.read], 3):
            action()
        bench.prefetcher.poll()
        bench.cpu.check_integrity(idle=False)
        for request in self.waiting:
            wanted = request.wanted
            assert wanted.is_begun or not wanted.arena_blocks
            assert all(wanted.first <= index < wanted.end for index in wanted.arena_blocks)

    def come(self) -> None:
        stem, bench = self.rng.choice(self.stems), self.bench
        bench.num_made += 1
        count = self.rng.randrange(1, len(stem.chain) + 1)
        key = (self.rng.choice([0, 0, -1]), bench.num_made)
        self.waiting.append(bench.arrive(bench.same(stem, f"r{bench.num_made}", key, count)))
        self.waiting.sort(key=lambda one: one.key)

    def go(self) -> None:
        if self.waiting and self.rng.random() < 0.2:
            self.bench.remove(self.waiting.pop(self.rng.randrange(len(self.waiting))))
        elif self.running and self.rng.random() < 0.2:
            self.bench.remove(self.running.pop(self.rng.randrange(len(self.running)))[0])

    def hint(self) -> None:
        stem = self.rng.choice(self.stems)
        self.bench.hint(self.bench.same(stem, "", (0, 0)))

    def read(self) -> None:
        for _ in range(self.rng.randrange(8)):
            if self.bench.io.queued:
                self.bench.end_read(self.bench.next_read(), succeeded=self.rng.random() < 0.97)

    def schedule(self) -> None:
        for place, (request, frontier, ask_at) in list(enumerate(self.running)):
            if frontier == ask_at:
                self.running[place] = self.go_on(request, frontier) or self.running[place]
            elif ask_at is not None:
                self.running[place] = (request, min(ask_at, frontier + self.rng.randrange(1, 9)), ask_at)
        for entry in [entry for entry in self.running if entry[2] is None]:
            self.running.remove(entry)
            self.bench.remove(entry[0])
            self.num_ended += 1
        for request in list(self.waiting):
            if len(self.running) < 2 and (entry := self.go_on(request, 0)) is not None:
                self.waiting.remove(request)
                self.running.append(entry)
                self.bench.prefetcher.start(request)

    def go_on(self, request: Tracked, frontier: int) -> tuple[Tracked, int, int | None] | None:
        match = self.bench.match(request, frontier)
        if match.lookup is Lookup.PENDING:
            return None
        if match.num_tokens:
            self.bench.load(request, frontier, match)
        frontier += match.num_tokens // SIZE
        more = match.num_compute_tokens
        return request, frontier, None if more is None else frontier + more // SIZE


@pytest.mark.parametrize("seed", [*range(15), 119])  # 119: two that ran and one that waited kept each other waiting
def test_whatever_comes_every_request_ends_and_nothing_stays_held(seed):
    traffic = Traffic(seed)
    for _ in range(300):
        traffic.step()
    for _ in range(3000):
        if not traffic.waiting and not traffic.running:
            break
        traffic.schedule()
        traffic.read()
    assert not traffic.waiting and not traffic.running, "somebody waits for ever"
    assert traffic.num_ended > 20
    traffic.bench.check_idle()
