"""The model of returns: life tables, ranks, those that stay away; hostile state."""

import itertools
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.policy.conversation import Answer, Conversation, Prefix
from kvstore.policy.return_model import (
    EDGES_S,
    GROUPS,
    LOWER_S,
    NUM_BUCKETS,
    NUM_CATEGORIES,
    UPPER_S,
    ReturnLearner,
    ReturnModel,
    bucket_of,
    category_of,
)


def conversation(number: int, used_s: float = 0.0, category: int = 0, use: int = 0) -> Conversation:
    return Conversation(number, number, used_s, used_s, use=use, category=category)


# -- ages and categories --
def test_buckets_are_half_octaves():
    assert [bucket_of(age) for age in (-1.0, 0.0, 0.24, 0.25, 0.3, 0.36, 0.5, 1e9)] == [0, 0, 0, 1, 1, 2, 3, 50]
    assert all(math.isclose(b / a, 2**0.5) for a, b in itertools.pairwise(EDGES_S))
    assert 60 * 86400 < EDGES_S[-1] < 80 * 86400
    assert all(bucket_of(low) == i for i, low in enumerate(LOWER_S))
    assert all(bucket_of(math.nextafter(high, 0)) == i for i, high in enumerate(UPPER_S[:-1]))


def of_talk(turn: int, gap_s: float | None = None, answer: Answer | None = None) -> int:
    one = conversation(1)
    one.turn, one.gap_s, one.answer = turn, gap_s, answer
    return category_of(one)


def of_prefix(num_blocks: int, num_before: int = 0, uses: int = 1, gap_s: float | None = None) -> int:
    entry = conversation(1)
    parent = Prefix(conversation(2), "p", num_before, None) if num_before else None
    entry.prefix, entry.turn, entry.gap_s = Prefix(entry, "e", num_before + num_blocks, parent), uses, gap_s
    return category_of(entry)


def test_categories_of_conversations_are_answers_by_gaps_by_turns():
    assert of_talk(0) == 0
    assert [of_talk(turn) for turn in (0, 1, 2, 3, 4, 5, 8, 9, 1000)] == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    gaps_s = (0.0, 3.9, 4.0, 29.0, 30.0, 299.0, 300.0, 1e9)
    assert [of_talk(0, gap_s) // 6 for gap_s in gaps_s] == [1, 1, 2, 2, 3, 3, 4, 4]
    endings = [Answer(0), Answer(31), Answer(32), Answer(100), Answer(250), Answer(500), Answer(1000), Answer(9, True)]
    assert [of_talk(0, None, answer) // 30 for answer in endings] == [2, 2, 3, 4, 5, 6, 7, 1]
    assert of_talk(0, None, Answer(9, True)) == of_talk(0, None, Answer(900, True))


def test_every_category_has_its_number_and_its_group():
    talks = itertools.product(
        range(10), (None, 1, 5, 50, 500), (None, Answer(1, True), *map(Answer, (1, 50, 150, 300, 600, 2000)))
    )
    fresh = itertools.product((1, 4, 16, 64), (0, 7))
    shared = itertools.product((2, 3, 5, 9), (1.0, 5.0, 20.0, 100.0, 500.0, 2000.0, 9000.0, 1e6))
    found = {of_talk(*one) for one in talks} | {of_prefix(*one) for one in fresh}
    found |= {of_prefix(1, 0, uses, gap_s) for uses, gap_s in shared}
    assert found == set(range(NUM_CATEGORIES)) and len(GROUPS) == NUM_CATEGORIES
    assert (
        GROUPS[of_talk(1, 5.0, Answer(40))]
        == GROUPS[of_talk(9, 5.0, Answer(99))]
        != GROUPS[of_talk(1, 50.0, Answer(40))]
    )
    assert GROUPS[of_prefix(1)] == GROUPS[of_prefix(70)] != GROUPS[of_prefix(1, 3)]


# -- the life table --
def survival(model: ReturnModel, category: int) -> list[float]:
    """P(away for at least LOWER_S[bucket]), for each bucket."""
    return [1.0, *np.cumprod(1 - model.hazards()[category])[:-1]]


def test_with_nothing_learned_it_is_lru():
    rows = ReturnModel().ranks()
    assert len(rows) == NUM_CATEGORIES
    assert all(row == rows[0] for row in rows)
    assert all(young > old > 0 for young, old in itertools.pairwise(rows[0]))


def gaps(rng: random.Random, num: int) -> list[float]:
    """60 % return after about a minute, 40 % never."""
    return [rng.lognormvariate(math.log(60), 0.5) if rng.random() < 0.6 else math.inf for _ in range(num)]


def lognormal_cdf(age_s: float) -> float:
    return 0.5 * (1 + math.erf(math.log(age_s / 60) / 0.5 / math.sqrt(2)))


@pytest.mark.parametrize("seed", range(3))
def test_the_life_table_recovers_a_distribution_of_which_much_is_censored(seed):
    """Each conversation is watched for a random time only: what has not returned by then must not count as never."""
    rng = random.Random(seed)
    model = ReturnModel()
    for gap_s in gaps(rng, 2000):
        watched_s = rng.uniform(0, 240)
        for bucket in range(bucket_of(min(gap_s, watched_s))):
            model.passed(8, bucket)
        if gap_s <= watched_s:
            model.returned(8, gap_s)
    alive = survival(model, 8)
    for bucket in range(1, bucket_of(230.0)):
        assert alive[bucket] == pytest.approx(1 - 0.6 * lognormal_cdf(LOWER_S[bucket]), abs=0.06), LOWER_S[bucket]


def test_ranks_know_a_hump():
    """Somebody who has just left is not about to return; after a minute he is; after ten he is gone."""
    rng = random.Random(1)
    model = ReturnModel()
    for gap_s in gaps(rng, 2000):
        for bucket in range(bucket_of(min(gap_s, 4000.0))):
            model.passed(8, bucket)
        if gap_s < math.inf:
            model.returned(8, gap_s)
    ranks = model.ranks()[8]
    just_left, minute, gone = ranks[bucket_of(1.0)], ranks[bucket_of(45.0)], ranks[bucket_of(600.0)]
    assert minute > 1.3 * just_left
    assert just_left > 5 * gone


def test_the_index_is_the_best_ratio_over_all_horizons():
    """Against trying every later knot."""
    rng = random.Random(5)
    model = ReturnModel()
    for _ in range(3000):
        gap_s = rng.choice([rng.expovariate(1), rng.lognormvariate(5, 1), rng.lognormvariate(9, 0.3)])
        model.returned(11, gap_s)
        for bucket in range(bucket_of(gap_s)):
            model.passed(11, bucket)
    knots = sorted([*LOWER_S, 0.125, *(edge * 2**0.25 for edge in EDGES_S), EDGES_S[-1] * 2**0.5])
    alive = [*survival(model, 11), survival(model, 11)[-1] * (1 - model.hazards()[11][-1])]
    back = [alive[0]]  # P(away at the knot)
    for start, end in itertools.pairwise(alive):
        back += [math.sqrt(start * end), end]
    ranks = model.ranks()[11]
    for bucket in range(NUM_BUCKETS):
        at, best, time_s = 2 * bucket + 1, 0.0, 0.0
        for i in range(at, len(knots) - 1):
            time_s += (knots[i + 1] - knots[i]) * (back[i] + back[i + 1]) / 2
            best = max(best, (back[at] - back[i + 1]) / time_s)
        # The first and the last bucket are interpolated on another scale of time.
        assert ranks[bucket] == pytest.approx(best, rel=0.1 if bucket in (0, NUM_BUCKETS - 1) else 1e-6), bucket


def test_little_evidence_is_shrunk_towards_its_group_that_towards_its_kind_and_that_towards_all():
    model = ReturnModel()
    bucket = bucket_of(2.0)

    def stay(category: int) -> float:
        alive = survival(model, category)
        return alive[bucket + 1] / alive[bucket]

    short, long = Answer(10), Answer(700)
    before = stay(of_talk(5, 1.0, short))
    for _ in range(8):
        model.returned(of_talk(2, 1.0, short), 2.0)
    found = [
        stay(one)
        for one in (of_talk(2, 1.0, short), of_talk(5, 1.0, short), of_talk(2, 99.0, short), of_talk(2, 1.0, long))
    ]
    assert found == sorted(found) and len(set(found)) == 4 and found[-1] < before
    model.passed(of_talk(5, 1.0, short), bucket, 1000)
    assert stay(of_talk(5, 1.0, short)) > 0.95, "its own evidence wins when there is much of it"


def test_one_return_makes_no_peak():
    model = ReturnModel()
    bucket = bucket_of(30.0)
    for _ in range(40):
        model.returned(7, 30.0)
    alive = survival(model, 7)
    hazards = [1 - after / before for before, after in itertools.pairwise(alive)]
    assert hazards[bucket] > hazards[bucket + 1] > 2 * hazards[bucket + 3]
    assert hazards[bucket - 1] == pytest.approx(hazards[bucket + 1])


@pytest.mark.parametrize("bucket", [1, NUM_BUCKETS - 2])
def test_the_first_and_the_last_bucket_get_nothing_of_those_beside_them(bucket):
    model = ReturnModel()
    model.returned(7, LOWER_S[bucket])
    returns = model.to_dict()["7"]["returns"]
    assert (returns[0], returns[-1], sum(returns)) == (0.0, 0.0, 1.0)


def test_the_past_is_forgotten():
    model = ReturnModel()
    bucket = bucket_of(2.0)
    for _ in range(60_000):
        model.returned(1, 2.0)
    assert model.num_returns < 50_001
    model.passed(1, bucket, 49_000)
    model.passed(1, bucket, 49_000)
    alive = survival(model, 1)
    assert alive[bucket + 1] / alive[bucket] > 0.7


# -- persistence --
def learned() -> ReturnModel:
    model = ReturnModel()
    for gap_s in gaps(random.Random(2), 100):
        model.returned(4, min(gap_s, 1000.0))
        model.passed(9, bucket_of(min(gap_s, 1e6)))
    model.publish()
    return model


def test_a_model_survives_json():
    model = learned()
    again = ReturnModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again.table.ranks == model.table.ranks
    assert again.to_dict() == model.to_dict()
    assert ReturnModel.from_dict({}).table.ranks == ReturnModel().table.ranks


COUNTS = [1.0] * NUM_BUCKETS


@pytest.mark.parametrize(
    "state",
    [
        None, [], "x", 3, {"x": {}}, {str(NUM_CATEGORIES): {"returns": COUNTS, "passes": COUNTS}},
        {"-1": {"returns": COUNTS, "passes": COUNTS}},
        {"0": None}, {"0": {"returns": COUNTS}}, {"0": {"returns": COUNTS, "passes": COUNTS, "more": 1}},
        {"0": {"returns": COUNTS[1:], "passes": COUNTS}}, {"0": {"returns": COUNTS, "passes": None}},
        *({"0": {"returns": [bad, *COUNTS[1:]], "passes": COUNTS}}
          for bad in (-1, math.nan, math.inf, "1", None, True, 1e300, 10**400, [])),
    ],
)  # fmt: skip
def test_bad_state_is_refused(state):
    with pytest.raises(ValueError, match="state of the model of returns"):
        ReturnModel.from_dict(state)


@pytest.mark.parametrize("num", [0, 5e-324, 50_000.0])
@pytest.mark.parametrize("which", ["returns", "passes"])
def test_extreme_state_gives_finite_ranks(which, num):
    counts = {"returns": [0] * NUM_BUCKETS, "passes": [0] * NUM_BUCKETS}
    counts[which] = [num] * NUM_BUCKETS
    model = ReturnModel.from_dict({str(c): dict(counts) for c in range(NUM_CATEGORIES)})
    rows = model.ranks()
    assert all(math.isfinite(rank) and rank >= 0 for row in rows for rank in row)
    model.returned(0, 1.0)
    assert 0 <= model.hazards().min() <= model.hazards().max() <= 1


# -- away --
@pytest.mark.parametrize("seed", range(5))
def test_passes_are_counted_once_however_often_one_asks(seed):
    """Against counting each conversation by itself, with additions, departures and late ones at random."""
    rng = random.Random(seed)
    now_s = 1000.0
    counted: dict[tuple[int, int], int] = {}
    expected: dict[tuple[int, int], int] = {}
    seen_s: dict[Conversation, float] = {}  # until when its passes are counted

    def on_pass(category: int, bucket: int, num: int = 1) -> None:
        counted[category, bucket] = counted.get((category, bucket), 0) + num

    learner = ReturnLearner(SimpleNamespace(passed=on_pass, returned=lambda *_: None))

    def expect(one: Conversation, until: int) -> None:
        for bucket in range(bucket_of(seen_s[one] - one.used_s), until):
            expected[one.category, bucket] = expected.get((one.category, bucket), 0) + 1

    for number in range(600):
        now_s += rng.expovariate(0.2)
        kind = rng.random()
        if kind < 0.5 or not seen_s:
            late = rng.random() < 0.2
            one = conversation(number, now_s - rng.expovariate(0.01) if late else now_s, rng.randrange(3))
            learner.rested(one, now_s)
            seen_s[one] = now_s
        elif kind < 0.7:
            one = rng.choice(list(seen_s))
            expect(one, bucket_of(now_s - one.used_s))
            learner.returned(one, now_s - one.used_s)
            del seen_s[one]
        else:
            learner.advance(now_s)
    learner.advance(now_s)
    for one in seen_s:
        expect(one, bucket_of(now_s - one.used_s))
    assert counted == expected
    assert len(counted) > 30


# -- the learner --
def counts(model: ReturnModel, category: int) -> tuple[float, float]:
    state = model.to_dict().get(str(category), {"returns": [], "passes": []})
    return sum(state["returns"]), sum(state["passes"])


def test_a_return_counts_in_the_category_of_the_rest_and_sets_the_next_one():
    model = ReturnModel()
    learner = ReturnLearner(model)
    one = conversation(1)
    one.turn = 1
    learner.rested(one, 0.0)
    assert one.category == of_talk(1)
    one.turn, one.gap_s = 2, 10.0
    learner.returned(one, 10.0)
    assert counts(model, of_talk(1)) == (1, bucket_of(10.0))
    assert one.category == of_talk(2, 10.0)
    assert counts(model, of_talk(2, 10.0)) == (0, 0)
    learner.returned(one, 10.0)
    assert model.num_returns == 1, "it did not rest"


def test_one_that_was_used_long_ago_counts_for_what_it_lives_through_from_now_on():
    model = ReturnModel()
    learner = ReturnLearner(model)
    one = conversation(1, used_s=0.0)
    learner.rested(one, 1000.0)
    assert one.category == 0
    learner.advance(1001.0)
    assert counts(model, 0) == (0, 0)
    one.turn, one.gap_s = 2, 3000.0
    learner.returned(one, 3000.0)
    assert counts(model, 0) == (1, bucket_of(3000.0) - bucket_of(1000.0))


def test_ranks_are_published_when_enough_has_changed():
    model = ReturnModel()
    learner = ReturnLearner(model)
    for number in range(15):
        learner.rested(conversation(number), 0.0)
    learner.poll(50.0)
    assert (model.table.version, counts(model, 0)) == (1, (0, 0))
    learner.rested(conversation(99), 50.0)
    learner.poll(50.0)
    assert (model.table.version, counts(model, 0)) == (2, (0, 15 * bucket_of(50.0)))
    learner.poll(90.0)
    assert model.table.version == 2
    for number in range(20_000):
        learner.rested(conversation(number + 100), 50.0)
        learner.poll(50.0)
    assert 20 < model.table.version < 60, "ever rarer, but not too rarely"


def test_a_clock_that_was_set_back_does_not_stop_the_counting():
    model = ReturnModel()
    learner = ReturnLearner(model)
    learner.rested(Conversation(1, 0, 0.0, 1e9, use=1), 1e9)
    learner.advance(1e9 + 365 * 86400)  # a glitch
    learner.advance(1e9 + 1)
    before = sum(counts(model, 0))
    learner.advance(1e9 + 100)
    assert sum(counts(model, 0)) > before + 5


def test_very_many_at_once_are_counted_within_the_bound_and_accepted_again():
    model = ReturnModel()
    model.passed(0, 3, 1_000_000)
    assert ReturnModel.from_dict(model.to_dict()).to_dict() == model.to_dict()
    assert max(model.to_dict()["0"]["passes"]) <= 50_000
