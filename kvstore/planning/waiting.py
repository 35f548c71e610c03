"""The requests that have arrived at a server and do not run yet, in order of arrival.

Knows no tier; the scheduler says what a request waits for.
"""

from __future__ import annotations

import heapq

from kvstore.planning.jobs import Job


class WaitingLine:
    """A candidate is looked at when the batch has a place. A request that waits for reads or for arena blocks is no
    candidate, and others may pass it. One that waits for HBM holds up all behind it.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Job] = {}
        self._candidates: list[tuple[int, Job]] = []  # a heap
        self._short: list[tuple[int, Job]] = []  # a heap: those that wait for arena blocks
        self._blocked: int | None = None  # who waits for HBM

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job) -> None:
        self._waiting[job.number] = job
        self.offer(job.number)

    def remove(self, job: Job) -> None:
        """It runs now."""
        del self._waiting[job.number]

    def offer(self, number: int) -> None:
        """Make it a candidate again: what it waited for may be there."""
        job = self._waiting.get(number)
        if job is not None and not job.is_candidate:
            job.is_candidate = True
            heapq.heappush(self._candidates, (number, job))

    def offer_all(self) -> None:
        for number in self._waiting:
            self.offer(number)

    def pop_candidate(self) -> Job | None:
        """Take the first candidate; None if there is none, or if it waits for HBM."""
        if not self._candidates or self._candidates[0][0] == self._blocked:
            return None
        _, job = heapq.heappop(self._candidates)
        job.is_candidate = False
        return job

    # -- what they wait for ------------------------------------------------------------------------------------------
    def wait_for_hbm(self, job: Job) -> None:
        self.offer(job.number)
        self._blocked = job.number

    def unblock(self) -> None:
        """A request has ended, and released its HBM."""
        self._blocked = None

    def wait_for_arena_blocks(self, job: Job) -> None:
        heapq.heappush(self._short, (job.number, job))

    @property
    def has_short(self) -> bool:
        """Whether a request waits for arena blocks."""
        return bool(self._short)

    def offer_short(self, num_free: int | None) -> None:
        """Offer requests that wait for arena blocks, in order, as long as so many free ones are enough for each; None:
        all of them.
        """
        while self._short:
            number, job = self._short[0]
            if number in self._waiting:
                if num_free is not None and num_free < job.stored.wanted.lowest - job.stored.wanted.front:
                    return
                self.offer(number)
            heapq.heappop(self._short)
