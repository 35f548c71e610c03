"""The order in which conversations of one tier are evicted: fifo, lru or return, which is also auto.

Control plane, metadata only. Knows conversations and their ranks, not their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from kvstore.policy.conversation import Conversation
from kvstore.policy.return_model import LOWER_S, UPPER_S, AgeShelves, Entry, ReturnModel, SortedEntries, bucket_of

POLICIES = ("auto", "fifo", "lru", "return")


class EvictionQueue(Protocol):
    """Conversations ordered by one policy. It remembers the keys under which it has put them."""

    def add(self, conversation: Conversation) -> None:
        """Add by its present state, or move it."""
        ...

    def discard(self, conversation: Conversation) -> None:
        """Remove it; ignores unknown ones."""
        ...

    def first(self, now_s: float) -> Conversation | None:
        """The least valuable conversation, without removing it."""
        ...

    def until_s(self) -> float:
        """When time alone may change the last answer of `first`."""
        ...


class KeyQueue:
    """Ordered by a key, the smallest first."""

    def __init__(self, key_of: Callable[[Conversation], Entry]) -> None:
        self._key_of = key_of
        self._sorted = SortedEntries()
        self._entries: dict[Conversation, Entry] = {}

    def add(self, conversation: Conversation) -> None:
        self.discard(conversation)
        key = self._key_of(conversation)
        entry = self._entries[conversation] = (*key, conversation.number, conversation.branch, conversation)
        self._sorted.add(entry)

    def discard(self, conversation: Conversation) -> None:
        entry = self._entries.pop(conversation, None)
        if entry is not None:
            self._sorted.remove(entry)

    def first(self, now_s: float) -> Conversation | None:
        return self._sorted.first()[-1] if self._entries else None

    def first_s(self) -> float:
        """The earliest key, if keys are times."""
        return self._sorted.first()[0] if self._entries else math.inf

    def until_s(self) -> float:
        return math.inf


class ReturnQueue:
    """Ordered by the model's rank of category and age; within a shelf, and of equal ranks, the oldest first.

    The first of each category is kept with the time until which it stays first if nothing is added or removed: age
    changes an answer only when a conversation reaches a shelf of lower rank, or the first one leaves its shelf.
    """

    def __init__(self, model: ReturnModel) -> None:
        self._model = model
        self._table = model.table
        self._shelves = AgeShelves()
        self._firsts: dict[int, Entry] = {}  # by category: (rank, *entry)
        self._until_s: dict[int, float] = {}
        self._lower_s: dict[int, float] = {}  # the smallest age, below that of the first, of a lower rank
        self._lower: dict[tuple[int, int], list[int]] = {}  # see _lower_than
        self._changed: set[int] = set()  # categories to examine again
        self._first: Conversation | None = None
        self._first_until_s = math.inf

    def add(self, conversation: Conversation) -> None:
        self.discard(conversation)
        shelf = self._shelves.add(conversation)
        category = shelf.category
        if category not in self._firsts or self._shelves.rows[category].last() is not shelf.entry:
            self._changed.add(category)
        elif category not in self._changed:  # the youngest: nothing changes until it reaches a lower rank
            until_s = shelf.used_s + self._lower_s[category]
            self._until_s[category] = min(until_s, self._until_s[category])
            self._first_until_s = min(until_s, self._first_until_s)

    def discard(self, conversation: Conversation) -> None:
        shelf = self._shelves.discard(conversation)
        if shelf is not None:
            first = self._firsts.get(shelf.category)
            if first is None or first[-1] is conversation:
                self._changed.add(shelf.category)

    def first(self, now_s: float) -> Conversation | None:
        table = self._model.table  # read once, as another thread may publish a new one
        if table is not self._table:
            self._table = table
            self._lower.clear()
            self._changed.update(self._shelves.rows)
        if now_s >= self._first_until_s:
            self._changed.update(category for category, until_s in self._until_s.items() if until_s <= now_s)
        if self._changed:
            self._look_again(now_s)
        return self._first

    def until_s(self) -> float:
        return self._first_until_s

    def _look_again(self, now_s: float) -> None:
        for category in self._changed:
            row = self._shelves.rows.get(category)
            if row is not None:
                self._look_at(category, row, now_s)
            elif self._firsts.pop(category, None) is not None:
                del self._until_s[category], self._lower_s[category]
        self._changed.clear()
        self._first = min(self._firsts.values())[-1] if self._firsts else None
        self._first_until_s = min(self._until_s.values(), default=math.inf)

    def _look_at(self, category: int, row: SortedEntries, now_s: float) -> None:
        """Find the first of a category that is not empty, and how long it stays first."""
        first = row.first()
        place = bucket_of(now_s - first[0])
        until_s, lower_s = first[0] + UPPER_S[place], math.inf
        for bucket in self._lower_than(category, place):
            lower_s = min(lower_s, LOWER_S[bucket])
            # The oldest one that has not left this bucket; it may have not yet reached it.
            entry = row.first_from((now_s - UPPER_S[bucket], math.inf))
            if entry is None:
                continue  # all are older
            if bucket_of(now_s - entry[0]) >= bucket:
                first, place = entry, bucket
                until_s = min(until_s, entry[0] + UPPER_S[bucket])
                break
            until_s = min(until_s, entry[0] + LOWER_S[bucket])
        self._firsts[category] = (self._table.ranks[category][place], *first)
        self._until_s[category], self._lower_s[category] = until_s, lower_s

    def _lower_than(self, category: int, bucket: int) -> list[int]:
        """The younger buckets of lower rank, in rising rank; few or none if value falls with age."""
        if (found := self._lower.get((category, bucket))) is None:
            ranks = self._table.ranks[category]
            younger = range(bucket - 1, -1, -1)  # sorting is stable: of equal ranks the older one first
            found = sorted((b for b in younger if ranks[b] < ranks[bucket]), key=ranks.__getitem__)
            self._lower[category, bucket] = found
        return found


def _by_number(conversation: Conversation) -> Entry:
    return ()


def _by_use(conversation: Conversation) -> Entry:
    return conversation.use, conversation.used_s  # adopted ones have no `use` yet


def _by_want(conversation: Conversation) -> Entry:
    wanted = conversation.wanted  # read once: it may change in another thread; a refresh follows
    return (math.inf, 0) if wanted is None else (-wanted[0], -wanted[1])


class TimeQueue:
    """Ordered by a time that is given, the earliest first."""

    def __init__(self) -> None:
        self._at_s: dict[Conversation, float] = {}
        self._queue = KeyQueue(lambda conversation: (self._at_s[conversation],))

    def set(self, conversation: Conversation, at_s: float) -> None:
        """Add or move it; math.inf removes it."""
        if conversation in self._at_s:
            self._queue.discard(conversation)
            del self._at_s[conversation]
        if at_s < math.inf:
            self._at_s[conversation] = at_s
            self._queue.add(conversation)

    def first(self) -> Conversation | None:
        return self._queue.first(0.0)

    def first_s(self) -> float:
        """When the first is due; math.inf when there is none."""
        return self._queue.first_s()


def policy_in_force(policy: str) -> str:
    """Which policy orders conversations."""
    return "return" if policy == "auto" else policy


class EvictionOrder:
    """Conversations of one tier with a block to evict now, the least valuable first.

    The order: expired ones; ordinary ones by policy; pinned ones, by the end of their pins; those that a waiting
    request wants (expired or not), the last to be served first; those with a running request. So pins and wants are
    priorities, not locks. For one thread, except `refresh`, which any thread may call: it only notes the change, and
    `first` reads it.
    """

    def __init__(self, policy: str, model: ReturnModel, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        key_of = {"fifo": _by_number, "lru": _by_use}.get(policy)
        self._ordinary: EvictionQueue = ReturnQueue(model) if key_of is None else KeyQueue(key_of)
        self._expired = KeyQueue(lambda conversation: (conversation.expires_s,))
        self._pinned = KeyQueue(lambda conversation: (conversation.pinned_until_s,))
        self._wanted = KeyQueue(_by_want)
        self._changes = TimeQueue()  # when each moves to another queue
        self._queues: dict[Conversation, EvictionQueue | None] = {}  # of each member the queue it is in
        self._dirty: set[Conversation] = set()
        self._table = model.table
        self._first: Conversation | None = None
        self._first_until_s = -math.inf  # until then it stays first if nothing happens

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._queues

    def add(self, conversation: Conversation) -> None:
        """Add a conversation that has a block to evict; does nothing if it is here."""
        if conversation not in self._queues:
            self._queues[conversation] = None  # set before reading its state, so that no refresh is lost
            self._dirty.add(conversation)

    def discard(self, conversation: Conversation) -> None:
        """Remove a conversation without a block to evict; ignores unknown ones."""
        queue = self._queues.pop(conversation, None)
        self._dirty.discard(conversation)
        if queue is not None:
            queue.discard(conversation)
            self._changes.set(conversation, math.inf)
            if conversation is self._first:
                self._first_until_s = -math.inf

    def refresh(self, conversation: Conversation) -> None:
        """Note that its state has changed; call it after the change. Ignores unknown ones."""
        if conversation in self._queues:
            self._dirty.add(conversation)

    def first(self) -> Conversation | None:
        """The conversation whose tail to evict next, without removing it; None when empty."""
        now_s = self._clock()
        if now_s < self._first_until_s and not self._dirty and self._model.table is self._table:
            return (
                self._first
            )  # unchanged: this is called for every block, and most continue the last one's conversation
        self._table = self._model.table
        while self._dirty:
            self._put(self._dirty.pop(), now_s)
        while self._changes.first_s() <= now_s:
            self._put(self._changes.first(), now_s)
        found = self._expired.first(now_s) or self._ordinary.first(now_s)
        self._first = found or self._pinned.first(now_s) or self._wanted.first(now_s)
        self._first_until_s = min(self._changes.first_s(), self._ordinary.until_s())
        return self._first

    def _put(self, conversation: Conversation | None, now_s: float) -> None:
        if conversation is None or conversation not in self._queues:
            return
        queue, change_s = self._queue_for(conversation, now_s)
        before = self._queues[conversation]
        if before is not None and before is not queue:
            before.discard(conversation)
        self._queues[conversation] = queue
        queue.add(conversation)
        self._changes.set(conversation, change_s)

    def _queue_for(self, conversation: Conversation, now_s: float) -> tuple[EvictionQueue, float]:
        """Its queue, and when time alone will change that."""
        expires_s, pinned_until_s = conversation.expires_s, conversation.pinned_until_s
        if conversation.wanted is not None or conversation.num_running:
            return self._wanted, math.inf
        if expires_s <= now_s:
            return self._expired, math.inf
        if pinned_until_s > now_s:
            return self._pinned, min(pinned_until_s, expires_s)
        return self._ordinary, expires_s
