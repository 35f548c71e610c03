"""A store for hosts whose threads may block: a call begins all of its blocks together, and returns when all have ended.

Knows no host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.block_store import BlockStore
from kvstore.errors import StoreError
from kvstore.hosts.jobs import HostBlock, HostJob, HostJobs

logger = logging.getLogger(__name__)
STEP_S = 0.0005


class WaitingStore:
    """Any thread may call it. timeout_s: how long a write is tried again while too many are waiting.

    No call returns while the disk still uses its memory. Otherwise a late read would overwrite whoever reused that
    memory, and a late write would store the wrong bytes. While a call takes longer than timeout_s, all other calls miss
    at once.
    """

    def __init__(self, store: BlockStore, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._lock = threading.Lock()
        self._jobs = HostJobs(store)
        self._num_jobs = self._num_late = 0

    @property
    def is_late(self) -> bool:
        return self._num_late > 0

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with suppress(StoreError):  # closed
            if not self.is_late:
                return self._store.lookup(keys)
        return [False] * len(keys)

    def write(self, blocks: Sequence[HostBlock]) -> list[bool]:
        """For each block, whether it is durable."""
        return self._run(self._jobs.write, blocks)

    def read(self, blocks: Sequence[HostBlock]) -> list[bool]:
        """For each block, whether its memory has what was stored; otherwise it may hold anything."""
        read = self._run(self._jobs.read, blocks)
        with suppress(StoreError):
            self._store.touch([block.key for block, ok in zip(blocks, read, strict=True) if ok])
        return read

    def _run(
        self, begin: Callable[[int, Sequence[HostBlock]], HostJob], blocks: Sequence[HostBlock]
    ) -> list[bool]:  # fmt: skip
        job = None
        with suppress(StoreError):  # the store was closed, which gave the memory back
            if not self.is_late:
                with self._lock:
                    self._num_jobs += 1
                    job = begin(self._num_jobs, blocks)
                self._wait(job)
        return [False] * len(blocks) if job is None else job.ok

    def _wait(self, job: HostJob) -> None:
        until, is_late = time.monotonic() + self._timeout_s, False
        try:
            while not self._has_ended(job):
                if not is_late and time.monotonic() > until:
                    is_late = True
                    self._count_late(1)
                    logger.warning("the disk is silent for %g s; until it answers, KV is computed", self._timeout_s)
                time.sleep(STEP_S)
        finally:
            if is_late:
                self._count_late(-1)

    def _has_ended(self, job: HostJob) -> bool:
        with self._lock:
            if self.is_late:
                self._jobs.give_up(lambda other, key: other is job)
            self._jobs.collect()
            return not job.num_open

    def _count_late(self, change: int) -> None:
        with self._lock:
            self._num_late += change
