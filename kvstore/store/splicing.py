"""Splices: new blocks in the CPU tier put together from runs of tokens of other blocks, without computing them.

Control plane, one thread; the copying is a task of an I/O thread. Raw keys carry no position, so a run can be copied to
any place in a block and is rotated when it is loaded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import IoQueue, Task
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation
from kvstore.stats import StoreStats
from kvstore.store.lookup import Reader

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
    """A block to be spliced: whose it is, and the runs that fill it."""

    record: BlockRecord
    runs: tuple[Run, ...]
    conversation: Conversation | None = None


Piece = tuple[int, int, int, int, int]  # source slot, source offset, slot, offset, number of tokens


@dataclass(slots=True)
class _Job:
    """Some blocks of a splice. sources: slots held until it has ended; slots: announced, one reference each."""

    sources: list[int]
    slots: list[int]
    pieces: list[Piece]
    submitted: bool = False


class Splicer:
    """copy: copies pieces within the arena, callable from any thread."""

    def __init__(
        self,
        cpu: CpuTier,
        io: IoQueue,
        reader: Reader | None,
        copy: Callable[[Sequence[Piece]], None],
        stats: StoreStats,
        clock: Callable[[], float],
    ) -> None:
        self._cpu = cpu
        self._io = io
        self._reader = reader
        self._copy = copy
        self._stats = stats
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._next_key = 0

    def start(self, blocks: Sequence[NewBlock]) -> bool:
        """Begin to make these blocks, PENDING at once. False when a source or a slot is missing: then none is made."""
        jobs: list[_Job] = []
        for first in range(0, len(blocks), CHUNK_BLOCKS):
            job = _Job([], [], [])
            jobs.append(job)
            if not all(self._add(job, block) for block in blocks[first : first + CHUNK_BLOCKS]):
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

    def _add(self, job: _Job, block: NewBlock) -> bool:
        """Hold the sources of a block and a slot for it. A block that is stored already needs nothing."""
        block_id = block.record.block_id
        if self._cpu.find(block_id) is not None or (self._reader is not None and self._reader.contains(block_id)):
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
        if not self._cpu.announce(slot, block.record, self._clock(), block.conversation):
            return False
        job.pieces += [(held[r.source.block_id], r.source_offset, slot, r.offset, r.num_tokens) for r in block.runs]
        return True

    def _source(self, record: BlockRecord) -> int | None:
        """A held slot with this block, READY or on its way; None when no tier has it."""
        slot = self._cpu.find(record.block_id)
        if slot is not None:
            stored = self._cpu.record(slot)
            if stored is None or not stored.same_content(record):
                return None
            self._cpu.acquire(slot)
            return slot
        if self._reader is None or not self._reader.contains(record.block_id):
            return None
        slot = self._cpu.reserve()
        if slot is None:
            return None
        if not self._cpu.announce(slot, record, self._clock()):
            self._cpu.release(slot)
            return None
        self._cpu.acquire(slot)
        self._reader.reads.start(slot, record)
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
        records = map(self._cpu.record, job.sources)
        return all(
            record is not None and self._cpu.find(record.block_id) == slot
            for slot, record in zip(job.sources, records, strict=True)
        )

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
