"""Threads between the CPU tier and the disk: one writer that batches, several readers; `completed` polls them.

Owns the queues. Never touches the control plane's state: it gets records and memory, and returns outcomes. An exception
in the work is an outcome, too: a dead thread would leave arena blocks held and requests waiting.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Expected, ReadResult

BATCH_BYTES = 64 << 20
BATCH_WAIT_S = 0.2
NUM_READERS = 2
WAKE_EVERY = 32  # reads, when more are queued
TOUCHED_WAIT_S = 60.0  # that times of last use wait for another transaction to join

Rank = tuple[int, ...]  # of a read that is queued; the smallest goes first
AT_ONCE: Rank = (0,)


def rank_of_request(key: tuple[int, int]) -> Rank:
    """The rank of a read that a request waits for, with this place in the queue."""
    return (1, *key)


AS_HINT: Rank = (2,)  # nobody waits for it yet


class Disk(Protocol):
    """What the threads need of the disk tier."""

    def write(
        self, puts: Sequence[tuple[BlockRecord, memoryview]], deletes: Sequence[BlockId], touched: dict[BlockId, float]
    ) -> Outcome:
        """Commit one durable transaction, or nothing of it."""
        ...

    def read(self, expected: Expected, into: memoryview) -> ReadResult:
        """Read into memory that nobody else can see yet, and check everything."""
        ...


class Outcome(Protocol):
    """How a transaction ended: stored bytes of each put, or why it failed."""

    @property
    def stored_bytes(self) -> Sequence[int]: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Write:
    """One block to be written from `view`, which stays as it is until the write is done."""

    arena_block: int
    record: BlockRecord
    view: memoryview


@dataclass(frozen=True, slots=True)
class Read:
    """One block to be read into `view`, which nobody else looks at until the read is done."""

    arena_block: int
    record: Expected
    view: memoryview


@dataclass(frozen=True, slots=True)
class Task:
    """Other work for a reading thread: it calls `run`; the result has `key` and whether it succeeded."""

    key: int
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReadDone:
    """num_active: readers at work meanwhile, this one included, on average."""

    read: Read
    result: ReadResult
    seconds: float
    num_active: float = 1.0


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A transaction has ended. error None: its writes and deletes are durable."""

    writes: tuple[Write, ...]
    deletes: tuple[BlockId, ...]
    stored_bytes: tuple[int, ...]
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskDone:
    key: int
    succeeded: bool


Done = ReadDone | WriteDone | TaskDone


class RankedReads:
    """Queued reads and tasks: the smallest rank goes first, and of equal ranks the earliest. One thread."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, int]] = []  # a heap; entries that are not in `_jobs` are void
        self._jobs: dict[int, Read | Task] = {}  # by number
        self._numbers: dict[int, int] = {}  # of the read into an arena block
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Read | Task, rank: Rank) -> None:
        number = next(self._counter)
        self._jobs[number] = job
        heapq.heappush(self._order, (rank, number))
        if isinstance(job, Read):
            self._numbers[job.arena_block] = number

    def change_rank(self, arena_block: int, rank: Rank) -> None:
        """Change a queued read's rank; others are ignored."""
        if arena_block in self._numbers:
            self.add(self._jobs.pop(self._numbers[arena_block]), rank)

    def cancel(self, arena_block: int) -> bool:
        """Cancel a read; False when it is not queued."""
        number = self._numbers.pop(arena_block, None)
        return number is not None and self._jobs.pop(number) is not None

    def first_rank(self) -> Rank | None:
        """The smallest rank; None when nothing is queued."""
        while self._order and self._order[0][1] not in self._jobs:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def pop(self) -> tuple[Rank, Read | Task]:
        rank = self.first_rank()
        assert rank is not None, "nothing is queued"
        _, number = heapq.heappop(self._order)
        job = self._jobs.pop(number)
        if isinstance(job, Read):
            del self._numbers[job.arena_block]
        return rank, job

    def clear(self) -> None:
        self._order.clear()
        self._jobs.clear()
        self._numbers.clear()


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one transaction. touched: times of last use."""

    writes: tuple[Write, ...]
    deletes: tuple[BlockId, ...]
    touched: dict[BlockId, float]


class PendingWrites:
    """Pending writes, deletions and times of last use. One thread.

    batch_bytes: of one transaction. most_touched_wait_s: so long may times of last use wait for other work.
    """

    def __init__(self, batch_bytes: int, most_touched_wait_s: float) -> None:
        self._batch_bytes, self._most_touched_wait_s = batch_bytes, most_touched_wait_s
        self._writes: deque[Write] = deque()
        self._deletes: dict[BlockId, None] = {}
        self._touched: dict[BlockId, float] = {}
        self._touched_since = 0.0
        self.is_hurried = False

    def add(self, write: Write) -> None:
        self._deletes.pop(write.record.block_id, None)  # it is overwritten
        self._writes.append(write)

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        self._deletes |= dict.fromkeys(block_ids)

    def touch(self, touched: dict[BlockId, float], again: bool = False) -> None:
        """again: they could not be written, and times that came meanwhile are later."""
        if again or not self._touched:
            self._touched_since = time.monotonic()
        self._touched = touched | self._touched if again else self._touched | touched

    def __len__(self) -> int:
        """Writes."""
        return len(self._writes)

    def __bool__(self) -> bool:
        return self.has_blocks or bool(self._touched)

    @property
    def has_blocks(self) -> bool:
        """Whether there is more than times of last use."""
        return bool(self._writes or self._deletes)

    def hurry(self) -> None:
        """What is here is to be written at once."""
        self.is_hurried = bool(self)

    def touched_wait_s(self) -> float | None:
        """How long times of last use may still wait for other work; None: there are none."""
        if not self._touched:
            return None
        return 0.0 if self.is_hurried else max(0.0, self._touched_since + self._most_touched_wait_s - time.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether no more is to be waited for: there is a full batch of writes, or a deletion, which makes room."""
        is_large = self._writes and len(self._writes) * self._writes[0].view.nbytes >= self._batch_bytes
        return bool(self.is_hurried or self._deletes or is_large)

    def pop(self) -> Batch:
        self.is_hurried = False
        writes: list[Write] = []
        size = 0
        while self._writes and (not writes or size < self._batch_bytes):
            writes.append(self._writes.popleft())
            size += writes[-1].view.nbytes
        # Deletes make room for writes. That of a block which is being written waits for the write.
        writing = {write.record.block_id for write in (*writes, *self._writes)}
        deletes = tuple(block_id for block_id in self._deletes if block_id not in writing)
        self._deletes = {block_id: None for block_id in self._deletes if block_id in writing}
        touched, self._touched = self._touched, {}
        return Batch(tuple(writes), deletes, touched)


class IoQueue:
    """Queues and threads.

    The arena's size bounds the queues, since every entry holds an arena block. on_progress: called in an I/O thread
    after work has ended; it may only wake a thread. disk None: tasks only. batch_wait_s, batch_bytes: of one
    transaction.
    """

    def __init__(
        self, disk: Disk | None, on_progress: Callable[[], None], num_readers: int = NUM_READERS,
        batch_wait_s: float = BATCH_WAIT_S, batch_bytes: int = BATCH_BYTES, touched_wait_s: float = TOUCHED_WAIT_S,
    ) -> None:  # fmt: skip
        self._disk = disk
        self._on_progress = on_progress
        self._batch_wait_s = batch_wait_s
        lock = threading.Lock()
        self._write_ready, self._read_ready = threading.Condition(lock), threading.Condition(lock)
        self._pending = PendingWrites(batch_bytes, touched_wait_s)
        self._reads = RankedReads()
        self._began: dict[int, float] = {}  # by reading thread
        self._done: deque[Done] = deque()
        self._closing = self._is_writing = False
        names = [("kvstore-write", self._write_loop)] if disk is not None else []
        names += [(f"kvstore-read-{i}", self._read_loop) for i in range(num_readers)]
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in names]
        for thread in self._threads:
            thread.start()

    # -- the control plane's side ------------------------------------------------------------------------------------
    def submit_write(self, write: Write) -> None:
        with self._write_ready:
            self._pending.add(write)
            self._write_ready.notify()

    def submit_deletes(self, block_ids: Sequence[BlockId]) -> None:
        """After the writes that were submitted before."""
        with self._write_ready:
            self._pending.delete(block_ids)
            self._write_ready.notify()

    def submit_touched(self, touched: dict[BlockId, float]) -> None:
        """Submit times of last use, which join the next transaction; when hurried, or after a while, they get their
        own.
        """
        with self._write_ready:
            self._pending.touch(touched)
            self._write_ready.notify()

    def submit_read(self, read: Read | Task, rank: Rank = AT_ONCE) -> None:
        """Submit a read. The smallest rank goes first, and of equal ranks the earliest."""
        with self._read_ready:
            self._reads.add(read, rank)
            self._read_ready.notify()

    def rank_read(self, arena_block: int, rank: Rank) -> None:
        """Change a queued read's rank; does nothing if it runs or has ended."""
        with self._read_ready:
            self._reads.change_rank(arena_block, rank)

    def cancel_read(self, arena_block: int) -> bool:
        """Drop a read that is queued; False when it runs or has ended."""
        with self._read_ready:
            return self._reads.cancel(arena_block)

    @property
    def stalled_s(self) -> float:
        """How long the oldest running read or task has been running."""
        with self._read_ready:
            return time.perf_counter() - min(self._began.values()) if self._began else 0.0

    def completed(self) -> list[Done]:
        """Everything that has ended since the last call."""
        done: list[Done] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def hurry(self) -> None:
        """Write now what is queued, without waiting for a batch to fill."""
        with self._write_ready:
            self._pending.hurry()
            self._write_ready.notify()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or waiting to be polled."""
        with self._read_ready:
            queued = self._pending.has_blocks or self._reads or self._done
            return not (queued or self._began or self._is_writing)

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, drop the reads, end the threads. False when that takes longer than the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._write_ready:
            self._closing = True
            self._reads.clear()
            self._write_ready.notify_all()
            self._read_ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- threads -----------------------------------------------------------------------------------------------------
    def _write_loop(self) -> None:
        while (batch := self._next_batch()) is not None:
            started = time.perf_counter()
            assert self._disk is not None
            stored_bytes: tuple[int, ...] = ()
            try:
                outcome = self._disk.write([(w.record, w.view) for w in batch.writes], batch.deletes, batch.touched)
                stored_bytes, error = tuple(outcome.stored_bytes), outcome.error
            except Exception as raised:  # whatever it is, the blocks are kept and tried again
                error = f"{type(raised).__name__}: {raised}"
            done = WriteDone(batch.writes, batch.deletes, stored_bytes, error, time.perf_counter() - started)
            with self._write_ready:
                if error is not None and batch.touched and not self._closing:
                    self._pending.touch(batch.touched, again=True)
                if batch.writes or batch.deletes:
                    self._done.append(done)
                self._is_writing = False
            self._on_progress()

    def _next_batch(self) -> Batch | None:
        """The next batch, full or complete by time; None at the end."""
        with self._write_ready:
            while not self._pending.has_blocks and (wait_s := self._touched_wait_s()) != 0:
                if self._closing:
                    return None
                self._write_ready.wait(wait_s)
            deadline = time.monotonic() + self._batch_wait_s
            while not (self._closing or self._pending.is_due):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._write_ready.wait(left)
            batch = self._pending.pop()
            self._is_writing = bool(batch.writes or batch.deletes)
            return batch

    def _touched_wait_s(self) -> float | None:
        wait_s = self._pending.touched_wait_s()
        return 0.0 if self._closing and wait_s is not None else wait_s

    def _read_loop(self) -> None:
        me = threading.get_ident()
        while (taken := self._next_read(me)) is not None:
            rank, job, num_before = taken
            started = time.perf_counter()
            result = self._read(job) if isinstance(job, Read) else self._run(job)
            seconds = time.perf_counter() - started
            with self._read_ready:
                num_active = (num_before + len(self._began)) / 2
                if isinstance(result, TaskDone):
                    self._done.append(result)
                elif isinstance(job, Read):
                    self._done.append(ReadDone(job, result, seconds, num_active))
                del self._began[me]
                # A waiting request needs all of its blocks: waking it for each would cost more than the reads.
                wake = self._reads.first_rank() != rank or len(self._done) % WAKE_EVERY == 0
            if wake:
                self._on_progress()

    def _next_read(self, me: int) -> tuple[Rank, Read | Task, int] | None:
        """The next read or task, its rank, and the number of active readers with it; None at the end."""
        with self._read_ready:
            while not self._reads:
                if self._closing:
                    return None
                self._read_ready.wait()
            rank, job = self._reads.pop()
            self._began[me] = time.perf_counter()
            return rank, job, len(self._began)

    def _read(self, read: Read) -> ReadResult:
        assert self._disk is not None
        try:
            return self._disk.read(read.record, read.view)
        except Exception:  # whatever it is, the block is computed instead
            return ReadResult.FAILED

    @staticmethod
    def _run(task: Task) -> TaskDone:
        try:
            task.run()
        except Exception:  # whatever it is, the splice failed: its tokens are computed
            return TaskDone(task.key, False)
        return TaskDone(task.key, True)
