"""Flags of the `kvstore` command, their KVSTORE_* mirrors, and the forms of values they accept. Knows no command."""

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine.prompts import SESSION_ID
from kvstore.config import parse_size
from kvstore.errors import ConfigError

DEFAULT_PATH = "~/.cache/kvstore"
EPILOG = """Every flag has a mirror in the environment: KVSTORE_MAX_MODEL_LEN=1024 is --max-model-len 1024.
Order: flag, environment, default. What a command deletes is never taken from the environment."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class UsageError(Exception):
    """The command line is wrong; the message is the one line that is shown."""


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. `parse` makes its value from (name, text) and raises ConfigError with the accepted forms.

    switch: it takes no value on the command line, where it means "1". mirrored: false for what a command destroys,
    which is never taken from the environment.
    """

    flag: str
    parse: Callable[[str, str], object]
    default: object
    help: str
    switch: bool = False
    mirrored: bool = True

    @property
    def key(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        return "KVSTORE_" + self.key.upper()


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
    if not text or "\0" in text:
        raise ConfigError(f"{name} is {text!r}; give the directory of the store")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} is {text!r}, but there is no such user's home; give the whole path") from None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def command_parser(command: str, description: str, options: Iterable[Option], examples: str) -> Parser:
    parser = Parser(
        prog=f"kvstore {command}",
        description=description,
        epilog=f"{examples}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in options:
        if option.switch:
            parser.add_argument(option.flag, dest=option.key, action="store_const", const="1", help=option.help)
        else:
            metavar = option.key.split("_")[-1].upper()
            parser.add_argument(option.flag, dest=option.key, metavar=metavar, help=option.help)
    return parser


def asks_for_help(argv: Iterable[str]) -> bool:
    return any(argument in ("-h", "--help") for argument in argv)


def parse_arguments(parser: Parser, argv: list[str], most: str) -> dict[str, str | None]:
    """What was given, as texts. most: which arguments there may be beside flags, for the message."""
    namespace, unknown = parser.parse_known_intermixed_args(argv)  # `delete --tenant t ID` too
    for argument in unknown:
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            flags = [name for action in parser._actions for name in action.option_strings]
            raise UsageError(f"unknown flag {flag!r}{suggestion(flag, flags)}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; {most}")
    return vars(namespace)


def option_values(
    options: Iterable[Option], given: Mapping[str, str | None], environment: Mapping[str, str]
) -> dict[str, object]:
    values = {}
    for option in options:
        text, name = given[option.key], option.flag
        if text is None and option.mirrored and environment.get(option.variable):
            text, name = environment[option.variable], option.variable
        values[option.key] = option.default if text is None else option.parse(name, text)
    return values


def suggestion(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
