"""Blocks that are to be written to disk: those that wait in the arena, and those that the writer already has.

Control plane, one thread. A dirty arena block holds one reference until its write is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.in_flight import ParentsInFlight
from kvstore.blocks.records import BlockRecord
from kvstore.blocks.tenant_bytes import TenantBytes
from kvstore.disk.io_queue import IoQueue, Write

PAGE_BYTES = 4096


class WriteQueue:
    """view: the bytes of an arena block. parents: those of the blocks here, kept until the blocks are written. bytes:
    what the writer has, in bytes of the file.
    """

    def __init__(self, io: IoQueue, view: Callable[[int], memoryview], parents: ParentsInFlight) -> None:
        self._io, self._view, self._parents = io, view, parents
        self.dirty: deque[int] = deque()
        self.submitted: set[int] = set()  # arena blocks that the writer has
        self.bytes = TenantBytes()
        self._unsure: set[int] = set()  # those that may have gone to an environment that was set aside

    def file_bytes(self, arena_block: int) -> int:
        """What an incompressible block takes in the file: whole pages, with the value's header."""
        return (self._view(arena_block).nbytes // PAGE_BYTES + 1) * PAGE_BYTES

    def add(self, arena_block: int, record: BlockRecord) -> None:
        self.dirty.append(arena_block)
        self._parents.add(record.parent_id)

    def submit_first(self, record: BlockRecord) -> None:
        """Give the writer the first dirty arena block, which has this record."""
        arena_block = self.dirty.popleft()
        self.bytes.add(record.tenant, self.file_bytes(arena_block))
        self.submitted.add(arena_block)
        self._io.submit_write(Write(arena_block, record, self._view(arena_block)))

    def drop_first(self, record: BlockRecord) -> int:
        """Do not write the first dirty arena block. Returns it."""
        self.remove(record)
        return self.dirty.popleft()

    def ended(self, writes: Sequence[Write]) -> None:
        """The writer no longer has these."""
        for write in writes:
            self.bytes.add(write.record.tenant, -self.file_bytes(write.arena_block))
        self.submitted.difference_update(write.arena_block for write in writes)

    def submit_touched(self, touched: dict[BlockId, float]) -> None:
        """Give the writer times of last use, which go along with the next transaction."""
        self._io.submit_touched(touched)

    def in_flight(self) -> set[int]:
        """Arena blocks that are dirty or that the writer has."""
        return self.submitted.union(self.dirty)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is dirty, or on its way to or from the disk."""
        return not self.dirty and self._io.is_idle

    def put_back(self, writes: Sequence[Write]) -> None:
        """These are not on disk: put them at the head of the queue again."""
        self.dirty.extendleft(write.arena_block for write in reversed(writes))
        self._unsure.difference_update(write.arena_block for write in writes)

    def remove(self, record: BlockRecord) -> None:
        """A block was written, or never will be."""
        self._parents.remove(record.parent_id)

    def doubt_submitted(self) -> None:
        """The environment was set aside: a write that succeeds may have gone there."""
        self._unsure |= self.submitted

    def is_doubtful(self, arena_block: int) -> bool:
        """Whether a write that succeeded may have gone elsewhere. Ask once for each."""
        is_so = arena_block in self._unsure
        self._unsure.discard(arena_block)
        return is_so
