"""The disk tier for a host that has its own memory: what it writes and reads, and how that ended.

Control plane, one thread. There is no arena: a block is written from the host's memory, and read into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Expected, ReadResult
from kvstore.disk.io_queue import AS_HINT, AT_ONCE, IoQueue, Read, ReadDone, WriteDone
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.host_conversations import HostConversations
from kvstore.store.host_writes import HostWrites, Tickets

REASONS = {
    ReadResult.OK: "", ReadResult.MISSING: "missing", ReadResult.CORRUPT: "damaged",
    ReadResult.MISMATCH: "mismatch", ReadResult.FAILED: "io_error",
}  # fmt: skip


class HostBlocks:
    """See `kvstore.block_store.BlockStore`, which names blocks by keys.

    planner: measures reads. root: the parent of first blocks.
    """

    def __init__(
        self, tier: DiskTier, io: IoQueue, steering: Steering, planner: Planner, stats: StoreStats,
        clock: Callable[[], float], root: BlockId,
    ) -> None:  # fmt: skip
        self.steering, self.planner, self.stats = steering, planner, stats
        self._tier, self._io = tier, io
        self.tickets = Tickets()
        self._writes = HostWrites(tier, io, steering, stats, clock, self.tickets, root)
        self.disk, self.deletion = self._writes.disk, self._writes.deletion
        self.conversations = HostConversations(steering, self.disk.contents, clock)
        self._num_reading = 0
        self._to_forget: list[tuple[BlockId, ...]] = []

    def contains(self, block_id: BlockId) -> bool:
        """Whether it is durable; no index loaded, LMDB is asked."""
        return self.disk.contents.contains(block_id)

    def write(self, record: BlockRecord, view: memoryview, name: str | None) -> int | None:
        """The ticket; None where it is refused. name: of the conversation."""
        if self.contains(record.block_id):
            ticket = self.tickets.begin()
            self.tickets.end(ticket, "")
            return ticket
        try:
            return self._writes.write(record, view, partial(self.conversations.owner, name))
        finally:
            self._writes.go_on()

    def read(self, wanted: Expected, into: memoryview, is_hint: bool) -> int:
        """The ticket."""
        ticket = self.tickets.begin()
        if self.contains(wanted.block_id):
            self._num_reading += 1
            self._io.submit_read(Read(ticket, wanted, into), AS_HINT if is_hint else AT_ONCE)
        else:
            self.tickets.end(ticket, "missing")
        return ticket

    def _read_done(self, done: ReadDone) -> None:
        block_id, num_bytes, result = done.read.record.block_id, done.read.view.nbytes, done.result
        self._num_reading -= 1
        if result is ReadResult.OK:
            self.stats.read += 1
            self.planner.read(num_bytes, done.seconds, done.num_active)
        else:
            if result is ReadResult.MISMATCH:
                header = self._tier.header(block_id)
                if header is not None and header.raw_bytes == num_bytes:
                    result = ReadResult.CORRUPT  # sound, but another block than the index says
            self.stats.read_failures[result.value] = self.stats.read_failures.get(result.value, 0) + 1
            if result in (ReadResult.MISSING, ReadResult.CORRUPT) and self.contains(block_id):
                self.disk.space.delete_tree(block_id)
        self.tickets.end(done.read.slot, REASONS[result], num_bytes)

    # -- what has ended ----------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Collect what the threads have done, and go on. True when there was something."""
        done = self._io.completed()
        for each in done:
            if isinstance(each, WriteDone):
                self._writes.done(each)
            elif isinstance(each, ReadDone):
                self._read_done(each)
        self.steering.poll()
        self.conversations.poll()
        self._writes.go_on()
        if self._to_forget and self.disk.contents.index is not None:
            waiting, self._to_forget = self._to_forget, []
            for chain in waiting:
                self._forget(chain)
        return bool(done)

    # -- by hand -----------------------------------------------------------------------------------------------------
    def forget(self, chain: Sequence[BlockId]) -> int:
        """These blocks, head first, and what builds on the last of them; but not what others build on, too.

        Returns how many of them were on disk. As long as the index is not loaded it is done later, and 0 returned.
        """
        self._writes.forget(frozenset(chain))
        if self.disk.contents.index is None:
            self._to_forget.append(tuple(chain))
            return 0
        return self._forget(chain)

    def _forget(self, chain: Sequence[BlockId]) -> int:
        contents = self.disk.contents
        named = frozenset(chain).union(contents.with_descendants(chain[-1:]))
        doomed, _ = self.disk.space.select(Evict(block_ids=named))
        self.disk.space.delete(doomed)
        self.steering.forget(doomed)
        self.stats.forgotten += len(doomed)
        return len(doomed)

    # -- looking after -----------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """The store is about to be closed."""
        self.disk.finish()

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight, and nothing is to be written or forgotten."""
        return not (len(self._writes) or self._num_reading or self._to_forget) and self.disk.is_drained

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        disk = self.disk.stats() | {"reads_in_flight": self._num_reading}
        store = {**self.stats.as_dict(), **self.planner.as_dict()}
        return {"disk": disk, "store": store, "policy": self.steering.as_dict()}

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self._writes.check_integrity(idle)
        assert not idle or not self._num_reading, f"{self._num_reading} reads while idle"
