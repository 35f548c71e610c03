"""The `kvstore` command: its commands and exit codes. Loads torch only when a model is really needed.

Exit codes: 0; 1 failure; 2 usage; 3 the store is in use and its owner does not answer; 4 damage found; 130
interrupted.
Every failure is one line on stderr.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from engine.config import DTYPES, EVICTIONS, EngineConfig
from kvstore.config import CacheTiers
from kvstore.errors import ConfigError, KVStoreError, StoreLockedError
from service.options import (
    DEFAULT_PATH,
    EPILOG,
    Option,
    UsageError,
    asks_for_help,
    choice,
    command_parser,
    count,
    device,
    directory,
    number,
    option_values,
    parse_arguments,
    plain_text,
    session_id,
    size,
    size_or_auto,
    suggestion,
    whole,
)

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_IN_USE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = {
    "chat": "talk to a model in the terminal",
    "stats": "show what a store holds and how it is used",
    "evict": "give up cached KV by age, model, session or size",
    "verify": "check everything that is stored",
    "compact": "give the space of what was deleted back to the file system",
    "sessions": "list or delete stored conversations",
    "plan": "predict hit rate and time to first token for other sizes of the tiers",
}
ENGINE_OPTIONS = (
    Option("--max-model-len", count, None, "context window in tokens (default: the model's)"),
    Option("--block-size", count, 16, "tokens per KV block (default: 16)"),
    Option("--max-num-seqs", count, 64, "requests running at once (default: 64)"),
    Option("--max-num-batched-tokens", count, 2048, "tokens computed in one step (default: 2048)"),
    Option("--dtype", choice(*DTYPES), "auto", "auto, float32, bfloat16 or float16 (default: auto, the model's)"),
    Option("--device", device, "auto", "auto, cpu, cuda or cuda:N (default: auto)"),
    Option(
        "--eviction",
        choice(*EVICTIONS),
        "auto",
        "what goes first: auto, fifo, lru or return, the least likely to come back (default: auto)",
    ),
    Option("--seed", whole, 0, "seed of the engine's sampling (default: 0)"),
)
TIER_OPTIONS = (
    Option("--hbm", size_or_auto, "auto", 'size of the KV block pool, such as 512MiB or 1.5GiB (default: "auto")'),
    Option("--cpu", size, None, "size of the CPU tier (default: 1GiB with a disk tier, else 0)"),
    Option("--disk", size, None, "size of the disk tier (default: 8GiB with --path, else 0)"),
    Option("--path", directory, None, f"directory of the store; makes conversations durable (default: {DEFAULT_PATH})"),
)
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
)
CHAT_EXAMPLES = """examples:
  kvstore chat
  kvstore chat --path ~/store --disk 20GiB --session anna    kept, and resumed the next time
  echo "Hello" | kvstore chat Qwen/Qwen3-0.6B --max-tokens 100"""
DEFAULT_DISK, DEFAULT_CPU = "8GiB", "1GiB"


def main(argv: Sequence[str] | None = None, engine_factory: Callable[..., object] | None = None) -> int:
    """Run the command and return its exit code. `engine_factory` replaces `engine.Engine` in tests."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), os.environ, engine_factory)
        sys.stdout.flush()
        return code
    except (UsageError, ConfigError) as error:
        return _fail(str(error), EXIT_USAGE)
    except StoreLockedError as error:
        known = error.pid is None or str(error.pid) in str(error)
        return _fail(str(error) if known else f"{error} (process {error.pid})", EXIT_IN_USE)
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
        raise UsageError(f"unknown {kind} {argv[0]!r}{suggestion(argv[0], known)}")
    if argv[0] == "chat":
        return _chat(argv[1:], environment, engine_factory)
    if argv[0] == "plan":
        from service.plan import run_plan

        return run_plan(COMMANDS["plan"], argv[1:], environment)
    from service.store_commands import run_store_command

    return run_store_command(argv[0], COMMANDS[argv[0]], argv[1:], environment)


def _overview() -> str:
    lines = ["usage: kvstore COMMAND [FLAGS]", "       kvstore --version", "", "commands:"]
    lines += [f"  {name:<10}{text}; see kvstore {name} --help" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", EPILOG])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvstore")
    except PackageNotFoundError:
        return "(not installed; run from a checkout)"


def _chat(argv: list[str], environment: Mapping[str, str], engine_factory: Callable[..., object] | None) -> int:
    options = ENGINE_OPTIONS + TIER_OPTIONS + CHAT_OPTIONS
    parser = command_parser("chat", COMMANDS["chat"].capitalize() + ".", options, CHAT_EXAMPLES)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a local directory or a hub id (default: the built-in model)"
    )
    if asks_for_help(argv):
        print(parser.format_help(), end="")
        return EXIT_OK
    given = parse_arguments(parser, argv, "one MODEL at most")
    values = option_values(options, given, environment)
    from service.terminal import ChatOptions, run_chat

    engine_arguments = {option.key: values[option.key] for option in ENGINE_OPTIONS}
    _check_engine(given["model"], engine_arguments)
    engine_arguments["cache_tiers"] = _cache_tiers(values)
    chat = ChatOptions(**{option.key: values[option.key] for option in CHAT_OPTIONS})  # type: ignore[arg-type]
    return run_chat(given["model"], engine_arguments, chat, engine_factory)


def _cache_tiers(values: Mapping[str, object]) -> CacheTiers:
    """A path alone means a disk tier, and a disk tier a CPU tier before it; what is given counts."""
    cpu, disk, path = values["cpu"], values["disk"], values["path"]
    if disk is None:
        disk = DEFAULT_DISK if path is not None else 0
    if cpu is None:
        cpu = DEFAULT_CPU if disk else 0
    if disk and path is None:
        path = directory("--path", DEFAULT_PATH)
    return CacheTiers(hbm=values["hbm"], cpu=cpu, disk=disk, path=path)  # type: ignore[arg-type]


def _check_engine(model: str | None, arguments: Mapping[str, object]) -> None:
    """What the engine would refuse, before anything is loaded and with the flags' names."""
    try:
        EngineConfig(model, **arguments)  # type: ignore[arg-type]
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from error


if __name__ == "__main__":
    sys.exit(main())
