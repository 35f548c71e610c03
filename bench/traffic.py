"""Made-up traffic of several kinds, for replays without a trace: people, agents with tools, documents, a mixture.

The numbers are round guesses from what is known about each kind. They are not fitted to any service or trace.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from kvstore.errors import ConfigError
from kvstore.planning.traces import (
    DEFAULT_BLOCK_SIZE,
    MAX_TOKENS,
    Arrivals,
    CommonPrefix,
    Trace,
    TraceTurn,
    TurnsToRequests,
)

KINDS = ("people", "agents", "documents", "mixed")
MADE_UP_ARRIVALS = Arrivals(rate_per_s=0.1)
MAX_CONTEXT = 32768
SYSTEM = CommonPrefix(0, 1024)  # the system prompt of those who chat
DAY_S = 86400.0
_NIGHT = 0.1  # of the busiest hour's arrivals
_SHARES = {"people": 0.5, "agents": 0.2, "documents": 0.3}  # of the conversations of mixed traffic

_AGENTS = (
    CommonPrefix(1, 2500),
    CommonPrefix(2, 6000),
    CommonPrefix(3, 12000),
)  # system prompts with descriptions of tools
_NUM_LASTING, _NUM_RECENT = 400, 20  # documents of lasting interest, and those of the day
_DOCUMENT_TOKENS = (7000.0, 0.8)


def generate(
    num_requests: int,
    seed: int = 0,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kind: str = "mixed",
    arrivals: Arrivals = MADE_UP_ARRIVALS,
) -> Trace:
    """The first `num_requests` requests of made-up traffic; the same seed gives the same."""
    if num_requests < 1:
        raise ConfigError(f"a trace of {num_requests} requests cannot be; give 1 or more")
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of traffic {kind!r}; known are {', '.join(KINDS)}")
    rng = random.Random(seed)
    library = Library(rng)
    collected = TurnsToRequests(block_size, max_context=MAX_CONTEXT)
    start_s = DAY_S / 4
    while len(collected) < num_requests:
        one = rng.choices(list(_SHARES), list(_SHARES.values()))[0] if kind == "mixed" else kind
        if one == "people":
            prefix, turns = SYSTEM, _person(rng, arrivals)
        elif one == "agents":
            prefix, turns = rng.choices(_AGENTS, (5, 3, 2))[0], _agent(rng, arrivals)
        else:
            prefix, turns = library.draw(), _reader(rng, arrivals)
        collected.add(start_s - DAY_S / 4, turns, prefix=prefix)
        start_s += rng.expovariate(arrivals.rate_per_s * _busyness(start_s))
    return Trace(f"{kind}, seed {seed}", block_size, collected.requests(num_requests))


def _busyness(time_s: float) -> float:
    """How many arrive, by the hour of the day: most at two in the afternoon, few at night."""
    return _NIGHT + (1 - _NIGHT) * (1 - math.cos(2 * math.pi * (time_s / DAY_S - 1 / 12))) / 2


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(median), sigma)


def _tokens(rng: random.Random, median: float, sigma: float) -> int:
    return min(max(1, round(_lognormal(rng, median, sigma))), MAX_TOKENS)


# -- people ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Answer:
    """A kind of answer to a person: its length, and how many people leave for good after it."""

    share: float
    median_tokens: float
    sigma: float
    leaving: float


# A short answer is part of an exchange, or its end. After a long one there is something to read and to try out.
_ANSWERS = (Answer(0.3, 40.0, 0.6, 0.4), Answer(0.5, 250.0, 0.6, 0.2), Answer(0.2, 900.0, 0.5, 0.35))


def _person(rng: random.Random, arrivals: Arrivals) -> Iterator[TraceTurn]:
    """A person who reads at four tokens a second or skims, thinks and types; some pause, a few sleep on it."""
    pace, gap_s = _lognormal(rng, 1.0, 0.5), 0.0
    while True:
        answer = rng.choices(_ANSWERS, [one.share for one in _ANSWERS])[0]
        num_tokens = _tokens(rng, answer.median_tokens, answer.sigma)
        yield TraceTurn(_tokens(rng, 60.0, 1.2), num_tokens, gap_s, calls_tool=False)
        if rng.random() < answer.leaving:
            return
        chance = rng.random()
        if chance < 0.04:
            gap_s = _lognormal(rng, 20 * 3600.0, 0.2)  # from one evening to the next afternoon
        elif chance < 0.15:
            gap_s = _lognormal(rng, 1800.0, 1.2)
        else:
            gap_s = pace * (num_tokens / 8 * rng.random() + arrivals.think_s(rng) / 2)


# -- agents ----------------------------------------------------------------------------------------------------------
def _agent(rng: random.Random, arrivals: Arrivals) -> Iterator[TraceTurn]:
    """Tasks of a person, each a loop of calls and a last answer. Tools take a second, builds and tests longer."""
    gap_s = 0.0
    while True:
        new = _tokens(rng, 120.0, 1.0)
        while rng.random() > 0.12:
            yield TraceTurn(new, _tokens(rng, 80.0, 0.7), gap_s, calls_tool=True)
            if rng.random() < 0.01:
                return  # stopped or failed
            slow = rng.random()
            gap_s = _lognormal(rng, *((60.0, 1.0) if slow < 0.03 else (15.0, 1.0) if slow < 0.2 else (1.2, 0.7)))
            new = _tokens(rng, 350.0, 1.3)
        yield TraceTurn(new, _tokens(rng, 350.0, 0.7), gap_s, calls_tool=False)
        if rng.random() < 0.4:
            return
        gap_s = _lognormal(rng, 1800.0, 1.2) if rng.random() < 0.15 else 2 * arrivals.think_s(rng)


# -- documents -------------------------------------------------------------------------------------------------------
class Library:
    """Documents with which conversations begin: lasting ones by Zipf's law, those of the day, and a person's own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_made = 10
        self._lasting = [self._new() for _ in range(_NUM_LASTING)]
        self._zipf = list(accumulate(1 / rank**0.9 for rank in range(1, _NUM_LASTING + 1)))
        self._recent = [self._new() for _ in range(_NUM_RECENT)]

    def _new(self) -> CommonPrefix:
        self._num_made += 1
        return CommonPrefix(self._num_made, min(_tokens(self._rng, *_DOCUMENT_TOKENS), MAX_CONTEXT * 3 // 4))

    def draw(self) -> CommonPrefix:
        chance = self._rng.random()
        if chance < 0.2:
            return self._new()
        if chance < 0.6:
            return self._lasting[bisect(self._zipf, self._rng.random() * self._zipf[-1])]
        if self._rng.random() < 0.12:  # so one of the day is asked about eight times
            self._recent[self._rng.randrange(_NUM_RECENT)] = self._new()
        return self._rng.choice(self._recent)


def _reader(rng: random.Random, arrivals: Arrivals) -> Iterator[TraceTurn]:
    """A question about a document, and sometimes more."""
    gap_s = 0.0
    while True:
        yield TraceTurn(_tokens(rng, 40.0, 0.8), _tokens(rng, 150.0, 0.8), gap_s, calls_tool=False)
        if rng.random() < 0.6:
            return
        gap_s = arrivals.think_s(rng)
