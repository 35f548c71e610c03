"""Load or recompute: what is stored is loaded unless computing is clearly faster."""

import pytest

from kvstore.planner import Planner


def planner(bytes_per_s: float | None, tokens_per_s: float | None, always: bool = False) -> Planner:
    made = Planner(block_bytes=1600, block_size=16, always=always)  # 100 bytes a token
    if bytes_per_s is not None:
        made.loaded(int(bytes_per_s), 1.0)
    if tokens_per_s is not None:
        made.computed(int(tokens_per_s), 1.0)
    return made


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


def test_a_slow_sample_does_not_last_for_ever():
    slow = planner(1e5, 10_000)
    assert sum(slow.should_load(1000) for _ in range(64)) == 4, "some are loaded all the same, to measure again"
    for _ in range(20):
        slow.loaded(10_000_000, 1.0)
    assert slow.should_load(1000)
