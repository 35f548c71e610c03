"""Whose blocks are read next.

Waiting requests get arena blocks in the order in which they are expected to start. Running requests come before waiting
ones, and hints last. An earlier one may take arena blocks from later ones.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.planner import SAVE_SHARE, LoadChoice, LookAhead, Way
from kvstore.store.requests import Requests, Tracked
from kvstore.tiers.port import Rank

BLANK_SHARE = 16  # one in so many arena blocks is kept empty, so that a read never waits for an eviction
MOST_HINTS = 64
NEW_SHARE = 8  # all waiting requests are examined once one in so many is new


class Prefetcher:
    """num_disk_blocks: the disk's capacity, 0 without one. choose: decides how a request gets what it wants.

    refresh: called with conversations that enter or leave the window. may_read: whether there is a tier below the CPU
    tier.
    """

    def __init__(
        self,
        cpu: CpuTier,
        requests: Requests,
        choose: Callable[[Tracked], LoadChoice],
        num_disk_blocks: int,
        refresh: Callable[[Conversation], None],
        may_read: bool,
    ) -> None:
        self._cpu, self._requests, self._choose, self._may_read = cpu, requests, choose, may_read
        num_arena_blocks = cpu.pool.num_blocks
        may_keep_blank = may_read and cpu.keep and num_arena_blocks >= 4 * BLANK_SHARE
        self.num_blank = num_arena_blocks // BLANK_SHARE if may_keep_blank else 0
        self._num_for_saves = num_arena_blocks // SAVE_SHARE if may_keep_blank else 0
        self.waiting = LookAhead(num_arena_blocks - self.num_blank, num_disk_blocks, refresh)
        self.hints: dict[Tracked, None] = {}  # in the order in which they came
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
        if self._has_changed and self._may_read:
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

    def as_dict(self) -> dict[str, object]:
        return {"waiting": len(self.waiting), "hints": len(self.hints), "blank_blocks": self._cpu.pool.num_blank}

    def check_integrity(self, idle: bool) -> None:
        """Assert that only requests that are there wait, and with `idle` that nothing is held."""
        assert not idle or not len(self.waiting), f"{len(self.waiting)} requests wait while idle"
        assert not idle or not self.hints, f"{len(self.hints)} hints hold arena blocks while idle"
