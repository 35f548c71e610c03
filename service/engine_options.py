"""The flags that `serve` and `chat` have: those of the engine and its tiers, and what they say to the engine.

Knows the engine's options by name; loads no engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.config import DTYPES, EVICTIONS, POLICIES, EngineConfig
from kvstore.config import CODEC_NAMES, CacheTiers, format_size
from kvstore.errors import ConfigError
from service.config_file import DEFAULT, Setting
from service.options import (
    DEFAULT_PATH,
    STORE,
    TTL,
    Option,
    choice,
    count,
    default_store,
    device,
    number,
    plain_text,
    session_id,
    size,
    size_or_auto,
    switch,
    whole,
)

DEFAULT_DISK, DEFAULT_CPU = "8GiB", "1GiB"

MODEL = Option("MODEL", plain_text, None, "a local directory or a hub id (default: the built-in model)")
ENGINE_OPTIONS = (
    Option("--tokenizer", plain_text, None, "directory or hub id of another tokenizer (default: the model's)"),
    Option("--revision", plain_text, None, "branch, tag or commit of a model of the hub (default: its main branch)"),
    Option("--chat-template", plain_text, None, "file with a Jinja chat template, or its text (default: the model's)"),
    Option("--max-model-len", count, None, "context window in tokens (default: the model's)"),
    Option("--block-size", count, 16, "tokens per KV block (default: 16)"),
    Option("--max-num-seqs", count, 64, "requests running at once (default: 64)"),
    Option("--max-num-batched-tokens", count, 2048, "tokens computed in one step (default: 2048)"),
    Option("--dtype", choice(*DTYPES), "auto", "auto, float32, bfloat16 or float16 (default: auto, the model's)"),
    Option("--device", device, "auto", "auto, cpu, cuda or cuda:N (default: auto)"),
    Option(
        "--enforce-eager", switch, False, "no CUDA graphs; for debugging, or to save their memory", switch=True
    ),
    Option("--seed", whole, 0, "seed of the engine's sampling (default: 0)"),
    Option(
        "--scheduling-policy",
        choice(*POLICIES),
        "fcfs",
        "which request of a tenant goes first: fcfs, or priority, lower numbers first (default: fcfs)",
    ),
    Option(
        "--load",
        choice("auto", "always"),
        "auto",
        "stored KV: auto computes it anew where that is clearly faster, always loads it (default: auto)",
    ),
    Option(
        "--policy",
        choice(*EVICTIONS),
        "auto",
        "whose KV goes first: auto, fifo, lru or return, the least likely to come back (default: auto)",
        aliases=("--eviction",),
    ),
)
# Where the engine's name for it is another one: vLLM's --policy has long been --scheduling-policy.
ENGINE_NAMES = {"scheduling_policy": "policy", "policy": "eviction"}
TIER_OPTIONS = (
    Option(
        "--hbm",
        size_or_auto,
        "auto",
        "size of the KV block pool, such as 1.5GiB; auto: what a GPU has left, or 1/4 of free RAM (default: auto)",
    ),
    Option("--cpu", size, None, f"size of the CPU tier (default: {DEFAULT_CPU} with a disk tier, else 0)"),
    Option("--disk", size, None, f"size of the disk tier (default: {DEFAULT_DISK} with --store, else 0)"),
    replace(STORE, help=f"directory of the store; keeps conversations (default: none; {DEFAULT_PATH} with --disk)"),
    Option("--codec", choice(*CODEC_NAMES), "raw", "how KV lies on disk: raw, zstd or split-zstd (default: raw)"),
)
SERVE_TIER_OPTIONS = (  # a server keeps its conversations unless it is told not to
    TIER_OPTIONS[0],
    replace(TIER_OPTIONS[1], help=f"size of the CPU tier (default: {DEFAULT_CPU}; 0 without a disk tier)"),
    replace(TIER_OPTIONS[2], help=f"size of the disk tier; 0 keeps nothing (default: {DEFAULT_DISK})"),
    replace(STORE, help=f"directory of the store (default: {DEFAULT_PATH})"),
    TIER_OPTIONS[4],
    Option("--disk-per-key", size, None, "size of one tenant's KV on disk; more is not written (default: no limit)"),
)
COMMON_OPTIONS = (MODEL, *ENGINE_OPTIONS, *TIER_OPTIONS)
CHAT_OPTIONS = (
    Option("--temperature", number, 0.0, "0 is greedy (default: 0)"),
    Option("--max-tokens", count, None, "tokens of one answer at most (default: what remains of the window)"),
    Option("--system", plain_text, None, "system prompt"),
    Option("--session", session_id, "terminal", "id of the conversation (default: terminal)"),
    Option("--truncation", choice("auto", "disabled"), "auto", "auto drops the oldest turns when the window is full"),
    Option(
        "--truncation-reuse",
        choice("reencode", "exact"),
        "reencode",
        "after a truncation, reencode keeps the KV of what stays, exact computes it again (default: reencode)",
    ),
    TTL,
)
PRINT_CONFIG = Option(
    "--print-config",
    switch,
    False,
    "print the settings in force and where each comes from",
    switch=True,
    mirrored=False,
)


def with_tiers(settings: Mapping[str, Setting], keeps: bool) -> dict[str, Setting]:
    """A store alone means a disk tier, and a disk tier a CPU tier before it; what is given counts.

    keeps: there is a disk tier unless that is refused.
    """
    found = dict(settings)

    def assume(name: str, written: str) -> None:
        option = found[name].option
        found[name] = Setting(option, option.parse(option.flag, written), written, DEFAULT)

    if found["disk"].value is None:
        assume("disk", DEFAULT_DISK if keeps or found["store"].value is not None else "0")
    if found["cpu"].value is None:
        assume("cpu", DEFAULT_CPU if found["disk"].value else "0")
    if found["disk"].value and found["store"].value is None:
        assume("store", default_store())
    return found


def engine_arguments(settings: Mapping[str, Setting]) -> dict[str, object]:
    """For `Engine(model, **arguments)`. Raises ConfigError as the engine would, in the flags' names."""
    arguments: dict[str, object] = {}
    for option in ENGINE_OPTIONS:
        if (value := settings[option.key].value) is not None:
            arguments[ENGINE_NAMES.get(option.key, option.key)] = value
    model = settings["model"].value
    try:
        EngineConfig(model, **arguments)  # type: ignore[arg-type]
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"{flag_of(name, ENGINE_OPTIONS)} {rest}") from error
    values = {name: settings[name].value for name in ("hbm", "cpu", "disk", "codec")}
    values |= {"path": settings["store"].value}
    if "disk_per_key" in settings:
        values["disk_per_tenant"] = settings["disk_per_key"].value
    arguments["cache_tiers"] = CacheTiers(**values)  # type: ignore[arg-type]
    return arguments


def flag_of(name: str, options: Iterable[Option]) -> str:
    """The flag behind an engine's option."""
    return next((o.flag for o in options if ENGINE_NAMES.get(o.key, o.key) == name), f"--{name.replace('_', '-')}")


def describe_tiers(stats: Mapping[str, Any]) -> str:
    """What an engine has taken, such as "hbm 512.0 MiB (auto), cpu 1.0 GiB, disk 8.0 GiB"."""
    sizes = {tier: stats[tier]["blocks"] * stats[tier]["block_bytes"] for tier in ("hbm", "cpu") if stats.get(tier)}
    if stats.get("disk"):
        sizes["disk"] = stats["disk"]["capacity_bytes"]
    auto = {"hbm": " (auto)"} if stats["hbm"].get("is_auto") else {}
    return ", ".join(f"{tier} {format_size(size)}{auto.get(tier, '')}" for tier, size in sizes.items() if size)
