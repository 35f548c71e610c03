"""A host's jobs between its memory and a store: the blocks of a job are begun together and reported together.

Knows no host: a job is a number, and memory is rows of one size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.block_store import BlockStore

MAX_FAILED = 1 << 16  # of the keys that could not be read, so many are remembered


@dataclass(frozen=True, slots=True)
class RowWrite:
    """A block to be stored from a row of the host's memory. parent: the key before it; position: that of its first
    token.
    """

    key: bytes
    parent: bytes | None
    position: int
    row: int


@dataclass(frozen=True, slots=True)
class JobDone:
    """num_bytes: how many were moved. loaded: the keys whose rows a load has filled; other rows may hold anything."""

    job_id: int
    ok: bool
    is_load: bool
    num_bytes: int
    seconds: float
    loaded: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _RowJob:
    job_id: int
    is_load: bool
    conversation: str | None = None
    num_open: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    loaded: list[bytes] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


class RowTransfers:
    """rows: the host's memory, flat. If the store refuses a write because too many are waiting, `collect` tries it
    again: the host keeps the row until its job has ended.
    """

    def __init__(self, store: BlockStore, rows: memoryview, row_bytes: int) -> None:
        self._store = store
        self._rows = rows
        self._row_bytes = row_bytes
        self._open: dict[int, tuple[_RowJob, bytes]] = {}  # by ticket, with the block's key
        self._waiting: deque[tuple[_RowJob, RowWrite]] = deque()
        self._ended: list[JobDone] = []
        self.failed: dict[bytes, None] = {}  # keys that could not be read, in this order, and were not written since
        self.num_reading = 0

    def write(self, job_id: int, blocks: Iterable[RowWrite], conversation: str | None) -> None:
        """Write these blocks, except for those that are already stored."""
        job = _RowJob(job_id, is_load=False, conversation=conversation)
        found = list(blocks)
        stored = self._store.lookup([one.key for one in found])
        missing = []
        for one, is_stored in zip(found, stored, strict=True):
            if is_stored:
                self.failed.pop(one.key, None)  # the next read shows whether it is sound
            else:
                missing.append(one)
        job.num_open = len(missing)
        if not missing:
            self._end_if_done(job)
        self._waiting.extend((job, one) for one in missing)
        self._write_waiting()

    def read(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        job = _RowJob(job_id, is_load=True, num_open=len(keys))
        for key, row in zip(keys, rows, strict=True):
            self._open[self._store.read_into(key, self._row(row))] = (job, key)
        self.num_reading += len(keys)

    def collect(self) -> list[JobDone]:
        """The jobs that have ended since the last call."""
        for done in self._store.poll():
            job, key = self._open.pop(done.ticket)
            job.num_bytes += done.num_bytes
            if job.is_load:
                self.num_reading -= 1
            if not done.ok:
                job.num_failed += 1
                if job.is_load:
                    self._remember_failure(key)
            elif job.is_load:
                job.loaded.append(key)
            else:
                self.failed.pop(key, None)
            job.num_open -= 1
            self._end_if_done(job)
        self._write_waiting()
        ended, self._ended = self._ended, []
        return ended

    def forget(self, keys: Iterable[bytes]) -> None:
        """Give up writes of these keys that have not begun."""
        unwanted, waiting = frozenset(keys), self._waiting
        self._waiting = deque()
        for job, block in waiting:
            if block.key in unwanted:
                self._refuse(job)
            else:
                self._waiting.append((job, block))

    @property
    def is_idle(self) -> bool:
        """Whether nobody is reading or writing the host's memory."""
        return not self._open and not self._waiting

    def release(self) -> None:
        self._rows.release()

    def _write_waiting(self) -> None:
        while self._waiting:
            job, block = self._waiting[0]
            ticket = self._store.write(
                block.key, block.parent, block.position, self._row(block.row), conversation=job.conversation
            )
            if ticket is None and self._num_writing and not self._store.is_degraded:
                return  # too many are waiting: tried again as soon as something has ended
            self._waiting.popleft()
            if ticket is None:
                self._refuse(job)
            else:
                self._open[ticket] = (job, block.key)

    @property
    def _num_writing(self) -> int:
        return len(self._open) - self.num_reading

    def _refuse(self, job: _RowJob) -> None:
        job.num_failed += 1
        job.num_open -= 1
        self._end_if_done(job)

    def _end_if_done(self, job: _RowJob) -> None:
        if not job.num_open:
            seconds = time.perf_counter() - job.started
            ok, loaded = not job.num_failed, tuple(job.loaded)
            self._ended.append(JobDone(job.job_id, ok, job.is_load, job.num_bytes, seconds, loaded))

    def _remember_failure(self, key: bytes) -> None:
        self.failed[key] = None
        if len(self.failed) > MAX_FAILED:
            del self.failed[next(iter(self.failed))]

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]
