"""A virtual clock, disk and transfers, which take as long as given rates say and move no bytes: a `KVStore` for
replays.

Everything that decides is the store's own. Knows no trace and no request.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import ReadResult, Transferred
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.index import DiskIndex
from kvstore.disk.io_queue import (
    AT_ONCE,
    WAKE_EVERY,
    Done,
    IoQueue,
    Rank,
    RankedReads,
    Read,
    ReadDone,
    Task,
    Write,
    WriteDone,
)
from kvstore.disk.opening import OpenDisk
from kvstore.disk.tier import DiskTier
from kvstore.memory.tier import CpuTier
from kvstore.planning.replay_config import ReplayConfig
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.control_plane import KVStore
from kvstore.store.stored import Identity
from kvstore.store.write_back import PAGE_BYTES, WriteBack

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
    """Stands for a `DiskTier` and its file, which holds `num_blocks` below its watermark."""

    path, broken = "a virtual disk", False

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.file = self
        self.file_bytes = (block_bytes // PAGE_BYTES + 1) * PAGE_BYTES  # of one block, as `WriteBack` counts them
        self.num_stored = 0
        self._most_bytes = num_blocks * self.file_bytes
        self.capacity_bytes = math.ceil(self._most_bytes / WATERMARK)

    def excess_bytes(self, incoming_bytes: int = 0) -> int:
        return self.num_stored * self.file_bytes + incoming_bytes - self._most_bytes


class VirtualIo:
    """Stands for an `IoQueue`: one read at a time, in order of rank, and writes beside them.

    on_progress: called with a rank when its reads have ended, and with None when all writes have.
    """

    def __init__(
        self, clock: VirtualClock, disk: VirtualDisk, read_s: float, write_s: float,
        on_progress: Callable[[Rank | None], None],
    ) -> None:  # fmt: skip
        self._clock, self._disk, self._read_s, self._write_s = clock, disk, read_s, write_s
        self._on_progress = on_progress
        self._reads = RankedReads()
        self._reading: tuple[Rank, Read, float] | None = None  # since when
        self._num_unseen = 0
        self._writes: deque[Write] = deque()
        self._deletes: dict[BlockId, None] = {}
        self._is_writing = False
        self._done: deque[Done] = deque()

    # -- reads -------------------------------------------------------------------------------------------------------
    def submit_read(self, read: Read | Task, rank: Rank = AT_ONCE) -> None:
        self._reads.add(read, rank)
        self._read_next()

    def rank_read(self, arena_block: int, rank: Rank) -> None:
        self._reads.change_rank(arena_block, rank)

    def cancel_read(self, arena_block: int) -> bool:
        return self._reads.cancel(arena_block)

    @property
    def stalled_s(self) -> float:
        return 0.0 if self._reading is None else self._clock.now_s - self._reading[2]

    def _read_next(self) -> None:
        if self._reading is None and self._reads:
            rank, read = self._reads.pop()
            assert isinstance(read, Read), "a replay splices nothing"
            self._reading = rank, read, self._clock.now_s
            self._clock.at(self._clock.now_s + self._read_s, self._read_done)

    def _read_done(self, _: object) -> None:
        assert self._reading is not None
        (rank, read, _), self._reading = self._reading, None
        self._done.append(ReadDone(read, ReadResult.OK, self._read_s))
        self._num_unseen += 1
        is_last = self._reads.first_rank() != rank or self._num_unseen == WAKE_EVERY
        self._read_next()
        if is_last:
            self._num_unseen = 0
            self._on_progress(rank)

    # -- writes ------------------------------------------------------------------------------------------------------
    def submit_write(self, write: Write) -> None:
        if write.record.block_id in self._deletes:  # it is overwritten
            del self._deletes[write.record.block_id]
            self._disk.num_stored -= 1
        self._writes.append(write)
        self._wake_writer()

    def submit_deletes(self, block_ids: Sequence[BlockId]) -> None:
        self._deletes |= dict.fromkeys(block_ids)
        self._wake_writer()

    def _wake_writer(self) -> None:
        """The writer begins after the current event, when everything has been submitted."""
        if not self._is_writing:
            self._is_writing = True
            self._clock.at(self._clock.now_s, self._write_next)

    def _write_next(self, _: object) -> None:
        writes, seconds = [self._writes.popleft()] if self._writes else [], self._write_s
        while self._writes and seconds < BATCH_S:
            writes.append(self._writes.popleft())
            seconds += self._write_s
        deletes, self._deletes = tuple(self._deletes), {}
        done = WriteDone(tuple(writes), deletes, (self._disk.file_bytes,) * len(writes), None, 0.0)
        self._clock.at(self._clock.now_s + (seconds if writes else 0.0), self._written, done)

    def _written(self, done: WriteDone) -> None:
        self._disk.num_stored += len(done.writes) - len(done.deletes)
        self._done.append(done)
        self._is_writing = False
        if self._writes or self._deletes:
            self._wake_writer()
        else:
            self._on_progress(None)

    # -- both --------------------------------------------------------------------------------------------------------
    def completed(self) -> list[Done]:
        done, self._done = list(self._done), deque()
        return done

    @property
    def is_idle(self) -> bool:
        return not (self._reading or self._reads or self._is_writing or self._done)


class VirtualTransfers:
    """Stands for a `Transfer`. The replay appends finished transfers to `done`."""

    can_save = True

    def __init__(self) -> None:
        self.done: list[Transferred] = []

    def completed(self) -> list[Transferred]:
        done, self.done = self.done, []
        return done


def num_cpu_blocks(config: ReplayConfig, longest: int) -> int:
    if config.cpu_blocks or not config.disk_blocks:
        return config.cpu_blocks
    return max(2 * config.service.max_batch + longest, min(STAGING_BYTES // config.block_bytes, config.disk_blocks))


def virtual_store(
    config: ReplayConfig, num_arena_blocks: int, block_size: int, clock: VirtualClock, steering: Steering,
    transfers: VirtualTransfers, on_progress: Callable[[Rank | None], None],
) -> tuple[KVStore, VirtualIo]:  # fmt: skip
    """An empty store of these sizes, which always loads what it has, and its I/O."""
    disk = VirtualDisk(config.disk_blocks, STORE_BLOCK_BYTES)
    service, stats = config.service, StoreStats()
    read_s, write_s = config.block_bytes / service.read_bytes_per_s, config.block_bytes / service.write_bytes_per_s
    virtual_io = VirtualIo(clock, disk, read_s, write_s, on_progress)
    io = cast(IoQueue, virtual_io)
    cpu = CpuTier(num_arena_blocks, keep=bool(config.cpu_blocks), order=steering.order("cpu"), clock=clock)
    write_back = None
    if config.disk_blocks:
        memory = memoryview(bytes(STORE_BLOCK_BYTES))  # of every arena block; nobody touches it, so it takes none
        on_disk = OpenDisk(cast(DiskTier, disk), DiskIndex(clock), [])
        write_back = WriteBack(on_disk, cpu, io, lambda _: memory, stats, clock, steering)
    planner = Planner(STORE_BLOCK_BYTES, block_size, always=True)
    identity = Identity(b"", "", block_size)
    store = KVStore(cpu, io, write_back, transfers, identity, planner, lambda _: None, stats, clock, steering)
    return store, virtual_io
