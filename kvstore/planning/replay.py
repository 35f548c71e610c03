"""Replays a trace over a real store on a virtual clock: what would hit, and when. Without tensors or threads.

Simulates one server. Requests start in order of arrival, but one whose blocks are still being read from disk does not
hold up the others. Deterministic: the same trace and configuration give the same result.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable

from kvstore.blocks.records import Transferred
from kvstore.errors import ConfigError
from kvstore.planning.replay_config import TIERS, ReplayConfig, ReplayResult
from kvstore.planning.server_blocks import Job, MakeSteering, ServerBlocks
from kvstore.planning.traces import Trace, TraceRequest
from kvstore.planning.virtual_io import VirtualClock
from kvstore.store.seam import Lookup
from kvstore.tiers.port import Rank

ROUND_S = 0.25  # between two looks at a store that waits for room
PROGRESS_EVERY = 256  # requests


def replay(
    trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None,
    steering: MakeSteering | None = None,
) -> ReplayResult:  # fmt: skip
    """Serve the trace. progress: called now and then with the number of requests that have ended.

    steering: used instead of the policy's own. Raises ConfigError for an impossible trace.
    """
    return Replay(trace, config, progress, steering).run()


class Replay:
    """One run of a trace, by one server. Use once: `run`, and then perhaps `check_integrity`.

    blocks: in the server's tiers. Here is what runs, and for how long.
    """

    def __init__(
        self, trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None,
        steering: MakeSteering | None = None,
    ) -> None:  # fmt: skip
        if config.warm_up >= len(trace.requests):
            raise ConfigError(f"a warm-up of {config.warm_up} leaves none of {len(trace.requests)} requests; give less")
        self._trace, self._config, self._progress = trace, config, progress
        self._clock = clock = VirtualClock()
        self._followers = _followers(trace)
        self._num_arrived = self._num_ended = 0
        self._next_open = 0  # the next request whose arrival is known
        longest = max(map(self._total_blocks, trace.requests))
        self.blocks = ServerBlocks(config, trace.block_size, longest, clock, steering, self._on_progress)
        self._counting = Counting(config, trace.block_size, self.blocks.moved)
        self._waiting = WaitingLine()
        self._num_running = 0
        self._prefill_free_s = self._load_free_s = -math.inf
        self._has_round = False

    def run(self) -> ReplayResult:
        self._plan_next()
        self._clock.run()
        assert self._num_ended == len(self._trace.requests), "requests were left over"
        return self._counting.result()

    def _total_blocks(self, request: TraceRequest) -> int:
        return -(-(request.num_tokens + request.num_output_tokens) // self._trace.block_size)

    # -- arrivals ----------------------------------------------------------------------------------------------------
    def _plan_next(self) -> None:
        requests = self._trace.requests
        while self._next_open < len(requests) and requests[self._next_open].after >= 0:
            self._next_open += 1
        if self._next_open < len(requests):
            self._clock.at(requests[self._next_open].arrival_s, self._come_open, self._next_open)
            self._next_open += 1

    def _come_open(self, index: int) -> None:
        self._plan_next()
        self._arrive(index)

    def _arrive(self, index: int) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        if number == self._config.warm_up:
            self._counting.begin(self._clock.now_s)
        request = self._trace.requests[index]
        if self._total_blocks(request) > self._config.hbm_blocks:
            self._counting.count_refused(number)
            self._ended(index)
            return
        job = self.blocks.job(index, number, request)
        self._waiting.add(job)
        self._schedule()

    # -- the queue ---------------------------------------------------------------------------------------------------
    def _on_progress(self, rank: Rank | None) -> None:
        """Reads of this rank, or writes, have ended."""
        self._poll()
        if self.blocks.is_idle:  # who waits for blocks may have lost them to somebody who comes earlier
            self._waiting.offer_all()
        elif rank is not None and len(rank) == 3:
            self._waiting.offer(rank[2])
        if rank is not None or self._waiting.has_short:
            self._schedule()

    def _poll(self) -> None:
        store = self.blocks.store
        if store is None:
            return
        store.poll()
        is_writing = store.disk is not None and (store.reads or not store.disk.is_drained)
        is_stuck = is_writing or (self._waiting and not self._num_running)
        if is_stuck and self.blocks.is_idle and not self._has_round:
            self._has_round = True  # else nobody would come back to it
            self._clock.at(self._clock.now_s + ROUND_S, self._round)

    def _round(self, _: object) -> None:
        """Try again what waits for others to release blocks."""
        self._has_round = False
        self._poll()
        self._waiting.offer_all()
        self._schedule()

    def _schedule(self) -> None:
        """Start what can start, in order, as long as there are places in the batch."""
        if self.blocks.store is not None:
            self._waiting.offer_short(self.blocks.store.cpu.pool.num_free if self._num_running else None)
        while self._num_running < self._config.service.max_batch:
            job = self._waiting.pop_candidate()
            if job is None:
                break
            if not self._look_at(job):
                self._waiting.wait_for_hbm(job)

    def _look_at(self, job: Job) -> bool:
        """Start the request, for which the batch has a place, or let it wait for its reads. False if HBM has too few
        blocks.
        """
        blocks = self.blocks
        hits = blocks.match(job.chain, job.request.num_tokens)
        found = blocks.match_below(job, hits)
        if found.lookup is Lookup.PENDING:
            if job.stored.wanted.lowest > job.stored.wanted.front:  # some of its reads have not begun
                self._waiting.wait_for_arena_blocks(job)
            return True
        num_new = self._total_blocks(job.request) - len(hits)
        if num_new > blocks.pool.num_free - sum(map(blocks.pool.is_free, hits)):
            return False
        num_loads = found.num_tokens // blocks.block_size
        self._waiting.remove(job)
        self._num_running += 1
        blocks.allocate(job, hits, num_new, num_loads)
        self._start(job, len(hits), num_loads)
        return True

    # -- a request that runs -----------------------------------------------------------------------------------------
    def _start(self, job: Job, num_hbm: int, num_loads: int) -> None:
        """Load and compute. Loads share one link and prompts one server, each in the order of starts."""
        now_s, service = self._clock.now_s, self._config.service
        first_token_s = max(now_s, self._load(job, num_loads))
        compute_s = (job.request.num_tokens - job.num_hit * self.blocks.block_size) / service.prefill_tokens_per_s
        self._prefill_free_s = max(now_s, self._prefill_free_s) + compute_s
        first_token_s = max(first_token_s, self._prefill_free_s)
        self._clock.at(first_token_s, self._prefilled, job)
        self._counting.count_start(job, num_hbm, first_token_s - job.arrived_s)

    def _load(self, job: Job, num_loads: int) -> float:
        """Returns when its loads will have ended."""
        num_bytes = (num_loads + (job.stored.num_blocks_of_states if num_loads else 0)) * self._config.block_bytes
        ticket = self.blocks.load(job, num_loads)
        if ticket is None:
            return -math.inf
        load_s = num_bytes / self._config.service.load_bytes_per_s
        self._load_free_s = max(self._clock.now_s, self._load_free_s) + load_s
        self._clock.at(self._load_free_s, self._loaded, Transferred(ticket, True, True, num_bytes, load_s))
        return self._load_free_s

    def _loaded(self, done: Transferred) -> None:
        self.blocks.transferred(done)
        self._poll()
        self._schedule()

    def _prefilled(self, job: Job) -> None:
        """The first token is there, and the prompt's blocks."""
        self.blocks.computed(job, job.num_hit * self.blocks.block_size, job.request.num_tokens)
        self._poll()
        end_s = self._clock.now_s + job.request.num_output_tokens / self._config.service.decode_tokens_per_s
        self._clock.at(end_s, self._end, job)

    def _end(self, job: Job) -> None:
        self.blocks.end(job)
        self._num_running -= 1
        self._waiting.unblock()
        self._poll()
        self._ended(job.index)
        self._schedule()

    def _ended(self, index: int) -> None:
        now_s = self._clock.now_s
        self._counting.count_end(now_s)
        for follower in self._followers.pop(index, ()):
            self._clock.at(now_s + self._trace.requests[follower].arrival_s, self._arrive, follower)
        self._num_ended += 1
        if self._progress is not None and self._num_ended % PROGRESS_EVERY == 0:
            self._progress(self._num_ended)

    def check_integrity(self) -> None:
        """Assert, after the run, that nobody holds anything and that all counts agree."""
        assert not self._waiting and not self._num_running, "requests were left over"
        self.blocks.check_integrity()


class WaitingLine:
    """The requests that have arrived and do not run yet, in order of arrival.

    A candidate is looked at when the batch has a place. A request that waits for reads or for arena blocks is no
    candidate, and others may pass it. One that waits for HBM holds up all behind it.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Job] = {}
        self._candidates: list[tuple[int, Job]] = []  # a heap
        self._short: list[tuple[int, Job]] = []  # a heap: those that wait for arena blocks
        self._blocked: int | None = None  # who waits for HBM

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job) -> None:
        self._waiting[job.number] = job
        self.offer(job.number)

    def remove(self, job: Job) -> None:
        """It runs now."""
        del self._waiting[job.number]

    def offer(self, number: int) -> None:
        """Make it a candidate again: what it waited for may be there."""
        job = self._waiting.get(number)
        if job is not None and not job.is_candidate:
            job.is_candidate = True
            heapq.heappush(self._candidates, (number, job))

    def offer_all(self) -> None:
        for number in self._waiting:
            self.offer(number)

    def pop_candidate(self) -> Job | None:
        """Take the first candidate; None if there is none, or if it waits for HBM."""
        if not self._candidates or self._candidates[0][0] == self._blocked:
            return None
        _, job = heapq.heappop(self._candidates)
        job.is_candidate = False
        return job

    # -- what they wait for ------------------------------------------------------------------------------------------
    def wait_for_hbm(self, job: Job) -> None:
        self.offer(job.number)
        self._blocked = job.number

    def unblock(self) -> None:
        """A request has ended, and released its HBM."""
        self._blocked = None

    def wait_for_arena_blocks(self, job: Job) -> None:
        heapq.heappush(self._short, (job.number, job))

    @property
    def has_short(self) -> bool:
        """Whether a request waits for arena blocks."""
        return bool(self._short)

    def offer_short(self, num_free: int | None) -> None:
        """Offer requests that wait for arena blocks, in order, as long as so many free ones are enough for each; None:
        all of them.
        """
        while self._short:
            number, job = self._short[0]
            if number in self._waiting:
                if num_free is not None and num_free < job.stored.wanted.lowest - job.stored.wanted.front:
                    return
                self.offer(number)
            heapq.heappop(self._short)


class Counting:
    """The counts of one replay. moved: returns how many blocks were moved and evicted so far, by kind."""

    def __init__(self, config: ReplayConfig, block_size: int, moved: Callable[[], Counter[str]]) -> None:
        self._config, self._block_size, self._moved = config, block_size, moved
        self._num_refused = self._num_prompt_tokens = self._num_blocks = self._num_hit_blocks = 0
        self._hits = Counter[str](), Counter[str]()  # tokens by tier: at arrival, and at schedule
        self._ttft_s = array("d")
        self._times_s: tuple[float, float] | None = None  # when the counting began, and when the last request ended
        self._before = Counter[str]()  # what was moved until it began

    def begin(self, now_s: float) -> None:
        self._times_s = (now_s, now_s)
        self._before = self._moved()

    def count_refused(self, number: int) -> None:
        self._num_refused += number >= self._config.warm_up

    def count_end(self, now_s: float) -> None:
        if self._times_s is not None:
            self._times_s = (self._times_s[0], now_s)

    def count_start(self, job: Job, num_hbm: int, ttft_s: float) -> None:
        """Count a request that starts with so many hits in HBM, unless it belongs to the warm-up."""
        if job.number < self._config.warm_up:
            return
        size = self._block_size
        self._num_prompt_tokens += job.request.num_tokens
        self._num_blocks += job.request.num_tokens // size
        self._num_hit_blocks += job.num_hit
        self._ttft_s.append(ttft_s)
        in_between = ["hbm"] * num_hbm + ["cpu"] * (job.num_hit - num_hbm)  # of what was not there before
        assert job.schedule is not None
        for hits, seen in zip(self._hits, (job.arrival, job.schedule), strict=True):
            for tier in (*seen[: job.num_hit], *in_between[len(seen) :]):
                hits[tier] += size

    def result(self) -> ReplayResult:
        assert self._times_s is not None, "the warm-up never ended"
        moved = self._moved()
        moved.subtract(self._before)
        ttft_s = sorted(self._ttft_s)
        at_arrival, at_schedule = ({tier: hits[tier] for tier in TIERS} for hits in self._hits)
        return ReplayResult(
            num_requests=len(ttft_s), num_refused=self._num_refused, num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_blocks * self._block_size, num_blocks=self._num_blocks,
            num_hit_blocks=self._num_hit_blocks, hits_at_arrival=at_arrival, hits_at_schedule=at_schedule,
            bytes_moved={way: moved[way] * self._config.block_bytes for way in ("save", "load", "write", "read")},
            num_evicted={tier: moved[tier] for tier in TIERS}, num_dropped_saves=moved["unsaved"],
            num_dropped_writes=moved["unwritten"], ttft_mean_s=math.fsum(ttft_s) / len(ttft_s) if ttft_s else 0.0,
            ttft_p90_s=ttft_s[-(-9 * len(ttft_s) // 10) - 1] if ttft_s else 0.0,
            duration_s=self._times_s[1] - self._times_s[0],
        )  # fmt: skip


def _followers(trace: Trace) -> dict[int, list[int]]:
    """For each request those that come some time after its end. Raises ConfigError for an impossible trace."""
    found: dict[int, list[int]] = {}
    for index, request in enumerate(trace.requests):
        if request.after >= index:
            raise ConfigError(f"request {index} of the trace follows {request.after}, which is not before it")
        if request.after >= 0:
            found.setdefault(request.after, []).append(index)
    return found
