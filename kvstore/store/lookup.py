"""What a request may load: its blocks in the CPU tier and on disk, held for it until it is scheduled.

Control plane, one thread. Knows requests by their id, chain and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvstore.blocks.ids import BlockId, Lineage, token_bytes
from kvstore.blocks.records import BlockRecord, Load
from kvstore.disk.io_queue import AS_HINT, Rank, rank_of_request
from kvstore.disk.records import label
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation, QueueKey
from kvstore.stats import StoreStats
from kvstore.store.reads import DiskReads


class Lookup(Enum):
    """What a connector says of the blocks behind those already in HBM."""

    MISS = "miss"  # nothing more; compute
    HIT = "hit"  # `num_tokens` more can be loaded at once
    PENDING = "pending"  # on their way from a slower tier: leave the request waiting, take the next


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of `get_num_new_matched_tokens`: `num_tokens` is a multiple of the block size, 0 unless HIT.

    num_compute_tokens: so many are to be computed behind those, a multiple too, before asking again: more are on their
    way from a slower tier. None: there is nothing more to be asked.
    """

    lookup: Lookup
    num_tokens: int = 0
    num_compute_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a connector says of a request that was queued.

    tiers: "cpu" or "disk" for each block after those in HBM, as far as they are stored. conversation: which one it goes
    on with, to be handed back when the same request is queued again.
    """

    tiers: list[str]
    conversation: Conversation


@dataclass(slots=True)
class Tracked:
    """A request as the store sees it. chain and token_ids are the request's own lists, which grow. key: in the queue.

    arrival: tiers of its blocks from num_hbm_blocks on. begun: it wants blocks [first, end), each in one of `slots`,
    held for it, or still to be read. [first, front) and [back, end) are READY, all of [lowest, end) are held. is_hint:
    nobody waits for it yet.
    is_asked: the scheduler has asked for it. is_open: it runs, and loads more later. read_ahead: blocks whose reads
    were begun before it was asked for, and that it has not loaded.

    partial: (block, slot) that its last tokens are being saved to. saving: its full blocks are saved; hole: the first
    block that was not saved, once that has ended.
    """

    request_id: str
    chain: Sequence[BlockId]
    token_ids: Sequence[int]
    lineage: Lineage
    tenant: str
    key: QueueKey = (0, 0)
    conversation: Conversation | None = None
    may_load: bool = True
    is_hint: bool = False
    arrival: list[str] = field(default_factory=list)
    num_hbm_blocks: int = 0
    begun: bool = False
    first: int = 0
    end: int = 0
    front: int = 0
    back: int = 0
    lowest: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    is_asked: bool = False
    is_open: bool = False
    read_ahead: set[int] = field(default_factory=set)
    partial: tuple[int, int] | None = None
    saving: bool = True
    hole: int | None = None

    @property
    def rank(self) -> Rank:
        """Of its reads."""
        return AS_HINT if self.is_hint else rank_of_request(self.key)

    @property
    def is_exact(self) -> bool:
        """Whether it may compute what is stored: a spliced chain is loaded as a whole or not at all."""
        return self.lineage.splice_index is None


@dataclass(frozen=True, slots=True)
class Identity:
    """What every block of this engine has in common."""

    fingerprint: bytes
    model: str
    block_size: int


class Reader(Protocol):
    """The disk, as far as lookups know it."""

    reads: DiskReads

    def contains(self, block_id: BlockId) -> bool: ...

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None: ...

    def link(self, block_id: BlockId, parent_id: BlockId) -> None: ...


class Lookups:
    """Finds, holds and hands out. reader None: there is no disk."""

    def __init__(
        self, cpu: CpuTier, reader: Reader | None, identity: Identity, stats: StoreStats, clock: Callable[[], float]
    ) -> None:
        self._cpu = cpu
        self._reader = reader
        self._identity = identity
        self._stats = stats
        self._clock = clock
        self.requests: dict[str, Tracked] = {}

    def record(self, request: Tracked, index: int) -> BlockRecord:
        """The record of a full block of this request."""
        size, identity = self._identity.block_size, self._identity
        return BlockRecord(
            block_id=request.chain[index],
            parent_id=request.lineage.parent(request.chain, index),
            tokens=token_bytes(request.token_ids[index * size : (index + 1) * size]),
            fingerprint=identity.fingerprint,
            tenant=label(request.tenant),
            model=identity.model,
            created_s=self._clock(),
        )

    @property
    def has_disk(self) -> bool:
        return self._reader is not None

    def holds(self, block_id: BlockId) -> bool:
        """Whether CPU or disk have this block, in flight included."""
        return self._cpu.find(block_id) is not None or (self._reader is not None and self._reader.contains(block_id))

    def is_stored(self, chain: Sequence[BlockId], num_hbm_tokens: int) -> bool:
        """Whether the last block of this chain is in some tier."""
        if num_hbm_tokens // self._identity.block_size >= len(chain):
            return bool(chain)
        return self.holds(chain[-1])

    def find(self, request: Tracked, index: int) -> int | None:
        """The slot of this block after comparing whose it is."""
        slot = self._cpu.find(request.chain[index])
        if slot is None:
            return None
        stored, size = self._cpu.record(slot), self._identity.block_size
        same = (
            stored is not None
            and stored.parent_id == request.lineage.parent(request.chain, index)
            and stored.tokens == token_bytes(request.token_ids[index * size : (index + 1) * size])
            and stored.fingerprint == self._identity.fingerprint
        )
        if not same:
            self._stats.identity_mismatches += 1
            return None
        return slot

    # -- arrival -----------------------------------------------------------------------------------------------------
    def arrive(self, request: Tracked, num_hbm_blocks: int, max_blocks: int) -> None:
        """Note which tier holds each block after those in HBM."""
        self.requests[request.request_id] = request
        request.num_hbm_blocks = num_hbm_blocks
        request.arrival += self.tiers(request.chain, num_hbm_blocks, max_blocks)
        if request.conversation is not None:
            self._claim(request, request.conversation)

    def tiers(self, chain: Sequence[BlockId], first: int, end: int) -> list[str]:
        """Which tier has each block from `first` on, as far as they are stored; what is being read is on disk."""
        found: list[str] = []
        for block_id in chain[first:end]:
            slot = self._cpu.find(block_id)
            if slot is not None:
                below = self._is_being_read(slot) or not self._cpu.keep
                found.append("disk" if below else "cpu")
            elif self._reader is not None and self._reader.contains(block_id):
                found.append("disk")
            else:
                break
        return found

    def _claim(self, request: Tracked, conversation: Conversation) -> None:
        """What is stored of its chain has its value from now on, the head in front of a splice too."""
        index = request.lineage.splice_index
        for tier in (self._cpu, self._reader):
            if tier is not None:
                tier.claim(request.chain, conversation)
                if index and index < len(request.chain):
                    tier.link(request.chain[index], request.chain[index - 1])

    def _is_being_read(self, slot: int) -> bool:
        return self._reader is not None and slot in self._reader.reads

    # -- holding -----------------------------------------------------------------------------------------------------
    def hold(self, request: Tracked, first: int, max_blocks: int) -> None:
        """Hold what the CPU tier has of its blocks from `first` on, as far as they are stored; reads nothing."""
        self.let_go(request)
        request.begun, request.first, request.front = True, first, first
        end = first
        for index in range(first, max_blocks):
            if not self._acquire(request, index) and not self._is_on_disk(request, index):
                break
            end = index + 1
        request.end = request.back = request.lowest = end

    def hold_before(self, request: Tracked, first: int) -> None:
        """HBM has lost some that it had: what the request wants begins earlier."""
        old_first, request.first, request.front = request.first, first, first
        request.lowest = max(request.lowest, old_first)  # what is before it is not being read
        for index in range(first, old_first):
            if not self._acquire(request, index) and not self._is_on_disk(request, index):
                self.cut(request, index)
                return

    def _acquire(self, request: Tracked, index: int) -> bool:
        """Hold a block that is in the CPU tier or on its way there, which may have to hurry now."""
        slot = self.find(request, index)
        if slot is None:
            return False
        self._cpu.acquire(slot)
        request.slots[index] = slot
        if self._reader is not None and slot in (reads := self._reader.reads) and request.rank < reads.rank(slot):
            reads.set_rank(slot, request.rank)
        return True

    def _is_on_disk(self, request: Tracked, index: int) -> bool:
        return self._reader is not None and self._reader.contains(request.chain[index])

    def advance(self, request: Tracked, first: int) -> None:
        """Look at slots that were not READY; a failed one ends what the request may load. Blocks before go."""
        if request.first < first:
            self._drop(request, [index for index in request.slots if index < first])
            request.first, request.front = first, max(first, request.front)
            request.lowest = max(first, request.lowest)
            request.end, request.back = max(first, request.end), max(first, request.back)
        while request.front < request.end:
            state = self._state(request, request.front)
            if state is SlotState.FAILED:
                self._give_up(request, request.front)
            elif state is not SlotState.READY:
                break
            else:
                request.front += 1
        while request.back > request.front:
            state = self._state(request, request.back - 1)
            if state is SlotState.FAILED:
                self._give_up(request, request.back - 1)
            elif state is not SlotState.READY:
                break
            else:
                request.back -= 1

    def _state(self, request: Tracked, index: int) -> SlotState | None:
        """None: it was not read yet."""
        slot = request.slots.get(index)
        if slot is None:
            return None
        state = self._cpu.state(slot)
        return SlotState.FAILED if state is SlotState.EMPTY else state

    def _give_up(self, request: Tracked, end: int) -> None:
        """The block at `end` did not come: it is computed, and what is behind it."""
        if not request.is_hint:
            self._stats.given_up_tokens += (request.end - end) * self._identity.block_size
        self.cut(request, end)

    def cut(self, request: Tracked, end: int) -> None:
        """What it wants ends here."""
        self._drop(request, [index for index in request.slots if index >= end])
        request.end = request.back = end
        request.front, request.lowest = min(request.front, end), min(request.lowest, end)

    def read(self, request: Tracked, first: int, make_room: Callable[[], bool]) -> int | None:
        """Begin to read what it wants from `first` on, the tail before the head: the head can be computed meanwhile.

        make_room: takes a slot from somebody else; False when there is none to take. Returns the first block for which
        there was no slot, or None.
        """
        if first >= request.lowest:
            return None
        begun: list[tuple[int, BlockRecord]] = []
        try:
            short = self._announce(request, first, make_room, begun)
            num_begun = len(begun)
            if not request.is_asked:
                request.read_ahead.update(index for index, _ in begun)
            while begun:
                index, record = begun[-1]
                self._reader.reads.start(request.slots[index], record, request.rank)  # type: ignore[union-attr]
                begun.pop()
        except BaseException:  # Ctrl-C: what was announced would be waited for by others, and never come
            for index, _ in begun:
                slot = request.slots.pop(index)
                self._cpu.fail(slot)
                self._cpu.release(slot)
                self._cpu.release(slot)
            raise
        if short is None:
            request.lowest = min(first, request.end)
        if not request.is_asked:
            self._stats.prefetched += num_begun
        return short

    def _announce(
        self, request: Tracked, first: int, make_room: Callable[[], bool], begun: list[tuple[int, BlockRecord]]
    ) -> int | None:
        """Slots for what is to be read, noted in `begun`; returns the first block for which there was none, or None."""
        short: int | None = None
        for index in range(first, request.end):  # announced in order: a block is linked to the one before
            if index in request.slots or self._acquire(request, index):
                continue
            if not self._is_on_disk(request, index):
                self.cut(request, index)
                break
            slot = self._cpu.reserve()
            while slot is None and make_room():
                slot = self._cpu.reserve()
            if slot is None:
                short = index
                break
            record = self.record(request, index)
            if not self._cpu.announce(slot, record, self._clock(), request.conversation):
                self._cpu.release(slot)  # the id is there with another content
                self.cut(request, index)
                break
            self._cpu.acquire(slot)
            request.slots[index] = slot
            begun.append((index, record))
        return short

    def count_prefetch_hits(self, request: Tracked) -> None:
        """It is asked for the first time: what has come from disk since it arrived."""
        for index, slot in request.slots.items():
            place = index - request.num_hbm_blocks
            was_on_disk = 0 <= place < len(request.arrival) and request.arrival[place] == "disk"
            self._stats.prefetch_hits += was_on_disk and self._cpu.state(slot) is SlotState.READY

    # -- scheduling --------------------------------------------------------------------------------------------------
    def take(self, request: Tracked, block_numbers: Sequence[int], first_block: int, num_blocks: int) -> list[Load]:
        """Hand out held slots as loads into these HBM blocks; the references go with them."""
        size = self._identity.block_size
        loads = [
            Load(block, request.slots.pop(first_block + i), (first_block + i) * size, request.chain[first_block + i])
            for i, block in enumerate(block_numbers[:num_blocks])
        ]
        request.read_ahead.difference_update(range(first_block, first_block + num_blocks))
        if first_block + num_blocks >= request.end:
            self.let_go(request)
        else:
            self.advance(request, first_block + num_blocks)
        self._stats.loaded_tokens += len(loads) * size
        return loads

    # -- departure ---------------------------------------------------------------------------------------------------
    def let_go(self, request: Tracked) -> None:
        """Give back what is held for it; it may ask again."""
        self._drop(request, list(request.slots))
        request.begun = request.is_open = False
        request.first = request.end = request.front = request.back = request.lowest = 0

    def _drop(self, request: Tracked, indices: Sequence[int]) -> None:
        """Give back these; reads of them that nobody else wants are dropped, too."""
        ordered = sorted(indices, reverse=True)  # the tail is evicted before the head
        slots = [request.slots.pop(index) for index in ordered]
        for slot in slots:
            self._cpu.release(slot)
        if self._reader is None:
            return
        reads, is_kept = self._reader.reads, False
        for index, slot in zip(ordered, slots, strict=True):
            if slot not in reads or self._cpu.pool.ref_count(slot) > 1:
                continue
            is_kept = is_kept or reads.is_built_on(slot)
            if is_kept:
                reads.set_rank(slot, AS_HINT)
            elif reads.cancel(slot):
                request.read_ahead.discard(index)

    def leave(self, request_id: str) -> Tracked | None:
        """The request ended or was preempted: what was held for it is given back."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.let_go(request)
            self._stats.prefetch_wasted += len(request.read_ahead)
            self._cpu.touch(request.chain, self._clock(), request.conversation)
            if request.conversation is not None:
                self._claim(request, request.conversation)
        return request
