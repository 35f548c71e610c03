"""Belady in tiers: evicts the blocks whose next request is furthest away. Replaces the steering of
`kvstore.planning.replay`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush

from kvstore.blocks.ids import BlockId
from kvstore.errors import ConfigError
from kvstore.planning.server_blocks import chain_of, prompt_of
from kvstore.planning.traces import Trace
from kvstore.planning.virtual_io import VirtualClock
from kvstore.policy.conversation import Answer, Conversation, Conversations
from kvstore.policy.policies import Steering


class FurthestFirst:
    """An order of eviction that knows the future."""

    def __init__(self, next_s: Mapping[Conversation, float]) -> None:
        self._next_s = next_s
        self._heap: list[tuple[float, int, int, Conversation]] = []  # also with entries of before a change
        self._members: set[Conversation] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._members

    def add(self, conversation: Conversation) -> None:
        if conversation not in self._members:
            self._members.add(conversation)
            heappush(self._heap, self._entry(conversation))

    def discard(self, conversation: Conversation) -> None:
        self._members.discard(conversation)

    def refresh(self, conversation: Conversation) -> None:
        """Note that a conversation has another next request now."""
        if conversation in self._members:
            heappush(self._heap, self._entry(conversation))

    def first(self) -> Conversation | None:
        while self._heap:
            conversation = self._heap[0][-1]
            if conversation in self._members and self._heap[0] == self._entry(conversation):
                return conversation
            heappop(self._heap)
        return None

    def _entry(self, conversation: Conversation) -> tuple[float, int, int, Conversation]:
        return *self.value(conversation), id(conversation), conversation

    def value(self, conversation: Conversation) -> tuple[float, int]:
        return -self._next_s.get(conversation, math.inf), conversation.number


def next_arrivals(trace: Trace) -> array[float]:
    """For each request: when the next one of its conversation arrives; inf if never."""
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
        conversations.end_request(conversation, chain_of(request) if request.has_answer else prompt, request.arrival_s)
    return found


class Oracle(Steering):
    """Recognises conversations as steering does, and orders them by the trace's future."""

    def __init__(self, trace: Trace, clock: VirtualClock, capacities: Mapping[str, int]) -> None:
        self._trace, self._next_arrivals = trace, next_arrivals(trace)
        self._num_arrived = 0
        self._latest: dict[Conversation, int] = {}
        self._next_s: dict[Conversation, float] = {}
        super().__init__("lru", clock, capacities)
        self._orders = {tier: FurthestFirst(self._next_s) for tier in capacities}  # type: ignore[misc]

    def arrive(
        self, chain: Sequence[Hashable], known: Conversation | None = None, is_stored: bool = False, name: bytes = b""
    ) -> Conversation:
        conversation = super().arrive(chain, known, is_stored, name)
        requests, size = self._trace.requests, self._trace.block_size
        while prompt_of(requests[self._num_arrived], size) != chain:  # one that was refused
            self._num_arrived += 1
        self._latest[conversation] = self._num_arrived
        self._num_arrived += 1
        self._expect(conversation, self._clock())
        return conversation

    def end_request(self, conversation: Conversation, chain: Sequence[Hashable], answer: Answer | None = None) -> None:
        super().end_request(conversation, chain, answer)
        if not conversation.num_open:
            self._expect(conversation, self._next_arrivals[self._latest[conversation]])

    def _expect(self, conversation: Conversation, at_s: float) -> None:
        self._next_s[conversation] = at_s
        self.refresh(conversation)
