"""Prefixes: what first prompts have in common, where that ends on a tier, and what the learner hears of it."""

import random
from itertools import count

import pytest

from kvstore.blocks.forest import EvictionTree
from kvstore.policy.conversation import Conversation, Prefix
from kvstore.policy.policies import EvictionOrder, Steering
from kvstore.policy.prefixes import MAX_PREFIXES, MAX_SAMPLED, Prefixes
from kvstore.policy.return_model import NUM_BUCKETS, NUM_CATEGORIES, RankTable, ReturnLearner, ReturnModel


class Registry:
    """Newcomers, one a second."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.model = ReturnModel()
        self.prefixes = Prefixes(ReturnLearner(self.model), num_blocks)
        self._numbers = count(1)
        self.now_s = 0.0

    def _make(self, now_s: float) -> Conversation:
        return Conversation(next(self._numbers), 0, now_s, now_s)

    def comes(self, chain) -> Conversation:
        self.now_s += 1
        newcomer = self._make(self.now_s)
        newcomer.use = newcomer.number
        self.prefixes.begin(newcomer, chain, self._make)
        return newcomer


def path(prefix: Prefix | None) -> list[tuple[object, int, int]]:
    """End, length and uses, from the longest one on."""
    found = []
    while prefix is not None:
        found.append((prefix.end, prefix.num_blocks, prefix.entry.turn))
        prefix = prefix.parent
    return found


def test_a_first_prompt_is_a_prefix_that_nobody_shares_yet():
    known = Registry()
    assert path(known.comes("abc").prefix) == [("c", 3, 1)]
    assert path(known.comes("xyz").prefix) == [("z", 3, 1)]
    assert known.model.num_returns == 0


def test_what_the_second_one_has_in_common_is_the_prefix_from_then_on():
    known = Registry()
    first = known.comes("abcd")
    second = known.comes("abxy")
    assert path(second.prefix) == [("y", 4, 1), ("b", 2, 2)]
    assert path(first.prefix) == [("b", 2, 2)], "the rest of the first was not shared"
    assert known.model.num_returns == 1
    third = known.comes("ab")
    assert path(third.prefix) == [("b", 2, 3)] and third.prefix.entry.gap_s == 1.0


def test_prefixes_of_prefixes_are_of_use_together():
    known = Registry()
    known.comes("abcd")
    known.comes("abxy")
    deeper = known.comes("abxz")
    assert path(deeper.prefix) == [("z", 4, 1), ("x", 3, 2), ("b", 2, 3)]
    shorter = known.comes("aq")
    assert path(shorter.prefix) == [("q", 2, 1), ("a", 1, 4)], "whoever used the longer one used this one"
    assert path(deeper.prefix)[1:] == [("x", 3, 2), ("b", 2, 3), ("a", 1, 4)]
    assert path(known.comes("abcdef").prefix) == [("f", 6, 1), ("d", 4, 2), ("b", 2, 4), ("a", 1, 5)]


def test_the_oldest_are_forgotten():
    known = Registry(num_blocks=2)
    known.comes("abcd")
    for number in range(MAX_PREFIXES):
        known.comes([(number, place) for place in range(5)])
    assert len(known.prefixes) == MAX_PREFIXES and len(known.prefixes._owners) == MAX_SAMPLED
    assert path(known.comes("abx").prefix) == [("x", 3, 1)], "nobody knows of the first one any more"
    assert known.model.num_returns == 0


def test_of_a_large_store_a_sample_of_blocks_is_enough():
    known = Registry(num_blocks=1 << 20)
    rng = random.Random(1)
    documents = [[rng.getrandbits(60) for _ in range(600)] for _ in range(5)]
    for number in range(40):
        known.comes([*documents[number % 5], rng.getrandbits(60)])
    assert len(known.prefixes._owners) < 5 * 600 / 8
    assert known.model.num_returns >= 35
    newcomer = known.comes([*documents[0], 7])
    end, num_blocks, uses = path(newcomer.prefix)[-1]
    assert uses == 9 and 400 < num_blocks <= 600 and end == documents[0][num_blocks - 1]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prefix_keeps_its_last_block_of_a_tier_when_it_is_worth_more_than_the_owner(is_known):
    """Also if the last owner was found in a store, so that only another one's prefix tells of it."""
    known = Registry()
    tree: EvictionTree[int] = EvictionTree(EvictionOrder("return", known.model, lambda: 0.0), id_of="abcx".__getitem__)
    first = known.comes("abc")
    for parent, key in ((None, 0), (0, 1), (1, 2)):
        tree.add(key, parent, first)
    second = known.comes("abx")
    tree.claim(second, 1)
    tree.add(3, 1, second)
    shared = second.prefix.parent.entry
    if not is_known:
        second.prefix = None
        tree.claim(first, 1)
        tree.claim(first, 2)
        second.prefix = None
    worth = {first.category: 1.0, second.category: 2.0, shared.category: 9.0}
    ranks = [[worth.get(category, 0.5)] * NUM_BUCKETS for category in range(NUM_CATEGORIES)]
    known.model.table = RankTable(9, ranks)
    gone = []
    while (key := tree.next()) is not None:
        gone.append((key, tree.owner_of[key]))
        tree.remove(key)
        tree.check_integrity()
    assert gone == [(2, first), (3, second), (1, shared), (0, shared)]


@pytest.mark.parametrize("policy", ["fifo", "lru"])
def test_only_return_asks_for_prefixes(policy):
    steering = Steering(policy, lambda: 0.0, {"cpu": 10})
    assert steering.arrive(["a", "b"]).prefix is None
    assert steering.as_dict()["num_prefixes"] == 0
