"""What a request has in flight: blocks that are read for it and held until it is scheduled.

Waiting requests get arena blocks in the order in which they are expected to start. Running requests come before waiting
ones, and hints last. An earlier one may take arena blocks from later ones.

Control plane, one thread. Only this module writes the records; others read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, token_bytes
from kvstore.blocks.records import BlockRecord, Load, StatePiece
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.policy.conversation import Conversation, QueueKey
from kvstore.policy.planner import SAVE_SHARE, LoadChoice, LookAhead, Way
from kvstore.stats import StoreStats
from kvstore.store.seam import Lookup, Match, NewRequest
from kvstore.store.stored import ChainContent, StoredBlocks, TierReads
from kvstore.tiers.port import AS_HINT, Rank, rank_of_request

Announced = list[tuple[int, BlockRecord, str]]  # blocks to be read: places in the chain, records, tiers
BLANK_SHARE = 16  # one in so many arena blocks is kept empty, so that a read never waits for an eviction
MOST_HINTS = 64
NEW_SHARE = 8  # all waiting requests are examined once one in so many is new


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
    restored: ChainContent | None = None  # of a model that keeps states: what it can begin with, and the state there
    was_elsewhere: bool = False  # another server was asked to compute it
    lacks_room: bool = False  # some of what is stored for it found no arena block
    num_hbm_blocks: int = 0  # when it arrived
    arrival: list[str] = field(default_factory=list)  # the tier of each block after those, as far as they are stored
    num_told: int = 0  # how many of these the engine knows of
    num_saved_tokens: int = 0  # of its blocks that were not stored before, until the engine asks
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def rank(self) -> Rank:
        """The rank of its reads."""
        return AS_HINT if self.key is None else rank_of_request(self.key)

    @property
    def is_exact(self) -> bool:
        """Whether it may compute what is stored: a spliced chain, or one with a state, is loaded as a whole or not at
        all.
        """
        return self.lineage.splice_index is None and self.restored is None

    @property
    def loads(self) -> ChainContent:
        """What is loaded for it."""
        return self if self.restored is None else self.restored

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
        late = tuple(self.arrival[self.num_told :])
        if not late or found.lookup is Lookup.PENDING:
            return found
        first, self.num_told = self.num_hbm_blocks + self.num_told, len(self.arrival)
        return replace(found, late_from=first, late_tiers=late)

    def num_loadable(self, block_size: int) -> int:
        """The number of blocks that may be loaded: one token is always left to compute."""
        return min((len(self.tokens) // TOKEN_BYTES - 1) // block_size, len(self.chain))


def tracked(new: NewRequest, conversation: Conversation) -> Tracked:
    """A request that was just queued."""
    tokens = bytearray(token_bytes(new.token_ids))
    return Tracked(
        list(new.chain), tokens, new.lineage, new.tenant, new.request_id, new.key, conversation, new.may_load,
        new.turn_starts,
    )  # fmt: skip


class Requests:
    """Holds the blocks that requests want, and hands them out. reads None: there is no tier below the CPU tier.

    is_asking: see `RemoteBlocks.is_asking`; False without such a tier.
    """

    def __init__(self, cpu: CpuTier, stored: StoredBlocks, reads: TierReads | None, stats: StoreStats) -> None:
        self._cpu, self._stored, self._reads, self._stats = cpu, stored, reads, stats
        self.is_asking: Callable[[Tracked, bool], bool] = lambda *_: False
        self.block_size, self.num_state_blocks = stored.block_size, stored.num_state_blocks
        self.by_id: dict[str, Tracked] = {}

    def arrive(self, request: Tracked, num_hbm_blocks: int) -> None:
        """Note which tier holds each block after those in HBM."""
        self.by_id[request.request_id] = request
        request.num_hbm_blocks = num_hbm_blocks
        self.look_again(request)
        request.num_told = len(request.arrival)
        if request.conversation is not None:
            self._stored.claim(request.loads.chain, request.lineage, request.conversation)

    def look_again(self, request: Tracked) -> bool:
        """Check whether more of its blocks are known to be stored by now. Reads that have begun stay as they are."""
        first, end = request.num_hbm_blocks + len(request.arrival), request.num_loadable(self.block_size)
        if self.num_state_blocks:
            if request.arrival or (restored := self._stored.restorable(request, first, end)) is None:
                return False
            request.restored, end = restored, len(restored.chain)
        found = self._stored.tiers(request.loads.chain, first, end)
        request.arrival += found
        return bool(found)

    def border(self, request: Tracked) -> int:
        """The number of blocks of its own, not of its state, that may be loaded for it, or are in HBM before those."""
        if not self.num_state_blocks:
            return request.num_loadable(self.block_size)
        return 0 if request.restored is None else len(request.restored.chain) - self.num_state_blocks

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
                self._stats.given_up_tokens += (wanted.end - index) * self.block_size
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

    def hand_out(
        self, request: Tracked, block_numbers: Sequence[int], first_block: int, num_blocks: int, slot: int | None
    ) -> tuple[list[Load], list[StatePiece]]:
        """Turn held arena blocks into loads into these HBM blocks, and of a state into its slot; the references go with
        them.
        """
        wanted, size, border = request.wanted, self.block_size, first_block + num_blocks
        loads = [
            Load(number, wanted.arena_blocks.pop(index), index * size, request.chain[index])
            for index, number in enumerate(block_numbers[:num_blocks], start=first_block)
        ]
        pieces: list[StatePiece] = []
        if slot is not None:
            pieces = [StatePiece(slot, i - border, wanted.arena_blocks.pop(i)) for i in range(border, wanted.end)]
        wanted.read_ahead.difference_update(range(first_block, border + len(pieces)))
        if border + len(pieces) >= wanted.end:
            self.let_go(request)
        else:
            self.advance(request, border)
        self._stats.loaded_tokens += len(loads) * size
        return loads, pieces

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


class Prefetcher:
    """num_disk_blocks: the disk's capacity, 0 without one. choose: decides how a request gets what it wants.

    refresh: called with conversations that enter or leave the window. may_read: whether there is a tier below the CPU
    tier; None: only if there is a disk.
    """

    def __init__(
        self,
        cpu: CpuTier,
        requests: Requests,
        choose: Callable[[Tracked], LoadChoice],
        num_disk_blocks: int,
        refresh: Callable[[Conversation], None],
        may_read: bool | None = None,
    ) -> None:
        self._cpu, self._requests, self._choose = cpu, requests, choose
        self._may_read = num_disk_blocks > 0 if may_read is None else may_read
        num_arena_blocks = cpu.pool.num_blocks
        may_keep_blank = self._may_read and cpu.keep and num_arena_blocks >= 4 * BLANK_SHARE
        self.num_blank = num_arena_blocks // BLANK_SHARE if may_keep_blank else 0
        self._num_for_saves = num_arena_blocks // SAVE_SHARE if may_keep_blank else 0
        self.waiting = LookAhead(num_arena_blocks - self.num_blank, num_disk_blocks, refresh)
        self.hints: dict[int, Tracked] = {}  # in the order in which they came
        self._hint_numbers = count()
        self._has_changed = False
        self._num_new = 0  # requests that have come since all were examined

    def arrive(self, request: Tracked) -> None:
        """A request waits from now on. What it needs from disk is read ahead; if many wait, only from the next step
        on.
        """
        assert request.conversation is not None and request.key is not None
        num_blocks = len(request.arrival) if request.may_load else 0
        self.waiting.add(request.request_id, request.key, request.conversation, num_blocks)
        self._has_changed = True
        self._num_new += 1
        if NEW_SHARE * self._num_new >= len(self.waiting):  # else thousands would be examined thousands of times
            self.poll()

    def answered(self, request: Tracked) -> bool:
        """A tier has said what is stored for a request. Returns False if the request has been removed meanwhile."""
        if self._requests.by_id.get(request.request_id) is not request:
            return False
        if self._requests.look_again(request):
            if request.request_id in self.waiting:
                assert request.conversation is not None and request.key is not None
                self.waiting.add(request.request_id, request.key, request.conversation, len(request.arrival))
            self._has_changed = True
        return True

    def start(self, request: Tracked) -> None:
        """A request runs in the next step."""
        if request.request_id in self.waiting:
            self.waiting.start(request.request_id)
            if not request.wanted.is_open:
                self._requests.let_go(request)  # the scheduler never asks for a choice that shares its prompt's blocks
            self._has_changed = True

    def remove(self, request_id: str) -> None:
        """A request has ended or was preempted; it no longer holds anything."""
        self.waiting.remove(request_id)
        self._has_changed = True

    def landed(self) -> None:
        """A read has ended."""
        self._has_changed = True

    def poll(self) -> None:
        """Called once per step: read for the requests that come next, and mark what they need."""
        if self._has_changed and self._may_read:
            self._has_changed, self._num_new = False, 0
            self.waiting.num_cpu_blocks = self._num_arena_blocks_to_fill()
            for waiting in self.waiting.to_prefetch():
                request = self._requests.by_id[waiting.request_id]  # type: ignore[index]
                if request.may_load and request.arrival and not self._requests.is_asking(request, False):
                    self._read_ahead(request)
            for name, hint in list(self.hints.items()):
                self._requests.advance(hint, hint.wanted.first)
                if hint.wanted.is_ready():
                    self._drop_hint(name)
        if self.num_blank:  # now that what a request which has just come needs is held
            self._cpu.keep_blank(self.num_blank)

    def _num_arena_blocks_to_fill(self) -> int:
        """All arena blocks but those kept blank, and those that running requests hold or may need for saves."""
        num_held = sum(len(one.wanted.arena_blocks) for one in (*self._holders(), *self.hints.values()))
        pool = self._cpu.pool
        num_others = max(self._num_for_saves, pool.num_in_use - num_held)
        return pool.num_blocks - self.num_blank - num_others

    def _holders(self) -> Iterator[Tracked]:
        """Waiting requests that hold arena blocks: few of perhaps thousands."""
        requests = self._requests.by_id.values()
        return (request for request in requests if request.wanted.arena_blocks and request.request_id in self.waiting)

    def _read_ahead(self, request: Tracked) -> None:
        """Read what is better loaded than computed, as far as can be said by now."""
        if not request.wanted.is_begun:
            end = self._requests.border(request) + self._requests.num_state_blocks
            self._requests.hold(request, request.num_hbm_blocks, end)
        self._requests.advance(request, request.wanted.first)
        if request.wanted.front < request.wanted.lowest:  # otherwise all of its reads have begun
            choice = self._choose(request)
            if choice.way is not Way.COMPUTE:
                self.read(request, choice.num_blocks)

    def read(self, request: Tracked, num_computed: int) -> int | None:
        """Begin to read what it wants after these blocks, if need be into arena blocks of requests behind it. Returns
        the same as `Requests.read`.
        """
        first = request.wanted.front + num_computed
        return self._requests.read(request, first, lambda: self._take_arena_blocks_behind(request))

    def _take_arena_blocks_behind(self, request: Tracked) -> bool:
        """Take arena blocks from a hint, or from the request that is expected to start last. False if all belong to
        earlier ones.
        """
        while self.hints and request.key is not None:
            if self._drop_hint(next(reversed(self.hints))):
                return True
        place = self._place(request)
        behind = [other for other in self._holders() if self._place(other) > place]
        if not behind:
            return False
        self._requests.let_go(max(behind, key=self._place))
        self._has_changed = True
        return True

    def may_wait(self, request: Tracked) -> bool:
        """Whether an earlier request holds arena blocks that it will give back. It never waits for a later one."""
        place = self._place(request)
        return any(other.wanted.arena_blocks and self._place(other) < place for other in self._requests.by_id.values())

    def _place(self, request: Tracked) -> tuple[bool, Rank]:
        """The order of those who want arena blocks: running requests first, hints last. No two are equal, so nobody
        waits in a ring.
        """
        return request.key is None or request.request_id in self.waiting, request.rank

    def hint(self, wanted: Tracked) -> None:
        """Read what is only on disk of this chain into arena blocks that nobody waits for."""
        if self._requests.num_state_blocks and not self._requests.look_again(wanted):
            return
        self._requests.hold(wanted, 0, len(wanted.loads.chain))
        room = self._num_arena_blocks_to_fill() - sum(w.num_blocks for w in self.waiting.to_prefetch())
        room -= sum(len(hint.wanted.arena_blocks) for hint in self.hints.values())
        # A hint takes only what no waiting request needs, and not all of that.
        room = min(room, self._cpu.pool.num_free - self._cpu.pool.num_blocks // 4)
        unread = [index for index in range(wanted.wanted.end) if index not in wanted.wanted.arena_blocks]
        if len(unread) > max(room, 0):
            self._requests.cut(wanted, unread[max(room, 0)])
        self.read_as_hint(wanted)

    def read_as_hint(self, hint: Tracked) -> None:
        """Begin to read what a hint wants, for which nobody waits."""
        short = self._requests.read(hint, hint.wanted.first, lambda: False)
        if short is not None:
            self._requests.cut(hint, short)  # nobody would ever read the rest, or release what it holds
        self._requests.advance(hint, hint.wanted.first)
        if hint.wanted.is_ready():
            self._requests.let_go(hint)
            return
        self.hints[next(self._hint_numbers)] = hint
        if len(self.hints) > MOST_HINTS:
            self._drop_hint(next(iter(self.hints)))

    def _drop_hint(self, name: int) -> bool:
        """Drop a hint; its blocks stay in memory until others need the room. Returns whether some became free."""
        num_free = self._cpu.pool.num_free
        self._requests.let_go(self.hints.pop(name))
        return self._cpu.pool.num_free > num_free

    def drop_hints(self) -> None:
        for name in list(self.hints):
            self._drop_hint(name)

    def as_dict(self) -> dict[str, object]:
        return {"waiting": len(self.waiting), "hints": len(self.hints), "blank_blocks": self._cpu.pool.num_blank}

    def check_integrity(self, idle: bool) -> None:
        """Assert that only requests that are there wait, and with `idle` that nothing is held."""
        assert not idle or not len(self.waiting), f"{len(self.waiting)} requests wait while idle"
        assert not idle or not self.hints, f"{len(self.hints)} hints hold arena blocks while idle"
