"""Threads between the CPU tier and the disk: one writer that batches, several readers. They finish, and are polled.

Owns the queues. Never touches the control plane's state: it is given records and memory, and returns outcomes. Whatever
is raised by the work itself is an outcome too: a thread that died would leave its slots held, and requests waiting.
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
TOUCHED_WAIT_S = 60.0  # that times of last use wait for other work to travel with

Rank = tuple[int, ...]  # of a read that is queued; the smallest goes first
AT_ONCE: Rank = (0,)


def rank_of_request(key: tuple[int, int]) -> Rank:
    """For a request that waits for it, with this place in the queue."""
    return (1, *key)


AS_HINT: Rank = (2,)  # nobody waits for it yet


class Disk(Protocol):
    """What the threads need of the disk tier."""

    def write(
        self, puts: Sequence[tuple[BlockRecord, memoryview]], deletes: Sequence[BlockId], touched: dict[BlockId, float]
    ) -> Outcome:
        """One durable transaction, or none of it."""
        ...

    def read(self, expected: Expected, into: memoryview) -> ReadResult:
        """Into memory that nobody can see yet; everything is checked."""
        ...


class Outcome(Protocol):
    """How a transaction ended: stored bytes of each put, or why there is none of it."""

    @property
    def stored_bytes(self) -> Sequence[int]: ...

    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Write:
    """One block to be written from `view`, which stays as it is until the write is done."""

    slot: int
    record: BlockRecord
    view: memoryview


@dataclass(frozen=True, slots=True)
class Read:
    """One block to be read into `view`, which nobody else looks at until the read is done."""

    slot: int
    record: Expected
    view: memoryview


@dataclass(frozen=True, slots=True)
class Task:
    """Other work for a reader: `run` is called in its thread; `key` comes back with whether it succeeded."""

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
    """Reads and tasks that are queued: the smallest rank goes first, of the same rank who came first. One thread."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, int]] = []  # a heap; entries that are not in `_jobs` are void
        self._jobs: dict[int, Read | Task] = {}  # by number
        self._numbers: dict[int, int] = {}  # of the read into a slot
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Read | Task, rank: Rank) -> None:
        number = next(self._counter)
        self._jobs[number] = job
        heapq.heappush(self._order, (rank, number))
        if isinstance(job, Read):
            self._numbers[job.slot] = number

    def change_rank(self, slot: int, rank: Rank) -> None:
        """A read that is not queued is ignored."""
        if slot in self._numbers:
            self.add(self._jobs.pop(self._numbers[slot]), rank)

    def cancel(self, slot: int) -> bool:
        """False when it is not queued."""
        number = self._numbers.pop(slot, None)
        return number is not None and self._jobs.pop(number) is not None

    def first_rank(self) -> Rank | None:
        """None: nothing is queued."""
        while self._order and self._order[0][1] not in self._jobs:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def pop(self) -> tuple[Rank, Read | Task]:
        rank = self.first_rank()
        assert rank is not None, "nothing is queued"
        _, number = heapq.heappop(self._order)
        job = self._jobs.pop(number)
        if isinstance(job, Read):
            del self._numbers[job.slot]
        return rank, job

    def clear(self) -> None:
        self._order.clear()
        self._jobs.clear()
        self._numbers.clear()


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one transaction. touched: times of last use."""

    writes: tuple[Write, ...]
    deletes: tuple[BlockId, ...]
    touched: dict[BlockId, float]


class PendingWrites:
    """What is to be written, deleted and touched. One thread. batch_bytes: of one transaction."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._writes: deque[Write] = deque()
        self._deletes: dict[BlockId, None] = {}
        self._touched: dict[BlockId, float] = {}
        self._touched_since = 0.0

    def add(self, write: Write) -> None:
        self._deletes.pop(write.record.block_id, None)  # it is overwritten
        self._writes.append(write)

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        self._deletes |= dict.fromkeys(block_ids)

    def touch(self, touched: dict[BlockId, float], again: bool = False) -> None:
        """again: they could not be written, and those that came meanwhile are later."""
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
        """There is more than times of last use."""
        return bool(self._writes or self._deletes)

    def touched_wait_s(self, hurry: bool) -> float | None:
        """How long times of last use may go on waiting for other work; None: there are none."""
        if not self._touched:
            return None
        return 0.0 if hurry else max(0.0, self._touched_since + TOUCHED_WAIT_S - time.monotonic())

    @property
    def is_full(self) -> bool:
        """There is a batch of writes, or something to delete, which makes room."""
        is_large = self._writes and len(self._writes) * self._writes[0].view.nbytes >= self._batch_bytes
        return bool(self._deletes or is_large)

    def pop(self) -> Batch:
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
    """Queues and threads. Queues are bounded by the arena's slots, since every entry holds one.

    on_progress: called in an I/O thread after something has ended; it may only wake somebody. disk None: tasks only.
    batch_wait_s, batch_bytes: of one transaction.
    """

    def __init__(
        self, disk: Disk | None, on_progress: Callable[[], None], num_readers: int = NUM_READERS,
        batch_wait_s: float = BATCH_WAIT_S, batch_bytes: int = BATCH_BYTES,
    ) -> None:  # fmt: skip
        self._disk = disk
        self._on_progress = on_progress
        self._batch_wait_s = batch_wait_s
        lock = threading.Lock()
        self._write_ready, self._read_ready = threading.Condition(lock), threading.Condition(lock)
        self._pending = PendingWrites(batch_bytes)
        self._reads = RankedReads()
        self._began: dict[int, float] = {}  # by reading thread
        self._done: deque[Done] = deque()
        self._hurry = self._closing = self._is_writing = False
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
        """Times of last use, which travel with the next transaction; in a hurry or after a while they are one alone."""
        with self._write_ready:
            self._pending.touch(touched)
            self._write_ready.notify()

    def submit_read(self, read: Read | Task, rank: Rank = AT_ONCE) -> None:
        """Those of the smallest rank go first, and of the same rank in the order in which they came."""
        with self._read_ready:
            self._reads.add(read, rank)
            self._read_ready.notify()

    def rank_read(self, slot: int, rank: Rank) -> None:
        """A read that is queued gets another rank; one that runs or has ended goes on."""
        with self._read_ready:
            self._reads.change_rank(slot, rank)

    def cancel_read(self, slot: int) -> bool:
        """Drop a read that is queued; False when it runs or has ended."""
        with self._read_ready:
            return self._reads.cancel(slot)

    @property
    def stalled_s(self) -> float:
        """For how long the oldest running read or task has been running."""
        with self._read_ready:
            return time.perf_counter() - min(self._began.values()) if self._began else 0.0

    def completed(self) -> list[Done]:
        """What has ended since the last call."""
        done: list[Done] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def hurry(self) -> None:
        """Write now what is queued, without waiting for a batch to fill."""
        with self._write_ready:
            self._hurry = bool(self._pending)
            self._write_ready.notify()

    @property
    def is_idle(self) -> bool:
        """Nothing queued, nothing running, nothing that was not polled."""
        with self._read_ready:
            queued = self._pending.has_blocks or self._reads or self._done
            return not (queued or self._began or self._is_writing)

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, drop the reads, end the threads. False when that took longer than given."""
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
        """What fills a batch, or has come within its time; None at the end."""
        with self._write_ready:
            while not self._pending.has_blocks and (wait_s := self._touched_wait_s()) != 0:
                if self._closing:
                    return None
                self._write_ready.wait(wait_s)
            deadline = time.monotonic() + self._batch_wait_s
            while not (self._hurry or self._closing or self._pending.is_full):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._write_ready.wait(left)
            self._hurry = False
            batch = self._pending.pop()
            self._is_writing = bool(batch.writes or batch.deletes)
            return batch

    def _touched_wait_s(self) -> float | None:
        return self._pending.touched_wait_s(self._hurry or self._closing)

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
                # Who waits needs all of its blocks: waking it for each would cost more than the reads.
                wake = self._reads.first_rank() != rank or len(self._done) % WAKE_EVERY == 0
            if wake:
                self._on_progress()

    def _next_read(self, me: int) -> tuple[Rank, Read | Task, int] | None:
        """What is to be done, its rank, and how many readers are at work with it; None at the end."""
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
        except Exception:  # whatever it is, the splice did not happen: its tokens are computed
            return TaskDone(task.key, False)
        return TaskDone(task.key, True)
