"""What a host reads from disk into its own memory, and what is read ahead for it.

Control plane, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Expected, ReadResult
from kvstore.disk.io_queue import AS_HINT, AT_ONCE, IoQueue, Read, ReadDone, Task
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.stats import StoreStats
from kvstore.store.host_writes import Tickets
from kvstore.store.write_back import WriteBack

MAX_PREFETCHING = 1 << 12  # blocks
MAX_EARLY = 64  # chains that are remembered until the index is loaded
REASONS = {
    ReadResult.OK: "", ReadResult.MISSING: "missing", ReadResult.CORRUPT: "damaged",
    ReadResult.MISMATCH: "mismatch", ReadResult.FAILED: "io_error",
}  # fmt: skip


class HostReads:
    """planner: measures reads."""

    def __init__(
        self, tier: DiskTier, io: IoQueue, disk: WriteBack, planner: Planner, tickets: Tickets, stats: StoreStats
    ) -> None:
        self._tier, self._io, self._disk = tier, io, disk
        self._planner, self._tickets, self._stats = planner, tickets, stats
        self._num_reading = self._num_prefetching = 0
        self._early = deque[Sequence[BlockId]](maxlen=MAX_EARLY)

    def __len__(self) -> int:
        """The number of reads that somebody waits for."""
        return self._num_reading

    def read(self, wanted: Expected, into: memoryview) -> int:
        """Begin a read. Returns its ticket."""
        ticket = self._tickets.begin()
        if self._disk.contents.contains(wanted.block_id):
            self._num_reading += 1
            self._io.submit_read(Read(ticket, wanted, into), AT_ONCE)
        else:
            self._tickets.end(ticket, "missing")
        return ticket

    def done(self, done: ReadDone) -> None:
        block_id, num_bytes, result = done.read.record.block_id, done.read.view.nbytes, done.result
        self._num_reading -= 1
        if result is ReadResult.OK:
            self._stats.read += 1
            self._planner.read(num_bytes, done.seconds, done.num_active)
        else:
            if result is ReadResult.MISMATCH:
                header = self._tier.header(block_id)
                if header is not None and header.raw_bytes == num_bytes:
                    result = ReadResult.CORRUPT  # intact, but not the block that the index says
            self._stats.read_failures[result.value] = self._stats.read_failures.get(result.value, 0) + 1
            is_lost = result in (ReadResult.MISSING, ReadResult.CORRUPT)
            if is_lost and self._disk.contents.contains(block_id):
                self._disk.space.delete_tree(block_id)
        self._tickets.end(done.read.arena_block, REASONS[result], num_bytes)

    def prefetch(self, chain: Sequence[BlockId]) -> None:
        """Read the last of these that is stored, and all that it builds on, into the system's page cache: head first,
        behind all other reads, as far as the bound allows. For hosts that give no memory before they ask.
        """
        index = self._disk.contents.index
        if index is None:
            self._early.append(chain)
            return
        entry = next((entry for block_id in reversed(chain) if (entry := index.get(block_id)) is not None), None)
        stored: list[BlockId] = []
        while entry is not None:
            stored.append(entry.block_id)
            entry = index.get(entry.parent_id)
        for block_id in stored[::-1][: MAX_PREFETCHING - self._num_prefetching]:
            self._io.submit_read(Task(self._num_prefetching, partial(self._tier.warm, block_id)), AS_HINT)
            self._num_prefetching += 1
            self._stats.prefetched += 1

    def prefetch_done(self) -> None:
        self._num_prefetching -= 1

    def poll(self) -> None:
        """Go on when the index has been loaded."""
        while self._early and self._disk.contents.index is not None:
            self.prefetch(self._early.popleft())
