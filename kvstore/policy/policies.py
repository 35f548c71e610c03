"""The order in which conversations of one tier are evicted: fifo, lru or return, which is also auto.

`Steering` ties these orders together with conversations and with what is learned of their returns, for all tiers.

Control plane, metadata only; an order may be used in another thread. Knows conversations and their ranks, not their
blocks.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from kvstore.policy.conversation import MAX_KNOWN, Answer, Conversation, Conversations, Families
from kvstore.policy.prefixes import Prefixes
from kvstore.policy.return_model import ReturnLearner, ReturnModel, bucket_of

POLICIES = ("auto", "fifo", "lru", "return")
_STATE_VERSION = 2
LEAST_KNOWN = 10_000
PIN_SHARE = 0.5  # of the largest tier, that a tenant's pins may take
MAX_WAIT_S = 10.0  # to wait for a moment when nothing runs
SAMPLE = 512  # conversations that are valued to find some of the least valuable
KEPT_S = 1.0  # for which these are candidates


def policy_in_force(policy: str) -> str:
    """Which policy orders conversations."""
    return "return" if policy == "auto" else policy


class EvictionOrder:
    """Conversations of one tier with a block to evict now, the least valuable first.

    The order: expired ones; ordinary ones by policy; those that wait for sub-agents and pinned ones, by the end of
    that; those that a waiting request wants (expired or not), the last to be served first; those with a running
    request. So pins and wants are priorities, not locks.

    Nothing is kept sorted: values change with time. A sample of members is valued, and the lowest sixteenth of it are
    candidates, taken one after the other, as in the approximated LRU of Redis; each is valued again when it is taken.
    The order of up to SAMPLE members is exact, but for changes by time alone within KEPT_S. Of more, the first one is
    among the lowest twenty-fifth on average.

    For one thread, except `refresh`, which any thread may call: it only notes the change, and `first` reads it.
    """

    def __init__(self, policy: str, model: ReturnModel, clock: Callable[[], float]) -> None:
        self._worth = _BY_POLICY.get(policy, self._by_rank)
        self._model = model
        self._clock = clock
        self._members: list[Conversation] = []
        self._places: dict[Conversation, int] = {}  # in `_members`
        self._random = random.Random(0)
        self._candidates: list[tuple[tuple[float, ...], Conversation]] = []  # with their values, the lowest first
        self._sampled_s = -math.inf
        self._changed: dict[Conversation, None] = {}  # in order, so that a replay replays
        self._table = model.table
        self._first: Conversation | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._places

    def add(self, conversation: Conversation) -> None:
        """Add a conversation that has a block to evict; does nothing if it is here."""
        if conversation not in self._places:
            self._places[conversation] = len(self._members)
            self._members.append(conversation)
            self._changed[conversation] = None

    def discard(self, conversation: Conversation) -> None:
        """Remove a conversation without a block to evict; ignores unknown ones."""
        place = self._places.pop(conversation, None)
        if place is None:
            return
        last = self._members.pop()
        if last is not conversation:
            self._members[place] = last
            self._places[last] = place
        if conversation is self._first:
            self._first = None

    def refresh(self, conversation: Conversation) -> None:
        """Note that its state has changed; call it after the change. Ignores unknown ones."""
        if conversation in self._places:
            self._changed[conversation] = None

    def first(self) -> Conversation | None:
        """The conversation whose tail to evict next, without removing it; None when empty."""
        now_s, candidates = self._clock(), self._candidates
        if self._model.table is not self._table or not 0 <= now_s - self._sampled_s < KEPT_S:
            candidates.clear()
        elif self._first is not None and not self._changed:
            return self._first  # this is called for every block, and most continue the last one's conversation
        while self._changed:
            if (one := self._changed.popitem()[0]) in self._places:
                self._consider(self._value(one, now_s), one)
        self._first = None
        while self._members and self._first is None:
            if not candidates:
                self._sample(now_s)
            value, one = candidates[0]
            if one not in self._places:
                del candidates[0]
            elif (value_now := self._value(one, now_s)) <= value:
                self._first = one
            else:
                del candidates[0]
                self._consider(value_now, one)
        return self._first

    def value(self, conversation: Conversation) -> tuple[float, ...]:
        """Its class, its worth within that, and what tells equals apart; the lowest is evicted first."""
        return self._value(conversation, self._clock())

    def _consider(self, value: tuple[float, ...], one: Conversation) -> None:
        """Put it among the candidates, unless it is worth more than all of them: then others may be worth less."""
        if self._candidates and value < self._candidates[-1][0]:
            insort(self._candidates, (value, one), key=itemgetter(0))

    def _sample(self, now_s: float) -> None:
        self._table, self._sampled_s = self._model.table, now_s
        members = self._members
        found = members if len(members) <= SAMPLE else self._random.sample(members, SAMPLE)
        self._candidates += sorted(((self._value(one, now_s), one) for one in found), key=itemgetter(0))
        del self._candidates[max(1, SAMPLE // 16) :]

    def _value(self, conversation: Conversation, now_s: float) -> tuple[float, ...]:
        wanted, pinned_until_s = conversation.wanted, conversation.pinned_until_s  # another thread may change them
        if conversation.num_running:
            value: tuple[float, ...] = (4,)
        elif wanted is not None:
            value = (3, -wanted[0], -wanted[1])
        elif conversation.expires_s <= now_s:
            value = (0, conversation.expires_s)
        else:
            if conversation.family is not None:
                pinned_until_s = max(pinned_until_s, conversation.family.keeps_until_s(conversation, now_s))
            value = (2, pinned_until_s) if pinned_until_s > now_s else (1, *self._worth(conversation, now_s))
        return (*value, conversation.number, conversation.use)  # a remnant has an earlier use

    def _by_rank(self, conversation: Conversation, now_s: float) -> tuple[float, ...]:
        used_s = conversation.used_s
        return self._table.ranks[conversation.category][bucket_of(now_s - used_s)], used_s, conversation.use


def _by_use(conversation: Conversation, now_s: float) -> tuple[float, ...]:
    return conversation.use, conversation.used_s  # adopted ones have no `use` yet


_BY_POLICY = {"fifo": lambda conversation, now_s: (), "lru": _by_use}


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
        self._pins: dict[str, dict[Conversation, int]] = {}  # blocks, by tenant; the last one pinned is the last
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
        self.conversation_of, self.move = self._conversations.conversation_of, self._conversations.move
        self.forget = self._conversations.forget
        self._families = Families()
        self._orders = {tier: EvictionOrder(self._policy, self._model, self._clock) for tier in self._capacities}

    def order(self, tier: str) -> EvictionOrder:
        """The order of this tier; the tier's owner adds and discards."""
        return self._orders[tier]

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

    def adopt(self, found: Iterable[tuple[Hashable, Conversation]]) -> None:
        """Conversations of which only the last stored block is known, from `make`. Best in few large batches."""
        self._conversations.adopt(found, self._clock())

    def pin(
        self, conversation: Conversation, seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None, num_blocks: int = 1,
    ) -> None:  # fmt: skip
        """See `KVConnector.pin`. num_blocks: of its chain."""
        if seconds is not None:
            conversation.pinned_until_s = self._clock() + seconds
            if tenant is not None:
                self._limit_pins(tenant, conversation, num_blocks)
        if expires_s is not None:
            conversation.expires_s = expires_s
        self.refresh(conversation)

    def _limit_pins(self, tenant: str, conversation: Conversation, num_blocks: int) -> None:
        """End pins of a tenant beyond its share, those first that were pinned first."""
        pins, now_s = self._pins.pop(tenant, {}), self._clock()
        pins.pop(conversation, None)
        pins[conversation] = num_blocks
        pins = {one: size for one, size in pins.items() if one.pinned_until_s > now_s}
        num_beyond = sum(pins.values()) - PIN_SHARE * max(self._capacities.values())
        while num_beyond > 0:
            earliest = next(iter(pins))
            num_beyond -= pins.pop(earliest)
            earliest.pinned_until_s = 0.0
            self.refresh(earliest)
        if pins:
            self._pins[tenant] = pins

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
