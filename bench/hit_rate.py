"""Hit rates of a trace: replays it with our own policies and classes beside exact references; a table, JSON and a plot.

Without --trace the traffic is made up. With --capacity-blocks there is one tier and no time. With --hbm, --cpu and
--disk there are tiers, a queue and a service model; then `fifo` and `lru` never look ahead, and `look-ahead` is an lru
that does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common import EXIT_INTERRUPTED, EXIT_USAGE, Report, Row, run, say
from bench.hit_rate_job import Job, parse, prepare
from bench.references import REFERENCES, Hits, References
from kvstore.errors import KVStoreError
from kvstore.planning.traces import Trace

if TYPE_CHECKING:
    from kvstore.planning.replay_config import ReplayConfig, ReplayResult

DEFAULT_SHARES = (0.03, 0.1, 0.3)  # of the trace's distinct blocks, if no capacity is given
WITHOUT_LOOK_AHEAD = ("fifo", "lru")  # the policies that others are compared with
PROGRESS_EVERY_S = 5.0
TIERS = ("hbm", "cpu", "disk")


# -- the replays -----------------------------------------------------------------------------------------------------
def body(job: Job, parsed: argparse.Namespace, report: Report) -> None:
    try:
        if job.configs:
            measure_tiers(job, report)
        else:
            measure_one_tier(job, report, parsed.warm_up)
    finally:  # also after Ctrl-C
        if job.plot is not None and report.results:
            draw(job.trace, report.results, job.plot)


def measure_one_tier(job: Job, report: Report, warm_up: int) -> None:
    from bench.one_tier import replay_one_tier

    references, num_requests = References(job.trace, warm_up), len(job.trace.requests)
    with progress("ideal", num_requests) as told:
        ideal, num_distinct = references.ideal(told)
    for capacity in job.capacities or sorted({max(1, round(num_distinct * share)) for share in DEFAULT_SHARES}):
        for policy in job.policies:
            start_s = time.perf_counter()
            with progress(f"{policy}, {capacity:,} blocks", num_requests) as told:
                if policy in REFERENCES:
                    row = reference_row(references.replay(policy, capacity, told))
                else:
                    row = reference_row(replay_one_tier(job.trace, capacity, policy, told))
            report.add(policy=policy, capacity_blocks=capacity, **row, elapsed_s=time.perf_counter() - start_s)
    # A cache that has room for all blocks of the trace forgets nothing.
    report.add(policy="ideal", capacity_blocks=num_distinct, **reference_row(ideal))


def reference_row(hits: Hits) -> Row:
    rates = {"token_hit_rate": hits.token_hit_rate, "block_hit_rate": hits.block_hit_rate}
    by_tier = {
        "hbm": hits.num_hit_tokens,
        "cpu": 0,
        "disk": 0,
    }  # without time, what is there at arrival is there when it is scheduled
    return rates | asdict(hits) | {"hits_at_arrival": by_tier, "hits_at_schedule": by_tier}


def measure_tiers(job: Job, report: Report) -> None:
    from bench.oracle import Oracle
    from kvstore.planning.replay import replay

    for config in job.configs:
        for policy in job.policies:
            start_s = time.perf_counter()
            with progress(f"{policy}, {described(config)}", len(job.trace.requests)) as told:
                steering = partial(Oracle, job.trace) if policy == "belady" else None
                result = replay(job.trace, configured(config, policy), told, steering)
            sizes = {f"{tier}_blocks": getattr(config, f"{tier}_blocks") for tier in TIERS}
            report.add(policy=policy, **sizes, **result_row(result), elapsed_s=time.perf_counter() - start_s)


def configured(config: ReplayConfig, policy: str) -> ReplayConfig:
    if policy == "look-ahead":
        return replace(config, policy="lru", look_ahead=True)
    if policy == "belady":
        return config  # its order is not one of the store's
    look_ahead = config.look_ahead and policy not in WITHOUT_LOOK_AHEAD
    return replace(config, policy=policy, look_ahead=look_ahead)


def described(config: ReplayConfig) -> str:
    return ", ".join(f"{tier} {getattr(config, f'{tier}_blocks'):,}" for tier in TIERS)


def result_row(result: ReplayResult) -> Row:
    return {"token_hit_rate": result.token_hit_rate, "block_hit_rate": result.block_hit_rate} | asdict(result)


# -- what people see -------------------------------------------------------------------------------------------------
@contextmanager
def progress(label: str, num_requests: int) -> Iterator[Callable[[int], None]]:
    """Yields a function of the number of finished requests: a bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield partial(_line, label, num_requests, [time.perf_counter()])
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=num_requests)
        yield lambda done: bar.update(task, completed=done)


def _line(label: str, num_requests: int, last_s: list[float], done: int) -> None:
    now_s = time.perf_counter()
    if now_s - last_s[0] >= PROGRESS_EVERY_S:
        last_s[0] = now_s
        say(f"  {label}: {done:,} of {num_requests:,} requests")


def display(row: Row) -> Row:
    """A result as a row of the table. The JSON file has all of it. Percentages are shares of hit tokens, by tier."""
    tokens, blocks = f"{row['token_hit_rate']:.4f}", f"{row['block_hit_rate']:.4f}"
    if "capacity_blocks" in row:
        shown = {name: row[name] for name in ("policy", "capacity_blocks")}
        return shown | {"tokens hit": tokens, "blocks hit": blocks, "seconds": row.get("elapsed_s")}
    moved = row["bytes_moved"]
    return {
        "policy": row["policy"],
        "blocks hbm/cpu/disk": "/".join(_short(row[f"{tier}_blocks"]) for tier in TIERS),
        "tokens hit": tokens,
        "% at arrival": _shares(row["hits_at_arrival"]),
        "% at schedule": _shares(row["hits_at_schedule"]),
        f"bytes {'/'.join(moved)}": "/".join(map(_short, moved.values())),
        "TTFT (s)": row["ttft_mean_s"],
        "P90 (s)": row["ttft_p90_s"],
    }


def _short(number: float) -> str:
    """Three digits and a power of 1,000: 95.4k."""
    for power in " kMG":
        if number < 999.5:
            return f"{number:.3g}{power}".strip()
        number /= 1000
    return f"{number:,.3g}T"


def _shares(tokens: dict[str, int]) -> str:
    total = max(sum(tokens.values()), 1)
    return "/".join(f"{100 * num / total:.1f}" for num in tokens.values())


def draw(trace: Trace, results: list[Row], path: Path) -> None:
    """Draw hit rate against capacity, a line for each policy. With tiers, the capacity is the sum of all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row["policy"] for row in results):
        points = sorted((_total_blocks(row), row["token_hit_rate"]) for row in results if row["policy"] == policy)
        if policy == "ideal":
            axes.axhline(points[0][1], linestyle="--", color="gray", label="ideal")
        else:
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    axes.set(xscale="log", xlabel=f"capacity, blocks of {trace.block_size} tokens", ylabel="share of tokens hit")
    axes.set(title=trace.name, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _total_blocks(row: Row) -> int:
    return row["capacity_blocks"] if "capacity_blocks" in row else sum(row[f"{tier}_blocks"] for tier in TIERS)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parsed = parse(__doc__.split("\n")[0], argv)
        job = prepare(parsed)
        trace = job.trace
        title = f"{trace.name}: {len(trace.requests):,} requests, blocks of {trace.block_size} tokens"
        return run(partial(body, job), parsed, title, display)
    except KVStoreError as error:
        say("python -m bench.hit_rate: " + " ".join(str(error).split()))
        return EXIT_USAGE
    except KeyboardInterrupt:  # while the trace was read
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
