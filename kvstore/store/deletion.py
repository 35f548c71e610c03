"""What is given up by hand: blocks that are forgotten with all that was computed after them, or that are evicted.

Control plane, one thread. Forgotten blocks leave no bytes behind in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.memory.tier import CpuTier
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.write_back import WriteBack


@dataclass(eq=False)
class Deletion:
    """disk None: there is none. unnamed_slots: those that are being filled and have no id yet."""

    _cpu: CpuTier
    _disk: WriteBack | None
    _steering: Steering
    _stats: StoreStats
    _block_bytes: int
    _unnamed_slots: Callable[[], Iterable[int]]

    def __post_init__(self) -> None:
        self._waiting: list[tuple[tuple[BlockId, ...], set[BlockId]]] = []  # what is below them is not known yet
        self._to_erase: set[int] = set()  # slots with something forgotten in them that were held at that time

    def forget(self, block_ids: Sequence[BlockId]) -> set[BlockId]:
        """These blocks go from the CPU tier, the write queue and the disk, and their bytes from the arena.

        What was computed after them goes too: of turns that were never stored, of answers cut by a stop string. On disk
        they are gone when `is_forgotten`; what somebody still uses in the CPU tier is not found any more, and is erased
        when it has been released. Returns all of them; as long as the index of the disk is not loaded the set grows.
        """
        doomed = self._with_descendants(block_ids)
        self._forget(doomed)
        found = set(doomed)
        if self._disk is not None and self._disk.contents.index is None:
            self._waiting.append((tuple(block_ids), found))
        return found

    def poll(self) -> None:
        """Go on with what could not be done at once."""
        if self._waiting and self._disk is not None and self._disk.contents.index is not None:
            waiting, self._waiting = self._waiting, []
            for block_ids, found in waiting:
                below = [block_id for block_id in self._with_descendants(block_ids) if block_id not in found]
                found.update(below)
                self._forget(below)
        if self._to_erase:
            self._erase()

    def _forget(self, doomed: Sequence[BlockId]) -> None:
        self._stats.forgotten += len(doomed)
        self._to_erase.update(slot for slot in map(self._cpu.slot_of, doomed) if slot is not None)
        self._to_erase.update(self._unnamed_slots())
        if self._disk is not None:
            self._disk.space.delete(doomed)
        for block_id in reversed(doomed):
            self._cpu.forget(block_id)
        self._steering.forget(doomed)
        self._erase()

    def _with_descendants(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Parents before children, as far as they are known."""
        on_disk = block_ids if self._disk is None else self._disk.contents.with_descendants(block_ids)
        return self._cpu.with_descendants(on_disk)

    def _erase(self) -> None:
        """Overwrite what was forgotten and is not held any more."""
        self._cpu.erase_stale()
        self._to_erase = {slot for slot in self._to_erase if not self._cpu.pool.is_free(slot)}

    def is_forgotten(self, block_ids: set[BlockId]) -> bool:
        """Whether what `forget` returned is gone from disk."""
        if self._disk is None:
            return True
        is_whole = all(found is not block_ids for _, found in self._waiting)
        return is_whole and not self._disk.space.is_deleting(block_ids)

    def cannot_forget(self, block_ids: set[BlockId]) -> bool:
        """Whether the disk does not let these go at the moment; it is tried again later."""
        return self._disk is not None and self._disk.cannot_delete(block_ids)

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        """Give up what matches, on CPU and disk, or with dry_run count it; also returns the ids."""
        in_cpu = self._cpu.select(what, self._block_bytes)
        found = {"cpu": Evicted(len(in_cpu), len(in_cpu) * self._block_bytes)}
        chosen = set(in_cpu)
        for block_id in () if what.dry_run else in_cpu:
            self._cpu.forget(block_id)
        if self._disk is not None:
            on_disk, found["disk"] = self._disk.space.select(what)
            chosen.update(on_disk)
            if not what.dry_run:
                self._disk.space.delete(on_disk)
        if not what.dry_run:
            self._cpu.erase_stale()
        return found, frozenset(chosen)
