"""What the control plane knows to be on disk, even before the disk's index is loaded.

What leaves the disk is evicted, deleted or lost; what CPU and disk hold together stays closed under parents.

Control plane, one thread. Another thread builds the index from a scan, as there may be millions of blocks. It does not
see what is written meanwhile; whoever takes the index adds that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.forest import Order
from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Evicted, ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.io_queue import IoQueue
from kvstore.disk.tier import DiskTier
from kvstore.errors import StoreError
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats

ADOPTED_AT_ONCE = 2000  # of the conversations found at a start
MAX_EARLY_TOUCHES = 1 << 12  # touched chains that are remembered until the index is loaded
# What blocks are lost by (see `kvstore.blocks.records.Loss`), by the read that found out; else "unreadable".
LOST_BY = {ReadResult.CORRUPT: "damaged", ReadResult.MISMATCH: "damaged", ReadResult.MISSING: "damaged"}


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """found: a conversation for each leaf, with that leaf. is_whole False: only of the blocks that could be read."""

    index: DiskIndex
    found: list[tuple[Hashable, Conversation]]
    is_whole: bool


class IndexLoader:
    """Starts loading at once."""

    def __init__(self, disk: DiskTier, order: Order, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._order = order
        self._clock = clock
        self._loaded: deque[LoadedIndex] = deque()
        threading.Thread(target=self._load, name="kvstore-index", daemon=True).start()

    def take_loaded(self) -> LoadedIndex | None:
        """The loaded index; returned once."""
        return self._loaded.popleft() if self._loaded else None

    def _load(self) -> None:
        batches: list[list[IndexEntry]] = []
        try:
            batches.extend(self._disk.scan())
            index, is_whole = DiskIndex.build(batches, self._clock, self._order), True
            found = index.name_conversations()  # last, since the order is the same for whatever index there is
            self._order.first()  # sorts them here, not where somebody waits
        except Exception:  # the border of a thread: what was not found is computed and written again
            index, is_whole, found = self._partial_index(batches), False, []
        self._loaded.append(LoadedIndex(index, found, is_whole))

    def _partial_index(self, batches: list[list[IndexEntry]]) -> DiskIndex:
        try:
            return DiskIndex.build(batches, self._clock, self._order)
        except Exception:  # what was read is what cannot be used
            return DiskIndex(self._clock, self._order)


class DiskContents:
    """Until the index is loaded, it asks LMDB itself, and notes changes so that they can be repeated on the index.

    holdings: where it reports what is on disk.
    """

    def __init__(
        self, disk: DiskTier, steering: Steering, stats: StoreStats, clock: Callable[[], float],
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk, self._steering, self._stats, self._clock = disk, steering, stats, clock
        self._holdings = holdings
        self.index: DiskIndex | None = None
        self.removing: dict[BlockId, int] = {}  # blocks being deleted, with the bytes that will be free
        # Each block's last change: its entry if written, None if deleted.
        self._journal: dict[BlockId, tuple[IndexEntry, Conversation | None] | None] = {}
        self._early_touches = deque[tuple[tuple[BlockId, ...], float, Conversation | None]](maxlen=MAX_EARLY_TOUCHES)
        self._to_adopt: list[tuple[Hashable, Conversation]] = []
        self._loader = IndexLoader(disk, steering.order("disk"), clock)

    def poll(self) -> bool:
        """Poll the loader. Returns whether the index has just been loaded."""
        loaded, has_come = self._loader.take_loaded(), False
        if loaded is not None:
            self._stats.housekeeping_errors += not loaded.is_whole
            if has_come := self.index is None:
                self._to_adopt, self.index = loaded.found, loaded.index
                self._repeat(loaded.index)
            else:  # it is of a file that was set aside meanwhile
                loaded.index.clear()
        if self._to_adopt:  # in parts, most recently used first, as there may be very many
            part, self._to_adopt = self._to_adopt[-ADOPTED_AT_ONCE:], self._to_adopt[:-ADOPTED_AT_ONCE]
            self._steering.adopt(part)
        return has_come

    def _repeat(self, index: DiskIndex) -> None:
        for block_id, change in self._journal.items():
            if change is None:
                index.remove(block_id)
            else:
                index.add(*change)
        for chain, used_s, conversation in self._early_touches:
            index.touch(chain, used_s, conversation)
        self._journal.clear()
        self._early_touches.clear()

    def begin_anew(self) -> None:
        """Start again with an empty file, after the old one was set aside."""
        if self.index is not None:
            self.index.clear()
        self.index = DiskIndex(self._clock, self._steering.order("disk"))
        self._journal.clear()
        self._early_touches.clear()
        self._to_adopt = []
        self.removing.clear()
        if self._holdings is not None:
            self._holdings.emptied(Place.DISK)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; False while it is being deleted."""
        if block_id in self.removing or self._disk.file.broken:
            return False
        if self.index is not None:
            return block_id in self.index
        return self._disk.contains(block_id)

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all below them on disk. Without the index, nothing is known below them."""
        found = dict.fromkeys(block_ids)
        if (index := self.index) is None:
            return list(found)
        for block_id, entry in [(block_id, index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(index.links.descendants(block_id))
        return list(found)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """Give these blocks, head first, to this conversation, as far as they are on disk."""
        if self.index is not None:
            self.index.claim(chain, conversation)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """Link a splice's first block to the block before it."""
        if self.index is not None:
            self.index.link(block_id, parent_id)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """Mark these blocks, head first, as just used. conversation: their owner."""
        now = self._clock()
        if self.index is not None:
            self.index.touch(chain, now, conversation)
        else:
            self._early_touches.append((tuple(chain), now, conversation))

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """Add a block that was written."""
        entry = IndexEntry(
            record.block_id, record.parent_id, stored_bytes, record.created_s, self._clock(), record.model,
            record.tenant,
        )  # fmt: skip
        if self.index is None:
            self._journal.pop(entry.block_id, None)  # entries are in the order of their last changes
            self._journal[entry.block_id] = (entry, conversation)
        else:
            self.index.add(entry, conversation)
        if self._holdings is not None:
            self._holdings.stored_record(Place.DISK, record)

    def leaves(self, block_id: BlockId, num_bytes: int) -> None:
        """Note that a block, no longer in the index, is being deleted; this many bytes will be free."""
        self.removing[block_id] = num_bytes
        if self._holdings is not None:
            self._holdings.gone(Place.DISK, block_id)

    def remove(self, block_id: BlockId) -> int | None:
        """Remove a block; returns its bytes, None when it is not known to be there."""
        if self.index is None:
            self._journal.pop(block_id, None)
            self._journal[block_id] = None
            return None
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use since the last call."""
        return {} if self.index is None else self.index.take_touched()


@dataclass(eq=False)
class DiskSpace:
    _disk: DiskTier
    _cpu: CpuTier
    _io: IoQueue
    _contents: DiskContents
    _stats: StoreStats

    def __post_init__(self) -> None:
        self._failed: dict[BlockId, None] = {}  # failed deletions, to be retried
        self._lost_early: list[BlockId] = []  # the blocks below them are unknown until the index is loaded

    @property
    def capacity_bytes(self) -> int:
        """How large the file may become."""
        return self._disk.file.capacity_bytes

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Delete blocks from the disk and the CPU tier. Holders of arena blocks keep them."""
        for block_id in reversed(block_ids):
            self._cpu.forget(block_id)
        self._delete(block_ids)

    def delete_written(self, block_id: BlockId) -> None:
        """Delete a block that was written although its arena block was given up. A newer copy in the CPU tier stays."""
        self._delete([block_id])

    def _delete(self, block_ids: Sequence[BlockId]) -> None:
        sizes = [self._contents.remove(block_id) for block_id in block_ids]
        self._stats.disk_removals += len(sizes) - sizes.count(None)
        self._submit([(block_id, size or 0) for block_id, size in zip(block_ids, sizes, strict=True)])

    def _submit(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """Submit deletions of these blocks, given with their sizes. They are no longer in the index."""
        for block_id, size in reversed(blocks):
            self._contents.leaves(block_id, size)
            self._failed.pop(block_id, None)
        if blocks:
            self._io.submit_deletes([block_id for block_id, _ in blocks])

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These and all that builds on them, on disk or in the CPU tier, parents before children, as far as known."""
        return self._cpu.with_descendants(self._contents.with_descendants(block_ids))

    def delete_tree(
        self, block_id: BlockId, gone: Sequence[BlockId] = (), result: ReadResult = ReadResult.CORRUPT
    ) -> None:
        """Delete a lost block and all that was computed after it, as nobody could use that.

        gone: what the CPU tier had below it until now. result: of the read that found out.
        """
        lost = self.with_descendants([block_id, *gone])
        self._stats.losses.note(LOST_BY.get(result, "unreadable"), "disk", *lost, why=result.value)
        if self._contents.index is None:
            self._lost_early += lost
        self.delete(lost)

    def index_has_come(self) -> None:
        """Delete what is below blocks that were lost earlier, unless those were computed and written again."""
        lost = {block_id for block_id in self._lost_early if not self._contents.contains(block_id)}
        self._lost_early = []
        below = [block_id for block_id in self._contents.with_descendants(lost) if block_id not in lost]
        self.delete(self._cpu.with_descendants(below))

    def deleted(self, block_ids: Iterable[BlockId]) -> None:
        """Note that these blocks are deleted."""
        for block_id in block_ids:
            self._contents.removing.pop(block_id, None)

    def deletion_failed(self, block_ids: Iterable[BlockId]) -> None:
        self._failed |= dict.fromkeys(one for one in block_ids if one in self._contents.removing)

    def delete_again(self) -> bool:
        """Retry failed deletions. Returns False if there are none."""
        failed, self._failed = self._failed, {}
        if again := [block_id for block_id in failed if block_id in self._contents.removing]:
            self._io.submit_deletes(again)
        return bool(failed)

    def is_deleting(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are still on disk."""
        return not self._contents.removing.keys().isdisjoint(block_ids)

    def has_failed(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether the deletion of some of these waits for a retry."""
        return not self._failed.keys().isdisjoint(block_ids)

    def begin_anew(self) -> None:
        """Start again after the file was set aside. Drop the CPU tier's blocks whose parents were only on disk, as
        nobody can use them.
        """
        index = self._contents.index
        if index is not None:
            lost = [one for one in self._cpu.absent_parents() if one in index]
            for block_id in self._cpu.with_descendants(lost):
                self._cpu.forget(block_id)
        self._lost_early.clear()
        self._failed.clear()
        self._contents.begin_anew()

    def make_room(self, incoming_bytes: int, num_queued_bytes: int) -> bool:
        """Evict, in order, until this much more may be written. Returns False if that must wait.

        num_queued_bytes: how much of it the writer already has.
        """
        excess = self._disk.file.excess_bytes(incoming_bytes) - sum(self._contents.removing.values())
        if excess <= 0:
            return True
        has_evicted = self.evict(excess)
        # Their pages become usable after the next transactions. Half of the space above the watermark bridges that.
        slack = (1 - WATERMARK) * self._disk.file.capacity_bytes / 2
        return has_evicted and (excess <= slack or not num_queued_bytes)

    def evict(self, num_bytes: int) -> bool:
        """Evict at least this much, in order. Returns False if nothing can be evicted."""
        if self._contents.index is None:
            return False
        victims = self._contents.index.take_victims(num_bytes, self._cpu.is_needed)
        self._stats.disk_evictions += len(victims)
        self._stats.losses.note("evicted", "disk", *(entry.block_id for entry in victims))
        for entry in reversed(victims):
            self._cpu.forget(entry.block_id)
        self._submit([(entry.block_id, entry.stored_bytes) for entry in victims])
        return bool(victims)

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Matching blocks on disk, tails first, and their size.

        Blocks in use stay, unless they are named. Raises StoreError until the index is loaded.
        """
        index = self._contents.index
        if index is None:
            raise StoreError(f"the index of {self._disk.file.path} is still being loaded; try again in a while")
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._cpu.is_needed)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))
