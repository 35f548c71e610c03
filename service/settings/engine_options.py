"""The flags that `serve` and `chat` share, made from the fields of the engine's configuration; and those of `chat`.

Loads no engine.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvstore.config import SESSION_ID, SWITCH, TEXT, CacheTiers, ValueForm, matching, one_of, setting, whole
from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError, ModelError, in_python
from kvstore.service.settings.options import (
    DEFAULT,
    DEFAULT_PATH,
    LIFETIME,
    TTL,
    Command,
    Option,
    OptionValue,
    default_store,
    flags_of,
)
from kvstore.service.settings.serve_options import ServeOptions

TEMPERATURE = ValueForm(parse=float, accepts="a number from 0 to 100", low=0, high=100)
ID = ValueForm("ID", matching(SESSION_ID), "1 to 128 letters, digits, '-' or '_'")
DEFAULT_DISK, DEFAULT_CPU = "8GiB", "1GiB"
OF_SERVERS = ("disk_per_tenant", "role", "prefill_url")  # tenants need keys, and only a server has those and a role
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


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The flags of `kvstore chat` about the conversation; the engine's own options travel apart."""

    temperature: float = setting(0.0, TEMPERATURE, "0 is greedy")
    max_tokens: int | None = setting(
        None, whole(1, 2**31), "tokens of one answer at most", shown="what remains of the window"
    )
    system: str | None = setting(None, TEXT, "system prompt")
    session: str = setting("terminal", ID, "id of the conversation")
    truncation: str = setting("auto", one_of("auto", "disabled"), "auto drops the oldest turns when the window is full")
    truncation_reuse: str = setting(
        "reencode",
        one_of("reencode", "exact"),
        "after a truncation, reencode keeps the KV of what stays, exact computes it again",
    )
    ttl_s: float | None = setting(None, LIFETIME, TTL, shown="none")


OWN_OPTIONS: dict[str, type] = {"serve": ServeOptions, "chat": ChatOptions}  # beside the engine's options
ENGINE_OPTIONS = flags_of(EngineConfig)
PRINT_CONFIG = Option(
    "--print-config", SWITCH, False, "print the settings in force and where each comes from", mirrored=False
)


def tier_options(keeps: bool) -> tuple[Option, ...]:
    """keeps: as of `with_tiers`."""
    shown = {
        "cpu": f"{DEFAULT_CPU}; 0 without a disk tier" if keeps else f"{DEFAULT_CPU} with a disk tier, else 0",
        "disk": DEFAULT_DISK if keeps else f"{DEFAULT_DISK} with --store, else 0",
        "path": DEFAULT_PATH if keeps else f"none, and nothing is kept; {DEFAULT_PATH} with --disk",
    }
    options = [one for one in flags_of(CacheTiers) if keeps or one.field not in OF_SERVERS]
    return tuple(replace(one, default=None, shown=shown[one.field]) if one.field in shown else one for one in options)


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
        found[name] = OptionValue(option, option.reads.read(option.flag, written), written, DEFAULT)

    if found["disk"].value is None:
        assume("disk", DEFAULT_DISK if keeps or found["store"].value is not None else "0")
    if found["cpu"].value is None:
        assume("cpu", DEFAULT_CPU if found["disk"].value else "0")
    if found["disk"].value and found["store"].value is None:
        assume("store", default_store())
    return found


def arguments_of(command: str, settings: Mapping[str, OptionValue]) -> tuple[dict[str, Any], Any]:
    """Arguments for `Engine(**arguments)`, and the command's own options. Raises ConfigError as the engine would, but
    names flags.
    """
    found = {one.field: settings[one.key].value for one in ENGINE_OPTIONS}
    tiers: dict[str, Any] = {one.field: settings[one.key].value for one in tier_options(True) if one.key in settings}
    with naming_flags(settings):
        EngineConfig(**found)  # type: ignore[arg-type]
        found["cache_tiers"] = CacheTiers(**tiers)
        own = OWN_OPTIONS[command]
        options = own(**{one.field: settings[one.key].value for one in flags_of(own)})
    return {name: value for name, value in found.items() if value is not None}, options


@contextmanager
def naming_flags(settings: Mapping[str, OptionValue]) -> Iterator[None]:
    """Let refusals name flags instead of arguments of the engine, and the option that they are about as it was given: a
    flag, a variable, or a key and its file.
    """
    given = {one.option.field: one for one in settings.values() if one.option.field}

    def write(field: str, value: str | int | None) -> str:
        if field not in given:
            return in_python(field, value)
        return given[field].where if value is None else f"{given[field].option.flag} {value}"

    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(error.told(write)) from error
