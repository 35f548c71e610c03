"""Splices: new blocks in the CPU tier, put together from runs of other blocks' tokens without computing them.

Control plane, one thread; the copying is a task of an I/O thread. Raw keys carry no position, so a run can be copied to
any place in a block and is rotated when it is loaded there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage, child_block_id, splice_parent_id
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import IoQueue, Task
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation
from kvstore.rope.splice import SplicePiece, plan_splice
from kvstore.stats import StoreStats
from kvstore.store.reads import DiskReads
from kvstore.store.stored import ChainContent, StoredBlocks

CHUNK_BLOCKS = 64  # copied by one task, so that reads can come in between

Piece = tuple[int, int, int, int, int]  # source slot, source offset, slot, offset, number of tokens
NewBlock = tuple[BlockRecord, list[tuple[BlockRecord, SplicePiece]]]  # with the runs that fill it, and their sources


@dataclass(frozen=True, slots=True)
class Spliced:
    """A planned chain: its first blocks are old ones, the others are new."""

    chain: list[BlockId]
    lineage: Lineage
    blocks: list[NewBlock]


def plan_chain(
    old: ChainContent, spans: Sequence[tuple[int, int]], stored: StoredBlocks, secret: bytes
) -> Spliced | None:
    """The chain of the kept `spans` of old tokens, as far as full blocks can be made. None if nothing can be reused.

    Its first blocks, before any token that moved, are the old ones.
    """
    size = stored.block_size
    planned = plan_splice(spans, size, len(old.chain))
    if not planned.blocks:
        return None
    pieces = [one for block in planned.blocks for one in block.pieces]
    sources = {one.source_block: stored.record(old, one.source_block) for one in pieces}
    reused = [(sources[one.source_block].block_id, one.source_offset, one.length) for one in pieces]
    chain = old.chain[: planned.num_exact_blocks]
    parent = splice_parent_id(secret, chain[-1] if chain else old.lineage.root, reused)
    first, end = len(chain), len(chain) + len(planned.blocks)
    tokens = b"".join(old.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES] for start, stop in spans)
    new = ChainContent(chain, tokens, Lineage(old.lineage.root, first, parent, end), old.tenant)
    blocks: list[NewBlock] = []
    for index, block in enumerate(planned.blocks, start=first):
        start = index * size * TOKEN_BYTES
        chain.append(child_block_id(new.lineage.parent(chain, index), tokens[start : start + size * TOKEN_BYTES]))
        blocks.append((stored.record(new, index), [(sources[one.source_block], one) for one in block.pieces]))
    return Spliced(chain, new.lineage, blocks)


@dataclass(slots=True)
class _Job:
    """Some blocks of a splice."""

    sources: dict[BlockId, int] = field(default_factory=dict)  # slots held until it has ended
    slots: list[int] = field(default_factory=list)  # announced, one reference each
    pieces: list[Piece] = field(default_factory=list)
    submitted: bool = False


@dataclass(eq=False)
class Splicer:
    """reads: None without a disk. copy: copies pieces within the arena, in any thread."""

    _cpu: CpuTier
    _io: IoQueue
    _stored: StoredBlocks
    _reads: DiskReads | None
    _copy: Callable[[Sequence[Piece]], None]
    _stats: StoreStats

    def __post_init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._keys = count()

    def start(self, blocks: Sequence[NewBlock], conversation: Conversation | None) -> bool:
        """Begin to make these blocks, PENDING at once. False if a source or a slot is missing: then none is made."""
        jobs: list[_Job] = []
        for index, block in enumerate(blocks):
            if index % CHUNK_BLOCKS == 0:
                jobs.append(_Job())
            if not self._add(jobs[-1], block, conversation):
                for one in reversed(jobs):
                    self._abandon(one)
                return False
        self._jobs |= {next(self._keys): job for job in jobs if job.slots}
        return True

    def _add(self, job: _Job, block: NewBlock, conversation: Conversation | None) -> bool:
        """Hold the sources of a block and a slot for it. A block that is stored already needs nothing."""
        record, runs = block
        if self._stored.holds(record.block_id):
            return True
        for source, _ in runs:
            if source.block_id not in job.sources:
                held = self._source(source)
                if held is None:
                    return False
                job.sources[source.block_id] = held
        slot = self._cpu.reserve()
        if slot is None:
            return False
        job.slots.append(slot)
        if not self._cpu.announce(slot, record, conversation):
            return False
        job.pieces += [
            (job.sources[source.block_id], one.source_offset, slot, one.offset, one.length) for source, one in runs
        ]
        return True

    def _source(self, record: BlockRecord) -> int | None:
        """A slot with this block, held, READY or on its way. None if no tier has the block."""
        slot = self._cpu.slot_of(record.block_id)
        if slot is not None:
            stored = self._cpu.record(slot)
            if stored is None or not stored.same_content(record):
                return None
        else:
            slot = self._cpu.reserve() if self._stored.is_on_disk(record.block_id) else None
            if slot is None or self._reads is None:
                return None
            self._cpu.announce(slot, record)
            self._reads.start(slot, record)
        self._cpu.acquire(slot)
        return slot

    def poll(self) -> None:
        """Hand over jobs whose sources have all landed; abandon those with a source that never will."""
        for key, job in list(self._jobs.items()):
            if job.submitted:
                continue
            if not self._has_sources(job):
                self._abandon(self._jobs.pop(key))
            elif all(self._cpu.state(slot) is SlotState.READY for slot in job.sources.values()):
                job.submitted = True
                self._io.submit_read(Task(key, partial(self._copy, job.pieces)))

    def task_done(self, key: int, succeeded: bool) -> list[int]:
        """A job has been copied. Returns its READY slots, whose references go to the caller.

        What was copied from a block that was deleted since cannot be found, and is overwritten.
        """
        job = self._jobs.pop(key)
        if not succeeded or not self._has_sources(job):
            self._abandon(job)
            self._cpu.erase_stale()
            return []
        self._release(job.sources.values())
        ready = [slot for slot in job.slots if self._cpu.state(slot) is SlotState.PENDING]
        for slot in ready:
            self._cpu.publish(slot)
        self._release(slot for slot in job.slots if slot not in ready)  # deleted meanwhile
        self._stats.spliced += len(ready)
        return ready

    def _has_sources(self, job: _Job) -> bool:
        """Whether none of the blocks that this job copies from was deleted, or failed to be read."""
        return all(map(self._cpu.is_current, job.sources.values()))

    def _abandon(self, job: _Job) -> None:
        for slot in reversed(job.slots):
            if self._cpu.state(slot) is SlotState.PENDING:
                self._cpu.fail(slot)
            self._cpu.release(slot)
        self._release(job.sources.values())
        self._stats.given_up_splices += 1

    def _release(self, slots: Iterable[int]) -> None:
        for slot in reversed([*slots]):
            self._cpu.release(slot)

    @property
    def is_idle(self) -> bool:
        return not self._jobs
