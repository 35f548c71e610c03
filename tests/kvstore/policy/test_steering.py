"""All of it together: requests come and go, the orders are right, and what was learned survives a restart."""

import json
import math
import random

import pytest

from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.policies import MAX_WAIT_S, Steering
from kvstore.policy.return_model import category_of
from tests.support.clocks import Clock

CAPACITIES = {"cpu": 100, "disk": 1000}


def talk(steering: Steering, clock: Clock, chain: list[str], lasts_s: float = 1.0) -> Conversation:
    """A request; then the tiers have its blocks."""
    conversation = steering.arrive(chain)
    clock.now_s += lasts_s
    steering.end_request(conversation, chain)
    for tier in CAPACITIES:
        steering.order(tier).add(conversation)
    return conversation


def firsts(steering: Steering) -> list[Conversation | None]:
    return [steering.order(tier).first() for tier in CAPACITIES]


@pytest.mark.parametrize("policy", ["lru", "return", "auto"])
def test_a_request_moves_its_conversation_back_in_every_order(policy, clock):
    steering = Steering(policy, clock, CAPACITIES)
    one = talk(steering, clock, ["a"])
    clock.now_s += 100
    two = talk(steering, clock, ["b"])
    assert firsts(steering) == [one, one]
    clock.now_s += 100
    assert talk(steering, clock, ["a", "c"]) is one
    assert firsts(steering) == [two, two]


def test_pins_wants_and_expiry_reach_every_order(clock):
    steering = Steering("lru", clock, CAPACITIES)
    one, two = talk(steering, clock, ["a"]), talk(steering, clock, ["b"])
    steering.pin(one, 50)
    assert firsts(steering) == [two, two]
    two.wanted = (0, 1)
    steering.refresh(two)
    assert firsts(steering) == [one, one]
    steering.pin(two, None, clock.now_s + 10)
    clock.now_s += 10
    assert firsts(steering) == [one, one], "the other one is wanted, expired or not"
    two.wanted = None
    steering.refresh(two)
    steering.pin(two, 5000)
    assert firsts(steering) == [two, two], "an expiry breaks a pin"
    steering.pin(two, None, math.inf)
    assert firsts(steering) == [one, one], "its pin ends first"
    steering.pin(two, 0)
    assert firsts(steering) == [two, two], "the other one is still pinned"
    steering.pin(one, 0)
    assert firsts(steering) == [one, one]


def test_a_conversation_has_the_category_in_which_it_rests(clock):
    steering = Steering("return", clock, CAPACITIES)
    one = talk(steering, clock, ["a"])
    first = one.category
    assert (one.turn, first) == (1, category_of(one))
    clock.now_s += 100
    talk(steering, clock, ["a", "b"])
    assert (one.turn, one.gap_s, one.category) == (2, 100.0, category_of(one)) and one.category != first
    steering.end_request(steering.arrive(["a", "b", "d"]), ["a", "b"], Answer(20, calls_tool=True))
    assert one.category == category_of(one), "how the answer ended counts, too"
    assert steering.conversation_of(["a", "b", "c"]) is one
    steering.move(one, ["s"])
    assert steering.conversation_of(["s"]) is one
    assert steering.as_dict()["num_returns_learned"] == 2


def test_what_a_store_has_is_adopted_and_the_oldest_goes_first(clock):
    for policy in ("lru", "return"):
        steering = Steering(policy, clock, CAPACITIES)
        found = [(name, steering.make(name, used_s)) for name, used_s in [("a", 500.0), ("b", 20.0), ("c", 2000.0)]]
        steering.adopt(iter(found))
        for _, conversation in found:
            steering.order("disk").add(conversation)
        assert found[2][1].used_s == clock.now_s, "no use is in the future"
        assert steering.order("disk").first() is found[1][1]
        assert steering.arrive(["b", "x"]) is found[1][1]
        assert steering.order("disk").first() is found[0][1]


def hump(steering: Steering, clock: Clock, num: int) -> None:
    """Whoever returns does so after about a minute."""
    rng = random.Random(4)
    due = [(clock.now_s + i * 0.3, i, [f"{i}"]) for i in range(num)]
    due += [(at + rng.lognormvariate(math.log(60), 0.3), i, [f"{i}", "x"]) for at, i, _ in due if rng.random() < 0.6]
    for at_s, i, chain in sorted(due):
        clock.now_s = max(clock.now_s, at_s)
        talk(steering, clock, [f"{i}"] + [f"{i}{name}" for name in chain[1:]], lasts_s=0.0)
        steering.poll()


def test_what_was_learned_survives_a_restart(clock):
    steering = Steering("auto", clock, CAPACITIES)
    hump(steering, clock, 600)
    state = json.loads(json.dumps(steering.state()))
    again = Steering("auto", clock, {**CAPACITIES, "hbm": 10}, state)
    assert not again.state_was_bad
    assert again.state() == state
    assert again.as_dict()["num_returns_learned"] == steering.as_dict()["num_returns_learned"] > 100


def test_what_an_earlier_version_has_learned_is_not_used_and_no_fault(clock):
    old = {"version": 1, "model": {"3": {"returns": [9.0] * 51, "passes": [0.0] * 51}}, "ghosts": {"cpu": {}}}
    steering = Steering("auto", clock, CAPACITIES, old)
    assert not steering.state_was_bad
    assert steering.state() == {"version": 2, "model": {}}


def bad_states() -> list[object]:
    good = Steering("auto", Clock(), CAPACITIES).state()
    return [
        [], "x", 0, {}, {**good, "version": 3}, {**good, "more": 1}, {**good, "model": None},
        {**good, "model": {"0": {"returns": [math.nan] * 51, "passes": [0.0] * 51}}},
    ]  # fmt: skip


@pytest.mark.parametrize("state", bad_states())
def test_with_bad_state_it_starts_anew_and_says_so(state, clock):
    steering = Steering("auto", clock, CAPACITIES, state)
    assert steering.state_was_bad
    assert steering.as_dict()["state_was_bad"]
    assert steering.state() == Steering("auto", clock, CAPACITIES).state()
    one = talk(steering, clock, ["a"])
    assert firsts(steering) == [one, one]


def test_the_statistics_are_plain_data(clock):
    steering = Steering("auto", clock, CAPACITIES)
    talk(steering, clock, ["a", "b"])
    stats = json.loads(json.dumps(steering.as_dict()))
    assert stats["policy"] == "auto"
    assert stats["in_force"] == {"cpu": "return", "disk": "return"}
    assert stats["evictable"] == {"cpu": 1, "disk": 1}
    assert (stats["num_conversations"], stats["num_prefixes"], stats["num_away"]) == (1, 1, 2)


def test_an_unknown_policy_is_our_bug(clock):
    with pytest.raises(AssertionError, match="mru is not one of"):
        Steering("mru", clock, CAPACITIES)


def test_while_somebody_waits_learning_is_put_off_but_not_for_ever(clock):
    steering = Steering("return", clock, CAPACITIES)
    steering.poll()
    before = steering.as_dict()["ranks_version"]
    for number in range(40):
        talk(steering, clock, [f"talk {number}"], lasts_s=0.1)
        steering.poll(is_idle=False)
    assert steering.as_dict()["ranks_version"] == before
    clock.now_s += MAX_WAIT_S
    steering.poll(is_idle=False)
    assert steering.as_dict()["ranks_version"] == before + 1


def test_the_pins_of_a_tenant_take_half_of_the_largest_tier(clock):
    steering = Steering("lru", clock, CAPACITIES)
    ours = [talk(steering, clock, [name]) for name in "abc"]
    theirs = talk(steering, clock, ["z"])
    steering.pin(theirs, 900, tenant="theirs", num_blocks=500)
    for one in ours:
        steering.pin(one, 900, tenant="ours", num_blocks=200)
    assert [one.pinned_until_s > clock.now_s for one in (*ours, theirs)] == [False, True, True, True]
    assert firsts(steering) == [ours[0], ours[0]], "the one that was pinned first goes first"
    steering.pin(ours[1], 900, tenant="ours", num_blocks=220)  # it has grown, and is the last one pinned
    steering.pin(ours[0], 900, tenant="ours", num_blocks=200)
    assert [one.pinned_until_s > clock.now_s for one in ours] == [True, True, False]
    clock.now_s += 1000
    steering.pin(ours[2], 900, tenant="ours", num_blocks=500)
    assert ours[2].pinned_until_s > clock.now_s, "pins that have ended take nothing"
