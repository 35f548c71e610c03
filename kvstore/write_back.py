"""Between the CPU tier and the disk: dirty slots to write, reads in flight, what goes when the disk fills.

Control plane, one thread; the threads of `io_queue` do the work and are polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.block import BlockId
from kvstore.cpu_tier import CpuTier, SlotState
from kvstore.disk_format import WriteError
from kvstore.disk_index import DiskIndex, IndexEntry
from kvstore.disk_tier import WATERMARK, DiskTier
from kvstore.io_queue import BATCH_BYTES, IoQueue, Read, ReadDone, Write, WriteDone
from kvstore.stats import StoreStats
from kvstore.tier import BlockRecord, Evict, Evicted, ReadResult

MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # more dirty blocks wait in the arena, where a deletion still finds them
PAGE_BYTES = 4096
MAX_FULL = 5  # times in a row that the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # without room for a block because of blocks that may not be evicted
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0


def _file_bytes(view: memoryview) -> int:
    """What an incompressible block takes in the file: whole pages, with the value's header."""
    return (view.nbytes // PAGE_BYTES + 1) * PAGE_BYTES


class WriteBack:
    """What the control plane knows of the disk.

    view: the bytes of a slot. A dirty slot holds one reference until its write is durable.
    """

    def __init__(
        self,
        disk: DiskTier,
        cpu: CpuTier,
        io: IoQueue,
        view: Callable[[int], memoryview],
        stats: StoreStats,
        clock: Callable[[], float],
    ) -> None:
        self._disk = disk
        self._cpu = cpu
        self._io = io
        self._view = view
        self._stats = stats
        self._clock = clock
        self._dirty: deque[int] = deque()
        self._dirty_parents: Counter[BlockId] = Counter()
        self._reading: set[int] = set()
        self._deleting: dict[BlockId, int] = {}  # and the bytes that will be free
        self._queued_bytes = 0
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._num_full = 0
        self._stuck_since: float | None = None
        self.degraded: str | None = None
        self._index: DiskIndex | None = None  # until it is loaded, LMDB itself is asked
        self._journal: list[Callable[[DiskIndex], None]] = []  # what happened meanwhile
        self._loaded: deque[DiskIndex] = deque()
        self._loader = threading.Thread(target=self._load_index, name="kvstore-index", daemon=True)
        self._loader.start()

    # -- the index ---------------------------------------------------------------------------------------------------
    def _load_index(self) -> None:
        self._loaded.append(DiskIndex.build(self._disk.scan()))

    def _take_index(self) -> None:
        if not self._loaded:
            return
        index = self._loaded.popleft()
        for change in self._journal:
            change(index)
        self._index, self._journal = index, []

    def _change(self, change: Callable[[DiskIndex], None]) -> None:
        """Apply a change to the index, or once it is there."""
        if self._index is None:
            self._journal.append(change)
        else:
            change(self._index)

    @property
    def index_loaded(self) -> bool:
        return self._index is not None

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; false for one that is being deleted."""
        if block_id in self._deleting:
            return False
        if self._index is not None:
            return block_id in self._index
        return self._disk.contains(block_id)

    def touch(self, chain: Sequence[BlockId]) -> None:
        """These blocks, head first, were of use just now."""
        now, used = self._clock(), tuple(reversed(chain))

        def touch(index: DiskIndex) -> None:
            for block_id in used:
                index.touch(block_id, now)

        self._change(touch)

    # -- reads -------------------------------------------------------------------------------------------------------
    def is_reading(self, slot: int) -> bool:
        return slot in self._reading

    def start_read(self, slot: int, record: BlockRecord) -> None:
        """The slot is announced and holds a reference for the read."""
        self._reading.add(slot)
        self._io.submit_read(Read(slot, record, self._view(slot)))

    def read_done(self, done: ReadDone) -> None:
        slot, result = done.read.slot, done.result
        self._reading.discard(slot)
        if result is ReadResult.OK:
            self._stats.read += 1
            if self._cpu.state(slot) is SlotState.PENDING:  # else it was deleted meanwhile
                self._cpu.publish(slot)
        else:
            failures = self._stats.read_failures
            failures[result.value] = failures.get(result.value, 0) + 1
            self._cpu.fail(slot)
            if result is not ReadResult.FAILED:
                self.delete_tree(done.read.record.block_id)
        self._cpu.release(slot)
        if self._disk.broken:
            self._quarantine()

    def delete_tree(self, block_id: BlockId) -> None:
        """A block is lost: it goes, and with it what was computed after it, which nobody could use."""
        gone = [block_id] if self._index is None else self._index.descendants(block_id)
        self.delete(gone or [block_id])

    def _quarantine(self) -> None:
        """The environment is damaged: put aside, and start with an empty one; the CPU tier is written to it again."""
        self._disk.quarantine()
        self._index, self._journal = DiskIndex(), []
        self._loaded.clear()
        self._deleting.clear()
        dirty = set(self._dirty)
        for slot in self._cpu.blocks():
            if self._cpu.state(slot) is SlotState.READY and slot not in dirty and self._cpu.pool.is_free(slot):
                self._cpu.acquire(slot)
                self.add_dirty(slot)

    # -- writes ------------------------------------------------------------------------------------------------------
    def add_dirty(self, slot: int) -> None:
        """Write this READY slot; its reference is taken over."""
        record = self._cpu.record(slot)
        assert record is not None
        self._dirty.append(slot)
        self._dirty_parents[record.parent_id] += 1

    def pump(self) -> None:
        """Hand dirty slots to the writer, within its bounds, and make room for them. Called once per poll."""
        self._take_index()
        if not self._dirty or self._clock() < self._retry_at:
            return
        while self._dirty and self._queued_bytes < MAX_QUEUED_BYTES:
            slot = self._dirty[0]
            record = self._cpu.record(slot)
            assert record is not None
            if self._cpu.find(record.block_id) != slot or self.contains(record.block_id):
                self._dirty.popleft()  # deleted, or there already
                self._clean(slot, record)
                continue
            size = _file_bytes(self._view(slot))
            if not self._make_room(self._queued_bytes + size):
                if self._index is None or self._queued_bytes or self._deleting:
                    return
                if self._index.num_blocks:
                    if not self._give_up(slot, record):
                        return
                    continue
                # The file system has no room: the disk finds out whether that is still so.
            self._stuck_since = None
            self._dirty.popleft()
            self._queued_bytes += size
            self._deleting.pop(record.block_id, None)
            self._io.submit_write(Write(slot, record, self._view(slot)))

    def _give_up(self, slot: int, record: BlockRecord) -> bool:
        """All that is stored is in use, or is what this block is built on: a conversation larger than the tier.

        False: wait some more, somebody may let go. Else its end is not stored, here or in the CPU tier.
        """
        now = self._clock()
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < GIVE_UP_S:
            return False
        self._dirty.popleft()
        self._stats.dropped_writes += 1
        self._cpu.forget(record.block_id)
        self._clean(slot, record)
        return True

    def _clean(self, slot: int, record: BlockRecord) -> None:
        self._dirty_parents[record.parent_id] -= 1
        if not self._dirty_parents[record.parent_id]:
            del self._dirty_parents[record.parent_id]
        self._cpu.release(slot)

    def write_done(self, done: WriteDone) -> None:
        self._queued_bytes -= sum(_file_bytes(write.view) for write in done.writes)
        if done.error is not None:
            self._writes_failed(done)
            return
        self.degraded, self._retry_s, self._num_full = None, FIRST_RETRY_S, 0
        now = self._clock()
        for write, stored in zip(done.writes, done.stored_bytes, strict=True):
            record = write.record
            self._stats.written += 1
            entry = IndexEntry(
                block_id=record.block_id,
                parent_id=record.parent_id,
                stored_bytes=stored,
                created_s=record.created_s,
                last_access_s=now,
                model=record.model,
                tenant=record.tenant,
            )
            self._change(lambda index, entry=entry: index.add(entry))  # type: ignore[misc]
            if self._cpu.find(record.block_id) != write.slot:  # deleted while it was being written
                self.delete([record.block_id])
            self._clean(write.slot, record)
        for block_id in done.deletes:
            self._deleting.pop(block_id, None)

    def _writes_failed(self, done: WriteDone) -> None:
        """Keep the blocks dirty and try again later; a longer while each time."""
        self._stats.dropped_writes += len(done.writes)
        self._dirty.extendleft(write.slot for write in reversed(done.writes))
        again = [block_id for block_id in done.deletes if block_id in self._deleting]
        if again:
            self._io.submit_deletes(again)
        if done.error == WriteError.MAP_FULL and self._num_full < MAX_FULL and self._index is not None:
            # There is room, in pieces that are too small or not free before another transaction or two.
            self._num_full += 1
            victims = self._index.victims(sum(_file_bytes(write.view) for write in done.writes), self._is_pinned)
            self._stats.disk_evictions += len(victims)
            self.delete(victims)
            return
        self.degraded = done.error
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        if self._disk.broken:
            self._quarantine()

    def _make_room(self, incoming_bytes: int) -> bool:
        """Evict the least recently used leaves until so much more may be written; False when that must wait."""
        excess = self._disk.excess_bytes(incoming_bytes) - sum(self._deleting.values())
        if excess <= 0:
            return True
        if self._index is None:
            return False
        victims = self._index.victims(excess, self._is_pinned)
        if victims:
            self._stats.disk_evictions += len(victims)
            self.delete(victims)
        # Their pages can be used again after the next transactions; half of what is above the watermark is for that.
        slack = (1 - WATERMARK) * self._disk.capacity_bytes / 2
        return bool(victims) and (excess <= slack or not self._queued_bytes)

    def _is_pinned(self, block_id: BlockId) -> bool:
        """Whether something above the disk still builds on this block, or uses it."""
        if block_id in self._dirty_parents or self._cpu.is_awaited(block_id):
            return True
        slot = self._cpu.find(block_id)
        return slot is not None and (not self._cpu.pool.is_free(slot) or self._cpu.pool.has_children(slot))

    # -- giving up ---------------------------------------------------------------------------------------------------
    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks from the disk and from the CPU tier. Whoever holds a slot there keeps it."""
        for block_id in reversed(block_ids):
            self._cpu.forget(block_id)
            entry = None if self._index is None else self._index.get(block_id)
            self._deleting[block_id] = 0 if entry is None else entry.stored_bytes

        def remove(index: DiskIndex) -> None:
            for block_id in block_ids:
                index.remove(block_id)

        self._change(remove)
        self._io.submit_deletes(block_ids)

    def with_descendants(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """These blocks and all that hangs below them on disk."""
        index, named = self._awaited_index(), set(block_ids)
        found = dict.fromkeys(block_ids)
        for block_id in block_ids:
            entry = index.get(block_id)
            if entry is not None and entry.parent_id not in named:  # the others are below one of these
                found |= dict.fromkeys(index.descendants(block_id))
        return list(found)

    def _awaited_index(self) -> DiskIndex:
        if self._index is None:
            self._loader.join()
            self._take_index()
        assert self._index is not None
        return self._index

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Blocks on disk that match, tails first, and how much that is. What is in use stays, unless it is named."""
        index = self._awaited_index()
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._is_pinned)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))

    @property
    def is_drained(self) -> bool:
        """Nothing is dirty and nothing is on its way."""
        return not self._dirty and not self._deleting and not self._reading and self._io.is_idle

    @property
    def is_deleting(self) -> bool:
        return bool(self._deleting)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if self._index is not None and (touched := self._index.take_touched()):
            self._io.submit_touched(touched)

    def stats(self) -> dict[str, object]:
        blocks = None if self._index is None else self._index.num_blocks
        return {
            **self._disk.stats(),
            "blocks": blocks,
            "dirty_blocks": len(self._dirty),
            "queued_write_bytes": self._queued_bytes,
            "reads_in_flight": len(self._reading),
            "degraded": self.degraded,
            "index_loaded": self._index is not None,
        }
