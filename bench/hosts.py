"""vLLM's CPU build alone and with several stores for its KV: LMCache, its own `fs` tier, our KVStoreTier. Medians.

Every arm is a server. All get the same token ids in turns: prefill, decode, conversations, a restart of everything,
with the files in the page cache (`turns`) or not (`cold`). Above the tiers are the same memory and the same spec, ours.
Name few arms if memory is scarce: each takes some 5 GiB. `full` and `traffic` are parts of `bench.host_traffic`, with
arms of their own and the tiny model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from bench import host_traffic
from bench.common import LlamaShape, Report, arguments, median, spread
from bench.peers.__main__ import MODELS, add_arguments, check_names, model_folder, run_match, versions
from bench.peers.load import Answer, Goals, Match, Turns, start_all
from bench.peers.servers import BLOCK_TOKENS, Server, Tiers, vllm

ARMS = ("vllm", "lmcache", "fs", "kvstore")
OURS = "kvstore"
PARTS = ("speed", "turns", "cold", "full", "traffic")
ARMS_IN_TURNS = frozenset(PARTS[:3])
KINDS = ("people", "mixed")
PAUSE_S = 2.0  # vLLM's threads spin for a second after their last step, and it steps until a tier has stored everything
SLOWEST = 1.0  # the least that our rates may be, relative to those of `fs`
RETURNED_TO_LMCACHE, RETURNED_TO_WARM = 0.5, 1.3
HIDDEN = ("settings", "versions", "spread", "all", "cached")


def server(arm: str, parsed: argparse.Namespace, model: Path, folder: Path, logs: Path) -> Server:
    (folder / arm).mkdir()
    lmcache = "default" if arm == "lmcache" else None
    tiers = Tiers(arm) if arm in ("fs", OURS) else None
    one = vllm(parsed.peer_python, model, folder / arm, parsed.threads, logs / f"{arm}.log", lmcache, tiers)
    if parsed.eager:
        one.launches[-1].command.append("--enforce-eager")
    return one


def measure(parsed: argparse.Namespace, report: Report) -> None:
    parts = set(parsed.parts.split(","))
    found = versions(parsed.peer_python, "vllm", "lmcache" in parsed.arms.split(","))
    logs = parsed.logs or Path(mkdtemp(prefix="kvstore-hosts-"))
    logs.mkdir(parents=True, exist_ok=True)
    if parts & ARMS_IN_TURNS:
        for name in parsed.models.split(","):
            _in_turns(parsed, parts, name, str(found), logs, report)
    if parts - ARMS_IN_TURNS:
        with model_folder("tiny", parsed.keep_models) as model:
            _shares(parsed, parts, model, logs, report)


def _in_turns(parsed: argparse.Namespace, parts: set[str], name: str, found: str, logs: Path, report: Report) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(model_folder(name, parsed.keep_models))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        servers = {arm: server(arm, parsed, model, folder, logs) for arm in parsed.arms.split(",")}
        settings = {arm: one.settings for arm, one in servers.items()}
        report.add(measure="versions", model=name, versions=found, settings=settings)
        for one in servers.values():
            stack.callback(one.stop)
        start_all(servers.values())
        sizes = replace(MODELS[name], num_talks=min(2, MODELS[name].num_talks)) if parsed.quick else MODELS[name]
        match = Match(dict(servers), name, sizes, Goals(), report, folder, pause_s=PAUSE_S)
        if name == "tiny":
            match.settle_s, match.pause_s = 0.2, 0.0
        if "speed" in parts:
            _speed(match, report, parsed.repeats)
        if "turns" in parts:
            _turns(match.answers(parsed.rounds, parsed.restarts), name, report, "")
        if "cold" in parts:
            _turns(match.answers(parsed.rounds, parsed.restarts, from_disk=True), name, report, ", cold files")
        report.add(
            measure="on disk", model=name, unit="MiB",
            **{arm: disk_bytes(folder / arm) / (1 << 20) for arm in servers},
        )  # fmt: skip


def _shares(parsed: argparse.Namespace, parts: set[str], model: Path, logs: Path, report: Report) -> None:
    shape = MODELS["tiny"].shape
    for kind in KINDS:
        talks = 10 if parsed.quick else parsed.talks
        traffic = host_traffic.make(kind, talks, parsed.seed, shape.vocab_size, kv_bytes(shape))
        if "traffic" in parts:
            found = host_traffic.by_policy(parsed, model, logs, traffic)
            report.add(measure=f"found in memory, {kind}", model="tiny", unit="share", **found)
            ratio = found["return"] / max(found["lru"], found["arc"])
            _ratio(report, f"found in memory, {kind}: ours / best", "tiny", ratio, ">= 1", ratio >= 1)
        if "full" in parts:
            found = host_traffic.by_full_disk(parsed, model, logs, traffic)
            report.add(measure=f"found, disk full, {kind}", model="tiny", unit="share", **found)


def kv_bytes(shape: LlamaShape) -> int:
    """The bytes of one block in 16 bits."""
    return 2 * 2 * shape.num_layers * shape.hidden_size // shape.num_heads * shape.num_kv_heads * BLOCK_TOKENS


def disk_bytes(folder: Path) -> int:
    """The bytes that the files occupy, as a file may have holes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _speed(match: Match, report: Report, repeats: int) -> None:
    for name, times, num_tokens in match.seconds(repeats):
        rates = {arm: [num_tokens / one for one in seconds] for arm, seconds in times.items()}
        found = _row(report, name, match.model, "tok/s", rates)
        if "fs" in found:
            ratio = found[OURS] / found["fs"]
            _ratio(report, f"{name}: ours / fs", match.model, ratio, f">= {SLOWEST:g}", ratio >= SLOWEST)


def _turns(turns: Turns, model: str, report: Report, state: str) -> None:
    """state: of the files, where it is to be named."""
    for number, answers in enumerate(turns.warm, 1):
        warm = _ttft(report, f"turn {number}{', warm' if number > 1 else ''}", model, answers)
    returned = _ttft(report, f"last turn, after a restart{state}", model, turns.returned)
    _ttft(report, "last turn, computed anew", model, turns.cold)
    for against, found, goal in (
        ("lmcache", returned.get("lmcache"), RETURNED_TO_LMCACHE),
        ("vllm warm", warm.get("vllm"), RETURNED_TO_WARM),
        ("fs", returned.get("fs"), None),
    ):
        if found:
            ratio = returned[OURS] / found
            wanted = None if goal is None else f"<= {goal:g}"
            reached = goal is None or ratio <= goal
            _ratio(report, f"after a restart{state}: ours / {against}", model, ratio, wanted, reached)


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("hosts", (__doc__ or "").split("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help=f"{OURS} and others of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing, and starts in half the time")
    parser.add_argument("--talks", type=int, default=200, help="conversations of full and traffic (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of these (default: 0)")
    add_arguments(parser, PARTS)
    parsed = parser.parse_args(argv)
    check_names(parser, parsed, arms=ARMS, models=tuple(MODELS), parts=PARTS)
    if OURS not in parsed.arms.split(","):
        parser.error(f"--arms {parsed.arms!r} is without {OURS}, which the others are compared with; add it")
    if parsed.quick:
        parsed.repeats, parsed.rounds = 2, 1
    return run_match(parser, parsed, measure, "vLLM and what keeps its KV; medians", HIDDEN)


if __name__ == "__main__":
    sys.exit(main())
