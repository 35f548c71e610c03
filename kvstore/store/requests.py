"""What a request has in flight: blocks that are read for it and held until it is scheduled.

Control plane, one thread. What a request wants is written only here; others read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, token_bytes
from kvstore.blocks.records import BlockRecord, Load, StatePiece
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.policy.conversation import Conversation, QueueKey
from kvstore.stats import StoreStats
from kvstore.store.seam import Lookup, Match
from kvstore.store.stored import ChainContent, Restorable, StoredBlocks, TierReads
from kvstore.tiers.port import AS_HINT, Rank, rank_of_request

Announced = list[tuple[int, BlockRecord, str]]  # blocks to be read: places in the chain, records, tiers


@dataclass(slots=True)
class Wanted:
    """Blocks [first, end) that a request wants, each held in one of `arena_blocks` or still to be read.

    [first, front) and [back, end) are READY; all of [lowest, end) are held.
    """

    is_begun: bool = False
    first: int = 0
    end: int = 0
    front: int = 0
    back: int = 0
    lowest: int = 0
    arena_blocks: dict[int, int] = field(default_factory=dict)  # by the block's place in the chain
    is_asked: bool = False  # the scheduler has asked what can be loaded for it
    is_open: bool = False  # it runs, and is going to load more
    read_ahead: set[int] = field(default_factory=set)  # read before the request was asked for, and not loaded by it

    def is_ready(self) -> bool:
        """Whether all of them have landed."""
        return self.front == self.end


@dataclass(slots=True, eq=False)
class Tracked(ChainContent):
    """A request as the store sees it. key: its place in the queue; None for a hint."""

    request_id: str = ""
    key: QueueKey | None = None
    conversation: Conversation | None = None
    may_load: bool = True
    turn_starts: Sequence[int] = ()  # in tokens
    shared_ends: Sequence[int] = ()  # in tokens: see `NewRequest`
    restored: Restorable | None = None  # of a model that keeps states: what it can begin with, and the states there
    most_loaded: float = math.inf  # of its blocks: a later state was lost when it was wanted
    is_computed: bool = False  # although something is stored: computing is quicker, or there is no room to load it
    was_elsewhere: bool = False  # another server was asked to compute it
    lacks_room: bool = False  # some of what is stored for it found no arena block
    waits_until_s: float | None = None  # to hear what is stored for it, or for another server to compute it
    num_hbm_blocks: int = 0  # when it arrived
    num_known: int = 0  # of its blocks, though it may not be able to begin behind all of them, of a model with states
    arrival: list[str] = field(default_factory=list)  # the tier of each block after those, as far as they are stored
    num_told: int = 0  # how many of these the engine knows of
    num_saved_tokens: int = 0  # of its blocks that were not stored before, until the engine asks
    wanted: Wanted = field(default_factory=Wanted)
    partial: tuple[int, int] | None = None  # block and arena block that its last tokens are being saved to
    is_saved: bool = True  # whether its next full blocks are saved
    hole: int | None = None  # the first block that is not saved

    @property
    def rank(self) -> Rank:
        """The rank of its reads."""
        return AS_HINT if self.key is None else rank_of_request(self.key)

    @property
    def is_exact(self) -> bool:
        """Whether it may compute what is stored: a spliced chain, or one with a state, is loaded as a whole or not at
        all.
        """
        return not self.is_spliced and self.restored is None

    @property
    def is_spliced(self) -> bool:
        return self.lineage.splice_index is not None

    @property
    def loads(self) -> ChainContent:
        """What is loaded for it."""
        return self if self.restored is None else self.restored

    @property
    def tiers(self) -> Sequence[str]:
        """The tiers of its blocks after those in HBM, without those of its state."""
        return self.arrival if self.restored is None else self.arrival[: self.border - self.num_hbm_blocks]

    @property
    def border(self) -> int:
        """The number of its blocks behind which it can begin with a state; 0: behind none."""
        return 0 if self.restored is None else self.restored.border

    @property
    def num_blocks_of_states(self) -> int:
        """Of those that it begins with."""
        return 0 if self.restored is None else len(self.restored.chain) - self.restored.border

    def is_waiting(self, now_s: float) -> bool:
        """Whether it waits, though it could be scheduled now; it does not any more once it has waited long enough. A
        late answer is of use to those that are still in the queue, so only the scheduler asks this.
        """
        if self.waits_until_s is not None and self.waits_until_s <= now_s:
            self.waits_until_s = None
        return self.waits_until_s is not None

    def tier_at_arrival(self, index: int) -> str | None:
        """The tier below HBM that had this block; None if none had it."""
        place = index - self.num_hbm_blocks
        return self.arrival[place] if 0 <= place < len(self.arrival) else None

    def extend(self, new_ids: Sequence[BlockId], new_tokens: Sequence[int]) -> None:
        """Add blocks that have become full; see `StepSpan`."""
        self.chain += new_ids
        self.tokens += token_bytes(new_tokens)

    def with_late_tiers(self, found: Match) -> Match:
        """The match, with the tiers of blocks found after its arrival, which are reported once."""
        late = tuple(self.tiers[self.num_told :])
        if not late or found.lookup is Lookup.PENDING:
            return found
        first, self.num_told = self.num_hbm_blocks + self.num_told, len(self.tiers)
        return replace(found, late_from=first, late_tiers=late)

    def num_loadable(self, block_size: int) -> int:
        """The number of blocks that may be loaded: one token is always left to compute."""
        return min((len(self.tokens) // TOKEN_BYTES - 1) // block_size, len(self.chain))


class Requests:
    """Holds the blocks that requests want, and hands them out. reads None: there is no tier below the CPU tier."""

    def __init__(self, cpu: CpuTier, stored: StoredBlocks, reads: TierReads | None, stats: StoreStats) -> None:
        self._cpu, self._stored, self._reads, self._stats = cpu, stored, reads, stats
        self.block_size, self.keeps_states = stored.block_size, stored.num_state_blocks > 0
        self.by_id: dict[str, Tracked] = {}

    def arrive(self, request: Tracked, num_hbm_blocks: int) -> None:
        """Note which tier holds each block after those in HBM."""
        self.by_id[request.request_id] = request
        request.num_hbm_blocks = num_hbm_blocks
        self.look_again(request)
        request.num_told = len(request.tiers)
        if request.conversation is not None:
            self._stored.claim(request.chain[: request.border or None], request.lineage, request.conversation)
            if request.restored is not None:
                self._stored.claim_states(request.restored, request.conversation)

    def look_again(self, request: Tracked) -> bool:
        """Check whether more of its blocks are known to be stored by now. Reads that have begun stay as they are."""
        if self.keeps_states:
            before = request.border
            if not request.wanted.is_begun:
                self.find_state(request, request.num_hbm_blocks)
            return request.border > before
        first = request.num_hbm_blocks + len(request.arrival)
        found = self._stored.tiers(request.chain, first, request.num_loadable(self.block_size))
        request.arrival += found
        return bool(found)

    def find_state(self, request: Tracked, first: int) -> None:
        """Find the last state that it can begin with, if its blocks before `first` are in HBM."""
        num_told, request.num_hbm_blocks = request.num_hbm_blocks + request.num_told, first
        request.num_told, request.arrival, request.restored = max(0, num_told - first), [], None
        end = len(request.chain) if request.key is None else request.num_loadable(self.block_size)
        request.num_known = first + len(self._stored.tiers(request.chain, first, end))
        found = self._stored.restorable(request, first, int(min(request.num_known, request.most_loaded)))
        if found is None:
            return
        request.lacks_room = len(found.chain) - first > self._cpu.pool.num_blocks  # it is loaded as a whole
        if not request.lacks_room:
            request.restored = found
            request.arrival = self._stored.tiers(found.chain, first, len(found.chain))

    def hold(self, request: Tracked, first: int, end: int) -> None:
        """Hold its blocks from `first` on that the CPU tier has, as far as they are stored. Reads nothing."""
        self.let_go(request)
        wanted = request.wanted
        wanted.is_begun, wanted.first, wanted.front, wanted.end = True, first, first, end
        wanted.back = wanted.lowest = end
        self._hold_range(request, first, end)

    def hold_before(self, request: Tracked, first: int) -> None:
        """Let what the request wants begin earlier, as HBM has lost blocks."""
        wanted = request.wanted
        old_first, wanted.first, wanted.front = wanted.first, first, first
        wanted.lowest = max(wanted.lowest, old_first)  # blocks before it are not being read
        self._hold_range(request, first, old_first)

    def _hold_range(self, request: Tracked, first: int, end: int) -> None:
        for index in range(first, end):
            if not self._acquire(request, index) and self._stored.source(request.loads.chain[index]) is None:
                self.cut(request, index)
                return

    def _acquire(self, request: Tracked, index: int) -> bool:
        """Hold a block that is in the CPU tier or on its way there; its read may become more urgent."""
        arena_block = self._stored.arena_block_of(request.loads, index)
        if arena_block is None:
            return False
        self._cpu.acquire(arena_block)
        request.wanted.arena_blocks[index] = arena_block
        if self._reads is not None and arena_block in self._reads and request.rank < self._reads.rank(arena_block):
            self._reads.set_rank(arena_block, request.rank)
        return True

    def advance(self, request: Tracked, first: int) -> None:
        """Check arena blocks that were not READY: a failed one ends what may be loaded. Releases earlier blocks."""
        wanted = request.wanted
        if wanted.first < first:
            self._drop(request, [index for index in wanted.arena_blocks if index < first])
            wanted.first, wanted.front, wanted.lowest, wanted.end, wanted.back = (
                max(first, cursor) for cursor in (first, wanted.front, wanted.lowest, wanted.end, wanted.back)
            )
        while wanted.front < wanted.end and self._is_ready(request, wanted.front):
            wanted.front += 1
        while (last := wanted.back - 1) >= wanted.front and (self._is_ready(request, last) or wanted.back == last):
            wanted.back = last

    def _is_ready(self, request: Tracked, index: int) -> bool:
        """Whether this block has landed. If it failed, it and all that follow it are computed."""
        wanted, arena_block = request.wanted, request.wanted.arena_blocks.get(index)
        state = ArenaBlockState.PENDING if arena_block is None else self._cpu.state(arena_block)
        if state in (ArenaBlockState.FAILED, ArenaBlockState.EMPTY):
            if request.key is not None:
                num_blocks = wanted.end - index if request.restored is None else request.border - wanted.first
                self._stats.given_up_tokens += num_blocks * self.block_size
            self.cut(request, index)
        return state is ArenaBlockState.READY

    def cut(self, request: Tracked, end: int) -> None:
        """Let what it wants end here."""
        wanted = request.wanted
        self._drop(request, [index for index in wanted.arena_blocks if index >= end])
        wanted.end = wanted.back = end
        wanted.front, wanted.lowest = min(wanted.front, end), min(wanted.lowest, end)

    def read(self, request: Tracked, first: int, make_room: Callable[[], bool]) -> int | None:
        """Begin to read what it wants from `first` on, the tail before the head: the head can be computed meanwhile.

        make_room: takes an arena block from somebody else; False if there is none to take. Returns the first block that
        found none, or None.
        """
        wanted = request.wanted
        if first >= wanted.lowest:
            return None
        begun, short = self._announce(request, first, make_room)
        for index, record, tier in reversed(begun):
            self._reads.start(wanted.arena_blocks[index], record, tier, request.rank)  # type: ignore[union-attr]
        if not wanted.is_asked:
            wanted.read_ahead.update(index for index, *_ in begun)
            self._stats.prefetched += len(begun)
        if short is None:
            wanted.lowest = min(first, wanted.end)
        return short

    def _announce(self, request: Tracked, first: int, make_room: Callable[[], bool]) -> tuple[Announced, int | None]:
        """Reserve arena blocks for blocks to read. Returns these, and the first block that found none, or None."""
        begun: Announced = []
        for index in range(first, request.wanted.end):  # announced in order, as a block is linked to the one before
            if index in request.wanted.arena_blocks or self._acquire(request, index):
                continue
            if (tier := self._stored.source(request.loads.chain[index])) is None:
                self.cut(request, index)
                break
            arena_block = self._cpu.reserve()
            while arena_block is None and make_room():
                arena_block = self._cpu.reserve()
            if arena_block is None:
                return begun, index
            record = self._stored.record(request.loads, index)
            if not self._cpu.announce(arena_block, record, request.conversation):
                self._cpu.release(arena_block)  # the id exists with other content
                self.cut(request, index)
                break
            self._cpu.acquire(arena_block)
            request.wanted.arena_blocks[index] = arena_block
            begun.append((index, record, tier))
        return begun, None

    def ask(self, request: Tracked, first: int, end: int) -> bool:
        """Note that it is to be scheduled, with blocks before `first` in HBM. Returns whether for the first time."""
        wanted = request.wanted
        if not wanted.is_begun:
            self.hold(request, first, end)
        elif first < wanted.first:
            self.hold_before(request, first)
        self.advance(request, first)
        is_new, wanted.is_asked = not wanted.is_asked, True
        if is_new:
            ready = [i for i, one in wanted.arena_blocks.items() if self._cpu.state(one) is ArenaBlockState.READY]
            self._stats.prefetch_hits += sum(request.tier_at_arrival(index) in ("disk", "remote") for index in ready)
        return is_new

    def split(self, request: Tracked) -> None:
        """It loads what is there, computes what comes next, and asks again."""
        self._stats.split_prefills += not request.wanted.is_open
        request.wanted.is_open = True

    def join(self, request: Tracked) -> None:
        """It does not ask again."""
        request.wanted.is_open = False

    def hand_out(self, request: Tracked, block_numbers: Sequence[int], first_block: int, num_blocks: int) -> list[Load]:
        """Turn held arena blocks into loads into these HBM blocks; the references go with them."""
        wanted, size = request.wanted, self.block_size
        loads = [
            Load(number, wanted.arena_blocks.pop(index), index * size, request.chain[index])
            for index, number in enumerate(block_numbers[:num_blocks], start=first_block)
        ]
        wanted.read_ahead.difference_update(range(first_block, first_block + num_blocks))
        if first_block + num_blocks >= wanted.end:
            self.let_go(request)
        else:
            self.advance(request, first_block + num_blocks)
        self._stats.loaded_tokens += len(loads) * size
        return loads

    def hand_out_states(self, request: Tracked, first_block: int, rows: Sequence[int]) -> list[StatePiece]:
        """The same of the states behind its blocks, before these are handed out: to the row, or each to its block's."""
        wanted, restored, pieces = request.wanted, request.restored, list[StatePiece]()
        assert restored is not None
        for index in range(restored.border, wanted.end):
            place, arena_block = restored.owner(index) - first_block, wanted.arena_blocks.pop(index)
            if self._stored.has_windows and place < 0:  # HBM has it
                self._cpu.release(arena_block)
                continue
            row = rows[place] if self._stored.has_windows else rows[0]
            pieces.append(StatePiece(row, (index - restored.border) % restored.num_state_blocks, arena_block))
        wanted.read_ahead.difference_update(range(restored.border, wanted.end))
        self.cut(request, restored.border)
        return pieces

    def take_num_saved(self, request_id: str) -> int:
        """See `KVConnector.take_num_saved`."""
        request = self.by_id[request_id]
        num_saved, request.num_saved_tokens = request.num_saved_tokens, 0
        return num_saved

    def let_go(self, request: Tracked) -> None:
        """Release all that is held for it. It may ask again."""
        wanted = request.wanted
        self._drop(request, list(wanted.arena_blocks))
        wanted.is_begun = wanted.is_open = False
        wanted.first = wanted.end = wanted.front = wanted.back = wanted.lowest = 0

    def _drop(self, request: Tracked, indices: Sequence[int]) -> None:
        """Release these arena blocks, and drop reads of them that nobody else wants."""
        ordered = sorted(indices, reverse=True)  # the tail is evicted before the head
        arena_blocks = [request.wanted.arena_blocks.pop(index) for index in ordered]
        for arena_block in arena_blocks:
            self._cpu.release(arena_block)
        if self._reads is not None and (dropped := self._reads.let_go(arena_blocks)):
            request.wanted.read_ahead -= {i for i, one in zip(ordered, arena_blocks, strict=True) if one in dropped}

    def remove(self, request_id: str) -> Tracked | None:
        """Remove a request that ended or was preempted, with what was held for it; return it."""
        request = self.by_id.pop(request_id, None)
        if request is not None:
            self.let_go(request)
            self._stats.prefetch_wasted += len(request.wanted.read_ahead)
            self._cpu.touch(request.chain, request.conversation)
            if request.conversation is not None:
                self._stored.claim(request.chain, request.lineage, request.conversation)
        return request
