"""vLLM's CPU build by itself and with what keeps its KV: LMCache, its own `fs` tier, our KVStoreTier. Medians.

Every arm is a server that gets the same token ids in turns with the others: prefill, decode, conversations, a restart
of everything. The tiers have the same memory and the same spec, ours, above them. Name few arms where memory is
scarce: each takes some 5 GiB.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from bench.common import Report, arguments, median, spread
from bench.peers.__main__ import MODELS, PARTS, add_arguments, check_names, model_folder, run_match, versions
from bench.peers.load import Answer, Goals, Match, Turns, start_all
from bench.peers.servers import Server, vllm

ARMS = ("vllm", "lmcache", "fs", "kvstore")
OURS = "kvstore"
SLOWEST = 1.0  # of the rates of `fs`, ours are at least so much
RETURNED_TO_LMCACHE, RETURNED_TO_WARM = 0.5, 1.3
HIDDEN = ("settings", "versions", "spread", "all", "cached")


def server(arm: str, parsed: argparse.Namespace, model: Path, folder: Path, logs: Path) -> Server:
    (folder / arm).mkdir()
    lmcache = "default" if arm == "lmcache" else None
    tier = arm if arm in ("fs", OURS) else None
    one = vllm(parsed.peer_python, model, folder / arm, parsed.threads, logs / f"{arm}.log", lmcache, tier)
    if parsed.eager:
        one.launches[-1].command.append("--enforce-eager")
    return one


def measure(parsed: argparse.Namespace, report: Report) -> None:
    arms = parsed.arms.split(",")
    found = versions(parsed.peer_python, "vllm", "lmcache" in arms)
    logs = parsed.logs or Path(mkdtemp(prefix="kvstore-hosts-"))
    logs.mkdir(parents=True, exist_ok=True)
    for name in parsed.models.split(","):
        with ExitStack() as stack:
            model = stack.enter_context(model_folder(name, parsed.keep_models))
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
            servers = {arm: server(arm, parsed, model, folder, logs) for arm in arms}
            settings = {arm: one.settings for arm, one in servers.items()}
            report.add(measure="versions", model=name, versions=str(found), settings=settings)
            for one in servers.values():
                stack.callback(one.stop)
            start_all(servers.values())
            sizes = replace(MODELS[name], num_talks=min(2, MODELS[name].num_talks)) if parsed.quick else MODELS[name]
            match = Match(dict(servers), name, sizes, Goals(), report, folder)
            if name == "tiny":
                match.settle_s = match.pause_s = 0.2
            if "speed" in parsed.parts.split(","):
                _speed(match, report, parsed.repeats)
            if "turns" in parsed.parts.split(","):
                _turns(match.answers(parsed.rounds, parsed.restarts), name, report)
            report.add(
                measure="on disk", model=name, unit="MiB",
                **{arm: disk_bytes(folder / arm) / (1 << 20) for arm in arms},
            )  # fmt: skip


def disk_bytes(folder: Path) -> int:
    """What its files take: a file may have holes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _speed(match: Match, report: Report, repeats: int) -> None:
    for name, times, num_tokens in match.seconds(repeats):
        rates = {arm: [num_tokens / one for one in seconds] for arm, seconds in times.items()}
        found = _row(report, name, match.model, "tok/s", rates)
        if "fs" in found:
            ratio = found[OURS] / found["fs"]
            _ratio(report, f"{name}: ours / fs", match.model, ratio, f">= {SLOWEST:g}", ratio >= SLOWEST)


def _turns(turns: Turns, model: str, report: Report) -> None:
    for number, answers in enumerate(turns.warm, 1):
        warm = _ttft(report, f"turn {number}{', warm' if number > 1 else ''}", model, answers)
    returned = _ttft(report, "last turn, after a restart", model, turns.returned)
    _ttft(report, "last turn, computed anew", model, turns.cold)
    for against, found, goal in (
        ("lmcache", returned.get("lmcache"), RETURNED_TO_LMCACHE),
        ("vllm warm", warm.get("vllm"), RETURNED_TO_WARM),
        ("fs", returned.get("fs"), None),
    ):
        if found:
            ratio = returned[OURS] / found
            wanted = None if goal is None else f"<= {goal:g}"
            _ratio(report, f"after a restart: ours / {against}", model, ratio, wanted, goal is None or ratio <= goal)


def _ttft(report: Report, measure: str, model: str, answers: dict[str, list[Answer]]) -> dict[str, float]:
    times = {arm: [1000 * one.ttft_s for one in some] for arm, some in answers.items()}
    cached = {arm: median([one.cached_tokens or 0 for one in some]) for arm, some in answers.items()}
    return _row(report, measure, model, "ms", times, cached=cached)


def _row(
    report: Report, measure: str, model: str, unit: str, values: dict[str, list[float]], **more: dict[str, float]
) -> dict[str, float]:
    found = {arm: median(some) for arm, some in values.items()}
    spreads = {arm: spread(some) for arm, some in values.items()}
    kept = {arm: [round(one, 2) for one in some] for arm, some in values.items()}
    report.add(measure=measure, model=model, unit=unit, **found, **more, spread=spreads, all=kept)
    return found


def _ratio(report: Report, measure: str, model: str, ratio: float, goal: str | None, reached: bool) -> None:
    said = "-" if goal is None else "yes" if reached else "no"
    report.add(measure=measure, model=model, ratio=ratio, goal=goal or "-", reached=said)


def main() -> int:
    parser = arguments("hosts", (__doc__ or "").split("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help=f"{OURS} and others of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing, and starts in half the time")
    add_arguments(parser)
    parsed = parser.parse_args()
    check_names(parser, parsed, arms=ARMS, models=tuple(MODELS), parts=PARTS)
    if OURS not in parsed.arms.split(","):
        parser.error(f"--arms {parsed.arms!r} is without {OURS}, which the others are compared with; add it")
    if parsed.quick:
        parsed.repeats, parsed.rounds = 2, 1
    return run_match(parser, parsed, measure, "vLLM and what keeps its KV; medians", HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
