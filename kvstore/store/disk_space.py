"""What goes from the disk: to make room, because it was deleted, or because it is lost.

Control plane, one thread. What CPU and disk hold together stays closed under parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """is_parent_of_dirty: whether a block builds on this one that waits to be written."""

    _disk: DiskTier
    _cpu: CpuTier
    _io: IoQueue
    _contents: DiskContents
    _stats: StoreStats
    _is_parent_of_dirty: Callable[[BlockId], bool]

    def __post_init__(self) -> None:
        self._failed: dict[BlockId, None] = {}  # deletions that failed, and wait to be tried again
        self._lost_early: list[BlockId] = []  # what hangs below them is not known before the index is

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks from the disk and from the CPU tier. Whoever holds a slot there keeps it."""
        sizes = [self._contents.remove(block_id) for block_id in block_ids]
        self._stats.disk_removals += len(sizes) - sizes.count(None)
        self._submit([(block_id, size or 0) for block_id, size in zip(block_ids, sizes, strict=True)])

    def _submit(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """These, given with their sizes, are not in the index any more."""
        for block_id, size in reversed(blocks):
            self._cpu.forget(block_id)
            self._contents.removing[block_id] = size
            self._failed.pop(block_id, None)
        if blocks:
            self._io.submit_deletes([block_id for block_id, _ in blocks])

    def delete_tree(self, block_id: BlockId, gone: Sequence[BlockId] = ()) -> None:
        """A block is lost: it goes, and with it what was computed after it, which nobody could use.

        gone: what the CPU tier had below it until now.
        """
        if self._contents.index is None:
            self._lost_early.append(block_id)
        self.delete(self._cpu.with_descendants(self._contents.with_descendants([block_id, *gone])))

    def index_has_come(self) -> None:
        """What hangs below blocks that were lost before goes, too, unless these were computed and written again."""
        lost = {block_id for block_id in self._lost_early if not self._contents.contains(block_id)}
        self._lost_early = []
        self.delete([block_id for block_id in self._contents.with_descendants(lost) if block_id not in lost])

    def deleted(self, block_ids: Iterable[BlockId]) -> None:
        """They are gone."""
        for block_id in block_ids:
            self._contents.removing.pop(block_id, None)

    def deletion_failed(self, block_ids: Iterable[BlockId]) -> None:
        self._failed |= dict.fromkeys(one for one in block_ids if one in self._contents.removing)

    def delete_again(self) -> bool:
        """Submit what has failed once more; False when nothing has."""
        failed, self._failed = self._failed, {}
        if again := [block_id for block_id in failed if block_id in self._contents.removing]:
            self._io.submit_deletes(again)
        return bool(failed)

    def is_deleting(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are not gone from disk yet."""
        return not self._contents.removing.keys().isdisjoint(block_ids)

    def has_failed(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether the deletion of some of these waits to be tried again."""
        return not self._failed.keys().isdisjoint(block_ids)

    def begin_anew(self) -> None:
        """The file was put aside: of the CPU tier's blocks those are of no use whose parent was on disk only."""
        index = self._contents.index
        if index is not None:
            lost = [one for one in self._cpu.absent_parents() if one in index]
            for block_id in self._cpu.with_descendants(lost):
                self._cpu.forget(block_id)
        self._lost_early.clear()
        self._failed.clear()
        self._contents.begin_anew()

    def make_room(self, incoming_bytes: int, num_queued_bytes: int) -> bool:
        """Evict, in the order of eviction, until so much more may be written; False when that must wait.

        num_queued_bytes: of those, what the writer has already.
        """
        excess = self._disk.file.excess_bytes(incoming_bytes) - sum(self._contents.removing.values())
        if excess <= 0:
            return True
        has_evicted = self.evict(excess)
        # Their pages can be used again after the next transactions; half of what is above the watermark is for that.
        slack = (1 - WATERMARK) * self._disk.file.capacity_bytes / 2
        return has_evicted and (excess <= slack or not num_queued_bytes)

    def evict(self, num_bytes: int) -> bool:
        """Give up at least so much, in the order of eviction; False when nothing may go."""
        if self._contents.index is None:
            return False
        victims = self._contents.index.take_victims(num_bytes, self._is_pinned)
        self._stats.disk_evictions += len(victims)
        self._submit([(entry.block_id, entry.stored_bytes) for entry in victims])
        return bool(victims)

    def _is_pinned(self, block_id: BlockId) -> bool:
        """Whether something above the disk still builds on this block, or uses it."""
        return self._is_parent_of_dirty(block_id) or self._cpu.is_needed(block_id)

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Blocks on disk that match, tails first, and how much that is. What is in use stays, unless it is named.

        Raises StoreError as long as the index is not loaded.
        """
        index = self._contents.index
        if index is None:
            raise StoreError(f"the index of {self._disk.file.path} is still being loaded; try again in a while")
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._is_pinned)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))
