"""Progress on stderr: a bar in a terminal, lines elsewhere, and nothing for what is done at once."""

import io
import sys
import threading

import pytest

from kvstore.service.command import progress


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
    def replace(awaited="", is_terminal=False):
        noted = Noted(awaited, is_terminal)
        monkeypatch.setattr(sys, "stderr", noted)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return noted

    return replace


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_done_at_once_shows_nothing(stderr, monkeypatch, is_terminal):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 3600.0)
    noted = stderr(is_terminal=is_terminal)
    with progress.progress("checking") as update:
        update(0.5)
    assert noted.getvalue() == ""


def test_lines_where_there_is_no_terminal(stderr, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress._Lines, "every_s", 0.01)
    noted = stderr("50% done")
    with progress.progress("checking") as update:
        update(None)
        update(0.5)
        assert noted.seen.wait(10)
    assert noted.getvalue().startswith("kvstore: checking since 0 s") and "\x1b" not in noted.getvalue()


def test_a_bar_in_a_terminal(stderr, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    noted = stderr("50%", is_terminal=True)
    with progress.progress("checking") as update:
        update(None)
        update(0.5)
        assert noted.seen.wait(10)
    assert "checking" in noted.getvalue()


def test_it_ends_with_an_interruption(stderr, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    noted = stderr("checking")
    with pytest.raises(KeyboardInterrupt), progress.progress("checking"):
        assert noted.seen.wait(10)
        raise KeyboardInterrupt
    assert "kvstore-progress" not in [thread.name for thread in threading.enumerate()]


def test_nothing_for_a_program(stderr):
    noted = stderr(is_terminal=True)
    with progress.progress("checking", is_silent=True) as update:
        update(0.5)
    assert noted.getvalue() == ""
