"""Waiting for worker threads: they wake whoever waits, who then polls the store under its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StoreProgress:
    """num: how many things have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num = 0
        self.closed = False

    def wake(self) -> None:
        """Called by worker threads."""
        with self._changed:
            self.num += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the number of ended things is no longer `seen`, or for the timeout. Returns the number."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.num != seen, timeout_s)
            return self.num

    def wait_until(self, is_so: Callable[[], bool], hurry: Callable[[], None], timeout_s: float | None) -> bool:
        """Ask until it is so. Returns False after the timeout, or when the store was closed.

        hurry: called before each time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.closed:
            seen = self.num
            hurry()
            if is_so():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            self.wait(seen, 0.05)
        return False
