"""Completion in real shells, at a terminal where they have one; those that are not installed are skipped."""

import shutil
import subprocess

import pytest

from kvstore.service.command.completion import SHELLS
from tests.support.terminal import Terminal
from tests.support.waiting import TIMEOUT_S

BEFORE = {"bash": "", "zsh": "autoload -U compinit; compinit -u -d {folder}/dump; "}


@pytest.fixture
def script(run, tmp_path):
    """The file of a shell's script; skips where the shell is missing."""

    def made(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"needs {shell}")
        code, out, err = run("completion", shell)
        assert (code, err) == (0, "")
        (tmp_path / "script").write_text(out)
        return tmp_path / "script"

    return made


@pytest.mark.parametrize(("shell", "flags"), [("bash", ("--norc", "--noprofile")), ("zsh", ("-f",))])
def test_tab_completes_commands_flags_and_values(script, tmp_path, shell, flags):
    file = script(shell)
    with Terminal(shell, *flags, "-i") as terminal:
        # What is typed has the word in two parts, so that only what it prints has it whole.
        terminal.type(BEFORE[shell].format(folder=tmp_path) + f'eval "$(cat {file})"; echo read"y"\r')
        terminal.hear("ready")
        for begun, rest in (("vllm-c", "onfig"), ("serve --ssl-k", "eyfile"), ("serve --policy retu", "rn")):
            terminal.type(f"\x15kvstore {begun}\t")
            terminal.hear(f"kvstore {begun}{rest}")
        terminal.type("\x15kvstore completion fi\t")
        terminal.hear("kvstore completion fish")


def test_fish_completes(script):
    file = script("fish")

    def completed(line):
        command = ["fish", "--no-config", "-c", f"source {file}; complete -C '{line}'"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        return [one.partition("\t")[0] for one in out.splitlines()]

    assert completed("kvstore comp") == ["compact", "completion"]
    assert completed("kvstore serve --ssl-k") == ["--ssl-keyfile"]
    assert completed("kvstore serve --policy ") == ["auto", "fifo", "lru", "return"]


def test_a_shell_must_be_named_and_known(run):
    for arguments in ((), ("tcsh",)):
        code, _, err = run("completion", *arguments)
        assert code == 2 and all(shell in err for shell in SHELLS) and err.count("\n") == 1
