"""Replays a trace over a real store on a virtual clock: what would hit, and when. Without tensors or threads.

Simulates one server. Requests start in order of arrival, but one whose blocks are still being read from disk does not
hold up the others. Deterministic: the same trace and configuration give the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.blocks.records import Transferred
from kvstore.errors import ConfigError
from kvstore.planning.counting import Counting
from kvstore.planning.jobs import Job
from kvstore.planning.replay_config import ReplayConfig, ReplayResult
from kvstore.planning.server_blocks import MakeSteering, ServerBlocks
from kvstore.planning.traces import Trace, TraceRequest
from kvstore.planning.virtual_io import VirtualClock
from kvstore.planning.waiting import WaitingLine
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


def _followers(trace: Trace) -> dict[int, list[int]]:
    """For each request those that come some time after its end. Raises ConfigError for an impossible trace."""
    found: dict[int, list[int]] = {}
    for index, request in enumerate(trace.requests):
        if request.after >= index:
            raise ConfigError(f"request {index} of the trace follows {request.after}, which is not before it")
        if request.after >= 0:
            found.setdefault(request.after, []).append(index)
    return found
