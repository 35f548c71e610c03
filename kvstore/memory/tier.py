"""The CPU tier: which block lies in which slot of the arena, and whether its bytes have landed.

Owns slots and records, not bytes: the arena is given, or there is none when a trace is replayed. One thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial

from kvstore.blocks.ends import Order
from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.in_flight import ParentsInFlight
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.blocks.selection import Candidate, select
from kvstore.policy.conversation import Conversation


class SlotState(Enum):
    """The state of a slot that somebody holds or that has a record."""

    EMPTY = "empty"
    PENDING = "pending"  # findable, but its bytes are still on their way
    READY = "ready"  # loadable
    FAILED = "failed"  # its bytes will never come: whoever waits for it computes


class CpuTier:
    """Slots 0 .. num_slots - 1. A slot is written only while it is not READY, and reused only when nobody holds it.

    num_slots: capacity. erase: overwrite the bytes of these slots (after a deletion). keep: False makes the arena a
    staging area, which forgets a block when the last holder releases it. order: the order of conversations on this
    tier. holdings: where it reports what can be loaded.
    """

    def __init__(
        self, num_slots: int, erase: Callable[[Sequence[int]], None] = lambda slots: None, keep: bool = True,
        order: Order | None = None, clock: Callable[[], float] = time.time, holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self.pool = BlockPool(num_slots, order, None if holdings is None else partial(holdings.gone, Place.CPU))
        self.keep = keep
        self._holdings = holdings
        self.num_removed = 0  # READY blocks that were given up for other reasons than room
        self._erase = erase
        self._clock = clock
        self._states = [SlotState.EMPTY] * num_slots
        self._records: list[BlockRecord | None] = [None] * num_slots
        self._conversations: list[Conversation | None] = [None] * num_slots
        self._last_used_s = [0.0] * num_slots
        self.parents_in_flight = ParentsInFlight()

    def slot_of(self, block_id: BlockId) -> int | None:
        """The slot of this block, PENDING or READY."""
        return self.pool.lookup(block_id)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def record(self, slot: int) -> BlockRecord | None:
        return self._records[slot]

    def conversation(self, slot: int) -> Conversation | None:
        """Whose request brought the block."""
        return self._conversations[slot]

    def reserve(self) -> int | None:
        """Take an empty slot, or the one that is evicted next, with one reference. None if everything is held."""
        slot = self.pool.try_allocate()
        if slot is not None:
            self._states[slot], self._records[slot] = SlotState.EMPTY, None
        return slot

    def announce(self, slot: int, record: BlockRecord, conversation: Conversation | None = None) -> bool:
        """From now on the slot is found under this record's id, PENDING. False if another slot has that block."""
        assert self._states[slot] is SlotState.EMPTY
        # What a staging area holds is on its way to or from disk: closure under parents is the disk's concern.
        parent_id, owner = (record.parent_id, conversation) if self.keep else (None, None)
        if not self.pool.insert(slot, record.block_id, parent_id, owner):
            return False
        self._conversations[slot] = conversation
        self._states[slot], self._records[slot], self._last_used_s[slot] = SlotState.PENDING, record, self._clock()
        self.parents_in_flight.add(record.parent_id)
        return True

    def publish(self, slot: int) -> None:
        """Its bytes have landed and were checked."""
        assert self._states[slot] is SlotState.PENDING
        self._landed(slot, SlotState.READY)

    def spoil(self, slot: int) -> None:
        """Some of its tokens will not come, and it has no id yet: it will never get one."""
        assert self._states[slot] is SlotState.EMPTY
        self._states[slot] = SlotState.FAILED

    def fail(self, slot: int) -> list[int]:
        """Its bytes will not come: forget it and what hangs below it. Returns all forgotten slots."""
        num_before = self.pool.num_forgotten
        gone = self.pool.forget(slot)
        pending = [one for one in gone if self._states[one] is SlotState.PENDING]
        for one in pending:
            self._landed(one, SlotState.FAILED)
        if self.keep:
            self.num_removed += self.pool.num_forgotten - num_before - len(pending)
        return gone

    def _landed(self, slot: int, state: SlotState) -> None:
        record = self._records[slot]
        assert record is not None
        self._states[slot] = state
        if self._holdings is not None and state is SlotState.READY:
            self._holdings.stored_record(Place.CPU, record)
        self.parents_in_flight.remove(record.parent_id)

    def is_needed(self, block_id: BlockId) -> bool:
        """Whether somebody uses this block here, or a block that is here or in flight builds on it."""
        if block_id in self.parents_in_flight:
            return True
        slot = self.pool.lookup(block_id)
        return slot is not None and (not self.pool.is_free(slot) or slot in self.pool.tree.links.children_of)

    def is_current(self, slot: int) -> bool:
        """Whether the content of this slot can be found."""
        return self.pool.block_id(slot) is not None

    def forget(self, block_id: BlockId) -> int:
        """Give up a block and what hangs below it; returns how many. Holders keep their slots until they release."""
        slot = self.pool.lookup(block_id)
        return 0 if slot is None else len(self.fail(slot))

    def acquire(self, slot: int) -> None:
        self.pool.acquire((slot,))

    def release(self, slot: int) -> None:
        """Give back one reference."""
        self.pool.release((slot,))
        if not self.keep and self.pool.is_free(slot) and self.is_current(slot):
            self.fail(slot)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """These blocks, head first, were used just now. The time is noted at the last one: the others stay with it.

        conversation: whose they are.
        """
        slots = [slot for slot in map(self.slot_of, chain) if slot is not None]
        if slots:
            self._last_used_s[slots[-1]] = self._clock()
            self.pool.touch(slots, conversation if self.keep else None)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """Give these blocks, head first, to this conversation, as far as they are here."""
        if self.keep:
            self.pool.touch([slot for slot in map(self.slot_of, chain) if slot is not None], conversation)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """Let a splice's first block be evicted before the block in front of it, although it names another parent."""
        slot, parent = self.pool.lookup(block_id), self.pool.lookup(parent_id)
        if slot is not None and parent is not None and self.keep:
            self.pool.tree.link(slot, parent)

    def keep_blank(self, num_slots: int) -> None:
        """Evict until so many slots are empty, as far as possible, so that a read finds one at once."""
        while self.pool.num_blank < num_slots and self.pool.evict_one() is not None:
            pass

    def erase_stale(self) -> None:
        """Overwrite slots that nobody holds and no id leads to."""
        stale = self.pool.take_stale()
        for slot in stale:  # a record holds the tokens
            self._records[slot] = self._conversations[slot] = None
        self._erase(stale)

    def _children(self) -> dict[BlockId, list[BlockId]]:
        """For each block, here or not, those here that build on it, linked or not."""
        children: dict[BlockId, list[BlockId]] = {}
        for record in map(self.record, self.pool.cached_blocks()):
            assert record is not None
            children.setdefault(record.parent_id, []).append(record.block_id)
        return children

    def absent_parents(self) -> list[BlockId]:
        """Blocks that others here build on, and which are not here."""
        return [block_id for block_id in self._children() if self.slot_of(block_id) is None]

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks, here or not, and all that builds on them here, parents before children."""
        children, found = self._children(), list(dict.fromkeys(block_ids))
        given = set(found)
        for block_id in found:
            found += [child for child in children.pop(block_id, ()) if child not in given]
        return found

    def select(self, what: Evict, block_bytes: int) -> list[BlockId]:
        """All blocks that `what` means; see `kvstore.blocks.selection`."""

        def candidate(slot: int) -> Candidate:
            record = self._records[slot]
            assert record is not None
            return Candidate(record.block_id, record.model, self._last_used_s[slot], block_bytes)

        num_bytes = self.pool.num_cached * block_bytes
        slots = select(what, self.pool.tree.links, candidate, self.slot_of, num_bytes, self._clock())
        ids = [record.block_id for record in map(self.record, slots) if record is not None]
        # Nothing is linked in a staging area, and what waits to be written must not lose its parent.
        return ids if self.keep else [one for one in self.with_descendants(ids) if self.slot_of(one) is not None]

    def as_dict(self, block_bytes: int) -> dict[str, object]:
        """Gauges and counters. A staging area has no blocks of its own."""
        pool = self.pool
        return {
            "blocks": pool.num_blocks if self.keep else 0,
            "staging_blocks": 0 if self.keep else pool.num_blocks,
            "cached_blocks": pool.num_cached,
            "free_blocks": pool.num_free,
            "evicted_blocks": pool.num_evictions,
            "removed_blocks": self.num_removed,
            "block_bytes": block_bytes,
        }

    def check_integrity(self, idle: bool = True) -> None:
        """Assert that states, records and the pool agree; with `idle`, that nobody holds a slot."""
        self.pool.check_integrity(idle)
        for slot in self.pool.cached_blocks():
            state, record = self._states[slot], self._records[slot]
            assert record is not None and record.block_id == self.pool.block_id(slot), f"slot {slot}: another record"
            assert state in (SlotState.PENDING, SlotState.READY), f"slot {slot}: {state}"
            assert not idle or state is SlotState.READY, f"slot {slot} is in flight while idle"
        assert not idle or not self.parents_in_flight, f"{len(self.parents_in_flight)} parents are kept while idle"
