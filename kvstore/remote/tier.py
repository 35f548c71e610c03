"""The remote tier: asks for, reads, stores and deletes blocks of a shared store, in threads of its own that are polled.

Does not decide what is worth moving. Nobody waits for it: while its breaker is open, everything ends at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.io_queue import Read, ReadDone
from kvstore.errors import RemoteError
from kvstore.forks import leave_to_parent
from kvstore.remote.breaker import Breaker
from kvstore.remote.lanes import Lane, ReadLanes
from kvstore.remote.shared import FULL, Put, PutResult, Session, Shared, SharedChain
from kvstore.stats import Counts

NUM_READERS = 2
MOST_ASKS = 256  # may wait; others are not asked for
MOST_JOBS = 4  # puts and deletes may wait; their owner keeps the others
LEAST_READ_BYTES = 256 << 10  # in a batch
BATCH_S = 0.1  # a batch of reads may take, so that nobody waits long for it
NUMBERS = ("asks", "reads", "read_bytes", "stored", "stored_bytes", "deleted")
FULL_S = 10.0  # without another put after the store said that it is full


@dataclass(frozen=True, slots=True)
class Asked:
    """there None: unknown, as the store did not answer."""

    number: int
    chain: SharedChain
    there: list[bool] | None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PutsDone:
    number: int
    results: list[PutResult]


@dataclass(frozen=True, slots=True)
class DeleteDone:
    """error None: the blocks are gone."""

    block_ids: tuple[BlockId, ...]
    error: str | None


RemoteDone = Asked | ReadDone | PutsDone | DeleteDone


@dataclass(frozen=True, slots=True)
class _Ask:
    number: int
    chain: SharedChain


@dataclass(frozen=True, slots=True)
class _Puts:
    number: int
    chain: SharedChain
    puts: tuple[Put, ...]


@dataclass(frozen=True, slots=True)
class _Delete:
    block_ids: tuple[BlockId, ...]


class RemoteTier:
    """on_progress: called in a worker thread after something has ended; it may only wake another thread."""

    def __init__(
        self, shared: Shared, on_progress: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shared, self.breaker = shared, Breaker(clock)
        self.counts = Counts(NUMBERS, ("ask_seconds", "read_seconds"), ("read_bytes_per_s",))
        self._on_progress, self._clock = on_progress, clock
        self._local = threading.local()
        self._sessions: list[Session] = []  # of all threads
        self._done: deque[RemoteDone] = deque()
        self._full_until_s = 0.0
        self.asks: Lane[_Ask] = Lane("kvstore-remote-ask", self._ask, MOST_ASKS, self._probe)
        self._jobs: Lane[_Puts | _Delete] = Lane("kvstore-remote-put", self._do, MOST_JOBS)
        self.reads = ReadLanes("kvstore-remote-read", self._read, NUM_READERS, self._batch_bytes)
        leave_to_parent(self, str(shared))

    # -- the control plane's side ------------------------------------------------------------------------------------
    def ask(self, number: int, chain: SharedChain) -> bool:
        """Ask which blocks of the chain are there, which also refreshes them. Returns False if it cannot be asked
        now.
        """
        return not self.breaker.is_open and self.asks.submit(_Ask(number, chain))

    def put(self, number: int, chain: SharedChain, puts: Sequence[Put]) -> bool:
        """Store blocks, in the chain's order. Returns False if it takes none now."""
        return self.can_put and self._jobs.submit(_Puts(number, chain, tuple(puts)))

    @property
    def can_put(self) -> bool:
        return not self.is_refusing and len(self._jobs) < MOST_JOBS

    @property
    def is_refusing(self) -> bool:
        """Whether it takes nothing for a while."""
        return self.breaker.is_open or self._clock() < self._full_until_s

    def delete(self, block_ids: Sequence[BlockId]) -> bool:
        """Delete blocks, after all earlier puts. Returns False if it cannot be asked now."""
        return not self.breaker.is_open and self._jobs.submit(_Delete(tuple(block_ids)))

    def completed(self) -> list[RemoteDone]:
        """Everything that has ended since the last call."""
        done: list[RemoteDone] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or left to be polled, except for asks, which nobody waits for."""
        return not len(self._jobs) and self.reads.is_idle and not self._done

    def as_dict(self) -> dict[str, object]:
        return {
            "url": str(self.shared),
            "degraded": self.breaker.error,
            "full": self._clock() < self._full_until_s,
            "breaks": self.breaker.num_opened,
            **self.counts.as_dict(),
        }

    def close(self, timeout_s: float) -> bool:
        """End after what is running. Returns False if that takes longer than the timeout."""
        ended = [lane.close(timeout_s) for lane in (self.asks, self._jobs, self.reads)]
        for session in self._sessions if all(ended) else ():
            session.close()
        return all(ended)

    # -- threads -----------------------------------------------------------------------------------------------------
    def _session(self) -> Session:
        found: Session | None = getattr(self._local, "session", None)
        if found is None:
            found = self._local.session = self.shared.session()
            self._sessions.append(found)
        return found

    def _end(self, done: RemoteDone) -> None:
        self._done.append(done)
        self._on_progress()

    def _failed(self, what: str, error: Exception) -> str:
        """Open the breaker, whatever the error was: for a while, nobody waits for the store."""
        why = str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"
        self.counts.failed(what)
        (self.breaker.probe_failed if what == "probe" else self.breaker.failed)(why)
        return why

    def _probe(self) -> float | None:
        """Between asks, try whether a store that has failed answers again."""
        wait_s = self.breaker.probe_in_s
        if wait_s is None:
            return 0.25  # other threads open the breaker
        if wait_s > 0:
            return min(wait_s, 0.25)
        try:
            self._session().ping()
        except Exception as error:  # the border of a thread
            self._failed("probe", error)
        else:
            self.breaker.probe_succeeded()
            self._on_progress()
        return 0.0

    def _ask(self, job: _Ask) -> None:
        started, there = time.perf_counter(), None
        if not self.breaker.is_open:
            try:
                there = self._session().ask(job.chain)
            except Exception as error:  # the border of a thread
                self._failed("ask", error)
        seconds = time.perf_counter() - started
        if there is not None:
            self.counts.add(asks=1, ask_seconds=seconds)
        self._end(Asked(job.number, job.chain, there, seconds))

    def _batch_bytes(self) -> int:
        rate = self.counts.rates["read_bytes_per_s"] or 0
        return int(min(max(LEAST_READ_BYTES, BATCH_S * rate), self.shared.most_read_bytes))

    def _read(self, batch: list[Read]) -> None:
        started, results = time.perf_counter(), [ReadResult.FAILED] * len(batch)
        if not self.breaker.is_open:
            try:
                results = self._session().read(batch)
            except Exception as error:  # the border of a thread
                self._failed("read", error)
        seconds = time.perf_counter() - started
        num_ok = sum(result is ReadResult.OK for result in results)
        if num_ok:
            num_bytes = num_ok * batch[0].view.nbytes
            rate = num_bytes / max(seconds, 1e-6)
            self.counts.add(reads=num_ok, read_bytes=num_bytes, read_seconds=seconds, read_bytes_per_s=rate)
        active = max(1, self.reads.num_active)
        for read, result in zip(batch, results, strict=True):
            self._done.append(ReadDone(read, result, seconds / len(batch), active))
        self._on_progress()

    def _do(self, job: _Puts | _Delete) -> None:
        if isinstance(job, _Puts):
            self._end(PutsDone(job.number, self._put(job)))
        else:
            self._end(DeleteDone(job.block_ids, self._delete(job.block_ids)))

    def _put(self, job: _Puts) -> list[PutResult]:
        try:
            results = self._session().put(job.chain, job.puts)
        except Exception as error:  # the border of a thread; what was stored all the same is found when it is asked for
            why = self._failed("put", error)
            return [PutResult(put.record.block_id, why) for put in job.puts]
        stored = [result for result in results if result.error is None]
        self.counts.add(stored=sum(one.num_bytes > 0 for one in stored), stored_bytes=sum(r.num_bytes for r in stored))
        for result in results:
            if result.error is not None:
                self.counts.failed(f"put: {result.error}")
        if any(result.error == FULL for result in results):
            self._full_until_s = self._clock() + FULL_S
        return results

    def _delete(self, block_ids: tuple[BlockId, ...]) -> str | None:
        try:
            self._session().delete(block_ids)
        except Exception as error:  # the border of a thread
            return self._failed("delete", error)
        self.counts.add(deleted=len(block_ids))
        return None
