"""What a host has asked for and not yet collected; and its writes, while its memory is borrowed for them.

Control plane, one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Finished
from kvstore.disk.format import WriteError
from kvstore.disk.opening import OpenDisk
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.deletion import Deletion
from kvstore.store.stored import StoreContext
from kvstore.store.write_back import WriteBack
from kvstore.tiers.work import WriteDone
from kvstore.tiers.worker import TierWorker

MAX_WRITES = 4096  # that are waiting or running
MAX_WRITE_BYTES = 256 << 20
NO_ROOM = {WriteError.MAP_FULL, WriteError.NO_SPACE}


class Tickets:
    """Each ticket is handed out once, and collected once when it has ended."""

    def __init__(self) -> None:
        self._num = 0
        self._since: dict[int, float] = {}
        self._finished: deque[Finished] = deque()

    def __bool__(self) -> bool:
        """Whether there is one that was not collected."""
        return bool(self._since or self._finished)

    @property
    def running(self) -> Collection[int]:
        """Tickets that have not ended."""
        return self._since.keys()

    def begin(self) -> int:
        self._num += 1
        self._since[self._num] = time.perf_counter()
        return self._num

    def end(self, ticket: int, reason: str, num_bytes: int = 0) -> None:
        """End a ticket. reason: why it failed; "" if it did not."""
        seconds = time.perf_counter() - self._since.pop(ticket)
        self._finished.append(Finished(ticket, not reason, reason, 0 if reason else num_bytes, seconds))

    def collect(self) -> list[Finished]:
        found = list(self._finished)
        self._finished.clear()
        return found


@dataclass(slots=True)
class _Borrowed:
    """Memory of the host. tickets: those of all who asked for this block. reason: why it is not written, in case it is
    not.
    """

    block_id: BlockId
    view: memoryview
    tickets: list[int] = field(default_factory=list)
    reason: str = "no_room"


class HostWrites:
    """Bounded in number and bytes. A failed write is not tried again, as the host wants its memory back.

    roots: the parents of blocks that have none; None: whoever writes knows that the block before is there.
    tenant_bytes: what one tenant may have on disk. disk: where they are written. deletion: deletes blocks here and on
    disk.
    """

    def __init__(
        self, on_disk: OpenDisk, io: TierWorker, steering: Steering, stats: StoreStats, clock: Callable[[], float],
        tickets: Tickets, roots: Container[BlockId] | None, tenant_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._tier, self._roots = on_disk.tier, roots
        self._stats = stats
        self._tickets = tickets
        self._borrowed: dict[int, _Borrowed] = {}  # by arena block
        self._num_bytes = 0
        self._max_bytes = min(MAX_WRITE_BYTES, on_disk.tier.file.capacity_bytes // 4)
        # Has no arena: each of its blocks stands for a buffer of the host while that is being written.
        self._cpu = CpuTier(MAX_WRITES, keep=False)
        context = StoreContext(self._cpu, lambda arena_block: self._borrowed[arena_block].view, steering, stats, clock)
        self.disk = WriteBack(context, on_disk, io, tenant_bytes)
        self.deletion = Deletion(context, self.disk, 1, tuple)

    def __len__(self) -> int:
        return len(self._borrowed)

    def write(
        self, record: BlockRecord, view: memoryview, owner: Callable[[BlockId, BlockId], Conversation]
    ) -> int | None:
        """Begin a write. Returns its ticket; None if too many wait, writing is paused, or it would evict others for
        nothing.

        owner: finds the owner of a block by its id and its parent's.
        """
        arena_block = self._cpu.arena_block_of(record.block_id)
        if arena_block is None:
            may_wait = self._num_bytes + view.nbytes <= self._max_bytes and not self.disk.health.is_paused
            arena_block = self._cpu.reserve() if may_wait and self._is_worth_room(record, view.nbytes) else None
            if arena_block is None:
                self._stats.refused_writes += 1
                return None
            self._borrowed[arena_block] = _Borrowed(record.block_id, view)
            self._num_bytes += view.nbytes
            self._cpu.announce(arena_block, record, owner(record.block_id, record.parent_id))
            self._cpu.publish(arena_block)
            self.disk.add_dirty(arena_block)
        ticket = self._tickets.begin()
        self._borrowed[arena_block].tickets.append(ticket)
        return ticket

    def _is_worth_room(self, record: BlockRecord, num_bytes: int) -> bool:
        """False if others would be evicted for a block that nobody could use, as its parent is not there."""
        parent_id = record.parent_id
        if (
            self._roots is None
            or parent_id in self._roots
            or self.disk.contents.contains(parent_id)
            or self._cpu.arena_block_of(parent_id) is not None
        ):
            return True
        return self._tier.file.excess_bytes(self._num_bytes + num_bytes) <= 0

    def done(self, done: WriteDone) -> None:
        """A transaction has ended."""
        self.disk.write_done(done)
        self._give_back()

    def go_on(self) -> None:
        """Hand the next blocks to the writer. Called once per poll, and after every new write."""
        self.disk.pump()
        if self.disk.queue.dirty and self.disk.health.is_paused:
            for arena_block in self.disk.queue.dirty:
                self._borrowed[arena_block].reason = "no_room" if self.disk.health.error in NO_ROOM else "io_error"
            self.disk.refuse_waiting()
        self._give_back()

    def _give_back(self) -> None:
        """Give back the memory of blocks that the disk is done with."""
        queue = self.disk.queue
        if len(self._borrowed) == len(queue.dirty) + len(queue.submitted):
            return
        for arena_block in self._borrowed.keys() - queue.submitted.union(queue.dirty):
            borrowed = self._borrowed.pop(arena_block)
            self._num_bytes -= borrowed.view.nbytes
            reason = "" if self.disk.contents.contains(borrowed.block_id) else borrowed.reason
            for ticket in borrowed.tickets:
                self._tickets.end(ticket, reason, borrowed.view.nbytes)

    def forget(self, block_ids: frozenset[BlockId]) -> None:
        """Give these up. Those that are being written are deleted as soon as that has ended."""
        for borrowed in self._borrowed.values():
            if borrowed.block_id in block_ids:
                borrowed.reason = "forgotten"
                self._cpu.forget(borrowed.block_id)

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is borrowed."""
        self._cpu.check_integrity(idle)
        assert self._num_bytes == sum(one.view.nbytes for one in self._borrowed.values()), "bytes disagree"
        assert not idle or not self._borrowed, "memory of the host is borrowed while idle"
