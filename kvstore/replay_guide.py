"""Whose blocks go first in a replay: steering as in the engine, or an oracle in its place; and what has expired.

Also the virtual clock. Knows conversations and names of blocks, not where they are.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvstore.block import BlockId
from kvstore.conversation import Answer, Conversation, Conversations
from kvstore.errors import ConfigError
from kvstore.eviction import Order
from kvstore.policy import KeyQueue
from kvstore.steering import Steering
from kvstore.traces import Trace, TraceRequest


class VirtualClock:
    """The time, and what happens when it comes; of equal times, what was planned first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_planned = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def __call__(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any) -> None:
        self._num_planned += 1
        heapq.heappush(self._events, (time_s, self._num_planned, action, argument))

    def run(self) -> None:
        """Until nothing is planned any more."""
        events = self._events
        while events:
            self.now_s, _, action, argument = heapq.heappop(events)
            action(argument)


def chain_of(request: TraceRequest) -> list[BlockId]:
    """Names of the full blocks of prompt and, where known, answer. Pools and indexes take any hashable names."""
    return cast("list[BlockId]", list(request.chain))


def prompt_of(request: TraceRequest, block_size: int) -> list[BlockId]:
    """Names of the full blocks of the prompt."""
    return cast("list[BlockId]", list(request.chain[: request.num_tokens // block_size]))


# -- who goes first --------------------------------------------------------------------------------------------------
class FurthestFirst:
    """An order that knows the future: first whose next request is furthest away."""

    def __init__(self, next_s: Mapping[Conversation, float]) -> None:
        self._queue = KeyQueue(lambda conversation: (-next_s.get(conversation, math.inf),))
        self._members: set[Conversation] = set()

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._members

    def add(self, conversation: Conversation) -> None:
        if conversation not in self._members:
            self._members.add(conversation)
            self._queue.add(conversation)

    def discard(self, conversation: Conversation) -> None:
        self._members.discard(conversation)
        self._queue.discard(conversation)

    def refresh(self, conversation: Conversation) -> None:
        """Its next request is another one now."""
        if conversation in self._members:
            self._queue.add(conversation)

    def first(self) -> Conversation | None:
        return self._queue.first(0.0)


def next_arrivals(trace: Trace) -> array[float]:
    """For each request, when the next one of its conversation arrives; inf: never."""
    if any(request.after >= 0 for request in trace.requests):
        raise ConfigError("belady needs a trace whose arrivals are known; those of this one depend on answers")
    conversations = Conversations()
    found = array("d", [math.inf]) * len(trace.requests)
    latest: dict[Conversation, int] = {}
    seen: set[BlockId] = set()
    for index, request in enumerate(trace.requests):
        prompt = prompt_of(request, trace.block_size)
        is_stored = bool(prompt) and prompt[-1] in seen
        seen.update(prompt)
        conversation = conversations.arrive(prompt, request.arrival_s, is_stored=is_stored)
        if conversation in latest:
            found[latest[conversation]] = request.arrival_s
        latest[conversation] = index
        conversations.leave(conversation, chain_of(request) if request.has_answer else prompt, request.arrival_s)
    return found


class Guide:
    """Steering, told of each request. With the policy `belady` it only recognises conversations."""

    def __init__(self, policy: str, clock: VirtualClock, capacities: Mapping[str, int], trace: Trace) -> None:
        self.policy = policy
        self._clock = clock
        self._tiers = tuple(capacities)
        self.is_oracle = policy == "belady"
        self.steering = Steering("lru" if self.is_oracle else policy, clock, capacities)
        self._next_arrivals = next_arrivals(trace) if self.is_oracle else array("d")
        self._latest: dict[Conversation, int] = {}
        self._next_s: dict[Conversation, float] = {}
        self._oracles = {tier: FurthestFirst(self._next_s) for tier in capacities if self.is_oracle}

    def order(self, tier: str) -> Order:
        return self._oracles[tier] if self.is_oracle else self.steering.order(tier)

    def arrive(self, index: int, prompt: Sequence[BlockId], is_stored: bool) -> Conversation:
        """Request `index` of the trace was queued. is_stored: the last block of its prompt is."""
        self.steering.poll()
        conversation = self.steering.arrive(prompt, is_stored=is_stored)
        if self.is_oracle:
            self._latest[conversation] = index
            self._expect(conversation, self._clock.now_s)
        return conversation

    def leave(self, conversation: Conversation, chain: Sequence[BlockId], request: TraceRequest) -> None:
        """It has ended."""
        self.steering.leave(conversation, chain, Answer(request.num_output_tokens, request.calls_tool))
        if self.is_oracle and not conversation.num_open:
            self._expect(conversation, self._next_arrivals[self._latest[conversation]])

    def refresh(self, conversation: Conversation) -> None:
        """Something of it has changed that the orders go by."""
        self.steering.refresh(conversation)
        for oracle in self._oracles.values():
            oracle.refresh(conversation)

    def _expect(self, conversation: Conversation, at_s: float) -> None:
        self._next_s[conversation] = at_s
        self.refresh(conversation)

    def in_force(self) -> dict[str, str]:
        """The policy that each tier follows now."""
        if self.is_oracle:
            return dict.fromkeys(self._tiers, self.policy)
        return {tier: self.steering.order(tier).policy_in_force for tier in self._tiers}


# -- what expires ----------------------------------------------------------------------------------------------------
class Expiry:
    """Counts the conversations and open requests that have each block, and drops those that nobody has any more.

    drop: called with names of blocks, each before what it builds on.
    """

    def __init__(
        self, ttl_s: float, clock: VirtualClock, steering: Steering, drop: Callable[[Sequence[BlockId]], None]
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._steering = steering
        self._drop = drop
        self._num_users: Counter[BlockId] = Counter()
        self._chains: dict[Conversation, Sequence[BlockId]] = {}

    def arrived(self, conversation: Conversation, prompt: Sequence[BlockId]) -> None:
        """The request keeps its blocks, and its conversation does not expire, as long as it is here."""
        self._steering.expire(conversation, math.inf)
        self._num_users.update(prompt)

    def left(self, conversation: Conversation, prompt: Sequence[BlockId], chain: Sequence[BlockId]) -> None:
        """The request has ended. chain: with its answer."""
        self._use(conversation, chain)
        self._num_users.subtract(prompt)  # none of which is nobody's now
        if not conversation.num_open:
            expires_s = self._clock.now_s + self._ttl_s
            self._steering.expire(conversation, expires_s)
            self._clock.at(expires_s, self._expire, (conversation, conversation.use))

    def _use(self, conversation: Conversation, chain: Sequence[BlockId]) -> None:
        """The conversation has these blocks; what it has behind them or elsewhere it keeps for its time."""
        known = self._chains.get(conversation, ())
        if len(chain) <= len(known) and (not chain or known[len(chain) - 1] == chain[-1]):
            return
        if known and (len(chain) <= len(known) or chain[len(known) - 1] != known[-1]):
            self._clock.at(self._clock.now_s + self._ttl_s, self._give_up, known)  # it went on elsewhere
            known = ()
        self._chains[conversation] = chain
        self._num_users.update(chain[len(known) :])

    def _expire(self, conversation_and_use: tuple[Conversation, int]) -> None:
        conversation, use = conversation_and_use
        if conversation.use == use:  # else it came back meanwhile
            self._give_up(self._chains.pop(conversation, ()))

    def _give_up(self, chain: Sequence[BlockId]) -> None:
        unused: list[BlockId] = []
        for name in reversed(chain):
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                unused.append(name)
        self._drop(unused)
