"""What leaves the disk: blocks that are evicted, deleted or lost.

Control plane, one thread. What CPU and disk hold together stays closed under parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.io_queue import IoQueue
from kvstore.disk.tier import DiskTier
from kvstore.errors import StoreError
from kvstore.memory.tier import CpuTier
from kvstore.stats import StoreStats
from kvstore.store.disk_contents import DiskContents


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

    def delete_tree(self, block_id: BlockId, gone: Sequence[BlockId] = ()) -> None:
        """Delete a lost block and all that was computed after it, as nobody could use that.

        gone: what the CPU tier had below it until now.
        """
        lost = self.with_descendants([block_id, *gone])
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
