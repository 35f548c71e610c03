"""Progress on stderr: a bar in a terminal, lines elsewhere, and nothing for what is done at once."""

import io
import threading
from contextlib import ExitStack, redirect_stderr

import pytest

from kvstore.service.command.progress import progress
from tests.support.waiting import TIMEOUT_S


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
    assert noted.getvalue() == ""


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
