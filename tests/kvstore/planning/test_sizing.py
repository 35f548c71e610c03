"""What a trace asks for, the sizes of a sweep, and the knee of curves whose knee is known."""

import pytest

from bench.traffic import generate
from kvstore.errors import ConfigError
from kvstore.planning.replay_config import ServiceModel
from kvstore.planning.sizing import (
    CPU_SHARE,
    Geometry,
    Point,
    Sizes,
    batch_bytes,
    best_so_far,
    extent,
    knee,
    last_requests,
    load_of,
    nominal_arrivals,
    sweep,
    without_reuse,
)
from kvstore.planning.traces import ANSWER_TOKENS_PER_S, Trace, TraceRequest, TraceTurn, TurnsToRequests

GIB = 1 << 30


def points(*rates, capacities=None):
    """At capacities of 1, 2, 4, 8, ..."""
    capacities = capacities or [1 << i for i in range(len(rates))]
    return [Point(capacity, rate) for capacity, rate in zip(capacities, rates, strict=True)]


def chat(*turns, start_s=0.0, block_size=10):
    collected = TurnsToRequests(block_size)
    collected.add(start_s, [TraceTurn(*turn) for turn in turns])
    return Trace("chat", block_size, collected.requests())


# -- the knee --------------------------------------------------------------------------------------------------------
def test_the_knee_of_the_curve_in_the_paper():
    """Figure 2 there: f(x) = 5 - 1 / (x + 0.1) at ten values from 0 to 1, with its knee at 0.22."""
    curve = [Point(i, 5 - 1 / (i / 9 + 0.1)) for i in range(10)]
    assert knee(curve) == curve[2]


@pytest.mark.parametrize("bend", [2, 3, 5, 8])
def test_two_straight_lines_bend_where_they_meet(bend):
    curve = [Point(x, min(x, bend) / bend * 0.6 + max(x - bend, 0) * 0.01) for x in range(11)]
    assert knee(curve) == curve[bend]


def test_the_knee_of_a_saturating_curve():
    assert knee(points(0.1, 0.35, 0.6, 0.72, 0.74, 0.75, 0.75)) == Point(8, 0.72)


@pytest.mark.parametrize(
    "curve",
    [
        [],
        points(0.5, 0.501, 0.502, 0.504),  # nothing that anybody would notice
        points(0.1, 0.2, 0.3, 0.4, 0.5, capacities=[1, 2, 3, 4, 5]),
        points(0.1, 0.11, 0.14, 0.25, 0.7, capacities=[1, 2, 3, 4, 5]),  # bends upwards: more and more
        points(0.9, 0.5, 0.3),  # more capacity never takes away what less gave
    ],
)
def test_no_knee(curve):
    assert knee(curve) is None


def test_the_best_so_far_never_falls():
    found = best_so_far(points(0.3, 0.2, 0.5, 0.4, 0.1, capacities=[4, 2, 4, 8, 1]))
    assert found == points(0.1, 0.2, 0.5, 0.5, capacities=[1, 2, 4, 8])


# -- sizes -----------------------------------------------------------------------------------------------------------
def test_a_sweep_goes_from_hbm_alone_to_all_of_the_working_set():
    found = sweep(100 * GIB, 3 * GIB)
    assert [one.disk for one in found] == [0, 4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB, 64 * GIB, 128 * GIB]
    assert {one.hbm for one in found} == {3 * GIB}
    assert all(one.cpu == one.disk // CPU_SHARE for one in found)
    assert [one.total for one in found] == sorted({one.total for one in found})


def test_a_sweep_leaves_out_disks_smaller_than_hbm():
    assert [one.disk for one in sweep(64 * GIB, 20 * GIB)] == [0, 32 * GIB, 64 * GIB]
    assert [one.disk for one in sweep(64 * GIB, 100 * GIB)] == [0, 64 * GIB]
    assert [one.disk for one in sweep(0, 1)] == [0, 2]


def test_sizes_become_blocks():
    geometry = Geometry(block_bytes=100, disk_block_bytes=50, hbm_block_bytes=100)
    assert geometry.blocks(Sizes(1000, 250, 1025)) == (10, 2, 20)
    with pytest.raises(ConfigError, match="HBM of 99 bytes holds less than one block of 100 bytes"):
        geometry.blocks(Sizes(99, 0, 0))


def test_hbm_holds_a_batch_and_the_largest_request():
    trace = chat((95, 5), (95, 5), (795, 5))  # 100, 200 and 1,000 tokens
    demand = extent(trace)
    assert demand.largest_blocks == 100
    assert batch_bytes(demand, 10, 7, max_batch=1) == 7 * 200  # two of the largest
    assert batch_bytes(demand, 10, 7, max_batch=64) == 7 * 44 * 64  # 433 tokens on average


# -- what a trace asks for -------------------------------------------------------------------------------------------
def test_the_extent_of_a_conversation():
    demand = extent(chat((20, 30), (10, 40, 60.0)))
    assert (demand.num_requests, demand.num_conversations) == (2, 1)
    assert (demand.num_prompt_tokens, demand.num_output_tokens) == (20 + 60, 70)
    assert demand.working_set_blocks == 10 and demand.largest_blocks == 10
    assert demand.duration_s == 60 + 30 / ANSWER_TOKENS_PER_S
    assert demand.mean_tokens == 75


def test_stateless_conversations_are_recognised_and_shared_blocks_counted_once():
    requests = [
        TraceRequest([0, 1, 2], 35, 5, 0.0, partial=3),
        TraceRequest([0, 4], 20, 5, 1.0),  # shares its head only
        TraceRequest([0, 1, 2, 5, 6], 55, 5, 2.0),  # goes on from the first one
    ]
    demand = extent(Trace("three", 10, requests))
    assert (demand.num_conversations, demand.working_set_blocks, demand.duration_s) == (2, 6, 2.0)


def test_the_last_requests_keep_their_order_and_their_times():
    trace = chat((20, 30), (10, 40, 60.0), (10, 5, 100.0))
    times = nominal_arrivals(trace)
    last = last_requests(trace, 2)
    assert [request.after for request in last.requests] == [-1, 0]
    assert list(nominal_arrivals(last)) == list(times[1:])
    assert last_requests(trace, 3).requests == trace.requests == last_requests(trace, 99).requests


def test_without_reuse_no_block_comes_twice():
    trace = generate(200, seed=1)
    bare = without_reuse(trace)
    names = [name for request in bare.requests for name in request.chain]
    assert len(names) == len(set(names)) == sum(len(request.chain) for request in trace.requests)
    assert [r.num_tokens for r in bare.requests] == [r.num_tokens for r in trace.requests]
    assert [r.after for r in bare.requests] == [r.after for r in trace.requests]


def test_the_load_is_that_of_what_is_scarcer():
    demand = extent(Trace("two", 10, [TraceRequest([], 1000, 100, time_s) for time_s in (0.0, 10.0)]))
    slow = ServiceModel(prefill_tokens_per_s=100, decode_tokens_per_s=1000, max_batch=1)
    assert load_of(demand, 0.0, slow) == 2.0 and load_of(demand, 0.75, slow) == 0.5
    slow = ServiceModel(prefill_tokens_per_s=1e9, decode_tokens_per_s=10, max_batch=2)
    assert load_of(demand, 0.0, slow) == 1.0


def test_requests_that_came_at_once_say_nothing_of_a_rate():
    demand = extent(Trace("one", 10, [TraceRequest([], 1000, 100, 5.0)]))
    assert load_of(demand, 0.0, ServiceModel()) == 0.0
