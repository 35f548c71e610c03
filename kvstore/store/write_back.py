"""From the CPU tier to the disk: which dirty slot is written next, and what becomes of writes and reads that failed.

Control plane, one thread; the threads of `io_queue` do the work and are polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.disk.format import WriteError
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue, ReadDone, WriteDone
from kvstore.disk.tier import DiskTier
from kvstore.errors import StoreError
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.disk_contents import DiskContents
from kvstore.store.disk_space import DiskSpace
from kvstore.store.reads import DiskReads
from kvstore.store.write_queue import WriteQueue

MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # more dirty blocks wait in the arena, where a deletion still finds them
MAX_FULL = 5  # times in a row that the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # without room for a block because of blocks that may not be evicted
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


@dataclass(slots=True)
class Backoff:
    """When something that failed is tried again: a longer while each time."""

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


class WriteBack:
    """view: the bytes of a slot. tenant_bytes: what one tenant's blocks may take; what would be more is not written,
    from when the index is loaded. degraded: why nothing can be written, None when it can.
    """

    def __init__(
        self,
        disk: DiskTier,
        cpu: CpuTier,
        io: IoQueue,
        view: Callable[[int], memoryview],
        stats: StoreStats,
        clock: Callable[[], float],
        steering: Steering,
        tenant_bytes: int | None = None,
    ) -> None:
        self._disk, self._cpu, self._io, self._stats, self._clock = disk, cpu, io, stats, clock
        self.capacity_bytes = disk.file.capacity_bytes
        self._tenant_bytes = tenant_bytes
        self.reads = DiskReads(cpu, io, view, stats)
        self.contents = DiskContents(disk, steering, stats, clock)
        self.queue = WriteQueue(io, view)
        self.space = DiskSpace(disk, cpu, io, self.contents, stats, self.queue.is_parent)
        self.degraded: str | None = None
        self._retry, self._heal = Backoff(clock), Backoff(clock)  # of writes, of putting a damaged file aside
        self._num_full = 0
        self._stuck_since_s: float | None = None

    # -- reads -------------------------------------------------------------------------------------------------------
    def read_done(self, done: ReadDone) -> None:
        slot, result = done.read.slot, done.result
        self.reads.end(slot)
        if result is ReadResult.OK:
            self._stats.read += 1
            if self._cpu.state(slot) is SlotState.PENDING:  # else it was deleted meanwhile
                self._cpu.publish(slot)
        else:
            failures = self._stats.read_failures
            failures[result.value] = failures.get(result.value, 0) + 1
            block_id = done.read.record.block_id
            is_current = self._cpu.slot_of(block_id) == slot  # else it was given up, and may be new
            records = map(self._cpu.record, self._cpu.fail(slot))
            gone = [record.block_id for record in records if record is not None]
            is_lost = result in (ReadResult.MISSING, ReadResult.CORRUPT) or not self.contents.contains(block_id)
            if is_lost and is_current:  # a quarantine may have come in between
                self.space.delete_tree(block_id, gone)
        self._cpu.release(slot)

    # -- writes ------------------------------------------------------------------------------------------------------
    def add_dirty(self, slot: int) -> None:
        """Write this READY slot; its reference is taken over."""
        record = self._cpu.record(slot)
        assert record is not None
        self.queue.add(slot, record)

    def pump(self) -> None:
        """Hand dirty slots to the writer, within its bounds, and make room for them. Called once per poll."""
        if self.contents.poll():
            self.space.index_has_come()
        if self._disk.file.broken and not self._quarantine():
            return
        if not self._retry.is_over:
            return
        if self.space.delete_again():
            return  # they go alone, since they are what makes room
        while self.queue.dirty and self.queue.num_bytes < MAX_QUEUED_BYTES and self._submit_first():
            pass

    def _submit_first(self) -> bool:
        """Of the dirty ones; False when it has to wait."""
        slot = self.queue.dirty[0]
        record, size = self._cpu.record(slot), self.queue.file_bytes(slot)
        assert record is not None
        if not self._cpu.is_current(slot) or self.contents.contains(record.block_id):
            self._cpu.release(self.queue.drop_first(record))  # deleted, or there already
            return True
        if self._is_over_limit(record.tenant, size):
            self._stats.refused_writes += 1
            self._refuse_first(record)
            return True
        if not self.space.make_room(self.queue.num_bytes + size, self.queue.num_bytes):
            index = self.contents.index
            if index is None or self.queue.num_bytes or self.contents.removing:
                return False
            if index.num_blocks:
                return self._give_up_first(record)
            # The file system has no room: the disk finds out whether that is still so.
        self._stuck_since_s = None
        self.contents.removing.pop(record.block_id, None)
        self.queue.submit_first(record)
        return True

    def _is_over_limit(self, tenant: str, num_bytes: int) -> bool:
        if self._tenant_bytes is None or self.contents.index is None:
            return False
        stored = self.contents.index.bytes_of(tenant)
        return stored + self.queue.bytes_of(tenant) + num_bytes > self._tenant_bytes

    def _give_up_first(self, record: BlockRecord) -> bool:
        """All that is stored is in use, or is what this block is built on: a conversation larger than the tier.

        False: wait some more, somebody may let go. Else its end is not stored, here or in the CPU tier.
        """
        now_s = self._clock()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < GIVE_UP_S:
            return False
        self._stats.dropped_writes += 1
        self._refuse_first(record)
        return True

    def _refuse_first(self, record: BlockRecord) -> None:
        """The first of the dirty ones is not written, nor what is built on it."""
        self._cpu.forget(record.block_id)
        self._cpu.release(self.queue.drop_first(record))

    def write_done(self, done: WriteDone) -> None:
        self.queue.ended(done.writes)
        if done.error is not None:
            self._writes_failed(done)
            return
        self.degraded, self._num_full = None, 0
        self._retry.next_s = FIRST_RETRY_S
        for write, stored_bytes in zip(done.writes, done.stored_bytes, strict=True):
            record, slot = write.record, write.slot
            if self.queue.is_doubtful(slot) and not self._disk.contains(record.block_id):
                self.queue.dirty.append(slot)
                continue
            self._stats.written += 1
            self.contents.written(record, stored_bytes, self._cpu.conversation(slot))
            if not self._cpu.is_current(slot):  # deleted while it was being written
                self.space.delete([record.block_id])
            self.queue.remove(record)
            self._cpu.release(slot)
        self.space.deleted(done.deletes)

    def refuse_waiting(self) -> None:
        """What waits is not written: it lies in memory that is wanted back."""
        while self.queue.dirty:
            record = self._cpu.record(self.queue.dirty[0])
            assert record is not None
            self._refuse_first(record)

    # -- failures ----------------------------------------------------------------------------------------------------
    @property
    def is_paused(self) -> bool:
        """Writing has failed, and is not tried again for a while."""
        return self.degraded is not None and not (self._retry.is_over and self._heal.is_over)

    def _writes_failed(self, done: WriteDone) -> None:
        """Keep the blocks dirty and try again later, deletions too; a longer while each time."""
        self._stats.dropped_writes += len(done.writes)
        self.queue.put_back(done.writes)
        self.space.deletion_failed(done.deletes)
        if done.error == WriteError.MAP_FULL and self._num_full < MAX_FULL and self.contents.index is not None:
            # There is room, in pieces that are too small or not free before another transaction or two.
            self._num_full += 1
            self.space.evict(sum(self.queue.file_bytes(write.slot) for write in done.writes))
            self.space.delete_again()
            return
        self.degraded = done.error
        self._retry.failed()

    def _quarantine(self) -> bool:
        """The environment is damaged: put aside, and start with an empty one; the CPU tier is written to it again.

        False when the file system does not let us, which is tried again later; until then nothing is on disk.
        """
        if not self._heal.is_over:
            return False
        try:
            self._disk.file.quarantine()
        except (StoreError, OSError) as error:
            self.degraded = str(error)
            self._heal.failed()
            return False
        self._heal.succeeded()
        self.degraded, self._retry.at_s = None, 0.0
        self.space.begin_anew()
        self.queue.doubt_submitted()
        known = self.queue.submitted.union(self.queue.dirty)
        # Parents first: what stops half-way leaves nothing without its parent.
        for slot in map(self._cpu.slot_of, self._cpu.with_descendants(self._cpu.absent_parents())):
            if slot is not None and self._cpu.state(slot) is SlotState.READY and slot not in known:
                self._cpu.acquire(slot)
                self.add_dirty(slot)
        return True

    # -- looking after -----------------------------------------------------------------------------------------------
    def cannot_delete(self, block_ids: set[BlockId]) -> bool:
        """Whether the deletion of some of these has failed, and will not be tried again soon."""
        return self.degraded is not None and (self._disk.file.broken or self.space.has_failed(block_ids))

    @property
    def is_drained(self) -> bool:
        """Nothing is dirty and nothing is on its way."""
        return not self.queue.dirty and not self.contents.removing and not self.reads and self._io.is_idle

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if touched := self.contents.take_touched():
            self._io.submit_touched(touched)

    def finish(self) -> None:
        """The store is about to be closed: hand over what waits for a better moment."""
        self.reads.finish()
        self.persist_touched()
        self.space.delete_again()

    def stats(self) -> dict[str, object]:
        index = self.contents.index
        return {
            **self._disk.stats(),
            "blocks": None if index is None else index.num_blocks,
            "dirty_blocks": len(self.queue.dirty),
            "queued_write_bytes": self.queue.num_bytes,
            "reads_in_flight": len(self.reads),
            "degraded": self.degraded,
            "index_loaded": index is not None,
        }
