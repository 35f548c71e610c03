"""The blocks of one simulated server: in HBM, and below that in a real store over virtual I/O.

Knows neither the queue nor how long computing takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Transferred
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.traces import TraceRequest
from kvstore.planning.virtual_io import VirtualClock, num_cpu_blocks, virtual_store
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.policies import Steering
from kvstore.store.control_plane import KVStore
from kvstore.store.requests import Tracked
from kvstore.store.seam import Lookup, Match, StepSpan
from kvstore.tiers.port import Rank

MakeSteering = Callable[[VirtualClock, Mapping[str, int]], Steering]  # of the clock, and blocks of each tier
LINEAGE = Lineage(b"")  # the names of a trace's blocks say what they are built on


class Tokens:
    """Stands for the bytes of so many unknown tokens; all parts of it are equal."""

    def __init__(self, num_tokens: int) -> None:
        self._num_bytes = num_tokens * TOKEN_BYTES

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, index: object) -> bytes:
        return b""


def chain_of(request: TraceRequest) -> list[BlockId]:
    """Names of the full blocks of the prompt and, if known, the answer. Pools and indexes take any hashable names."""
    return cast("list[BlockId]", list(request.chain))


def prompt_of(request: TraceRequest, block_size: int) -> list[BlockId]:
    return cast("list[BlockId]", list(request.chain[: request.num_tokens // block_size]))


@dataclass(slots=True, eq=False)
class Job:
    """A request of a trace from its arrival to its end.

    number: in order of arrival. index: in the trace. stored: the store's record of it. arrival: tiers of its stored
    blocks when it arrived. schedule: the same when the batch first had a place for it. blocks: its blocks in HBM, once
    it runs. num_hit: how many of them were not computed. num_known: of its blocks, in HBM when it arrived.
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
    num_known: int = 0

    @property
    def chain(self) -> list[BlockId]:
        return self.stored.chain

    def num_matchable(self, block_size: int) -> int:
        """Blocks that may be hits; one token is always left to compute."""
        return min((self.request.num_tokens - 1) // block_size, len(self.chain))

    @property
    def conversation(self) -> Conversation:
        assert self.stored.conversation is not None
        return self.stored.conversation


class ServerBlocks:
    """The tiers of one server, whose transfers it says itself have ended. longest: blocks of the longest request.
    on_progress: called when reads or writes have ended.

    pool: HBM. store: the tiers below; None if there are none. num_unsaved: computed blocks that found no arena block.
    In HBM checkpoints take no room here: an engine has a share of it for them.
    """

    can_save = True

    def __init__(
        self, config: ReplayConfig, block_size: int, longest: int, clock: VirtualClock, steering: MakeSteering | None,
        on_progress: Callable[[Rank | None], None],
    ) -> None:  # fmt: skip
        num_arena_blocks = num_cpu_blocks(config, longest)
        sizes = {"hbm": config.hbm_blocks, "cpu": num_arena_blocks, "disk": config.disk_blocks}
        self.block_size = block_size
        self._checkpoints = set[BlockId]() if config.state_blocks else None  # blocks that have one behind them in HBM
        self._window_blocks = config.window_blocks
        self.store: KVStore | None = None
        self.num_unsaved = 0
        self._look_ahead, self._ttl_s, self._clock = config.look_ahead, config.ttl_s, clock
        self._steering = Steering(config.policy, clock, sizes) if steering is None else steering(clock, sizes)
        self.pool = BlockPool(config.hbm_blocks, self._steering.order("hbm"))
        self._transferred: list[Transferred] = []
        if num_arena_blocks:
            self.store, self._io = virtual_store(
                config, num_arena_blocks, block_size, clock, self._steering, self, on_progress
            )

    # -- what is here ------------------------------------------------------------------------------------------------
    def match(self, chain: Sequence[BlockId], num_tokens: int) -> list[int]:
        """Blocks of the longest prefix in HBM that a request can begin with; one token is always left to compute."""
        return self._up_to_checkpoint(chain, self._known(chain, num_tokens))

    def _known(self, chain: Sequence[BlockId], num_tokens: int) -> list[int]:
        hits: list[int] = []
        for name in chain[: (num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _up_to_checkpoint(self, chain: Sequence[BlockId], hits: list[int]) -> list[int]:
        end = len(hits)
        while end and self._checkpoints is not None and chain[end - 1] not in self._checkpoints:
            end -= 1
        return hits[:end]

    def _named(self, chain: list[BlockId]) -> list[BlockId]:
        """The same names, from which the ids of states can be made, if there are any."""
        return chain if self._checkpoints is None else [b"%d" % name for name in cast("list[int]", chain)]

    def _tokens(self, num_tokens: int) -> bytearray:
        is_plain = self._checkpoints is None  # else what stands for tokens must be as long as they are
        return cast(bytearray, Tokens(num_tokens)) if is_plain else bytearray(num_tokens * TOKEN_BYTES)

    def job(self, index: int, number: int, request: TraceRequest) -> Job:
        """A request that arrives now, and where its stored blocks are. The store is told of it if it looks ahead."""
        chain, store = self._named(prompt_of(request, self.block_size)), self.store
        if store is None:
            self._steering.poll()
        else:
            store.poll(reads_ahead=False)
        known = self._known(chain, request.num_tokens)
        hits = self._up_to_checkpoint(chain, known)
        num_tokens = len(hits) * self.block_size
        is_stored = len(hits) == len(chain) if store is None else store.stored.has_end(chain, num_tokens)
        conversation = self._steering.arrive(chain, None, is_stored)
        stored = Tracked(chain, self._tokens(request.num_tokens), LINEAGE, "", str(index), (0, number), conversation)
        job = Job(number, index, request, stored, self._clock.now_s, ["hbm"] * len(hits))
        self.pool.touch(hits, conversation)
        job.num_known = len(known)
        if store is not None and self._look_ahead:
            job.arrival += store.arrive(stored, num_tokens)
        elif store is not None:
            job.arrival += store.stored.tiers(chain, len(hits), job.num_matchable(self.block_size))
        return job

    def match_below(self, job: Job, hits: list[int]) -> Match:
        """What the store has after the hits in HBM. Drops hits that are to be computed again."""
        store, size, name = self.store, self.block_size, job.stored.request_id
        num_most = job.num_matchable(size)
        found = Match(Lookup.MISS)
        if store is not None:
            if name not in store.requests.by_id:
                store.arrive(job.stored, len(hits) * size)
            found = store.match(name, len(hits) * size, (num_most - len(hits)) * size)
            del hits[len(hits) - found.num_unsaved // size :]
            if not found.num_tokens:
                hits[:] = self._up_to_checkpoint(job.chain, hits)
        if job.schedule is None:
            job.schedule = ["hbm"] * len(hits)
            if store is not None:
                job.schedule += store.stored.tiers(job.chain, len(hits), num_most)
        return found

    # -- a request that runs -----------------------------------------------------------------------------------------
    def allocate(self, job: Job, hits: Sequence[int], num_new: int, num_loads: int) -> None:
        """Take its blocks in HBM: the hits and new ones, the first of which are to be loaded."""
        job.num_hit = len(hits) + num_loads
        self.pool.acquire(hits)
        job.blocks = [*hits, *self.pool.allocate(num_new)]
        self._insert(job, len(hits), job.num_hit)

    def _insert(self, job: Job, first: int, end: int) -> None:
        """Make these blocks of its chain known. Each is linked to its parent only if the request holds that."""
        for index in range(first, end):
            before = job.chain[index - 1] if index else None
            parent = before if index and self.pool.block_id(job.blocks[index - 1]) == before else None
            self.pool.insert(job.blocks[index], job.chain[index], parent, job.conversation)

    def load(self, job: Job, num_loads: int) -> int | None:
        """Begin its loads. Returns the step that they belong to; None if the store has nothing to do."""
        store, size, name = self.store, self.block_size, job.stored.request_id
        if store is None:
            return None
        if num_loads:
            first = job.num_hit - num_loads
            rows = job.blocks[first : first + num_loads] if self._window_blocks else [0]
            store.load(name, job.blocks[first : first + num_loads], first * size, num_loads * size, rows)
        plan = store.plan([StepSpan(name, job.num_hit * size, 0)])
        if plan is None:
            return None
        store.steps.begun(plan.ticket)
        return plan.ticket

    def transferred(self, done: Transferred) -> None:
        """Report a finished transfer, which the store sees at its next poll."""
        self._transferred.append(done)

    def completed(self) -> list[Transferred]:
        done, self._transferred = self._transferred, []
        return done

    def computed(self, job: Job, first: int, end: int) -> None:
        """Tokens [first, end) were computed: their full blocks are in HBM, and in the CPU tier if there is room."""
        size, store, stored = self.block_size, self.store, job.stored
        first_block, end_block = first // size, min(end // size, len(job.chain))
        self._insert(job, first_block, end_block)
        end = min(end, (len(job.chain) + 1) * size - 1)  # what the trace does not name nobody can ask for
        if store is None or end <= first:
            return
        plan = store.plan([StepSpan(stored.request_id, first, end - first)])
        if plan is not None:
            store.steps.begun(plan.ticket)
            self.transferred(Transferred(plan.ticket, False, True))
        if not stored.is_saved:
            self.num_unsaved += sum(not store.stored.holds(name) for name in job.chain[first_block:end_block])

    def end(self, job: Job) -> None:
        """The request's answer is complete: release its blocks."""
        request, stored = job.request, job.stored
        if request.has_answer:
            job.chain.extend(self._named(chain_of(request)[len(job.chain) :]))
            if self._checkpoints is not None:
                stored.tokens += self._tokens(request.num_output_tokens)
            self.computed(job, request.num_tokens, request.num_tokens + request.num_output_tokens)
        answer, states = Answer(request.num_output_tokens, request.calls_tool), self._states(job)
        if self.store is None:
            self._steering.end_request(job.conversation, job.chain, answer)
        else:
            self.store.remove(stored.request_id, answer)
            if states and (plan := self.store.save_states(stored, states)) is not None:
                self.transferred(Transferred(plan.ticket, False, True))
        if self._ttl_s is not None and not job.conversation.num_open:
            self._steering.pin(job.conversation, None, self._clock.now_s + self._ttl_s)
        self.pool.release(job.blocks)

    def _states(self, job: Job) -> list[tuple[int, int]]:
        """What a request that leaves has saved, as `KVStore.save_states` takes it: behind what was known before it
        came, and behind its end.
        """
        if self._checkpoints is None:
            return []
        ends = {max(job.num_known, job.stored.num_known), len(job.chain)} - {0}
        self._checkpoints.update(job.chain[end - 1] for end in ends)
        span = self._window_blocks + 1 if self._window_blocks else 1
        borders = sorted({border for end in ends for border in range(max(end - span, 0) + 1, end + 1)})
        return [(border * self.block_size, 0) for border in borders]

    # -- all of them -------------------------------------------------------------------------------------------------
    @property
    def is_idle(self) -> bool:
        """Whether nothing is read or written."""
        return self._io.is_idle

    def moved(self) -> Counter[str]:
        """How many blocks were moved and evicted so far, by kind."""
        moved = Counter(hbm=self.pool.num_evictions, unsaved=self.num_unsaved)
        if (store := self.store) is not None:
            stats = store.stats
            moved.update(save=stats.saved, load=stats.loaded, write=stats.written, read=stats.read)
            moved.update(cpu=store.cpu.pool.num_evictions, disk=stats.disk_evictions, unwritten=stats.dropped_writes)
        return moved

    def check_integrity(self) -> None:
        """Assert, after the run, that nobody holds anything and that all counts agree."""
        self.pool.check_integrity()
        if self.store is not None:
            self.store.check_integrity(idle=True)
            assert self.store.is_idle, "something is in flight while idle"
