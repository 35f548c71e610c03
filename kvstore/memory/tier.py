"""The CPU tier: which block lies where in the arena, and whether its bytes have landed.

Owns their states and records, not bytes: the arena is given, or there is none when a trace is replayed. One thread.
"""

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial

from kvstore.blocks.forest import Candidate, InFlight, children_of, select, with_descendants
from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import EvictionOrder
from kvstore.stats import Losses


class ArenaBlockState(Enum):
    """The state of an arena block that somebody holds or that has a record."""

    EMPTY = "empty"
    PENDING = "pending"  # findable, but its bytes are still on their way
    READY = "ready"  # loadable
    FAILED = "failed"  # its bytes will never come: whoever waits for it computes


class CpuTier:
    """Arena blocks 0 .. num_arena_blocks - 1. Each is written only while not READY, and reused only when not held.

    erase: overwrite the bytes of these arena blocks (after a deletion). keep: False makes the arena a staging area,
    which forgets a block when the last holder releases it, and calls on_free with its arena block. order: the order of
    conversations on this tier. holdings: where it reports what can be loaded. losses: where it notes what it gives up;
    None where a disk has that.
    """

    def __init__(
        self, num_arena_blocks: int, erase: Callable[[Sequence[int]], None] = lambda _: None, keep: bool = True,
        order: EvictionOrder | None = None, clock: Callable[[], float] = time.time, holdings: Holdings | None = None,
        losses: Losses | None = None, on_free: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        on_gone = [] if holdings is None else [partial(holdings.gone, Place.CPU)]
        on_gone += [] if losses is None else [partial(losses.note, "evicted", "cpu")]
        self.pool = BlockPool(num_arena_blocks, order, on_gone, self._holds_state)
        self.keep = keep
        self._holdings, self._on_free = holdings, on_free
        self.num_removed = 0  # READY blocks that were given up for other reasons than room
        self._erase = erase
        self._clock = clock
        self._states = [ArenaBlockState.EMPTY] * num_arena_blocks
        self._records: list[BlockRecord | None] = [None] * num_arena_blocks
        self._conversations: list[Conversation | None] = [None] * num_arena_blocks
        self._last_used_s = [0.0] * num_arena_blocks
        self.parents_in_flight = InFlight[BlockId]()

    def _holds_state(self, arena_block: int) -> bool:
        record = self._records[arena_block]
        return record is not None and record.is_state

    def arena_block_of(self, block_id: BlockId) -> int | None:
        """Where this block lies in the arena, PENDING or READY."""
        return self.pool.lookup(block_id)

    def state(self, arena_block: int) -> ArenaBlockState:
        return self._states[arena_block]

    def record(self, arena_block: int) -> BlockRecord | None:
        return self._records[arena_block]

    def conversation(self, arena_block: int) -> Conversation | None:
        """Whose request brought the block."""
        return self._conversations[arena_block]

    def reserve(self) -> int | None:
        """Take an empty arena block, or the next to be evicted, with one reference. None if everything is held."""
        arena_block = self.pool.try_allocate()
        if arena_block is not None:
            self._states[arena_block], self._records[arena_block] = ArenaBlockState.EMPTY, None
        return arena_block

    def announce(self, arena_block: int, record: BlockRecord, conversation: Conversation | None = None) -> bool:
        """From now on it is found under this record's id, PENDING. False if that block lies in another arena block."""
        assert self._states[arena_block] is ArenaBlockState.EMPTY
        # What a staging area holds is on its way to or from disk: closure under parents is the disk's concern.
        parent_id, owner = (record.parent_id, conversation) if self.keep else (None, None)
        if not self.pool.insert(arena_block, record.block_id, parent_id, owner):
            return False
        self._records[arena_block], self._conversations[arena_block] = record, conversation
        self._states[arena_block], self._last_used_s[arena_block] = ArenaBlockState.PENDING, self._clock()
        self.parents_in_flight[record.parent_id] += 1
        return True

    def publish(self, arena_block: int) -> None:
        """Its bytes have landed and were checked."""
        assert self._states[arena_block] is ArenaBlockState.PENDING
        self._landed(arena_block, ArenaBlockState.READY)

    def spoil(self, arena_block: int) -> None:
        """Some of its tokens will not come, and it has no id yet: it will never get one."""
        assert self._states[arena_block] is ArenaBlockState.EMPTY
        self._states[arena_block] = ArenaBlockState.FAILED

    def fail(self, arena_block: int) -> list[int]:
        """Its bytes will not come: forget it and what hangs below it. Returns all that were forgotten."""
        num_before = self.pool.num_forgotten
        gone = self.pool.forget(arena_block)
        pending = [one for one in gone if self._states[one] is ArenaBlockState.PENDING]
        for one in pending:
            self._landed(one, ArenaBlockState.FAILED)
        if self.keep:
            self.num_removed += self.pool.num_forgotten - num_before - len(pending)
        return gone

    def _landed(self, arena_block: int, state: ArenaBlockState) -> None:
        record = self._records[arena_block]
        assert record is not None
        self._states[arena_block] = state
        if self._holdings is not None and state is ArenaBlockState.READY:
            self._holdings.stored_record(Place.CPU, record)
        self.parents_in_flight.end(record.parent_id)

    def is_needed(self, block_id: BlockId, without: Container[BlockId] = frozenset()) -> bool:
        """Whether somebody uses this block here, or a block that is here or in flight builds on it. without: as if
        these were gone.
        """
        if block_id in self.parents_in_flight:
            return True
        one, pool = self.pool.lookup(block_id), self.pool
        if one is None or block_id in without:
            return False
        children = pool.tree.links.children(one)
        return not pool.is_free(one) or any(pool.block_id(child) not in without for child in children)

    def is_current(self, arena_block: int) -> bool:
        """Whether its content can be found."""
        return self.pool.block_id(arena_block) is not None

    def forget(self, block_id: BlockId) -> int:
        """Give up a block and what hangs below it; returns how many. Holders keep its memory until they release it."""
        arena_block = self.pool.lookup(block_id)
        return 0 if arena_block is None else len(self.fail(arena_block))

    def acquire(self, arena_block: int) -> None:
        self.pool.acquire((arena_block,))

    def release(self, arena_block: int) -> None:
        """Give back one reference."""
        self.pool.release((arena_block,))
        if not self.keep and self.pool.is_free(arena_block):
            if self.is_current(arena_block):
                self.fail(arena_block)
            self._on_free(arena_block)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """These blocks, head first, were used just now. The time is noted at the last one: the others stay with it.

        conversation: whose they are.
        """
        arena_blocks = [one for one in map(self.arena_block_of, chain) if one is not None]
        if arena_blocks:
            self._last_used_s[arena_blocks[-1]] = self._clock()
            self.pool.touch(arena_blocks, conversation if self.keep else None)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation, keeps_pin: bool = False) -> None:
        """Give these blocks, head first, to this conversation, as far as they are here. keeps_pin: see
        `EvictionTree.claim`.
        """
        if self.keep:
            here = [one for one in map(self.arena_block_of, chain) if one is not None]
            self.pool.touch(here, conversation, keeps_pin)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """Let a splice's first block be evicted before the block in front of it, although it names another parent."""
        arena_block, parent = self.pool.lookup(block_id), self.pool.lookup(parent_id)
        if arena_block is not None and parent is not None and self.keep:
            self.pool.tree.link(arena_block, parent)

    def keep_blank(self, num_arena_blocks: int) -> None:
        """Evict until so many arena blocks are empty, as far as possible, so that a read finds one at once."""
        while self.pool.num_blank < num_arena_blocks and self.pool.evict_one() is not None:
            pass

    def erase_stale(self) -> None:
        """Overwrite arena blocks that nobody holds and no id leads to."""
        stale = self.pool.take_stale()
        for arena_block in stale:  # a record holds the tokens
            self._records[arena_block] = self._conversations[arena_block] = None
        self._erase(stale)

    def _cached_records(self) -> Iterator[BlockRecord]:
        return (record for record in map(self.record, self.pool.cached_blocks()) if record is not None)

    def absent_parents(self) -> list[BlockId]:
        """Blocks that others here build on, and which are not here."""
        return [one for one in children_of(self._cached_records()) if self.arena_block_of(one) is None]

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks, here or not, and all that builds on them here, parents before children."""
        return with_descendants(block_ids, self._cached_records())

    def hold_all_but(self, arena_blocks: Collection[int]) -> list[int]:
        """Take a reference of each other READY arena block, parents first; returns these."""
        found = map(self.arena_block_of, self.with_descendants(self.absent_parents()))
        held = [one for one in found if one is not None and self._states[one] is ArenaBlockState.READY]
        held = [one for one in held if one not in arena_blocks]
        self.pool.acquire(held)
        return held

    def select(self, what: Evict, block_bytes: int) -> list[BlockId]:
        """All blocks that `what` means; see `kvstore.blocks.forest.select`."""

        def candidate(arena_block: int) -> Candidate:
            record = self._records[arena_block]
            assert record is not None
            return Candidate(record.block_id, record.model, self._last_used_s[arena_block], block_bytes)

        num_bytes = self.pool.num_cached * block_bytes
        arena_blocks = select(what, self.pool.tree.links, candidate, self.arena_block_of, num_bytes, self._clock())
        ids = [record.block_id for record in map(self.record, arena_blocks) if record is not None]
        # Nothing is linked in a staging area, and what waits to be written must not lose its parent.
        return ids if self.keep else [one for one in self.with_descendants(ids) if self.arena_block_of(one) is not None]

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
        """Assert that states, records and the pool agree; with `idle`, that nobody holds an arena block."""
        self.pool.check_integrity(idle)
        for one in self.pool.cached_blocks():
            state, record = self._states[one], self._records[one]
            assert record is not None and record.block_id == self.pool.block_id(one), f"arena block {one}: wrong record"
            assert state in (ArenaBlockState.PENDING, ArenaBlockState.READY), f"arena block {one}: {state}"
            assert not idle or state is ArenaBlockState.READY, f"arena block {one} is in flight while idle"
        assert not idle or not self.parents_in_flight, f"{len(self.parents_in_flight)} parents are kept while idle"
