"""What a request may load: its blocks in the CPU tier and on disk, held for it until it is scheduled.

Control plane, one thread. Knows requests by their id, chain and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvstore.block import BlockId, Lineage, token_bytes
from kvstore.cpu_tier import CpuTier, SlotState
from kvstore.stats import StoreStats
from kvstore.tier import BlockRecord, Load

MAX_WAIT_S = 2.0  # for slots that others hold; then a request loads what it can and computes the rest


class Lookup(Enum):
    """What a connector says of the blocks behind those already in HBM."""

    MISS = "miss"  # nothing more; compute
    HIT = "hit"  # `num_tokens` more can be loaded at once
    PENDING = "pending"  # on their way from a slower tier: leave the request waiting, take the next


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of `get_num_new_matched_tokens`: `num_tokens` is a multiple of the block size, 0 unless HIT."""

    lookup: Lookup
    num_tokens: int = 0


@dataclass(slots=True)
class Tracked:
    """A request as the store sees it. chain and token_ids are the request's own lists, which grow.

    slots: held for it, blocks [first_block, first_block + len(slots)). num_ready: how many of them, from the first on,
    are known to be READY. waiting_since_s: when it first found too few slots. partial: (block, slot) that its last
    tokens are being saved to. saving: its full blocks are saved; hole: the first block that was not saved, once that
    has ended.
    """

    request_id: str
    chain: Sequence[BlockId]
    token_ids: Sequence[int]
    lineage: Lineage
    tenant: str
    may_load: bool = True
    arrival: list[str] = field(default_factory=list)
    begun: bool = False
    first_block: int = 0
    slots: list[int] = field(default_factory=list)
    num_ready: int = 0
    loads: list[Load] = field(default_factory=list)
    waiting_since_s: float | None = None
    partial: tuple[int, int] | None = None
    saving: bool = True
    hole: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What every block of this engine has in common."""

    fingerprint: bytes
    model: str
    block_size: int


class Reader(Protocol):
    """The disk, as far as lookups know it."""

    def contains(self, block_id: BlockId) -> bool: ...

    def is_reading(self, slot: int) -> bool: ...

    def start_read(self, slot: int, record: BlockRecord) -> None:
        """The slot is announced and holds a reference for the read, which is released when it has ended."""
        ...


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
            tenant=request.tenant,
            model=identity.model,
            created_s=self._clock(),
        )

    @property
    def has_disk(self) -> bool:
        return self._reader is not None

    def holds(self, block_id: BlockId) -> bool:
        """Whether CPU or disk have this block, in flight included."""
        return self._cpu.find(block_id) is not None or (self._reader is not None and self._reader.contains(block_id))

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
        """Note which tier holds each block after those in HBM, and begin to read what is on disk if there is room."""
        self.requests[request.request_id] = request
        for index in range(num_hbm_blocks, max_blocks):
            slot = self._cpu.find(request.chain[index])
            if slot is not None:
                below = self._is_being_read(slot) or not self._cpu.keep
                request.arrival.append("disk" if below else "cpu")
            elif self._reader is not None and self._reader.contains(request.chain[index]):
                request.arrival.append("disk")
            else:
                break
        if request.may_load and 2 * len(request.arrival) <= self._cpu.pool.num_idle:
            self._begin(request, num_hbm_blocks, max_blocks)

    def _is_being_read(self, slot: int) -> bool:
        return self._reader is not None and self._reader.is_reading(slot)

    def _begin(self, request: Tracked, first_block: int, max_blocks: int) -> bool:
        """Hold the blocks from `first_block` on, as many as there are; False when slots for reads ran out."""
        self.let_go(request)
        request.begun, request.first_block = True, first_block
        for index in range(first_block, max_blocks):
            slot = self.find(request, index)
            if slot is not None:
                self._cpu.acquire(slot)
            elif self._reader is not None and self._reader.contains(request.chain[index]):
                slot = self._read(request, index)
                if slot is None:
                    return False
            else:
                break
            request.slots.append(slot)
        return True

    def _read(self, request: Tracked, index: int) -> int | None:
        """Start to read a block; the slot is held for the request and for the read."""
        slot = self._cpu.reserve()
        if slot is None:
            return None
        record = self.record(request, index)
        if not self._cpu.announce(slot, record, self._clock()):  # the id is there with another content
            self._cpu.release(slot)
            return None
        self._cpu.acquire(slot)
        assert self._reader is not None
        self._reader.start_read(slot, record)
        return slot

    # -- scheduling --------------------------------------------------------------------------------------------------
    def match(self, request: Tracked, first_block: int, max_blocks: int) -> Match:
        """How many blocks from `first_block` on can be loaded now. Called when the request may be scheduled."""
        if not request.may_load:
            return Match(Lookup.MISS)
        if not request.begun or first_block < request.first_block:
            enough = self._begin(request, first_block, max_blocks)
            others = any(other.slots for other in self.requests.values() if other is not request)
            if not enough and others and self._may_wait(request):
                self.let_go(request)
                return Match(Lookup.PENDING)  # whoever holds the slots will give them back
        self._advance(request)
        if request.num_ready < len(request.slots):
            return Match(Lookup.PENDING)
        num_blocks = min(len(request.slots), max_blocks - request.first_block) - (first_block - request.first_block)
        if num_blocks <= 0:
            self.let_go(request)  # HBM has got them meanwhile
            return Match(Lookup.MISS)
        return Match(Lookup.HIT, num_blocks * self._identity.block_size)

    def _may_wait(self, request: Tracked) -> bool:
        """Whether to wait for slots: for a while only, since those behind it may always hold some."""
        now_s = self._clock()
        if request.waiting_since_s is None:
            request.waiting_since_s = now_s
        return now_s - request.waiting_since_s < MAX_WAIT_S

    def _advance(self, request: Tracked) -> None:
        """Look at slots that were not READY; a failed one ends what the request may load."""
        while request.num_ready < len(request.slots):
            state = self._cpu.state(request.slots[request.num_ready])
            if state is SlotState.READY:
                request.num_ready += 1
            elif state is SlotState.PENDING:
                return
            else:
                rest = request.slots[request.num_ready :]
                del request.slots[request.num_ready :]
                self._release(rest)

    def take(self, request: Tracked, block_numbers: Sequence[int], first_block: int, num_blocks: int) -> list[Load]:
        """Hand out the held slots as loads into these HBM blocks; the references go with them."""
        skip = first_block - request.first_block
        slots = request.slots[skip : skip + num_blocks]
        size = self._identity.block_size
        loads = [
            Load(block, slot, (first_block + i) * size, request.chain[first_block + i])
            for i, (block, slot) in enumerate(zip(block_numbers, slots, strict=False))
        ]
        self._release(request.slots[:skip])
        self._release(request.slots[skip + num_blocks :])
        request.slots, request.begun, request.num_ready = [], False, 0
        self._stats.loaded_tokens += len(loads) * size
        return loads

    # -- departure ---------------------------------------------------------------------------------------------------
    def let_go(self, request: Tracked) -> None:
        """Give back what is held for it; it may ask again."""
        self._release(request.slots)
        request.slots, request.begun, request.num_ready = [], False, 0

    def _release(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):  # the tail is evicted before the head
            self._cpu.release(slot)

    def leave(self, request_id: str) -> Tracked | None:
        """The request ended or was preempted: what was held for it is given back."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.let_go(request)
            self._cpu.touch(request.chain, self._clock())
        return request
