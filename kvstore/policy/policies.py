"""The order in which conversations of one tier are evicted: fifo, lru or return, which is also auto.

`Steering` ties these orders together with conversations and with what is learned of their returns, for all tiers.

Control plane, metadata only; an order may be used in another thread. Knows conversations and their ranks, not their
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvstore.policy.conversation import MAX_KNOWN, Answer, Conversation, Conversations
from kvstore.policy.families import Families
from kvstore.policy.prefixes import Prefixes
from kvstore.policy.return_model import (
    LOWER_S,
    UPPER_S,
    AgeShelves,
    Entry,
    ReturnLearner,
    ReturnModel,
    SortedEntries,
    bucket_of,
)

POLICIES = ("auto", "fifo", "lru", "return")
_STATE_VERSION = 2
LEAST_KNOWN = 10_000
MAX_WAIT_S = 10.0  # to wait for a moment when nothing runs


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

    The order: expired ones; ordinary ones by policy; those that wait for sub-agents, and pinned ones, by the end of
    their pins; those that a waiting
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
        if conversation.family is not None:
            pinned_until_s = max(pinned_until_s, conversation.family.keeps_until_s(conversation, now_s))
        if conversation.wanted is not None or conversation.num_running:
            return self._wanted, math.inf
        if expires_s <= now_s:
            return self._expired, math.inf
        if pinned_until_s > now_s:
            return self._pinned, min(pinned_until_s, expires_s)
        return self._ordinary, expires_s


class Steering:
    """Keeps a store's eviction orders up to date; it is told of every request's arrival and end.

    capacities: blocks of each tier. state: from `state()`, or None; an earlier version's is not used. If it cannot be
    read, everything is learned again, and `state_was_bad` is set.
    """

    def __init__(
        self, policy: str, clock: Callable[[], float], capacities: Mapping[str, int], state: object = None
    ) -> None:
        assert policy in POLICIES, f"{policy} is not one of {POLICIES}"
        self._policy = policy
        self._clock = clock
        self._capacities = dict(capacities)
        self._polled_s = -math.inf
        self.state_was_bad = False
        try:
            self._start(state)
        except ValueError:
            self.state_was_bad = True
            self._start(None)

    def _start(self, state: object) -> None:
        self._model = ReturnModel.from_dict(_checked(state))
        self._learner = ReturnLearner(self._model)
        # The tiers can hardly hold more conversations, and each takes a kilobyte.
        most = min(MAX_KNOWN, LEAST_KNOWN + 2 * sum(self._capacities.values()))
        self._prefixes = None
        if self._policy in ("return", "auto"):
            self._prefixes = Prefixes(self._learner, max(self._capacities.values(), default=0))
        begin_prefix = None if self._prefixes is None else self._prefixes.begin
        self._conversations = Conversations(self._learner, most, begin_prefix)
        self._families = Families()
        self._orders = {tier: EvictionOrder(self._policy, self._model, self._clock) for tier in self._capacities}

    def order(self, tier: str) -> EvictionOrder:
        """The order of this tier; the tier's owner adds and discards."""
        return self._orders[tier]

    def conversation_of(self, chain: Sequence[Hashable]) -> Conversation | None:
        """The conversation that this chain is the latest of, or that it continues."""
        return self._conversations.conversation_of(chain)

    def make(self, block_id: Hashable = None, used_s: float | None = None) -> Conversation:
        """Make a conversation for blocks without a known owner; used_s: when they were last used."""
        now_s = self._clock()
        return self._conversations.make(now_s if used_s is None else min(used_s, now_s), block_id)

    def arrive(
        self, chain: Sequence[Hashable], known: Conversation | None = None, is_stored: bool = False, name: bytes = b""
    ) -> Conversation:
        """A request was queued; see `Conversations.arrive`. name: its client's, which sub-agents share. Each call needs
        an `end_request`.
        """
        now_s = self._clock()
        conversation = self._conversations.arrive(chain, now_s, known, is_stored)
        self.refresh(conversation)
        if name or conversation.family is not None:
            for one in self._families.arrive(conversation, name, now_s):
                self.refresh(one)
        prefix = conversation.prefix if conversation.turn == 1 else None
        while prefix is not None:
            self.refresh(prefix.entry)
            prefix = prefix.parent
        return conversation

    def end_request(self, conversation: Conversation, chain: Sequence[Hashable], answer: Answer | None = None) -> None:
        """The request has ended or was preempted. chain: with its answer."""
        now_s = self._clock()
        self._conversations.end_request(conversation, chain, now_s, answer)
        if conversation.family is not None:
            self._families.end_request(conversation, conversation.family, now_s)
        self.refresh(conversation)

    def move(self, conversation: Conversation, chain: Sequence[Hashable]) -> None:
        """Continue a conversation under another chain: a splice."""
        self._conversations.move(conversation, chain)

    def forget(self, block_ids: Iterable[Hashable]) -> None:
        """Forget these deleted blocks and the conversations that end there."""
        self._conversations.forget(block_ids)

    def adopt(self, found: Iterable[tuple[Hashable, Conversation]]) -> None:
        """Conversations of which only the last stored block is known, from `make`. Best in few large batches."""
        self._conversations.adopt(found, self._clock())

    def pin(self, conversation: Conversation, seconds: float | None, expires_s: float | None = None) -> None:
        """See `KVConnector.pin`."""
        if seconds is not None:
            conversation.pinned_until_s = self._clock() + seconds
        if expires_s is not None:
            conversation.expires_s = expires_s
        self.refresh(conversation)

    def refresh(self, conversation: Conversation) -> None:
        """Note that its state has changed, on which orders depend."""
        for order in self._orders.values():
            order.refresh(conversation)

    def poll(self, is_idle: bool = True) -> None:
        """Learn from conversations that stay away.

        Call it once per step: mostly O(1), milliseconds when enough has happened. is_idle: nobody waits for the caller;
        otherwise learning is put off for a while.
        """
        now_s = self._clock()
        if is_idle or not 0 <= now_s - self._polled_s < MAX_WAIT_S:
            self._polled_s = now_s
            self._learner.poll(now_s)

    def state(self) -> dict[str, Any]:
        """The learned state, for JSON."""
        return {"version": _STATE_VERSION, "model": self._model.to_dict()}

    def as_dict(self) -> dict[str, Any]:
        """A dict for stats, small and flat enough for people."""
        return {
            "policy": self._policy,
            "in_force": dict.fromkeys(self._orders, policy_in_force(self._policy)),
            "evictable": {tier: len(order) for tier, order in self._orders.items()},
            "num_conversations": len(self._conversations),
            "num_prefixes": 0 if self._prefixes is None else len(self._prefixes),
            "num_away": self._learner.num_away,
            "num_returns_learned": round(self._model.num_returns),
            "ranks_version": self._model.table.version,
            "state_was_bad": self.state_was_bad,
        }


def _checked(state: object) -> object:
    """The model's part of the state; empty for an earlier version's, which had other categories."""
    if state is None or (isinstance(state, dict) and state.get("version") in range(_STATE_VERSION)):
        return {}
    if not isinstance(state, dict) or state.keys() != {"version", "model"} or state["version"] != _STATE_VERSION:
        raise ValueError(f"state of the steering: expected an object with version {_STATE_VERSION} and model")
    return state["model"]
