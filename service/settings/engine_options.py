"""The flags that `serve` and `chat` share, made from the fields of the engine's configuration.

Loads no engine.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields, replace
from typing import Any

from kvstore.config import CODEC_NAMES, ROLES, CacheTiers
from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError, ModelError
from kvstore.service.settings.chat_options import ChatOptions
from kvstore.service.settings.options import (
    DEFAULT,
    DEFAULT_PATH,
    STORE,
    Command,
    Option,
    OptionValue,
    Parse,
    choice,
    count,
    default_store,
    duration_s,
    file,
    flags_of,
    location,
    size,
    size_or_auto,
    switch,
    whole,
)
from kvstore.service.settings.serve_options import ServeOptions

_NAME = re.compile(r"(?<![\w/.'-])([a-z]+(?:_[a-z]+)*)\b(=?)")  # as a word, not in a path or a quoted value
DEFAULT_DISK, DEFAULT_CPU = "8GiB", "1GiB"
# Flags with another name than the engine's field: vLLM's --policy has long been --scheduling-policy.
FLAGS = {"policy": "--scheduling-policy", "eviction": "--policy", "model": "MODEL"}
ALIASES = {"eviction": ("--eviction",)}
SERVE_EXAMPLES = """Prefer KVSTORE_API_KEY or --api-key-file to --api-key: all users can see a command line.

examples:
  kvstore serve                                      the built-in model on http://127.0.0.1:8000
  kvstore serve path/to/model --store ~/store --cpu 4GiB --disk 100GiB
  kvstore serve --host 0.0.0.0 --api-key-file keys   one tenant:key a line
  kvstore serve --print-config > kvstore.toml; kvstore serve --config kvstore.toml"""
CHAT_EXAMPLES = """examples:
  kvstore chat
  kvstore chat --store ~/store --disk 20GiB --session anna    kept, and resumed the next time
  echo "Hello" | kvstore chat Qwen/Qwen3-0.6B --max-tokens 100"""


def _engine_option(one: "Field[Any]") -> Option:
    about = one.metadata
    parse: Parse = location
    if "among" in about:
        parse = choice(*about["among"])
    elif "low" in about:
        parse = count if about["low"] > 0 else whole
    elif one.type is bool:
        parse = switch
    flag = FLAGS.get(one.name, "--" + one.name.replace("_", "-"))
    return Option(
        flag, parse, one.default, about["help"], about.get("shown", ""), field=one.name,
        aliases=ALIASES.get(one.name, ()),
    )  # fmt: skip


OWN_OPTIONS: dict[str, type] = {"serve": ServeOptions, "chat": ChatOptions}  # beside the engine's options
ENGINE_OPTIONS = tuple(_engine_option(one) for one in fields(EngineConfig) if "help" in one.metadata)
PRINT_CONFIG = Option(
    "--print-config", switch, False, "print the settings in force and where each comes from", mirrored=False
)


def tier_options(keeps: bool) -> tuple[Option, ...]:
    """keeps: as of `with_tiers`."""
    cpu = f"{DEFAULT_CPU}; 0 without a disk tier" if keeps else f"{DEFAULT_CPU} with a disk tier, else 0"
    disk = DEFAULT_DISK if keeps else f"{DEFAULT_DISK} with --store, else 0"
    store = DEFAULT_PATH if keeps else f"none; {DEFAULT_PATH} with --disk"
    about = {one.name: one.metadata["help"] for one in fields(CacheTiers)}
    options = (
        Option("--hbm", size_or_auto, "auto", about["hbm"], field="hbm"),
        Option("--cpu", size, None, about["cpu"], cpu, field="cpu"),
        Option("--disk", size, None, about["disk"] + ("; 0 keeps nothing" if keeps else ""), disk, field="disk"),
        replace(STORE, help=about["path"] + ("" if keeps else "; keeps conversations"), shown=store, field="path"),
        Option("--codec", choice(*CODEC_NAMES), "raw", about["codec"], field="codec"),
        Option("--remote", location, None, about["remote"], field="remote"),
        Option("--fleet-secret-file", file, None, about["fleet_secret_file"], field="fleet_secret_file"),
        Option("--remote-ttl", duration_s, 7 * 86400.0, about["remote_ttl_s"], "7d", field="remote_ttl_s"),
        Option("--role", choice(*ROLES), None, about["role"], "both", field="role"),
        Option("--prefill-url", location, None, about["prefill_url"], field="prefill_url"),
        Option("--disk-per-key", size, None, about["disk_per_tenant"], "no limit", field="disk_per_tenant"),
    )
    return options if keeps else options[:-3]  # tenants need keys, and only a server has those and a role


def engine_command(name: str) -> Command:
    """`serve` or `chat`. A server keeps its conversations unless it is told not to."""
    is_server = name == "serve"
    groups = {
        "model and engine": ENGINE_OPTIONS,
        "tiers": tier_options(keeps=is_server),
        "service" if is_server else "conversation": (*flags_of(OWN_OPTIONS[name]), PRINT_CONFIG),
    }
    examples = SERVE_EXAMPLES if is_server else CHAT_EXAMPLES
    return Command(name, groups, examples, "[MODEL]", "one MODEL at most")


def with_tiers(settings: Mapping[str, OptionValue], keeps: bool) -> dict[str, OptionValue]:
    """A store alone implies a disk tier, and a disk tier implies a CPU tier; given values win.

    keeps: there is a disk tier unless it is switched off.
    """
    found = dict(settings)

    def assume(name: str, written: str) -> None:
        option = found[name].option
        found[name] = OptionValue(option, option.parse(option.flag, written), written, DEFAULT)

    if found["disk"].value is None:
        assume("disk", DEFAULT_DISK if keeps or found["store"].value is not None else "0")
    if found["cpu"].value is None:
        assume("cpu", DEFAULT_CPU if found["disk"].value else "0")
    if found["disk"].value and found["store"].value is None:
        assume("store", default_store())
    return found


def engine_arguments(settings: Mapping[str, OptionValue]) -> dict[str, object]:
    """Arguments for `Engine(**arguments)`. Raises ConfigError as the engine would, but names flags."""
    found = {one.field: settings[one.key].value for one in ENGINE_OPTIONS}
    tiers: dict[str, Any] = {one.field: settings[one.key].value for one in tier_options(True) if one.key in settings}
    with naming_flags(settings):
        EngineConfig(**found)  # type: ignore[arg-type]
        found["cache_tiers"] = CacheTiers(**tiers)
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def naming_flags(settings: Mapping[str, OptionValue]) -> Iterator[None]:
    """Let refusals name flags where they name arguments of the engine (see `ConfigError`), and the option that they are
    about as it was given: a flag, a variable, or a key and its file.
    """
    given = {one.option.field: one for one in settings.values() if one.option.field}

    def flag(match: re.Match[str]) -> str:
        name, assigned = match.groups()
        if name not in given or not (assigned or "_" in name):  # "disk" alone may be a word like others
            return match[0]
        flag = given[name].option.flag
        return match[0] if flag in match.string else flag + " " * bool(assigned)  # it may name both

    try:
        yield
    except (ConfigError, ModelError) as error:
        first, space, rest = str(error).partition(" ")
        if isinstance(error, ConfigError) and first in given:
            first = given[first].where
        raise type(error)(first + space + _NAME.sub(flag, rest)) from error
