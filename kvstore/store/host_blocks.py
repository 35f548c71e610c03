"""The disk tier for a host that has its own memory: what the host writes and reads, what is read ahead for it,
and how that ended.

Control plane, one thread. There is no arena: blocks are written from the host's memory and read into it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Expected, ReadResult
from kvstore.disk.opening import OpenDisk, OpeningDisk
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.history import Learned
from kvstore.store.host_conversations import HostConversations
from kvstore.store.host_writes import HostWrites, Tickets
from kvstore.store.parts import DiskParts
from kvstore.store.progress import Stage, StoreProgress
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import AS_HINT, ReadJob
from kvstore.tiers.queues import Task
from kvstore.tiers.work import ReadDone, TaskDone, WriteDone
from kvstore.tiers.worker import BATCH_BYTES, TierWorker, WorkerLimits

MAX_PREFETCHING = 1 << 12  # blocks
USUAL_BLOCK_BYTES = 128 << 10  # to size what is remembered of conversations; blocks may have any size
REASONS = {
    ReadResult.OK: "", ReadResult.MISSING: "missing", ReadResult.CORRUPT: "damaged",
    ReadResult.MISMATCH: "mismatch", ReadResult.FAILED: "io_error",
}  # fmt: skip


class HostReads:
    """planner: measures reads."""

    def __init__(
        self, tier: DiskTier, io: TierWorker, disk: WriteBack, planner: Planner, tickets: Tickets, stats: StoreStats
    ) -> None:
        self._tier, self._io, self._disk = tier, io, disk
        self._planner, self._tickets, self._stats = planner, tickets, stats
        self._num_reading = self._num_prefetching = 0

    def __len__(self) -> int:
        """The number of reads that somebody waits for."""
        return self._num_reading

    def read(self, wanted: Expected, into: memoryview) -> int:
        """Begin a read. Returns its ticket."""
        ticket = self._tickets.begin()
        if self._disk.contents.contains(wanted.block_id):
            self._num_reading += 1
            self._io.submit_read(ReadJob(ticket, wanted, into))
        else:
            self._tickets.end(ticket, "missing")
        return ticket

    def done(self, done: ReadDone) -> None:
        block_id, num_bytes, result = done.job.record.block_id, done.job.view.nbytes, done.result
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
                self._disk.space.delete_tree(block_id, result=result)
        self._tickets.end(done.job.handle, REASONS[result], num_bytes)

    def prefetch(self, chain: Sequence[BlockId]) -> None:
        """Read the last of these that is stored, and all that it builds on, into the system's page cache: head first,
        behind all other reads, as far as the bound allows. For hosts that give no memory before they ask.
        """
        index = self._disk.contents.index
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


class HostBlocks:
    """See `kvstore.block_store.BlockStore`, which names blocks by keys.

    planner: measures reads. roots: see `HostWrites`. tenant_bytes: what one tenant may have on disk.
    """

    def __init__(
        self, on_disk: OpenDisk, io: TierWorker, steering: Steering, planner: Planner, stats: StoreStats,
        clock: Callable[[], float], roots: Container[BlockId] | None, tenant_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.steering, self.planner, self.stats = steering, planner, stats
        self._io = io
        self.tickets = Tickets()
        self._writes = HostWrites(on_disk, io, steering, stats, clock, self.tickets, roots, tenant_bytes)
        self.disk, self.deletion = self._writes.disk, self._writes.deletion
        self.conversations = HostConversations(steering, self.disk.contents, clock)
        self.reads = HostReads(on_disk.tier, io, self.disk, planner, self.tickets, stats)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is durable."""
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
        if self.deletion.to_erase:
            self.deletion.erase()
        self._writes.go_on()
        return bool(done)

    # -- by hand -----------------------------------------------------------------------------------------------------
    def forget(self, chain: Sequence[BlockId]) -> int:
        """Delete these blocks, head first, and what builds on the last of them, except for what others build on, too.

        Returns how many of them were on disk.
        """
        self._writes.forget(frozenset(chain))
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
        """Writes and deletions."""
        return (lambda: self.tickets.running, self.disk.contents.removing.in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and nothing is left to be written."""
        return not (len(self._writes) or len(self.reads)) and self.disk.is_drained

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        disk = self.disk.stats() | {"reads_in_flight": len(self.reads)}
        store = {**self.stats.as_dict(), **self.planner.as_dict()}
        return {"disk": disk, "store": store, "policy": self.steering.as_dict()}

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self._writes.check_integrity(idle)
        assert not idle or not len(self.reads), f"{len(self.reads)} reads while idle"


def open_host_parts(
    opening: OpeningDisk, capacity_bytes: int, policy: str, name: str, roots: Container[BlockId] | None,
    tenant_bytes: int | None = None,
) -> DiskParts[HostBlocks]:  # fmt: skip
    """opening: is closed with the parts; not if this raises. name: under which the rates of its reads are remembered.
    roots, tenant_bytes: see `HostBlocks`.
    """
    clock, stats, progress = time.time, StoreStats(), StoreProgress()
    learned = Learned(opening.directory.path, name, stats)
    steering = Steering(policy, clock, {"disk": capacity_bytes // USUAL_BLOCK_BYTES}, learned.steering)
    stats.policy_file_errors += steering.state_was_bad
    planner = Planner(block_bytes=1, block_size=1)  # for the rate of reads
    learned.restore(planner)
    disk = opening.join()
    io = TierWorker("disk", disk.tier, progress.wake, WorkerLimits(batch_bytes=min(BATCH_BYTES, capacity_bytes // 32)))
    store = HostBlocks(disk, io, steering, planner, stats, clock, roots, tenant_bytes)
    return DiskParts(opening.directory, threading.RLock(), progress, store, disk.tier, io, learned)
