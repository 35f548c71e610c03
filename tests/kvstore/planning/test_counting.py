"""What a replay counts: hits by tier, blocks moved; and nothing of the warm-up."""

from collections import Counter

import pytest

from kvstore.planning.replay import Counting
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.server_blocks import LINEAGE, Job
from kvstore.store.requests import Tracked
from tests.support.small_traces import SIZE, request


def job(number: int, arrival: list[str], schedule: list[str], num_hit: int, num_tokens: int) -> Job:
    stored = Tracked([], bytearray(), LINEAGE, "", str(number), (0, number), None)
    return Job(number, number, request([], num_tokens), stored, 0.0, arrival, schedule, num_hit=num_hit)


def counting(warm_up: int = 0, moved: Counter | None = None) -> Counting:
    """Of a server whose blocks have 7 bytes."""
    return Counting(ReplayConfig(1, 0, 0, 7, warm_up=warm_up), SIZE, lambda: Counter(moved))


def test_hits_are_counted_by_the_tiers_of_the_two_times():
    one = counting()
    one.begin(0.0)
    one.count_start(job(0, ["hbm", "disk", "disk"], ["hbm", "cpu", "disk"], 3, 45), 1, 0.5)
    result = one.result()
    assert result.hits_at_arrival == {"hbm": SIZE, "cpu": 0, "disk": 2 * SIZE}
    assert result.hits_at_schedule == {"hbm": SIZE, "cpu": SIZE, "disk": SIZE}
    assert (result.num_hit_tokens, result.num_hit_blocks, result.num_blocks, result.num_prompt_tokens) == (30, 3, 4, 45)


def test_what_came_after_the_arrival_is_counted_where_it_is_at_the_start():
    """One block was known; four are hits, two of them in HBM."""
    one = counting()
    one.begin(0.0)
    one.count_start(job(0, ["disk"], ["cpu", "cpu"], 4, 50), 2, 0.5)
    assert one.result().hits_at_arrival == {"hbm": SIZE, "cpu": 2 * SIZE, "disk": SIZE}
    assert one.result().hits_at_schedule == {"hbm": 0, "cpu": 4 * SIZE, "disk": 0}


def test_what_was_lost_since_the_arrival_is_no_hit():
    one = counting()
    one.begin(0.0)
    one.count_start(job(0, ["hbm", "cpu", "disk"], ["hbm", "cpu", "disk"], 1, 50), 1, 0.5)
    assert one.result().hits_at_arrival == one.result().hits_at_schedule == {"hbm": SIZE, "cpu": 0, "disk": 0}


def test_the_warm_up_leaves_no_count():
    moved = Counter(save=5, load=4, write=3, read=2, cpu=6, unsaved=7, unwritten=8)
    one = counting(2, moved)
    one.count_end(4.0)
    one.count_start(job(1, ["hbm"], ["hbm"], 1, 20), 1, 99.0)
    one.count_refused(1)
    one.begin(10.0)
    moved += Counter(save=10, load=20, write=30, read=40, hbm=1, cpu=2, disk=3, unsaved=4, unwritten=5)
    one.count_refused(2)
    one.count_start(job(2, [], [], 0, 20), 0, 2.0)
    one.count_end(30.0)
    result = one.result()
    assert (result.num_requests, result.num_refused, result.num_prompt_tokens, result.num_hit_tokens) == (1, 1, 20, 0)
    assert result.bytes_moved == {"save": 70, "load": 140, "write": 210, "read": 280}
    assert result.num_evicted == {"hbm": 1, "cpu": 2, "disk": 3}
    assert (result.num_dropped_saves, result.num_dropped_writes) == (4, 5)
    assert (result.duration_s, result.ttft_mean_s) == (20.0, 2.0)


@pytest.mark.parametrize(("num_requests", "p90_s"), [(1, 1.0), (2, 2.0), (9, 9.0), (10, 9.0), (11, 10.0), (20, 18.0)])
def test_nine_of_ten_waited_no_longer(num_requests, p90_s):
    one = counting()
    one.begin(0.0)
    for number in reversed(range(num_requests)):
        one.count_start(job(number, [], [], 0, 20), 0, number + 1.0)
    assert one.result().ttft_p90_s == p90_s
    assert one.result().ttft_mean_s == (num_requests + 1) / 2


def test_nothing_counted_is_no_error_but_no_beginning_is():
    one = counting()
    with pytest.raises(AssertionError, match="never ended"):
        one.result()
    one.begin(5.0)
    result = one.result()
    assert (result.ttft_mean_s, result.ttft_p90_s, result.duration_s) == (0.0, 0.0, 0.0)
