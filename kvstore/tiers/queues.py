"""What waits to be read or written, and the pieces of it that an executor takes and runs. For one thread at a time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.blocks.ids import BlockId
from kvstore.tiers.port import Asked, Chain, Rank, ReadJob, WriteBatch, WriteJob


@dataclass(frozen=True, slots=True)
class Task:
    """Other work: `run` is called; a reading thread's result has `key` and whether it succeeded."""

    key: int
    run: Callable[[], None]


class Lane(Enum):
    """Work of one lane goes in order, or by rank, beside that of the others."""

    READ = "read"
    WRITE = "write"
    ASK = "ask"


@dataclass(slots=True, eq=False)
class Reads:
    """Taken to be read, all of one rank. num_active: with these. task: to be run instead."""

    jobs: list[ReadJob]
    rank: Rank
    num_active: int
    begun_s: float
    task: Task | None = None


Work = Reads | WriteBatch | Asked | Task


class RankedReads:
    """Queued reads and tasks: the smallest rank goes first, and of equal ranks the earliest."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, int]] = []  # a heap; entries that are not in `_jobs` are void
        self._jobs: dict[int, ReadJob | Task] = {}  # by number
        self._numbers: dict[int, int] = {}  # of the read with a handle
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: ReadJob | Task, rank: Rank) -> None:
        number = next(self._counter)
        self._jobs[number] = job
        heapq.heappush(self._order, (rank, number))
        if isinstance(job, ReadJob):
            self._numbers[job.handle] = number

    def change_rank(self, handle: int, rank: Rank) -> None:
        """Change a queued read's rank; others are ignored."""
        if handle in self._numbers:
            self.add(self._jobs.pop(self._numbers[handle]), rank)

    def cancel(self, handle: int) -> bool:
        """Cancel a read; False when it is not queued."""
        number = self._numbers.pop(handle, None)
        return number is not None and self._jobs.pop(number) is not None

    def first_rank(self) -> Rank | None:
        """The smallest rank; None when nothing is queued."""
        while self._order and self._order[0][1] not in self._jobs:
            heapq.heappop(self._order)
        return self._order[0][0] if self._order else None

    def pop(self) -> tuple[Rank, ReadJob | Task]:
        rank = self.first_rank()
        assert rank is not None, "nothing is queued"
        _, number = heapq.heappop(self._order)
        job = self._jobs.pop(number)
        if isinstance(job, ReadJob):
            del self._numbers[job.handle]
        return rank, job

    def clear(self) -> None:
        self._order.clear()
        self._jobs.clear()
        self._numbers.clear()


class PendingWrites:
    """Pending writes, deletions and times of last use.

    batch_bytes: of one batch. gather_s: so long may a batch wait to become full. touched_wait_s: so long may times of
    last use wait for other work.
    """

    def __init__(self, batch_bytes: int, gather_s: float, touched_wait_s: float) -> None:
        self._batch_bytes, self._gather_s, self._most_touched_wait_s = batch_bytes, gather_s, touched_wait_s
        self._chains: deque[tuple[Chain, Sequence[WriteJob]]] = deque()  # batches of their own
        self._jobs: deque[WriteJob] = deque()  # those of no chain
        self._deletes: dict[BlockId, None] = {}
        self._touched: dict[BlockId, float] = {}
        self._touched_since_s = 0.0
        self._since_s: float | None = None  # since when a batch gathers
        self._is_hurried = False

    def add(self, jobs: Sequence[WriteJob], chain: Chain | None = None) -> None:
        """chain: the jobs' own batch; None: each may join others."""
        for job in jobs:
            self._deletes.pop(job.record.block_id, None)  # it is overwritten
        if chain is None:
            self._jobs.extend(jobs)
        else:
            self._chains.append((chain, jobs))

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        self._deletes |= dict.fromkeys(block_ids)

    def touch(self, touched: dict[BlockId, float], now_s: float) -> None:
        if not self._touched:
            self._touched_since_s = now_s
        self._touched |= touched

    def touch_again(self, touched: dict[BlockId, float], now_s: float) -> None:
        """These could not be written, and times that came meanwhile are later."""
        self._touched_since_s = now_s
        self._touched = touched | self._touched

    def __len__(self) -> int:
        """Writes."""
        return len(self._jobs) + sum(len(jobs) for _, jobs in self._chains)

    def __bool__(self) -> bool:
        return self.has_blocks or bool(self._touched)

    @property
    def has_blocks(self) -> bool:
        """Whether there is more than times of last use."""
        return bool(self._jobs or self._chains or self._deletes)

    def hurry(self) -> None:
        """What is here is to be written at once."""
        self._is_hurried = bool(self)

    def clear(self) -> None:
        self._jobs.clear()
        self._chains.clear()
        self._deletes.clear()

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for more before the next batch; None: there is nothing to write."""
        if not self:
            return None
        if self._is_hurried or self.is_due:
            return 0.0
        if not self.has_blocks:
            return max(0.0, self._touched_since_s + self._most_touched_wait_s - now_s)
        if self._since_s is None:
            self._since_s = now_s
        return max(0.0, self._since_s + self._gather_s - now_s)

    @property
    def is_due(self) -> bool:
        """Whether there is a full batch of writes, or a deletion, which makes room."""
        is_large = self._jobs and len(self._jobs) * self._jobs[0].num_bytes >= self._batch_bytes
        return bool(self._deletes or self._chains or is_large)

    def pop(self) -> WriteBatch:
        """Deletions make room for writes. That of a block which is being written waits for the write. What is of a
        chain goes alone.
        """
        self._is_hurried, self._since_s = False, None
        deletes = tuple(self._deletes)
        if deletes:
            queued = itertools.chain(self._jobs, *(jobs for _, jobs in self._chains))
            writing = {job.record.block_id for job in queued}
            deletes = tuple(block_id for block_id in self._deletes if block_id not in writing)
            self._deletes = {block_id: None for block_id in self._deletes if block_id in writing}
        if self._chains:
            if deletes:
                return WriteBatch(deletes=deletes)
            chain, jobs = self._chains.popleft()
            return WriteBatch(tuple(jobs), chain=chain)
        gathered: list[WriteJob] = []
        size = 0
        while self._jobs and (not gathered or size < self._batch_bytes):
            gathered.append(self._jobs.popleft())
            size += gathered[-1].num_bytes
        touched, self._touched = self._touched, {}
        return WriteBatch(tuple(gathered), deletes, touched)
