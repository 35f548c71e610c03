"""The memory that a host has lent, each buffer until its block is written or given up.

Control plane, one thread. Knows no disk: it is the tier above it, in the place of a `CpuTier`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from kvstore.blocks.forest import ParentsInFlight, children_of, with_descendants
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.policy.conversation import Conversation

MAX_BUFFERS = 4096


@dataclass(slots=True, eq=False)
class Lent:
    """A buffer with a block to be written. tickets: those of all who asked for it; the first is its handle."""

    record: BlockRecord
    view: memoryview
    owner: Conversation
    tickets: list[int]
    is_forgotten: bool = False


class HostMemory:
    """most_bytes: of all buffers. on_release: called with each buffer that is the host's again."""

    def __init__(self, most_bytes: int, on_release: Callable[[Lent], None]) -> None:
        self._most_bytes, self._on_release = most_bytes, on_release
        self._lent: dict[int, Lent] = {}
        self._handles: dict[BlockId, int] = {}  # of what was not given up
        self.num_bytes = 0
        self.parents_in_flight = ParentsInFlight()

    def __len__(self) -> int:
        return len(self._lent)

    def has_room(self, num_bytes: int) -> bool:
        return len(self._lent) < MAX_BUFFERS and self.num_bytes + num_bytes <= self._most_bytes

    def borrow(self, lent: Lent) -> int:
        """Take over a buffer; returns its handle."""
        handle = lent.tickets[0]
        self._lent[handle], self._handles[lent.record.block_id] = lent, handle
        self.num_bytes += lent.view.nbytes
        return handle

    def buffer_of(self, block_id: BlockId) -> Lent | None:
        """The buffer of a block that was not given up."""
        handle = self._handles.get(block_id)
        return None if handle is None else self._lent[handle]

    def view(self, handle: int) -> memoryview:
        return self._lent[handle].view

    # -- what the disk asks, as of a `CpuTier` -----------------------------------------------------------------------
    def record(self, handle: int) -> BlockRecord:
        return self._lent[handle].record

    def conversation(self, handle: int) -> Conversation:
        return self._lent[handle].owner

    def is_current(self, handle: int) -> bool:
        return self._handles.get(self.record(handle).block_id) == handle

    def release(self, handle: int) -> None:
        lent = self._lent[handle]
        if self.is_current(handle):
            del self._handles[lent.record.block_id]
        del self._lent[handle]
        self.num_bytes -= lent.view.nbytes
        self._on_release(lent)

    def hold_all_but(self, handles: Collection[int]) -> tuple[int, ...]:
        """Nothing: a buffer is here only while it waits or is written."""
        return ()

    def forget(self, block_id: BlockId) -> None:
        self._handles.pop(block_id, None)

    def is_needed(self, block_id: BlockId) -> bool:
        return block_id in self.parents_in_flight or block_id in self._handles

    def absent_parents(self) -> list[BlockId]:
        return [block_id for block_id in children_of(self._records()) if block_id not in self._handles]

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        return with_descendants(block_ids, self._records())

    def _records(self) -> Iterator[BlockRecord]:
        """Of what was not given up."""
        return (self._lent[handle].record for handle in self._handles.values())

    def select(self, what: Evict) -> list[BlockId]:
        """Blocks that `what` means. All of them were used just now."""
        if what.unused_for_s or what.to_bytes is not None or what == Evict(dry_run=what.dry_run):
            return []
        found = [record for record in self._records() if what.model in (None, record.model)]
        return [one.block_id for one in found if what.block_ids is None or one.block_id in what.block_ids]

    def check_integrity(self, idle: bool) -> None:
        """Assert that counts agree; with `idle`, that nothing is borrowed."""
        assert self.num_bytes == sum(lent.view.nbytes for lent in self._lent.values()), "bytes disagree"
        assert self._handles.keys() <= {lent.record.block_id for lent in self._lent.values()}, "a lost buffer"
        assert not idle or not (self._lent or self.parents_in_flight), "memory of the host is borrowed while idle"
