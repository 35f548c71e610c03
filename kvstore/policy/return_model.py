"""When conversations return: what is learned of it, and what an idle one is worth by that.

Members of one category are expected to return alike. A category is a number; estimates are pooled over its group, and
over groups of the same kind.

Control plane, metadata only. Knows categories and ages of conversations; no tier, no block, and no clock of its own.
"""

from __future__ import annotations

import bisect
import functools
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvstore.policy.conversation import Conversation, Prefix

# Of conversations: how the last answer ended (unknown, in a call of a tool, six lengths in tokens), how long the last
# gap was (none yet, tool loop, quick, slow, absent), and how many requests there were (unknown, 1, 2, 3-4, 5-8, more).
_ANSWER_TOKENS = (32, 100, 250, 500, 1000)
_GAPS_S = (4.0, 30.0, 300.0)
_TURNS = (1, 2, 3, 5, 9)
_TALKS = (len(_ANSWER_TOKENS) + 3, len(_GAPS_S) + 2, len(_TURNS) + 1)
# Of prefixes that nobody came back to yet: whether others had the beginning of them, and how many blocks are new.
_NUM_BLOCKS = (4, 16, 64)
_FRESH = (2, len(_NUM_BLOCKS) + 1)
# Of those that are shared: the mean gap, and how often they were used.
_MEAN_GAPS_S = (4.0, 15.0, 60.0, 240.0, 1000.0, 4000.0, 16000.0)
_USES = (3, 5, 9)
_SHARED = (len(_MEAN_GAPS_S) + 1, len(_USES) + 1)
_FIRST_FRESH = _TALKS[0] * _TALKS[1] * _TALKS[2]
_FIRST_SHARED = _FIRST_FRESH + _FRESH[0] * _FRESH[1]
NUM_CATEGORIES = _FIRST_SHARED + _SHARED[0] * _SHARED[1]
# Of each category its group: a kind, and what distinguishes it there.
GROUPS: tuple[tuple[str, int], ...] = (
    *((f"answer {answer}", gap) for answer, gap, _ in product(*map(range, _TALKS))),
    *(("fresh", below) for below, _ in product(*map(range, _FRESH))),
    *(("shared", gap) for gap, _ in product(*map(range, _SHARED))),
)
# Bucket b holds the ages from LOWER_S[b] to below UPPER_S[b]: half an octave each, the first from 0, the last open.
EDGES_S = tuple(0.25 * 2 ** (k / 2) for k in range(50))  # the last is 69 days
LOWER_S = (0.0, *EDGES_S)
UPPER_S = (*EDGES_S, math.inf)
NUM_BUCKETS = len(LOWER_S)
_FIRST_S = EDGES_S[0]
_MIDDLE_S = (_FIRST_S / 2, *(edge * 2**0.25 for edge in EDGES_S))
_END_S = (*EDGES_S, EDGES_S[-1] * 2**0.5)  # the open bucket counts as half an octave where a width is needed
PRIOR_HAZARD = 0.05  # of a half-octave, at every age: per second it falls as 1 / age
_PRIOR = np.full(NUM_BUCKETS, PRIOR_HAZARD)
_PRIOR[0] = 1 - (1 - PRIOR_HAZARD) ** 4  # stands for all that are shorter
# Conversations at risk that an estimate one level up counts for; more where that is a group's own, since members of a
# group differ little and each has been counted seldom.
_STRENGTH, _STRENGTH_OF_GROUP = 30.0, 100.0
_MAX_HAZARD = 0.99  # keeps products over all buckets far from underflow
_FORGET_AT = 50_000.0  # a conversation counts once for each bucket it lives through: some 2,500 conversations
_MIN_INTERVAL, _MAX_INTERVAL = 16, 2048  # changes between two rank tables
_GROUP_NAMES = list(dict.fromkeys(GROUPS))
_KIND_NAMES = list(dict.fromkeys(kind for kind, _ in _GROUP_NAMES))
_GROUP_OF = np.array([_GROUP_NAMES.index(group) for group in GROUPS])
_KIND_OF_GROUP = np.array([_KIND_NAMES.index(kind) for kind, _ in _GROUP_NAMES])
Table = list[list[float]]  # [category][bucket]
Array = npt.NDArray[np.float64]


def category_of(conversation: Conversation) -> int:
    """Its category now; an entry that stands for a prefix has categories of its own."""
    prefix = conversation.prefix
    if prefix is not None and prefix.entry is conversation:
        return _of_prefix(prefix)
    answer, gap_s = conversation.answer, conversation.gap_s
    ending = 0 if answer is None else 1 if answer.calls_tool else 2 + bisect_right(_ANSWER_TOKENS, answer.num_tokens)
    gap = 0 if gap_s is None else 1 + bisect_right(_GAPS_S, gap_s)
    return (ending * _TALKS[1] + gap) * _TALKS[2] + bisect_right(_TURNS, conversation.turn)


def _of_prefix(prefix: Prefix) -> int:
    num_before = 0 if prefix.parent is None else prefix.parent.num_blocks
    if prefix.entry.gap_s is None:
        return _FIRST_FRESH + (num_before > 0) * _FRESH[1] + bisect_right(_NUM_BLOCKS, prefix.num_blocks - num_before)
    gap, uses = bisect_right(_MEAN_GAPS_S, prefix.entry.gap_s), bisect_right(_USES, prefix.entry.turn)
    return _FIRST_SHARED + gap * _SHARED[1] + uses


def bucket_of(age_s: float) -> int:
    """The bucket of an age; negative ones are 0."""
    return bisect.bisect_right(EDGES_S, age_s)


@dataclass(frozen=True, slots=True)
class RankTable:
    """Published as a whole and never changed, so that another thread may read it.

    ranks: [category][bucket], the lowest is given up first.
    """

    version: int
    ranks: Table


_Counts = Annotated[list[Annotated[float, Meta(ge=0, le=1e12)]], Meta(min_length=NUM_BUCKETS, max_length=NUM_BUCKETS)]


class _Counted(msgspec.Struct, forbid_unknown_fields=True):
    """Of one category, as it is stored."""

    returns: _Counts
    passes: _Counts


msgspec.json.Decoder(dict[str, _Counted])  # `convert` is safe in any thread from now on (see `kvstore.disk.records`)


class ReturnModel:
    """Per category a life table of the time away: of those away at a bucket's start, how many returned within it.

    A life table (Kaplan and Meier 1958; Cutler and Ederer 1958) is not misled by conversations that have not returned
    *yet*: they count for exactly the buckets they have stayed away through. Hazards are shrunk towards those pooled
    over the group of the category, these towards those of its kind, these towards those of all, and these towards a
    prior under which the order is that of LRU.
    """

    def __init__(self) -> None:
        self._returns: Table = [[0.0] * NUM_BUCKETS for _ in range(NUM_CATEGORIES)]
        self._passes: Table = [[0.0] * NUM_BUCKETS for _ in range(NUM_CATEGORIES)]
        self._totals = [0.0] * NUM_CATEGORIES
        self.table = RankTable(0, [])
        self.publish()

    @property
    def num_returns(self) -> float:
        """Returns that the counts stand for; older ones count less."""
        return sum(map(sum, self._returns))

    def returned(self, category: int, gap_s: float) -> None:
        """One that rested in this category came back after so long."""
        self._count(self._returns, category, bucket_of(gap_s), 1)

    def passed(self, category: int, bucket: int, num: int = 1) -> None:
        """So many stayed away through the whole bucket."""
        self._count(self._passes, category, bucket, num)

    def _count(self, counts: Table, category: int, bucket: int, num: int) -> None:
        """Half of it goes to the buckets beside, so that chance makes no peaks; the first and the last are of other
        widths and stand alone.
        """
        row = counts[category]
        if 0 < bucket < NUM_BUCKETS - 1:
            row[bucket] += num / 2
            row[max(bucket - 1, 1)] += num / 4
            row[min(bucket + 1, NUM_BUCKETS - 2)] += num / 4
        else:
            row[bucket] += num
        self._totals[category] += num
        while self._totals[category] > _FORGET_AT:
            self._totals[category] /= 2
            for table in (self._returns, self._passes):
                table[category] = [count / 2 for count in table[category]]

    def ranks(self) -> Table:
        """What a conversation of this category is worth at the middle of each bucket; [category][bucket].

        The largest P(return within h) / E[time until return or h] over all h: hits per block and second, as in LHD
        (Beckmann et al., NSDI 2018), which is the gap's Gittins index.
        """
        return _ranks(self.hazards()) if any(self._totals) else _ranks_of_nothing()

    def publish(self) -> None:
        """Make ranks of what was counted so far. Takes milliseconds, so not for every event."""
        self.table = RankTable(self.table.version + 1, self.ranks())

    def hazards(self) -> Array:
        """[category, bucket]; what counted nothing has the estimate of its group."""
        return _hazards(np.array((self._returns, self._passes)))

    def to_dict(self) -> dict[str, Any]:
        """What was counted, for JSON: the categories with something in them."""
        return {
            str(category): {"returns": self._returns[category], "passes": self._passes[category]}
            for category in range(NUM_CATEGORIES)
            if self._totals[category]
        }

    @classmethod
    def from_dict(cls, state: object) -> ReturnModel:
        """The model that `to_dict` describes. Raises ValueError for anything else."""
        model = cls()
        try:
            found = msgspec.convert(state, dict[str, _Counted])
        except msgspec.ValidationError as error:
            raise ValueError(f"state of the model of returns: {error}") from error
        categories = {str(category): category for category in range(NUM_CATEGORIES)}
        if unknown := found.keys() - categories:
            raise ValueError(f"state of the model of returns: {unknown} are no categories")
        for name, counted in found.items():
            category = categories[name]
            model._returns[category], model._passes[category] = counted.returns, counted.passes
            model._totals[category] = sum(counted.returns) + sum(counted.passes)
        model.publish()
        return model


def _hazards(counts: Array) -> Array:
    by_group = np.add.reduceat(counts, np.unique(_GROUP_OF, return_index=True)[1], axis=1)
    by_kind = np.add.reduceat(by_group, np.unique(_KIND_OF_GROUP, return_index=True)[1], axis=1)
    of_kind = _shrunk(by_kind, _shrunk(by_kind.sum(axis=1), _PRIOR))
    of_group = _shrunk(by_group, of_kind[_KIND_OF_GROUP])
    return _shrunk(counts, of_group[_GROUP_OF], _STRENGTH_OF_GROUP)


def _ranks(hazards: Array) -> Table:
    different, rows = np.unique(hazards, axis=0, return_inverse=True)  # most are equal
    return cast(Table, _density(different)[rows].tolist())


@functools.cache
def _ranks_of_nothing() -> Table:
    """While nothing was counted; of every store that is opened."""
    return _ranks(_hazards(np.zeros((2, NUM_CATEGORIES, NUM_BUCKETS))))


def _shrunk(counts: Array, towards: Array, strength: float = _STRENGTH) -> Array:
    """Hazards: P(returns in the bucket | away at its start). counts: of returns and passes."""
    hazards = (counts[0] + strength * towards) / (counts.sum(axis=0) + strength)
    return cast(Array, np.minimum(hazards, _MAX_HAZARD))


def _survival(hazards: Array) -> Array:
    """P(away) at the start of each bucket, and at the end of the last."""
    return cast(Array, np.cumprod(np.insert(1 - hazards, 0, 1.0, axis=1), axis=1))


def _density(hazards: Array) -> Array:
    """The index at the middle of each bucket: drawn as points (time spent away, returns), P / E is the slope from one
    age to a later one. Both are counted from the right: where few are left, differences from the left would be lost in
    rounding.
    """
    alive = _survival(hazards)
    middle = np.sqrt(alive[:, :-1] * alive[:, 1:])
    points = np.empty((2 * NUM_BUCKETS + 1, len(hazards)))  # start and middle of each bucket, and the end
    points[::2], points[1::2] = alive.T, middle.T
    widths_s = np.diff(np.stack((LOWER_S, _MIDDLE_S), axis=1).ravel(), append=_END_S[-1])
    spent_s = widths_s[:, None] * (points[:-1] + points[1:]) / 2
    to_go_s = np.zeros_like(points)
    to_go_s[:-1] = np.cumsum(spent_s[::-1], axis=0)[::-1]
    middles = range(1, 2 * NUM_BUCKETS, 2)
    slopes = [((points[at] - points[at + 1 :]) / (to_go_s[at] - to_go_s[at + 1 :])).max(axis=0) for at in middles]
    return cast(Array, np.stack(slopes, axis=1))


class ReturnLearner:
    """Follows conversations while they rest, and tells the model: category and time of last use of each, as they were
    when it began to rest, in arrays. It remembers until when the buckets of age that they lived through are counted.
    See `conversation.Learner`.
    """

    def __init__(self, model: ReturnModel) -> None:
        self.model = model
        self._places: dict[Conversation, int] = {}
        self._free: list[int] = []
        self._categories = np.zeros(0, np.int64)
        self._used_s = np.zeros(0)  # math.inf at free places: they have no age
        self._counted_s = -math.inf
        self._num_changes = 0
        self._num_pending = 0

    @property
    def num_away(self) -> int:
        return len(self._places)

    def returned(self, conversation: Conversation, gap_s: float) -> None:
        """Count it in the category in which it rested; from now on it has that in which it will rest next."""
        rested = self._take_away(conversation)
        if rested is not None:
            category, num_counted = rested
            for bucket in range(num_counted, bucket_of(gap_s)):
                self.model.passed(category, bucket)
            self.model.returned(category, gap_s)
            self._num_pending += 1
        conversation.category = category_of(conversation)

    def rested(self, conversation: Conversation, now_s: float) -> None:
        """It may return from now on; one that was used long ago counts for the buckets that it will live through."""
        if conversation.turn:
            conversation.category = category_of(conversation)
        if conversation.used_s < now_s:
            self.advance(now_s)
        self._take_away(conversation)
        if not self._free:
            size = len(self._used_s)
            self._free = list(range(2 * size + 63, size - 1, -1))
            self._categories = np.pad(self._categories, (0, size + 64))
            self._used_s = np.pad(self._used_s, (0, size + 64), constant_values=math.inf)
        place = self._places[conversation] = self._free.pop()
        self._categories[place], self._used_s[place] = conversation.category, conversation.used_s
        self._num_pending += 1

    def forgotten(self, conversation: Conversation) -> None:
        self._take_away(conversation)

    def _take_away(self, conversation: Conversation) -> tuple[int, int] | None:
        """Returns its category, and how many buckets it had lived through when they were counted last; None if it does
        not rest.
        """
        place = self._places.pop(conversation, None)
        if place is None:
            return None
        category, used_s = int(self._categories[place]), float(self._used_s[place])
        self._used_s[place] = math.inf
        self._free.append(place)
        return category, bucket_of(self._counted_s - used_s)

    def advance(self, now_s: float) -> None:
        """Count those that left a bucket since the last call, by getting older. Nanoseconds for each that is away."""
        then_s, self._counted_s = self._counted_s, now_s
        if now_s <= then_s:  # a clock that was set back: better to count some twice than none for long
            return
        edges = np.array(EDGES_S)
        before, after = (np.searchsorted(edges, time_s - self._used_s, side="right") for time_s in (then_s, now_s))
        older = np.flatnonzero(after > before)
        for bucket in range(NUM_BUCKETS - 1):
            left = older[(before[older] <= bucket) & (bucket < after[older])]
            for category, num in enumerate(np.bincount(self._categories[left]).tolist()):
                if num:
                    self.model.passed(category, bucket, num)

    def poll(self, now_s: float) -> None:
        """When enough has changed: count those that stay away, and publish new ranks. O(1) otherwise."""
        if self._num_pending < min(max(self._num_changes // 5, _MIN_INTERVAL), _MAX_INTERVAL):
            return
        self._num_changes += self._num_pending
        self._num_pending = 0
        self.advance(now_s)
        self.model.publish()
