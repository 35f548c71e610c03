"""Decides whether a shared store is asked at all: after a failure, nobody waits for it until a probe has succeeded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_S, LAST_S = 1.0, 30.0


class Breaker:
    """Any thread may use it. error: why it is open; None when it is closed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._interval_s, self._probe_at_s, self._closed_s = FIRST_S, 0.0, clock()
        self.error: str | None = None
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self.error is not None

    def failed(self, why: str) -> None:
        """Open it: an answer did not come. If that happens again soon, the probe waits longer. What other threads were
        waiting for meanwhile fails by the same cause, and changes nothing.
        """
        with self._lock:
            if self.error is None:
                self.num_opened += 1
                if self._clock() - self._closed_s > 4 * self._interval_s:
                    self._interval_s = FIRST_S
                self._wait(why)

    def probe_failed(self, why: str) -> None:
        """The next probe waits longer."""
        with self._lock:
            self.num_opened += self.error is None
            self._wait(why)

    def _wait(self, why: str) -> None:
        self.error, self._probe_at_s = why, self._clock() + self._interval_s
        self._interval_s = min(2 * self._interval_s, LAST_S)

    def probe_succeeded(self) -> None:
        with self._lock:
            self.error, self._closed_s = None, self._clock()

    @property
    def probe_in_s(self) -> float | None:
        """How long to wait before the next probe; None when it is closed."""
        return None if self.error is None else max(0.0, self._probe_at_s - self._clock())
