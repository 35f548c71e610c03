"""What the control plane knows to be on disk.

What leaves the disk is evicted, deleted or lost; what CPU and disk hold together stays closed under parents.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Evicted, ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.io_queue import IoQueue
from kvstore.disk.tier import DiskTier
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats

# What blocks are lost by (see `kvstore.blocks.records.Loss`), by the read that found out; else "unreadable".
LOST_BY = {ReadResult.CORRUPT: "damaged", ReadResult.MISMATCH: "damaged", ReadResult.MISSING: "damaged"}


class DiskContents:
    """index: of all that is on disk when the store opens; its conversations are known from then on. holdings: where it
    reports what comes and goes.
    """

    def __init__(
        self, disk: DiskTier, index: DiskIndex, steering: Steering, clock: Callable[[], float],
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk, self.index, self._clock, self._holdings = disk, index, clock, holdings
        self.removing: dict[BlockId, int] = {}  # blocks being deleted, with the bytes that will be free
        steering.adopt(index.name_conversations(steering.order("disk")))
        self.claim, self.link, self.take_touched = index.claim, index.link, index.take_touched

    def begin_anew(self) -> None:
        """Start again with an empty file, after the old one was set aside."""
        self.index.clear()
        self.removing.clear()
        if self._holdings is not None:
            self._holdings.emptied(Place.DISK)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; False while it is being deleted."""
        return block_id in self.index and block_id not in self.removing and not self._disk.file.broken

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all below them on disk."""
        found = dict.fromkeys(block_ids)
        for block_id, entry in [(block_id, self.index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(self.index.links.descendants(block_id))
        return list(found)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """Mark these blocks, head first, as just used. conversation: their owner."""
        self.index.touch(chain, self._clock(), conversation)

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """Add a block that was written."""
        before = self.index.get(record.parent_id)
        parent_id = record.parent_id if before is None else before.block_id  # one object for each id
        entry = IndexEntry(
            record.block_id, parent_id, stored_bytes, record.created_s, self._clock(), record.model, record.tenant
        )
        self.index.add(entry, conversation)
        if self._holdings is not None:
            self._holdings.stored_record(Place.DISK, record)

    def leaves(self, block_id: BlockId, num_bytes: int) -> None:
        """Note that a block, no longer in the index, is being deleted; this many bytes will be free."""
        self.removing[block_id] = num_bytes
        if self._holdings is not None:
            self._holdings.gone(Place.DISK, block_id)

    def remove(self, block_id: BlockId) -> int | None:
        """Remove a block; returns its bytes, None when it is not there."""
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes


@dataclass(eq=False)
class DiskSpace:
    _disk: DiskTier
    _cpu: CpuTier
    _io: IoQueue
    _contents: DiskContents
    _stats: StoreStats

    def __post_init__(self) -> None:
        self._failed: dict[BlockId, None] = {}  # failed deletions, to be retried

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
        """These and all that builds on them, on disk or in the CPU tier, parents before children."""
        return self._cpu.with_descendants(self._contents.with_descendants(block_ids))

    def delete_tree(
        self, block_id: BlockId, gone: Sequence[BlockId] = (), result: ReadResult = ReadResult.CORRUPT
    ) -> None:
        """Delete a lost block and all that was computed after it, as nobody could use that.

        gone: what the CPU tier had below it until now. result: of the read that found out.
        """
        lost = self.with_descendants([block_id, *gone])
        self._stats.losses.note(LOST_BY.get(result, "unreadable"), "disk", *lost, why=result.value)
        self.delete(lost)

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
        lost = [one for one in self._cpu.absent_parents() if one in self._contents.index]
        for block_id in self._cpu.with_descendants(lost):
            self._cpu.forget(block_id)
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
        victims = self._contents.index.take_victims(num_bytes, self._cpu.is_needed)
        self._stats.disk_evictions += len(victims)
        self._stats.losses.note("evicted", "disk", *(entry.block_id for entry in victims))
        for entry in reversed(victims):
            self._cpu.forget(entry.block_id)
        self._submit([(entry.block_id, entry.stored_bytes) for entry in victims])
        return bool(victims)

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Matching blocks on disk, tails first, and their size. Blocks in use stay, unless they are named."""
        index = self._contents.index
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._cpu.is_needed)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))
