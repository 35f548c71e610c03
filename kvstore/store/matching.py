"""What a request may load when it is scheduled: what is in memory, what is worth waiting for, what is computed instead.

Control plane, one thread. The planner says which way is faster, `requests` what is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.policy.planner import Choice, Planner, Way
from kvstore.stats import StoreStats
from kvstore.store.prefetch import Prefetcher
from kvstore.store.reads import DiskReads
from kvstore.store.requests import Requests, Tracked
from kvstore.store.seam import Lookup, Match

TRIED_BLOCKS = 16  # are read where computing is better: the disk may have become faster
TRIED_SHARE = 4  # one of so many seconds is spent on that at most

_MISS, _PENDING = Match(Lookup.MISS), Match(Lookup.PENDING)


def choose(request: Tracked, planner: Planner, reads: DiskReads | None) -> Choice:
    """How it is to get what it wants. reads None: there is no disk."""
    if not request.is_exact or reads is None:  # without a disk: what is on its way is a splice, or a save
        return Choice(Way.LOAD)
    wanted = request.wanted
    num_ahead, front = reads.num_before(request.rank), wanted.front
    return planner.choose(wanted.end - front, wanted.back - front, num_ahead, reads.stalled_s, wanted.is_open)


@dataclass(eq=False)
class Matcher:
    """Answers the scheduler, one request at a time.

    may_try: what is read for nobody is kept in memory, so a slow disk may be tried.
    """

    _requests: Requests
    _prefetcher: Prefetcher
    _planner: Planner
    _reads: DiskReads | None
    _stats: StoreStats
    _clock: Callable[[], float]
    _may_try: bool
    _try_at: float = 0.0

    def match(self, request: Tracked, first: int, end: int) -> Match:
        """What of blocks [first, end) can be loaded; called when it is to be scheduled, or has computed so far."""
        if not request.may_load:
            return _MISS
        is_new, wanted = self._requests.ask(request, first, end), request.wanted
        if wanted.is_ready():
            return self._load(request, first)
        choice = choose(request, self._planner, self._reads)
        if choice.way is Way.COMPUTE:
            self._try_disk(request)
            self._requests.cut(request, wanted.front)
            return self._load(request, first)
        short = self._prefetcher.read(request, choice.num_blocks)
        if short is not None and not self._prefetcher.may_wait(request):
            self._requests.cut(request, short)
        self._requests.advance(request, first)
        if wanted.is_ready():
            return self._load(request, first)
        if choice.way is Way.LOAD and is_new and request.is_exact:
            choice = self._planner.measure(wanted.back - wanted.front) or choice
        return _PENDING if choice.way is Way.LOAD else self._load_and_compute(request, first, choice)

    def _load(self, request: Tracked, first: int) -> Match:
        """All that it wants has landed."""
        num_tokens = (request.wanted.end - first) * self._requests.block_size
        if num_tokens and (not request.is_exact or self._planner.should_load(num_tokens)):
            request.wanted.is_open = False
            return Match(Lookup.HIT, num_tokens)
        self._requests.cut(request, first)  # it is not asked again, or gets the same answer
        request.wanted.is_open = False
        return _MISS

    def _load_and_compute(self, request: Tracked, first: int, choice: Choice) -> Match:
        """Load what is there, compute the next blocks, and ask again."""
        wanted, size = request.wanted, self._requests.block_size
        num_ready = wanted.front - first
        if num_ready and not self._planner.should_load(num_ready * size):
            self._requests.cut(request, first)
            return self._load(request, first)
        num_next = min(choice.num_next, wanted.back - wanted.front)
        if not num_next:
            return self._load(request, first)
        self._stats.split_prefills += not wanted.is_open
        wanted.is_open = True
        return Match(Lookup.HIT if num_ready else Lookup.MISS, num_ready * size, num_next * size)

    def _try_disk(self, request: Tracked) -> None:
        """Read the last of these blocks, for which nobody waits: without a measurement nothing would ever be read."""
        now_s = self._clock()
        if now_s < self._try_at or not self._may_try:
            return
        self._try_at = now_s + TRIED_SHARE * TRIED_BLOCKS * self._planner.read_s
        wanted = request.wanted
        tail = Tracked(request.chain, request.tokens, request.lineage, request.tenant)
        tail.wanted.is_asked = True
        self._requests.hold(tail, max(wanted.front, wanted.back - TRIED_BLOCKS), wanted.back)
        self._prefetcher.read_as_hint(tail)
