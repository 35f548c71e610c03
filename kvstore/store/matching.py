"""What a request may load when it is scheduled: what is in memory, what is worth waiting for, what to compute instead.

Control plane, one thread. The planner decides which way is faster; `requests` knows what is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.policy.planner import LoadChoice, Planner, Way
from kvstore.stats import StoreStats
from kvstore.store.prefetch import Prefetcher
from kvstore.store.reads import DiskReads
from kvstore.store.requests import Requests, Tracked, Wanted
from kvstore.store.seam import Lookup, Match

TRIED_BLOCKS = 16  # are read although computing is better: the disk may have become faster
TRIED_SHARE = 4  # at most one second in this many is spent on such reads

_MISS, _PENDING = Match(Lookup.MISS), Match(Lookup.PENDING)


def choose(request: Tracked, planner: Planner, reads: DiskReads | None) -> LoadChoice:
    """How a request should get what it wants. reads: None without a disk."""
    if not request.is_exact or reads is None:  # without a disk, only splices or saves are on their way
        return LoadChoice(Way.LOAD)
    wanted, front = request.wanted, request.wanted.front
    num_ahead = reads.num_before(request.rank)
    unread = wanted.back - front
    if reads.remote is None:
        return planner.choose(wanted.end - front, unread, num_ahead, reads.stalled_s, wanted.is_open)
    num_remote = sum(request.tier_at_arrival(index) == "remote" for index in range(front, wanted.back))
    slow = num_remote, reads.num_before(request.rank, from_remote=True)
    return planner.choose(wanted.end - front, unread, num_ahead, reads.stalled_s, wanted.is_open, *slow)


@dataclass(eq=False)
class Matcher:
    """Answers the scheduler, one request at a time.

    may_try: blocks that nobody waits for stay in memory, so a slow disk may be tried.
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
        """Which of blocks [first, end) can be loaded. Called when a request is to be scheduled, or has computed this
        far.
        """
        if not request.may_load:
            return _MISS
        if self._requests.is_asking(request, True):
            return _PENDING
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
        """Load everything that it wants: all of that has landed."""
        num_tokens = (request.wanted.end - first) * self._requests.block_size
        self._requests.join(request)
        if num_tokens and (not request.is_exact or self._planner.should_load(num_tokens)):
            return Match(Lookup.HIT, num_tokens)
        self._requests.cut(request, first)  # the answer must be the same if it asks again
        return _MISS

    def _load_and_compute(self, request: Tracked, first: int, choice: LoadChoice) -> Match:
        """Load what is there, compute the next blocks, and ask again."""
        wanted, size = request.wanted, self._requests.block_size
        num_ready = wanted.front - first
        if num_ready and not self._planner.should_load(num_ready * size):
            self._requests.cut(request, first)
            return self._load(request, first)
        num_next = min(choice.num_next, wanted.back - wanted.front)
        if not num_next:
            return self._load(request, first)
        self._requests.split(request)
        return Match(Lookup.HIT if num_ready else Lookup.MISS, num_ready * size, num_next * size)

    def _try_disk(self, request: Tracked) -> None:
        """Read the last of these blocks although nobody waits for them: without measurements, nothing would ever be
        read again.
        """
        now_s = self._clock()
        if now_s < self._try_at or not self._may_try:
            return
        block_s = self._planner.read_s
        if request.wanted.back and request.tier_at_arrival(request.wanted.back - 1) == "remote":
            block_s = self._planner.remote_s
        self._try_at = now_s + TRIED_SHARE * TRIED_BLOCKS * block_s
        wanted = request.wanted
        is_asked = Wanted(is_asked=True)
        tail = Tracked(request.chain, request.tokens, request.lineage, request.tenant, wanted=is_asked)
        self._requests.hold(tail, max(wanted.front, wanted.back - TRIED_BLOCKS), wanted.back)
        self._prefetcher.read_as_hint(tail)
