"""Flags of the `kvstore` command; does not know where values come from.

A flag is written once: as the `setting` of a dataclass that it fills, or as an Option where there is none.
"""

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from kvstore.config import DURATION, FILE, SWITCH, CacheTiers, ValueForm
from kvstore.errors import ConfigError

REMOVED = {  # what has been an option, by its key, and what to use instead
    "engine_process": "a server's engine has a process of its own, and in Python Engine has none",
    "max_concurrent_per_key": "tenants share each step equally, and --max-queue bounds what waits or runs",
    "max_queue_per_key": "one tenant has at most half of the --max-queue that others leave",
    "queue_timeout": "--request-timeout bounds a request from its arrival on",
}
REMOVED_FLAGS = dict.fromkeys(  # which had no variable and no key of the settings file
    ("--servers", "--routing", "--network", "--remote-bandwidth", "--restart"),
    "docs/fleet.md has what simulated fleets showed; plan replays one server",
)
COMMANDS = {
    "serve": "answer over HTTP: sessions, the OpenAI API, a web page",
    "chat": "talk to a model in the terminal",
    "stats": "show what a store holds and how it is used",
    "evict": "give up cached KV by age, model, session or size",
    "verify": "check everything that is stored",
    "compact": "give the space of what was deleted back to the file system",
    "sessions": "list, show or delete stored conversations",
    "why": "say why a request of a running server computed what an earlier one had",
    "plan": "predict hit rate and time to first token for other sizes of the tiers",
    "doctor": "check that a running server, ours, vLLM or SGLang, finds a conversation again after a restart",
    "vllm-config": "write the flags under which vLLM keeps its KV in a store",
    "completion": "print a script that completes this command line in a shell",
}
HELP_COLUMN = 30
MOST_SHOWN = 10  # names that a message lists
DEFAULT = "default"  # the origin of a value that was not given
DEFAULT_PATH, OLD_PATH = "~/.local/share/kvstore", "~/.cache/kvstore"
EPILOG = """Every flag has a mirror in the environment: KVSTORE_MAX_MODEL_LEN=1024 is --max-model-len 1024.
Order: flag, environment, file (--config), default. The file has settings of serve and chat only, of which other
commands read what is theirs: max_model_len = 1024 is for every command, and below [serve] or [chat] for that one.
What a command deletes is taken from flags only."""


def default_store() -> str:
    """Where conversations are kept by default: in the data folder, as cleaners empty caches.

    Users whose conversations are still in the old default folder are told so while the new one is empty.
    """
    home = os.environ.get("XDG_DATA_HOME", "")
    found = f"{home}/kvstore" if home.startswith("/") else DEFAULT_PATH
    old, new = Path(OLD_PATH).expanduser(), Path(found).expanduser()
    if (old / "secret").exists() and not new.exists():
        told = f"the default store is {new} now, yours is in {old}; move it there, or give --store {old}"
        print(f"kvstore: {told}", file=sys.stderr)
    return found


class UsageError(Exception):
    """The command line is wrong; the message is the one line that is shown."""


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. A name without dashes, such as MODEL, is the command's argument.

    shown: the default in words, where the value does not say it. bare: what the flag means without a value, where it
    may have one. mirrored: false for what a command destroys, which is taken neither from the environment nor from a
    file. aliases: older names, which work and are not shown. secret: never printed. field: what it fills.
    """

    flag: str
    reads: ValueForm
    default: object
    help: str
    shown: str = ""
    mirrored: bool = True
    aliases: tuple[str, ...] = ()
    secret: bool = False
    bare: str | None = None
    repeats: bool = False
    field: str = ""

    @property
    def key(self) -> str:
        return key_of(self.flag)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value on the command line, where it means 1."""
        return self.reads is SWITCH

    @property
    def shown_default(self) -> str:
        if self.shown or self.default is None or self.default is False or self.default == ():
            return self.shown
        return f"{self.default:g}" if isinstance(self.default, int | float) else str(self.default)

    @property
    def about(self) -> str:
        return f"{self.help} (default: {self.shown_default})" if self.shown_default else self.help


def flags_of(kind: type) -> tuple[Option, ...]:
    """The flags of a dataclass. One is named after its field, without a unit, unless its `setting` says otherwise."""
    found = []
    for one in fields(kind):
        if one.metadata.get("help"):
            name = re.sub(r"_(s|bytes)\Z", "", one.name).replace("_", "-")
            found.append(Option(**{"flag": "--" + name, **one.metadata}, default=one.default, field=one.name))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class OptionValue:
    """The value of an option. written: the text as given, or the default; origin: where it came from, in words."""

    option: Option
    value: object
    written: object
    origin: str

    @property
    def where(self) -> str:
        """Its name in messages: the flag, the variable, or the key and its file."""
        kind, _, place = self.origin.partition(" ")
        names = {"file": f"{self.option.key} in {place}", "environment": place}
        return names.get(kind, self.option.flag)


@dataclass(frozen=True, slots=True)
class Command:
    """What a command accepts. groups: its flags under their headings. takes: the arguments beside flags, for the help's
    first line; most: the same, for the error about too many. has_arguments: it accepts words that belong to no flag.
    """

    name: str
    groups: Mapping[str, tuple[Option, ...]]
    examples: str
    takes: str = ""
    most: str = ""
    has_arguments: bool = False

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(itertools.chain.from_iterable(self.groups.values()))


def key_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


def variable_of(flag: str) -> str:
    return "KVSTORE_" + key_of(flag).upper()


def _lifetime_s(text: str) -> float | None:
    seconds = None if text == "none" else DURATION.parse(text)
    if seconds == 0:
        raise ConfigError("", repr(text), 'give a time above 0, or "none"')
    return seconds


LIFETIME = ValueForm("TIME", _lifetime_s, DURATION.accepts + ', or "none"')
TTL = "new sessions end so long after their last turn: 12h, 7d"
STORE = next(replace(one, shown=DEFAULT_PATH) for one in flags_of(CacheTiers) if one.field == "path")
JSON = Option("--json", SWITCH, False, "print one JSON object")
CONFIG = Option("--config", FILE, None, "TOML file of settings", shown="~/.config/kvstore/config.toml, if it exists")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def command_parser(command: Command) -> Parser:
    summary = COMMANDS[command.name]
    parser = Parser(
        prog=f"kvstore {command.name}",
        usage=" ".join(part for part in (f"kvstore {command.name}", command.takes, "[FLAGS]") if part),
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"{command.examples}\n\n{EPILOG}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN),
        allow_abbrev=False,
        add_help=False,
    )
    for heading, options in command.groups.items():
        group = parser.add_argument_group(heading)
        for option in options:
            _add(group, option)
    if command.has_arguments:
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    common = parser.add_argument_group("settings and help")
    _add(common, CONFIG)
    common.add_argument("-h", "--help", action="help", help="show this text")
    return parser


def _add(parser: "argparse._ArgumentGroup", option: Option) -> None:
    if not option.flag.startswith("-"):
        parser.add_argument(option.key, metavar=option.flag, nargs="?", help=option.about)
        return
    kind: dict[str, Any] = {"metavar": value_of(option)}
    if option.is_switch:
        kind = {"action": "store_const", "const": "1"}
    elif option.bare is not None:
        kind |= {"nargs": "?", "const": option.bare}
    elif option.repeats:
        kind["action"] = "append"
    parser.add_argument(option.flag, dest=option.key, help=option.about, **kind)
    if option.aliases:
        parser.add_argument(*option.aliases, dest=option.key, help=argparse.SUPPRESS, **kind)


def value_of(option: Option) -> str:
    return option.reads.name or option.key.split("_")[-1].upper()


def parse_arguments(command: Command, argv: list[str]) -> dict[str, Any] | None:
    """The given values, as texts by the flags' keys, and "arguments"; None after printing the help."""
    parser = command_parser(command)
    if any(argument in ("-h", "--help") for argument in argv):
        print(parser.format_help(), end="")
        return None
    namespace, unknown = parser.parse_known_intermixed_args(argv)  # `delete --tenant t ID` too
    for argument in unknown:
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            known = [*(option.flag for option in command.options), CONFIG.flag, "-h", "--help"]
            raise UsageError(f"unknown flag {flag!r}{suggestion(flag, known)}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; {command.most or f'{command.name} has flags only'}")
    given = vars(namespace)
    for option in command.options:
        if option.repeats and given[option.key] is not None:
            given[option.key] = ",".join(given[option.key])
    return given


def suggestion(word: str, known: Iterable[str]) -> str:
    """The rest of a message about a word that is not known: what has taken its place, the one that was probably meant,
    or what there is.
    """
    if (instead := REMOVED_FLAGS.get(word) or REMOVED.get(key_of(word))) is not None:
        return f", as it has been removed: {instead}"
    known = list(known)
    begun = [one for one in known if one.lstrip("-").startswith(word.lstrip("-")) and len(word.lstrip("-")) > 1]
    if close := begun or nearest(word, known, 0.6):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if len(known) <= MOST_SHOWN else "; --help lists all"


def nearest(word: str, known: Iterable[str], cutoff: float) -> list[str]:
    """The known word that this one is probably a misspelling of, if any. Capitals, dashes and underscores do not count.

    cutoff: how alike they must be, from 0 to 1.
    """
    bare = {re.sub("[-_]", "", one).lower(): one for one in known}
    close = difflib.get_close_matches(re.sub("[-_]", "", word).lower(), bare, n=1, cutoff=cutoff)
    return [bare[one] for one in close]
