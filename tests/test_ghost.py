"""Ghost caches: what each policy would hit, the error of sampling, and the choice that follows the better one."""

import heapq
import json
import math
import random
from collections.abc import Callable

import pytest

from kvstore.conversation import Conversation
from kvstore.ghost import Ghost, Ghosts, split_mix_64
from kvstore.policy import FIXED_POLICIES
from kvstore.return_model import ReturnLearner, ReturnModel, bucket_of, category_of

NEVER = math.inf


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Traffic:
    """Conversations on a virtual clock: new ones at a rate, and each returns after gaps as told."""

    def __init__(self, seed: int, capacity: int, model: ReturnModel, learns: bool = True, max_sampled: int = 1 << 30):
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.ghosts = Ghosts(capacity, model, self.clock, max_sampled)
        self.learner = ReturnLearner(model) if learns else None
        self.num_uses = 0
        self.wanted, self.hits = 0, dict.fromkeys(FIXED_POLICIES, 0)  # of sampled requests, and none decays
        self.bests: list[str] = []
        self._due: list[tuple[float, int, Conversation | None]] = []
        self._blocks: dict[Conversation, int] = {}

    def run(self, num: int, rate: float, gap: Callable[[random.Random], float], max_blocks: int = 10) -> None:
        self._due.append((self.clock.now_s, 0, None))
        for _ in range(num):
            self.clock.now_s, _, one = heapq.heappop(self._due)
            self.num_uses += 1
            if one is None:
                one = self._new(max_blocks)
                self._push(self.rng.expovariate(rate), None)
            self._request(one)
            away_s = gap(self.rng)
            if away_s < NEVER:
                self._push(away_s, one)
            else:
                del self._blocks[one]
        self._due.clear()

    def _push(self, after_s: float, one: Conversation | None) -> None:
        heapq.heappush(self._due, (self.clock.now_s + after_s, 2 * self.num_uses + (one is None), one))

    def _new(self, max_blocks: int) -> Conversation:
        one = Conversation(self.num_uses, self.rng.getrandbits(64), self.clock.now_s, self.clock.now_s)
        self._blocks[one] = self.rng.randint(1, max_blocks)
        return one

    def _request(self, one: Conversation) -> None:
        now_s = self.clock.now_s
        one.turn += 1
        if one.turn > 1:
            one.gap_s = now_s - one.used_s
            if self.learner:
                self.learner.returned(one, one.gap_s)
        self._count(one)
        self.ghosts.arrived(one, self._blocks[one])
        one.used_s, one.use = now_s, self.num_uses
        one.category = category_of(one.turn, one.gap_s)
        if self.learner:
            self.learner.rested(one, now_s)
            self.learner.poll(now_s)
        self.ghosts.left(one, self._blocks[one])
        if not self.bests or self.bests[-1] != self.ghosts.best:
            self.bests.append(self.ghosts.best)

    def _count(self, one: Conversation) -> None:
        if self.ghosts._is_sampled(one):
            self.wanted += self._blocks[one]
            for policy, ghost in self.ghosts._ghosts.items():
                self.hits[policy] += ghost.arrived(one, self._blocks[one])

    def hit_rate(self, policy: str) -> float:
        return self.ghosts.as_dict()["hit_rate"][policy]


def human(rng: random.Random) -> float:
    """Most return after about a minute, and nobody at once."""
    return rng.lognormvariate(math.log(60), 0.4) if rng.random() < 0.6 else NEVER


def tool_loop(rng: random.Random) -> float:
    """It returns at once, or never again."""
    return rng.expovariate(1 / 0.5) if rng.random() < 0.8 else NEVER


def mixed(rng: random.Random) -> float:
    return rng.choice([tool_loop, human])(rng)


def knowing_humans() -> ReturnModel:
    rng, model = random.Random(0), ReturnModel()
    for _ in range(4000):
        gap_s, category = human(rng), category_of(rng.randrange(1, 12), rng.choice([None, 1.0, 60.0]))
        for bucket in range(bucket_of(min(gap_s, 2000.0))):
            model.passed(category, bucket)
        if gap_s < NEVER:
            model.returned(category, gap_s)
    model.publish()
    return model


def conversation(number: int, root: int = 0, use: int = 0) -> Conversation:
    return Conversation(number, root, 0.0, 0.0, use=use)


# -- one ghost --
def test_a_ghost_gives_up_tails_of_the_first_in_its_order():
    ghost = Ghost("lru", ReturnModel())
    one, two = conversation(1, use=1), conversation(2, use=2)
    assert ghost.arrived(one, 5) == 0
    ghost.left(one, 6, 10, 0.0)
    ghost.left(two, 6, 10, 0.0)
    assert (ghost.num_blocks, len(ghost)) == (10, 2)
    assert ghost.arrived(one, 3) == 3
    one.use = 3
    ghost.left(one, 7, 10, 0.0)
    assert ghost.arrived(two, 9) == 3
    two.use = 4
    ghost.left(two, 25, 10, 0.0)
    assert (ghost.arrived(one, 9), ghost.arrived(two, 99), ghost.num_blocks, len(ghost)) == (0, 10, 10, 1)


def test_in_a_ghost_what_a_request_waits_for_goes_last_and_the_last_to_come_first():
    ghost = Ghost("lru", ReturnModel())
    one, two, three = (conversation(number, use=number) for number in (1, 2, 3))
    for who in (one, two, three):
        ghost.left(who, 4, 12, 0.0)
    assert (ghost.arrived(one, 4), ghost.arrived(two, 4)) == (4, 4)
    ghost.shrink(6, 0.0)
    assert ghost._held == {one: 4, two: 2}, "first the idle one, then the one that came last"


def test_a_chain_that_became_shorter_takes_less():
    ghost = Ghost("fifo", ReturnModel())
    one = conversation(1)
    ghost.left(one, 8, 10, 0.0)
    ghost.left(one, 3, 10, 0.0)
    assert (ghost.num_blocks, ghost.arrived(one, 8)) == (3, 3)


def test_ghosts_do_not_care_for_pins_and_wants_and_change_no_conversation():
    ghosts = Ghosts(10, ReturnModel(), Clock())
    one, two = conversation(1, use=1), conversation(2, use=2)
    one.wanted, one.pinned_until_s = (0, 1), 1e9
    for member in (one, two):
        ghosts.arrived(member, 8)
        ghosts.left(member, 8)
    assert all(ghost.arrived(one, 8) == 2 for ghost in ghosts._ghosts.values())
    assert (one.use, one.used_s, one.category, one.turn, one.wanted) == (1, 0.0, 0, 0, (0, 1))


def test_hit_rates_are_of_the_blocks_wanted():
    ghosts = Ghosts(100, ReturnModel(), Clock())
    one = conversation(1)
    ghosts.arrived(one, 10)
    ghosts.left(one, 10)
    ghosts.arrived(one, 30)
    ghosts.arrived(one, 0)
    ghosts.left(one, 0)
    assert ghosts.as_dict()["hit_rate"] == pytest.approx(dict.fromkeys(FIXED_POLICIES, 10 / 40), abs=1e-3)
    assert ghosts.best == "return"


# -- sampling --
def test_split_mix_64_is_the_published_function():
    assert split_mix_64(0) == 0xE220A8397B1DCDAF
    assert split_mix_64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert split_mix_64(-1) == split_mix_64(2**64 - 1)


def test_the_sample_is_bounded_and_the_capacity_goes_with_the_rate():
    ghosts = Ghosts(100_000, ReturnModel(), Clock(), max_sampled=100)
    for number in range(3000):
        ghosts.left(conversation(number, root=number, use=number), 10)
        assert all(len(ghost) <= 100 for ghost in ghosts._ghosts.values())
    assert ghosts.rate in (1 / 32, 1 / 64)
    assert ghosts.capacity == int(100_000 * ghosts.rate)
    held = [len(ghost) for ghost in ghosts._ghosts.values()]
    assert held[0] == sum(split_mix_64(number) <= 2**64 * ghosts.rate for number in range(3000))


def test_when_conversations_have_grown_more_are_sampled_again():
    ghosts = Ghosts(10_000, ReturnModel(), Clock(), max_sampled=64)
    for number in range(2000):
        ghosts.left(conversation(number, root=number, use=number), 1)
    low = ghosts.rate
    for number in range(2000, 60_000):
        ghosts.left(conversation(number, root=number, use=number), 500)
    assert ghosts.rate > 4 * low
    for ghost in ghosts._ghosts.values():
        assert ghost.num_blocks <= ghosts.capacity


def test_sampled_ghosts_hit_as_often_as_full_ones():
    """Thousands of conversations: the error of each seed, and the mean error, in which a bias would show."""
    errors: dict[str, list[float]] = {policy: [] for policy in FIXED_POLICIES}
    for seed in range(6):
        full, sampled = (Traffic(seed, 8000, ReturnModel(), False, bound) for bound in (1 << 30, 400))
        for traffic in (full, sampled):
            traffic.run(15_000, 20, mixed)
        assert full.ghosts.rate == 1
        assert sampled.ghosts.rate <= 1 / 4
        for policy, found in errors.items():
            found.append(sampled.hits[policy] / sampled.wanted - full.hits[policy] / full.wanted)
        assert min(full.hits.values()) > 0.1 * full.wanted
    for policy, found in errors.items():
        assert max(map(abs, found)) < 0.04, policy
        assert abs(sum(found) / len(found)) < 0.02, policy


# -- the choice --
def test_with_nothing_to_choose_it_stays():
    for start in FIXED_POLICIES:
        traffic = Traffic(1, 10**9, ReturnModel())
        traffic.ghosts.best = start
        traffic.run(3000, 10, mixed)
        assert traffic.bests == [start]


@pytest.mark.parametrize("seed", range(3))
def test_where_people_come_back_after_a_minute_it_follows_return_and_stays_there(seed):
    traffic = Traffic(seed, 1500, ReturnModel())
    traffic.ghosts.best = "lru"
    traffic.run(20_000, 10, human)
    assert traffic.hit_rate("return") > traffic.hit_rate("lru") + 0.03
    assert traffic.bests in (["lru", "return"], ["lru", "fifo", "return"])


@pytest.mark.parametrize("seed", range(3))
def test_where_the_model_is_wrong_it_follows_lru_and_stays_there(seed):
    """It has learned of people, and is not told that these are tool loops."""
    traffic = Traffic(seed, 150, knowing_humans(), learns=False)
    traffic.run(20_000, 10, tool_loop)
    assert traffic.hit_rate("lru") > traffic.hit_rate("return") + 0.02
    assert traffic.bests == ["return", "lru"]


def test_it_follows_when_the_traffic_changes():
    traffic = Traffic(3, 600, knowing_humans(), learns=False)
    traffic.run(10_000, 10, human)
    assert traffic.ghosts.best == "return"
    traffic.run(3000, 40, tool_loop)
    assert traffic.ghosts.best == "lru"
    traffic.run(6000, 10, human)
    assert traffic.ghosts.best == "return"
    assert len(traffic.bests) <= 5


def test_a_few_requests_are_no_evidence():
    ghosts = Ghosts(10, ReturnModel(), Clock())
    for _ in range(60):
        ghosts._score(10, {"fifo": 0, "lru": 10, "return": 0})
    assert ghosts.best == "return"
    for _ in range(10):
        ghosts._score(10, {"fifo": 0, "lru": 10, "return": 0})
    assert ghosts.best == "lru"


def test_chance_and_little_gain_are_no_reason():
    rng = random.Random(1)
    ghosts = Ghosts(10, ReturnModel(), Clock())
    for _ in range(20_000):
        ghosts._score(100, {"fifo": 0, "lru": rng.choice([0, 100]), "return": rng.choice([0, 100])})
    assert ghosts.num_switches == 0
    for _ in range(20_000):
        ghosts._score(100, {"fifo": 0, "lru": 51, "return": 50})
    assert ghosts.num_switches == 0
    for _ in range(3000):
        ghosts._score(100, {"fifo": 0, "lru": 53, "return": 50})
    assert (ghosts.best, ghosts.num_switches) == ("lru", 1)


def test_the_past_counts_less():
    ghosts = Ghosts(10, ReturnModel(), Clock())
    for _ in range(50_000):
        ghosts._score(100, {"fifo": 0, "lru": 0, "return": 100})
    for _ in range(512):
        ghosts._score(100, {"fifo": 0, "lru": 0, "return": 0})
    assert ghosts.as_dict()["hit_rate"]["return"] == pytest.approx(0.5, abs=0.001)


# -- persistence --
def test_scores_and_choice_survive_json():
    traffic = Traffic(2, 150, knowing_humans(), learns=False)
    traffic.run(8000, 10, tool_loop)
    again = Ghosts(150, ReturnModel(), Clock())
    state = json.loads(json.dumps(traffic.ghosts.to_dict()))
    again.from_dict(state)
    assert again.best == "lru"
    assert again.to_dict() == state
    assert again.as_dict()["hit_rate"] == traffic.ghosts.as_dict()["hit_rate"]


def bad_states() -> list[object]:
    good = Ghosts(10, ReturnModel(), Clock()).to_dict()
    wrong = [{**good, "best": best} for best in ("auto", None, 3, [])]
    wrong += [{**good, "requests": num} for num in (-1, math.nan, math.inf, "1", None, True, 10**400)]
    wrong += [{**good, "hits": hits} for hits in (None, {}, {"lru": 1}, {**good["hits"], "lru": math.nan})]
    wrong += [{**good, "squares": squares} for squares in (None, [], {**good["squares"], "a/b": 1})]
    return [None, [], "x", {}, {**good, "more": 1}, *wrong]


@pytest.mark.parametrize("state", bad_states())
def test_bad_state_is_refused_and_changes_nothing(state):
    ghosts = Ghosts(10, ReturnModel(), Clock())
    before = ghosts.to_dict()
    with pytest.raises(ValueError, match="state of the ghosts"):
        ghosts.from_dict(state)
    assert ghosts.to_dict() == before
