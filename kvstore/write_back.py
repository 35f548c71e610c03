"""Between the CPU tier and the disk: dirty slots to write, reads in flight, what goes when the disk fills.

Control plane, one thread; the threads of `io_queue` do the work and are polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from kvstore.block import BlockId
from kvstore.cpu_tier import CpuTier, SlotState
from kvstore.disk_format import WriteError
from kvstore.disk_index import DiskIndex, IndexEntry
from kvstore.disk_tier import WATERMARK, DiskTier
from kvstore.errors import StoreError
from kvstore.io_queue import BATCH_BYTES, IoQueue, Read, ReadDone, Write, WriteDone
from kvstore.stats import StoreStats
from kvstore.tier import BlockRecord, Evict, Evicted, ReadResult

MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # more dirty blocks wait in the arena, where a deletion still finds them
PAGE_BYTES = 4096
MAX_FULL = 5  # times in a row that the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # without room for a block because of blocks that may not be evicted
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
MAX_EARLY_TOUCHES = 1 << 18  # remembered until the index is loaded


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
        self._queued: set[int] = set()  # slots whose writes were submitted
        self._unsure: set[int] = set()  # those of them that may have gone to an environment that was put aside
        self._deleting: dict[BlockId, int] = {}  # and the bytes that will be free
        self._undeleted: dict[BlockId, None] = {}  # those of them that failed, and wait to be tried again
        self._queued_bytes = 0
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._heal_at, self._heal_s = 0.0, FIRST_RETRY_S
        self._num_full = 0
        self._stuck_since: float | None = None
        self.degraded: str | None = None
        self._index: DiskIndex | None = None  # until it is loaded, LMDB itself is asked
        # What happened meanwhile, the last of each block: written, or None: deleted. And when it was last of use.
        self._journal: dict[BlockId, IndexEntry | None] = {}
        self._early_touches: OrderedDict[BlockId, float] = OrderedDict()
        self._lost_early: list[BlockId] = []  # what hangs below them is not known yet
        self._generation = 0  # of the environment
        self._loaded: deque[tuple[int, DiskIndex, bool]] = deque()
        loader = threading.Thread(target=self._load_index, args=(0,), name="kvstore-index", daemon=True)
        loader.start()

    # -- the index ---------------------------------------------------------------------------------------------------
    def _load_index(self, generation: int) -> None:
        batches: list[list[IndexEntry]] = []
        try:
            batches.extend(self._disk.scan())
            self._loaded.append((generation, DiskIndex.build(batches), True))
        except Exception:  # the border of a thread: what was not found is computed and written again
            self._loaded.append((generation, self._partial_index(batches), False))

    @staticmethod
    def _partial_index(batches: list[list[IndexEntry]]) -> DiskIndex:
        try:
            return DiskIndex.build(batches)
        except Exception:  # what was read is what cannot be used
            return DiskIndex()

    def _take_index(self) -> None:
        while self._loaded:
            generation, index, is_whole = self._loaded.popleft()
            self._stats.housekeeping_errors += not is_whole
            if generation == self._generation and self._index is None:
                self._set_index(index)

    def _set_index(self, index: DiskIndex) -> None:
        for block_id, entry in self._journal.items():
            if entry is None:
                index.remove(block_id)
            else:
                index.add(entry)
        for block_id, used_s in self._early_touches.items():
            index.touch(block_id, used_s)
        lost, self._lost_early = self._lost_early, []
        self._index = index
        self._journal.clear()
        self._early_touches.clear()
        below = [block_id for block_id in self.with_descendants(lost) if block_id not in lost]
        if below:
            self.delete(below)

    def _note_in_index(self, block_id: BlockId, entry: IndexEntry | None) -> None:
        """A block was written, or with None deleted: in the index, or in it once it is there."""
        if self._index is None:
            self._journal.pop(block_id, None)  # the order is that of the last changes
            self._journal[block_id] = entry
        elif entry is None:
            self._index.remove(block_id)
        else:
            self._index.add(entry)

    @property
    def index_loaded(self) -> bool:
        return self._index is not None

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; false for one that is being deleted."""
        if block_id in self._deleting or self._disk.broken:
            return False
        if self._index is not None:
            return block_id in self._index
        return self._disk.contains(block_id)

    def touch(self, chain: Sequence[BlockId]) -> None:
        """These blocks, head first, were of use just now."""
        now = self._clock()
        for block_id in reversed(chain):
            if self._index is not None:
                self._index.touch(block_id, now)
                continue
            self._early_touches[block_id] = now
            self._early_touches.move_to_end(block_id)
            if len(self._early_touches) > MAX_EARLY_TOUCHES:
                self._early_touches.popitem(last=False)

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
            is_current = self._cpu.find(done.read.record.block_id) == slot  # else it was given up, and may be new
            self._cpu.fail(slot)
            if result in (ReadResult.MISSING, ReadResult.CORRUPT) and is_current:
                self.delete_tree(done.read.record.block_id)
        self._cpu.release(slot)

    def delete_tree(self, block_id: BlockId) -> None:
        """A block is lost: it goes, and with it what was computed after it, which nobody could use."""
        if self._index is None:
            self._lost_early.append(block_id)
        self.delete(self.with_descendants([block_id]))

    def _quarantine(self) -> bool:
        """The environment is damaged: put aside, and start with an empty one; the CPU tier is written to it again.

        False when the file system does not let us, which is tried again later; until then nothing is on disk.
        """
        if self._clock() < self._heal_at:
            return False
        try:
            self._disk.quarantine()
        except (StoreError, OSError) as error:
            self.degraded = str(error)
            self._heal_at = self._clock() + self._heal_s
            self._heal_s = min(2 * self._heal_s, LAST_RETRY_S)
            return False
        self._heal_at, self._heal_s = 0.0, FIRST_RETRY_S
        self.degraded, self._retry_at = None, 0.0
        self._generation += 1
        self._index = DiskIndex()
        self._journal.clear()
        self._early_touches.clear()
        self._lost_early.clear()
        self._deleting.clear()
        self._undeleted.clear()
        self._unsure |= self._queued
        known = self._queued.union(self._dirty)
        for slot in self._parents_first():
            if self._cpu.state(slot) is SlotState.READY and slot not in known:
                self._cpu.acquire(slot)
                self.add_dirty(slot)
        return True

    def _parents_first(self) -> list[int]:
        """The slots of the CPU tier's blocks: what stops half-way leaves nothing on disk without its parent."""
        slots = {record.block_id: slot for slot in self._cpu.blocks() if (record := self._cpu.record(slot)) is not None}
        found: dict[int, None] = {}
        seen: set[int] = set()
        for start in slots.values():
            path: list[int] = []
            slot: int | None = start
            while slot is not None and slot not in seen:
                seen.add(slot)
                path.append(slot)
                record = self._cpu.record(slot)
                slot = None if record is None else slots.get(record.parent_id)
            found |= dict.fromkeys(reversed(path))
        return list(found)

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
        if self._disk.broken and not self._quarantine():
            return
        if self._clock() < self._retry_at:
            return
        if self._undeleted:
            self._delete_again()
            return  # they go alone, since they are what makes room
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
            self._queued.add(slot)
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
        self._queued.difference_update(write.slot for write in done.writes)
        if done.error is not None:
            self._writes_failed(done)
            return
        self.degraded, self._retry_s, self._num_full = None, FIRST_RETRY_S, 0
        now = self._clock()
        for write, stored in zip(done.writes, done.stored_bytes, strict=True):
            record = write.record
            if write.slot in self._unsure:
                self._unsure.discard(write.slot)
                if not self._disk.contains(record.block_id):
                    self._dirty.append(write.slot)
                    continue
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
            self._note_in_index(record.block_id, entry)
            if self._cpu.find(record.block_id) != write.slot:  # deleted while it was being written
                self.delete([record.block_id])
            self._clean(write.slot, record)
        for block_id in done.deletes:
            self._deleting.pop(block_id, None)

    def _writes_failed(self, done: WriteDone) -> None:
        """Keep the blocks dirty and try again later, deletions too; a longer while each time."""
        self._stats.dropped_writes += len(done.writes)
        self._dirty.extendleft(write.slot for write in reversed(done.writes))
        self._unsure.difference_update(write.slot for write in done.writes)
        self._undeleted |= dict.fromkeys(block_id for block_id in done.deletes if block_id in self._deleting)
        if done.error == WriteError.MAP_FULL and self._num_full < MAX_FULL and self._index is not None:
            # There is room, in pieces that are too small or not free before another transaction or two.
            self._num_full += 1
            victims = self._index.victims(sum(_file_bytes(write.view) for write in done.writes), self._is_pinned)
            self._stats.disk_evictions += len(victims)
            self.delete(victims)
            self._delete_again()
            return
        self.degraded = done.error
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _delete_again(self) -> None:
        again = [block_id for block_id in self._undeleted if block_id in self._deleting]
        self._undeleted.clear()
        if again:
            self._io.submit_deletes(again)

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
            self._undeleted.pop(block_id, None)
        for block_id in block_ids:
            self._note_in_index(block_id, None)
        self._io.submit_deletes(block_ids)

    def with_descendants(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """These blocks and all that hangs below them on disk, as far as that is known: before the index is, nothing."""
        found, named = dict.fromkeys(block_ids), set(block_ids)
        if self._index is None:
            return list(found)
        for block_id in block_ids:
            entry = self._index.get(block_id)
            if entry is None or entry.parent_id not in named:  # the others are below one of these
                found |= dict.fromkeys(self._index.descendants(block_id))
        return list(found)

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Blocks on disk that match, tails first, and how much that is. What is in use stays, unless it is named.

        Raises StoreError as long as the index is not loaded.
        """
        index = self._index
        if index is None:
            raise StoreError(f"the index of {self._disk.path} is still being loaded; try again in a while")
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._is_pinned)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))

    @property
    def is_drained(self) -> bool:
        """Nothing is dirty and nothing is on its way."""
        return not self._dirty and not self._deleting and not self._reading and self._io.is_idle

    def is_deleting(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are not gone from disk yet."""
        return not self._deleting.keys().isdisjoint(block_ids)

    def cannot_delete(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether the deletion of some of these has failed, and will not be tried again soon."""
        return self.degraded is not None and (self._disk.broken or not self._undeleted.keys().isdisjoint(block_ids))

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if self._index is not None and (touched := self._index.take_touched()):
            self._io.submit_touched(touched)

    def finish(self) -> None:
        """The store is about to be closed: hand over what waits for a better moment."""
        self.persist_touched()
        self._delete_again()

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
