"""The `kvstore` command: flags, their KVSTORE_* mirrors, exit codes. Loads torch only when a model is really needed.

Exit codes: 0; 1 failure; 2 usage; 130 interrupted. Every failure is one line on stderr.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from engine.config import DTYPES, EngineConfig
from engine.prompts import SESSION_ID
from kvstore.config import CacheTiers, parse_size
from kvstore.errors import ConfigError, KVStoreError

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
COMMANDS = {"chat": "talk to a model in the terminal"}
EPILOG = """Every flag has a mirror in the environment: KVSTORE_MAX_MODEL_LEN=1024 is --max-model-len 1024.
Order: flag, environment, default."""


class UsageError(Exception):
    """The command line is wrong; the message is the one line that is shown."""


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. `parse` makes its value from (name, text) and raises ConfigError with the accepted forms."""

    flag: str
    parse: Callable[[str, str], object]
    default: object
    help: str

    @property
    def key(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        return "KVSTORE_" + self.key.upper()


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1")
    return int(text)


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ConfigError(f"{name} is {text!r}; give a whole number")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give a number") from None


def _size(name: str, text: str) -> int | str:
    try:
        return "auto" if text == "auto" else parse_size(text, name)
    except ConfigError as error:
        raise ConfigError(f'{error}, or "auto"') from None


def _dtype(name: str, text: str) -> str:
    if text not in DTYPES:
        raise ConfigError(f"{name} is {text!r}; give one of {', '.join(DTYPES)}")
    return text


def _device(name: str, text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        raise ConfigError(f"{name} is {text!r}; give auto, cpu, cuda or cuda:N")
    return text


def _session(name: str, text: str) -> str:
    if not SESSION_ID.fullmatch(text):
        raise ConfigError(f"{name} is {text!r}; give 1 to 128 letters, digits, '-' or '_'")
    return text


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is not valid text in this terminal's encoding") from None
    return text


ENGINE_OPTIONS = (
    Option("--max-model-len", _count, None, "context window in tokens (default: the model's)"),
    Option("--block-size", _count, 16, "tokens per KV block (default: 16)"),
    Option("--max-num-seqs", _count, 64, "requests running at once (default: 64)"),
    Option("--max-num-batched-tokens", _count, 2048, "tokens computed in one step (default: 2048)"),
    Option("--dtype", _dtype, "auto", "auto, float32, bfloat16 or float16 (default: auto, the model's)"),
    Option("--device", _device, "auto", "auto, cpu, cuda or cuda:N (default: auto)"),
    Option("--seed", _whole, 0, "seed of the engine's sampling (default: 0)"),
    Option("--hbm", _size, "auto", 'size of the KV block pool, such as 512MiB or 1.5GiB (default: "auto")'),
)
CHAT_OPTIONS = (
    Option("--temperature", _number, 0.0, "0 is greedy (default: 0)"),
    Option("--max-tokens", _count, None, "tokens of one answer at most (default: what remains of the window)"),
    Option("--system", _text, None, "system prompt"),
    Option("--session", _session, "terminal", "id of the conversation (default: terminal)"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None, engine_factory: Callable[..., object] | None = None) -> int:
    """Run the command and return its exit code. `engine_factory` replaces `engine.Engine` in tests."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), os.environ, engine_factory)
        sys.stdout.flush()
        return code
    except (UsageError, ConfigError) as error:
        return _fail(str(error), EXIT_USAGE)
    except KVStoreError as error:
        return _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`| head`). What Python still holds for stdout must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:  # ours or a library's bug: a person at a terminal gets one line of it
        return _fail(f"{type(error).__name__}: {error}"[:500], EXIT_FAILURE)


def _fail(message: str, code: int) -> int:
    print("kvstore: " + " ".join(message.split()), file=sys.stderr)
    return code


def _run(argv: list[str], environment: Mapping[str, str], engine_factory: Callable[..., object] | None) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"kvstore {_version()}")
        return EXIT_OK
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        known = ("--help", "--version") if kind == "flag" else COMMANDS
        raise UsageError(f"unknown {kind} {argv[0]!r}{_suggestion(argv[0], known)}")
    return _chat(argv[1:], environment, engine_factory)


def _overview() -> str:
    lines = ["usage: kvstore COMMAND [FLAGS]", "       kvstore --version", "", "commands:"]
    lines += [f"  {name:<8}{text}; see kvstore {name} --help" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", EPILOG])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvstore")
    except PackageNotFoundError:
        return "(not installed; run from a checkout)"


def _chat(argv: list[str], environment: Mapping[str, str], engine_factory: Callable[..., object] | None) -> int:
    parser = _command_parser("chat", ENGINE_OPTIONS + CHAT_OPTIONS)
    if any(argument in ("-h", "--help") for argument in argv):
        print(parser.format_help(), end="")
        return EXIT_OK
    given = _parse(parser, argv)
    values = _values(ENGINE_OPTIONS + CHAT_OPTIONS, given, environment)
    from service.terminal import ChatOptions, run_chat

    engine_arguments = {option.key: values[option.key] for option in ENGINE_OPTIONS if option.key != "hbm"}
    _check_engine(given["model"], engine_arguments)
    engine_arguments["cache_tiers"] = CacheTiers(hbm=values["hbm"])  # type: ignore[arg-type]
    options = ChatOptions(**{option.key: values[option.key] for option in CHAT_OPTIONS})  # type: ignore[arg-type]
    return run_chat(given["model"], engine_arguments, options, engine_factory)


def _check_engine(model: str | None, arguments: Mapping[str, object]) -> None:
    """What the engine would refuse, before anything is loaded and with the flags' names."""
    try:
        EngineConfig(model, **arguments)  # type: ignore[arg-type]
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from error


def _command_parser(command: str, options: Iterable[Option]) -> _Parser:
    parser = _Parser(
        prog=f"kvstore {command}",
        description=COMMANDS[command].capitalize() + ".",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a local directory or a hub id (default: the built-in model)"
    )
    for option in options:
        metavar = option.key.split("_")[-1].upper()
        parser.add_argument(option.flag, dest=option.key, metavar=metavar, help=option.help)
    return parser


def _parse(parser: _Parser, argv: list[str]) -> dict[str, str | None]:
    namespace, unknown = parser.parse_known_args(argv)
    for argument in unknown:
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            flags = [name for action in parser._actions for name in action.option_strings]
            raise UsageError(f"unknown flag {flag!r}{_suggestion(flag, flags)}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; one MODEL at most")
    return vars(namespace)


def _values(
    options: Iterable[Option], given: Mapping[str, str | None], environment: Mapping[str, str]
) -> dict[str, object]:
    values = {}
    for option in options:
        text, name = given[option.key], option.flag
        if text is None and environment.get(option.variable):
            text, name = environment[option.variable], option.variable
        values[option.key] = option.default if text is None else option.parse(name, text)
    return values


def _suggestion(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
