"""A fleet on paper, against an oracle that knows which server had which turn, and with differences that must show."""

import math
import random
from dataclasses import replace

import pytest

from kvstore.errors import ConfigError
from kvstore.planning.fleet import FleetConfig, PaperFleet, sessions_of
from kvstore.planning.replay_config import ReplayConfig, ServiceModel
from kvstore.planning.sizing import nominal_arrivals
from kvstore.planning.traces import ANSWER_TOKENS_PER_S, CommonPrefix, Trace, TraceTurn, TurnsToRequests

SIZE = 16
ROOM = ReplayConfig(4000, 4000, 0, 1 << 20, policy="lru", service=ServiceModel(prefill_tokens_per_s=2000.0))
NO_TIME = {"network_bytes_per_s": math.inf, "remote_bytes_per_s": math.inf}


def talks(count: int, num_turns: int = 5, prefix_tokens: int = 0, gap_s: float = 100.0, every_s: float = 7.0) -> Trace:
    """Conversations, whose turns are far apart: nobody ever waits for another."""
    rng, made = random.Random(0), TurnsToRequests(SIZE)
    for number in range(count):
        sizes = [(rng.randrange(30, 90), rng.randrange(30, 90), gap_s + rng.random()) for _ in range(num_turns)]
        turns = [TraceTurn(*size) for size in sizes]
        made.add(number * every_s + rng.random(), turns, prefix=CommonPrefix(1, prefix_tokens))
    return Trace("talks", SIZE, made.requests())


def run(trace: Trace, num: int, routing: str, server: ReplayConfig = ROOM, **options):
    fleet = PaperFleet(trace, FleetConfig(num, routing, server, **options))
    found = fleet.run()
    for one in fleet.servers:
        one.check_integrity()
    return found


def oracle(trace: Trace, homes: list[int], shares: bool) -> float:
    """The hit rate where everything stays for ever. homes: the server of each request, in order of arrival; shares:
    what one has computed all have.
    """
    order = sorted(range(len(trace.requests)), key=nominal_arrivals(trace).__getitem__)
    had: dict[int, set[int]] = {}
    num_hit = 0
    for place, index in enumerate(order):
        request = trace.requests[index]
        mine = had.setdefault(0 if shares else homes[place], set())
        for name in request.chain[: (request.num_tokens - 1) // SIZE]:
            if name not in mine:
                break
            num_hit += SIZE
        mine.update(request.chain)
    return num_hit / sum(request.num_tokens for request in trace.requests)


def homes_of(trace: Trace, routing: str, num: int) -> list[int]:
    order = sorted(range(len(trace.requests)), key=nominal_arrivals(trace).__getitem__)
    if routing == "random":
        rng = random.Random(0)
        return [rng.randrange(num) for _ in order]
    sessions = sessions_of(trace)
    return [random.Random(sessions[index]).randrange(num) for index in order]


@pytest.mark.parametrize("routing", ["sticky", "random"])
@pytest.mark.parametrize("num", [1, 10])
def test_with_room_for_all_the_hits_are_what_the_oracle_counts(routing, num):
    trace = talks(30, prefix_tokens=64)
    homes = homes_of(trace, routing, num)
    nominal = replace(
        ROOM, service=ServiceModel(prefill_tokens_per_s=math.inf, decode_tokens_per_s=ANSWER_TOKENS_PER_S)
    )
    own = run(trace, num, routing, nominal, sample=num)
    assert own["hit_rate"] == pytest.approx(oracle(trace, homes, shares=False))
    shared = run(trace, num, routing, nominal, sample=num, remote_blocks=10_000, **NO_TIME)
    assert shared["hit_rate"] == pytest.approx(oracle(trace, homes, shares=True))
    assert shared["hit_rate_by_tier"]["remote"] == pytest.approx(shared["hit_rate"] - own["hit_rate"], abs=1e-9)


def test_sticky_beats_random_and_a_shared_tier_closes_the_gap():
    trace = talks(40)
    alone = {routing: run(trace, 10, routing) for routing in ("sticky", "random", "aware")}
    assert alone["sticky"]["hit_rate"] > alone["random"]["hit_rate"] + 0.3
    assert alone["sticky"]["ttft_mean_s"] < alone["random"]["ttft_mean_s"]
    assert alone["aware"]["hit_rate"] > alone["sticky"]["hit_rate"] - 0.02
    together = run(trace, 10, "random", remote_blocks=10_000, **NO_TIME)
    assert together["hit_rate"] == pytest.approx(alone["sticky"]["hit_rate"], abs=0.01)
    assert together["remote_read_bytes_per_s"] > 0 and together["remote_write_bytes_per_s"] > 0


def test_an_aware_router_goes_elsewhere_when_a_server_is_behind():
    """All talks at once: those that are sticky to one server wait for each other, an aware router spreads them."""
    trace = talks(40, num_turns=3, gap_s=0.0)
    trace = replace(trace, requests=[replace(one, arrival_s=0.0) for one in trace.requests])
    slow = replace(ROOM, service=ServiceModel(prefill_tokens_per_s=200.0))
    found = {routing: run(trace, 10, routing, slow)["ttft_mean_s"] for routing in ("sticky", "aware")}
    assert found["aware"] < found["sticky"]


def test_a_network_slower_than_computing_is_not_used():
    trace = talks(40)
    without = run(trace, 10, "random")
    slow = run(trace, 10, "random", remote_blocks=10_000, network_bytes_per_s=1e6, remote_bytes_per_s=1e9)
    assert slow["hit_rate"] == pytest.approx(without["hit_rate"], abs=0.01)
    assert slow["ttft_mean_s"] <= 1.1 * without["ttft_mean_s"]


def test_where_the_shared_tiers_bandwidth_decides_its_size_does_not():
    trace = talks(100, gap_s=5.0, every_s=0.2)

    def hits(size: int, rate: float) -> float:
        found = run(trace, 10, "random", remote_blocks=size, network_bytes_per_s=1e12, remote_bytes_per_s=rate)
        return found["hit_rate"]

    narrow, wide = 1.5e8, 1e10  # a block alone takes 7 ms of the narrow one, and 8 to compute
    assert hits(20_000, narrow) == hits(10_000, narrow) < hits(10_000, wide) - 0.1
    assert hits(1000, wide) < hits(10_000, wide) - 0.1  # and here it is the size


def test_a_part_of_a_fleet_stands_for_the_whole():
    """The same traffic is once that of ten servers and once that of five, which stand for ten with twice as much."""
    trace = talks(100, num_turns=4, prefix_tokens=64, gap_s=40.0)
    for options in ({}, {"remote_blocks": 20_000, **NO_TIME}):
        whole = run(trace, 10, "random", sample=10, **options)
        part = run(trace, 10, "random", sample=5, **options)
        assert (whole["simulated_servers"], part["simulated_servers"]) == (10, 5)
        for tier in ("hbm", "remote"):
            assert part["hit_rate_by_tier"][tier] == pytest.approx(whole["hit_rate_by_tier"][tier], abs=0.05)
        assert part["remote_write_bytes_per_s"] == pytest.approx(2 * whole["remote_write_bytes_per_s"], rel=0.1)


def test_in_a_large_fleet_random_turns_find_what_all_have_in_common_and_no_more():
    trace = talks(50, prefix_tokens=64)
    found = run(trace, 1000, "random")
    mean_tokens = sum(one.num_tokens for one in trace.requests) / len(trace.requests)
    assert found["hit_rate"] == pytest.approx(64 / mean_tokens, abs=0.03)
    assert run(trace, 1000, "sticky")["hit_rate"] > found["hit_rate"] + 0.3


def test_a_restart_costs_what_was_in_memory_unless_another_tier_has_it():
    trace, options = talks(40, num_turns=8, gap_s=60.0), {"restarts": True, "remote_blocks": 0}
    lost = run(trace, 10, "sticky", **options)["after_restart"]
    assert lost["restarted"]["requests"] and lost["restarted"]["hit_rate"] < lost["others"]["hit_rate"] - 0.1
    shared = run(trace, 10, "sticky", **{**options, "remote_blocks": 20_000}, **NO_TIME)["after_restart"]
    assert shared["restarted"]["hit_rate"] == pytest.approx(shared["others"]["hit_rate"], abs=0.05)
    with_disk = replace(ROOM, disk_blocks=8000)
    kept = run(trace, 10, "sticky", with_disk, **options)["after_restart"]
    assert kept["restarted"]["hit_rate"] > lost["restarted"]["hit_rate"] + 0.1
    gone = run(trace, 10, "sticky", with_disk, **options, keeps_disk=False)["after_restart"]
    assert gone["restarted"]["hit_rate"] < kept["restarted"]["hit_rate"] - 0.1


def test_what_a_fleet_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="unknown routing"):
        FleetConfig(1, "round", ROOM)
    with pytest.raises(ConfigError, match="0 servers"):
        FleetConfig(0, "sticky", ROOM)
    with pytest.raises(ConfigError, match="--cpu"):
        FleetConfig(2, "sticky", replace(ROOM, cpu_blocks=0), remote_blocks=1)
