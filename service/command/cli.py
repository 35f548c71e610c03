"""The `kvstore` command: its commands and exit codes. Loads torch only when a command needs a model.

Exit codes: 0; 1 failure; 2 bad input; 3 the store is in use and its owner does not answer; 4 damage found; 5 the
server's engine stays down; 130 interrupted.
Every failure is one line on stderr.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from kvstore import __version__
from kvstore.errors import ConfigError, HubError, KVStoreError, ModelError, StoreLockedError
from kvstore.service.settings.config_file import Told, known_keys, told
from kvstore.service.settings.options import COMMANDS, EPILOG, REMOVED, Command, UsageError, key_of, nearest, suggestion

OTHERS = {"CONFIG", "FLEET_SECRET", "REDIS_PASSWORD"}  # that are read, beside the flags of a command
CUTOFF = 0.7  # what Kubernetes sets for a service of this name is further from ours
_MODULES = {"plan": "plan.run", "doctor": "doctor", "vllm-config": "vllm_config"}
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_IN_USE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def tell_misspelt(environment: Mapping[str, str]) -> None:
    """One line on stderr for each variable that is nearly the name of one that some command reads."""
    given = {name.removeprefix("KVSTORE_") for name in environment if name.startswith("KVSTORE_")}
    given -= OTHERS | {key.upper() for key in REMOVED}  # which are refused
    if not given or not given - {key.upper() for keys in known_keys().values() for key in keys}:
        return
    commands = [command_of(name)[1] for name in COMMANDS]  # loads every command, hence only now
    options = [one for command in commands for one in command.options if one.mirrored]
    known = OTHERS | {key_of(flag).upper() for one in options for flag in (one.flag, *one.aliases)}
    for name in sorted(given - known):
        for meant in nearest(name, known, CUTOFF):
            print(f"kvstore: nothing reads KVSTORE_{name}; did you mean KVSTORE_{meant}?", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), os.environ)
        sys.stdout.flush()
        return code
    except (UsageError, ConfigError, ModelError) as error:
        return _fail(str(error), EXIT_FAILURE if isinstance(error, HubError) else EXIT_USAGE)
    except StoreLockedError as error:
        known = error.pid is None or str(error.pid) in str(error)
        return _fail(str(error) if known else f"{error} (process {error.pid})", EXIT_IN_USE)
    except KVStoreError as error:
        return _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone (`| head`). Python must not raise again at exit for what it has buffered for stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:  # ours or a library's bug: a person at a terminal gets one line of it
        return _fail(f"{type(error).__name__}: {error}"[:500], EXIT_FAILURE)


def _fail(message: str, code: int) -> int:
    print("kvstore: " + " ".join(message.split()), file=sys.stderr)
    return code


def _run(argv: list[str], environment: Mapping[str, str]) -> int:
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
    tell_misspelt(environment)
    run, command = command_of(argv[0])
    given = told(command, argv[1:], environment)
    return EXIT_OK if given is None else run(given)


def command_of(name: str) -> tuple[Callable[[Told], int], Command]:
    """What runs a command and returns its exit code, and its flags. Loads what it needs."""
    if name in ("serve", "chat"):
        from kvstore.service.settings.engine_options import engine_command

        return partial(_run_engine, name), engine_command(name)
    if name == "completion":
        from kvstore.service.command.completion import COMMAND, run_completion

        return partial(run_completion, [command_of(one)[1] for one in COMMANDS if one != name]), COMMAND
    if name in _MODULES:
        module = import_module(f"kvstore.service.command.{_MODULES[name]}")
        return module.run, module.COMMAND
    from kvstore.service.command.store import STORE_COMMANDS

    return STORE_COMMANDS[name]


def _overview() -> str:
    lines = ["usage: kvstore COMMAND [FLAGS]", "       kvstore --version", "", "commands:"]
    lines += [f"  {name:<12}{text}; see kvstore {name} --help" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", EPILOG])


def _run_engine(name: str, given: Told) -> int:
    from kvstore.service.settings.config_file import as_toml
    from kvstore.service.settings.engine_options import arguments_of, naming_flags, with_tiers

    settings = with_tiers(given.settings, keeps=name == "serve")
    asks_for_config = settings.pop("print_config").value
    arguments, options = arguments_of(name, settings)
    if asks_for_config:
        print(as_toml(settings.values()))
        return EXIT_OK
    with naming_flags(settings):
        return _with_engine(name, arguments, options)


def _with_engine(name: str, arguments: dict[str, Any], options: Any) -> int:
    model = arguments.pop("model", None)
    if name == "serve" and options.replicas is not None:
        from kvstore.service.replicas.app import run_replicas

        return run_replicas(model, arguments, options)
    if name == "serve":
        from kvstore.service.server import run_serve

        return run_serve(model, arguments, options)
    from kvstore.service.command.terminal import run_chat

    return run_chat(model, arguments, options)


if __name__ == "__main__":
    sys.exit(main())
