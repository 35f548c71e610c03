"""A host's jobs: blocks that are read or written together, from and into the host's memory; and a store for hosts whose
threads may block, where a call begins all of its blocks together, and returns when all have ended.

Knows no host: a job is a number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.block_store import BlockStore
from kvstore.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)
STEP_S = 0.0005  # between two looks of a thread that waits


@dataclass(frozen=True, slots=True)
class HostBlock:
    """parent: the key before it; position: that of its first token; conversation: as `BlockStore.write` takes it. Only
    writes use these three.
    """

    key: bytes
    parent: bytes | None
    position: int
    memory: memoryview
    conversation: str | None = None


@dataclass(slots=True, eq=False)
class HostJob:
    """ok: of each block whether a write is durable, or the memory has what was stored; False until it has ended.
    num_bytes: how many were moved. seconds: it took, once all of it has ended.
    """

    job_id: int
    is_load: bool
    keys: list[bytes]
    ok: list[bool] = field(default_factory=list)
    refused: set[bytes] = field(default_factory=set)  # keys of what was not begun
    num_open: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.ok, self.num_open = [False] * len(self.keys), len(self.keys)


class HostJobs:
    """Not for several threads. If the store refuses a write because too many are waiting, `collect` tries it again: the
    host keeps the memory until its job has ended. What builds on a block that was refused for good is not written.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._open: dict[int, tuple[HostJob, int]] = {}  # by ticket, with the block's place in the job
        self._waiting: deque[tuple[HostJob, int, HostBlock]] = deque()
        self._ended: list[HostJob] = []
        self.num_reading = 0

    def write(self, job_id: int, blocks: Sequence[HostBlock]) -> HostJob:
        """Write these blocks, each after those that it builds on."""
        job = HostJob(job_id, False, [block.key for block in blocks])
        self._waiting.extend((job, place, block) for place, block in enumerate(blocks))
        self._end_if_done(job)
        self._write_waiting()
        return job

    def read(self, job_id: int, blocks: Sequence[HostBlock]) -> HostJob:
        """Read these blocks into their memory."""
        job = HostJob(job_id, True, [block.key for block in blocks])
        self._end_if_done(job)
        for place, block in enumerate(blocks):
            self._open[self._store.read_into(block.key, block.memory)] = (job, place)
            self.num_reading += 1
        return job

    def collect(self) -> list[HostJob]:
        """The jobs that have ended since the last call."""
        results = self._store.poll()
        for done in results:
            job, place = self._open.pop(done.ticket)
            job.num_bytes += done.num_bytes
            self.num_reading -= job.is_load
            self._block_ended(job, place, done.ok)
        if results:  # before that, what waits would be refused and counted again
            self._write_waiting()
        ended, self._ended = self._ended, []
        return ended

    def give_up(self, is_unwanted: Callable[[HostJob, bytes], bool]) -> None:
        """Give up writes that have not begun, of these jobs and keys."""
        waiting, self._waiting = self._waiting, deque()
        for job, place, block in waiting:
            if is_unwanted(job, block.key):
                self._block_ended(job, place, False)
            else:
                self._waiting.append((job, place, block))

    @property
    def is_idle(self) -> bool:
        """Whether nobody is reading or writing the host's memory."""
        return not self._open and not self._waiting

    def _write_waiting(self) -> None:
        while self._waiting:
            job, place, block = self._waiting[0]
            ticket, may_wait = None, block.parent not in job.refused
            try:
                if may_wait:
                    ticket = self._store.write(
                        block.key, block.parent, block.position, block.memory, conversation=block.conversation
                    )
            except ConfigError as error:
                logger.warning("not stored: %s", error)
                may_wait = False
            if ticket is not None:
                self._open[ticket] = (job, place)
            elif may_wait and len(self._open) > self.num_reading and not self._store.is_degraded:
                return  # too many are waiting: tried again as soon as something has ended
            else:
                job.refused.add(block.key)
                self._block_ended(job, place, False)
            self._waiting.popleft()

    def _block_ended(self, job: HostJob, place: int, ok: bool) -> None:
        job.ok[place] = ok
        job.num_open -= 1
        self._end_if_done(job)

    def _end_if_done(self, job: HostJob) -> None:
        if not job.num_open:
            job.seconds = time.perf_counter() - job.started
            self._ended.append(job)


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
