"""The disk tier for a host that has its own memory: what the host writes and reads, and how that ended.

Control plane, one thread. There is no arena: blocks are written from the host's memory and read into it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.disk.io_queue import IoQueue, ReadDone, TaskDone, WriteDone
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.fence import Stage
from kvstore.store.host_conversations import HostConversations
from kvstore.store.host_reads import HostReads
from kvstore.store.host_writes import HostWrites, Tickets


class HostBlocks:
    """See `kvstore.block_store.BlockStore`, which names blocks by keys.

    planner: measures reads. roots: see `HostWrites`. tenant_bytes: what one tenant may have on disk.
    """

    def __init__(
        self, tier: DiskTier, io: IoQueue, steering: Steering, planner: Planner, stats: StoreStats,
        clock: Callable[[], float], roots: Container[BlockId] | None, tenant_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.steering, self.planner, self.stats = steering, planner, stats
        self._io = io
        self.tickets = Tickets()
        self._writes = HostWrites(tier, io, steering, stats, clock, self.tickets, roots, tenant_bytes)
        self.disk, self.deletion = self._writes.disk, self._writes.deletion
        self.conversations = HostConversations(steering, self.disk.contents, clock)
        self.reads = HostReads(tier, io, self.disk, planner, self.tickets, stats)
        self._to_forget: list[tuple[BlockId, ...]] = []

    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is durable. Without the index, LMDB is asked."""
        return self.disk.contents.contains(block_id)

    def write(self, record: BlockRecord, view: memoryview, name: str | None) -> int | None:
        """Write a block. Returns the ticket; None if it is refused. name: the conversation's."""
        if self.contains(record.block_id):
            ticket = self.tickets.begin()
            self.tickets.end(ticket, "")
            return ticket
        try:
            return self._writes.write(record, view, partial(self.conversations.owner, name))
        finally:
            self._writes.go_on()

    def end_request(self, name: str, chain: Sequence[BlockId]) -> None:
        """After the last one what waits for a batch is written now: no more comes, and a host may be awake until it is
        durable.
        """
        self.conversations.finish(name, chain)
        if not self.conversations.num_open:
            self._writes.go_on()
            self._io.hurry()

    # -- what has ended ----------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Collect what the threads have finished, and go on. Returns whether there was anything."""
        done = self._io.completed()
        for each in done:
            if isinstance(each, WriteDone):
                self._writes.done(each)
            elif isinstance(each, ReadDone):
                self.reads.done(each)
            elif isinstance(each, TaskDone):
                self.reads.prefetch_done()
        self.steering.poll(is_idle=not self.conversations.num_open)
        self.conversations.poll()
        self.deletion.poll()
        self._writes.go_on()
        self.reads.poll()
        if self._to_forget and self.disk.contents.index is not None:
            waiting, self._to_forget = self._to_forget, []
            for chain in waiting:
                self._forget(chain)
        return bool(done)

    # -- by hand -----------------------------------------------------------------------------------------------------
    def forget(self, chain: Sequence[BlockId]) -> int:
        """Delete these blocks, head first, and what builds on the last of them, except for what others build on, too.

        Returns how many of them were on disk. Until the index is loaded it is put off, and 0 is returned.
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
        """Prepare for closing."""
        self.disk.finish()

    def stages(self) -> Sequence[Stage]:
        """Writes, chains that are to be forgotten once the index has come, and deletions."""
        return (lambda: self.tickets.running, lambda: self._to_forget, lambda: self.disk.contents.removing)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and nothing is left to be written or forgotten."""
        return not (len(self._writes) or len(self.reads) or self._to_forget) and self.disk.is_drained

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        disk = self.disk.stats() | {"reads_in_flight": len(self.reads)}
        store = {**self.stats.as_dict(), **self.planner.as_dict()}
        return {"disk": disk, "store": store, "policy": self.steering.as_dict()}

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self._writes.check_integrity(idle)
        assert not idle or not len(self.reads), f"{len(self.reads)} reads while idle"
