"""The `kvstore` command: its commands and exit codes. Loads torch only when a model is really needed.

Exit codes: 0; 1 failure; 2 usage; 3 the store is in use and its owner does not answer; 4 damage found; 5 the
server's engine stays down; 130 interrupted.
Every failure is one line on stderr.
"""

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore import __version__
from kvstore.errors import ConfigError, KVStoreError, StoreLockedError
from service.options import EPILOG, Option, UsageError, asks_for_help, command_parser, parse_arguments, suggestion

if TYPE_CHECKING:
    from service.config_file import Setting

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_IN_USE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = {
    "serve": "answer over HTTP: sessions, the OpenAI API, a web page",
    "chat": "talk to a model in the terminal",
    "stats": "show what a store holds and how it is used",
    "evict": "give up cached KV by age, model, session or size",
    "verify": "check everything that is stored",
    "compact": "give the space of what was deleted back to the file system",
    "sessions": "list, show or delete stored conversations",
    "plan": "predict hit rate and time to first token for other sizes of the tiers",
}
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
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"kvstore {__version__}")
        return EXIT_OK
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        known = ("--help", "--version") if kind == "flag" else COMMANDS
        raise UsageError(f"unknown {kind} {argv[0]!r}{suggestion(argv[0], known)}")
    if argv[0] in ("serve", "chat"):
        run = _serve if argv[0] == "serve" else _chat
        return run(argv[1:], environment, engine_factory)
    if argv[0] == "plan":
        from service.plan import run_plan

        return run_plan(COMMANDS["plan"], argv[1:], environment)
    from service.store_commands import run_store_command

    return run_store_command(argv[0], COMMANDS[argv[0]], argv[1:], environment)


def _overview() -> str:
    lines = ["usage: kvstore COMMAND [FLAGS]", "       kvstore --version", "", "commands:"]
    lines += [f"  {name:<10}{text}; see kvstore {name} --help" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", EPILOG])


def _serve(argv: list[str], environment: Mapping[str, str], engine_factory: Callable[..., object] | None) -> int:
    from service.serve_options import SERVE_OPTIONS, serve_options

    settings = _settings("serve", SERVE_OPTIONS, SERVE_EXAMPLES, argv, environment)
    if settings is None:
        return EXIT_OK
    from service.engine_options import engine_arguments

    arguments = engine_arguments(settings)
    options = serve_options({name: setting.value for name, setting in settings.items()})
    if _prints_config(settings):
        return EXIT_OK
    from service.server import run_serve

    return run_serve(settings["model"].value, arguments, options, engine_factory)  # type: ignore[arg-type]


def _chat(argv: list[str], environment: Mapping[str, str], engine_factory: Callable[..., object] | None) -> int:
    from service.engine_options import CHAT_OPTIONS, engine_arguments

    settings = _settings("chat", CHAT_OPTIONS, CHAT_EXAMPLES, argv, environment)
    if settings is None:
        return EXIT_OK
    from service.terminal import ChatOptions, run_chat

    arguments = engine_arguments(settings)
    options = ChatOptions(**{option.key: settings[option.key].value for option in CHAT_OPTIONS})  # type: ignore[arg-type]
    if _prints_config(settings):
        return EXIT_OK
    return run_chat(settings["model"].value, arguments, options, engine_factory)  # type: ignore[arg-type]


def _settings(
    name: str, own: Sequence[Option], examples: str, argv: list[str], environment: Mapping[str, str]
) -> "dict[str, Setting] | None":
    """What a command that runs an engine is told; None when it was asked for its help, which is printed then."""
    from service.config_file import effective
    from service.engine_options import (
        ENGINE_OPTIONS,
        MODEL,
        PRINT_CONFIG,
        SERVE_TIER_OPTIONS,
        TIER_OPTIONS,
        with_tiers,
    )

    is_server = name == "serve"
    groups = {
        "model and engine": (MODEL, *ENGINE_OPTIONS),
        "tiers": SERVE_TIER_OPTIONS if is_server else TIER_OPTIONS,
        "service" if is_server else "conversation": (*own, PRINT_CONFIG),
    }
    parser = command_parser(name, COMMANDS[name], groups, examples, "[MODEL]")
    if asks_for_help(argv):
        print(parser.format_help(), end="")
        return None
    given = parse_arguments(parser, argv, "one MODEL at most")
    options = itertools.chain.from_iterable(groups.values())
    return with_tiers(effective(name, options, given, environment), keeps=is_server)


def _prints_config(settings: "dict[str, Setting]") -> bool:
    """Print the settings when that was asked for."""
    from service.config_file import as_toml

    asked = settings.pop("print_config").value
    if asked:
        print(as_toml(settings.values()))
    return bool(asked)


if __name__ == "__main__":
    sys.exit(main())
