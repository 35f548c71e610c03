"""What bench.hit_rate is to replay: its flags, their values and the presets of known experiments.

Checks everything before anything is replayed, and reports an error in one line. Replays nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common import arguments, say
from bench.references import REFERENCES
from bench.traffic import KINDS, MADE_UP_ARRIVALS, generate
from kvstore.config import parse_size
from kvstore.errors import ConfigError
from kvstore.planning.sizing import KV_BYTES_PER_TOKEN
from kvstore.planning.trace_formats import FORMATS, read_trace
from kvstore.planning.traces import DEFAULT_ARRIVALS, DEFAULT_BLOCK_SIZE, Arrivals, Trace

if TYPE_CHECKING:
    from kvstore.planning.replay_config import ReplayConfig, ServiceModel

ONE_TIER_POLICIES = (*REFERENCES, "return", "auto")
TIERS_POLICIES = ("fifo", "lru", "look-ahead", "return", "auto", "belady")
DEFAULT_MODEL = "llama-3.1-8b"
NUM_REQUESTS, NUM_QUICK = 20_000, 1_000
# CachedAttention (USENIX ATC 2024) on ShareGPT: look-ahead 76 to 86 %, LRU 31 to 58 %, FIFO 48 %. Sizes, batch, time to
# live and warm-up are the paper's; HBM and the rates are guesses for LLaMA-13B on its four A100 and SSDs.
_PAPER = {
    "format": "turns",
    "conversations": "9000",
    "arrival_rate": "1",
    "kv_bytes_per_token": "llama-13b",
    "hbm": "40GB",
    "cpu": "128GB",
    "disk": "10TB,2TB",
    "ttl": "1h",
    "batch": "24",
    "prefill_rate": "10000",
    "decode_rate": "25",
    "load_bandwidth": "25GB",
    "read_bandwidth": "5GB",
    "write_bandwidth": "2GB",
    "warm_up": "10000",
    "policies": "fifo,lru,look-ahead,return,auto",
}
# Flags and their values, as on the command line; explicit flags take precedence. In the short queue the same people
# come a tenth as often: hardly anybody waits, so the queue tells little.
PRESETS: dict[str, dict[str, str]] = {
    "paper": _PAPER,
    "short-queue": _PAPER | {"arrival_rate": "0.1", "disk": "2TB"},
}


# -- values of flags -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Capacity:
    """A tier's size as given: in tokens, or in bytes of some model."""

    amount: int
    is_bytes: bool


def _names(text: str) -> list[str]:
    names = [name for name in text.replace(" ", "").split(",") if name]
    if not names:
        raise ArgumentTypeError("no name is given")
    return names


def _count(text: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9][0-9_]*", text) or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _whole(text: str) -> int:
    return _count(text, least=0)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return _positive(text[:-1]) * units[text[-1]] if text and text[-1] in units else _positive(text)


def _bytes_per_s(text: str) -> float:
    try:
        return _positive(str(parse_size(text, "bandwidth")))
    except ConfigError as error:
        raise ArgumentTypeError(f"{error} (a second)") from None


def _capacity(text: str) -> Capacity:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no capacity; give tokens such as 40k or 3M, or bytes such as 128GB")
    if match[3]:
        return Capacity(parse_size(text), is_bytes=True)
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    return Capacity(int(float(match[1]) * 1000**power), is_bytes=False)


def _capacities(text: str) -> list[Capacity]:
    return [_capacity(part) for part in text.split(",")]


def _kv_bytes(text: str) -> int:
    if text.lower() in KV_BYTES_PER_TOKEN:
        return KV_BYTES_PER_TOKEN[text.lower()]
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is neither a number nor one of {', '.join(KV_BYTES_PER_TOKEN)}")
    return _count(text)


def parse(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags over those of a preset. Exits with one line and code 2 if a flag is wrong."""
    parser = _parser(description)
    parsed = parser.parse_args(argv)
    if parsed.preset is None:
        return parsed
    parser.set_defaults(**PRESETS[parsed.preset])
    return parser.parse_args(argv)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = arguments("hit_rate", description, uses_torch=False)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="flags of a known experiment; those that are given count more")
    add("--trace", type=Path, metavar="FILE", help="default: made-up traffic")
    add("--kind", choices=KINDS, help="of the made-up traffic: who comes; default: mixed")
    add("--format", metavar="|".join(FORMATS), help="of the trace")
    add(
        "--requests",
        type=_count,
        metavar="N",
        help=f"of the made-up traffic ({NUM_REQUESTS}), or the first N of a file",
    )
    add(
        "--block-size", type=_count, metavar="TOKENS", help="default: the format's (mooncake 512, bailian 16, else 128)"
    )
    add("--policies", type=_names, metavar="NAME,...", help="default: all but belady in tiers; " + _known_policies())
    add("--capacity-blocks", type=_counts, metavar="N,...", help="one tier, in blocks of the trace")
    for tier in ("hbm", "cpu", "disk"):
        add(f"--{tier}", type=_capacities, metavar="SIZE,...", help="in tokens (40k, 3M) or bytes (128GB)")
    models = ", ".join(KV_BYTES_PER_TOKEN)
    add("--kv-bytes-per-token", type=_kv_bytes, metavar="N|MODEL", help=f"for sizes in bytes: a number, or {models}")
    add("--prefill-rate", type=_positive, metavar="TOKENS/S", help="service model: prompt tokens computed a second")
    add("--decode-rate", type=_positive, metavar="TOKENS/S", help="tokens a second of one request's answer")
    add("--batch", type=_count, metavar="N", help="requests running at once")
    for name, text in (("load", "CPU tier to HBM"), ("read", "from disk"), ("write", "to disk")):
        add(f"--{name}-bandwidth", type=_bytes_per_s, metavar="BYTES/S", help=f"{text}, such as 25GB")
    add("--ttl", type=_seconds, metavar="TIME", help="what was not used for so long goes first, such as 3600 or 1h")
    add("--warm-up", type=_whole, default=0, metavar="N", help="requests at the start that are not counted")
    add("--no-look-ahead", action="store_true", help="return and auto do not see the queue either")
    add(
        "--arrival-rate",
        type=_positive,
        metavar="N/S",
        help="new conversations a second, where a file has no times (1), or of made-up traffic by day (0.1)",
    )
    add("--think-time", type=_seconds, metavar="TIME", help="median time between an answer and the next message (60)")
    add("--conversations", type=_count, metavar="N", help="to draw from a file of turns (default: each of them once)")
    add("--max-context", type=_count, metavar="TOKENS", help="of a file of turns: the oldest turns are dropped over it")
    add("--seed", type=_whole, default=0)
    add("--plot", type=Path, metavar="FILE.png|svg", help="hit rate against capacity")
    return parser


def _known_policies() -> str:
    return f"one tier: {', '.join(ONE_TIER_POLICIES)}; tiers: {', '.join(TIERS_POLICIES)}"


# -- from flags to a job ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Job:
    """What is to be replayed: with tiers if there are configurations, else with one tier of each capacity."""

    trace: Trace
    policies: list[str]
    capacities: list[int]
    configs: list[ReplayConfig]
    plot: Path | None


def prepare(parsed: argparse.Namespace) -> Job:
    """Read and check everything before a replay begins. Raises ConfigError with one line that says what is wrong."""
    has_tiers = bool(parsed.hbm or parsed.cpu or parsed.disk)
    _check_flags(parsed, has_tiers)
    known = TIERS_POLICIES if has_tiers else ONE_TIER_POLICIES
    policies = parsed.policies or [name for name in known if not (has_tiers and name == "belady")]
    for name in policies:
        if name not in known:
            raise ConfigError(f"unknown policy {name!r} in {'tiers' if has_tiers else 'one tier'}; {_known_policies()}")
    if parsed.warm_up and not has_tiers and not set(policies) <= set(REFERENCES):
        raise ConfigError("--warm-up has no effect on return and auto in one tier; give --policies without them")
    trace = _trace(parsed)
    if parsed.quick:
        parsed.warm_up = min(parsed.warm_up, len(trace.requests) // 10)
    if parsed.warm_up >= len(trace.requests):
        raise ConfigError(
            f"--warm-up {parsed.warm_up} leaves none of the {len(trace.requests):,} requests to be counted"
        )
    configs = _configs(parsed, trace.block_size) if has_tiers else []
    return Job(trace, list(dict.fromkeys(policies)), parsed.capacity_blocks or [], configs, parsed.plot)


def _check_flags(parsed: argparse.Namespace, has_tiers: bool) -> None:
    given = {name for name, value in vars(parsed).items() if value not in (None, False)}
    if has_tiers and parsed.capacity_blocks:
        raise ConfigError("--capacity-blocks is one tier, --hbm, --cpu and --disk are several; give one kind")
    if has_tiers and not parsed.hbm:
        raise ConfigError("--cpu and --disk need --hbm, the tier that requests run in")
    of_tiers = {"ttl", "no_look_ahead", "batch", "prefill_rate", "decode_rate", "kv_bytes_per_token"}
    of_tiers |= {"load_bandwidth", "read_bandwidth", "write_bandwidth"}
    if not has_tiers and (useless := sorted(given & of_tiers)):
        raise ConfigError(f"{_flag(useless[0])} has no effect on one tier without time; give --hbm, --cpu and --disk")
    if parsed.trace is None and parsed.format is not None:
        raise ConfigError("--format is that of a file; give --trace FILE too")
    if parsed.trace is not None and parsed.kind is not None:
        raise ConfigError(f"--kind {parsed.kind} has no effect on a trace; it is that of made-up traffic")
    if parsed.trace is not None and parsed.format is None:
        raise ConfigError(f"--trace needs --format, one of {', '.join(FORMATS)}")
    of_turns = {"conversations", "max_context"} | ({"arrival_rate", "think_time"} if parsed.trace else set())
    if parsed.format != "turns" and (useless := sorted(given & of_turns)):
        what = f"traces of the format {parsed.format}" if parsed.trace else "made-up traffic"
        raise ConfigError(f"{_flag(useless[0])} has no effect on {what}")
    for path in (parsed.json, parsed.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a directory")
    if parsed.plot is not None and parsed.plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {parsed.plot} is neither .png nor .svg")
    if parsed.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _trace(parsed: argparse.Namespace) -> Trace:
    usual = MADE_UP_ARRIVALS if parsed.trace is None else DEFAULT_ARRIVALS
    arrivals = Arrivals(
        parsed.arrival_rate or usual.rate_per_s,
        parsed.think_time or DEFAULT_ARRIVALS.think_median_s,
        num_conversations=parsed.conversations,
        seed=parsed.seed,
    )
    limit = parsed.requests or (NUM_QUICK if parsed.quick else None)
    if parsed.trace is None:
        block_size = parsed.block_size or DEFAULT_BLOCK_SIZE
        trace = generate(limit or NUM_REQUESTS, parsed.seed, block_size, parsed.kind or "mixed", arrivals)
    else:
        trace = read_trace(parsed.trace, parsed.format, parsed.block_size, arrivals, parsed.max_context)
        trace.requests = trace.requests[:limit]  # what follows another stands behind it
    for note in trace.notes:
        say(f"{trace.name}: {note}")
    return trace


def _configs(parsed: argparse.Namespace, block_size: int) -> list[ReplayConfig]:
    points = _tier_blocks(parsed, block_size)
    from kvstore.planning.replay_config import ReplayConfig

    block_bytes = (parsed.kv_bytes_per_token or KV_BYTES_PER_TOKEN[DEFAULT_MODEL]) * block_size
    service = _service(parsed)
    return [
        ReplayConfig(
            hbm,
            cpu,
            disk,
            block_bytes,
            look_ahead=not parsed.no_look_ahead,
            service=service,
            ttl_s=parsed.ttl,
            warm_up=parsed.warm_up,
        )
        for hbm, cpu, disk in points
    ]


def _tier_blocks(parsed: argparse.Namespace, block_size: int) -> list[list[int]]:
    """Blocks of HBM, CPU and disk, one for each size of a list; a tier with a single size keeps it."""
    tiers = [getattr(parsed, name) or [Capacity(0, False)] for name in ("hbm", "cpu", "disk")]
    num_points = max(map(len, tiers))
    if any(len(sizes) not in (1, num_points) for sizes in tiers):
        raise ConfigError(f"give each of --hbm, --cpu and --disk one size or all of them {num_points}")
    rows = zip(*(sizes * (num_points // len(sizes)) for sizes in tiers), strict=True)
    points = [[_in_blocks(size, parsed.kv_bytes_per_token, block_size) for size in row] for row in rows]
    if any(hbm < 1 for hbm, _, _ in points):
        raise ConfigError(f"--hbm holds less than one block of {block_size} tokens; give more")
    return points


def _in_blocks(size: Capacity, kv_bytes: int | None, block_size: int) -> int:
    if not size.is_bytes:
        return size.amount // block_size
    if kv_bytes is None:
        raise ConfigError("a tier's size in bytes needs --kv-bytes-per-token, a number or a model's name")
    return size.amount // (kv_bytes * block_size)


def _service(parsed: argparse.Namespace) -> ServiceModel:
    from kvstore.planning.replay_config import ServiceModel

    usual = ServiceModel()
    return ServiceModel(
        parsed.prefill_rate or usual.prefill_tokens_per_s,
        parsed.decode_rate or usual.decode_tokens_per_s,
        parsed.batch or usual.max_batch,
        parsed.load_bandwidth or usual.load_bytes_per_s,
        parsed.read_bandwidth or usual.read_bytes_per_s,
        parsed.write_bandwidth or usual.write_bytes_per_s,
    )
