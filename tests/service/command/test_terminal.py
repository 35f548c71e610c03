"""A conversation at a real terminal."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import TIMEOUT_S, wait_until

ROOT = Path(__file__).parents[3]
CHATS = """
import signal, sys
from kvstore.service.command import cli
from tests.support.service.fake_engine import FakeEngine
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with it ignored
sys.exit(cli.main(["chat", "--config", "/dev/null"], FakeEngine))
"""


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        within = ("sh", "-c", 'exec "$@" <"$0"', os.ttyname(theirs))  # what it opens first becomes its terminal
        self.process = subprocess.Popen(
            [*within, *command], cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._said = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def hear(self, words: str) -> None:
        """Wait until it has said this, after what was heard before."""

        def is_said() -> bool:
            with suppress(BlockingIOError):
                self._said += os.read(self._ours, 65536)
            return words.encode() in self._said

        wait_until(is_said, words)
        self._said = self._said.partition(words.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_ctrl_c_clears_the_line_and_ends_the_program_on_an_empty_one():
    terminal = Terminal(sys.executable, "-c", CHATS)
    try:
        terminal.hear("you> ")
        terminal.type("not this")
        terminal.hear("not this")
        terminal.type("\x03")
        terminal.hear("you> ")
        terminal.type("but this\n")
        terminal.hear("BUT THIS")
        terminal.hear("you> ")
        terminal.type("\x03")
        assert terminal.process.wait(TIMEOUT_S) == 130
    finally:
        terminal.close()
