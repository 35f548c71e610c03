"""Load, compute, or both at once: what is stored is loaded unless the other is clearly faster."""

import itertools
import json

import pytest

from kvstore.policy.planner import (
    ASSUMED_PRICE,
    LEAST_SAVING_S,
    MOST_PRICE,
    STEP_TOKENS,
    LoadChoice,
    Planner,
    Rate,
    StepRate,
    Way,
)

SIZE = 16


def planner(bytes_per_s: float | None, tokens_per_s: float | None, always: bool = False) -> Planner:
    made = Planner(block_bytes=1600, block_size=SIZE, always=always)  # 100 bytes a token
    if bytes_per_s is not None:
        made.loaded(int(bytes_per_s), 1.0)
    if tokens_per_s is not None:
        made.computed(int(tokens_per_s), 1.0)
    return made


def with_disk(read_s: float, compute_s: float, load_s: float = 1e-6) -> Planner:
    """Seconds of a block."""
    made = Planner(block_bytes=1600, block_size=SIZE)
    made.computed(1000 * SIZE, 1000 * compute_s)
    made.loaded(1600, load_s)
    made.read(1600, read_s)
    return made


# -- from memory -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rates", [(None, None), (1.0, None), (None, 1e9)])
def test_what_is_stored_is_loaded_until_both_rates_are_known(rates):
    assert planner(*rates).should_load(10_000)


def test_the_faster_one_wins_by_more_than_20_ms_and_10_percent():
    assert planner(1e6, 1000).should_load(1000)  # 100 ms against a second
    assert not planner(1e5, 10_000).should_load(1000)  # a second against 100 ms
    assert planner(1e6, 12_000).should_load(100), "10 ms against 8.3: less than 20 ms"
    assert planner(1e5, 1050).should_load(10_000), "10 s against 9.5: less than 10 %"


def test_always_loads_whatever_it_costs():
    assert planner(1e3, 1e6, always=True).should_load(10_000)
    assert planner(1e3, 1e6, always=True).choose(100, 100, stalled_s=100).way is Way.LOAD


def test_steps_of_few_tokens_raise_a_rate_and_do_not_lower_it():
    few = planner(None, 150)
    few.computed(8, 1.0)
    assert few.prefill_tokens_per_s == 150
    for _ in range(20):
        few.computed(20, 0.01)
    assert few.prefill_tokens_per_s == 2000


def test_a_slow_sample_does_not_last_for_ever():
    slow = planner(1e5, 10_000)
    assert sum(slow.should_load(1000) for _ in range(64)) == 4, "some are loaded all the same, to measure again"
    for _ in range(20):
        slow.loaded(10_000_000, 1.0)
    assert slow.should_load(1000)


# -- from disk -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("num_blocks", "num_unread", "read_s", "compute_s", "way", "num_head"),
    [
        (100, 100, 0.0001, 0.01, Way.LOAD, 0),  # a fast disk
        (100, 100, 1.0, 0.01, Way.COMPUTE, 100),  # a slow one: the last block would save nothing
        (100, 100, 0.01, 0.01, Way.BOTH, 50),  # as fast as computing: they meet in the middle
        (100, 100, 0.02, 0.01, Way.BOTH, 67),
        (100, 100, 0.005, 0.01, Way.BOTH, 34),
        (100, 0, 1.0, 0.001, Way.LOAD, 0),  # nothing is to be read
        (2, 2, 0.005, 0.004, Way.LOAD, 0),  # less than 20 ms
        (100, 100, 0.0009, 0.01, Way.LOAD, 0),  # both would save less than 20 ms
        (100, 40, 1.0, 0.01, Way.BOTH, 40),  # the tail is there: compute what is not
        (100, 3, 0.001, 0.01, Way.LOAD, 0),  # wait 3 ms
    ],
)
def test_decisions(num_blocks, num_unread, read_s, compute_s, way, num_head):
    choice = with_disk(read_s, compute_s).choose(num_blocks, num_unread)
    assert choice.way is way and abs(choice.num_blocks - num_head) <= 1
    assert (choice.num_next > 0) == (way is Way.BOTH) and choice.num_next <= choice.num_blocks


def test_what_is_of_use_only_together_is_read_unless_computing_is_better_and_sometimes_all_the_same():
    assert with_disk(0.001, 0.01).should_read(100, 100), "a tenth of computing"
    slow = with_disk(0.02, 0.01)
    assert slow.should_read(100, 0), "it is in memory"
    assert sum(slow.should_read(100, 100) for _ in range(64)) == 4
    assert not any(slow.should_read(100, 100, may_try=False) for _ in range(64))
    assert with_disk(0.005, 0.01).should_read(100, 100) and slow.should_read(1, 1), "less than 20 ms"
    assert not with_disk(0.005, 0.01).should_read(100, 100, num_ahead=500, may_try=False), "others are read before"


def test_nothing_is_computed_before_computing_was_measured():
    made = Planner(1600, SIZE)
    made.read(1600, 10.0)
    assert made.choose(100, 100).way is Way.LOAD


def test_what_is_read_before_counts():
    made = with_disk(0.003, 0.01)
    assert made.choose(100, 100).way is Way.LOAD
    queued = made.choose(100, 100, num_ahead=200)
    assert queued.way is Way.BOTH and queued.num_blocks > 60
    assert made.choose(100, 100, num_ahead=50_000).way is Way.COMPUTE


@pytest.mark.parametrize(("remote_s", "way"), [(0.0001, Way.LOAD), (0.002, Way.BOTH), (1.0, Way.COMPUTE)])
def test_what_comes_from_the_remote_tier_is_weighed_by_its_own_rate(remote_s, way):
    made = with_disk(read_s=0.0001, compute_s=0.002)
    made.read_remote(1600, remote_s)
    assert made.choose(1000, 1000, num_remote=1000).way is way
    assert made.choose(1000, 1000).way is Way.LOAD, "from disk"


def test_a_state_is_loaded_with_its_blocks_or_they_are_computed_without_it():
    made = with_disk(0.003, 0.01)
    assert made.choose(100, 100, num_state=50).way is Way.LOAD, "0.3 s against 0.5"
    assert made.choose(100, 100, num_state=90) == LoadChoice(Way.COMPUTE, 100), "against 0.1"
    assert made.choose(100, 100, num_ahead=30, num_state=60).way is Way.LOAD, "level; nothing is loaded in part"
    assert planner(1e6, 5000).should_load(1000, num_state=0)
    assert not planner(1e6, 5000).should_load(1000, num_state=1000)


def test_prompts_that_are_computed_at_the_same_time_share_the_rate():
    made = with_disk(0.01, 0.01)
    made.num_prompts = 1
    assert made.choose(100, 100).num_blocks == 34, "it computes a block while two are read"
    assert made.choose(100, 100, is_open=True).num_blocks == 50, "it is the one that is computed"
    assert not planner(1e5, 10_000).should_load(1000)
    beside = planner(1e5, 10_000)
    beside.num_prompts = 9
    assert beside.should_load(1000)


def test_a_read_that_takes_long_is_expected_to_go_on():
    made = with_disk(0.001, 0.01)
    assert made.choose(100, 100, stalled_s=0.002).way is Way.LOAD
    assert made.choose(100, 100, stalled_s=5.0).way is Way.COMPUTE


def test_a_request_that_computes_anyway_waits_for_little():
    made = with_disk(0.001, 0.002)
    assert made.choose(10, 10).way is Way.LOAD
    made = with_disk(0.01, 0.001)
    assert made.choose(2, 2).way is Way.LOAD, "20 ms against 2"
    assert made.choose(2, 2, is_open=True).way is not Way.LOAD


def test_never_slower_than_the_better_of_both_by_more_than_a_tenth_or_20_ms():
    """By its own rates: what it chooses, against loading everything and against computing everything."""
    speeds = [10 ** (exponent / 4) for exponent in range(-20, 5)]
    for read_s, compute_s, num_blocks in itertools.product(speeds, [0.0005, 0.005, 0.05], [1, 5, 30, 300, 3000]):
        choice = with_disk(read_s, compute_s).choose(num_blocks, num_blocks)
        load_s, all_compute_s = num_blocks * (read_s + 1e-6), num_blocks * compute_s
        steps_s = 10 * STEP_TOKENS / SIZE * compute_s
        took_s = {
            Way.LOAD: load_s,
            Way.COMPUTE: all_compute_s,
            Way.BOTH: max(choice.num_blocks * compute_s, (num_blocks - choice.num_blocks) * read_s) + steps_s,
        }[choice.way]
        better_s = min(load_s, all_compute_s)
        assert took_s <= max(better_s / 0.9, better_s + LEAST_SAVING_S) + steps_s * (choice.way is Way.BOTH)


def test_computing_is_measured_now_and_then_while_requests_wait_for_the_disk():
    made = with_disk(0.0001, 0.01)
    assert [made.measure(100) is None for _ in range(9)] == [True] * 8 + [False]
    made.computed(1000, 1.0)
    assert made.measure(100) is None


# -- rates -----------------------------------------------------------------------------------------------------------
def test_a_rate_follows_a_disk_that_becomes_slow_at_once_and_one_that_becomes_fast_soon():
    rate = Rate()
    assert rate.per_s is None
    for _ in range(100):
        rate.add(1, 0.001)
    rate.add(1, 2.0)
    assert rate.per_s < 10
    for _ in range(60):
        rate.add(1, 0.001)
    assert rate.per_s > 100


def test_a_step_that_was_held_up_says_nothing():
    rate = StepRate()
    assert rate.per_s is None
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        rate.add(1000, seconds)
    assert rate.per_s == 1000
    for _ in range(7):
        rate.add(1000, 2.0)
    assert rate.per_s == 500


def test_small_steps_do_not_count_once_a_large_one_was_measured():
    made = planner(None, 1000)
    for _ in range(100):
        made.computed(4, 1.0)
    assert made.as_dict()["prefill_tokens_per_s"] == 1000


def test_readers_at_work_together_share_the_time():
    made = Planner(1600, SIZE)
    made.read(1600, 0.2, num_active=2.0)
    assert made.read_s == pytest.approx(0.1)


def test_what_was_measured_outlives_the_process():
    old, new = with_disk(0.01, 0.01), Planner(1600, SIZE)
    new.restore(json.loads(json.dumps(old.state())))
    assert new.as_dict() == pytest.approx(old.as_dict())
    assert new.choose(100, 100) == LoadChoice(Way.BOTH, 50, 37)
    new.restore(None)


@pytest.mark.parametrize(("tokens_per_s", "price"), [(1e4, 1.0), (5e3, 2.0), (2.6e3, 8.0), (1e3, 8.0), (10, 8.0)])
def test_the_price_of_computing_stays_unless_it_is_far_off(tokens_per_s, price):
    """It changes at a start alone, and measurements near the bounds do not let it go to and fro."""
    old = planner(1e6, tokens_per_s)
    assert old.compute_price == ASSUMED_PRICE == 8.0
    for _ in range(2):
        new = Planner(1600, SIZE)
        new.restore(json.loads(json.dumps(old.state())))
        assert new.compute_price == price
        old = new
    new = Planner(1600, SIZE)
    new.restore(planner(1e6, 10).state() | {"price": 4.0})
    assert new.compute_price == MOST_PRICE == 16.0
    new.restore(None)
    assert new.compute_price == ASSUMED_PRICE


@pytest.mark.parametrize("state", [{"read": "fast"}, {"load": -1.0}, {"prefill": float("inf")}, {"read": [1]}])
def test_a_state_that_makes_no_sense_is_refused(state):
    with pytest.raises(ValueError, match="rate"):
        Planner(1600, SIZE).restore(state)
