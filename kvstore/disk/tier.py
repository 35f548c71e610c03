"""The disk tier: blocks in LMDB, each written whole or not at all, and checked whenever it is read.

Decides nothing about what stays. One thread writes, any number read; neither raises for what the world does.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, ReadResult
from kvstore.config import format_size
from kvstore.disk import check as disk_check
from kvstore.disk import codec
from kvstore.disk import format as disk_format
from kvstore.disk import upkeep as disk_upkeep
from kvstore.disk.check import DATA_FILE
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import STRUCTURAL_ERRORS, VERIFY_BELOW_BYTES, Gate, LostFileError, is_damage, open_environment
from kvstore.disk.format import Tables, WriteError
from kvstore.disk.index import IndexEntry
from kvstore.disk.upkeep import CompactReport, VerifyReport
from kvstore.errors import DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.stats import Histogram

WATERMARK = 0.85
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.05, 1 << 30
SHRINK_SLACK_BYTES = 32 << 20
RATE_MIN_BYTES = 1 << 20

Put = tuple[BlockRecord, memoryview]
WORLD_ERRORS = (lmdb.Error, OSError, MemoryError)


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """How a transaction ended: bytes on disk of each put, in order; or why there is none of them."""

    stored_bytes: tuple[int, ...] = ()
    error: WriteError | None = None


class DiskTier:
    """Blocks in the environment `blocks/` of a store directory.

    capacity_bytes: what the file may take, its map size. codec: of what is written; blocks of all codecs are read.
    itemsize: bytes of an element of KV. broken: the file is
    damaged, or gone; reads fail and writes are refused until the owner calls `quarantine`. lost: that it was once
    removed or replaced while it was open. Raises StoreError when it cannot be opened at all; a damaged one is moved
    aside and begun anew (`was_reset`).
    """

    def __init__(
        self, directory: StoreDirectory, capacity_bytes: int, codec: str = "raw", itemsize: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.path = directory.path / "blocks"
        self.capacity_bytes = capacity_bytes
        self.broken = False
        self.was_reset = False
        self.lost: str | None = None
        self.num_reads = self.num_writes = 0
        self.read_seconds, self.write_seconds = Histogram(), Histogram()  # of a block, of a transaction
        self.failures: Counter[str] = Counter()
        self.codec = codec
        self._directory = directory
        self._clock = clock
        self._itemsize = itemsize
        self._rates: dict[str, float] = {}
        self._used_bytes = self._usable_bytes = 0
        self._is_new = False  # damage was found and set aside, and only the owner does not know
        self._gate = Gate()  # those inside use the map; whoever replaces it is alone
        self._write_lock = threading.Lock()  # one transaction, one compaction
        self._count_lock = threading.Lock()
        self._tables: Tables | None = self._open()
        if self._tables.env.info()["map_size"] > self._map_bytes(0):
            disk_upkeep.shrink(self)
        leave_to_parent(self, str(self.path))

    # -- opening and closing -----------------------------------------------------------------------------------------
    def _map_bytes(self, needed_bytes: int) -> int:
        if needed_bytes <= self.capacity_bytes:
            return self.capacity_bytes
        return needed_bytes + SHRINK_SLACK_BYTES  # evicting writes, too

    def _open(self, verify_below_bytes: int = VERIFY_BELOW_BYTES) -> Tables:
        shutil.rmtree(disk_upkeep.copy_path(self.path), ignore_errors=True)
        try:
            return self._open_tables(self._map_bytes(self._needed_bytes()), verify_below_bytes)
        except (*STRUCTURAL_ERRORS, disk_format.WrongFormatError) as error:
            disk_check.quarantine(self.path, str(error))
            self.was_reset = True
            return self._open_tables(self.capacity_bytes, verify_below_bytes)

    def _open_tables(self, map_bytes: int, verify_below_bytes: int) -> Tables:
        env = open_environment(self.path, map_bytes, verify_below_bytes=verify_below_bytes)
        try:
            tables = disk_format.open_tables(env)
            with env.begin() as txn:
                self._note_space(tables, disk_format.used_bytes(txn, tables))
        except BaseException as error:
            env.close(clean=False)
            if isinstance(error, lmdb.Error) and not is_damage(error):
                raise StoreError(f"{self.path} cannot be used: {error}; is the disk full or read-only?") from None
            raise
        self.was_reset = self.was_reset or env.quarantined is not None
        return tables

    def _needed_bytes(self) -> int:
        try:
            return disk_check.read_meta(self.path / DATA_FILE).needed_bytes
        except (OSError, disk_check.UnreadableFileError):
            return 0

    def close(self) -> None:
        """Sync everything and mark it as complete. Reads fail afterwards."""
        with self._write_lock, self._gate.alone():
            tables, self._tables = self._tables, None
            if tables is not None:
                tables.env.close(clean=not self.broken)

    def quarantine(self) -> None:
        """Move the environment aside and begin an empty one.

        Raises StoreError when the file system does not let it; then it stays broken, and may be tried again.
        """
        with self._write_lock, self._gate.alone():
            if not self._is_new:
                tables, self._tables = self._tables, None
                try:
                    if tables is not None:
                        tables.env.close(clean=False)
                    if self.path.exists():
                        disk_check.quarantine(self.path, self.lost or "LMDB found its structure damaged")
                    self._tables = self._open()
                except (*WORLD_ERRORS, RuntimeWarning) as error:  # the warning, where warnings are errors
                    raise StoreError(f"{self.path} is damaged and cannot be put aside: {error}") from None
            self.broken = self._is_new = False

    def reopen(self, replacement: Path | None = None) -> None:
        """Close, put `replacement` in the data file's place, open again. The caller holds the write lock."""
        with self._gate.alone():
            tables, self._tables = self._tables, None
            if tables is not None:
                tables.env.close(clean=False)
            try:
                if replacement is not None:
                    replacement.replace(self.path / DATA_FILE)
                    disk_check.sync_directory(self.path)
                    disk_check.mark_clean(self.path)
            finally:
                self._tables = self._open(VERIFY_BELOW_BYTES if replacement is None else 0)

    def _recover(self) -> None:
        """LMDB gave the environment up after a failed write of its meta page; the file is most likely sound."""
        was_reset, self.was_reset = self.was_reset, False
        try:
            self.reopen()
        except (OSError, StoreError, RuntimeWarning):  # the warning about damage, where warnings are errors
            self.broken = True
        else:
            self.broken = self._is_new = self.was_reset  # then the owner must learn that it is empty
        self.was_reset = self.was_reset or was_reset

    @contextmanager
    def tables(self) -> Iterator[Tables | None]:
        """The open environment, which stays open inside; None when it is closed or damaged."""
        with self._gate:
            yield None if self.broken else self._tables

    def note(self, error: Exception) -> None:
        """Something failed in the environment: whether that means damage."""
        self.broken = self.broken or is_damage(error)
        if isinstance(error, LostFileError):
            self._note_loss(str(error))

    def look(self) -> None:
        """Whether the file is still where it was; one that is not counts as damaged, unless the whole store is lost."""
        with self._gate:
            loss = None if self._tables is None else self._tables.env.loss()
        if loss is not None:
            self._note_loss(loss)

    def _note_loss(self, loss: str) -> None:
        if self._directory.loss() is None:
            self.lost, self.broken = loss, True

    # -- writing -----------------------------------------------------------------------------------------------------
    def write(
        self, puts: Sequence[Put], deletes: Sequence[BlockId] = (), touched: Mapping[BlockId, float] | None = None
    ) -> WriteOutcome:
        """One transaction: all of it durable when this returns, or nothing. From one thread.

        touched: times of last use. When the map is full the deletes are tried alone first, to make room.
        """
        with self._write_lock:
            outcome = self._write(puts, deletes, touched or {})
            if outcome.error is WriteError.MAP_FULL:
                self._make_writable()
                freed = deletes and self._write((), deletes, {}).error is None
                if freed:
                    self._make_writable()  # pages are used again two transactions after they were freed
                    outcome = self._write(puts, (), touched or {})
        if outcome.error is not None:
            self._count_failure(f"write: {outcome.error}")
        return outcome

    def _write(self, puts: Sequence[Put], deletes: Sequence[BlockId], touched: Mapping[BlockId, float]) -> WriteOutcome:
        incoming = sum(view.nbytes for _, view in puts)
        started = time.perf_counter()
        with self._gate:
            tables = self._tables
            if tables is None or self.broken:
                return WriteOutcome(error=WriteError.CLOSED if tables is None else WriteError.BROKEN)
            try:
                if puts and not self._has_space(tables, incoming):
                    return WriteOutcome(error=WriteError.NO_SPACE)
                with tables.env.begin(write=True) as txn:
                    stored = self._fill(txn, tables, puts, deletes, touched)
                    used_bytes = disk_format.used_bytes(txn, tables)
                self._note_space(tables, used_bytes)
            except lmdb.PanicError:
                pass
            except WORLD_ERRORS as error:
                self.note(error)
                return WriteOutcome(error=WriteError.BROKEN if self.broken else self._name(error))
            else:
                self.num_writes += len(puts)
                seconds = time.perf_counter() - started
                self.write_seconds.observe(seconds)
                self._measure("write", sum(stored), seconds)
                return WriteOutcome(stored)
        self._recover()
        return WriteOutcome(error=WriteError.IO)

    def _fill(
        self, txn: lmdb.Transaction, tables: Tables, puts: Sequence[Put], deletes: Sequence[BlockId],
        touched: Mapping[BlockId, float],
    ) -> tuple[int, ...]:  # fmt: skip
        for block_id in deletes:
            txn.delete(block_id, db=tables.values)
            txn.delete(block_id, db=tables.index)
        for block_id, used_s in touched.items():
            packed = txn.get(block_id, db=tables.index)
            if packed is not None:
                txn.put(block_id, disk_format.with_access(bytes(packed), used_s), db=tables.index)
        stored, now_s = [], self._clock()
        for record, view in puts:
            value = codec.encode(record, view, codec.CODECS[self.codec], self._itemsize)
            txn.put(record.block_id, value, db=tables.values)
            size = disk_format.footprint(len(value), tables.page_bytes)
            txn.put(record.block_id, disk_format.pack_index(record, size, now_s), db=tables.index)
            stored.append(size)
        return tuple(stored)

    def _has_space(self, tables: Tables, incoming_bytes: int) -> bool:
        """Whether the file system keeps its reserve if the file has to grow for so many bytes."""
        self._note_space(tables, self._used_bytes)
        growth = self._used_bytes + incoming_bytes - tables.env.file_bytes()
        return growth <= 0 or self._used_bytes + incoming_bytes <= self._usable_bytes

    def _note_space(self, tables: Tables, used_bytes: int) -> None:
        """What is used, and what may be: the file as it is, and what it may grow by before the reserve is touched."""
        free, size = disk_format.free_bytes(self.path)
        reserve = min(int(size * RESERVE_SHARE), MAX_RESERVE_BYTES)
        self._used_bytes = used_bytes
        self._usable_bytes = min(self.capacity_bytes, tables.env.file_bytes() + max(0, free - reserve))

    def _make_writable(self) -> None:
        """After MapFullError every commit fails until one that is not empty has passed."""
        with self._gate:
            if self._tables is None:
                return
            try:
                with self._tables.env.begin(write=True) as txn:
                    txn.put(disk_format.COUNTER_KEY, str(txn.id()).encode(), db=self._tables.meta)
            except WORLD_ERRORS as error:
                self._count_failure(f"write: {self._name(error)}")

    def _name(self, error: Exception) -> WriteError:
        try:
            free = disk_format.free_bytes(self.path)[0]
        except OSError:
            free = 1 << 62
        return disk_format.write_error(error, free)

    def sync(self) -> None:
        """Everything written survives a power loss afterwards. Raises DegradedError."""
        with self._gate:
            try:
                if self._tables is None or self.broken:
                    raise DegradedError(f"{self.path} is closed or damaged; nothing more is made durable")
                self._tables.env.check_in_place()
                self._tables.env.sync()
            except lmdb.Error as error:
                self._count_failure("sync")
                raise DegradedError(f"{self.path} cannot be synced: {error}; look at its disk") from None

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, expected: BlockRecord, into: memoryview) -> ReadResult:
        """A block's payload into memory of its exact size that nobody can see yet. From any thread."""
        started, is_lost = time.perf_counter(), False
        with self._gate:
            try:
                result = self._read(expected, into)
            except lmdb.PanicError:
                result, is_lost = ReadResult.FAILED, True
            except WORLD_ERRORS as error:
                self.note(error)
                result = ReadResult.FAILED
        if is_lost and self._write_lock.acquire(blocking=False):
            try:
                self._recover()
            finally:
                self._write_lock.release()
        if result is ReadResult.OK:
            seconds = time.perf_counter() - started
            with self._count_lock:
                self.num_reads += 1
                self.read_seconds.observe(seconds)
                self._measure("read", into.nbytes, seconds)
        elif result is not ReadResult.MISSING:
            self._count_failure(f"read: {result.value}")
        return result

    def _read(self, expected: BlockRecord, into: memoryview) -> ReadResult:
        tables = self._tables
        if tables is None or self.broken:
            return ReadResult.FAILED
        with tables.env.begin(buffers=True) as txn:
            value = txn.get(expected.block_id, db=tables.values)
            return ReadResult.MISSING if value is None else codec.decode_into(value, expected, into)

    def entry(self, block_id: BlockId) -> IndexEntry | None:
        """The index record of a block; None when there is none, or when it cannot be read."""
        with self._gate:
            tables = self._tables
            if tables is None or self.broken:
                return None
            try:
                with tables.env.begin() as txn:
                    packed = txn.get(block_id, db=tables.index)
            except WORLD_ERRORS as error:
                self.note(error)
                return None
        return None if packed is None else disk_format.unpack_index(block_id, packed)

    def contains(self, block_id: BlockId) -> bool:
        return self.entry(block_id) is not None

    def scan(self) -> Iterator[list[IndexEntry]]:
        """The whole index in batches, for `DiskIndex.build`. Each has a transaction of its own, so none pins pages.

        Ends early when the file cannot be read.
        """
        last: BlockId | None = None
        while True:
            with self._gate:
                tables = self._tables
                if tables is None or self.broken:
                    return
                try:
                    with tables.env.begin() as txn:
                        entries, last = disk_format.scan_index(txn, tables, last)
                except WORLD_ERRORS as error:
                    self.note(error)
                    return
            if last is None:
                return
            yield entries

    # -- space -------------------------------------------------------------------------------------------------------
    def used_bytes(self) -> int:
        """Of the pages in use after the last transaction; what was deleted does not count."""
        return self._used_bytes

    def excess_bytes(self, incoming_bytes: int = 0) -> int:
        """How much must be deleted before so much may be written; 0 or less: nothing.

        On a disk that is nearly full the tier makes do with the file it has.
        """
        return self._used_bytes + incoming_bytes - int(WATERMARK * self._usable_bytes)

    def verify(self, delete: bool = False, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every block and check it. delete: take out what is bad. progress: gets the number of blocks so far."""
        return disk_upkeep.verify(self, delete, progress)

    def compact(self) -> CompactReport:
        """Rewrite the file without free pages; reads go on until the swap. Raises StoreError, then nothing changed."""
        with self._write_lock:
            return disk_upkeep.compact(self)

    # -- numbers -----------------------------------------------------------------------------------------------------
    def _count_failure(self, cause: str) -> None:
        with self._count_lock:
            self.failures[cause] += 1

    def _measure(self, what: str, num_bytes: int, seconds: float) -> None:
        """A running mean of bytes per second, over what is large enough to say something."""
        if what == "write" and num_bytes < RATE_MIN_BYTES:
            return
        rate = num_bytes / max(seconds, 1e-9)
        known = self._rates.get(what)
        self._rates[what] = rate if known is None else 0.9 * known + 0.1 * rate

    def stats(self) -> dict[str, object]:
        """blocks and bytes as of the last transaction; file_bytes: what the file system sees; rates in bytes/s."""
        blocks = file_bytes = 0
        with self._gate:
            if self._tables is not None and not self.broken:
                file_bytes = self._tables.env.file_bytes()
                try:
                    with self._tables.env.begin() as txn:
                        blocks = txn.stat(self._tables.index)["entries"]
                except WORLD_ERRORS as error:
                    self.note(error)
        with self._count_lock:
            failures, read_seconds = dict(self.failures), self.read_seconds.as_dict()
        return {
            "blocks": blocks,
            "bytes": self._used_bytes,
            "file_bytes": file_bytes,
            "capacity_bytes": self.capacity_bytes,
            "capacity": format_size(self.capacity_bytes),
            "reads": self.num_reads,
            "writes": self.num_writes,
            "failures": failures,
            "read_seconds": read_seconds,
            "write_seconds": self.write_seconds.as_dict(),
            "broken": self.broken,
            "lost": self.lost,
            "read_bytes_per_s": self._rates.get("read"),
            "write_bytes_per_s": self._rates.get("write"),
            "codec": self.codec,
        }
