"""Whose blocks are read next; and what a request may load when it is scheduled, what is worth waiting for, what it
computes instead.

Waiting requests get arena blocks in the order in which they are expected to start. Running requests come before waiting
ones, and hints last. An earlier one may take arena blocks from later ones.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.policy.planner import SAVE_SHARE, LoadChoice, LookAhead, Planner, Way
from kvstore.store.context import StoreContext
from kvstore.store.requests import Requests, Tracked, Wanted
from kvstore.store.seam import Lookup, Match
from kvstore.store.stored import TierReads
from kvstore.tiers.port import Rank

BLANK_SHARE = 16  # one in so many arena blocks is kept empty, so that a read never waits for an eviction
MOST_HINTS = 64
TRIED_BLOCKS = 16  # are read although computing is better: the disk may have become faster
TRIED_SHARE = 4  # at most one second in this many is spent on such reads
NEW_SHARE = 8  # all waiting requests are examined once one in so many is new
_MISS, _PENDING = Match(Lookup.MISS), Match(Lookup.PENDING)


class Prefetcher:
    """reads: None without a tier below the CPU tier. num_disk_blocks: the disk's capacity, 0 without one."""

    def __init__(
        self, context: StoreContext, requests: Requests, planner: Planner, reads: TierReads | None, num_disk_blocks: int
    ) -> None:
        self._cpu, self._clock, self._requests = context.cpu, context.clock, requests
        self._planner, self._reads = planner, reads
        num_arena_blocks = self._cpu.pool.num_blocks
        may_keep_blank = reads is not None and self._cpu.keep and num_arena_blocks >= 4 * BLANK_SHARE
        self.num_blank = num_arena_blocks // BLANK_SHARE if may_keep_blank else 0
        self._num_for_saves = num_arena_blocks // SAVE_SHARE if may_keep_blank else 0
        self.waiting = LookAhead(num_arena_blocks - self.num_blank, num_disk_blocks, context.steering.refresh)
        self.hints: dict[Tracked, None] = {}  # in the order in which they came
        self._has_changed = False
        self._num_new = 0  # requests that have come since all were examined
        self._try_at = 0.0  # when the disk may be tried again

    # -- reading ahead -----------------------------------------------------------------------------------------------
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
        """A tier has said what is there for a request or a hint. Returns whether it is a request that has not left."""
        if request.key is None:
            self.hint(request)
            return False
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
        if self._has_changed and self._reads is not None:
            self._has_changed, self._num_new = False, 0
            self.waiting.num_cpu_blocks = self._num_arena_blocks_to_fill()
            for waiting in self.waiting.to_prefetch():
                request = self._requests.by_id[waiting.request_id]  # type: ignore[index]
                if request.may_load and request.arrival and request.waits_until_s is None:
                    self._read_ahead(request)
            for hint in list(self.hints):
                self._requests.advance(hint, hint.wanted.first)
                if hint.wanted.is_ready():
                    self._drop_hint(hint)
        if self.num_blank:  # now that what a request which has just come needs is held
            self._cpu.keep_blank(self.num_blank)

    def _num_arena_blocks_to_fill(self) -> int:
        """All arena blocks but those kept blank, and those that running requests hold or may need for saves."""
        num_held = sum(len(one.wanted.arena_blocks) for one in (*self._holders(), *self.hints))
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
            whole, size = request.restored, self._requests.block_size
            end = request.num_loadable(size) if whole is None else len(whole.chain)
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
        if self._requests.keeps_states and not self._requests.look_again(wanted):
            return
        self._requests.hold(wanted, 0, len(wanted.loads.chain))
        room = self._num_arena_blocks_to_fill() - sum(w.num_blocks for w in self.waiting.to_prefetch())
        room -= sum(len(hint.wanted.arena_blocks) for hint in self.hints)
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
        self.hints[hint] = None
        if len(self.hints) > MOST_HINTS:
            self._drop_hint(next(iter(self.hints)))

    def _drop_hint(self, hint: Tracked) -> bool:
        """Drop a hint; its blocks stay in memory until others need the room. Returns whether some became free."""
        num_free = self._cpu.pool.num_free
        del self.hints[hint]
        self._requests.let_go(hint)
        return self._cpu.pool.num_free > num_free

    def drop_hints(self) -> None:
        for hint in list(self.hints):
            self._drop_hint(hint)

    # -- what a request may load when it is scheduled ----------------------------------------------------------------
    def match(self, request: Tracked, first: int, end: int) -> Match:
        """Which of blocks [first, end) can be loaded. Called when a request is to be scheduled, or has computed this
        far.
        """
        if not request.may_load:
            return _MISS
        if request.is_waiting(self._clock()):
            return _PENDING
        if self._requests.keeps_states:
            if request.restored is not None and first >= request.border:  # HBM has got more than that meanwhile
                self._requests.let_go(request)
            if first != request.num_hbm_blocks and not request.wanted.is_begun:
                self._requests.find_state(request, first)
            if request.is_computed or request.restored is None:
                return _MISS
            end = len(request.restored.chain)
        is_new, wanted = self._requests.ask(request, first, end), request.wanted
        if wanted.is_ready():
            return self._load(request, first)
        choice = self._choose(request)
        if choice.way is Way.COMPUTE:
            self._try_disk(request)
            if request.restored is not None:
                return self._compute(request)
            self._requests.cut(request, wanted.front)
            return self._load(request, first)
        short = self.read(request, choice.num_blocks)
        if short is not None and not self.may_wait(request):
            request.lacks_room = True
            if request.restored is not None:
                return self._compute(request)
            self._requests.cut(request, short)
        self._requests.advance(request, first)
        if wanted.is_ready():
            return self._load(request, first)
        if choice.way is Way.LOAD and is_new and request.is_exact:
            choice = self._planner.measure(wanted.back - wanted.front) or choice
        return _PENDING if choice.way is Way.LOAD else self._load_and_compute(request, first, choice)

    def _compute(self, request: Tracked) -> Match:
        """Compute all that is stored for it, as that has a state, which is loaded as a whole."""
        self._requests.let_go(request)
        request.is_computed = True
        return _MISS

    def _load(self, request: Tracked, first: int) -> Match:
        """Load everything that it wants: all of that has landed. Where a part of its state was lost, begin with an
        earlier one.
        """
        end = request.wanted.end
        if request.restored is not None:
            if end < len(request.restored.chain):
                request.most_loaded = request.border - 1  # a medium that fails has it for ever
                self._requests.let_go(request)
                self._requests.find_state(request, first)
                return self.match(request, first, end)
            end = request.border
        num_tokens = (end - first) * self._requests.block_size
        self._requests.join(request)
        if num_tokens and (request.is_spliced or self._planner.should_load(num_tokens, request.num_blocks_of_states)):
            return Match(Lookup.HIT, num_tokens)
        if request.restored is not None:
            return self._compute(request)
        self._requests.cut(request, first)  # the answer must be the same if it asks again
        return _MISS

    def _load_and_compute(self, request: Tracked, first: int, choice: LoadChoice) -> Match:
        """Load what is there, compute the next blocks, and ask again."""
        wanted, size = request.wanted, self._requests.block_size
        num_ready = wanted.front - first
        if num_ready and not self._planner.should_load(num_ready * size):
            self._requests.cut(request, first)
            return self._load(request, first)
        num_next = min(choice.num_next, wanted.back - wanted.front)
        if not num_next:
            return self._load(request, first)
        self._requests.split(request)
        return Match(Lookup.HIT if num_ready else Lookup.MISS, num_ready * size, num_next * size)

    def _try_disk(self, request: Tracked) -> None:
        """Read the last of these blocks although nobody waits for them: without measurements, nothing would ever be
        read again.
        """
        now_s = self._clock()
        if now_s < self._try_at or not self._cpu.keep:  # what nobody waits for would not stay
            return
        block_s = self._planner.read_s
        believed = None if self._reads is None else self._reads.believed
        if believed and request.wanted.back and request.tier_at_arrival(request.wanted.back - 1) == believed:
            block_s = self._planner.remote_s
        self._try_at = now_s + TRIED_SHARE * TRIED_BLOCKS * block_s
        wanted = request.wanted
        own = request.chain, request.tokens, request.lineage, request.tenant
        tail = Tracked(*own, restored=request.restored, wanted=Wanted(is_asked=True))
        self._requests.hold(tail, max(wanted.front, wanted.back - TRIED_BLOCKS), wanted.back)
        self.read_as_hint(tail)

    def _choose(self, request: Tracked) -> LoadChoice:
        """How a request should get what it wants."""
        reads = self._reads
        if request.is_spliced or reads is None:  # without a disk, only splices or saves are on their way
            return LoadChoice(Way.LOAD)
        wanted, front = request.wanted, request.wanted.front
        num_ahead = reads.num_before(request.rank, reads.exact)
        unread, slow = wanted.back - front, (0, 0)
        if reads.believed is not None:
            num_remote = sum(request.tier_at_arrival(index) == reads.believed for index in range(front, wanted.back))
            slow = num_remote, reads.num_before(request.rank, reads.believed)
        return self._planner.choose(
            wanted.end - front, unread, num_ahead, reads.stalled_s, wanted.is_open, *slow, request.num_blocks_of_states
        )

    # -- looking after -----------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, object]:
        return {"waiting": len(self.waiting), "hints": len(self.hints), "blank_blocks": self._cpu.pool.num_blank}

    def check_integrity(self, idle: bool) -> None:
        """Assert that only requests that are there wait, and with `idle` that nothing is held."""
        assert not idle or not len(self.waiting), f"{len(self.waiting)} requests wait while idle"
        assert not idle or not self.hints, f"{len(self.hints)} hints hold arena blocks while idle"
