"""What the reader of messages waits for: the channel of whichever process lives, or a call of `wake`."""

from __future__ import annotations

import os
import selectors
import weakref
from contextlib import suppress


class Readiness:
    """selector: a process registers its channel with it. Any thread may wake the reader."""

    def __init__(self) -> None:
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._alarm, selectors.EVENT_READ)
        weakref.finalize(self, _close, self.selector, self._alarm)

    def fileno(self) -> int:
        """A descriptor, always the same, that is readable when there is something to read."""
        return self.selector.fileno()

    def wait(self, timeout_s: float) -> None:
        self.selector.select(timeout_s)

    def wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def drain(self) -> None:
        """Forget the calls of `wake` so far. Call it before reading what they announced."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)


def _close(selector: selectors.BaseSelector, alarm: int) -> None:
    selector.close()
    os.close(alarm)
