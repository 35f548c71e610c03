"""Waiting for worker threads: they wake whoever waits, who then polls the store under its lock; and whether what is in
flight at one moment has ended while other things come after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

Stage = Callable[[], Iterable[Hashable]]


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


class Fence:
    """stages: each names what is in flight there now. What leaves a stage may go on in the next one, so a stage is
    looked at when all before it have ended.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = deque(stages)
        self._left: set[Hashable] | None = None  # of the first stage

    def has_ended(self) -> bool:
        """Called with the store's lock, as often as something may have ended."""
        while self._stages:
            now = set(self._stages[0]())
            self._left = now if self._left is None else self._left & now
            if self._left:
                return False
            self._stages.popleft()
            self._left = None
        return True
