"""Between the CPU tier and the disk: dirty slots to write, reads in flight, what goes when the disk fills.

Control plane, one thread; the threads of `io_queue` do the work and are polled. Eviction from the CPU tier is metadata
only because every block that is free there has been written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Evicted, ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.format import WriteError
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.index_loader import IndexLoader
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue, ReadDone, Write, WriteDone
from kvstore.disk.tier import DiskTier
from kvstore.errors import StoreError
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.reads import DiskReads

MAX_QUEUED_BYTES = 2 * BATCH_BYTES  # more dirty blocks wait in the arena, where a deletion still finds them
PAGE_BYTES = 4096
MAX_FULL = 5  # times in a row that the map may be full before the disk counts as degraded
GIVE_UP_S = 1.0  # without room for a block because of blocks that may not be evicted
ADOPTED_AT_ONCE = 2000  # conversations that are found at a start
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
MAX_EARLY_TOUCHES = 1 << 12  # chains remembered until the index is loaded


def _file_bytes(view: memoryview) -> int:
    """What an incompressible block takes in the file: whole pages, with the value's header."""
    return (view.nbytes // PAGE_BYTES + 1) * PAGE_BYTES


class WriteBack:
    """What the control plane knows of the disk.

    view: the bytes of a slot. A dirty slot holds one reference until its write is durable. tenant_bytes: what one
    tenant's blocks may take; what would be more is not written, from when the index is loaded.
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
        self._disk = disk
        self._steering = steering
        self._cpu = cpu
        self._io = io
        self._view = view
        self._stats = stats
        self._clock = clock
        self._dirty: deque[int] = deque()
        self._dirty_parents: Counter[BlockId] = Counter()
        self.reads = DiskReads(cpu, io, view, stats)
        self._queued: set[int] = set()  # slots whose writes were submitted
        self._unsure: set[int] = set()  # those of them that may have gone to an environment that was put aside
        self._deleting: dict[BlockId, int] = {}  # and the bytes that will be free
        self._undeleted: dict[BlockId, None] = {}  # those of them that failed, and wait to be tried again
        self._queued_bytes = 0
        self._tenant_bytes = tenant_bytes
        self._queued_of: Counter[str] = Counter()  # bytes by tenant
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._heal_at, self._heal_s = 0.0, FIRST_RETRY_S
        self._num_full = 0
        self._stuck_since: float | None = None
        self.degraded: str | None = None
        self._index: DiskIndex | None = None  # until it is loaded, LMDB itself is asked
        # What happened meanwhile, the last of each block: written, or None: deleted. And when it was last of use.
        self._journal: dict[BlockId, tuple[IndexEntry, Conversation | None] | None] = {}
        self._early_touches: deque[tuple[tuple[BlockId, ...], float, Conversation | None]] = deque(
            maxlen=MAX_EARLY_TOUCHES
        )
        self._lost_early: list[BlockId] = []  # what hangs below them is not known yet
        self._to_adopt: list[tuple[Hashable, Conversation]] = []
        self._loader = IndexLoader(disk, steering.order("disk"), clock)

    # -- the index ---------------------------------------------------------------------------------------------------
    def _take_index(self) -> None:
        if (loaded := self._loader.take()) is not None:
            self._stats.housekeeping_errors += not loaded.is_whole
            if self._index is None:
                self._to_adopt = loaded.found
                self._set_index(loaded.index)
            else:  # of a file that was put aside meanwhile
                loaded.index.clear()
        if self._to_adopt:  # a part at a time, the last used first: there may be very many
            part, self._to_adopt = self._to_adopt[-ADOPTED_AT_ONCE:], self._to_adopt[:-ADOPTED_AT_ONCE]
            self._steering.adopt(part)

    def _set_index(self, index: DiskIndex) -> None:
        for block_id, change in self._journal.items():
            if change is None:
                index.remove(block_id)
            else:
                index.add(*change)
        for chain, used_s, conversation in self._early_touches:
            index.touch(chain, used_s, conversation)
        lost, self._lost_early = self._lost_early, []
        self._index = index
        self._journal.clear()
        self._early_touches.clear()
        below = [block_id for block_id in self.with_descendants(lost) if block_id not in lost]
        if below:
            self.delete(below)

    def _note_written(self, entry: IndexEntry, conversation: Conversation | None) -> None:
        """In the index, or in it once it is there."""
        if self._index is None:
            self._journal.pop(entry.block_id, None)  # the order is that of the last changes
            self._journal[entry.block_id] = (entry, conversation)
        else:
            self._index.add(entry, conversation)

    def _note_deleted(self, block_id: BlockId) -> None:
        if self._index is None:
            self._journal.pop(block_id, None)
            self._journal[block_id] = None
        else:
            self._index.remove(block_id)

    @property
    def index_loaded(self) -> bool:
        return self._index is not None

    @property
    def capacity_bytes(self) -> int:
        return self._disk.file.capacity_bytes

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; false for one that is being deleted."""
        if block_id in self._deleting or self._disk.file.broken:
            return False
        if self._index is not None:
            return block_id in self._index
        return self._disk.contains(block_id)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """These blocks, head first, are wanted by this conversation, as far as they are on disk."""
        if self._index is not None:
            self._index.claim(chain, conversation)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """The first block of a splice goes before the block in front of it."""
        if self._index is not None:
            self._index.link(block_id, parent_id)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """These blocks, head first, were of use just now. conversation: whose they are."""
        now = self._clock()
        if self._index is not None:
            self._index.touch(chain, now, conversation)
        else:
            self._early_touches.append((tuple(chain), now, conversation))

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
            is_current = self._cpu.find(block_id) == slot  # else it was given up, and may be new
            records = map(self._cpu.record, self._cpu.fail(slot))
            gone = [record.block_id for record in records if record is not None]
            is_lost = result in (ReadResult.MISSING, ReadResult.CORRUPT) or not self.contains(block_id)
            if is_lost and is_current:  # a quarantine may have come in between
                self.delete_tree(block_id, gone)
        self._cpu.release(slot)

    def delete_tree(self, block_id: BlockId, gone: Sequence[BlockId] = ()) -> None:
        """A block is lost: it goes, and with it what was computed after it, which nobody could use.

        gone: what the CPU tier had below it until now.
        """
        if self._index is None:
            self._lost_early.append(block_id)
        lost = dict.fromkeys(self.with_descendants([block_id, *gone]))
        self._add_children(lost)
        self.delete(list(lost))

    def _add_children(self, lost: dict[BlockId, None]) -> None:
        """What the CPU tier has below these: what came when its parent was on disk only is not linked to it."""
        for slot in self._cpu.parents_first():
            record = self._cpu.record(slot)
            if record is not None and record.parent_id in lost:
                lost[record.block_id] = None

    def _quarantine(self) -> bool:
        """The environment is damaged: put aside, and start with an empty one; the CPU tier is written to it again.

        False when the file system does not let us, which is tried again later; until then nothing is on disk.
        """
        if self._clock() < self._heal_at:
            return False
        try:
            self._disk.file.quarantine()
        except (StoreError, OSError) as error:
            self.degraded = str(error)
            self._heal_at = self._clock() + self._heal_s
            self._heal_s = min(2 * self._heal_s, LAST_RETRY_S)
            return False
        self._heal_at, self._heal_s = 0.0, FIRST_RETRY_S
        self.degraded, self._retry_at = None, 0.0
        if self._index is not None:
            self._forget_what_it_held_up(self._index)
            self._index.clear()
        self._index = DiskIndex(self._clock, self._steering.order("disk"))
        self._journal.clear()
        self._early_touches.clear()
        self._to_adopt = []
        self._lost_early.clear()
        self._deleting.clear()
        self._undeleted.clear()
        self._unsure |= self._queued
        known = self._queued.union(self._dirty)
        for slot in self._cpu.parents_first():
            if self._cpu.state(slot) is SlotState.READY and slot not in known:
                self._cpu.acquire(slot)
                self.add_dirty(slot)
        return True

    def _forget_what_it_held_up(self, index: DiskIndex) -> None:
        """Blocks of the CPU tier whose parent was on disk only are of no use to anybody now."""
        records = [record for record in map(self._cpu.record, self._cpu.blocks()) if record is not None]
        parents = dict.fromkeys(record.parent_id for record in records)
        lost = {block_id: None for block_id in parents if block_id in index and self._cpu.find(block_id) is None}
        self._add_children(lost)
        for block_id in lost:
            self._cpu.forget(block_id)

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
        if self._disk.file.broken and not self._quarantine():
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
            if self._is_over_limit(record.tenant, size):
                self._stats.refused_writes += 1
                self._drop(slot, record)
                continue
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
            self._queued_of[record.tenant] += size
            self._deleting.pop(record.block_id, None)
            self._queued.add(slot)
            self._io.submit_write(Write(slot, record, self._view(slot)))

    def _is_over_limit(self, tenant: str, num_bytes: int) -> bool:
        if self._tenant_bytes is None or self._index is None:
            return False
        return self._index.bytes_of(tenant) + self._queued_of[tenant] + num_bytes > self._tenant_bytes

    def _give_up(self, slot: int, record: BlockRecord) -> bool:
        """All that is stored is in use, or is what this block is built on: a conversation larger than the tier.

        False: wait some more, somebody may let go. Else its end is not stored, here or in the CPU tier.
        """
        now = self._clock()
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < GIVE_UP_S:
            return False
        self._stats.dropped_writes += 1
        self._drop(slot, record)
        return True

    def _drop(self, slot: int, record: BlockRecord) -> None:
        """The first of the dirty ones is not written, nor what is built on it."""
        self._dirty.popleft()
        self._cpu.forget(record.block_id)
        self._clean(slot, record)

    def _clean(self, slot: int, record: BlockRecord) -> None:
        self._dirty_parents[record.parent_id] -= 1
        if not self._dirty_parents[record.parent_id]:
            del self._dirty_parents[record.parent_id]
        self._cpu.release(slot)

    def write_done(self, done: WriteDone) -> None:
        for write in done.writes:
            size = _file_bytes(write.view)
            self._queued_bytes -= size
            self._queued_of[write.record.tenant] -= size
        self._queued_of = +self._queued_of  # without those of whom nothing is queued
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
            self._note_written(entry, self._cpu.conversation(write.slot))
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
            self._evict(self._index, sum(_file_bytes(write.view) for write in done.writes))
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
        """Evict, in the order of eviction, until so much more may be written; False when that must wait."""
        excess = self._disk.file.excess_bytes(incoming_bytes) - sum(self._deleting.values())
        if excess <= 0:
            return True
        if self._index is None:
            return False
        victims = self._evict(self._index, excess)
        # Their pages can be used again after the next transactions; half of what is above the watermark is for that.
        slack = (1 - WATERMARK) * self._disk.file.capacity_bytes / 2
        return bool(victims) and (excess <= slack or not self._queued_bytes)

    def _evict(self, index: DiskIndex, num_bytes: int) -> list[IndexEntry]:
        """Give up at least so much, in the order of eviction; returns what."""
        victims = index.take_victims(num_bytes, self._is_pinned)
        self._stats.disk_evictions += len(victims)
        if victims:
            self._delete([(entry.block_id, entry.stored_bytes) for entry in victims])
        return victims

    def _is_pinned(self, block_id: BlockId) -> bool:
        """Whether something above the disk still builds on this block, or uses it."""
        if block_id in self._dirty_parents or self._cpu.is_awaited(block_id):
            return True
        slot = self._cpu.find(block_id)
        return slot is not None and (not self._cpu.pool.is_free(slot) or self._cpu.pool.has_children(slot))

    # -- giving up ---------------------------------------------------------------------------------------------------
    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks from the disk and from the CPU tier. Whoever holds a slot there keeps it."""
        entries = [None if self._index is None else self._index.get(block_id) for block_id in block_ids]
        for block_id in block_ids:
            self._note_deleted(block_id)
        self._stats.disk_removals += len(entries) - entries.count(None)
        sizes = [0 if entry is None else entry.stored_bytes for entry in entries]
        self._delete(list(zip(block_ids, sizes, strict=True)))

    def _delete(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """Of these, given with their sizes, the index knows already."""
        for block_id, size in reversed(blocks):
            self._cpu.forget(block_id)
            self._deleting[block_id] = size
            self._undeleted.pop(block_id, None)
        self._io.submit_deletes([block_id for block_id, _ in blocks])

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
            raise StoreError(f"the index of {self._disk.file.path} is still being loaded; try again in a while")
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._is_pinned)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))

    @property
    def is_drained(self) -> bool:
        """Nothing is dirty and nothing is on its way."""
        return not self._dirty and not self._deleting and not self.reads and self._io.is_idle

    def is_deleting(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are not gone from disk yet."""
        return not self._deleting.keys().isdisjoint(block_ids)

    def cannot_delete(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether the deletion of some of these has failed, and will not be tried again soon."""
        has_failed = self._disk.file.broken or not self._undeleted.keys().isdisjoint(block_ids)
        return self.degraded is not None and has_failed

    def persist_touched(self) -> None:
        """Send times of last use along with the next transaction."""
        if self._index is not None and (touched := self._index.take_touched()):
            self._io.submit_touched(touched)

    def finish(self) -> None:
        """The store is about to be closed: hand over what waits for a better moment."""
        self.reads.finish()
        self.persist_touched()
        self._delete_again()

    def stats(self) -> dict[str, object]:
        blocks = None if self._index is None else self._index.num_blocks
        return {
            **self._disk.stats(),
            "blocks": blocks,
            "dirty_blocks": len(self._dirty),
            "queued_write_bytes": self._queued_bytes,
            "reads_in_flight": len(self.reads),
            "degraded": self.degraded,
            "index_loaded": self._index is not None,
        }
