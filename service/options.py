"""Flags of the `kvstore` command and the forms of values they accept. Knows no command, nor where values come from."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.prompts import SESSION_ID
from kvstore.config import parse_size
from kvstore.errors import ConfigError

HELP_COLUMN = 30
DEFAULT_PATH, OLD_PATH = "~/.local/share/kvstore", "~/.cache/kvstore"
EPILOG = """Every flag has a mirror in the environment: KVSTORE_MAX_MODEL_LEN=1024 is --max-model-len 1024.
Order: flag, environment, file (--config), default. In the file, max_model_len = 1024 is for every command, and below
[serve] or [chat] for that one. What a command deletes is taken from flags only."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def default_store() -> str:
    """Where conversations are kept unless a person says so: with the data, as cleaners empty caches.

    Those whose conversations are where the default once was are told so, as long as nothing is in the new place.
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
    """One flag. `parse` makes its value from (name, text) and raises ConfigError with the accepted forms.

    A flag without dashes, such as MODEL, is the command's own argument. switch: it takes no value on the command line,
    where it means "1". bare: what it means there without a value, where it may have one. mirrored: false for what a
    command destroys, which is taken neither from the environment nor from a file. aliases: older names, which work and
    are not shown. secret: never printed.
    """

    flag: str
    parse: Callable[[str, str], object]
    default: object
    help: str
    switch: bool = False
    mirrored: bool = True
    aliases: tuple[str, ...] = ()
    secret: bool = False
    bare: str | None = None
    repeats: bool = False

    @property
    def key(self) -> str:
        return key_of(self.flag)

    @property
    def variable(self) -> str:
        return variable_of(self.flag)


def key_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


def variable_of(flag: str) -> str:
    return "KVSTORE_" + key_of(flag).upper()


def count(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1")
    return int(text)


def whole(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ConfigError(f"{name} is {text!r}; give a whole number")
    return int(text)


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give a number") from None


def size(name: str, text: str) -> int:
    return parse_size(text, name)


def size_or_auto(name: str, text: str) -> int | str:
    try:
        return "auto" if text == "auto" else parse_size(text, name)
    except ConfigError as error:
        raise ConfigError(f'{error}, or "auto"') from None


def duration_s(name: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    if match is None:
        raise ConfigError(f"{name} is {text!r}; give a number with a unit, such as 90s, 15m, 2h, 7d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


def lifetime_s(name: str, text: str) -> float | None:
    try:
        seconds = None if text == "none" else duration_s(name, text)
    except ConfigError as error:
        raise ConfigError(f'{error}, or "none"') from None
    if seconds == 0:
        raise ConfigError(f"{name} is {text!r}; give a time above 0, or \"none\"")
    return seconds


def choice(*known: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in known:
            raise ConfigError(f"{name} is {text!r}; give one of {', '.join(known)}")
        return text

    return parse


def switch(name: str, text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ConfigError(f"{name} is {text!r}; give 1 or 0")
    return text.lower() in ("1", "true", "yes", "on")


def device(name: str, text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        raise ConfigError(f"{name} is {text!r}; give auto, cpu, cuda or cuda:N")
    return text


def session_id(name: str, text: str) -> str:
    if not SESSION_ID.fullmatch(text):
        raise ConfigError(f"{name} is {text!r}; give 1 to 128 letters, digits, '-' or '_'")
    return text


def plain_text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is not valid text in this terminal's encoding") from None
    return text


def directory(name: str, text: str) -> Path:
    return _place(name, text, "the directory of the store")


def file(name: str, text: str) -> Path:
    return _place(name, text, "a file")


def _place(name: str, text: str, what: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(f"{name} is {text!r}; give {what}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} is {text!r}, but there is no such user's home; give the whole path") from None


STORE = Option(
    "--store",
    directory,
    None,
    f"directory of the store (default: {DEFAULT_PATH})",
    aliases=("--path",),
)
JSON = Option("--json", switch, False, "print one JSON object", switch=True)
TTL = Option("--ttl", lifetime_s, None, "new sessions end so long after their last turn: 12h, 7d (default: none)")
CONFIG = Option("--config", file, None, "TOML file of settings (default: ~/.config/kvstore/config.toml, if it exists)")


_SHOWN_AS = {  # in the help, by what reads the value
    "count": "N",
    "count_or_none": "N",
    "whole": "N",
    "size": "SIZE",
    "size_or_auto": "SIZE",
    "directory": "DIR",
    "duration_s": "TIME",
    "lifetime_s": "TIME",
    "seconds": "SECONDS",
    "engine_timeout": "SECONDS",
    "session_id": "ID",
    "body_size": "SIZE",
    "_limit": "N",
    "_interval_s": "SECONDS",
    "_sizes": "SIZES",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def command_parser(
    command: str, summary: str, groups: Mapping[str, Iterable[Option]], examples: str, arguments: str = ""
) -> Parser:
    """groups: flags under their headings in the help. arguments: what there may be beside flags, for the first line."""
    parser = Parser(
        prog=f"kvstore {command}",
        usage=" ".join(part for part in (f"kvstore {command}", arguments, "[FLAGS]") if part),
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"{examples}\n\n{EPILOG}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN),
        allow_abbrev=False,
        add_help=False,
    )
    for heading, options in groups.items():
        group = parser.add_argument_group(heading)
        for option in options:
            _add(group, option)
    common = parser.add_argument_group("settings and help")
    _add(common, CONFIG)
    common.add_argument("-h", "--help", action="help", help="show this text")
    return parser


def _add(parser: "argparse._ArgumentGroup", option: Option) -> None:
    if not option.flag.startswith("-"):
        parser.add_argument(option.key, metavar=option.flag, nargs="?", help=option.help)
        return
    shown = _SHOWN_AS.get(getattr(option.parse, "__name__", ""), option.key.split("_")[-1].upper())
    kind: dict[str, Any] = {"metavar": shown}
    if option.switch:
        kind = {"action": "store_const", "const": "1"}
    elif option.bare is not None:
        kind |= {"nargs": "?", "const": option.bare}
    elif option.repeats:
        kind["action"] = _Append
    parser.add_argument(option.flag, dest=option.key, help=option.help, **kind)
    if option.aliases:
        parser.add_argument(*option.aliases, dest=option.key, help=argparse.SUPPRESS, **kind)


class _Append(argparse.Action):
    """What is given again comes after a comma."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def asks_for_help(argv: Iterable[str]) -> bool:
    return any(argument in ("-h", "--help") for argument in argv)


def parse_arguments(parser: Parser, argv: list[str], most: str) -> dict[str, str | None]:
    """What was given, as texts. most: which arguments there may be beside flags, for the message."""
    namespace, unknown = parser.parse_known_intermixed_args(argv)  # `delete --tenant t ID` too
    for argument in unknown:
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
            flags = [name for action in shown for name in action.option_strings]
            raise UsageError(f"unknown flag {flag!r}{suggestion(flag, flags)}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; {most}")
    return vars(namespace)


def suggestion(word: str, known: Iterable[str]) -> str:
    known = list(known)
    begun = [one for one in known if one.startswith(word) and len(word.strip("-")) > 1]
    close = begun or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
