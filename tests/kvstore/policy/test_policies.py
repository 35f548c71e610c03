"""The eviction order: each policy against a naive sort, pins, wants, expiry, growing older, another thread."""

import math
import random
from collections.abc import Callable

import pytest

from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import KEPT_S, POLICIES, SAMPLE, EvictionOrder, policy_in_force
from kvstore.policy.return_model import NUM_BUCKETS, NUM_CATEGORIES, RankTable, ReturnModel, bucket_of
from tests.support.clocks import Clock


def conversation(number: int, used_s: float = 0.0, use: int = 0, category: int = 0) -> Conversation:
    return Conversation(number, number, used_s, used_s, use=use, category=category)


def order_of(policy: str, clock: Clock, model: ReturnModel | None = None) -> EvictionOrder:
    return EvictionOrder(policy, model or ReturnModel(), clock)


def drained(order: EvictionOrder) -> list[int]:
    """The numbers of all, in order; the order is empty after that."""
    found = []
    while (one := order.first()) is not None:
        found.append(one.number)
        order.discard(one)
    return found


def set_ranks(model: ReturnModel, rank: Callable[[int, int], float]) -> None:
    """Publish ranks of our own."""
    rows = [[rank(category, bucket) for bucket in range(NUM_BUCKETS)] for category in range(NUM_CATEGORIES)]
    model.table = RankTable(model.table.version + 1, rows)


def test_one_that_is_added_later_grows_older_too(clock):
    """The answer was found before it came, and nothing but time happens after that."""
    model = ReturnModel()
    set_ranks(model, lambda category, bucket: 0.0 if bucket == bucket_of(3.0) else 1.0)
    order = order_of("return", clock, model)
    old = conversation(1, clock.now_s - 500.0)
    order.add(old)
    assert order.first() is old
    young = conversation(2, clock.now_s)
    order.add(young)
    assert order.first() is old
    clock.now_s += 3.0
    assert order.first() is young


@pytest.mark.parametrize("policy", POLICIES)
def test_a_remnant_goes_before_its_conversation(policy, clock):
    order = order_of(policy, clock)
    one, remnant = conversation(1, use=2), conversation(1, use=1)
    order.add(one)
    order.add(remnant)
    assert order.first() is remnant


def test_expired_then_ordinary_then_pinned_then_wanted(clock):
    order = order_of("lru", clock)
    members = {number: conversation(number, use=number) for number in range(1, 11)}
    members[1].wanted, members[2].wanted, members[3].wanted = (0, 5), (0, 9), (1, 0)
    members[4].pinned_until_s, members[5].pinned_until_s = 2000.0, 1500.0
    members[9].expires_s, members[10].expires_s = 999.0, 1000.0
    members[8].expires_s = 1001.0
    members[7].pinned_until_s = 1000.0  # it has just ended
    for one in members.values():
        order.add(one)
    assert drained(order) == [9, 10, 6, 7, 8, 5, 4, 3, 2, 1]


def test_whose_request_runs_goes_last_also_where_another_of_its_requests_waits(clock):
    order = order_of("lru", clock)
    running, wanted = conversation(1), conversation(2)
    running.num_running, running.wanted, wanted.wanted = 1, (0, 9), (0, 5)
    for one in (running, wanted):
        order.add(one)
    assert drained(order) == [2, 1]


def test_adding_twice_and_discarding_strangers_change_nothing(clock):
    order = order_of("fifo", clock)
    one, stranger = conversation(1), conversation(2)
    order.discard(one)
    order.add(one)
    order.add(one)
    order.refresh(stranger)
    order.discard(stranger)
    assert (len(order), one in order, stranger in order, order.first()) == (1, True, False, one)
    order.discard(one)
    assert (len(order), one in order, order.first()) == (0, False, None)
    order.add(one)
    order.discard(one)
    assert order.first() is None, "it was discarded before anybody looked"


# -- against a naive sort --
def naive(members: set[Conversation], policy: str, model: ReturnModel, now_s: float) -> Conversation | None:
    def by_policy(one: Conversation) -> tuple:
        if policy == "fifo":
            return (one.number,)
        if policy == "lru":
            return one.use, one.used_s, one.number
        return model.table.ranks[one.category][bucket_of(now_s - one.used_s)], one.used_s, one.use, one.number

    def key(one: Conversation) -> tuple:
        if one.wanted is not None:
            return 3, -one.wanted[0], -one.wanted[1], one.number
        if one.expires_s <= now_s:
            return 0, one.expires_s, one.number
        if one.pinned_until_s > now_s:
            return 2, one.pinned_until_s, one.number
        return 1, *by_policy(one)

    return min(members, key=key, default=None)


def change(rng: random.Random, one: Conversation, now_s: float, use: int) -> None:
    kind = rng.randrange(6)
    if kind <= 2:
        one.used_s, one.use, one.category = now_s, use, rng.randrange(NUM_CATEGORIES)
    elif kind == 3:
        one.wanted = rng.choice([None, (rng.randrange(2), rng.randrange(50))])
    elif kind == 4:
        one.pinned_until_s = rng.choice([0.0, now_s + rng.expovariate(0.05)])
    else:
        one.expires_s = rng.choice([math.inf, now_s + rng.expovariate(0.01)])


def random_ranks(rng: random.Random) -> Callable[[int, int], float]:
    """Few different values, so that there are ties, going up and down over the ages."""
    table = {(c, b): rng.randrange(6) / 4 for c in range(NUM_CATEGORIES) for b in range(NUM_BUCKETS)}
    return lambda category, bucket: table[category, bucket]


@pytest.mark.parametrize("policy", ["fifo", "lru", "return"])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_against_a_naive_sort(policy, seed, clock):
    rng = random.Random(seed)
    model = ReturnModel()
    order = EvictionOrder(policy, model, clock)
    everybody = [conversation(i, 1000 - rng.expovariate(0.01), 0, rng.randrange(5)) for i in range(60)]
    members: set[Conversation] = set()
    looks = 0
    for use in range(1, 1500):
        one, kind = rng.choice(everybody), rng.random()
        if kind < 0.2:
            order.add(one)
            if one not in members:
                members.add(one)
        elif kind < 0.3:
            order.discard(one)
            members.discard(one)
        elif kind < 0.5:
            change(rng, one, clock.now_s, use)
            order.refresh(one)
        elif kind < 0.6:
            clock.now_s += rng.choice([KEPT_S, 5.0, 60.0]) * (1 + rng.random())
        elif kind < 0.61:
            set_ranks(model, random_ranks(rng))
        else:
            assert order.first() is naive(members, policy_in_force(policy), model, clock.now_s)
            assert len(order) == len(members)
            looks += 1
    assert looks > 400


def test_of_very_many_one_of_the_least_valuable_is_first(clock):
    """Whichever leave or are used meanwhile."""
    rng, order = random.Random(1), order_of("lru", clock)
    members = dict.fromkeys(conversation(number, use=number) for number in range(20 * SAMPLE))
    for one in rng.sample(list(members), len(members)):
        order.add(one)
    shares = []  # of the members that are worth less
    for use in range(30 * SAMPLE, 31 * SAMPLE):
        first = order.first()
        shares.append(sum(one.use < first.use for one in members) / len(members))
        order.discard(first)
        del members[first]
        used = rng.choice(list(members))
        used.use = use
        order.refresh(used)
    assert max(shares) < 1 / 8 and sum(shares) / len(shares) < 1 / 25


def test_auto_is_return():
    assert policy_in_force("auto") == "return"
