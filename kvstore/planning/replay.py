"""Replays a trace over a real store on a virtual clock: what would hit, and when. No tensor, no byte, no thread.

Owns the server: queue, batch and HBM. Requests start in order of arrival, but those whose blocks are on their way from
disk do not hold up the others. Deterministic: the same trace and configuration give the same result.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Transferred
from kvstore.disk.io_queue import Rank
from kvstore.errors import ConfigError
from kvstore.planning.replay_config import TIERS, ReplayConfig, ReplayResult
from kvstore.planning.traces import Trace, TraceRequest
from kvstore.planning.virtual_io import VirtualClock, VirtualTransfers, num_cpu_slots, virtual_store
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.steering import Steering
from kvstore.store.control_plane import KVStore
from kvstore.store.requests import Tracked
from kvstore.store.seam import Lookup, Match, StepSpan

PROGRESS_EVERY = 256  # requests
ROUND_S = 0.25  # between two looks at a store that waits for room
LINEAGE = Lineage(b"")  # the names of a trace's blocks say what they are built on


class Tokens:
    """The bytes of so many tokens that nobody knows: any part of them is equal to any other."""

    def __init__(self, num_tokens: int) -> None:
        self._num_bytes = num_tokens * TOKEN_BYTES

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, index: object) -> bytes:
        return b""


def chain_of(request: TraceRequest) -> list[BlockId]:
    """Names of the full blocks of prompt and, where known, answer. Pools and indexes take any hashable names."""
    return cast("list[BlockId]", list(request.chain))


def prompt_of(request: TraceRequest, block_size: int) -> list[BlockId]:
    return cast("list[BlockId]", list(request.chain[: request.num_tokens // block_size]))


@dataclass(slots=True, eq=False)
class Job:
    """A request from its arrival to its end.

    number: in order of arrival; index: in the trace. stored: as the store knows it. arrival, schedule: tiers of its
    stored blocks when it arrived, and when it was first looked at with a place in the batch free. blocks: in HBM, once
    it runs; num_hit: those that were not computed.
    """

    number: int
    index: int
    request: TraceRequest
    stored: Tracked
    arrived_s: float
    arrival: list[str]
    schedule: list[str] | None = None
    is_candidate: bool = False
    blocks: list[int] = field(default_factory=list)
    num_hit: int = 0

    @property
    def chain(self) -> list[BlockId]:
        return self.stored.chain

    @property
    def conversation(self) -> Conversation:
        assert self.stored.conversation is not None
        return self.stored.conversation


@dataclass(slots=True)
class Tally:
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


MakeSteering = Callable[[VirtualClock, Mapping[str, int]], Steering]  # of the clock, and blocks of each tier


def replay(
    trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None,
    steering: MakeSteering | None = None,
) -> ReplayResult:  # fmt: skip
    """Serve the trace. progress: called now and then with the number of requests that have ended.

    steering: in place of that of the policy.
    """
    return Replay(trace, config, progress, steering).run()


class Replay:
    """One run of a trace. Use once: `run`, and then perhaps `check_integrity`."""

    def __init__(
        self, trace: Trace, config: ReplayConfig, progress: Callable[[int], None] | None = None,
        steering: MakeSteering | None = None,
    ) -> None:  # fmt: skip
        if config.warm_up >= len(trace.requests):
            raise ConfigError(f"a warm-up of {config.warm_up} leaves none of {len(trace.requests)} requests; give less")
        self._trace, self._config, self._service = trace, config, config.service
        self._block_size = trace.block_size
        self._progress = progress
        self._clock = clock = VirtualClock()
        num_slots = num_cpu_slots(config, max(map(self._total_blocks, trace.requests)))
        sizes = {"hbm": config.hbm_blocks, "cpu": num_slots, "disk": config.disk_blocks}
        self._steering = Steering(config.policy, clock, sizes) if steering is None else steering(clock, sizes)
        self._pool = BlockPool(config.hbm_blocks, self._steering.order("hbm"))
        self._transfers = VirtualTransfers()
        self._store: KVStore | None = None
        if num_slots:
            self._store, self._io = virtual_store(
                config, num_slots, trace.block_size, clock, self._steering, self._transfers, self._on_progress
            )
        self._waiting: dict[int, Job] = {}
        self._candidates: list[tuple[int, Job]] = []  # a heap: waiting, and not for reads or slots
        self._short: list[tuple[int, Job]] = []  # a heap: waiting for CPU slots
        self._blocked: int | None = None  # who waits for HBM, as do those behind it
        self._has_round = False
        self._num_running = self._num_arrived = self._num_ended = 0
        self._prefill_free_s = self._load_free_s = -math.inf
        self._num_unsaved = 0
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
        request, number = self._trace.requests[index], self._num_arrived
        self._num_arrived += 1
        if number == self._config.warm_up:
            self._begin_to_count()
        if self._total_blocks(request) > self._config.hbm_blocks:
            self._tally.num_refused += number >= self._config.warm_up
            self._ended(index)
            return
        job = self._job(index, number, request)
        self._count_queue()
        self._waiting[number] = job
        self._offer(job)
        self._schedule()

    def _job(self, index: int, number: int, request: TraceRequest) -> Job:
        chain, store = prompt_of(request, self._block_size), self._store
        if store is None:
            self._steering.poll()
        else:
            store.poll(reads_ahead=False)
        hits = self._match(chain, request.num_tokens)
        num_tokens = len(hits) * self._block_size
        is_stored = len(hits) == len(chain) if store is None else store.stored.has_end(chain, num_tokens)
        conversation = self._steering.arrive(chain, None, is_stored)
        tokens = cast(bytearray, Tokens(request.num_tokens))
        stored = Tracked(chain, tokens, LINEAGE, "", str(index), (0, number), conversation)
        job = Job(number, index, request, stored, self._clock.now_s, ["hbm"] * len(hits))
        self._pool.touch(hits, conversation)
        if store is not None and self._config.look_ahead:
            job.arrival += store.arrive(stored, num_tokens)
        elif store is not None:
            job.arrival += store.stored.tiers(chain, len(hits), self._num_matchable(job))
        return job

    def _match(self, chain: Sequence[BlockId], num_tokens: int) -> list[int]:
        """Blocks of the longest prefix in HBM; one token is always left to compute."""
        hits: list[int] = []
        for name in chain[: (num_tokens - 1) // self._block_size]:
            block = self._pool.lookup(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _num_matchable(self, job: Job) -> int:
        return min((job.request.num_tokens - 1) // self._block_size, len(job.chain))

    def _total_blocks(self, request: TraceRequest) -> int:
        return -(-(request.num_tokens + request.num_output_tokens) // self._block_size)

    # -- the queue ---------------------------------------------------------------------------------------------------
    def _offer(self, job: Job) -> None:
        if not job.is_candidate and job.number in self._waiting:
            job.is_candidate = True
            heapq.heappush(self._candidates, (job.number, job))

    def _on_progress(self, rank: Rank | None) -> None:
        """Reads of this rank, or writes, have ended."""
        self._poll()
        if self._io.is_idle:
            self._offer_all()
        elif rank is not None and len(rank) == 3 and (job := self._waiting.get(rank[2])) is not None:
            self._offer(job)
        if rank is not None or self._short:
            self._schedule()

    def _offer_all(self) -> None:
        """Nothing is on its way: who waits for blocks may have lost them to somebody who comes earlier."""
        for job in self._waiting.values():
            self._offer(job)

    def _poll(self) -> None:
        store = self._store
        if store is None:
            return
        store.poll()
        is_stuck = (store.disk is not None and not store.disk.is_drained) or (self._waiting and not self._num_running)
        if is_stuck and self._io.is_idle and not self._has_round:
            self._has_round = True  # else nobody would come back to it
            self._clock.at(self._clock.now_s + ROUND_S, self._round)

    def _round(self, _: object) -> None:
        """What waits for others to let go is tried again."""
        self._has_round = False
        self._poll()
        self._offer_all()
        self._schedule()

    def _schedule(self) -> None:
        """Start what can start, in order, as long as there are places in the batch."""
        self._offer_short()
        while self._num_running < self._service.max_batch:
            if not self._candidates or self._candidates[0][0] == self._blocked:
                break
            _, job = heapq.heappop(self._candidates)
            job.is_candidate = False
            if not self._look_at(job):
                self._offer(job)
                self._blocked = job.number

    def _offer_short(self) -> None:
        """Look again at the first of those who wait for CPU slots, when there are enough or all wait."""
        while self._short and self._store is not None:
            _, job = self._short[0]
            if job.number in self._waiting:
                wanted = job.stored.wanted.lowest - job.stored.wanted.front
                if self._num_running and self._store.cpu.pool.num_free < wanted:
                    return
                self._offer(job)
            heapq.heappop(self._short)

    def _look_at(self, job: Job) -> bool:
        """There is a place in the batch for it. False when HBM has too few blocks; it starts, or waits for its own."""
        hits = self._match(job.chain, job.request.num_tokens)
        found = self._match_below(job, hits)
        if found.lookup is Lookup.PENDING:
            if job.stored.wanted.lowest > job.stored.wanted.front:  # some of its reads have not begun
                heapq.heappush(self._short, (job.number, job))
            return True
        num_new = self._total_blocks(job.request) - len(hits)
        if num_new > self._pool.num_free - sum(map(self._pool.is_free, hits)):
            return False
        self._start(job, hits, num_new, found.num_tokens // self._block_size)
        return True

    def _match_below(self, job: Job, hits: list[int]) -> Match:
        """What the store has behind the hits in HBM, of which those go that are to be computed again."""
        store, size, name = self._store, self._block_size, job.stored.request_id
        num_most = self._num_matchable(job)
        found = Match(Lookup.MISS)
        if store is not None:
            if name not in store.requests.by_id:
                store.arrive(job.stored, len(hits) * size)
            found = store.match(name, len(hits) * size, (num_most - len(hits)) * size)
            del hits[len(hits) - found.num_unsaved // size :]
        if job.schedule is None:
            job.schedule = ["hbm"] * len(hits)
            if store is not None:
                job.schedule += store.stored.tiers(job.chain, len(hits), num_most)
        return found

    # -- a request that runs -----------------------------------------------------------------------------------------
    def _start(self, job: Job, hits: Sequence[int], num_new: int, num_loads: int) -> None:
        """Allocate, load and compute. Loads share one link and prompts one server, each in the order of starts."""
        self._count_queue()
        del self._waiting[job.number]
        self._num_running += 1
        job.num_hit = len(hits) + num_loads
        self._pool.acquire(hits)
        job.blocks = [*hits, *self._pool.allocate(num_new)]
        self._insert(job, len(hits), job.num_hit)
        now_s, service = self._clock.now_s, self._service
        first_token_s = max(now_s, self._load(job, len(hits), num_loads))
        compute_s = (job.request.num_tokens - job.num_hit * self._block_size) / service.prefill_tokens_per_s
        self._prefill_free_s = max(now_s, self._prefill_free_s) + compute_s
        first_token_s = max(first_token_s, self._prefill_free_s)
        self._clock.at(first_token_s, self._prefilled, job)
        self._count(job, len(hits), first_token_s - job.arrived_s)

    def _load(self, job: Job, first: int, num_loads: int) -> float:
        """Returns when its loads will have ended."""
        store, size, name = self._store, self._block_size, job.stored.request_id
        if store is None:
            return -math.inf
        if num_loads:
            store.load(name, job.blocks[first : first + num_loads], first * size, num_loads * size)
        plan = store.plan([StepSpan(name, job.num_hit * size, 0)])
        if plan is None:
            return -math.inf
        store.steps.begun(plan.ticket)
        num_bytes = num_loads * self._config.block_bytes
        load_s = num_bytes / self._service.load_bytes_per_s
        self._load_free_s = max(self._clock.now_s, self._load_free_s) + load_s
        self._clock.at(self._load_free_s, self._loaded, Transferred(plan.ticket, True, True, num_bytes, load_s))
        return self._load_free_s

    def _loaded(self, done: Transferred) -> None:
        self._transfers.done.append(done)
        self._poll()
        self._schedule()

    def _insert(self, job: Job, first: int, end: int) -> None:
        """Blocks of its chain can be found from now on. Linked to the parent only where the request holds that."""
        for index in range(first, end):
            parent = job.chain[index - 1] if index else None
            if index and self._pool.block_id(job.blocks[index - 1]) != parent:
                parent = None
            self._pool.insert(job.blocks[index], job.chain[index], parent, job.conversation)

    def _prefilled(self, job: Job) -> None:
        """The first token is there, and the prompt's blocks."""
        self._computed(job, job.num_hit * self._block_size, job.request.num_tokens)
        self._poll()
        end_s = self._clock.now_s + job.request.num_output_tokens / self._service.decode_tokens_per_s
        self._clock.at(end_s, self._end, job)

    def _computed(self, job: Job, first: int, end: int) -> None:
        """These tokens: their full blocks are in HBM, and in the CPU tier as far as there is room."""
        size, store, stored = self._block_size, self._store, job.stored
        first_block, end_block = first // size, min(end // size, len(job.chain))
        self._insert(job, first_block, end_block)
        end = min(end, (len(job.chain) + 1) * size - 1)  # what the trace does not name nobody can ask for
        if store is None or end <= first:
            return
        plan = store.plan([StepSpan(stored.request_id, first, end - first)])
        if plan is not None:
            store.steps.begun(plan.ticket)
            self._transfers.done.append(Transferred(plan.ticket, False, True))
        if not stored.saving.goes_on:
            self._num_unsaved += sum(not store.stored.holds(name) for name in job.chain[first_block:end_block])

    def _end(self, job: Job) -> None:
        request, stored = job.request, job.stored
        if request.has_answer:
            job.chain.extend(chain_of(request)[len(job.chain) :])
            self._computed(job, request.num_tokens, request.num_tokens + request.num_output_tokens)
        answer = Answer(request.num_output_tokens, request.calls_tool)
        if self._store is None:
            self._steering.leave(job.conversation, job.chain, answer)
        else:
            self._store.remove(stored.request_id, answer)
        if self._config.ttl_s is not None and not job.conversation.num_open:
            self._steering.pin(job.conversation, None, self._clock.now_s + self._config.ttl_s)
        self._pool.release(job.blocks)
        self._num_running -= 1
        self._blocked = None
        self._poll()
        self._ended(job.index)
        self._schedule()

    def _ended(self, index: int) -> None:
        now_s = self._clock.now_s
        for follower in self._followers.pop(index, ()):
            self._clock.at(now_s + self._trace.requests[follower].arrival_s, self._arrive, follower)
        self._tally.last_s = now_s
        self._num_ended += 1
        if self._progress is not None and self._num_ended % PROGRESS_EVERY == 0:
            self._progress(self._num_ended)

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
        if job.number < self._config.warm_up:
            return
        tally, size = self._tally, self._block_size
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
        moved = Counter(hbm=self._pool.num_evictions, unsaved=self._num_unsaved)
        if (store := self._store) is not None:
            stats = store.stats
            moved.update(save=stats.saved, load=stats.loaded, write=stats.written, read=stats.read)
            moved.update(cpu=store.cpu.pool.num_evictions, disk=stats.disk_evictions, unwritten=stats.dropped_writes)
        return moved

    def _result(self) -> ReplayResult:
        tally, moved = self._tally, self._moved()
        moved.subtract(tally.before)
        ttft_s = sorted(tally.ttft_s)
        assert tally.first_s is not None, "the warm-up never ended"
        duration_s = tally.last_s - tally.first_s
        return ReplayResult(
            num_requests=len(ttft_s), num_refused=tally.num_refused, num_prompt_tokens=tally.num_prompt_tokens,
            num_hit_tokens=tally.num_hit_blocks * self._block_size, num_blocks=tally.num_blocks,
            num_hit_blocks=tally.num_hit_blocks, hits_at_arrival={tier: tally.hits_at_arrival[tier] for tier in TIERS},
            hits_at_schedule={tier: tally.hits_at_schedule[tier] for tier in TIERS},
            bytes_moved={way: moved[way] * self._config.block_bytes for way in ("save", "load", "write", "read")},
            num_evicted={tier: moved[tier] for tier in TIERS}, num_dropped_saves=moved["unsaved"],
            num_dropped_writes=moved["unwritten"], ttft_mean_s=math.fsum(ttft_s) / len(ttft_s) if ttft_s else 0.0,
            ttft_p90_s=ttft_s[-(-9 * len(ttft_s) // 10) - 1] if ttft_s else 0.0,
            mean_queue=tally.queue_area / duration_s if duration_s else 0.0, duration_s=duration_s,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Assert, after the run, that nobody holds anything and that all counts agree."""
        assert not self._waiting and not self._num_running, "requests were left over"
        self._pool.check_integrity()
        if self._store is not None:
            self._store.check_integrity(idle=True)
            assert self._store.is_idle, "something is in flight while idle"
