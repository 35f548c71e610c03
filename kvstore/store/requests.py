"""What a request has in flight: what it may load, held for it until it is scheduled, and how far it is saved.

Control plane, one thread. `Requests` alone moves the cursors of `Wanted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.blocks.ids import TOKEN_BYTES
from kvstore.blocks.records import BlockRecord, Load
from kvstore.disk.io_queue import AS_HINT, Rank, rank_of_request
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.policy.conversation import Conversation, QueueKey
from kvstore.stats import StoreStats
from kvstore.store.reads import DiskReads
from kvstore.store.stored import ChainContent, StoredBlocks


@dataclass(slots=True)
class Wanted:
    """Blocks [first, end) of a request, each in one of `slots`, held for it, or still to be read.

    [first, front) and [back, end) are READY, all of [lowest, end) are held.
    """

    is_begun: bool = False
    first: int = 0
    end: int = 0
    front: int = 0
    back: int = 0
    lowest: int = 0
    slots: dict[int, int] = field(default_factory=dict)  # by block
    is_asked: bool = False  # the scheduler has asked for the request
    is_open: bool = False  # it runs, and loads more later
    read_ahead: set[int] = field(default_factory=set)  # read before it was asked for, and not loaded by it

    def is_ready(self) -> bool:
        """Whether all of them have landed."""
        return self.front == self.end


@dataclass(slots=True)
class Saving:
    """How far a request is saved."""

    partial: tuple[int, int] | None = None  # block and slot that its last tokens are being saved to
    goes_on: bool = True  # its full blocks are saved
    hole: int | None = None  # the first block that was not saved, once that has ended


@dataclass(slots=True, eq=False)
class Tracked(ChainContent):
    """A request as the store sees it. key: its place in the queue; None for a hint."""

    request_id: str = ""
    key: QueueKey | None = None
    conversation: Conversation | None = None
    may_load: bool = True
    num_hbm_blocks: int = 0  # when it arrived
    arrival: list[str] = field(default_factory=list)  # the tier of each block after those, as far as they are stored
    wanted: Wanted = field(default_factory=Wanted)
    saving: Saving = field(default_factory=Saving)

    @property
    def rank(self) -> Rank:
        """Of its reads."""
        return AS_HINT if self.key is None else rank_of_request(self.key)

    @property
    def is_exact(self) -> bool:
        """Whether it may compute what is stored: a spliced chain is loaded as a whole or not at all."""
        return self.lineage.splice_index is None

    def tier_at_arrival(self, index: int) -> str | None:
        """Below HBM, that had this block; None: it was not stored there."""
        place = index - self.num_hbm_blocks
        return self.arrival[place] if 0 <= place < len(self.arrival) else None

    def num_loadable(self, block_size: int) -> int:
        """Blocks that may be loaded: one token is always left to compute."""
        return min((len(self.tokens) // TOKEN_BYTES - 1) // block_size, len(self.chain))


class Requests:
    """Holds what requests want and hands it out. reads None: there is no disk."""

    def __init__(self, cpu: CpuTier, stored: StoredBlocks, reads: DiskReads | None, stats: StoreStats) -> None:
        self._cpu, self._stored, self._reads, self._stats = cpu, stored, reads, stats
        self.block_size = stored.block_size
        self.by_id: dict[str, Tracked] = {}

    def arrive(self, request: Tracked, num_hbm_blocks: int) -> None:
        """Note which tier holds each block after those in HBM."""
        self.by_id[request.request_id] = request
        request.num_hbm_blocks = num_hbm_blocks
        most = request.num_loadable(self.block_size)
        request.arrival += self._stored.tiers(request.chain, num_hbm_blocks, most)
        if request.conversation is not None:
            self._stored.claim(request.chain, request.lineage, request.conversation)

    def hold(self, request: Tracked, first: int, end: int) -> None:
        """Hold what the CPU tier has of its blocks from `first` on, as far as they are stored; reads nothing."""
        self.let_go(request)
        wanted = request.wanted
        wanted.is_begun, wanted.first, wanted.front, wanted.end = True, first, first, end
        wanted.back = wanted.lowest = end
        self._hold_range(request, first, end)

    def hold_before(self, request: Tracked, first: int) -> None:
        """HBM has lost some that it had: what the request wants begins earlier."""
        wanted = request.wanted
        old_first, wanted.first, wanted.front = wanted.first, first, first
        wanted.lowest = max(wanted.lowest, old_first)  # what is before it is not being read
        self._hold_range(request, first, old_first)

    def _hold_range(self, request: Tracked, first: int, end: int) -> None:
        for index in range(first, end):
            if not self._acquire(request, index) and not self._stored.is_on_disk(request.chain[index]):
                self.cut(request, index)
                return

    def _acquire(self, request: Tracked, index: int) -> bool:
        """Hold a block that is in the CPU tier or on its way there, which may have to hurry now."""
        slot = self._stored.slot_of(request, index)
        if slot is None:
            return False
        self._cpu.acquire(slot)
        request.wanted.slots[index] = slot
        if self._reads is not None and slot in self._reads and request.rank < self._reads.rank(slot):
            self._reads.set_rank(slot, request.rank)
        return True

    def advance(self, request: Tracked, first: int) -> None:
        """Look at slots that were not READY; a failed one ends what the request may load. Blocks before go."""
        wanted = request.wanted
        if wanted.first < first:
            self._drop(request, [index for index in wanted.slots if index < first])
            wanted.first, wanted.front, wanted.lowest, wanted.end, wanted.back = (
                max(first, cursor) for cursor in (first, wanted.front, wanted.lowest, wanted.end, wanted.back)
            )
        while wanted.front < wanted.end and self._is_ready(request, wanted.front):
            wanted.front += 1
        while (last := wanted.back - 1) >= wanted.front and (self._is_ready(request, last) or wanted.back == last):
            wanted.back = last

    def _is_ready(self, request: Tracked, index: int) -> bool:
        """Whether this block has landed. One that did not come is computed, and what is behind it."""
        wanted = request.wanted
        slot = wanted.slots.get(index)
        state = SlotState.PENDING if slot is None else self._cpu.state(slot)
        if state in (SlotState.FAILED, SlotState.EMPTY):
            if request.key is not None:
                self._stats.given_up_tokens += (wanted.end - index) * self.block_size
            self.cut(request, index)
        return state is SlotState.READY

    def cut(self, request: Tracked, end: int) -> None:
        """What it wants ends here."""
        wanted = request.wanted
        self._drop(request, [index for index in wanted.slots if index >= end])
        wanted.end = wanted.back = end
        wanted.front, wanted.lowest = min(wanted.front, end), min(wanted.lowest, end)

    def read(self, request: Tracked, first: int, make_room: Callable[[], bool]) -> int | None:
        """Begin to read what it wants from `first` on, the tail before the head: the head can be computed meanwhile.

        make_room: takes a slot from somebody else; False when there is none to take. Returns the first block for which
        there was no slot, or None.
        """
        wanted = request.wanted
        if first >= wanted.lowest:
            return None
        begun: list[tuple[int, BlockRecord]] = []
        short = self._announce(request, first, make_room, begun)
        for index, record in reversed(begun):
            self._reads.start(wanted.slots[index], record, request.rank)  # type: ignore[union-attr]
        if not wanted.is_asked:
            wanted.read_ahead.update(index for index, _ in begun)
            self._stats.prefetched += len(begun)
        if short is None:
            wanted.lowest = min(first, wanted.end)
        return short

    def _announce(
        self, request: Tracked, first: int, make_room: Callable[[], bool], begun: list[tuple[int, BlockRecord]]
    ) -> int | None:
        """Slots for what is to be read, noted in `begun`; returns the first block for which there was none, or None."""
        for index in range(first, request.wanted.end):  # announced in order: a block is linked to the one before
            if index in request.wanted.slots or self._acquire(request, index):
                continue
            if not self._stored.is_on_disk(request.chain[index]):
                self.cut(request, index)
                return None
            slot = self._cpu.reserve()
            while slot is None and make_room():
                slot = self._cpu.reserve()
            if slot is None:
                return index
            record = self._stored.record(request, index)
            if not self._cpu.announce(slot, record, request.conversation):
                self._cpu.release(slot)  # the id is there with another content
                self.cut(request, index)
                return None
            self._cpu.acquire(slot)
            request.wanted.slots[index] = slot
            begun.append((index, record))
        return None

    def ask(self, request: Tracked, first: int, end: int) -> bool:
        """It is to be scheduled, with blocks before `first` in HBM. Whether that is so for the first time."""
        wanted = request.wanted
        if not wanted.is_begun:
            self.hold(request, first, end)
        elif first < wanted.first:
            self.hold_before(request, first)
        self.advance(request, first)
        is_new, wanted.is_asked = not wanted.is_asked, True
        if is_new:
            ready = [index for index, slot in wanted.slots.items() if self._cpu.state(slot) is SlotState.READY]
            self._stats.prefetch_hits += sum(request.tier_at_arrival(index) == "disk" for index in ready)
        return is_new

    def hand_out(
        self, request: Tracked, block_numbers: Sequence[int], first_block: int, num_blocks: int
    ) -> list[Load]:
        """Held slots as loads into these HBM blocks; the references go with them."""
        wanted, size = request.wanted, self.block_size
        loads = [
            Load(number, wanted.slots.pop(index), index * size, request.chain[index])
            for index, number in enumerate(block_numbers[:num_blocks], start=first_block)
        ]
        wanted.read_ahead.difference_update(range(first_block, first_block + num_blocks))
        if first_block + num_blocks >= wanted.end:
            self.let_go(request)
        else:
            self.advance(request, first_block + num_blocks)
        self._stats.loaded_tokens += len(loads) * size
        return loads

    def let_go(self, request: Tracked) -> None:
        """Give back what is held for it; it may ask again."""
        wanted = request.wanted
        self._drop(request, list(wanted.slots))
        wanted.is_begun = wanted.is_open = False
        wanted.first = wanted.end = wanted.front = wanted.back = wanted.lowest = 0

    def _drop(self, request: Tracked, indices: Sequence[int]) -> None:
        """Give back these; reads of them that nobody else wants are dropped, too."""
        ordered = sorted(indices, reverse=True)  # the tail is evicted before the head
        slots = [request.wanted.slots.pop(index) for index in ordered]
        for slot in slots:
            self._cpu.release(slot)
        if self._reads is None:
            return
        is_kept = False
        for index, slot in zip(ordered, slots, strict=True):
            if slot not in self._reads or self._cpu.pool.ref_count(slot) > 1:
                continue
            is_kept = is_kept or self._reads.is_built_on(slot)
            if is_kept:
                self._reads.set_rank(slot, AS_HINT)
            elif self._reads.cancel(slot):
                request.wanted.read_ahead.discard(index)

    def remove(self, request_id: str) -> Tracked | None:
        """The request ended or was preempted: what was held for it is given back. Returns it as it was known."""
        request = self.by_id.pop(request_id, None)
        if request is not None:
            self.let_go(request)
            self._stats.prefetch_wasted += len(request.wanted.read_ahead)
            self._cpu.touch(request.chain, request.conversation)
            if request.conversation is not None:
                self._stored.claim(request.chain, request.lineage, request.conversation)
        return request
