"""Traces: the requests to a cache, with the names of their blocks. Makes traces of conversations.

Knows neither the files that traces come in (trace_formats does) nor how they are replayed.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    calls_tool: the answer ends in a call of a tool, as far as the trace says.
    """

    chain: Sequence[int]
    num_tokens: int  # of the prompt
    num_output_tokens: int
    arrival_s: float
    after: int = -1
    partial: int | None = None
    has_answer: bool = False
    calls_tool: bool = False


@dataclass(slots=True)
class Trace:
    """Requests in order of arrival. One that follows another is placed where an idle server would see it.

    notes: oddities of the file and how they were read, a sentence each.
    """

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    notes: tuple[str, ...] = ()


def chain_names(number: int, num_blocks: int, num_shared: int = 0, prefix: int = 0) -> Sequence[int]:
    """Names of chain `number` (from 1): the first `num_shared` blocks are those of every chain with this prefix."""
    own = range(number * CHAIN_STRIDE, number * CHAIN_STRIDE + max(num_blocks - num_shared, 0))
    start = -prefix * CHAIN_STRIDE
    return array("q", [*range(start, start + min(num_shared, num_blocks)), *own]) if num_shared else own


# -- from conversations to requests ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TraceTurn:
    """A message of so many tokens and its answer. gap_s: seconds from the end of the previous answer to this message.

    calls_tool: the answer ends in a call of a tool.
    """

    new_tokens: int
    answer_tokens: int
    gap_s: float = 0.0
    calls_tool: bool = False


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A beginning that conversations have in common. Prefixes with the same number are the same."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When people begin conversations and how long they think, for files that do not say.

    Conversations arrive as a Poisson process of `rate_per_s`. The time between an answer and the next message is
    lognormal: reading an answer of 200 words takes about 50 s and typing the next message 10 to 20 s, hence a median of
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

    Every prompt is the whole history: the prefix shared with others, the turns before, the new message. Over
    `max_context` tokens the oldest turns are dropped; as the blocks after them then hold other histories, the rest is a
    new chain (behind the shared blocks).
    """

    def __init__(self, block_size: int, max_context: int | None = None) -> None:
        if block_size < 1:
            raise ConfigError(f"a block of {block_size} tokens cannot be; give 1 or more")
        self._block_size = block_size
        self._max_context = max_context
        self._num_chains = 0
        self._nominal_s = array("d")
        self._drafts: list[TraceRequest] = []  # `after` counts in the order of drafting

    def __len__(self) -> int:
        return len(self._drafts)

    def add(
        self, start_s: float, turns: Iterable[TraceTurn], history_tokens: int = 0,
        prefix: CommonPrefix = CommonPrefix(0, 0),
    ) -> None:  # fmt: skip
        """Add a conversation. `history_tokens` of its own come between the prefix and its first message."""
        room, num_shared = self._room(prefix), prefix.num_tokens // self._block_size
        history = deque([history_tokens] if history_tokens else ())
        now_s, num_history, after = start_s, history_tokens, -1
        self._num_chains += 1
        for turn in turns:
            kept, new, answer = _fit(history, num_history, turn, room)
            if kept < num_history:
                self._num_chains += 1
            num_tokens = prefix.num_tokens + kept + new
            num_history = kept + new + answer
            history.append(new + answer)
            num_blocks = (prefix.num_tokens + num_history) // self._block_size
            chain = chain_names(self._num_chains, num_blocks, num_shared, prefix.number)
            now_s += turn.gap_s if after >= 0 else 0.0
            arrival_s = turn.gap_s if after >= 0 else start_s
            self._drafts.append(TraceRequest(chain, num_tokens, answer, arrival_s, after, None, True, turn.calls_tool))
            self._nominal_s.append(now_s)
            after = len(self._drafts) - 1
            now_s += answer / ANSWER_TOKENS_PER_S

    def _room(self, prefix: CommonPrefix) -> float:
        """The tokens of a context after the prefix."""
        if self._max_context is None:
            return math.inf
        if self._max_context < prefix.num_tokens + 2:
            raise ConfigError(f"a context of {self._max_context} tokens has no room for a message; give more")
        return self._max_context - prefix.num_tokens

    def requests(self, limit: int | None = None) -> list[TraceRequest]:
        """All requests, or the first `limit`; each comes after the one that it follows."""
        order = sorted(range(len(self._drafts)), key=self._nominal_s.__getitem__)[:limit]
        places = array("q", bytes(8 * len(self._drafts)))
        for place, draft in enumerate(order):
            places[draft] = place
        drafts = (self._drafts[draft] for draft in order)
        return [draft if draft.after < 0 else replace(draft, after=places[draft.after]) for draft in drafts]


def _fit(history: deque[int], num_history: int, turn: TraceTurn, room: float) -> tuple[int, int, int]:
    """Tokens of the history that is kept, of the message and of the answer."""
    new, answer = max(turn.new_tokens, 1), turn.answer_tokens
    if room < math.inf:
        answer = min(answer, int(room) - 1)
        new = min(new, int(room) - answer)
    while history and num_history + new + answer > room:
        num_history -= history.popleft()
    return num_history, new, answer
