"""Random traffic on a small tier: reads end late, fail or are cancelled; nobody waits for ever, nothing stays held."""

import random

import pytest

from kvstore.store.requests import Tracked
from kvstore.store.seam import Lookup
from tests.support.store.prefetch_bench import SIZE, Bench


class Traffic:
    """Requests of shared stems on a small tier, with reads that end late, fail, or are cancelled; two run at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(self.rng.choice([6, 20, 70]), *self.rng.choice([(0.01, 0.01), (None, None), (0.5, 0.01)]))
        self.bench.planner.should_load = lambda num_tokens: True
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


@pytest.mark.parametrize("seed", [*range(30), 119])  # 119: two that ran and one that waited kept each other waiting
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
