"""Blocks that are to be written to disk: those that wait in the arena, and those that the writer has.

Control plane, one thread. A dirty slot holds one reference until its write is durable.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.io_queue import IoQueue, Write

PAGE_BYTES = 4096


class WriteQueue:
    """view: the bytes of a slot. num_bytes: that the writer has, as they count in the file."""

    def __init__(self, io: IoQueue, view: Callable[[int], memoryview]) -> None:
        self._io, self._view = io, view
        self.dirty: deque[int] = deque()
        self.submitted: set[int] = set()  # slots that the writer has
        self.num_bytes = 0
        self._of_tenants: Counter[str] = Counter()  # how many bytes of these
        self._unsure: set[int] = set()  # those that may have gone to an environment that was put aside
        self._parents: Counter[BlockId] = Counter()  # of all these

    def file_bytes(self, slot: int) -> int:
        """What an incompressible block takes in the file: whole pages, with the value's header."""
        return (self._view(slot).nbytes // PAGE_BYTES + 1) * PAGE_BYTES

    def bytes_of(self, tenant: str) -> int:
        """Those of a tenant."""
        return self._of_tenants[tenant]

    def is_parent(self, block_id: BlockId) -> bool:
        """Whether one of these builds on this block."""
        return block_id in self._parents

    def add(self, slot: int, record: BlockRecord) -> None:
        self.dirty.append(slot)
        self._parents[record.parent_id] += 1

    def submit_first(self, record: BlockRecord) -> None:
        """The writer gets the first dirty one, which has this record."""
        slot = self.dirty.popleft()
        self._count(slot, record.tenant, 1)
        self.submitted.add(slot)
        self._io.submit_write(Write(slot, record, self._view(slot)))

    def _count(self, slot: int, tenant: str, num: int) -> None:
        self.num_bytes += num * self.file_bytes(slot)
        self._of_tenants[tenant] += num * self.file_bytes(slot)

    def drop_first(self, record: BlockRecord) -> int:
        """The first dirty one is not written; returns its slot."""
        self.remove(record)
        return self.dirty.popleft()

    def ended(self, writes: Sequence[Write]) -> None:
        """The writer does not have these any more."""
        for write in writes:
            self._count(write.slot, write.record.tenant, -1)
        self._of_tenants = +self._of_tenants  # without those of whom nothing is queued
        self.submitted.difference_update(write.slot for write in writes)

    def put_back(self, writes: Sequence[Write]) -> None:
        """They are not on disk, and first in the queue again."""
        self.dirty.extendleft(write.slot for write in reversed(writes))
        self._unsure.difference_update(write.slot for write in writes)

    def remove(self, record: BlockRecord) -> None:
        """It is written, or never will be."""
        self._parents[record.parent_id] -= 1
        if not self._parents[record.parent_id]:
            del self._parents[record.parent_id]

    def doubt_submitted(self) -> None:
        """The environment was put aside: a write that succeeds may have gone there."""
        self._unsure |= self.submitted

    def is_doubtful(self, slot: int) -> bool:
        """Asked once of each write that succeeded."""
        is_so = slot in self._unsure
        self._unsure.discard(slot)
        return is_so
