"""Queued and running reads from disk and from the remote tier: how urgent each is, how it ends, and what becomes of
those that nobody waits for.

Control plane, one thread. An arena block that is being read is PENDING and holds a reference for the read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import AS_HINT, AT_ONCE, IoQueue, Rank, Read, ReadDone
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.remote.lanes import ReadLanes
from kvstore.stats import StoreStats


class DiskReads:
    """view: the bytes of an arena block. remote: the threads that read from the remote tier, None without one."""

    def __init__(self, cpu: CpuTier, io: IoQueue, view: Callable[[int], memoryview], stats: StoreStats) -> None:
        self._cpu, self._io, self._view, self._stats = cpu, io, view, stats
        self.remote: ReadLanes | None = None
        self._ranks: dict[int, Rank] = {}  # of each arena block
        self._counts: Counter[tuple[Rank, bool]] = Counter()  # of each rank, from the remote tier or not
        self._from_remote: set[int] = set()

    def __contains__(self, arena_block: int) -> bool:
        return arena_block in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def start(self, arena_block: int, record: BlockRecord, rank: Rank = AT_ONCE, from_remote: bool = False) -> None:
        """Begin to read into an announced arena block. The read takes over a reference, which is released when it has
        ended.
        """
        self._ranks[arena_block] = rank
        self._counts[rank, from_remote] += 1
        if from_remote:
            assert self.remote is not None
            self._from_remote.add(arena_block)
            self.remote.submit(Read(arena_block, record, self._view(arena_block)), rank)
        else:
            self._io.submit_read(Read(arena_block, record, self._view(arena_block)), rank)

    def is_from_remote(self, arena_block: int) -> bool:
        """Whether what is being read into this arena block comes from the remote tier."""
        return arena_block in self._from_remote

    def rank(self, arena_block: int) -> Rank:
        return self._ranks[arena_block]

    def set_rank(self, arena_block: int, rank: Rank) -> None:
        """Change the rank of a read: somebody else waits for it now, or nobody does."""
        if self._ranks[arena_block] != rank:
            self._uncount(arena_block)
            self._ranks[arena_block] = rank
            self._counts[rank, arena_block in self._from_remote] += 1
            if self.remote is not None and arena_block in self._from_remote:
                self.remote.change_rank(arena_block, rank)
            else:
                self._io.rank_read(arena_block, rank)

    def let_go(self, arena_blocks: Sequence[int]) -> frozenset[int]:
        """Somebody no longer waits for these arena blocks, given tail first: drop reads that nobody else waits for.

        A read goes on as a hint if somebody uses a block that builds on it. Returns the dropped arena blocks.
        """
        dropped, is_kept = set[int](), False
        for arena_block in arena_blocks:
            if arena_block in self._ranks and self._cpu.pool.ref_count(arena_block) == 1:
                is_kept = is_kept or self._is_built_on(arena_block)
                if is_kept:
                    self.set_rank(arena_block, AS_HINT)
                elif self._cancel(arena_block):
                    dropped.add(arena_block)
        return frozenset(dropped)

    def _cancel(self, arena_block: int) -> bool:
        """Drop a read that has not begun, and forget its block and what builds on it. Returns False if it runs."""
        if self.remote is not None and arena_block in self._from_remote:
            is_dropped = self.remote.cancel(arena_block)
        else:
            is_dropped = self._io.cancel_read(arena_block)
        if not is_dropped:
            return False
        self._end(arena_block)
        self._stats.cancelled_reads += 1
        self._cpu.fail(arena_block)
        self._cpu.release(arena_block)
        return True

    def publish(self, arena_block: int) -> bool:
        """A read has succeeded. Returns False if its block was deleted meanwhile."""
        self._end(arena_block)
        is_wanted = self._cpu.state(arena_block) is ArenaBlockState.PENDING
        if is_wanted:
            self._cpu.publish(arena_block)
        return is_wanted

    def fail(self, done: ReadDone, failures: dict[str, int]) -> list[BlockId] | None:
        """A read has failed: forget its block and what builds on it in the CPU tier. `failures` counts it by its cause.

        Returns the forgotten blocks. None if the block was given up before: what has its id now may be another copy.
        """
        arena_block, cause = done.read.arena_block, done.result.value
        self._end(arena_block)
        failures[cause] = failures.get(cause, 0) + 1
        if self._cpu.arena_block_of(done.read.record.block_id) != arena_block:
            return None
        records = map(self._cpu.record, self._cpu.fail(arena_block))
        return [record.block_id for record in records if record is not None]

    def _end(self, arena_block: int) -> None:
        """Note that a read is no longer in flight."""
        self._uncount(arena_block)
        self._from_remote.discard(arena_block)

    def _uncount(self, arena_block: int) -> None:
        kind = self._ranks.pop(arena_block), arena_block in self._from_remote
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

    def _is_built_on(self, arena_block: int) -> bool:
        """Whether somebody uses a block below this one: it could not stay without this one."""
        below = self._cpu.pool.tree.links.descendants(arena_block)[1:]
        return any(self._cpu.pool.ref_count(one) > (one in self._ranks) for one in below)

    def finish(self) -> None:
        """Prepare for closing: drop reads that nobody will ever want."""
        for arena_block in [arena_block for arena_block, rank in self._ranks.items() if rank != AT_ONCE]:
            if arena_block in self._ranks and not self._is_built_on(arena_block):
                self._cancel(arena_block)
