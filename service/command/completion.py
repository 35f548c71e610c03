"""`kvstore completion`: a script for a shell that completes commands, flags, and the values that are known. Knows flags
alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvstore.config import one_of
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.options import COMMANDS, Command, Option, UsageError, command_parser

SHELLS = ("bash", "zsh", "fish")
COMMAND = Command(
    "completion",
    {"shell": (Option("SHELL", one_of(*SHELLS), None, ", ".join(SHELLS), mirrored=False),)},
    "examples:\n  kvstore completion fish > ~/.config/fish/completions/kvstore.fish\n"
    '  eval "$(kvstore completion bash)"                             in ~/.bashrc\n'
    '  eval "$(kvstore completion zsh)"                              in ~/.zshrc, after compinit',
    "SHELL",
    "one SHELL at most",
)


def run_completion(commands: Sequence[Command], given: Told) -> int:
    """Print the script. commands: the others. Raises UsageError where no shell is named."""
    import shtab  # here, as no other command needs it

    shell = given.values["shell"]
    if shell is None:
        raise UsageError(f"completion needs the name of a shell: {', '.join(SHELLS)}")
    parser = argparse.ArgumentParser("kvstore")
    parser.add_argument("-V", "--version", action="version", help="show the version")
    sub = parser.add_subparsers()
    for command in (*commands, COMMAND):
        known = {option.key: option for option in command.options}
        parts = sub.add_parser(
            command.name, parents=[command_parser(command)], add_help=False, help=COMMANDS[command.name]
        )
        for action in parts._actions:
            reads = None if action.dest not in known else known[action.dest].reads
            if reads is not None and reads.among:
                action.choices = reads.among
            elif reads is not None and Path in reads.types:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0
