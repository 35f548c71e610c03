"""Reads from disk that are queued or running, how urgent each is, and what becomes of one that nobody waits for.

Control plane, one thread. A slot that is being read is PENDING and holds a reference for the read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import AT_ONCE, IoQueue, Rank, Read
from kvstore.memory.tier import CpuTier
from kvstore.stats import StoreStats


class DiskReads:
    """view: the bytes of a slot."""

    def __init__(self, cpu: CpuTier, io: IoQueue, view: Callable[[int], memoryview], stats: StoreStats) -> None:
        self._cpu, self._io, self._view, self._stats = cpu, io, view, stats
        self._ranks: dict[int, Rank] = {}  # of each slot
        self._counts: Counter[Rank] = Counter()

    def __contains__(self, slot: int) -> bool:
        return slot in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def start(self, slot: int, record: BlockRecord, rank: Rank = AT_ONCE) -> None:
        """The slot is announced; the reference for the read is taken over, and released when it has ended."""
        self._ranks[slot] = rank
        self._counts[rank] += 1
        self._io.submit_read(Read(slot, record, self._view(slot)), rank)

    def rank(self, slot: int) -> Rank:
        return self._ranks[slot]

    def set_rank(self, slot: int, rank: Rank) -> None:
        """Somebody else waits for this read now, or nobody does."""
        if self._ranks[slot] != rank:
            self.end(slot)
            self._ranks[slot] = rank
            self._counts[rank] += 1
            self._io.rank_read(slot, rank)

    def cancel(self, slot: int) -> bool:
        """Drop a read that has not begun: its block is forgotten, and what builds on it. False when it runs."""
        if not self._io.cancel_read(slot):
            return False
        self.end(slot)
        self._stats.cancelled_reads += 1
        self._cpu.fail(slot)
        self._cpu.release(slot)
        return True

    def end(self, slot: int) -> None:
        """It is not on its way any more."""
        rank = self._ranks.pop(slot)
        self._counts[rank] -= 1
        if not self._counts[rank]:
            del self._counts[rank]

    def num_before(self, rank: Rank) -> int:
        """Blocks that are read before one of this rank."""
        return sum(count for other, count in self._counts.items() if other < rank)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest read has been running."""
        return self._io.stalled_s if self._ranks else 0.0

    def is_built_on(self, slot: int) -> bool:
        """Whether somebody uses a block below this one, which could not stay without it."""
        below = self._cpu.pool.descendants(slot)[1:]
        return any(self._cpu.pool.ref_count(one) > (one in self._ranks) for one in below)

    def finish(self) -> None:
        """The store is about to be closed: nobody will ever want these."""
        for slot in [slot for slot, rank in self._ranks.items() if rank != AT_ONCE]:
            if slot in self._ranks and not self.is_built_on(slot):
                self.cancel(slot)
