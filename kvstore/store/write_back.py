"""From the CPU tier to the disk: which dirty arena block is written next, and what becomes of failed writes and reads.

A dirty arena block holds one reference until its write is durable. A disk that failed is tried again after a longer
while each time.

Control plane, one thread; the threads of `io_queue` do the work and are polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.forest import ParentsInFlight
from kvstore.blocks.holdings import Holdings
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult, TenantBytes
from kvstore.disk.format import WriteError
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue, ReadDone, Write, WriteDone
from kvstore.disk.opening import OpenDisk
from kvstore.errors import StoreError
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.disk_contents import LOST_BY, DiskContents, DiskSpace
from kvstore.store.stored import DiskReads

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
PAGE_BYTES = 4096
MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # other dirty blocks wait in the arena, where a deletion still finds them
MAX_FULL = 5  # how often in a row the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # how long a block waits for room while nothing may be evicted


@dataclass(slots=True)
class Backoff:
    """When something that failed is tried again."""

    clock: Callable[[], float]
    at_s: float = 0.0
    next_s: float = FIRST_RETRY_S

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.at_s

    def failed(self) -> None:
        self.at_s = self.clock() + self.next_s
        self.next_s = min(2 * self.next_s, LAST_RETRY_S)

    def succeeded(self) -> None:
        self.at_s, self.next_s = 0.0, FIRST_RETRY_S


class DiskHealth:
    """error: why nothing can be written, None when it can. write, heal: of transactions, and of putting a damaged file
    aside.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.error: str | None = None
        self.write, self.heal = Backoff(clock), Backoff(clock)

    @property
    def is_paused(self) -> bool:
        """Writing has failed, and is not tried again for a while."""
        return self.error is not None and not (self.write.is_over and self.heal.is_over)

    def write_failed(self, error: str) -> None:
        self.error = error
        self.write.failed()

    def heal_failed(self, error: str) -> None:
        self.error = error
        self.heal.failed()

    def recovered(self) -> None:
        """A transaction has succeeded, or there is a new file."""
        self.error = None
        self.write.succeeded()
        self.heal.succeeded()


class WriteQueue:
    """view: the bytes of an arena block. parents: those of the blocks here, kept until the blocks are written. bytes:
    what the writer has, in bytes of the file.
    """

    def __init__(self, io: IoQueue, view: Callable[[int], memoryview], parents: ParentsInFlight) -> None:
        self._io, self._view, self._parents = io, view, parents
        self.dirty: deque[int] = deque()
        self.submitted: set[int] = set()  # arena blocks that the writer has
        self.bytes = TenantBytes()
        self._unsure: set[int] = set()  # those that may have gone to an environment that was set aside

    def file_bytes(self, arena_block: int) -> int:
        """What an incompressible block takes in the file: whole pages, with the value's header."""
        return (self._view(arena_block).nbytes // PAGE_BYTES + 1) * PAGE_BYTES

    def add(self, arena_block: int, record: BlockRecord) -> None:
        self.dirty.append(arena_block)
        self._parents.add(record.parent_id)

    def submit_first(self, record: BlockRecord) -> None:
        """Give the writer the first dirty arena block, which has this record."""
        arena_block = self.dirty.popleft()
        self.bytes.add(record.tenant, self.file_bytes(arena_block))
        self.submitted.add(arena_block)
        self._io.submit_write(Write(arena_block, record, self._view(arena_block)))

    def drop_first(self, record: BlockRecord) -> int:
        """Do not write the first dirty arena block. Returns it."""
        self.remove(record)
        return self.dirty.popleft()

    def ended(self, writes: Sequence[Write]) -> None:
        """The writer no longer has these."""
        for write in writes:
            self.bytes.add(write.record.tenant, -self.file_bytes(write.arena_block))
        self.submitted.difference_update(write.arena_block for write in writes)

    def submit_touched(self, touched: dict[BlockId, float]) -> None:
        """Give the writer times of last use, which go along with the next transaction."""
        self._io.submit_touched(touched)

    def in_flight(self) -> set[int]:
        """Arena blocks that are dirty or that the writer has."""
        return self.submitted.union(self.dirty)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is dirty, or on its way to or from the disk."""
        return not self.dirty and self._io.is_idle

    def put_back(self, writes: Sequence[Write]) -> None:
        """These are not on disk: put them at the head of the queue again."""
        self.dirty.extendleft(write.arena_block for write in reversed(writes))
        self._unsure.difference_update(write.arena_block for write in writes)

    def remove(self, record: BlockRecord) -> None:
        """A block was written, or never will be."""
        self._parents.remove(record.parent_id)

    def doubt_submitted(self) -> None:
        """The environment was set aside: a write that succeeds may have gone there."""
        self._unsure |= self.submitted

    def is_doubtful(self, arena_block: int) -> bool:
        """Whether a write that succeeded may have gone elsewhere. Ask once for each."""
        is_so = arena_block in self._unsure
        self._unsure.discard(arena_block)
        return is_so


class WriteBack:
    """view: the bytes of an arena block. tenant_bytes: how much one tenant's blocks may take."""

    def __init__(
        self, on_disk: OpenDisk, cpu: CpuTier, io: IoQueue, view: Callable[[int], memoryview], stats: StoreStats,
        clock: Callable[[], float], steering: Steering, tenant_bytes: int | None = None,
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk = disk = on_disk.tier
        self._cpu, self._stats, self._clock = cpu, stats, clock
        self._tenant_bytes = tenant_bytes
        self.reads = DiskReads(cpu, io, view, stats)
        self.contents = DiskContents(disk, on_disk.index, steering, clock, holdings)
        self.queue = WriteQueue(io, view, cpu.parents_in_flight)
        self.space = DiskSpace(disk, cpu, io, self.contents, stats)
        self.health = DiskHealth(clock)
        self._num_full = 0
        self._stuck_since_s: float | None = None

    # -- reads -------------------------------------------------------------------------------------------------------
    def read_done(self, done: ReadDone) -> None:
        """A read from disk has ended."""
        if done.result is ReadResult.OK:
            self._stats.read += 1
            self.reads.publish(done.read.arena_block)
        else:
            block_id, gone = done.read.record.block_id, self.reads.fail(done, self._stats.read_failures)
            is_lost = done.result in (ReadResult.MISSING, ReadResult.CORRUPT) or not self.contents.contains(block_id)
            if is_lost and gone is not None:  # a quarantine may have come in between
                self.space.delete_tree(block_id, gone, done.result)
            elif not is_lost:
                why = done.result.value
                self._stats.losses.note(LOST_BY.get(done.result, "unreadable"), "disk", block_id, why=why)
        self._cpu.release(done.read.arena_block)

    # -- writes ------------------------------------------------------------------------------------------------------
    def add_dirty(self, arena_block: int) -> None:
        """Write this READY arena block, and take over its reference."""
        record = self._cpu.record(arena_block)
        assert record is not None
        self.queue.add(arena_block, record)

    def pump(self) -> None:
        """Hand dirty arena blocks to the writer, within its bounds, and make room for them. Called once per poll."""
        if self._disk.file.broken and not self._quarantine():
            return
        if not self.health.write.is_over:
            return
        if self.space.delete_again():
            return  # they go alone, as they make room
        while self.queue.dirty and self.queue.bytes.total < MAX_QUEUED_BYTES and self._submit_first():
            pass

    def _submit_first(self) -> bool:
        """Submit the first dirty arena block. Returns False if it has to wait."""
        arena_block = self.queue.dirty[0]
        record, size = self._cpu.record(arena_block), self.queue.file_bytes(arena_block)
        assert record is not None
        if not self._cpu.is_current(arena_block) or self.contents.contains(record.block_id):
            self._cpu.release(self.queue.drop_first(record))  # deleted, or there already
            return True
        if self._is_over_limit(record.tenant, size):
            self._stats.refused_writes += 1
            self._refuse_first(record, "its tenant has on disk what it may have")
            return True
        if not self.space.make_room(self.queue.bytes.total + size, self.queue.bytes.total):
            if self.queue.bytes.total or self.contents.removing:
                return False
            if len(self.contents.index):
                return self._give_up_first(record)
            # The file system had no room: the disk will find out whether that is still so.
        self._stuck_since_s = None
        self.contents.removing.pop(record.block_id, None)
        self.queue.submit_first(record)
        return True

    def _is_over_limit(self, tenant: str, num_bytes: int) -> bool:
        if self._tenant_bytes is None:
            return False
        stored = self.contents.index.bytes.of(tenant)
        return stored + self.queue.bytes.of(tenant) + num_bytes > self._tenant_bytes

    def _give_up_first(self, record: BlockRecord) -> bool:
        """All that is stored is in use, or is what this block is built on: a conversation larger than the tier.

        Returns False to wait some more: somebody may let go. After that, its end is stored neither here nor in the CPU
        tier.
        """
        now_s = self._clock()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < GIVE_UP_S:
            return False
        self._stats.dropped_writes += 1
        self._refuse_first(record, "the disk is full of what is in use")
        return True

    def _refuse_first(self, record: BlockRecord, why: str) -> None:
        """Do not write the first dirty arena block, nor what is built on it."""
        self._cpu.forget(record.block_id)
        self._stats.losses.note("not_written", "disk", record.block_id, why=why)
        self._cpu.release(self.queue.drop_first(record))

    def write_done(self, done: WriteDone) -> None:
        self.queue.ended(done.writes)
        if done.error is not None:
            self._writes_failed(done, done.error)
            return
        self.health.recovered()
        self._num_full = 0
        for write, stored_bytes in zip(done.writes, done.stored_bytes, strict=True):
            record, arena_block = write.record, write.arena_block
            if self.queue.is_doubtful(arena_block) and not self._disk.contains(record.block_id):
                self.queue.dirty.append(arena_block)
                continue
            self._stats.written += 1
            self.contents.written(record, stored_bytes, self._cpu.conversation(arena_block))
            newest = self._cpu.arena_block_of(record.block_id)
            if not self._cpu.is_current(arena_block) and newest not in self.queue.submitted:
                self.space.delete_written(record.block_id)  # deleted while it was being written, and no newer copy is
            self.queue.remove(record)
            self._cpu.release(arena_block)
        self.space.deleted(done.deletes)

    def refuse_waiting(self) -> None:
        """Do not write what waits: it is in memory that is wanted back."""
        while self.queue.dirty:
            record = self._cpu.record(self.queue.dirty[0])
            assert record is not None
            self._refuse_first(record, "its memory was wanted back")

    # -- failures ----------------------------------------------------------------------------------------------------
    def _writes_failed(self, done: WriteDone, error: str) -> None:
        """Keep the blocks dirty, and try again later, deletions too, after a longer while each time."""
        self._stats.dropped_writes += len(done.writes)
        self.queue.put_back(done.writes)
        self.space.deletion_failed(done.deletes)
        if error == WriteError.MAP_FULL and self._num_full < MAX_FULL:
            # There is room, but in pieces that are too small, or only free after another transaction or two.
            self._num_full += 1
            self.space.evict(sum(self.queue.file_bytes(write.arena_block) for write in done.writes))
            self.space.delete_again()
            return
        self.health.write_failed(error)

    def _quarantine(self) -> bool:
        """Set the damaged environment aside, start with an empty one, and write the CPU tier to it again.

        Returns False if the file system does not allow it. It is tried again later; until then, nothing is on disk.
        """
        if not self.health.heal.is_over:
            return False
        try:
            self._disk.file.quarantine()
        except (StoreError, OSError) as error:
            self.health.heal_failed(str(error))
            return False
        self.health.recovered()
        self.space.begin_anew()
        self.queue.doubt_submitted()
        known = self.queue.submitted.union(self.queue.dirty)
        # Parents first: if this stops half-way, no block is without its parent.
        for one in map(self._cpu.arena_block_of, self._cpu.with_descendants(self._cpu.absent_parents())):
            if one is not None and self._cpu.state(one) is ArenaBlockState.READY and one not in known:
                self._cpu.acquire(one)
                self.add_dirty(one)
        return True

    # -- looking after -----------------------------------------------------------------------------------------------
    def cannot_delete(self, block_ids: set[BlockId]) -> bool:
        """Whether the deletion of some of these has failed, and will not be tried again soon."""
        return self.health.error is not None and (self._disk.file.broken or self.space.has_failed(block_ids))

    @property
    def begun_s(self) -> float | None:
        """When the file was begun, empty."""
        return self._disk.file.created_s

    @property
    def is_drained(self) -> bool:
        """Whether nothing is dirty or in flight."""
        return not self.contents.removing and not self.reads and self.queue.is_drained

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if touched := self.contents.take_touched():
            self.queue.submit_touched(touched)

    def finish(self) -> None:
        """Prepare for closing: hand over what was waiting for a better moment."""
        self.reads.finish()
        self.persist_touched()
        self.space.delete_again()

    def stats(self) -> dict[str, object]:
        return {
            **self._disk.stats(),
            "blocks": len(self.contents.index),
            "dirty_blocks": len(self.queue.dirty),
            "queued_write_bytes": self.queue.bytes.total,
            "reads_in_flight": len(self.reads),
            "degraded": self.health.error,
        }
