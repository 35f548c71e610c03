"""A conversation at a real terminal; progress as a bar in one, as lines elsewhere, and not of what is done at once."""

import io
import json
import sys
import threading
from contextlib import ExitStack, redirect_stderr

import pytest

from kvstore.service.command.progress import progress
from tests.support.terminal import Terminal
from tests.support.waiting import TIMEOUT_S

CHATS = """
import signal, sys
from kvstore.service.command import cli, terminal
from tests.support.service.fake_engine import FakeEngine
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with it ignored
terminal.open_engine = FakeEngine
sys.exit(cli.main(["chat", "--config", "/dev/null"]))
"""


def test_ctrl_c_clears_the_line_and_ends_the_program_on_an_empty_one():
    with Terminal(sys.executable, "-c", CHATS) as terminal:
        terminal.hear("you>")
        terminal.type("not this")
        terminal.hear("not this")
        terminal.type("\x03")
        terminal.hear("you>")
        terminal.type("but this\r")
        terminal.hear("BUT THIS")
        terminal.hear("you>")
        terminal.type("\x03")
        assert terminal.process.wait(TIMEOUT_S) == 130


def test_lines_pasted_and_added_are_one_message_and_the_arrows_bring_it_back():
    with Terminal(sys.executable, "-c", CHATS) as terminal:
        terminal.hear("you>")
        terminal.type("\x1b[200~first\nsecond\x1b[201~")
        terminal.hear("second")
        terminal.type("\x1b\rthird")
        terminal.hear("third")
        terminal.type("\r")
        terminal.hear("FIRST\r\nSECOND\r\nTHIRD")
        terminal.hear("you>")
        terminal.type("\x1b[A")
        terminal.hear("third")
        terminal.type("!\r")
        terminal.hear("FIRST\r\nSECOND\r\nTHIRD!")
        terminal.hear("you>")
        terminal.type("/he")
        terminal.hear("/he")
        terminal.type("\t")
        terminal.hear("lp")  # what is there already is not drawn again
        terminal.type("\r")
        terminal.hear("Alt-Enter begins another line")
        terminal.hear("you>")
        terminal.type("\x04")
        assert terminal.process.wait(TIMEOUT_S) == 0


def test_a_resumed_conversation_is_the_history_of_the_prompt(tmp_path):
    """With the real engine: what was said before a restart comes back with the arrow keys, and is retried in a fork."""
    command = [sys.executable, "-m", "kvstore.service.command.cli", "chat", "--config", "/dev/null", "--store",
               str(tmp_path / "store"), "--disk", "64MiB", "--hbm", "4MiB", "--max-tokens", "4"]  # fmt: skip
    for lines in (["hello there\r"], ["\x1b[A!\r", "/retry\r", "/undo\r"]):
        with Terminal(*command, signals=False) as terminal:
            for line in lines:
                terminal.hear("you>")
                terminal.type(line)
                terminal.hear("without the last turn" if line.startswith("/") else "prompt ")
            terminal.hear("you>")
            terminal.type(f"/save {tmp_path}/{len(lines)}.json\r")
            terminal.hear("messages in")
            terminal.hear("you>")
            terminal.type("/save ~nobody/x.json\r")
            terminal.hear("cannot be written")
            terminal.hear("you>")
            terminal.type("\x04")
            assert terminal.process.wait(TIMEOUT_S) == 0
    said = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 3)]
    assert [message["content"] for message in said[0]["messages"]][::2] == ["hello there"]
    assert said[1]["session_id"] == "terminal-3" and said[1]["messages"] == said[0]["messages"]


class Noted(io.StringIO):
    """A stderr that says when something that was waited for has been written."""

    def __init__(self, awaited, is_terminal):
        super().__init__()
        self.awaited, self.is_terminal, self.seen = awaited, is_terminal, threading.Event()

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        written = super().write(text)
        if self.awaited in self.getvalue():
            self.seen.set()
        return written


@pytest.fixture
def stderr(monkeypatch):
    with ExitStack() as stack:

        def replace(awaited="", is_terminal=False):
            noted = stack.enter_context(redirect_stderr(Noted(awaited, is_terminal)))
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.delenv("NO_COLOR", raising=False)
            return noted

        yield replace


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_done_at_once_shows_nothing(stderr, is_terminal):
    noted = stderr(is_terminal=is_terminal)
    with progress("checking", after_s=3600.0) as update:
        update(0.5)
    assert "checking" not in noted.getvalue()  # whatever an exporter of another test may still say


def test_lines_where_there_is_no_terminal(stderr):
    noted = stderr("50% done")
    with progress("checking", after_s=0.0, every_s=0.01) as update:
        update(None)
        update(0.5)
        assert noted.seen.wait(TIMEOUT_S)
    assert noted.getvalue().startswith("kvstore: checking since 0 s") and "\x1b" not in noted.getvalue()


def test_a_bar_in_a_terminal(stderr):
    noted = stderr("50%", is_terminal=True)
    with progress("checking", after_s=0.0) as update:
        update(None)
        update(0.5)
        assert noted.seen.wait(TIMEOUT_S)
    assert "checking" in noted.getvalue()


def test_it_ends_with_an_interruption(stderr):
    noted = stderr("checking")
    with pytest.raises(KeyboardInterrupt), progress("checking", after_s=0.0):
        assert noted.seen.wait(TIMEOUT_S)
        raise KeyboardInterrupt
    assert "kvstore-progress" not in [thread.name for thread in threading.enumerate()]


def test_nothing_for_a_program(stderr):
    noted = stderr(is_terminal=True)
    with progress("checking", is_silent=True) as update:
        update(0.5)
    assert noted.getvalue() == ""
