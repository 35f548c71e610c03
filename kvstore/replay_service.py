"""The server of a replay: a queue, a batch and HBM on a virtual clock. A request is served as the engine would.

Requests start in order of arrival, but those whose blocks are on their way from disk do not hold up the others.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.block import BlockId
from kvstore.errors import ConfigError
from kvstore.lookahead import SAVE_SHARE, LookAhead
from kvstore.pool import BlockPool
from kvstore.replay_config import TIERS, ReplayConfig, ReplayResult
from kvstore.replay_guide import Expiry, Guide, VirtualClock, chain_of, prompt_of
from kvstore.replay_tiers import Held, LowerTiers
from kvstore.traces import Trace, TraceRequest

PROGRESS_EVERY = 256  # requests


@dataclass(slots=True, eq=False)
class Job(Held):
    """A request from its arrival to its end.

    index: in the trace. num_matchable: blocks that may hit. arrival, schedule: tiers of its stored blocks when it
    arrived, and when it was first looked at with a place in the batch free. num_needed: CPU slots to be free before it
    is looked at again. blocks: in HBM, once it runs; num_hit: those that were not computed.
    """

    index: int = -1
    request: TraceRequest = field(kw_only=True)
    num_prompt_blocks: int = 0
    num_matchable: int = 0
    arrived_s: float = 0.0
    arrival: list[str] = field(default_factory=list)
    schedule: list[str] | None = None
    is_candidate: bool = False
    num_needed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_hit: int = 0


@dataclass(slots=True)
class Tally:
    """What is counted of requests."""

    num_requests: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_blocks: int = 0
    num_hit_blocks: int = 0
    hits_at_arrival: Counter[str] = field(default_factory=Counter)
    hits_at_schedule: Counter[str] = field(default_factory=Counter)
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    queue_area: float = 0.0  # waiting requests x seconds
    first_s: float | None = None
    last_s: float = 0.0
    before: Counter[str] = field(default_factory=Counter)  # what was moved and evicted until then


class Replay:
    """One run of a trace. Use once: `run`, and then perhaps `check_integrity`."""

    def __init__(self, trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None) -> None:
        if config.warm_up >= len(trace.requests):
            raise ConfigError(f"a warm-up of {config.warm_up} leaves none of {len(trace.requests)} requests; give less")
        self._trace, self._config, self._service = trace, config, config.service
        self._block_size = trace.block_size
        self._progress = progress
        self._clock = VirtualClock()
        sizes = dict(zip(TIERS, (config.hbm_blocks, config.cpu_blocks, config.disk_blocks), strict=True))
        self._guide = Guide(config.policy, self._clock, {tier: num for tier, num in sizes.items() if num}, trace)
        self._pool = BlockPool(config.hbm_blocks, self._guide.order("hbm"))
        longest = max(map(self._total_blocks, trace.requests))
        self._tiers = LowerTiers(config, self._clock, self._guide, longest, self._on_ready, self._on_room)
        self._look_ahead: LookAhead | None = None
        if config.look_ahead and not self._tiers.is_off:
            num_slots = self._tiers.cpu.pool.num_blocks
            self._look_ahead = LookAhead(num_slots - num_slots // SAVE_SHARE, config.disk_blocks, self._guide.refresh)
        self._expiry = None
        if config.ttl_s is not None:
            self._expiry = Expiry(config.ttl_s, self._clock, self._guide.steering, self._drop)
        self._waiting: dict[int, Job] = {}
        self._candidates: list[tuple[int, Job]] = []  # a heap: waiting, and not for reads or slots
        self._blocked: int | None = None  # who waits for HBM, as do those behind it
        self._starved: deque[Job] = deque()  # waiting for CPU slots
        self._prefetch_needs: int | None = None  # CPU slots that prefetching waits for; None: nothing to prefetch
        self._num_running = self._num_arrived = self._num_ended = 0
        self._prefill_free_s = self._load_free_s = -math.inf
        self._num_loaded = self._num_expired = 0
        self._tally = Tally()
        self._queue_s = 0.0
        self._followers: dict[int, list[int]] = {}
        self._next_open = 0  # the next request whose arrival is known

    def run(self) -> ReplayResult:
        for index, request in enumerate(self._trace.requests):
            if request.after >= 0:
                if request.after >= index:
                    raise ConfigError(f"request {index} of the trace follows {request.after}, which is not before it")
                self._followers.setdefault(request.after, []).append(index)
        self._plan_next()
        self._clock.run()
        assert self._num_ended == len(self._trace.requests), "requests were left over"
        return self._result()

    # -- arrival -----------------------------------------------------------------------------------------------------
    def _plan_next(self) -> None:
        """Plan the arrival of the next request that follows no other."""
        requests = self._trace.requests
        while self._next_open < len(requests) and requests[self._next_open].after >= 0:
            self._next_open += 1
        if self._next_open < len(requests):
            self._clock.at(requests[self._next_open].arrival_s, self._arrive_open, self._next_open)
            self._next_open += 1

    def _arrive_open(self, index: int) -> None:
        self._plan_next()
        self._arrive(index)

    def _arrive(self, index: int) -> None:
        request = self._trace.requests[index]
        sequence, self._num_arrived = self._num_arrived, self._num_arrived + 1
        if sequence == self._config.warm_up:
            self._begin_to_count()
        if self._total_blocks(request) > self._config.hbm_blocks:
            self._tally.num_refused += sequence >= self._config.warm_up
            self._ended(index)
            return
        job = self._job(index, sequence, request)
        self._count_queue()
        self._waiting[sequence] = job
        self._offer(job)
        if self._look_ahead is not None:
            num_blocks = len(job.arrival) - job.arrival.count("hbm")
            self._look_ahead.add(sequence, (0, sequence), job.conversation, num_blocks)
            self._prefetch_needs = self._prefetch_needs or 0
        self._schedule()

    def _job(self, index: int, sequence: int, request: TraceRequest) -> Job:
        """The request with what is stored of it now."""
        prompt = prompt_of(request, self._block_size)
        num_matchable = min((request.num_tokens - 1) // self._block_size, len(prompt))
        is_stored = bool(prompt) and (self._pool.lookup(prompt[-1]) is not None or self._tiers.holds(prompt[-1]))
        conversation = self._guide.arrive(index, prompt, is_stored)
        if self._expiry is not None:
            self._expiry.arrived(conversation, prompt)
        job = Job(
            sequence,
            chain_of(request) if request.has_answer else prompt,
            conversation,
            index=index,
            request=request,
            num_prompt_blocks=len(prompt),
            num_matchable=num_matchable,
            arrived_s=self._clock.now_s,
        )
        hits = self._match(job)
        self._pool.touch(hits, conversation)
        job.arrival = ["hbm"] * len(hits) + self._tiers.tiers(job.chain, len(hits), num_matchable)
        return job

    def _match(self, job: Job) -> list[int]:
        """Blocks of its longest prefix in HBM; one token is always left to compute."""
        hits: list[int] = []
        for name in job.chain[: job.num_matchable]:
            block = self._pool.lookup(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _total_blocks(self, request: TraceRequest) -> int:
        return -(-(request.num_tokens + request.num_output_tokens) // self._block_size)

    # -- the queue ---------------------------------------------------------------------------------------------------
    def _offer(self, job: Job) -> None:
        if not job.is_candidate:
            job.is_candidate = True
            heapq.heappush(self._candidates, (job.sequence, job))

    def _on_ready(self, ready: Sequence[Held]) -> None:
        """The reads of these requests have ended: they are looked at again, if they were before."""
        for held in ready:
            self._offer(self._waiting[held.sequence])
        self._schedule()

    def _on_room(self) -> None:
        if self._starved or self._prefetch_needs is not None:
            self._schedule()

    def _schedule(self, _: object = None) -> None:
        """Start what can start, and read ahead for those that cannot."""
        self._start_some()
        needs = self._prefetch_needs
        if self._look_ahead is not None and needs is not None and self._tiers.cpu.pool.num_free >= needs:
            self._prefetch(self._look_ahead)
            self._start_some()

    def _start_some(self) -> None:
        """In order, as long as there are places in the batch."""
        while self._num_running < self._service.max_batch:
            self._feed_starved()
            if not self._candidates or self._candidates[0][0] == self._blocked:
                break
            _, job = heapq.heappop(self._candidates)
            job.is_candidate = False
            if not self._look_at(job):
                self._offer(job)
                self._blocked = job.sequence

    def _feed_starved(self) -> None:
        """Look again at those who wait for CPU slots, in their order. Nobody waits when nobody will give some back."""
        while self._starved:
            job = self._starved[0]
            is_settled = job.begun or job.sequence not in self._waiting
            if not is_settled and self._tiers.num_holders and self._tiers.cpu.pool.num_free < job.num_needed:
                return
            self._starved.popleft()
            if not is_settled:
                self._offer(job)

    def _prefetch(self, look_ahead: LookAhead) -> None:
        self._prefetch_needs = None
        for waiting in look_ahead.to_prefetch():
            job = self._waiting[waiting.request_id]  # type: ignore[index]
            if not job.begun:
                # Behind what HBM has now: what it had at the arrival may be gone, and a request that was begun too far
                # behind would give its blocks back, wait for slots, and be begun again for ever.
                num_short = self._tiers.begin(job, len(self._match(job)), job.num_matchable)
                if num_short:
                    self._prefetch_needs = self._tiers.cpu.pool.num_free + num_short
                    return
                if not job.num_reading:
                    self._offer(job)  # it may have been looked at before, and have waited for slots

    def _look_at(self, job: Job) -> bool:
        """There is a place in the batch for it. False when HBM has too few blocks; it starts, or waits for its own."""
        hits = self._match(job)
        del hits[self._tiers.num_usable(job.chain, len(hits)) :]
        if job.schedule is None:
            job.schedule = ["hbm"] * len(hits) + self._tiers.tiers(job.chain, len(hits), job.num_matchable)
        if not self._is_loadable(job, len(hits)):
            return True
        num_new = self._total_blocks(job.request) - len(hits)
        if num_new > self._pool.num_free - sum(map(self._pool.is_free, hits)):
            return False
        self._start(job, hits, num_new)
        return True

    def _is_loadable(self, job: Job, num_hit: int) -> bool:
        """Whether all that is stored behind its hits in HBM is in the CPU tier, and held; else that is seen to."""
        end = job.first_block + len(job.slots)
        grows = num_hit <= end < job.num_matchable and self._tiers.holds(job.chain[end])
        if not job.begun or num_hit < job.first_block or grows:
            while num_short := self._tiers.begin(job, num_hit, job.num_matchable):
                if not self._take_from_behind(job):
                    break
            if num_short and self._tiers.num_holders:
                job.num_needed = self._tiers.cpu.pool.num_free + num_short
                self._starved.append(job)
                return False
            if num_short:
                self._tiers.begin(job, num_hit, job.num_matchable, take_less=True)
        return not job.num_reading

    def _take_from_behind(self, job: Job) -> bool:
        """Take the CPU slots of the request that is expected to start last; False: all belong to earlier ones."""
        for other in reversed(self._waiting.values()):
            if other.sequence <= job.sequence:
                return False
            if other.slots:
                self._tiers.let_go(other)
                self._offer(other)
                self._prefetch_needs = self._prefetch_needs or 0
                return True
        return False

    # -- a request that runs -----------------------------------------------------------------------------------------
    def _start(self, job: Job, hits: Sequence[int], num_new: int) -> None:
        """Allocate, load and compute. Loads share one link and prompts one server, each in the order of starts."""
        self._count_queue()
        del self._waiting[job.sequence]
        if self._look_ahead is not None:
            self._look_ahead.start(job.sequence)
            self._prefetch_needs = self._prefetch_needs or 0
        self._num_running += 1
        skip = len(hits) - job.first_block
        num_loads = max(len(job.slots) - skip, 0)
        job.num_hit = len(hits) + num_loads
        self._pool.acquire(hits)
        job.blocks = [*hits, *self._pool.allocate(num_new)]
        self._insert(job, len(hits), job.num_hit)
        now_s, service = self._clock.now_s, self._service
        first_token_s = now_s
        if num_loads:
            self._num_loaded += num_loads
            load_s = num_loads * self._config.block_bytes / service.load_bytes_per_s
            first_token_s = self._load_free_s = max(now_s, self._load_free_s) + load_s
            self._clock.at(first_token_s, self._loaded, job)
        else:
            self._tiers.let_go(job)
        compute_s = (job.request.num_tokens - job.num_hit * self._block_size) / service.prefill_tokens_per_s
        self._prefill_free_s = max(now_s, self._prefill_free_s) + compute_s
        first_token_s = max(first_token_s, self._prefill_free_s)
        self._clock.at(first_token_s, self._prefilled, job)
        self._count(job, len(hits), first_token_s - job.arrived_s)

    def _insert(self, job: Job, first: int, end: int) -> None:
        """Blocks of its chain can be found from now on. Linked to the parent only where the request holds that."""
        for index in range(first, end):
            parent = job.chain[index - 1] if index else None
            if index and self._pool.block_id(job.blocks[index - 1]) != parent:
                parent = None
            self._pool.insert(job.blocks[index], job.chain[index], parent, job.conversation)

    def _loaded(self, job: Job) -> None:
        self._tiers.let_go(job)
        self._schedule()

    def _prefilled(self, job: Job) -> None:
        """The first token is there, and the prompt's blocks."""
        self._insert(job, job.num_hit, job.num_prompt_blocks)
        self._save(job, job.num_hit, job.num_prompt_blocks)
        end_s = self._clock.now_s + job.request.num_output_tokens / self._service.decode_tokens_per_s
        self._clock.at(end_s, self._end, job)

    def _save(self, job: Job, first: int, end: int) -> None:
        if not self._tiers.is_off:
            self._tiers.save(job, first, end)

    def _end(self, job: Job) -> None:
        self._insert(job, job.num_prompt_blocks, len(job.chain))
        self._save(job, job.num_prompt_blocks, len(job.chain))
        self._tiers.leave(job)
        self._guide.leave(job.conversation, job.chain, job.request)
        if self._expiry is not None:
            self._expiry.left(job.conversation, job.chain[: job.num_prompt_blocks], job.chain)
        self._pool.release(job.blocks)
        self._num_running -= 1
        self._blocked = None
        self._ended(job.index)
        self._schedule()

    def _ended(self, index: int) -> None:
        """Plan the requests that follow this one."""
        now_s = self._clock.now_s
        for follower in self._followers.pop(index, ()):
            self._clock.at(now_s + self._trace.requests[follower].arrival_s, self._arrive, follower)
        self._tally.last_s = now_s
        self._num_ended += 1
        if self._progress is not None and self._num_ended % PROGRESS_EVERY == 0:
            self._progress(self._num_ended)

    def _drop(self, names: Sequence[BlockId]) -> None:
        """What only expired conversations had."""
        for name in names:
            block = self._pool.lookup(name)
            if block is not None:
                self._pool.forget(block)
        self._num_expired += self._tiers.drop(names)

    # -- counting ----------------------------------------------------------------------------------------------------
    def _begin_to_count(self) -> None:
        self._count_queue()
        self._tally.first_s, self._tally.queue_area = self._clock.now_s, 0.0
        self._tally.before = self._moved()

    def _count_queue(self) -> None:
        """Called before the number of waiting requests changes."""
        now_s = self._clock.now_s
        self._tally.queue_area += len(self._waiting) * (now_s - self._queue_s)
        self._queue_s = now_s

    def _count(self, job: Job, num_hbm: int, ttft_s: float) -> None:
        if job.sequence < self._config.warm_up:
            return
        tally, size = self._tally, self._block_size
        tally.num_requests += 1
        tally.num_prompt_tokens += job.request.num_tokens
        tally.num_blocks += job.request.num_tokens // size
        tally.num_hit_blocks += job.num_hit
        tally.ttft_s.append(ttft_s)
        in_between = ["hbm"] * num_hbm + ["cpu"] * (job.num_hit - num_hbm)  # of what was not there before
        assert job.schedule is not None
        for hits, seen in ((tally.hits_at_arrival, job.arrival), (tally.hits_at_schedule, job.schedule)):
            for tier in (*seen[: job.num_hit], *in_between[len(seen) :]):
                hits[tier] += size

    def _moved(self) -> Counter[str]:
        """Blocks that were moved, evicted or dropped so far."""
        tiers = self._tiers
        return Counter(
            save=tiers.num_saved,
            load=self._num_loaded,
            write=tiers.num_written,
            read=tiers.num_read,
            hbm=self._pool.num_evictions,
            cpu=tiers.cpu.pool.num_evictions,
            disk=tiers.num_evicted,
            dropped_saves=tiers.num_dropped_saves,
            dropped_writes=tiers.num_dropped_writes,
            expired=self._num_expired,
        )

    def _result(self) -> ReplayResult:
        tally, moved = self._tally, self._moved()
        moved.subtract(tally.before)
        ttft_s = sorted(tally.ttft_s)
        assert tally.first_s is not None, "the warm-up never ended"
        duration_s = tally.last_s - tally.first_s
        return ReplayResult(
            num_requests=tally.num_requests,
            num_refused=tally.num_refused,
            num_prompt_tokens=tally.num_prompt_tokens,
            num_hit_tokens=tally.num_hit_blocks * self._block_size,
            num_blocks=tally.num_blocks,
            num_hit_blocks=tally.num_hit_blocks,
            hits_at_arrival={tier: tally.hits_at_arrival[tier] for tier in TIERS},
            hits_at_schedule={tier: tally.hits_at_schedule[tier] for tier in TIERS},
            bytes_moved={way: moved[way] * self._config.block_bytes for way in ("save", "load", "write", "read")},
            num_evicted={tier: moved[tier] for tier in TIERS},
            num_dropped_saves=moved["dropped_saves"],
            num_dropped_writes=moved["dropped_writes"],
            num_expired=moved["expired"],
            ttft_mean_s=math.fsum(ttft_s) / len(ttft_s) if ttft_s else 0.0,
            ttft_p90_s=ttft_s[-(-9 * len(ttft_s) // 10) - 1] if ttft_s else 0.0,
            mean_queue=tally.queue_area / duration_s if duration_s else 0.0,
            duration_s=duration_s,
            in_force=self._guide.in_force(),
        )

    def check_integrity(self) -> None:
        """Assert, after the run, that nobody holds anything and that all counts agree."""
        assert not self._waiting and not self._num_running, "requests were left over"
        self._pool.check_integrity()
        self._tiers.check_integrity()
