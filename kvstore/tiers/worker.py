"""The worker of a tier: it asks, reads and writes in threads of its own, and is polled.

Owns the queues. Never touches the control plane's state: it gets records and memory, and returns outcomes. An exception
in the work is an outcome, too: a dead thread would leave arena blocks held and requests waiting.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.errors import RemoteError
from kvstore.forks import leave_to_parent
from kvstore.stats import Counts
from kvstore.tiers.port import (
    AT_ONCE,
    FULL,
    Asked,
    BlockTier,
    Chain,
    Done,
    Keeps,
    Rank,
    ReadDone,
    ReadJob,
    TaskDone,
    TierSession,
    WriteBatch,
    WriteDone,
    WriteJob,
    Written,
)
from kvstore.tiers.queues import Lane, PendingWrites, RankedReads, Reads, Task, Work

BATCH_BYTES = 64 << 20
WAKE_EVERY = 32  # reads, when more are queued
MOST_ASKS = 256  # may wait; others are not asked for
LEAST_READ_BYTES = 256 << 10  # in a batch of a believed tier
READ_BATCH_S = 0.1  # a batch of reads may take, so that nobody waits long for it
FULL_S = 10.0  # without another write after the tier said that it is full
FIRST_S, LAST_S = 0.5, 30.0  # between two tries of what has failed
NUMBERS = ("asks", "reads", "read_bytes", "stored", "stored_bytes", "deleted")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """num_readers: that read at a time. gather_s, batch_bytes: of a batch of writes that are of no chain.
    touched_wait_s: how long times of last use wait for other work.
    """

    num_readers: int = 2
    gather_s: float = 0.2
    batch_bytes: int = BATCH_BYTES
    touched_wait_s: float = 60.0


USUAL = WorkerLimits()


class TierHealth:
    """Any thread may use it. error: what has failed, None when all is well. num_failures: how often it has begun."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._interval_s, self._retry_at_s, self._well_since_s = FIRST_S, 0.0, clock()
        self.error: str | None = None
        self.num_failures = 0

    @property
    def retry_in_s(self) -> float | None:
        """How long to wait before the next try; None when all is well."""
        return None if self.error is None else max(0.0, self._retry_at_s - self._clock())

    @property
    def is_paused(self) -> bool:
        """It has failed, and is not tried again for a while."""
        return bool(self.retry_in_s)

    def failed(self, why: str) -> None:
        """The next try waits longer each time, also if the failure comes soon after a success. What others were waiting
        for meanwhile fails by the same cause, and changes nothing.
        """
        with self._lock:
            if self.is_paused:
                return
            if self.error is None:
                self.num_failures += 1
                if self._clock() - self._well_since_s > 4 * self._interval_s:
                    self._interval_s = FIRST_S
            self.error, self._retry_at_s = why, self._clock() + self._interval_s
            self._interval_s = min(2 * self._interval_s, LAST_S)

    def succeeded(self) -> None:
        with self._lock:
            self.error, self._well_since_s = None, self._clock()


class Executor(Protocol):
    """Runs a worker's lanes: takes work with its lock, and runs it without."""

    def wake(self, lane: Lane) -> None:
        """There may be something in this lane. Called with the lock."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Run until nothing can be taken any more. Returns False if that takes longer."""
        ...


class WorkerThreads:
    """An executor: one thread for each lane, and several that read."""

    def __init__(self, worker: TierWorker) -> None:
        self._worker = worker
        self._ready = {lane: threading.Condition(worker.lock) for lane in Lane}
        self._threads = [
            threading.Thread(target=self._loop, args=(lane,), name=f"kvstore-{worker.name}-{lane.value}", daemon=True)
            for lane in worker.lanes()
        ]
        for thread in self._threads:
            thread.start()

    def wake(self, lane: Lane) -> None:
        self._ready[lane].notify()

    def join(self, timeout_s: float) -> bool:
        with self._worker.lock:
            for ready in self._ready.values():
                ready.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, lane: Lane) -> None:
        worker, ready = self._worker, self._ready[lane]
        while True:
            with ready:
                while isinstance(work := worker.take_work(lane), float):
                    ready.wait(None if work == math.inf else work)
            if work is None:
                return
            worker.run(work)


class TierWorker:
    """Asks, reads and writes for a tier.

    name: of the tier in the store. tier None: tasks only. on_progress: called in a worker's thread after work has
    ended; it may only wake a thread. health: of a believed tier, which is asked nothing while it has failed; an exact
    one's belongs to whoever writes there. The arena bounds the queues, since every read and write holds a block of it.
    """

    def __init__(
        self, name: str, tier: BlockTier | None, on_progress: Callable[[], None], limits: WorkerLimits = USUAL,
        clock: Callable[[], float] = time.monotonic, executor: Callable[[TierWorker], Executor] = WorkerThreads,
    ) -> None:  # fmt: skip
        self.name, self.tier, self.limits, self.lock = name, tier, limits, threading.Lock()
        self.is_believed = tier is not None and tier.keeps is Keeps.BELIEVED
        self.health = TierHealth(clock)
        self.counts = Counts(NUMBERS, ("ask_seconds", "read_seconds"), ("read_bytes_per_s",))  # of a believed tier
        self._on_progress, self._clock = on_progress, clock
        self._local = threading.local()
        self._sessions: list[TierSession] = []  # of all threads
        self._reads, self._asks = RankedReads(), deque[Asked]()
        self._pending = PendingWrites(limits.batch_bytes, limits.gather_s, limits.touched_wait_s)
        self._reading: dict[Reads, None] = {}  # the oldest first
        self._num_unseen = 0  # reads that have ended since somebody was woken
        self._asking_since_s: float | None = None
        self._is_writing = self._is_closing = False
        self._full_until_s = -math.inf
        self._done: deque[Done] = deque()
        if self.is_believed:
            leave_to_parent(self, str(tier))
        self._executor = executor(self)

    # -- the control plane's side ------------------------------------------------------------------------------------
    def home(self, block_id: BlockId) -> TierWorker:
        """Who reads and deletes this block: for one server, the worker itself."""
        return self

    def ask(self, number: int, chain: Chain) -> bool:
        """Ask which blocks of a chain are there, which also refreshes them. Returns False if it cannot be asked now."""
        with self.lock:
            if self.is_away or self._is_closing or len(self._asks) >= MOST_ASKS:
                return False
            self._asks.append(Asked(number, chain))
            self._executor.wake(Lane.ASK)
            return True

    def submit_read(self, job: ReadJob | Task, rank: Rank = AT_ONCE) -> None:
        """The smallest rank goes first, and of equal ranks the earliest."""
        with self.lock:
            self._reads.add(job, rank)
            self._executor.wake(Lane.READ)

    def change_rank(self, handle: int, rank: Rank) -> None:
        """Change a queued read's rank; does nothing if it runs or has ended."""
        with self.lock:
            self._reads.change_rank(handle, rank)

    def cancel(self, handle: int) -> bool:
        """Drop a queued read. Returns False if it runs or has ended."""
        with self.lock:
            return self._reads.cancel(handle)

    def submit_writes(self, jobs: Sequence[WriteJob], chain: Chain | None = None) -> None:
        """chain: whose blocks they are: one batch. None: they join others."""
        with self.lock:
            has_waited = self._pending.has_blocks
            self._pending.add(jobs, chain)
            if not has_waited or self._pending.is_due:  # else the thread waits for more
                self._executor.wake(Lane.WRITE)

    def submit_deletes(self, block_ids: Sequence[BlockId]) -> None:
        """After the writes of these that were submitted before."""
        with self.lock:
            self._pending.delete(block_ids)
            self._executor.wake(Lane.WRITE)

    def submit_touched(self, touched: dict[BlockId, float]) -> None:
        """Times of last use, which join the next batch; when hurried, or after a while, they get their own."""
        with self.lock:
            self._pending.touch(touched, self._clock())
            self._executor.wake(Lane.WRITE)

    def hurry(self) -> None:
        """Write now what is queued, without waiting for a batch to fill."""
        with self.lock:
            self._pending.hurry()
            self._executor.wake(Lane.WRITE)

    def completed(self) -> list[Done]:
        """Everything that has ended since the last call."""
        done: list[Done] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    @property
    def has_writes(self) -> bool:
        """Whether something waits to be written or deleted."""
        return self._pending.has_blocks

    @property
    def is_away(self) -> bool:
        """Whether a believed tier has failed: it is asked nothing until a probe has succeeded."""
        return self.is_believed and self.health.error is not None

    @property
    def is_full(self) -> bool:
        """Whether a believed tier has said so a moment ago."""
        return self._clock() < self._full_until_s

    @property
    def is_refusing(self) -> bool:
        """Whether it stores nothing for a while."""
        return self.is_away or self.is_full

    @property
    def stalled_s(self) -> float:
        """For how long the oldest running read or task has been running."""
        with self.lock:
            return self._clock() - next(iter(self._reading)).begun_s if self._reading else 0.0

    @property
    def asking_s(self) -> float:
        """For how long the question that is asked now has been asked."""
        since_s = self._asking_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or waiting to be polled; but for questions, which nobody waits for."""
        with self.lock:
            queued = self._pending.has_blocks or self._reads or self._done
            return not (queued or self._reading or self._is_writing)

    def as_dict(self) -> dict[str, object]:
        """Of a believed tier."""
        return {
            "url": str(self.tier),
            "degraded": self.health.error,
            "full": self.is_full,
            "breaks": self.health.num_failures,
            **self.counts.as_dict(),
        }

    def close(self, timeout_s: float) -> bool:
        """End after what is running; an exact tier gets what is still to be written. Returns False if that takes longer
        than the timeout.
        """
        with self.lock:
            self._is_closing = True
            self._reads.clear()
            if self.is_believed:
                self._asks.clear()
                self._pending.clear()
        has_ended = self._executor.join(timeout_s)
        for session in self._sessions if has_ended else ():
            session.close()
        return has_ended

    # -- the executor's side -----------------------------------------------------------------------------------------
    def lanes(self) -> list[Lane]:
        """Those that it has, once for each thread."""
        written = [] if self.tier is None else [Lane.WRITE]
        return [*written, *[Lane.READ] * self.limits.num_readers, *([Lane.ASK] if self.is_believed else [])]

    def take_work(self, lane: Lane) -> Work | float | None:
        """The next work of a lane, to be `run`; else in how many seconds there may be some; None: there will be none.
        Called with the lock.
        """
        if lane is Lane.READ:
            return self._take_reads()
        return self._take_writes() if lane is Lane.WRITE else self._take_question()

    def _take_reads(self) -> Reads | float | None:
        if not self._reads:
            return None if self._is_closing else math.inf
        rank, first = self._reads.pop()
        task, jobs = (first, []) if isinstance(first, Task) else (None, [first])
        if self.is_believed and jobs:
            size, most_bytes = jobs[0].view.nbytes, self._read_batch_bytes()
            while size < most_bytes and self._reads.first_rank() == rank:
                _, job = self._reads.pop()
                assert isinstance(job, ReadJob)
                jobs.append(job)
                size += job.view.nbytes
        taken = Reads(jobs, rank, len(self._reading) + 1, self._clock(), task)
        self._reading[taken] = None
        return taken

    def _read_batch_bytes(self) -> float:
        assert self.tier is not None
        rate = self.counts.rates["read_bytes_per_s"] or 0
        return min(max(LEAST_READ_BYTES, READ_BATCH_S * rate), self.tier.most_read_bytes)

    def _take_writes(self) -> WriteBatch | float | None:
        wait_s = self._pending.wait_s(self._clock())
        if wait_s is None:
            return None if self._is_closing else math.inf
        if wait_s and not self._is_closing:
            return wait_s
        batch = self._pending.pop()
        self._is_writing = bool(batch.jobs or batch.deletes)
        return batch

    def _take_question(self) -> Asked | Task | float | None:
        if self._is_closing:
            return None
        if self._asks:
            self._asking_since_s = self._clock()
            return self._asks.popleft()
        wait_s = self.health.retry_in_s
        return Task(0, self._probe) if wait_s == 0 else math.inf if wait_s is None else wait_s

    def run(self, work: Work) -> None:
        """Do it now; what came of it is polled."""
        if isinstance(work, Reads):
            self._run_reads(work)
        elif isinstance(work, WriteBatch):
            self._run_writes(work)
        elif isinstance(work, Asked):
            self._run_question(work)
        else:
            work.run()

    def _session(self) -> TierSession:
        found: TierSession | None = getattr(self._local, "session", None)
        if found is None:
            assert self.tier is not None
            found = self._local.session = self.tier.session()
            self._sessions.append(found)
        return found

    def _failed(self, what: str, error: Exception) -> str:
        """Whatever the error was, nobody waits for a believed tier for a while."""
        why = str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"
        self.counts.failed(what)
        if self.is_believed:
            self.health.failed(why)
            with self.lock:
                self._executor.wake(Lane.ASK)
        return why

    def _run_reads(self, taken: Reads) -> None:
        results = self._read(taken.jobs) if taken.jobs else []
        done: list[Done] = [] if taken.task is None else [TaskDone(taken.task.key, _has_run(taken.task))]
        seconds = self._clock() - taken.begun_s
        if self.is_believed and taken.jobs:
            self._count_reads(taken.jobs, results, seconds)
        with self.lock:
            num_active = (taken.num_active + len(self._reading)) / 2
            for job, result in zip(taken.jobs, results, strict=True):
                done.append(ReadDone(job, result, seconds / len(results), num_active))
            self._done += done
            del self._reading[taken]
            # A waiting request needs all of its blocks: waking it for each would cost more than the reads.
            self._num_unseen += len(done)
            wake = self._reads.first_rank() != taken.rank or self._num_unseen >= WAKE_EVERY
            if wake:
                self._num_unseen = 0
        if wake:
            self._on_progress()

    def _read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        if not self.is_away:
            try:
                return self._session().read(jobs)
            except Exception as error:  # whatever it is, the blocks are computed instead
                self._failed("read", error)
        return [ReadResult.FAILED] * len(jobs)

    def _count_reads(self, jobs: Sequence[ReadJob], results: Sequence[ReadResult], seconds: float) -> None:
        read = [job for job, result in zip(jobs, results, strict=True) if result is ReadResult.OK]
        if read:
            num_bytes = sum(job.view.nbytes for job in read)
            rate = num_bytes / max(seconds, 1e-6)
            self.counts.add(reads=len(read), read_bytes=num_bytes, read_seconds=seconds, read_bytes_per_s=rate)

    def _run_writes(self, batch: WriteBatch) -> None:
        written = self._write(batch)
        with self.lock:
            if written.error is not None and batch.touched and not self._is_closing:
                self._pending.touch_again(dict(batch.touched), self._clock())
            if batch.jobs or batch.deletes:
                self._done.append(WriteDone(batch, written.stored, written.error))
            self._is_writing = False
        self._on_progress()

    def _write(self, batch: WriteBatch) -> Written:
        if self.is_away:
            return Written(error=self.health.error)
        if batch.jobs and self.is_full:  # others that have a part of the chain are not
            return Written(error=FULL)
        try:
            written = self._session().write(batch)
        except Exception as error:  # what was stored all the same is found when it is asked for, or written again
            return Written(error=self._failed("put" if batch.jobs else "delete", error))
        if self.is_believed:
            self._count_written(batch, written)
        return written

    def _count_written(self, batch: WriteBatch, written: Written) -> None:
        sizes = [one.num_bytes for one in written.stored if one.error is None]
        self.counts.add(stored=sum(size > 0 for size in sizes), stored_bytes=sum(sizes), deleted=len(batch.deletes))
        for one in written.stored:
            if one.error is not None:
                self.counts.failed(f"put: {one.error}")
        if any(one.error == FULL for one in written.stored):
            self._full_until_s = self._clock() + FULL_S

    def _run_question(self, asked: Asked) -> None:
        started_s, there = self._clock(), None
        if not self.is_away:
            try:
                there = self._session().ask(asked.chain)
            except Exception as error:  # the border of a thread
                self._failed("ask", error)
        if there is not None:
            self.counts.add(asks=1, ask_seconds=self._clock() - started_s)
        self._asking_since_s = None
        self._done.append(Asked(asked.number, asked.chain, there))
        self._on_progress()

    def _probe(self) -> None:
        """Try whether a tier that has failed answers again."""
        try:
            self._session().ping()
        except Exception as error:  # the border of a thread
            self._failed("probe", error)
        else:
            self.health.succeeded()
            self._on_progress()


def _has_run(task: Task) -> bool:
    try:
        task.run()
    except Exception:  # whatever it is, the splice failed: its tokens are computed
        return False
    return True
