"""What of a simulated store fails and takes long: disk, worker and transfers, which are events of the virtual clock.

Everything that they move is compared with what it should be.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from kvstore.blocks.ids import BlockId, is_quantised
from kvstore.blocks.records import BlockRecord, ReadResult, StatePiece, TransferPlan, Transferred
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.format import WriteError
from kvstore.disk.index import IndexEntry
from kvstore.disk.tier import DiskSession
from kvstore.errors import StoreError
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.tiers.port import Keeps, ReadJob, Stored, WriteBatch, Written
from kvstore.tiers.queues import Lane, Reads
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.simulation.parts import (
    GARBAGE,
    START_S,
    TOKEN_BYTES,
    Arena,
    Book,
    Clock,
    WatchedPool,
    WatchedWindows,
    quantised,
    state_content,
    window_part,
)

NUM_STATE_ROWS = 14


# -- faults ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Faults:
    """How often something goes wrong: a share of the operations, or of the time (phases)."""

    slow_reads: float = 0.0  # phases, in which a read takes a hundred times as long
    hung_reads: float = 0.0
    failed_reads: float = 0.0
    rotten: float = 0.0  # blocks on disk that become corrupt, or go missing, as they are written
    failed_writes: float = 0.0  # phases
    broken_disk: float = 0.0  # of the transactions
    failed_loads: float = 0.0  # of the steps with loads
    failed_saves: float = 0.0
    full_queue: float = 0.0  # phases, in which nothing can be saved
    failed_steps: float = 0.0
    crashes_per_day: float = 0.0
    restarts_per_day: float = 0.0

    @property
    def are_none(self) -> bool:
        return self == Faults(crashes_per_day=self.crashes_per_day, restarts_per_day=self.restarts_per_day)


class Weather:
    """Phases of a fault: it holds or not for some minutes each, by the seed. quiet: from then on nothing fails."""

    def __init__(self, clock: Clock, seed: str) -> None:
        self._clock, self._seed = clock, seed
        self._is_bad: dict[tuple[str, int], bool] = {}
        self.quiet = False

    def is_bad(self, what: str, share: float) -> bool:
        if not share or self.quiet:
            return False
        phase = (what, int((self._clock.now_s - START_S) // 97.0))
        if phase not in self._is_bad:
            self._is_bad[phase] = random.Random(f"{self._seed} {phase}").random() < share
        return self._is_bad[phase]


class InjectedError(Exception):
    """Something unforeseen in the middle of a step."""


# -- the disk ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Platter:
    """What outlives a crash: values by block id, in the order in which they were written."""

    values: dict[BlockId, tuple[IndexEntry, BlockRecord, bytes]] = field(default_factory=dict)
    rotten: set[BlockId] = field(default_factory=set)


class Disk:
    """A `DiskTier` and its file, without a file. Freed pages can be used again two transactions later, as in LMDB."""

    path, keeps, most_read_bytes, codec = "the virtual disk", Keeps.EXACT, 1, "raw"

    def __init__(
        self, platter: Platter, capacity_bytes: int, book: Book, clock: Clock, faults: Faults, rng: random.Random,
        weather: Weather, counts: Counter[str],
    ) -> None:  # fmt: skip
        self.file, self.platter, self.capacity_bytes, self.broken = self, platter, capacity_bytes, False
        self.book, self.clock, self.faults, self.rng, self.counts = book, clock, faults, rng, counts
        self.weather = weather
        self._freed: deque[int] = deque([0, 0], maxlen=2)

    def session(self) -> DiskSession:
        return DiskSession(self)

    @property
    def used_bytes(self) -> int:
        return len(self.platter.values) * self.book.stored_bytes

    def excess_bytes(self, incoming_bytes: int = 0) -> int:
        return self.used_bytes + incoming_bytes - int(WATERMARK * self.capacity_bytes)

    def contains(self, block_id: BlockId) -> bool:
        return not self.broken and block_id in self.platter.values

    def scan(self) -> Iterator[list[IndexEntry]]:
        entries = [entry for entry, _, _ in self.platter.values.values()]
        self.rng.shuffle(entries)
        yield from (entries[i : i + 100] for i in range(0, len(entries), 100))

    def write(
        self, puts: Sequence[tuple[BlockRecord, memoryview]], deletes: Iterable[BlockId], touched: dict[BlockId, float]
    ) -> Written:
        if (error := self._write_error(puts)) is not None:
            self.counts[f"write error: {error}"] += 1
            return Written(error=error)
        freed = 0
        for block_id in deletes:
            if (gone := self.platter.values.pop(block_id, None)) is not None:
                freed += gone[0].stored_bytes
                self.platter.rotten.discard(block_id)
        for block_id, used_s in touched.items():
            if block_id in self.platter.values:
                entry, record, value = self.platter.values[block_id]
                self.platter.values[block_id] = (replace(entry, last_access_s=used_s), record, value)
        for record, view in puts:
            self._put(record, bytes(view))
        self._freed.append(freed)
        self.counts["blocks written"] += len(puts)
        return Written([Stored(record.block_id, None, self.book.stored_bytes) for record, _ in puts])

    def _write_error(self, puts: Sequence[tuple[BlockRecord, memoryview]]) -> WriteError | None:
        if self.broken:
            return WriteError.BROKEN
        if not self.weather.quiet and self.rng.random() < self.faults.broken_disk:
            self.broken = True
            return WriteError.BROKEN
        if self.weather.is_bad("write", self.faults.failed_writes) and puts:
            return self.rng.choice([WriteError.MAP_FULL, WriteError.IO, WriteError.NO_SPACE])
        incoming = len(puts) * self.book.stored_bytes
        if puts and self.used_bytes + sum(self._freed) + incoming > self.capacity_bytes:
            self._freed.append(0)  # as after the small transaction that makes the file writable again
            return WriteError.MAP_FULL
        return None

    def _put(self, record: BlockRecord, value: bytes) -> None:
        if is_quantised(record.block_id):
            value = quantised(value)
        assert value == self.book.blocks[record.block_id], "the disk is given another content than the record says"
        assert record.parent_id == self.book.parents[record.block_id], "the disk is given another parent"
        now_s, block_id = self.clock.now_s, record.block_id
        entry = IndexEntry(block_id, record.parent_id, self.book.stored_bytes, now_s, record.model, record.tenant)
        self.platter.values[block_id] = (entry, record, value)
        self.platter.rotten.discard(block_id)
        if not self.weather.quiet and self.rng.random() < self.faults.rotten:
            self.platter.rotten.add(block_id)

    def read(self, expected: BlockRecord, into: memoryview) -> ReadResult:
        if self.broken or (not self.weather.quiet and self.rng.random() < self.faults.failed_reads):
            return ReadResult.FAILED
        found = self.platter.values.get(expected.block_id)
        if found is None:
            return ReadResult.MISSING
        if expected.block_id in self.platter.rotten:
            return self.rng.choice([ReadResult.CORRUPT, ReadResult.MISSING])
        assert found[1].same_content(expected), "a block of this id was written with another content"
        into[:] = found[2]
        return ReadResult.OK

    def quarantine(self) -> None:
        if self.rng.random() < 0.3 and not self.weather.quiet:
            raise StoreError("the file system does not let us")
        self.platter.values.clear()
        self.platter.rotten.clear()
        self._freed.extend([0, 0])
        self.broken = False
        self.counts["quarantine"] += 1

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, object]:
        return {"bytes": self.used_bytes}


class WatchedWorker(TierWorker):
    """The disk's worker, which counts its reads and says what it writes from."""

    def __init__(
        self, disk: Disk | None, on_progress: Callable[[], None], limits: WorkerLimits, clock: Clock, arena: Arena,
        read_s: float, rng: random.Random,
    ) -> None:  # fmt: skip
        self.threads = VirtualThreads(self, disk, clock, arena, read_s, rng)
        self.num_reads_submitted, self._arena = 0, arena
        super().__init__("disk", disk, on_progress, limits, lambda: clock.now_s, lambda _: self.threads)

    def submit_read(self, job, rank=(0,)) -> None:
        super().submit_read(job, rank)
        self.num_reads_submitted += isinstance(job, ReadJob)

    def submit_writes(self, jobs, chain=None) -> None:
        super().submit_writes(jobs, chain)
        for job in jobs:
            self._arena.begin(job.handle, "write to disk")


class VirtualThreads:
    """An executor: entries of the clock's agenda. has_hung: a read for which the store could not wait at its end."""

    def __init__(
        self, worker: TierWorker, disk: Disk | None, clock: Clock, arena: Arena, read_s: float, rng: random.Random
    ) -> None:
        self._worker, self._disk, self._clock, self._arena = worker, disk, clock, arena
        self._read_s, self._rng = read_s, rng
        self._num_reading = 0
        self.writing: WriteBatch | None = None
        self.has_hung = False

    def wake(self, lane: Lane) -> None:
        self._clock.io.after(1e-4, self._start_reads if lane is Lane.READ else self._start_batch)

    def _take(self, lane: Lane) -> object:
        with self._worker.lock:
            return self._worker.take_work(lane)

    def _start_reads(self) -> None:
        most = self._worker.limits.num_readers
        while self._num_reading < most and isinstance(taken := self._take(Lane.READ), Reads):
            self._num_reading += 1
            for job in taken.jobs:
                if isinstance(job, ReadJob):
                    self._arena.begin(job.handle, "read from disk")
                    job.view[: len(job.view) // 2] = bytes(len(job.view) // 2)
            self._clock.io.after(self._seconds(), partial(self._ended, taken))

    def _seconds(self) -> float:
        seconds = self._read_s * self._rng.uniform(0.5, 1.5)
        if self._disk is None or self._disk.weather.quiet:
            return seconds
        faults, weather = self._disk.faults, self._disk.weather
        if self._rng.random() < faults.hung_reads:
            return 40.0
        return seconds * (100.0 if weather.is_bad("read", faults.slow_reads) else 1.0)

    def _ended(self, taken: Reads) -> None:
        self._worker.run(taken)
        for job in taken.jobs:
            if isinstance(job, ReadJob):
                self._arena.end(job.handle, "read from disk")
                self._arena.movers[job.handle] = "read"
        self._num_reading -= 1
        self._start_reads()

    def _start_batch(self) -> None:
        if self.writing is not None:
            return
        taken = self._take(Lane.WRITE)
        if isinstance(taken, WriteBatch):
            self.writing, before = taken, [bytes(job.fetch()) for job in taken.jobs]
            seconds = self._read_s * (1 + len(before) / 2) * self._rng.uniform(0.5, 2.0)
            self._clock.io.after(seconds, partial(self._commit, taken, before))
        elif isinstance(taken, float) and taken < math.inf:
            self._clock.io.after(taken, self._start_batch)

    def _commit(self, taken: WriteBatch, before: list[bytes]) -> None:
        jobs = taken.jobs
        assert [bytes(job.fetch()) for job in jobs] == before, "an arena block was written while it was being stored"
        for job in jobs:
            self._arena.end(job.handle, "write to disk")
        self._worker.run(taken)
        self.writing = None
        self._start_batch()

    def join(self, timeout_s: float) -> bool:
        self.has_hung = self._worker.stalled_s >= timeout_s
        self._start_batch()
        while self._num_reading or self.writing:
            self._clock.advance_to(self._clock.io.next_s)
        return True


# -- between HBM and the arena -----------------------------------------------------------------------------------------
class Transfers:
    """A `Transfer` whose loads take time within the step, and whose saves land some time after it."""

    def __init__(
        self, arena: Arena, cpu: Callable[[], CpuTier], pool: Callable[[], WatchedPool],
        windows: Callable[[], WatchedWindows], clock: Clock, faults: Faults, rng: random.Random, weather: Weather,
        counts: Counter[str], block_s: float, may_fail: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.arena, self.cpu, self.pool, self.windows, self.clock = arena, cpu, pool, windows, clock
        self.faults, self.rng = faults, rng
        self.weather, self.counts, self.block_s, self.may_fail = weather, counts, block_s, may_fail
        self._done: deque[Transferred] = deque()
        self._plan: TransferPlan | None = None
        self._row_starts: Sequence[int] = ()
        self._tokens = b""
        self._loads_end_s: float | None = None
        self.failed_blocks: set[int] = set()  # of this step
        self.num_landing = 0
        self._landed_s = 0.0
        self.states = [0] * NUM_STATE_ROWS  # of the engine, each the key of the last token that it has seen

    def register(self, caches: object, states: object = None) -> None:
        """Never called: there is no HBM."""

    @property
    def can_save(self) -> bool:
        self.may_fail("plan")
        return self.num_landing < 8 and not self.weather.is_bad("save", self.faults.full_queue)

    def completed(self) -> list[Transferred]:
        done, self._done = list(self._done), deque()
        return done

    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self._plan, self._row_starts, self._tokens = plan, row_starts, b""
        self.failed_blocks = set()
        for load in plan.loads:
            record = self.cpu().record(load.arena_block)
            assert record is not None and record.block_id == load.block_id, "a load of another block"
            state = self.cpu().state(load.arena_block)
            assert state is ArenaBlockState.READY, f"a load of an arena block that is {state}"
            self.arena.begin(load.arena_block, "load")
        for piece in plan.states:
            assert plan.loads and self.cpu().state(piece.arena_block) is ArenaBlockState.READY, (
                "a state that is not there"
            )
            self.arena.begin(piece.arena_block, "load")
        for arena_block in {save.arena_block for save in plan.saves}:
            self.arena.begin(arena_block, "save")
        self._loads_end_s = self.clock.now_s + len(plan.loads) * self.block_s if plan.loads else None
        self.counts["loads planned"] += len(plan.loads) + len(plan.states)
        self.counts["states planned"] += len(plan.states)

    def wait_for_layer_load(self, layer: int) -> None:
        """The whole model is one layer."""
        if self._plan is None or self._loads_end_s is None:
            return
        began_s, self._loads_end_s = self.clock.now_s, None
        self.clock.advance(len(self._plan.loads) * self.block_s)
        has_failed = not self.weather.quiet and self.rng.random() < self.faults.failed_loads
        for load in self._plan.loads:
            content = self.arena.content(load.arena_block)
            assert content == self.arena.book.blocks[load.block_id], "a load of a block of another history, or torn"
            assert self.pool().ref_count(load.block_number) > 0, "a load into an HBM block that nobody holds"
            assert self.pool().block_id(load.block_number) in (None, load.block_id), "a load into another HBM block"
            if has_failed:
                self.failed_blocks.add(load.block_number)
                content = GARBAGE * (len(content) // TOKEN_BYTES)
            self.pool().contents[load.block_number][:] = content
            self.arena.end(load.arena_block, "load")
        for piece in self._plan.states:
            record = self.cpu().record(piece.arena_block)
            assert (
                record is not None and self.arena.content(piece.arena_block) == self.arena.book.blocks[record.block_id]
            )
            self._take_state(piece, has_failed)
            self.arena.end(piece.arena_block, "load")
        num_bytes = len(self._plan.loads) * self.arena.size
        self._done.append(Transferred(self._plan.ticket, True, not has_failed, num_bytes, self.clock.now_s - began_s))
        num_loads = len(self._plan.loads) + len(self._plan.states)
        self.counts["loads failed" if has_failed else "loads landed"] += num_loads

    def _take_state(self, piece: StatePiece, has_failed: bool) -> None:
        content = self.arena.content(piece.arena_block)
        if self.arena.book.has_windows:
            seen = window_part(content, piece.index)
            windows = self.windows().contents[piece.row]
            assert piece.index == 0 or windows.startswith(GARBAGE) or windows == seen, "parts of two blocks"
            windows[:] = GARBAGE * (len(content) // TOKEN_BYTES) if has_failed else seen
            return
        key, index = struct.unpack("<QQ", content[: 2 * TOKEN_BYTES])
        assert index == piece.index, "a state whose parts are in another order"
        self.states[piece.row] = 0 if has_failed else key

    def _saved_part(self, piece: StatePiece) -> bytes:
        if self.arena.book.has_windows:
            return window_part(self.windows().contents[piece.row], piece.index)
        return state_content(self.states[piece.row], piece.index, self.arena.size)

    def save_kv_layer(self, layer: int, tokens: bytes, _: None) -> None:
        """tokens: KV of the step's tokens, side by side."""
        self._tokens = tokens

    def end(self, succeeded: bool = True) -> None:
        if self._plan is None:
            return
        self.wait_for_layer_load(0)
        plan, self._plan = self._plan, None
        if not plan.saves:
            return
        has_failed = not self.weather.quiet and self.rng.random() < self.faults.failed_saves
        tokens, starts, is_sound = self._tokens, self._row_starts, succeeded and not has_failed
        self._land_later(lambda: self._land(plan, starts, tokens, is_sound))

    def save_states(self, plan: TransferPlan) -> None:
        """The rows may be written again at once."""
        is_sound = self.weather.quiet or self.rng.random() >= self.faults.failed_saves
        contents = [self._saved_part(one) for one in plan.states]
        for piece in plan.states:
            self.arena.begin(piece.arena_block, "save")
        self.counts["states saved"] += 1

        def land() -> None:
            for piece, content in zip(plan.states, contents, strict=True):
                self.arena.view(piece.arena_block)[:] = content if is_sound else bytes(self.arena.size)
                self.arena.movers[piece.arena_block] = "save"
                self.arena.end(piece.arena_block, "save")
            self._has_landed(plan, is_sound)

        self._land_later(land)

    def _land_later(self, land: Callable[[], None]) -> None:
        self.num_landing += 1
        self._landed_s = max(self._landed_s, self.clock.now_s + self.rng.choice([0.0, 0.0, 0.0, 0.001, 0.01, 0.1]))
        if self._landed_s <= self.clock.now_s and self.num_landing == 1:
            land()
        else:  # in the order of the steps
            self.clock.io.at(self._landed_s, land)

    def _land(self, plan: TransferPlan, row_starts: Sequence[int], tokens: bytes, is_sound: bool) -> None:
        for save in plan.saves:
            start = (row_starts[save.scheduled] + save.first) * TOKEN_BYTES
            part = tokens[start : start + save.num_tokens * TOKEN_BYTES]
            if not is_sound and (not part or self.rng.random() < 0.5):
                part = GARBAGE * save.num_tokens
            first = save.offset * TOKEN_BYTES
            self.arena.view(save.arena_block)[first : first + len(part)] = part
            self.arena.movers[save.arena_block] = "save"
        for arena_block in {save.arena_block for save in plan.saves}:
            self.arena.end(arena_block, "save")
        self._has_landed(plan, is_sound)

    def _has_landed(self, plan: TransferPlan, is_sound: bool) -> None:
        self.num_landing -= 1
        self._done.append(Transferred(plan.ticket, False, is_sound))
        self.counts["saves failed"] += not is_sound

    def close(self) -> None:
        pass
