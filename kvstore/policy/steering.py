"""Ties together conversations, what is learned of their returns, and each tier's eviction order.

Control plane, one thread; an order may be used in another thread. Knows capacities and the lengths of chains, no block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from kvstore.policy.conversation import MAX_KNOWN, Answer, Conversation, Conversations
from kvstore.policy.policies import POLICIES, EvictionOrder, policy_in_force
from kvstore.policy.prefixes import Prefixes
from kvstore.policy.return_model import ReturnLearner, ReturnModel

_STATE_VERSION = 2
LEAST_KNOWN = 10_000
MAX_WAIT_S = 10.0  # to wait for a moment when nothing runs


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
        self, chain: Sequence[Hashable], known: Conversation | None = None, is_stored: bool = False
    ) -> Conversation:
        """A request was queued; see `Conversations.arrive`. Each call needs an `end_request`."""
        conversation = self._conversations.arrive(chain, self._clock(), known, is_stored)
        self.refresh(conversation)
        prefix = conversation.prefix if conversation.turn == 1 else None
        while prefix is not None:
            self.refresh(prefix.entry)
            prefix = prefix.parent
        return conversation

    def end_request(self, conversation: Conversation, chain: Sequence[Hashable], answer: Answer | None = None) -> None:
        """The request has ended or was preempted. chain: with its answer."""
        self._conversations.end_request(conversation, chain, self._clock(), answer)
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
