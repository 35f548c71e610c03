"""Queued and running reads from disk and from the remote tier: how urgent each is, how it ends, and what becomes of
those that nobody waits for.

Control plane, one thread. A slot that is being read is PENDING and holds a reference for the read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import AS_HINT, AT_ONCE, IoQueue, Rank, Read, ReadDone
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.remote.lanes import ReadLanes
from kvstore.stats import StoreStats


class DiskReads:
    """view: the bytes of a slot. remote: the threads that read from the remote tier, None without one."""

    def __init__(self, cpu: CpuTier, io: IoQueue, view: Callable[[int], memoryview], stats: StoreStats) -> None:
        self._cpu, self._io, self._view, self._stats = cpu, io, view, stats
        self.remote: ReadLanes | None = None
        self._ranks: dict[int, Rank] = {}  # of each slot
        self._counts: Counter[tuple[Rank, bool]] = Counter()  # of each rank, from the remote tier or not
        self._from_remote: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def start(self, slot: int, record: BlockRecord, rank: Rank = AT_ONCE, from_remote: bool = False) -> None:
        """Begin to read into an announced slot. The read takes over a reference, which is released when it has
        ended.
        """
        self._ranks[slot] = rank
        self._counts[rank, from_remote] += 1
        if from_remote:
            assert self.remote is not None
            self._from_remote.add(slot)
            self.remote.submit(Read(slot, record, self._view(slot)), rank)
        else:
            self._io.submit_read(Read(slot, record, self._view(slot)), rank)

    def is_from_remote(self, slot: int) -> bool:
        """Whether what is being read into this slot comes from the remote tier."""
        return slot in self._from_remote

    def rank(self, slot: int) -> Rank:
        return self._ranks[slot]

    def set_rank(self, slot: int, rank: Rank) -> None:
        """Change the rank of a read: somebody else waits for it now, or nobody does."""
        if self._ranks[slot] != rank:
            self._uncount(slot)
            self._ranks[slot] = rank
            self._counts[rank, slot in self._from_remote] += 1
            if self.remote is not None and slot in self._from_remote:
                self.remote.change_rank(slot, rank)
            else:
                self._io.rank_read(slot, rank)

    def let_go(self, slots: Sequence[int]) -> frozenset[int]:
        """Somebody no longer waits for these slots, given tail first: drop reads that nobody else waits for.

        A read goes on as a hint if somebody uses a block that builds on it. Returns the dropped slots.
        """
        dropped, is_kept = set[int](), False
        for slot in slots:
            if slot in self._ranks and self._cpu.pool.ref_count(slot) == 1:
                is_kept = is_kept or self._is_built_on(slot)
                if is_kept:
                    self.set_rank(slot, AS_HINT)
                elif self._cancel(slot):
                    dropped.add(slot)
        return frozenset(dropped)

    def _cancel(self, slot: int) -> bool:
        """Drop a read that has not begun, and forget its block and what builds on it. Returns False if it runs."""
        if self.remote is not None and slot in self._from_remote:
            is_dropped = self.remote.cancel(slot)
        else:
            is_dropped = self._io.cancel_read(slot)
        if not is_dropped:
            return False
        self._end(slot)
        self._stats.cancelled_reads += 1
        self._cpu.fail(slot)
        self._cpu.release(slot)
        return True

    def publish(self, slot: int) -> bool:
        """A read has succeeded. Returns False if its block was deleted meanwhile."""
        self._end(slot)
        is_wanted = self._cpu.state(slot) is SlotState.PENDING
        if is_wanted:
            self._cpu.publish(slot)
        return is_wanted

    def fail(self, done: ReadDone, failures: dict[str, int]) -> list[BlockId] | None:
        """A read has failed: forget its block and what builds on it in the CPU tier. `failures` counts it by its cause.

        Returns the forgotten blocks. None if the block was given up before: what has its id now may be another copy.
        """
        slot, cause = done.read.slot, done.result.value
        self._end(slot)
        failures[cause] = failures.get(cause, 0) + 1
        if self._cpu.slot_of(done.read.record.block_id) != slot:
            return None
        records = map(self._cpu.record, self._cpu.fail(slot))
        return [record.block_id for record in records if record is not None]

    def _end(self, slot: int) -> None:
        """Note that a read is no longer in flight."""
        self._uncount(slot)
        self._from_remote.discard(slot)

    def _uncount(self, slot: int) -> None:
        kind = self._ranks.pop(slot), slot in self._from_remote
        self._counts[kind] -= 1
        if not self._counts[kind]:
            del self._counts[kind]

    def num_before(self, rank: Rank, from_remote: bool = False) -> int:
        """How many blocks are read from there before one of this rank."""
        kinds = self._counts.items()
        return sum(num for (other, is_remote), num in kinds if other < rank and is_remote == from_remote)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest read has been running."""
        if not self._ranks:
            return 0.0
        return max(self._io.stalled_s, self.remote.stalled_s if self.remote is not None else 0.0)

    def _is_built_on(self, slot: int) -> bool:
        """Whether somebody uses a block below this one: it could not stay without this one."""
        below = self._cpu.pool.tree.links.descendants(slot)[1:]
        return any(self._cpu.pool.ref_count(one) > (one in self._ranks) for one in below)

    def finish(self) -> None:
        """Prepare for closing: drop reads that nobody will ever want."""
        for slot in [slot for slot, rank in self._ranks.items() if rank != AT_ONCE]:
            if slot in self._ranks and not self._is_built_on(slot):
                self._cancel(slot)
