"""Splices: new blocks in the CPU tier put together from runs of tokens of other blocks, without computing them.

Control plane, one thread; the copying is a task of an I/O thread. Raw keys carry no position, so a run can be copied to
any place in a block and is rotated when it is loaded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage, child_block_id, splice_parent_id
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import IoQueue, Task
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation
from kvstore.rope.splice import plan_splice
from kvstore.stats import StoreStats
from kvstore.store.reads import DiskReads
from kvstore.store.stored import Content, StoredBlocks

CHUNK_BLOCKS = 64  # copied by one task: other reads come in between


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [source_offset, source_offset + num_tokens) of a block, which go to `offset` of the new one."""

    source: BlockRecord
    source_offset: int
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be spliced, and the runs that fill it."""

    record: BlockRecord
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Spliced:
    """A chain that is to be: its first blocks are old ones, then come new ones."""

    chain: list[BlockId]
    lineage: Lineage
    blocks: tuple[NewBlock, ...]


@dataclass(slots=True)
class ChainContent:
    """A chain as far as it is named, and its tokens."""

    chain: list[BlockId]
    tokens: bytes
    lineage: Lineage
    tenant: str


def plan_chain(old: Content, spans: Sequence[tuple[int, int]], stored: StoredBlocks, secret: bytes) -> Spliced | None:
    """The chain of the kept `spans` of old tokens, as far as full blocks can be made; None: nothing can be reused.

    Its first blocks, before any token that moved, are the old ones.
    """
    size = stored.block_size
    planned = plan_splice(spans, size, len(old.chain))
    if not planned.blocks:
        return None
    sources = {one.source_block for block in planned.blocks for one in block.pieces}
    records = {index: stored.record(old, index) for index in sources}
    chain = list(old.chain[: planned.num_exact_blocks])
    runs = [
        tuple(Run(records[one.source_block], one.source_offset, one.offset, one.length) for one in block.pieces)
        for block in planned.blocks
    ]
    reused = [(run.source.block_id, run.source_offset, run.num_tokens) for of_block in runs for run in of_block]
    parent = splice_parent_id(secret, chain[-1] if chain else old.lineage.root, reused)
    first, end = len(chain), len(chain) + len(planned.blocks)
    tokens = b"".join(bytes(old.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]) for start, stop in spans)
    new = ChainContent(chain, tokens, Lineage(old.lineage.root, first, parent, end), old.tenant)
    blocks = []
    for index, of_block in enumerate(runs, start=first):
        start = index * size * TOKEN_BYTES
        chain.append(child_block_id(new.lineage.parent(chain, index), tokens[start : start + size * TOKEN_BYTES]))
        blocks.append(NewBlock(stored.record(new, index), of_block))
    return Spliced(chain, new.lineage, tuple(blocks))


Piece = tuple[int, int, int, int, int]  # source slot, source offset, slot, offset, number of tokens


@dataclass(slots=True)
class _Job:
    """Some blocks of a splice."""

    sources: list[int] = field(default_factory=list)  # slots held until it has ended
    slots: list[int] = field(default_factory=list)  # announced, one reference each
    pieces: list[Piece] = field(default_factory=list)
    submitted: bool = False


class Splicer:
    """reads None: there is no disk. copy: copies pieces within the arena, callable from any thread."""

    def __init__(
        self,
        cpu: CpuTier,
        io: IoQueue,
        stored: StoredBlocks,
        reads: DiskReads | None,
        copy: Callable[[Sequence[Piece]], None],
        stats: StoreStats,
    ) -> None:
        self._cpu = cpu
        self._io = io
        self._stored = stored
        self._reads = reads
        self._copy = copy
        self._stats = stats
        self._jobs: dict[int, _Job] = {}
        self._next_key = 0

    def start(self, blocks: Sequence[NewBlock], conversation: Conversation | None) -> bool:
        """Begin to make these blocks, PENDING at once. False when a source or a slot is missing: then none is made."""
        jobs: list[_Job] = []
        for first in range(0, len(blocks), CHUNK_BLOCKS):
            job = _Job()
            jobs.append(job)
            if not all(self._add(job, block, conversation) for block in blocks[first : first + CHUNK_BLOCKS]):
                for one in reversed(jobs):
                    self._abandon(one)
                return False
        for job in jobs:
            if job.slots:
                self._jobs[self._next_key] = job
                self._next_key += 1
            else:
                self._release(job.sources)
        return True

    def _add(self, job: _Job, block: NewBlock, conversation: Conversation | None) -> bool:
        """Hold the sources of a block and a slot for it. A block that is stored already needs nothing."""
        if self._stored.holds(block.record.block_id):
            return True
        held: dict[BlockId, int] = {}
        for run in block.runs:
            source = held.get(run.source.block_id)
            if source is None:
                source = self._source(run.source)
                if source is None:
                    return False
                held[run.source.block_id] = source
                job.sources.append(source)
        slot = self._cpu.reserve()
        if slot is None:
            return False
        job.slots.append(slot)
        if not self._cpu.announce(slot, block.record, conversation):
            return False
        job.pieces += [(held[r.source.block_id], r.source_offset, slot, r.offset, r.num_tokens) for r in block.runs]
        return True

    def _source(self, record: BlockRecord) -> int | None:
        """A held slot with this block, READY or on its way; None when no tier has it."""
        slot = self._cpu.slot_of(record.block_id)
        if slot is not None:
            stored = self._cpu.record(slot)
            if stored is None or not stored.same_content(record):
                return None
            self._cpu.acquire(slot)
            return slot
        if self._reads is None or not self._stored.is_on_disk(record.block_id):
            return None
        slot = self._cpu.reserve()
        if slot is None:
            return None
        if not self._cpu.announce(slot, record):
            self._cpu.release(slot)
            return None
        self._cpu.acquire(slot)
        self._reads.start(slot, record)
        return slot

    def poll(self) -> None:
        """Hand over the jobs whose sources have all landed; abandon those with a source that never will."""
        for key, job in list(self._jobs.items()):
            if job.submitted:
                continue
            states = {self._cpu.state(slot) for slot in job.sources}
            if states - {SlotState.READY, SlotState.PENDING} or not self._has_sources(job):
                del self._jobs[key]
                self._abandon(job)
            elif SlotState.PENDING not in states:
                job.submitted = True
                self._io.submit_read(Task(key, lambda pieces=job.pieces: self._copy(pieces)))  # type: ignore[misc]

    def task_done(self, key: int, succeeded: bool) -> list[int]:
        """A job has been copied: returns its READY slots, whose references go to the caller.

        What was copied from a block that has been deleted since is not to be found, and is overwritten.
        """
        job = self._jobs.pop(key)
        if not succeeded or not self._has_sources(job):
            self._abandon(job)
            self._cpu.erase_stale()
            return []
        self._release(job.sources)
        ready = []
        for slot in job.slots:
            if self._cpu.state(slot) is SlotState.PENDING:
                self._cpu.publish(slot)
                ready.append(slot)
            else:
                self._cpu.release(slot)  # deleted meanwhile
        self._stats.spliced += len(ready)
        return ready

    def _has_sources(self, job: _Job) -> bool:
        """Whether none of the blocks that this job copies from has been deleted."""
        return all(self._cpu.is_current(slot) for slot in job.sources)

    def _abandon(self, job: _Job) -> None:
        for slot in reversed(job.slots):
            if self._cpu.state(slot) is SlotState.PENDING:
                self._cpu.fail(slot)
            self._cpu.release(slot)
        self._release(job.sources)
        self._stats.given_up_splices += 1

    def _release(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._cpu.release(slot)

    @property
    def is_idle(self) -> bool:
        return not self._jobs
