"""A made-up service of a million daily users on fleets of 1 to 1,000 servers: ways to route turns, and a shared tier.

Each server has a thousand users. Conversations have 8 turns on average, a minute apart, but one turn in seven comes
after 10 minutes to 8 hours. All share a system prompt. A few servers of each fleet are simulated.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import Report, Row, arguments, run
from kvstore.planning.fleet import ROUTINGS, FleetConfig, PaperFleet
from kvstore.planning.replay_config import ReplayConfig
from kvstore.planning.sizing import nominal_arrivals
from kvstore.planning.traces import CommonPrefix, Trace, TraceTurn, TurnsToRequests

USERS, TURNS_A_DAY, TURNS, BACK_SHARE = 1000, 8, 8, 1 / 7  # of a server; of a user; of a conversation
SYSTEM_TOKENS, MESSAGE_TOKENS, ANSWER_TOKENS = 1000, 60, 250  # medians of messages and answers
BLOCK_SIZE, TOKEN_BYTES, CONTEXT = 128, 131_072, 32_768
HBM, CPU, DISK, REMOTE = 8 << 30, 16 << 30, 64 << 30, 64 << 40
NETWORK, REMOTE_BANDWIDTH = 12e9, 50e9
SIZES, SAMPLE, RESTARTED = (1, 10, 100, 1000), 5, 100
BANDWIDTHS = (1e9, 2e9, 2.5e9, 3e9, 4e9, 6e9, 12e9)  # of the shared tier, in all
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)  # its size, as a part of what all servers' own tiers hold


def service(hours: float, num_servers: int, seed: int = 0) -> Trace:
    """The requests of the users of so many servers, in so many hours of the day."""
    rng, made = random.Random(seed), TurnsToRequests(BLOCK_SIZE, CONTEXT)
    for _ in range(round(USERS * num_servers * TURNS_A_DAY / TURNS * hours / 24)):
        turns = [_turn(rng) for _ in range(1 + int(rng.expovariate(1 / (TURNS - 0.5))))]
        made.add(rng.uniform(0, hours * 3600), turns, prefix=CommonPrefix(1, SYSTEM_TOKENS))
    whole = Trace("a made-up service", BLOCK_SIZE, made.requests())
    num_in_time = bisect_left(nominal_arrivals(whole), hours * 3600)  # later turns belong to another day
    return replace(whole, requests=whole.requests[:num_in_time])


def _turn(rng: random.Random) -> TraceTurn:
    gap_s = rng.lognormvariate(math.log(60), 1)
    if rng.random() < BACK_SHARE:
        gap_s = math.exp(rng.uniform(math.log(600), math.log(8 * 3600)))
    message, answer = (int(rng.lognormvariate(math.log(median), 0.8)) for median in (MESSAGE_TOKENS, ANSWER_TOKENS))
    return TraceTurn(message, answer, gap_s)


def measure(options: argparse.Namespace, report: Report) -> None:
    hours = min(options.hours, 0.5) if options.quick else options.hours
    for part in options.part or PARTS:
        PARTS[part](hours, options.quick, report)
    if options.plot is not None:
        draw([row for row in report.results if row["part"] == "sizes"], options.plot)


def _replay(report: Report, part: str, trace: Trace, num: int, routing: str, remote: int, **more: Any) -> None:
    """remote: bytes of the shared tier; 0: there is none."""
    block_bytes = BLOCK_SIZE * TOKEN_BYTES
    server = ReplayConfig(HBM // block_bytes, CPU // block_bytes, DISK // block_bytes, block_bytes)
    found = {"network_bytes_per_s": NETWORK, "remote_bytes_per_s": REMOTE_BANDWIDTH, **more}
    fleet = PaperFleet(trace, FleetConfig(num, routing, server, remote // block_bytes, **found))
    report.add(
        part=part, remote=remote > 0, remote_bytes=remote, gb_per_s=found["remote_bytes_per_s"] / 1e9, **fleet.run()
    )


def by_size(hours: float, is_quick: bool, report: Report) -> None:
    trace = service(hours, SAMPLE)
    for remote in (0, REMOTE):
        for num in (1, 10) if is_quick else SIZES:
            for routing in ROUTINGS:
                _replay(report, "sizes", trace, num, routing, remote, sample=SAMPLE)


def after_a_restart(hours: float, is_quick: bool, report: Report) -> None:
    """A tenth of the servers restarts half-way, with empty disks."""
    trace = service(hours / 2, 10)
    for remote in (0, REMOTE):
        for routing in ROUTINGS:
            _replay(
                report,
                "restart",
                trace,
                10 if is_quick else RESTARTED,
                routing,
                remote,
                restarts=True,
                keeps_disk=False,
            )


def by_bandwidth(hours: float, is_quick: bool, report: Report) -> None:
    """Random routing over ten servers, all simulated: first the shared tier gets slower, then smaller."""
    trace = service(hours / 2, 10)
    for bandwidth in BANDWIDTHS[::3] if is_quick else BANDWIDTHS:
        _replay(report, "bandwidth", trace, 10, "random", REMOTE, remote_bytes_per_s=bandwidth)
    for share in SHARES[::3] if is_quick else SHARES:
        _replay(report, "size", trace, 10, "random", int(share * 10 * (HBM + CPU + DISK)))


PARTS = {"sizes": by_size, "restart": after_a_restart, "bandwidth": by_bandwidth}


def shown(row: Row) -> Row:
    tier = f"{row['remote_bytes'] / (1 << 40):.3g} TiB, {row['gb_per_s']:.3g} GB/s" if row["remote"] else "no"
    found = {
        "part": row["part"], "servers": row["servers"], "routing": row["routing"], "shared tier": tier,
        "hits": f"{row['hit_rate']:.1%}",
        **{tier: f"{share:.1%}" for tier, share in row["hit_rate_by_tier"].items()},
        "TTFT ms": round(1000 * row["ttft_mean_s"]), "P90": round(1000 * row["ttft_p90_s"]),
        "read GB/s": row["remote_read_bytes_per_s"] / 1e9, "written GB/s": row["remote_write_bytes_per_s"] / 1e9,
        "load": f"{row['remote_load']:.0%}",
    }  # fmt: skip
    for name, part in row.get("after_restart", {}).items():
        found[name] = f"{part['hit_rate']:.1%}, {1000 * part['ttft_mean_s']:,.0f} ms"
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Draw hit rate and mean TTFT against the size of the fleet. The same rows give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kvstore", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for routing, colour in zip(ROUTINGS, ("#2f6fde", "#d9822b", "#3a8f4d"), strict=True):
            for has_remote, style in ((False, ":"), (True, "-")):
                own = [
                    row for row in rows if (row["routing"], row["remote"]) == (routing, has_remote)
                ]  # fmt: skip
                label = f"{routing}, {'with' if has_remote else 'without'} a shared tier"
                for axes, name, factor in ((left, "hit_rate", 100), (right, "ttft_mean_s", 1000)):
                    values = [row[name] * factor for row in own]
                    axes.plot([row["servers"] for row in own], values, style, color=colour, marker="o", label=label)
        left.set(ylabel="prompt tokens not computed (%)", ylim=(0, 100))
        right.set(ylabel="mean TTFT (ms)", ylim=(0, None))
        for axes in (left, right):
            axes.set(xscale="log", xlabel="servers")
            axes.grid(alpha=0.3)
        left.legend(fontsize=7, loc="lower left")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Title": "Fleets"})


def main() -> int:
    parser = arguments("fleet", "A made-up service of a million daily users on fleets of servers", uses_torch=False)
    parser.add_argument("--hours", type=float, default=3.0, help="of the service's day (default: 3)")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this, may be given again")
    parser.add_argument("--plot", type=Path, help="also draw the results into FILE, an .svg")
    return run(measure, parser.parse_args(), "A service on fleets of servers", shown, keep_json=True)


if __name__ == "__main__":
    sys.exit(main())
