"""The disk for a host that has its own memory: what the host writes and reads, what is read ahead for it, and how that
ended.

Control plane, one thread. A job's memory is the host's: blocks are written from there and read into it, without a copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Expected, Finished, ReadResult
from kvstore.disk.format import WriteError
from kvstore.disk.opening import OpenDisk
from kvstore.memory.tier import CpuTier
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.context import Identity, Stage, StoreContext
from kvstore.store.deletion import Deletion
from kvstore.store.host_conversations import HostConversations
from kvstore.store.stored import StoredBlocks
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import AS_HINT, ReadDone, ReadJob, TaskDone, WriteDone
from kvstore.tiers.queues import Task
from kvstore.tiers.worker import TierWorker

MAX_PREFETCHING = 1 << 12  # blocks
MAX_WRITE_BYTES, MAX_BUFFERS = 256 << 20, 4096  # that wait or are being written
NO_ROOM = {WriteError.MAP_FULL, WriteError.NO_SPACE}
REASONS = {
    ReadResult.OK: "", ReadResult.MISSING: "missing", ReadResult.CORRUPT: "damaged",
    ReadResult.MISMATCH: "mismatch", ReadResult.FAILED: "io_error",
}  # fmt: skip


@dataclass(slots=True)
class Lent:
    """A buffer of the host with a block to be written. tickets: those of all who asked for it. why_not: it was not
    written, if it comes to that.
    """

    view: memoryview
    tickets: list[int]
    why_not: str = "no_room"


class HostBlocks:
    """See `kvstore.block_store.BlockStore`, which names blocks by keys. A failed write is not tried again, as the host
    wants its memory back.

    What the host has lent is a staging area: a buffer stands for an arena block until it is written or given up.

    planner: measures reads. roots: the parents of blocks that have none; None: whoever writes knows that the block
    before is there. tenant_bytes: what one tenant may have on disk.
    """

    def __init__(
        self, on_disk: OpenDisk, io: TierWorker, steering: Steering, planner: Planner, stats: StoreStats,
        clock: Callable[[], float], roots: Container[BlockId] | None, tenant_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.steering, self.planner, self.stats = steering, planner, stats
        self._tier, self._io, self._roots = on_disk.tier, io, roots
        self._most_lent_bytes = min(MAX_WRITE_BYTES, on_disk.tier.file.capacity_bytes // 4)
        self._cpu = CpuTier(MAX_BUFFERS, keep=False, clock=clock, on_free=self._give_back)
        self._lent: dict[int, Lent] = {}
        self._num_lent_bytes = 0
        context = StoreContext(self._cpu, lambda arena_block: self._lent[arena_block].view, steering, stats, clock)
        self.disk = WriteBack(context, on_disk, io, tenant_bytes)
        stored = StoredBlocks(context, self.disk.contents, None, Identity(b"", "", block_size=1))
        self.deletion = Deletion(context, self.disk, 0, stored, lambda: ())
        self.conversations = HostConversations(steering, self.disk.contents, clock)
        self._num_tickets = self._num_reading = self._num_prefetching = 0
        self._since: dict[int, float] = {}  # when each ticket was given that has not ended
        self._finished: deque[Finished] = deque()

    # -- tickets -----------------------------------------------------------------------------------------------------
    def _begin(self) -> int:
        self._num_tickets += 1
        self._since[self._num_tickets] = time.perf_counter()
        return self._num_tickets

    def _end(self, ticket: int, reason: str, num_bytes: int = 0) -> None:
        """reason: why it failed; "" if it did not."""
        seconds = time.perf_counter() - self._since.pop(ticket)
        self._finished.append(Finished(ticket, not reason, reason, 0 if reason else num_bytes, seconds))

    def collect(self) -> list[Finished]:
        """What has ended since the last call."""
        found = list(self._finished)
        self._finished.clear()
        return found

    # -- reads -------------------------------------------------------------------------------------------------------
    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is durable."""
        return self.disk.contents.contains(block_id)

    def is_writing(self, block_id: BlockId) -> bool:
        """Whether its write has not ended, and it was not given up."""
        return self._cpu.arena_block_of(block_id) is not None

    def read(self, wanted: Expected, into: memoryview) -> int:
        """Begin a read. Returns its ticket."""
        ticket = self._begin()
        if self.contains(wanted.block_id):
            self._num_reading += 1
            self._io.submit_read(ReadJob(ticket, wanted, into))
        else:
            self._end(ticket, "missing")
        return ticket

    def _read_done(self, done: ReadDone) -> None:
        block_id, num_bytes, result = done.job.record.block_id, done.job.view.nbytes, done.result
        self._num_reading -= 1
        if result is ReadResult.OK:
            self.stats.read += 1
            self.planner.read(num_bytes, done.seconds, done.num_active)
        else:
            if result is ReadResult.MISMATCH:
                header = self._tier.header(block_id)
                if header is not None and header.raw_bytes == num_bytes:
                    result = ReadResult.CORRUPT  # intact, but not the block that the index says
            self.lost(block_id, result)
        self._end(done.job.handle, REASONS[result], num_bytes)

    def lost(self, block_id: BlockId, result: ReadResult) -> None:
        """A read has failed. What is missing or damaged goes, with all that builds on it."""
        self.stats.read_failures[result.value] = self.stats.read_failures.get(result.value, 0) + 1
        if result in (ReadResult.MISSING, ReadResult.CORRUPT) and self.contains(block_id):
            self.disk.delete_tree(block_id, result=result)

    def prefetch(self, chain: Sequence[BlockId]) -> None:
        """Read the last of these that is stored, and all that it builds on, into the system's page cache: head first,
        behind all other reads, as far as the bound allows. For hosts that give no memory before they ask.
        """
        index = self.disk.contents.index
        entry = next((entry for block_id in reversed(chain) if (entry := index.get(block_id)) is not None), None)
        stored: list[BlockId] = []
        while entry is not None and len(stored) < len(index):  # a host may have named two as each other's parents
            stored.append(entry.block_id)
            entry = index.get(entry.parent_id)
        for block_id in stored[::-1][: MAX_PREFETCHING - self._num_prefetching]:
            self._io.submit_read(Task(self._num_prefetching, partial(self._tier.warm, block_id)), AS_HINT)
            self._num_prefetching += 1
            self.stats.prefetched += 1

    # -- writes ------------------------------------------------------------------------------------------------------
    def write(self, record: BlockRecord, view: memoryview, name: str | None) -> int | None:
        """Begin a write. Returns its ticket; None if too many wait, writing is paused, or it would evict others for
        nothing. name: the conversation's.
        """
        if self.contains(record.block_id):
            ticket = self._begin()
            self._end(ticket, "")
        elif (lent_at := self._cpu.arena_block_of(record.block_id)) is not None:
            ticket = self._begin()
            self._lent[lent_at].tickets.append(ticket)
        elif (arena_block := self._room_for(record, view)) is not None:
            ticket = self._begin()
            self._lent[arena_block] = Lent(view, [ticket])
            self._num_lent_bytes += view.nbytes
            owner = self.conversations.owner(name, record.block_id, record.parent_id)
            self._cpu.announce(arena_block, record, owner)
            self._cpu.publish(arena_block)
            self.disk.add_dirty(arena_block)
            self._go_on()
        else:
            self.stats.refused_writes += 1
            self._go_on()
            return None
        return ticket

    def _room_for(self, record: BlockRecord, view: memoryview) -> int | None:
        """A place for a buffer; None if it is not to be written now."""
        has_room = self._num_lent_bytes + view.nbytes <= self._most_lent_bytes
        if not has_room or self.disk.health.is_paused or not self._is_of_use(record, view):
            return None
        return self._cpu.reserve()

    def _is_of_use(self, record: BlockRecord, view: memoryview) -> bool:
        """False if others would be evicted for a block that nobody could use, as its parent is not there."""
        parent_id = record.parent_id
        is_there = self._roots is None or parent_id in self._roots or self.contains(parent_id)
        if is_there or self._cpu.arena_block_of(parent_id) is not None:
            return True
        return self._tier.file.excess_bytes(self._num_lent_bytes + view.nbytes) <= 0

    def _go_on(self) -> None:
        """Hand the next blocks to the writer. Called once per poll, and after every new write."""
        self.disk.pump()
        if self.disk.dirty and self.disk.health.is_paused:
            if self.disk.health.error not in NO_ROOM:
                for lent in self._lent.values():  # what is being written may build on what waits, and goes later
                    lent.why_not = "io_error"
            self.disk.refuse_waiting()

    def _give_back(self, arena_block: int) -> None:
        """The disk is done with a buffer."""
        lent, record = self._lent.pop(arena_block), self._cpu.record(arena_block)
        assert record is not None
        self._num_lent_bytes -= lent.view.nbytes
        for ticket in lent.tickets:
            self._end(ticket, "" if self.contains(record.block_id) else lent.why_not, lent.view.nbytes)

    def end_request(self, name: str, chain: Sequence[BlockId]) -> None:
        """After the last one what waits for a batch is written now: no more comes, and a host may be awake until it is
        durable.
        """
        self.conversations.finish(name, chain)
        if not self.conversations.num_open:
            self._go_on()
            self._io.hurry()

    def poll(self) -> bool:
        """Collect what the threads have finished, and go on. Returns whether there was anything."""
        done = self._io.completed()
        for each in done:
            if isinstance(each, WriteDone):
                self.disk.write_done(each)
            elif isinstance(each, ReadDone):
                self._read_done(each)
            elif isinstance(each, TaskDone):
                self._num_prefetching -= 1
        self.steering.poll(is_idle=not self.conversations.num_open)
        self.conversations.poll()
        self._go_on()
        self._cpu.erase_stale()  # no record of what was written stays
        return bool(done)

    # -- deletion ----------------------------------------------------------------------------------------------------
    def forget_chain(self, chain: Sequence[BlockId]) -> int:
        """Delete these blocks, head first, and what builds on the last of them, except for what others build on, too.
        Returns how many of them were on disk.
        """
        named = frozenset(chain).union(self.disk.with_descendants(chain[-1:]))
        waiting = [record for one in self._lent if (record := self._cpu.record(one)) and self._cpu.is_current(one)]
        needed = {record.parent_id for record in waiting if record.block_id not in named}
        named = named.difference(chain[: max((i for i, one in enumerate(chain, 1) if one in needed), default=0)])
        for block_id in named:
            if (arena_block := self._cpu.arena_block_of(block_id)) is not None:
                self._lent[arena_block].why_not = "forgotten"
                self._cpu.forget(block_id)
        doomed, _ = self.disk.select(Evict(block_ids=named))
        self.disk.delete(doomed)
        self.steering.forget(doomed)
        self.stats.forgotten += len(doomed)
        return len(doomed)

    # -- looking after -----------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Prepare for closing."""
        self.disk.finish()

    def stages(self) -> Sequence[Stage]:
        """Writes and deletions."""
        return (self._since.keys, self.disk.contents.removing.in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and nothing is left to be written."""
        return self.disk.is_drained

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters."""
        disk = self.disk.stats() | {"reads_in_flight": self._num_reading}
        store = {**self.stats.as_dict(), **self.planner.as_dict()}
        return {"disk": disk, "store": store, "policy": self.steering.as_dict()}

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is held."""
        self._cpu.check_integrity(idle)
        assert self._num_lent_bytes == sum(lent.view.nbytes for lent in self._lent.values()), "bytes disagree"
        assert not idle or not self._since, f"{len(self._since)} tickets have not ended while idle"
