"""Traces: what requests ask of a cache, by the names of their blocks. Makes them of conversations, and makes some up.

Knows neither the files that traces come in (trace_formats does) nor how they are replayed.
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvstore.errors import ConfigError

DEFAULT_BLOCK_SIZE = 128  # of traces that name no blocks; a prompt of a chat has some tens of them
CHAIN_STRIDE = 1 << 32  # chain n of a trace that names no blocks has the names from n * CHAIN_STRIDE on; 0 is shared
MAX_TOKENS = 1 << 30  # of one prompt or answer: more is a mistake in the file
ANSWER_TOKENS_PER_S = 25.0  # of the nominal order of turns whose real time depends on the replay


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    chain: names of the full blocks of its prompt and, with `has_answer`, of prompt and answer together; equal names
    are equal blocks after equal histories. Shorter where the trace does not name all. partial: the name of the
    prompt's last, not full block in traces that name it. arrival_s: absolute, in seconds; with `after` >= 0 the time
    between the end of the request of that index, the one before in the same conversation, and this one's arrival.
    """

    chain: Sequence[int]
    num_tokens: int  # of the prompt
    num_output_tokens: int
    arrival_s: float
    after: int = -1
    partial: int | None = None
    has_answer: bool = False

    def prompt_blocks(self, block_size: int) -> Sequence[int]:
        """Names of the prompt's blocks, the partial one included where it is named."""
        full = self.chain[: self.num_tokens // block_size] if self.has_answer else self.chain
        return full if self.partial is None else [*full, self.partial]


@dataclass(slots=True)
class Trace:
    """Requests in order of arrival; those that follow another stand where a server that is never busy would see them.

    notes: what the reader of a file found odd and how it was read, a sentence each.
    """

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    notes: tuple[str, ...] = ()


class SplicedChain(Sequence[int]):
    """Names of a conversation that begins with shared blocks: two ranges, so that a million chains fit in memory."""

    __slots__ = ("_own", "_shared")

    def __init__(self, shared: range, own: range) -> None:
        self._shared, self._own = shared, own

    def __len__(self) -> int:
        return len(self._shared) + len(self._own)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._shared, self._own)

    def __reversed__(self) -> Iterator[int]:
        return itertools.chain(reversed(self._own), reversed(self._shared))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        num_shared = len(self._shared)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if start >= num_shared and step > 0:
                return self._own[start - num_shared : max(stop - num_shared, 0) : step]
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return SplicedChain(self._shared[start:stop], self._own[: max(stop - num_shared, 0)])
        position = range(len(self))[index]
        return self._shared[position] if position < num_shared else self._own[position - num_shared]


def chain_names(number: int, num_blocks: int, num_shared: int = 0) -> Sequence[int]:
    """Names of chain `number` (from 1): the first `num_shared` blocks are those of every chain that shares."""
    own = range(number * CHAIN_STRIDE, number * CHAIN_STRIDE + max(num_blocks - num_shared, 0))
    return SplicedChain(range(min(num_shared, num_blocks)), own) if num_shared else own


# -- from conversations to requests ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Turn:
    """A message of so many tokens and its answer; gap_s: from the end of the answer before to this message."""

    new_tokens: int
    answer_tokens: int
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How people come and go where a file does not say.

    Conversations arrive as a Poisson process of `rate_per_s`. Between an answer and the next message lies a lognormal
    time: reading an answer of 200 words takes about 50 s and typing the next message 10 to 20 s, hence a median of
    60 s; sigma 1 puts two thirds between 22 and 163 s. Both are assumptions, not measurements. num_conversations: how
    many to draw, with replacement when there are fewer in the file; None takes each of them once, in a random order.
    """

    rate_per_s: float = 1.0
    think_median_s: float = 60.0
    think_sigma: float = 1.0
    num_conversations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("arrival rate", self.rate_per_s), ("median think time", self.think_median_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"the {name} is {value}; give a number above 0")
        if not (self.think_sigma >= 0 and math.isfinite(self.think_sigma)):
            raise ConfigError(f"the sigma of the think time is {self.think_sigma}; give 0 or more")
        if self.num_conversations is not None and self.num_conversations < 1:
            raise ConfigError(f"{self.num_conversations} conversations cannot be drawn; give 1 or more")

    def think_s(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.think_median_s), self.think_sigma)


DEFAULT_ARRIVALS = Arrivals()


class TurnsToRequests:
    """Collects conversations turn by turn and gives the requests in their nominal order.

    Every prompt is the whole history: the system prompt shared by all, the turns before, the new message. Over
    `max_context` tokens the oldest turns are dropped; as the blocks after them then hold other histories, the rest is a
    new chain (behind the shared blocks).
    """

    def __init__(self, block_size: int, system_tokens: int = 0, max_context: int | None = None) -> None:
        if block_size < 1:
            raise ConfigError(f"a block of {block_size} tokens cannot be; give 1 or more")
        if max_context is not None and max_context < system_tokens + 2:
            raise ConfigError(f"a context of {max_context} tokens has no room for a message; give more")
        self._block_size = block_size
        self._system_tokens = system_tokens
        self._num_shared = system_tokens // block_size
        self._max_context = max_context
        self._num_chains = 0
        self._nominal_s = array("d")
        self._drafts: list[TraceRequest] = []  # `after` counts in the order of drafting

    def __len__(self) -> int:
        return len(self._drafts)

    def add(self, start_s: float, turns: Iterable[Turn], history_tokens: int = 0) -> None:
        """A conversation; `history_tokens` stand before its first message."""
        history = deque([history_tokens] if history_tokens else ())
        now_s, num_history, after = start_s, history_tokens, -1
        self._num_chains += 1
        for turn in turns:
            kept, new, answer = self._fit(history, num_history, turn)
            if kept < num_history:
                self._num_chains += 1
            num_tokens = self._system_tokens + kept + new
            num_history = kept + new + answer
            history.append(new + answer)
            num_blocks = (self._system_tokens + num_history) // self._block_size
            chain = chain_names(self._num_chains, num_blocks, self._num_shared)
            now_s += turn.gap_s if after >= 0 else 0.0
            arrival_s = turn.gap_s if after >= 0 else start_s
            after = self._draft(TraceRequest(chain, num_tokens, answer, arrival_s, after, None, True), now_s)
            now_s += answer / ANSWER_TOKENS_PER_S

    def _fit(self, history: deque[int], num_history: int, turn: Turn) -> tuple[int, int, int]:
        """Tokens of the history that is kept, of the message and of the answer."""
        new, answer = max(turn.new_tokens, 1), turn.answer_tokens
        if self._max_context is None:
            return num_history, new, answer
        room = self._max_context - self._system_tokens
        answer = min(answer, room - 1)
        new = min(new, room - answer)
        while history and num_history + new + answer > room:
            num_history -= history.popleft()
        return num_history, new, answer

    def _draft(self, request: TraceRequest, nominal_s: float) -> int:
        self._drafts.append(request)
        self._nominal_s.append(nominal_s)
        return len(self._drafts) - 1

    def requests(self, limit: int | None = None) -> list[TraceRequest]:
        """All, or the first `limit`; each stands behind the one that it follows."""
        order = sorted(range(len(self._drafts)), key=self._nominal_s.__getitem__)[:limit]
        places = array("q", bytes(8 * len(self._drafts)))
        for place, draft in enumerate(order):
            places[draft] = place
        return [self._placed(self._drafts[draft], places) for draft in order]

    @staticmethod
    def _placed(draft: TraceRequest, places: array[int]) -> TraceRequest:
        if draft.after < 0:
            return draft
        return TraceRequest(
            draft.chain, draft.num_tokens, draft.num_output_tokens, draft.arrival_s, places[draft.after], None, True
        )


# -- made-up traffic -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of the generator: people who chat, some of whom return the next day, and programs that call tools.

    tool_share: of the conversations. return_share: of a person's turns, that come a day after the one before.
    Lengths are lognormal, given by median and sigma; the numbers are round guesses, not fitted to any service.
    """

    tool_share: float = 0.3
    return_share: float = 0.05
    mean_tool_turns: float = 10.0
    mean_human_turns: float = 4.0
    tool_gap_s: float = 1.0  # median
    tool_sigma: float = 0.5
    return_s: float = 20 * 3600.0  # median: from one evening to the next afternoon
    return_sigma: float = 0.2
    system_tokens: int = 1024
    message_tokens: tuple[float, float] = (60.0, 1.2)  # median, sigma
    answer_tokens: tuple[float, float] = (250.0, 0.8)
    tool_message_tokens: tuple[float, float] = (300.0, 1.2)
    tool_answer_tokens: tuple[float, float] = (80.0, 0.7)
    max_context: int = 32768


def generate(
    num_requests: int,
    seed: int = 0,
    block_size: int = DEFAULT_BLOCK_SIZE,
    traffic: Traffic = Traffic(),
    arrivals: Arrivals = DEFAULT_ARRIVALS,
) -> Trace:
    """The first `num_requests` requests of made-up traffic; the same seed gives the same."""
    if num_requests < 1:
        raise ConfigError(f"a trace of {num_requests} requests cannot be; give 1 or more")
    rng = random.Random(seed)
    collected = TurnsToRequests(block_size, traffic.system_tokens, traffic.max_context)
    start_s = 0.0
    while len(collected) < num_requests:
        is_tool = rng.random() < traffic.tool_share
        collected.add(start_s, _tool_loop(rng, traffic) if is_tool else _person(rng, traffic, arrivals))
        start_s += rng.expovariate(arrivals.rate_per_s)
    return Trace(f"generated, seed {seed}", block_size, collected.requests(num_requests))


def _num_turns(rng: random.Random, mean: float) -> int:
    """Geometric, at least 1."""
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1


def _tokens(rng: random.Random, median_and_sigma: tuple[float, float]) -> int:
    median, sigma = median_and_sigma
    return min(max(1, round(rng.lognormvariate(math.log(median), sigma))), MAX_TOKENS)


def _tool_loop(rng: random.Random, traffic: Traffic) -> Iterator[Turn]:
    for _ in range(_num_turns(rng, traffic.mean_tool_turns)):
        gap_s = rng.lognormvariate(math.log(traffic.tool_gap_s), traffic.tool_sigma)
        yield Turn(_tokens(rng, traffic.tool_message_tokens), _tokens(rng, traffic.tool_answer_tokens), gap_s)


def _person(rng: random.Random, traffic: Traffic, arrivals: Arrivals) -> Iterator[Turn]:
    for _ in range(_num_turns(rng, traffic.mean_human_turns)):
        if rng.random() < traffic.return_share:
            gap_s = rng.lognormvariate(math.log(traffic.return_s), traffic.return_sigma)
        else:
            gap_s = arrivals.think_s(rng)
        yield Turn(_tokens(rng, traffic.message_tokens), _tokens(rng, traffic.answer_tokens), gap_s)
