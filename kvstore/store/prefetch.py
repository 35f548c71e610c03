"""Whose blocks are read next, and what a request may load when it is asked for: the queue's order meets the planner.

Control plane, one thread. Waiting requests get slots in the order in which they are expected to start, running ones
before them, hints last; whoever comes earlier may take them from those behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from kvstore.disk.io_queue import Rank
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.lookahead import SAVE_SHARE, LookAhead
from kvstore.policy.planner import Choice, Disk, Planner, Way
from kvstore.stats import StoreStats
from kvstore.store.lookup import Lookup, Lookups, Match, Reader, Tracked

BLANK_SHARE = 16  # one of so many slots is kept empty, so that a read never waits for an eviction
MOST_HINTS = 64
TRIED_BLOCKS = 16  # are read where computing is better: the disk may have become faster
NEW_SHARE = 8  # all who wait are looked at once one of so many has come since the last time
TRIED_SHARE = 4  # one of so many seconds is spent on that at most

_MISS, _PENDING = Match(Lookup.MISS), Match(Lookup.PENDING)


class Prefetcher:
    """num_disk_blocks: capacity of the disk. refresh: called with conversations that enter or leave the window."""

    def __init__(
        self,
        cpu: CpuTier,
        reader: Reader | None,
        lookups: Lookups,
        planner: Planner,
        stats: StoreStats,
        clock: Callable[[], float],
        block_size: int,
        num_disk_blocks: int,
        refresh: Callable[[Conversation], None],
    ) -> None:
        self._cpu = cpu
        self._reader = reader
        self._lookups = lookups
        self._planner = planner
        self._stats = stats
        self._clock = clock
        self._block_size = block_size
        num_slots = cpu.pool.num_blocks
        may_keep_blank = reader is not None and cpu.keep and num_slots >= 4 * BLANK_SHARE
        self.num_blank = num_slots // BLANK_SHARE if may_keep_blank else 0
        self._look_ahead = LookAhead(num_slots - self.num_blank, num_disk_blocks, refresh)
        self._num_for_saves = num_slots // SAVE_SHARE if may_keep_blank else 0
        self._hints: dict[str, Tracked] = {}  # by name, in the order in which they came
        self._hint_numbers = count()
        self._has_changed = False
        self._num_new = 0  # requests that have come since all were looked at
        self._try_at = 0.0

    # -- the life of a request ---------------------------------------------------------------------------------------
    def arrive(self, request: Tracked) -> None:
        """It waits from now on; what it needs from disk is read ahead, where many wait from the next step on."""
        assert request.conversation is not None
        num_blocks = len(request.arrival) if request.may_load else 0
        self._look_ahead.add(request.request_id, request.key, request.conversation, num_blocks)
        self._has_changed = True
        self._num_new += 1
        if NEW_SHARE * self._num_new >= len(self._look_ahead):  # else thousands would be looked at thousands of times
            self.poll()

    def scheduled(self, request: Tracked) -> None:
        """It runs in the next step."""
        if request.request_id not in self._look_ahead:
            return
        self._look_ahead.start(request.request_id)
        if not request.is_open:
            self._lookups.let_go(request)  # a choice that shares its prompt's blocks was never asked for
        self._has_changed = True

    def leave(self, request_id: str) -> None:
        """It has ended or was preempted, and holds nothing any more."""
        self._look_ahead.remove(request_id)
        self._has_changed = True

    def landed(self) -> None:
        """A read has ended."""
        self._has_changed = True

    def poll(self) -> None:
        """Once per step: read for those who come next, and mark what they need."""
        if self.num_blank:
            self._cpu.keep_blank(self.num_blank)
        if not self._has_changed or self._reader is None:
            return
        self._has_changed, self._num_new = False, 0
        self._look_ahead.num_cpu_blocks = self._num_slots_to_fill()
        for waiting in self._look_ahead.to_prefetch():
            request = self._lookups.requests[waiting.request_id]  # type: ignore[index]
            if request.may_load and request.arrival:
                self._read_ahead(request, self._most_blocks(request))
        for name, hint in list(self._hints.items()):
            self._lookups.advance(hint, hint.first)
            if hint.front == hint.end:
                self._drop_hint(name)

    def _most_blocks(self, request: Tracked) -> int:
        """One token is always left to compute."""
        return min((len(request.token_ids) - 1) // self._block_size, len(request.chain))

    def _num_slots_to_fill(self) -> int:
        """The arena less what is kept blank and less what others hold than those who wait, or may need to save."""
        num_held = sum(len(request.slots) for request in self._holders())
        num_held += sum(len(hint.slots) for hint in self._hints.values())
        pool = self._cpu.pool
        num_others = max(self._num_for_saves, pool.num_in_use - num_held)
        return pool.num_blocks - self.num_blank - num_others

    def _holders(self) -> Iterator[Tracked]:
        """Those who wait and hold slots: few of the thousands that may wait."""
        requests = self._lookups.requests.values()
        return (request for request in requests if request.slots and request.request_id in self._look_ahead)

    def _read_ahead(self, request: Tracked, max_blocks: int) -> None:
        """Read what it is better to load than to compute, as far as that can be said by now."""
        if not request.begun:
            self._lookups.hold(request, request.num_hbm_blocks, max_blocks)
        self._lookups.advance(request, request.first)
        if request.front < request.lowest:  # else all its reads have begun
            choice = self._choose(request)
            if choice.way is not Way.COMPUTE:
                self._lookups.read(request, request.front + choice.num_blocks, lambda: self._take_from_behind(request))

    def _choose(self, request: Tracked) -> Choice:
        if not request.is_exact or self._reader is None:  # without a disk: what is on its way is a splice, or a save
            return Choice(Way.LOAD)
        reads = self._reader.reads
        disk = Disk(reads.num_before(request.rank), reads.stalled_s)
        num_blocks, num_unread = request.end - request.front, request.back - request.front
        return self._planner.choose(num_blocks, num_unread, disk, request.is_open)

    def _take_from_behind(self, request: Tracked) -> bool:
        """Slots of a hint, or else of the request that is expected to start last; False: all belong to earlier ones."""
        while self._hints and not request.is_hint:
            name = next(reversed(self._hints))
            if self._drop_hint(name):
                return True
        place = self._place(request)
        behind = [other for other in self._holders() if self._place(other) > place]
        if not behind:
            return False
        self._lookups.let_go(max(behind, key=self._place))
        self._has_changed = True
        return True

    # -- scheduling --------------------------------------------------------------------------------------------------
    def match(self, request: Tracked, first: int, max_blocks: int) -> Match:
        """What can be loaded behind its first blocks; called when it is to be scheduled, or has computed so far."""
        if not request.may_load:
            return _MISS
        if not request.begun:
            self._lookups.hold(request, first, max_blocks)
        elif first < request.first:
            self._lookups.hold_before(request, first)
        self._lookups.advance(request, first)
        is_new, request.is_asked = not request.is_asked, True
        if is_new:
            self._lookups.count_prefetch_hits(request)
        if request.front < request.end and (answer := self._match_unread(request, first, is_new)) is not None:
            return answer
        return self._match_ready(request, first)

    def _match_ready(self, request: Tracked, first: int) -> Match:
        """All that it wants has landed."""
        num_tokens = (request.end - first) * self._block_size
        if num_tokens and (not request.is_exact or self._planner.should_load(num_tokens)):
            request.is_open = False
            return Match(Lookup.HIT, num_tokens)
        self._give_up(request, first)
        return _MISS

    def _give_up(self, request: Tracked, first: int) -> None:
        """The rest is computed. It is not asked again, or gets the same answer."""
        self._lookups.cut(request, first)
        request.is_open = False

    def _match_unread(self, request: Tracked, first: int, is_new: bool) -> Match | None:
        """Something that it wants is not in memory yet. None: it does not want that any more."""
        choice = self._choose(request)
        if choice.way is Way.COMPUTE:
            self._try_disk(request)
            self._lookups.cut(request, request.front)
            return None
        short = self._lookups.read(
            request, request.front + choice.num_blocks, lambda: self._take_from_behind(request)
        )
        if short is not None and not self._may_wait(request):
            self._lookups.cut(request, short)
        self._lookups.advance(request, first)
        if request.front >= request.end:
            return None
        if choice.way is Way.LOAD and is_new and request.is_exact:
            choice = self._planner.measure(request.back - request.front) or choice
        if choice.way is Way.LOAD:
            return _PENDING
        return self._match_both(request, first, choice)

    def _try_disk(self, request: Tracked) -> None:
        """Read the last of these blocks, for which nobody waits: without a measurement nothing would ever be read."""
        now_s = self._clock()
        if now_s < self._try_at or not self._cpu.keep:
            return
        self._try_at = now_s + TRIED_SHARE * TRIED_BLOCKS * self._planner.read_s
        few = Tracked("", request.chain, request.token_ids, request.lineage, request.tenant)
        few.is_hint = few.is_asked = True
        self._lookups.hold(few, max(request.front, request.back - TRIED_BLOCKS), request.back)
        self._add_hint(few, few.first)

    def _match_both(self, request: Tracked, first: int, choice: Choice) -> Match | None:
        """Load what is there, compute the next blocks, and ask again."""
        num_ready = request.front - first
        if num_ready and not self._planner.should_load(num_ready * self._block_size):
            self._lookups.cut(request, first)
            return None
        num_next = min(choice.num_next, request.back - request.front)
        if not num_next:
            return None
        self._stats.split_prefills += not request.is_open
        request.is_open = True
        lookup = Lookup.HIT if num_ready else Lookup.MISS
        return Match(lookup, num_ready * self._block_size, num_next * self._block_size)

    def _may_wait(self, request: Tracked) -> bool:
        """Whether somebody holds slots who will give them back: who comes earlier never waits for this one."""
        place = self._place(request)
        return any(other.slots and self._place(other) < place for other in self._lookups.requests.values())

    def _place(self, request: Tracked) -> tuple[bool, Rank]:
        """Of those who want slots: who runs comes first, a hint last. No two are equal: nobody waits in a ring."""
        return request.is_hint or request.request_id in self._look_ahead, request.rank

    # -- hints -------------------------------------------------------------------------------------------------------
    def hint(self, wanted: Tracked) -> int:
        """Read what of this chain is on disk only, into slots that nobody waits for; returns how many were begun."""
        wanted.is_hint = True
        self._lookups.hold(wanted, 0, len(wanted.chain))
        num_before = self._stats.prefetched
        room = self._num_slots_to_fill() - sum(w.num_blocks for w in self._look_ahead.to_prefetch())
        room -= sum(len(hint.slots) for hint in self._hints.values())
        self._cut_to_room(wanted, room)
        self._add_hint(wanted, 0)
        return self._stats.prefetched - num_before

    def _add_hint(self, hint: Tracked, first: int) -> None:
        short = self._lookups.read(hint, first, lambda: False)
        if short is not None:
            self._lookups.cut(hint, short)  # nobody would ever read the rest, nor let go of what it holds
        self._lookups.advance(hint, first)
        name = f"hint-{next(self._hint_numbers)}"
        self._hints[name] = hint
        if hint.front == hint.end:
            self._drop_hint(name)
        while len(self._hints) > MOST_HINTS:
            self._drop_hint(next(iter(self._hints)))

    def _cut_to_room(self, hint: Tracked, room: int) -> None:
        """A hint takes what no waiting request needs, and not all of that."""
        room = min(room, self._cpu.pool.num_free - self._cpu.pool.num_blocks // 4)
        for index in range(hint.end):
            if index not in hint.slots:
                room -= 1
                if room < 0:
                    self._lookups.cut(hint, index)
                    return

    def _drop_hint(self, name: str) -> bool:
        """Its blocks stay in memory until others need the room. Whether slots became free."""
        num_free = self._cpu.pool.num_free
        self._lookups.let_go(self._hints.pop(name))
        return self._cpu.pool.num_free > num_free

    # -- looking after -----------------------------------------------------------------------------------------------
    def drop_hints(self) -> None:
        for name in list(self._hints):
            self._drop_hint(name)

    def as_dict(self) -> dict[str, object]:
        return {"waiting": len(self._look_ahead), "hints": len(self._hints), "blank_blocks": self._cpu.pool.num_blank}

    def check_integrity(self, idle: bool) -> None:
        """Assert that only requests that are there wait, and with `idle` that nothing is held."""
        assert not idle or not len(self._look_ahead), f"{len(self._look_ahead)} requests wait while idle"
        assert not idle or not self._hints, f"{len(self._hints)} hints hold slots while idle"
