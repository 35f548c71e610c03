"""Splices: new blocks in the CPU tier, put together from runs of other blocks' tokens without computing them.

Control plane, one thread; the copying is a task of an I/O thread. Raw keys carry no position, so a run can be copied to
any place in a block and is rotated when it is loaded there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from kvstore.blocks.ids import (
    TOKEN_BYTES,
    BlockId,
    Lineage,
    SpliceRun,
    child_block_id,
    splice_parent_id,
)
from kvstore.blocks.records import BlockRecord, SplicedState, WindowRun
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.rope.splice import SplicePiece, SplicePlan, plan_splice
from kvstore.stats import StoreStats
from kvstore.store.stored import ChainContent, StoredBlocks, TierReads
from kvstore.tiers.queues import Task
from kvstore.tiers.worker import TierWorker

CHUNK_BLOCKS = 64  # copied by one task, so that reads can come in between

Piece = tuple[int, int, int, int, int]  # source arena block, source offset, arena block, offset, number of tokens


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to make, with the runs that fill it, each of a block; or a state behind one, of several blocks as each of
    its sources. first_token: of the block behind which a state stands, None for KV.
    """

    records: list[BlockRecord]
    runs: list[tuple[list[BlockRecord], SplicePiece]]
    first_token: int | None = None

    def can_be_made(self, stored: StoredBlocks) -> bool:
        """Whether it is there, or all that it is copied from."""
        needed = [source for sources, _ in self.runs for source in sources]
        return stored.holds(self.records[-1].block_id) or all(stored.holds(one.block_id) for one in needed)


@dataclass(frozen=True, slots=True)
class Spliced:
    """A planned chain: its first blocks are old ones, the others are new. blocks: these, and states behind the last."""

    chain: list[BlockId]
    lineage: Lineage
    blocks: list[NewBlock]


def plan_chain(
    old: ChainContent, spans: Sequence[tuple[int, int]], stored: StoredBlocks, secret: bytes,
    head: tuple[Sequence[BlockId], Lineage] | None = None, most: int | None = None,
) -> Spliced | None:  # fmt: skip
    """The chain of the kept `spans` of old tokens, as far as full blocks can be made: before the first one that needs a
    block that no tier holds, and `most` of them. None if nothing can be reused, or a span not as a whole.

    Its first blocks, before any token that moved and before an earlier splice, are the old ones. Or they are those of
    `head`, which may have splices of its own. If layers have windows, it ends where these can be made of what is
    stored, and must have no such head.
    """
    size = stored.block_size
    if stored.num_state_blocks and not stored.has_windows:
        return None
    keeps_first = head is None and not old.lineage.sources
    planned = plan_splice(spans, size, len(old.chain), old.lineage.splice_index if keeps_first else 0)
    planned = replace(planned, blocks=planned.blocks[:most])
    new_blocks = planned.blocks[: _num_with_windows(old, planned, stored)]
    if not new_blocks or (head is not None and stored.num_state_blocks):
        return None
    pieces = [one for block in new_blocks for one in block.pieces]
    sources = {one.source_block: stored.record(old, one.source_block) for one in pieces}
    reused = [(sources[one.source_block].block_id, one.source_offset, one.length) for one in pieces]
    chain, before, tokens = old.chain[: planned.num_exact_blocks], old.lineage.exact, b""
    if head is not None:
        chain, before, tokens = list(head[0]), head[1], bytes(len(head[0]) * size * TOKEN_BYTES)  # nobody reads these
    parent = splice_parent_id(secret, chain[-1] if chain else before.root, reused)
    first, end = len(chain), len(chain) + len(new_blocks)
    tokens += b"".join(old.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES] for start, stop in spans)
    new = ChainContent(chain, tokens, before.spliced(SpliceRun(first, parent, end)), old.tenant)
    blocks, states = list[NewBlock](), list[NewBlock]()
    for index, block in enumerate(new_blocks, start=first):
        start = index * size * TOKEN_BYTES
        chain.append(child_block_id(new.lineage.parent(chain, index), tokens[start : start + size * TOKEN_BYTES]))
        runs = [([sources[one.source_block]], one) for one in block.pieces]
        blocks.append(NewBlock([stored.record(new, index)], runs))
        if stored.num_state_blocks and index >= end - stored.state_span:
            runs = [(stored.state_records(old, one.source_block + 1), one) for one in block.pieces]
            states.append(NewBlock(stored.state_records(new, index + 1), runs, index * size))
    lost = next((number for number, block in enumerate(blocks) if not block.can_be_made(stored)), None)
    if lost is None:
        return Spliced(chain, new.lineage, blocks + states)
    return plan_chain(old, spans, stored, secret, head, lost) if new.lineage.root == old.lineage.root else None


def _num_with_windows(old: ChainContent, planned: SplicePlan, stored: StoredBlocks) -> int:
    """Of the planned blocks those up to the last one before which all windows can be made; all, if there are none."""
    if not stored.num_state_blocks:
        return len(planned.blocks)
    sources = [{number} for number in range(planned.num_exact_blocks)]
    sources += [{one.source_block for one in block.pieces} for block in planned.blocks]
    has_window = [all(stored.has_state(old.chain[one]) for one in blocks) for blocks in sources]
    for end in range(len(sources), planned.num_exact_blocks, -1):
        if all(has_window[max(0, end - stored.state_span) : end]):
            return end - planned.num_exact_blocks
    return 0


@dataclass(slots=True)
class _Job:
    """Some blocks of a splice."""

    sources: dict[BlockId, int] = field(default_factory=dict)  # arena blocks held until it has ended
    arena_blocks: list[int] = field(default_factory=list)  # announced, one reference each
    pieces: list[Piece] = field(default_factory=list)
    states: list[SplicedState] = field(default_factory=list)
    submitted: bool = False


@dataclass(eq=False)
class Splicer:
    """io: its threads copy. reads: None without a tier below the CPU tier. copy: copies pieces within the arena, in any
    thread.
    """

    _cpu: CpuTier
    _io: TierWorker
    _stored: StoredBlocks
    _reads: TierReads | None
    _copy: Callable[[Sequence[Piece], Sequence[SplicedState]], None]
    _stats: StoreStats

    def __post_init__(self) -> None:
        self.jobs: dict[int, _Job] = {}  # that have not ended
        self._keys = count()

    def start(self, blocks: Sequence[NewBlock], conversation: Conversation | None) -> bool:
        """Begin to make these blocks, PENDING at once. False if a source or room is missing: then none is made."""
        jobs: list[_Job] = []
        for index, block in enumerate(blocks):
            if index % CHUNK_BLOCKS == 0:
                jobs.append(_Job())
            if not self._add(jobs[-1], block, conversation):
                for one in reversed(jobs):
                    self._abandon(one)
                return False
        self.jobs |= {next(self._keys): job for job in jobs if job.arena_blocks}
        return True

    def _add(self, job: _Job, block: NewBlock, conversation: Conversation | None) -> bool:
        """Hold the sources of a block and an arena block for it. A block that is stored already needs nothing."""
        if self._stored.holds(block.records[-1].block_id):
            return True
        runs: list[tuple[list[int], SplicePiece]] = []
        for records, piece in block.runs:
            for source in records:
                if source.block_id not in job.sources:
                    held = self._source(source)
                    if held is None:
                        return False
                    job.sources[source.block_id] = held
            runs.append(([job.sources[source.block_id] for source in records], piece))
        made: list[int] = []
        for record in block.records:
            arena_block = self._cpu.reserve()
            if arena_block is None:
                return False
            job.arena_blocks.append(arena_block)
            made.append(arena_block)
            if not self._cpu.announce(arena_block, record, conversation):
                return False
        self._note_copies(job, block, made, runs)
        return True

    def _note_copies(
        self, job: _Job, block: NewBlock, made: list[int], runs: Sequence[tuple[list[int], SplicePiece]]
    ) -> None:
        if block.first_token is None:
            job.pieces += [(held[0], one.source_offset, made[0], one.offset, one.length) for held, one in runs]
            return
        size, copied = self._stored.block_size, list[WindowRun]()
        for held, one in runs:
            at, to = one.source_block * size + one.source_offset, block.first_token + one.offset
            copied.append(WindowRun(held, one.source_offset, at, one.offset, to, one.length))
        job.states.append(SplicedState(made, copied))

    def _source(self, record: BlockRecord) -> int | None:
        """The arena block that has this block, held, READY or on its way. None if no tier has it."""
        arena_block = self._cpu.arena_block_of(record.block_id)
        if arena_block is not None:
            stored = self._cpu.record(arena_block)
            if stored is None or not stored.same_content(record):
                return None
        else:
            arena_block = self._cpu.reserve() if self._stored.is_on_disk(record.block_id) else None
            if arena_block is None or self._reads is None:
                return None
            self._cpu.announce(arena_block, record)
            self._reads.start(arena_block, record, "disk")
        self._cpu.acquire(arena_block)
        return arena_block

    def poll(self) -> None:
        """Hand over jobs whose sources have all landed; abandon those with a source that never will."""
        for key, job in list(self.jobs.items()):
            if job.submitted:
                continue
            if not self._has_sources(job):
                self._abandon(self.jobs.pop(key))
            elif all(self._cpu.state(one) is ArenaBlockState.READY for one in job.sources.values()):
                job.submitted = True
                self._io.submit_read(Task(key, partial(self._copy, job.pieces, job.states)))

    def task_done(self, key: int, succeeded: bool) -> list[int]:
        """A job has been copied. Returns its READY arena blocks, whose references go to the caller.

        What was copied from a block that was deleted since cannot be found, and is overwritten.
        """
        job = self.jobs.pop(key)
        if not succeeded or not self._has_sources(job):
            self._abandon(job)
            self._cpu.erase_stale()
            return []
        self._release(job.sources.values())
        ready = [one for one in job.arena_blocks if self._cpu.state(one) is ArenaBlockState.PENDING]
        for arena_block in ready:
            self._cpu.publish(arena_block)
        self._release(one for one in job.arena_blocks if one not in ready)  # deleted meanwhile
        self._stats.spliced += len(ready)
        return ready

    def _has_sources(self, job: _Job) -> bool:
        """Whether none of the blocks that this job copies from was deleted, or failed to be read."""
        return all(map(self._cpu.is_current, job.sources.values()))

    def _abandon(self, job: _Job) -> None:
        for arena_block in reversed(job.arena_blocks):
            if self._cpu.state(arena_block) is ArenaBlockState.PENDING:
                self._cpu.fail(arena_block)
            self._cpu.release(arena_block)
        self._release(job.sources.values())
        self._stats.given_up_splices += 1

    def _release(self, arena_blocks: Iterable[int]) -> None:
        for arena_block in reversed([*arena_blocks]):
            self._cpu.release(arena_block)
