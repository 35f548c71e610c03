"""A virtual clock and disk, which take as long as given rates say and move no bytes: a `KVStore` for replays.

Everything that decides is the store's own. Knows no trace and no request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.index import DiskIndex
from kvstore.disk.opening import OpenDisk
from kvstore.disk.tier import DiskTier
from kvstore.memory.tier import CpuTier
from kvstore.planning.replay_config import ReplayConfig
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.context import Identity, StoreContext
from kvstore.store.control_plane import KVStore
from kvstore.store.seam import Transfers
from kvstore.store.write_back import PAGE_BYTES, WriteBack
from kvstore.tiers.port import Chain, Keeps, Rank, ReadJob, Stored, WriteBatch, Written
from kvstore.tiers.queues import Lane, Reads
from kvstore.tiers.worker import TierWorker, WorkerLimits

STORE_BLOCK_BYTES = 2 << 20  # that a block takes, as the store is told: for such are the bounds of its queues
BATCH_S = 0.05  # that a batch of writes takes at least, unless there are no more
STAGING_BYTES = 64 << 20  # as in the engine, which has an arena of this size where the CPU tier is switched off


class VirtualClock:
    """A clock with planned events. Of events at the same time, the first planned runs first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_planned = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def __call__(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        self._num_planned += 1
        heapq.heappush(self._events, (time_s, self._num_planned, action, argument))

    def run(self) -> None:
        """Run until nothing is planned any more."""
        events = self._events
        while events:
            self.now_s, _, action, argument = heapq.heappop(events)
            action(argument)


class VirtualDisk:
    """A tier, and its file, which holds `num_blocks` below its watermark. Nothing goes wrong there."""

    broken, keeps, most_read_bytes, codec = False, Keeps.EXACT, 1, "raw"

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.file = self
        self._block_bytes = (block_bytes // PAGE_BYTES + 1) * PAGE_BYTES  # as `WriteBack` counts them
        self._stored: set[BlockId] = set()
        self._most_bytes = num_blocks * self._block_bytes
        self.capacity_bytes = math.ceil(self._most_bytes / WATERMARK)

    def __str__(self) -> str:
        return "a virtual disk"

    def excess_bytes(self, incoming_bytes: int = 0) -> int:
        return len(self._stored) * self._block_bytes + incoming_bytes - self._most_bytes

    def session(self) -> VirtualDisk:
        return self

    def ask(self, chain: Chain) -> list[bool]:
        return [block_id in self._stored for block_id in chain.ids]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        return [ReadResult.OK] * len(jobs)

    def write(self, batch: WriteBatch) -> Written:
        self._stored.difference_update(batch.deletes)
        self._stored.update(job.record.block_id for job in batch.jobs)
        return Written([Stored(job.record.block_id, None, self._block_bytes) for job in batch.jobs])

    def ping(self) -> None:
        """It is always there."""

    def close(self) -> None:
        """There is nothing to close."""


class VirtualEvents:
    """An executor: one read at a time and writes beside them, which take as long as they take on the virtual clock.

    write_s: of so many blocks. on_progress: called with a rank when its reads have ended, and with None when all writes
    have.
    """

    def __init__(
        self, worker: TierWorker, clock: VirtualClock, read_s: float, write_s: Sequence[float],
        on_progress: Callable[[Rank | None], None],
    ) -> None:  # fmt: skip
        self._worker, self._clock, self._read_s, self._write_s = worker, clock, read_s, write_s
        self._on_progress = on_progress
        self._is_reading = self._is_writing = self.has_woken = False

    def wake(self, lane: Lane) -> None:
        if lane is Lane.READ:
            self._read_next()
        elif not self._is_writing:  # it begins after the current event, when everything has been submitted
            self._is_writing = True
            self._clock.at(self._clock.now_s, self._write_next)

    def join(self, timeout_s: float) -> bool:
        return True

    def _read_next(self) -> None:
        if not self._is_reading and isinstance(taken := self._worker.take_work(Lane.READ), Reads):
            self._is_reading = True
            self._clock.at(self._clock.now_s + self._read_s, self._read, taken)

    def _read(self, taken: Reads) -> None:
        self._worker.run(taken)
        self._is_reading = False
        with self._worker.lock:
            self._read_next()
        self._tell(taken.rank)

    def _write_next(self, _: object) -> None:
        with self._worker.lock:
            taken = self._worker.take_work(Lane.WRITE)
        self._is_writing = isinstance(taken, WriteBatch)
        if isinstance(taken, WriteBatch):
            self._clock.at(self._clock.now_s + self._write_s[len(taken.jobs)], self._write, taken)

    def _write(self, taken: WriteBatch) -> None:
        self._worker.run(taken)
        self._is_writing = False
        if self._worker.has_writes:
            self.wake(Lane.WRITE)
        else:
            self._tell(None)

    def _tell(self, rank: Rank | None) -> None:
        """Call `on_progress` if the worker has called its own."""
        has_woken, self.has_woken = self.has_woken, False
        if has_woken:
            self._on_progress(rank)


def num_cpu_blocks(config: ReplayConfig, longest: int) -> int:
    if config.cpu_blocks or not config.disk_blocks:
        return config.cpu_blocks
    longest += 2 * config.checkpoint_blocks
    return max(2 * config.service.max_batch + longest, min(STAGING_BYTES // config.block_bytes, config.disk_blocks))


def virtual_store(
    config: ReplayConfig, num_arena_blocks: int, block_size: int, clock: VirtualClock, steering: Steering,
    transfers: Transfers, on_progress: Callable[[Rank | None], None],
) -> tuple[KVStore, TierWorker]:  # fmt: skip
    """An empty store of these sizes, which always loads what it has, and its I/O."""
    disk = VirtualDisk(config.disk_blocks, STORE_BLOCK_BYTES) if config.disk_blocks else None
    service, stats = config.service, StoreStats()
    read_s, write_s = config.block_bytes / service.read_bytes_per_s, config.block_bytes / service.write_bytes_per_s
    batches_s = [0.0, write_s]  # of so many blocks
    while batches_s[-1] < BATCH_S and len(batches_s) <= num_arena_blocks:
        batches_s.append(batches_s[-1] + write_s)
    events: list[VirtualEvents] = []

    def executor(worker: TierWorker) -> VirtualEvents:
        events.append(VirtualEvents(worker, clock, read_s, batches_s, on_progress))
        return events[0]

    def woken() -> None:
        events[0].has_woken = True

    limits = WorkerLimits(gather_s=0.0, batch_bytes=(len(batches_s) - 1) * STORE_BLOCK_BYTES)
    io = TierWorker("disk", disk, woken, limits, clock, executor)
    cpu = CpuTier(num_arena_blocks, keep=bool(config.cpu_blocks), order=steering.order("cpu"), clock=clock)
    memory = memoryview(bytes(STORE_BLOCK_BYTES))  # of every arena block; nobody touches it, so it takes none
    context = StoreContext(cpu, lambda _: memory, steering, stats, clock)
    on_disk = None if disk is None else OpenDisk(cast(DiskTier, disk), DiskIndex(clock), [])
    write_back = None if on_disk is None else WriteBack(context, on_disk, io)
    planner = Planner(STORE_BLOCK_BYTES, block_size, always=True)
    identity = Identity(b"", "", block_size, config.state_blocks, config.window_blocks)
    store = KVStore(context, planner, identity, io, transfers, lambda *_: None, write_back)
    return store, io
