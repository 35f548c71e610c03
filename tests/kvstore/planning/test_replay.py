"""Replays of tiny traces against results made by hand, of random ones against a naive cache and their own sums.

Blocks have 10 tokens and one byte unless a test says otherwise; the server computes 10 tokens a second.
"""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest

from bench.oracle import Oracle
from bench.traffic import generate
from kvstore.errors import ConfigError
from kvstore.planning.replay import Replay, replay
from kvstore.planning.replay_config import ReplayConfig, ServiceModel
from kvstore.planning.traces import Arrivals
from tests.support.small_traces import chained_trace, request, trace


def service(**more):
    rates = {
        "prefill_tokens_per_s": 10.0,
        "decode_tokens_per_s": 1.0,
        "max_batch": 4,
        "load_bytes_per_s": math.inf,
        "read_bytes_per_s": math.inf,
        "write_bytes_per_s": math.inf,
    }
    return ServiceModel(**{**rates, **more})


def config(hbm=100, cpu=0, disk=0, policy="lru", look_ahead=True, ttl_s=None, warm_up=0, **rates):
    return ReplayConfig(hbm, cpu, disk, 1, policy, look_ahead, service(**rates), ttl_s, warm_up)


def run(config, *requests):
    one = Replay(trace(*requests), config)
    result = one.run()
    one.check_integrity()
    return result


def by_tier(hbm=0, cpu=0, disk=0):
    return {"hbm": hbm, "cpu": cpu, "disk": disk}


# -- the service -----------------------------------------------------------------------------------------------------
def test_the_time_to_the_first_token_is_queue_and_computing():
    result = run(config(), request([], 5, 2), request([], 9, 2, 0.2))
    # 0.5 s to compute the first; the second waits 0.3 s for the prefill server and takes 0.9 s.
    assert result.ttft_mean_s == pytest.approx((0.5 + 1.2) / 2)
    assert result.ttft_p90_s == pytest.approx(1.2)
    assert result.duration_s == pytest.approx(1.4 + 2.0)


def test_a_full_batch_makes_the_next_one_wait():
    result = run(config(max_batch=1), request([], 5, 2), request([], 9, 2, 0.5))
    assert result.ttft_mean_s == pytest.approx((0.5 + (2.5 - 0.5) + 0.9) / 2)


def test_requests_wait_for_hbm_in_their_order():
    """The second needs 3 blocks and finds 2; the third would fit and waits all the same."""
    result = run(config(hbm=4), request([], 11, 9), request([], 21, 9, 0.1), request([], 1, 0, 0.2))
    # 1.1 + 9 s until the first has ended; then 2.1 s, and 0.1 s behind that.
    assert result.ttft_mean_s == pytest.approx((1.1 + (10.1 + 2.1 - 0.1) + (10.1 + 2.2 - 0.2)) / 3)


def test_what_is_larger_than_hbm_is_refused_and_followed():
    result = run(config(hbm=2), request([1, 2], 21, 0), request([3], 11, 0, 4.0, after=0))
    assert (result.num_refused, result.num_requests, result.num_prompt_tokens) == (1, 1, 11)


def test_an_answer_is_the_next_turns_history():
    first = request([1, 2, 3], 15, 18, has_answer=True)
    result = run(config(), first, request([1, 2, 3, 4], 40, 0, 1.0, after=0, has_answer=True))
    assert (result.num_hit_blocks, result.num_hit_tokens) == (3, 30)  # the answer's full blocks too
    # It comes 1 s after the end of the first, at 1.5 + 18 + 1 s, and computes 10 tokens.
    assert result.duration_s == pytest.approx(20.5 + 1.0)


def test_one_token_is_always_left_to_compute():
    result = run(config(), request([1, 2, 3], 30), request([1, 2, 3], 30, 0, 10.0))
    assert (result.num_hit_tokens, result.num_prompt_tokens) == (20, 60)


def test_a_follower_of_nobody_before_it_is_refused():
    with pytest.raises(ConfigError, match="request 0 of the trace follows 1"):
        replay(trace(request([1], after=1), request([2])), config())


# -- tiers -----------------------------------------------------------------------------------------------------------
def test_a_load_and_the_computing_run_side_by_side():
    """4 of 5 blocks come from the CPU tier, after others have taken HBM; 11 tokens are computed in 1.1 s."""
    requests = (
        request([1, 2, 3, 4], 41),
        request([11, 12, 13, 14, 15], 51, 0, 50.0),
        request([1, 2, 3, 4, 5], 51, 0, 100.0),
    )
    for rate, ttft_s in ((100.0, 1.1), (2.0, 2.0)):  # 4 bytes in 0.04 s or in 2 s
        result = run(config(hbm=6, cpu=20, load_bytes_per_s=rate), *requests)
        assert result.hits_at_arrival == result.hits_at_schedule == by_tier(cpu=40)
        assert result.ttft_mean_s == pytest.approx((4.1 + 5.1 + ttft_s) / 3)
        assert result.bytes_moved == {"save": 10, "load": 4, "write": 0, "read": 0}


def on_disk_only(at_s, *more):
    """1, 2 are pushed out of HBM of 6 and a CPU tier of 6 blocks, then a request runs for 50 s from 100 s on."""
    return (
        request([1, 2], 21),
        request([11, 12, 13, 14, 15], 51, 0, 20.0),
        request([21, 22], 21, 0, 40.0),
        request([], 1, 50, 100.0),
        request([1, 2, 3], 31, 0, at_s),
        *more,
    )


def test_look_ahead_hides_the_disk():
    """Two reads of 4 s each, begun at 110 s; the batch is free at 150.1 s. 11 tokens are computed in 1.1 s."""
    served = {}
    for look_ahead in (True, False):
        result = run(
            config(hbm=6, cpu=6, disk=50, look_ahead=look_ahead, max_batch=1, read_bytes_per_s=0.25),
            *on_disk_only(110.0),
        )
        served[look_ahead] = result
        assert result.hits_at_arrival == by_tier(disk=20)
        assert result.bytes_moved == {"save": 10, "load": 2, "write": 10, "read": 2}
    assert served[True].hits_at_schedule == by_tier(cpu=20)
    assert served[False].hits_at_schedule == by_tier(disk=20)
    before_s = 2.1 + 5.1 + 2.1 + 0.1
    assert served[True].ttft_mean_s == pytest.approx((before_s + 150.1 - 110 + 1.1) / 5)
    assert served[False].ttft_mean_s == pytest.approx((before_s + 150.1 - 110 + 8 + 1.1) / 5)


def test_who_waits_for_the_disk_holds_up_nobody():
    late = request([], 1, 0, 120.0)
    result = run(
        config(hbm=6, cpu=6, disk=50, look_ahead=False, max_batch=1, read_bytes_per_s=0.25), *on_disk_only(110.0, late)
    )
    # Reads begin at 150.1 s; the last one starts at once and the other when they have ended.
    waits_s = (150.1 - 110 + 8 + 1.1) + (150.1 - 120 + 0.1)
    assert result.ttft_mean_s == pytest.approx((2.1 + 5.1 + 2.1 + 0.1 + waits_s) / 6)


def test_a_save_without_an_arena_block_is_dropped_with_all_that_follows():
    """A CPU tier of 2 and a disk that takes 1,000 s a block: of 4 blocks 2 are saved."""
    requests = (
        request([1, 2, 3, 4], 41),
        request([11, 12, 13, 14, 15], 51, 0, 50.0),
        request([1, 2, 3, 4, 5], 51, 0, 100.0),
    )
    result = run(config(hbm=6, cpu=2, disk=50, write_bytes_per_s=0.001), *requests)
    # Then 5 of which none can be saved; then 3, of which the first two were hits.
    assert result.num_dropped_saves == 2 + 5 + 3
    assert result.hits_at_arrival == by_tier(cpu=20)
    assert result.bytes_moved == {"save": 2, "load": 2, "write": 2, "read": 0}


def test_a_hole_is_closed_by_computing():
    """Blocks 3, 4 were not saved. They are in HBM, but there is room to save them by now: they are computed."""
    requests = (request([1, 2, 3, 4], 41), request([1, 2, 3, 4, 5], 51, 0, 5000.0))
    result = run(config(hbm=20, cpu=2, disk=50, write_bytes_per_s=0.001), *requests)
    assert result.hits_at_arrival == by_tier(hbm=20)
    assert result.bytes_moved["save"] == 4  # two arena blocks, both of which were free: 3 and 4


def test_what_is_larger_than_the_disk_is_given_up():
    result = run(config(hbm=20, cpu=20, disk=3), request([1, 2, 3, 4, 5], 51))
    assert result.bytes_moved["write"] == 3
    assert result.num_dropped_writes == 1  # 4; then 5 has nothing to build on


def test_nothing_below_hbm():
    result = run(config(hbm=6), *on_disk_only(110.0))
    assert result.num_hit_tokens == 0
    assert result.bytes_moved == {"save": 0, "load": 0, "write": 0, "read": 0}
    assert result.num_dropped_saves == 0


# -- policies, warm-up, errors ---------------------------------------------------------------------------------------
def test_the_oracle_keeps_who_comes_next():
    """HBM of 5 blocks, one of them for the rest of a prompt: 1, 2 comes again; 5, 6 does not, but was used later."""
    made = trace(
        request([1, 2], 21, 0, 0.0),
        request([5, 6], 21, 0, 10.0),
        request([7], 11, 0, 20.0),
        request([8] * 6, 61, 0, 25.0),  # refused
        request([1, 2, 3], 31, 0, 30.0),
    )
    for cpu in (0, 4):
        assert replay(made, config(hbm=5, cpu=cpu), None, partial(Oracle, made)).num_hit_blocks == 2
    assert replay(made, config(hbm=5)).num_hit_blocks == 1


def test_the_oracle_needs_known_arrivals():
    made = trace(request([1]), request([1, 2], at_s=5.0, after=0))
    with pytest.raises(ConfigError, match="depend on answers"):
        replay(made, config(), None, partial(Oracle, made))


def test_what_has_expired_goes_before_what_is_older():
    """HBM of 9 blocks, of which the third request needs 7: by age 1, 2 would go, but 5, 6 has expired by then."""
    requests = (
        request([1, 2], 21, 30, 0.0),  # ends at 32.1 s
        request([5, 6], 21, 0, 1.0),  # at 4.2 s
        request([11, 12, 13, 14, 15, 16], 61, 0, 40.0),
        request([1, 2], 21, 0, 50.0),
    )
    hits = [run(config(hbm=9, policy="fifo", ttl_s=ttl_s), *requests).num_hit_blocks for ttl_s in (None, 30.0)]
    assert hits == [0, 2]


def test_the_warm_up_is_served_and_not_counted():
    requests = (request([1, 2], 21), request([1, 2, 3], 31, 0, 50.0), request([1, 2, 3, 4], 41, 0, 100.0))
    result = run(config(hbm=5, cpu=50, warm_up=1), *requests)
    assert (result.num_requests, result.num_prompt_tokens, result.num_hit_tokens) == (2, 72, 20 + 30)
    assert result.bytes_moved["save"] == 2
    assert result.duration_s == pytest.approx(100 + 1.1 - 50)
    with pytest.raises(ConfigError, match="a warm-up of 3 leaves none of 3"):
        replay(trace(*requests), config(warm_up=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hbm_blocks": 0}, "hbm_blocks is 0; give 1"),
        ({"cpu_blocks": -1}, "cpu_blocks is -1"),
        ({"policy": "lfu"}, "unknown policy 'lfu'; known are auto, fifo, lru, return"),
        ({"ttl_s": 0.0}, "ttl_s is 0.0"),
    ],
)
def test_a_wrong_configuration_says_what_to_do(changes, message):
    with pytest.raises(ConfigError, match=message):
        ReplayConfig(**{"hbm_blocks": 1, "cpu_blocks": 0, "disk_blocks": 0, "block_bytes": 1, **changes})


def test_wrong_rates_and_capacities():
    with pytest.raises(ConfigError, match="max_batch is 0; give a number above 0"):
        ServiceModel(max_batch=0)
    with pytest.raises(ConfigError, match="read_bytes_per_s is nan"):
        ServiceModel(read_bytes_per_s=math.nan)


# -- models with checkpoints -----------------------------------------------------------------------------------------
def test_a_turn_begins_behind_a_checkpoint_only_and_what_that_takes_is_moved():
    """Three blocks and a state of two. The second prompt leaves the first behind two blocks, where nothing is kept yet;
    from then on something is.
    """
    asked = [request([1, 2, third], 31, 0, 100.0 * third) for third in (3, 4, 5)]
    asked += [request([20 + 5 * one + i for i in range(5)], 51, 0, 50.0 + 100.0 * one) for one in range(3, 6)]
    asked.sort(key=lambda one: one.arrival_s)
    plain = run(config(hbm=6, cpu=50), *asked)
    assert plain.hits_at_arrival == by_tier(cpu=40) and plain.bytes_moved["load"] == 4
    result = run(replace(config(hbm=6, cpu=50), state_blocks=2), *asked)
    assert result.hits_at_arrival == by_tier(cpu=20)
    assert result.bytes_moved["load"] == 2 + 2
    num_states = 3 + 3 + 1  # behind each prompt, and where they part
    assert result.bytes_moved["save"] == plain.bytes_moved["save"] + 2 * num_states


def test_a_window_is_kept_behind_its_last_blocks():
    """Six turns of one conversation: behind the last two, two blocks each have the KV of layers with a window."""
    turns = [request(list(range(1, 4 + turn)), None, 0, 100.0 * turn) for turn in range(6)]
    others = [request([100 + 9 * turn + i for i in range(9)], None, 0, 50.0 + 100.0 * turn) for turn in range(6)]
    asked = sorted([*turns, *others], key=lambda one: one.arrival_s)
    result = run(replace(config(hbm=10, cpu=200), state_blocks=1, window_blocks=2), *asked)
    assert result.hits_at_arrival == by_tier(cpu=sum(10 * (3 + turn) for turn in range(5)))
    assert result.bytes_moved["load"] == sum(3 + turn + 2 for turn in range(5))


# -- random traffic --------------------------------------------------------------------------------------------------
TIERS = [(60, 0, 0), (60, 40, 0), (60, 0, 40), (60, 3, 30), (60, 30, 150), (200, 100, 2000), (60, 150, 1)]


def random_config(rng, hbm, cpu, disk):
    rates = ServiceModel(
        prefill_tokens_per_s=rng.choice([200.0, 5000.0, math.inf]), decode_tokens_per_s=rng.choice([20.0, 500.0]),
        max_batch=rng.choice([1, 3, 16]), load_bytes_per_s=rng.choice([50.0, math.inf]),
        read_bytes_per_s=rng.choice([3.0, 200.0, math.inf]), write_bytes_per_s=rng.choice([1.0, 100.0, math.inf]),
    )  # fmt: skip
    policy = rng.choice(["fifo", "lru", "return", "auto"])
    ttl_s = rng.choice([None, 30.0])
    return ReplayConfig(hbm, cpu, disk, 1 << 22, policy, rng.random() < 0.6, rates, ttl_s, rng.choice([0, 50]))


def random_trace(seed):
    if seed % 2:
        return chained_trace(seed, num_requests=250)
    return generate(200, seed, 256, "people", Arrivals(rate_per_s=0.5, think_median_s=10.0, seed=seed))


FAILED_ONCE = [(103, (60, 0, 40)), (243, (60, 30, 150)), (149, (44, 52, 180))]  # did not end, or left reads over


PLAIN = [(*one, {}) for one in (*itertools.product(range(2), TIERS), *FAILED_ONCE)]
WITH_STATES, WITH_WINDOWS = (
    [(number, sizes, {"state_blocks": blocks, "window_blocks": windows}) for sizes in TIERS[number::2]]
    for number, blocks, windows in ((0, 3, 0), (1, 1, 4))
)


@pytest.mark.parametrize(("seed", "sizes", "checkpoints"), [*PLAIN, *WITH_STATES, *WITH_WINDOWS], ids=str)
def test_counts_balance_whatever_the_traffic(seed, sizes, checkpoints):
    rng = random.Random(f"{seed} {sizes}")
    made, settings = random_trace(seed), replace(random_config(rng, *sizes), **checkpoints)
    one = Replay(made, settings)
    result = one.run()
    one.check_integrity()
    assert result.num_requests + result.num_refused == len(made.requests) - settings.warm_up
    assert sum(result.hits_at_arrival.values()) == result.num_hit_tokens
    assert sum(result.hits_at_schedule.values()) == result.num_hit_tokens
    assert result.num_hit_tokens == result.num_hit_blocks * made.block_size < max(result.num_prompt_tokens, 1)
    assert result.num_hit_blocks <= result.num_blocks
    moved = {way: num_bytes // settings.block_bytes for way, num_bytes in result.bytes_moved.items()}
    assert checkpoints or moved["load"] * made.block_size <= result.num_hit_tokens
    if not settings.warm_up:
        assert moved["write"] + result.num_dropped_writes <= moved["save"] or not settings.disk_blocks
    assert replay(made, settings) == result  # the same again


@pytest.mark.parametrize("policy", ["lru", "return", "auto"])
def test_more_memory_hits_more(policy):
    made = chained_trace(3)
    rates = [
        replay(made, config(hbm, cpu, disk, policy, prefill_tokens_per_s=5000.0)).token_hit_rate
        for hbm, cpu, disk in ((40, 0, 0), (40, 100, 0), (40, 100, 5000))
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]
