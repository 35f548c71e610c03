"""Threads that work for a store: one does jobs in order, others read by rank. Their owner bounds what it submits.

Knows no network. `run` belongs to the owner and handles all errors of a job.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.disk.io_queue import AT_ONCE, Rank, RankedReads, Read

J = TypeVar("J")


class Lane(Generic[J]):
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
        self._begun_s: float | None = None
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
            return len(self._jobs) + (self._begun_s is not None)

    @property
    def running_s(self) -> float:
        """For how long the running job has been running; 0 if there is none."""
        begun_s = self._begun_s
        return 0.0 if begun_s is None else time.monotonic() - begun_s

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
                self._begun_s = None

    def _next(self) -> J | None:
        while True:
            wait_s = self._rest()
            with self._ready:
                if not self._jobs and not self._closing:
                    self._ready.wait(wait_s)
                if self._closing:
                    return None
                if self._jobs:
                    self._begun_s = time.monotonic()
                    return self._jobs.popleft()


class ReadLanes:
    """Threads that read in batches, the smallest rank first; a batch has one rank.

    batch_bytes: the size of the next batch, asked before each. A batch has at least one read.
    """

    def __init__(
        self, name: str, run: Callable[[list[Read]], None], num_threads: int, batch_bytes: Callable[[], int]
    ) -> None:
        self._run, self._batch_bytes = run, batch_bytes
        self._ready = threading.Condition()
        self._reads = RankedReads()
        self._began: dict[int, float] = {}  # when its batch began, by thread
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read, rank: Rank = AT_ONCE) -> None:
        with self._ready:
            self._reads.add(read, rank)
            self._ready.notify()

    def change_rank(self, arena_block: int, rank: Rank) -> None:
        """Change a queued read's rank; one that runs or has ended stays as it is."""
        with self._ready:
            self._reads.change_rank(arena_block, rank)

    def cancel(self, arena_block: int) -> bool:
        """Drop a queued read. Returns False if it runs or has ended."""
        with self._ready:
            return self._reads.cancel(arena_block)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest batch has been running."""
        with self._ready:
            return time.perf_counter() - min(self._began.values()) if self._began else 0.0

    @property
    def num_active(self) -> int:
        """The number of threads at work."""
        with self._ready:
            return len(self._began)

    @property
    def is_idle(self) -> bool:
        with self._ready:
            return not self._began and not self._reads

    def close(self, timeout_s: float) -> bool:
        """End after the running batches, and drop what waits. Returns False if that takes longer."""
        with self._ready:
            self._closing = True
            self._reads.clear()
            self._ready.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        while batch := self._next():
            self._run(batch)
            with self._ready:
                del self._began[threading.get_ident()]

    def _next(self) -> list[Read]:
        """The next batch; empty at the end."""
        most_bytes = self._batch_bytes()
        with self._ready:
            while not self._reads and not self._closing:
                self._ready.wait()
            batch: list[Read] = []
            size, rank = 0, self._reads.first_rank()
            while not self._closing and size < most_bytes and rank is not None and self._reads.first_rank() == rank:
                _, read = self._reads.pop()
                assert isinstance(read, Read)
                batch.append(read)
                size += read.view.nbytes
            if batch:
                self._began[threading.get_ident()] = time.perf_counter()
            return batch
