"""A program at a terminal of its own, and a person who types there."""

import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers where the cursor is


class Terminal:
    """A program at a terminal of its own, as a context, which ends it. signals: also where the keys for them are."""

    def __init__(self, *command: str, signals: bool = True) -> None:
        self._ours, theirs = pty.openpty()
        within = ("sh", "-c", 'exec "$@" <"$0"', os.ttyname(theirs))  # what it opens first becomes its terminal
        self.process = subprocess.Popen(
            [*(within if signals else ()), *command], cwd=ROOT, env=ENVIRONMENT, stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True,
        )  # fmt: skip
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
