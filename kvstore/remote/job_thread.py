"""A thread that does jobs one after another. `run` belongs to its owner, and handles all errors of a job."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class JobThread(Generic[J]):
    """One thread that does jobs one after another. most: how many jobs may wait.

    rest: called when there is no job. It returns after how many seconds to call it again; None: not before the next
    job.
    """

    def __init__(
        self, name: str, run: Callable[[J], None], most: int, rest: Callable[[], float | None] = lambda: None
    ) -> None:
        self._run, self._most, self._rest = run, most, rest
        self._ready = threading.Condition()
        self._jobs: deque[J] = deque()
        self._is_running = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: J) -> bool:
        """Returns False if too many are waiting."""
        with self._ready:
            if len(self._jobs) >= self._most or self._closing:
                return False
            self._jobs.append(job)
            self._ready.notify()
            return True

    def __len__(self) -> int:
        """The number of jobs that wait or run."""
        with self._ready:
            return len(self._jobs) + self._is_running

    def close(self, timeout_s: float) -> bool:
        """End after the running job, and drop those that wait. Returns False if that takes longer."""
        with self._ready:
            self._closing = True
            self._jobs.clear()
            self._ready.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            with self._ready:
                self._is_running = False

    def _next(self) -> J | None:
        while True:
            wait_s = self._rest()
            with self._ready:
                if not self._jobs and not self._closing:
                    self._ready.wait(wait_s)
                if self._closing:
                    return None
                if self._jobs:
                    self._is_running = True
                    return self._jobs.popleft()
