"""Ghost caches: what each policy would hit at the capacity of a tier, found out on a sample and without any block.

Control plane, metadata only. Counts blocks of conversations; knows no real block, and changes no conversation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvstore.conversation import Conversation
from kvstore.policy import FIXED_POLICIES, make_queue
from kvstore.return_model import ReturnModel

_MASK = (1 << 64) - 1
_GROWTH = 2 ** (1 / 512)  # a score counts half after so many sampled requests
_MAX_WEIGHT = 1e12
_MIN_REQUESTS = 64.0  # sampled ones, before the first choice
_MIN_GAIN, _MIN_SHARE = 0.02, 0.005  # of the hits now, of the blocks wanted: what another policy must gain
_MIN_DEVIATIONS = 3.0  # and it must be no chance: so many standard deviations of the sum of differences


def split_mix_64(number: int) -> int:
    """An even hash of 64 bits (Steele, Lea and Flood, OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class Ghost:
    """A cache of one policy that has only counts: how many blocks, from its head, each conversation has left.

    As in the tiers, what a request waits for goes after all others, the last to come going first.
    """

    def __init__(self, policy: str, model: ReturnModel) -> None:
        self._queue = make_queue(policy, model)
        self._open: dict[Conversation, None] = {}  # held, with a request that waits or runs
        self._held: dict[Conversation, int] = {}
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def arrived(self, conversation: Conversation, num_blocks: int) -> int:
        """How many of the blocks it wants are hits."""
        held = self._held.get(conversation, 0)
        if held and conversation not in self._open:
            self._queue.discard(conversation)
            self._open[conversation] = None
        return min(held, num_blocks)

    def left(self, conversation: Conversation, num_blocks: int, capacity: int, now_s: float) -> None:
        """It has so many blocks now; others go, the tail first."""
        self.num_blocks += num_blocks - self._held.get(conversation, 0)
        self._held[conversation] = num_blocks
        self._open.pop(conversation, None)
        self._queue.add(conversation)
        self.shrink(capacity, now_s)

    def shrink(self, capacity: int, now_s: float) -> None:
        while self.num_blocks > capacity:
            victim = self._queue.first(now_s) or next(reversed(self._open), None)
            assert victim is not None, "blocks without a conversation"
            held = self._held[victim]
            if held <= self.num_blocks - capacity:
                self._drop(victim)
            else:
                self._held[victim] = held - (self.num_blocks - capacity)
                self.num_blocks = capacity

    def keep(self, wanted: Callable[[Conversation], bool]) -> None:
        """Drop the others."""
        for conversation in [one for one in self._held if not wanted(one)]:
            self._drop(conversation)

    def _drop(self, conversation: Conversation) -> None:
        self.num_blocks -= self._held.pop(conversation)
        self._open.pop(conversation, None)
        self._queue.discard(conversation)


class Ghosts:
    """One ghost for each fixed policy, and the choice between them.

    Sampled by conversation as in SHARDS (Waldspurger et al., FAST 2015) with a bounded sample: when more than
    max_sampled conversations are held, the rate is halved, those above the threshold are dropped, and the capacity
    shrinks with the rate. When conversations have grown so much that few of them fill it, the rate is doubled again.

    best: the fixed policy to follow. Every policy sees the same requests, so they are compared by the differences
    request by request: another one is followed when it has hit clearly more, and by more than chance explains.
    """

    def __init__(
        self, capacity_blocks: int, model: ReturnModel, clock: Callable[[], float], max_sampled: int = 2048
    ) -> None:
        self._capacity_blocks = capacity_blocks
        self._clock = clock
        self._max_sampled = max_sampled
        self._ghosts = {policy: Ghost(policy, model) for policy in FIXED_POLICIES}
        self._halvings = 0
        self._threshold = _MASK
        self._weight = 1.0
        self._requests = self._wanted = 0.0
        self._hits = dict.fromkeys(FIXED_POLICIES, 0.0)
        self._squares = {(a, b): 0.0 for a in FIXED_POLICIES for b in FIXED_POLICIES if a < b}
        self.num_switches = 0
        self.best = "return"  # with nothing learned it is LRU

    @property
    def rate(self) -> float:
        """The part of all conversations that is looked at."""
        return 2.0**-self._halvings

    @property
    def capacity(self) -> int:
        """Blocks of a ghost."""
        return max(1, self._capacity_blocks >> self._halvings)

    def arrived(self, conversation: Conversation, num_blocks: int) -> None:
        """A request wants so many blocks of its past."""
        if num_blocks and self._is_sampled(conversation):
            self._score(num_blocks, {name: one.arrived(conversation, num_blocks) for name, one in self._ghosts.items()})

    def left(self, conversation: Conversation, num_blocks: int) -> None:
        """Its request has ended, and it has so many blocks now."""
        if not num_blocks or not self._is_sampled(conversation):
            return
        now_s, capacity = self._clock(), self.capacity
        for ghost in self._ghosts.values():
            ghost.left(conversation, num_blocks, capacity, now_s)
        self._fit_rate(now_s)

    def _is_sampled(self, conversation: Conversation) -> bool:
        return not self._halvings or split_mix_64(conversation.root) <= self._threshold

    def _fit_rate(self, now_s: float) -> None:
        num_held = max(map(len, self._ghosts.values()))
        if num_held > self._max_sampled:
            self._set_halvings(self._halvings + 1)
            for ghost in self._ghosts.values():
                ghost.keep(self._is_sampled)
                ghost.shrink(self.capacity, now_s)
        elif self._halvings and num_held < self._max_sampled // 8 and self._is_full():
            self._set_halvings(self._halvings - 1)

    def _is_full(self) -> bool:
        return all(ghost.num_blocks >= self.capacity for ghost in self._ghosts.values())

    def _set_halvings(self, halvings: int) -> None:
        self._halvings = halvings
        self._threshold = _MASK >> halvings

    def _score(self, num_blocks: int, hits: dict[str, int]) -> None:
        """What is old counts less because what is new counts more: so a miss of all costs next to nothing."""
        weight = self._weight = self._weight * _GROWTH
        self._requests += weight
        self._wanted += num_blocks * weight
        if any(hits.values()):
            for policy, num in hits.items():
                self._hits[policy] += num * weight
            for pair in self._squares:
                self._squares[pair] += (weight * (hits[pair[0]] - hits[pair[1]])) ** 2
            self._choose()
        if weight > _MAX_WEIGHT:
            self._scale_down()

    def _choose(self) -> None:
        other = max(self._hits, key=self._hits.__getitem__)
        if other != self.best and self._is_better(other):
            self.best = other
            self.num_switches += 1

    def _is_better(self, other: str) -> bool:
        gain = self._hits[other] - self._hits[self.best]
        if gain <= self._hits[self.best] * _MIN_GAIN + self._wanted * _MIN_SHARE:
            return False
        low, high = sorted((other, self.best))
        deviation = math.sqrt(self._squares[low, high])
        return self._requests >= _MIN_REQUESTS * self._weight and gain > _MIN_DEVIATIONS * deviation

    def _scale_down(self) -> None:
        weight, self._weight = self._weight, 1.0
        self._requests /= weight
        self._wanted /= weight
        self._hits = {policy: num / weight for policy, num in self._hits.items()}
        self._squares = {pair: num / weight / weight for pair, num in self._squares.items()}

    def as_dict(self) -> dict[str, Any]:
        """For people: the choice, and the hit rate of each policy of late."""
        wanted = self._wanted or 1.0
        return {
            "best": self.best,
            "hit_rate": {policy: round(num / wanted, 4) for policy, num in self._hits.items()},
            "num_switches": self.num_switches,
            "sampling_rate": self.rate,
        }

    def to_dict(self) -> dict[str, Any]:
        """Choice and scores, for JSON. What the ghosts hold is not kept."""
        self._scale_down()
        return {
            "best": self.best,
            "requests": self._requests,
            "wanted": self._wanted,
            "hits": dict(self._hits),
            "squares": {"/".join(pair): num for pair, num in self._squares.items()},
        }

    def from_dict(self, state: object) -> None:
        """Go on from what `to_dict` gave. Raises ValueError for anything else, and then changes nothing."""
        names = {"best", "requests", "wanted", "hits", "squares"}
        if not isinstance(state, dict) or state.keys() != names or state["best"] not in FIXED_POLICIES:
            raise ValueError(f"state of the ghosts: expected an object with {sorted(names)} and a known policy")
        (requests,) = _checked({"requests": state["requests"]}, ["requests"])
        (wanted,) = _checked({"wanted": state["wanted"]}, ["wanted"])
        hits = _checked(state["hits"], FIXED_POLICIES)
        squares = _checked(state["squares"], ["/".join(pair) for pair in self._squares])
        self._weight = 1.0
        self.best, self._requests, self._wanted = state["best"], requests, wanted
        self._hits = dict(zip(FIXED_POLICIES, hits, strict=True))
        self._squares = dict(zip(self._squares, squares, strict=True))


def _checked(numbers: object, names: list[str] | tuple[str, ...]) -> list[float]:
    if not isinstance(numbers, dict) or numbers.keys() != set(names):
        raise ValueError(f"state of the ghosts: expected numbers for {', '.join(names)}")
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1e18:
            raise ValueError(f"state of the ghosts: {name} is {number!r}")
    return [float(numbers[name]) for name in names]
