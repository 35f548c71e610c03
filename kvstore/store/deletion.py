"""Deletion of blocks with all that was computed after them, which leaves no bytes in the arena; and eviction by hand.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.blocks.ids import BlockId, is_quantised, state_chain, with_quantised
from kvstore.blocks.records import Evict, Evicted
from kvstore.store.context import StoreContext
from kvstore.store.stored import StoredBlocks
from kvstore.store.write_back import WriteBack

if TYPE_CHECKING:
    from kvstore.store.remote import RemoteBlocks


class Deletion:
    """disk, remote: None without such a tier. being_filled: arena blocks with KV that has no id yet."""

    def __init__(
        self, context: StoreContext, disk: WriteBack | None, block_bytes: int, stored: StoredBlocks,
        being_filled: Callable[[], Iterable[int]], remote: RemoteBlocks | None = None,
    ) -> None:  # fmt: skip
        self._cpu, self._steering, self._stats = context.cpu, context.steering, context.stats
        self._disk, self._block_bytes, self._being_filled, self._remote = disk, block_bytes, being_filled, remote
        self._stored = stored
        self.to_erase: set[int] = set()  # deleted arena blocks that were still held

    def forget(self, block_ids: Sequence[BlockId]) -> set[BlockId]:
        """Delete these blocks from the CPU tier, the write queue and the disk, and their bytes from the arena; with all
        that was computed after them, such as turns that were never stored, or answers cut by a stop string.

        Quantised copies go with them. They are gone from disk when `is_forgotten`. Blocks in use in the CPU tier can no
        longer be found, and are erased when released. Returns all deleted blocks.
        """
        tiers = self._cpu if self._disk is None else self._disk
        doomed = [one for one in tiers.with_descendants(with_quantised(block_ids)) if self._is_meant(one)]
        self._stats.forgotten += len(doomed)
        self.to_erase.update(one for one in map(self._cpu.arena_block_of, doomed) if one is not None)
        self.to_erase.update(self._being_filled())
        if self._disk is not None:
            self._disk.delete(doomed)
        for block_id in reversed(doomed):
            self._cpu.forget(block_id)
        if self._remote is not None:
            self._remote.forget(doomed)
        self._steering.forget(doomed)
        self._stats.losses.note("deleted", None, *doomed)
        self.erase()
        return set(doomed)

    def _is_meant(self, block_id: BlockId) -> bool:
        """Whether it is no copy, or one that is here."""
        if not is_quantised(block_id) or self._cpu.arena_block_of(block_id) is not None:
            return True
        return self._disk is not None and block_id in self._disk.contents.index

    def erase(self) -> None:
        """Overwrite deleted arena blocks that nobody holds any more."""
        self._cpu.erase_stale()
        self.to_erase = {one for one in self.to_erase if not self._cpu.pool.is_free(one)}

    def is_forgotten(self, block_ids: set[BlockId]) -> bool:
        """Whether the blocks that `forget` returned are gone from disk and from the remote tier."""
        if self._remote is not None and self._remote.is_deleting(block_ids):
            return False
        if self._disk is None:
            return True
        is_written = not block_ids.isdisjoint(self._disk.submitted.values())  # and is deleted when that has ended
        return not (is_written or self._disk.contents.removing.has_some(block_ids))

    def cannot_forget(self, block_ids: set[BlockId]) -> bool:
        """Whether a tier cannot delete these at the moment. It tries again later."""
        if self._remote is not None and not self._remote.deletes.held().isdisjoint(block_ids):
            return True
        return self._disk is not None and self._disk.cannot_delete(block_ids)

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        """Evict matching blocks from CPU and disk; with dry_run only count them. Also returns their ids. The states
        behind blocks that are named go with them.
        """
        if what.block_ids is not None:
            named, stored = with_quantised(what.block_ids), self._stored
            num_blocks, size = stored.num_state_blocks, stored.block_size
            with_state = [one for one in named if num_blocks and stored.has_state(one)]
            named += [piece for one in with_state for piece in state_chain(one, num_blocks, size)]
            what = replace(what, block_ids=frozenset(named))
        in_cpu = self._cpu.select(what, self._block_bytes)
        found = {"cpu": Evicted(len(in_cpu), len(in_cpu) * self._block_bytes)} if self._cpu.keep else {}
        chosen = set(in_cpu)
        for block_id in () if what.dry_run else in_cpu:
            self._cpu.forget(block_id)
        if self._disk is not None:
            on_disk, found["disk"] = self._disk.select(what, frozenset(in_cpu))
            chosen.update(on_disk)
            if not what.dry_run:
                self._disk.delete(on_disk)
        if not what.dry_run:
            self._stats.losses.note("evicted", "cpu" if self._disk is None else "disk", *chosen, why="by hand")
            if self._remote is not None:
                self._remote.evicted(chosen)
            self._cpu.erase_stale()
        return found, frozenset(chosen)
