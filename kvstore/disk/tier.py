"""The disk tier: blocks in LMDB, each written whole or not at all, and checked whenever it is read.

Does not decide what stays. Checks every block when asked to, and changes nothing then. One thread writes, any number
read; neither raises for failures of the world.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import lmdb
import numpy as np

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Expected, ReadResult
from kvstore.config import format_size
from kvstore.disk import codec
from kvstore.disk import format as disk_format
from kvstore.disk.blocks_file import WORLD_ERRORS, BlocksFile, CompactReport
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import LOGGER, keys_after
from kvstore.disk.format import Tables, WriteError
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.errors import DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.stats import Counts
from kvstore.tiers.port import GONE, Chain, Keeps, ReadJob, Stored, WriteBatch, Written

RATE_MIN_BYTES = 1 << 20
DELETE_BATCH = 4096
VALUES_BATCH, INDEX_BATCH = 32, 4096  # of one transaction of a check, so that the store can be used meanwhile

Put = tuple[BlockRecord, memoryview]


class DiskSession:
    """See `TierSession`. Nothing raises. The tier is closed by who has opened it."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def ask(self, chain: Chain) -> list[bool]:
        return [self._tier.contains(block_id) for block_id in chain.ids]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        return [self._tier.read(job.record, job.view) for job in jobs]

    def write(self, batch: WriteBatch) -> Written:
        found = [(job.record, job.fetch()) for job in batch.jobs]
        puts = [(record, view) for record, view in found if view is not None]
        written = self._tier.write(puts, batch.deletes, batch.touched)
        gone = [Stored(record.block_id, GONE) for record, view in found if view is None]
        return Written([*written.stored, *gone], written.error)

    def ping(self) -> None:
        """It is always there."""

    def close(self) -> None:
        """Nothing is its own."""


class DiskTier:
    """Blocks in the environment `blocks/` of a store directory.

    capacity_bytes: the file's largest size, its map size. codec: for writing; blocks of all codecs can be read.
    itemsize: bytes of an element of KV, which whoever knows the model sets. file: over its life; while it is `broken`,
    reads fail and writes are refused. Raises StoreError when it cannot be opened at all; a damaged one is moved aside
    and an empty one begun.
    """

    itemsize = 2
    keeps = Keeps.EXACT
    most_read_bytes = 1  # one block at a time: others may be wanted sooner

    def __init__(
        self, directory: StoreDirectory, capacity_bytes: int, codec: str = "raw", clock: Callable[[], float] = time.time
    ) -> None:
        self.codec = codec
        self.file = BlocksFile(directory, capacity_bytes)
        self._clock = clock
        self.counts = Counts(
            ("reads", "writes"), ("read_seconds", "write_seconds"), ("read_bytes_per_s", "write_bytes_per_s")
        )
        if self.file.is_too_large:
            _shrink(self)
        if capacity_bytes > (size := disk_format.free_bytes(self.file.path)[1]):
            asked, has = format_size(capacity_bytes), format_size(size)
            LOGGER.warning("disk is %s, but the whole file system of %s has %s", asked, self.file.path, has)
        leave_to_parent(self, str(self.file.path))

    def __str__(self) -> str:
        return str(self.file.path)

    def session(self) -> DiskSession:
        return DiskSession(self)

    def close(self) -> None:
        """Sync everything and mark it as complete. Reads fail afterwards."""
        self.file.close()

    # -- writing -----------------------------------------------------------------------------------------------------
    def write(
        self, puts: Sequence[Put], deletes: Sequence[BlockId] = (), touched: Mapping[BlockId, float] | None = None
    ) -> Written:
        """Write one transaction, durable on return, or nothing of it.

        From one thread. touched: times of last use. When the map is full, the deletes are tried alone first, to make
        room.
        """
        with self.file.write_lock:
            outcome = self._write(puts, deletes, touched or {})
            if outcome.error is WriteError.MAP_FULL:
                self._make_writable()
                freed = deletes and self._write((), deletes, {}).error is None
                if freed:
                    self._make_writable()  # LMDB reuses pages two transactions after they were freed
                    outcome = self._write(puts, (), touched or {})
        if outcome.error is not None:
            self.counts.failed(f"write: {outcome.error}")
        return outcome

    def _write(self, puts: Sequence[Put], deletes: Sequence[BlockId], touched: Mapping[BlockId, float]) -> Written:
        started = time.perf_counter()
        with self.file as tables:
            if tables is None:
                return Written(error=WriteError.BROKEN if self.file.broken else WriteError.CLOSED)
            try:
                if puts and not self.file.has_space(tables, sum(view.nbytes for _, view in puts)):
                    return Written(error=WriteError.NO_SPACE)
                with tables.env.begin(write=True) as txn:
                    _delete_and_touch(txn, tables, deletes, touched)
                    now_s = self._clock()
                    stored = [self._put(txn, tables, now_s, *put) for put in puts]
                    used_bytes = disk_format.used_bytes(txn, tables)
                self.file.note_space(tables, used_bytes)
            except lmdb.PanicError:
                pass
            except WORLD_ERRORS as error:
                self.file.note(error)
                return Written(error=WriteError.BROKEN if self.file.broken else self._name(error))
            else:
                seconds = max(time.perf_counter() - started, 1e-9)
                self.counts.add(writes=len(puts), write_seconds=seconds)
                num_bytes = sum(one.num_bytes for one in stored)
                if num_bytes >= RATE_MIN_BYTES:  # fewer say nothing
                    self.counts.add(write_bytes_per_s=num_bytes / seconds)
                return Written(stored)
        self.file.recover()
        return Written(error=WriteError.IO)

    def delete(self, block_ids: Sequence[BlockId]) -> str | None:
        """Delete in transactions of bounded size. Returns why one failed; earlier ones stay committed."""
        for first in range(0, len(block_ids), DELETE_BATCH):
            if (error := self.write((), block_ids[first : first + DELETE_BATCH]).error) is not None:
                return error
        return None

    def _put(
        self, txn: lmdb.Transaction, tables: Tables, now_s: float, record: BlockRecord, view: memoryview
    ) -> Stored:
        """Put a block."""
        value = codec.encode(record, view, codec.CODECS[self.codec], self.itemsize)
        txn.put(record.block_id, value, db=tables.values)
        size = disk_format.footprint(len(value), tables.page_bytes)
        txn.put(record.block_id, disk_format.pack_index(record, size, now_s), db=tables.index)
        return Stored(record.block_id, None, size)

    def _make_writable(self) -> None:
        try:
            self.file.make_writable()
        except WORLD_ERRORS as error:
            self.counts.failed(f"write: {self._name(error)}")

    def _name(self, error: Exception) -> WriteError:
        try:
            free = disk_format.free_bytes(self.file.path)[0]
        except OSError:
            free = 1 << 62
        return disk_format.write_error(error, free)

    def sync(self) -> None:
        """Everything written survives a power loss afterwards. Raises DegradedError."""
        try:
            self.file.sync()
        except DegradedError:
            self.counts.failed("sync")
            raise

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, expected: Expected, into: memoryview) -> ReadResult:
        """Read a block's payload into memory of its exact size that nobody else can see yet. From any thread."""
        started, is_lost = time.perf_counter(), False
        with self.file as tables:
            try:
                result = ReadResult.FAILED if tables is None else _read(tables, expected, into)
            except lmdb.PanicError:
                result, is_lost = ReadResult.FAILED, True
            except WORLD_ERRORS as error:
                self.file.note(error)
                result = ReadResult.FAILED
        if is_lost and self.file.write_lock.acquire(blocking=False):
            try:
                self.file.recover()
            finally:
                self.file.write_lock.release()
        if result is ReadResult.OK:
            seconds = max(time.perf_counter() - started, 1e-9)
            self.counts.add(reads=1, read_seconds=seconds, read_bytes_per_s=into.nbytes / seconds)
        elif result is not ReadResult.MISSING:
            self.counts.failed(f"read: {result.value}")
        return result

    def warm(self, block_id: BlockId) -> None:
        """Bring a block's pages into the page cache. From any thread; `read` reports errors."""
        self.file.look_up(partial(_touch, block_id=block_id), None)

    def contains(self, block_id: BlockId) -> bool:
        return self.file.look_up(lambda txn, tables: txn.get(block_id, db=tables.index) is not None, False)

    def header(self, block_id: BlockId) -> codec.Header | None:
        """A block's header; None when it cannot be read."""
        return self.file.look_up(
            lambda txn, tables: codec.decode_header(txn.get(block_id, b"", db=tables.values)), None
        )

    def scan(self) -> Iterator[list[IndexEntry]]:
        """The whole index in batches, for `DiskIndex.build`. Each has a transaction of its own, so none pins pages.

        Ends early when the file cannot be read.
        """
        last: BlockId | None = None
        scan = partial(disk_format.scan_index, ids={}, facts={})
        unreadable: tuple[list[IndexEntry], BlockId | None] = ([], None)
        while True:
            entries, last = self.file.look_up(partial(scan, after=last), unreadable)
            if last is None:
                return
            yield entries

    def records(self, batches: Iterable[list[IndexEntry]]) -> Iterator[list[BlockRecord]]:
        """The headers of these blocks, as far as they can be read; reads one page of each."""
        for entries in batches:
            headers = [self.header(entry.block_id) for entry in entries]
            yield [header.record for header in headers if header is not None]

    @property
    def num_blocks(self) -> int:
        """As of the last transaction; 0 if the file cannot be read."""
        return self.file.look_up(lambda txn, tables: int(txn.stat(tables.index)["entries"]), 0)

    def verify(self, progress: Callable[[int], None] = lambda _: None) -> VerifyReport:
        """Read every block and check it. progress: called with the number of blocks so far."""
        report = VerifyReport()
        for check in (report.check_values, report.check_index):
            before: bytes | None = None
            last: bytes | None = b""
            while last is not None and last != before:
                before, last = last, self.file.look_up(partial(check, last=last), None)
                if last not in (None, before):
                    progress(report.num_ok + len(report.bad_ids))
            report.is_complete = report.is_complete and last is not None
        return report

    def compact(self, codec_name: str | None = None) -> CompactReport:
        """Rewrite the file without free pages, and its blocks in this codec; reads go on until the swap. What is exact
        stays exact.

        What is written later has the tier's codec. Raises StoreError, then nothing changed.
        """
        if codec_name is None:
            return self.file.compact()
        page_bytes = self.file.look_up(lambda txn, tables: tables.page_bytes, 0)
        return self.file.compact(partial(_recode, codec.CODECS[codec_name], page_bytes), grows=codec_name == "raw")

    def stats(self) -> dict[str, object]:
        """blocks and bytes as of the last transaction; file_bytes: what the file system sees; rates in bytes/s."""
        file = self.file
        blocks, file_bytes = file.look_up(
            lambda txn, tables: (txn.stat(tables.index)["entries"], tables.env.file_bytes()), (0, 0)
        )
        return {
            "blocks": blocks,
            "bytes": file.used_bytes,
            "file_bytes": file_bytes,
            "capacity_bytes": file.capacity_bytes,
            "capacity": format_size(file.capacity_bytes),
            "broken": file.broken,
            "was_reset": file.was_reset,
            "lost": file.lost,
            "codec": self.codec,
            **self.counts.as_dict(),
        }


def _delete_and_touch(
    txn: lmdb.Transaction, tables: Tables, deletes: Sequence[BlockId], touched: Mapping[BlockId, float]
) -> None:
    for block_id in deletes:
        txn.delete(block_id, db=tables.values)
        txn.delete(block_id, db=tables.index)
    for block_id, used_s in touched.items():
        packed = txn.get(block_id, db=tables.index)
        if packed is not None:
            txn.put(block_id, disk_format.changed(bytes(packed), last_access_s=used_s), db=tables.index)


def _read(tables: Tables, expected: Expected, into: memoryview) -> ReadResult:
    with tables.env.begin(buffers=True) as txn:
        value = txn.get(expected.block_id, db=tables.values)
        return ReadResult.MISSING if value is None else codec.decode_into(value, expected, into)


def _recode(
    target: codec.Codec, page_bytes: int, name: str, key: bytes, value: memoryview,
    copied: Callable[[str], memoryview | None],
) -> codec.Bytes:  # fmt: skip
    """A `Change` of compaction."""
    if name == "values":
        return codec.recoded(value, target)
    stored = copied("values") if name == "index" else None
    if stored is None:
        return value
    return disk_format.changed(value, stored_bytes=disk_format.footprint(len(stored), page_bytes))


def _touch(txn: lmdb.Transaction, tables: Tables, block_id: BlockId) -> None:
    value = txn.get(block_id, b"", db=tables.values)
    if len(value):
        np.frombuffer(value, np.uint8).max()  # numpy lets other threads run meanwhile


def _shrink(tier: DiskTier) -> None:
    """Shrink the file to its capacity: evict the least recently used blocks, then compact. If that fails, the file
    stays too large, with a warning: better than no store.
    """
    index = DiskIndex.build(tier.scan())
    is_deleting = True
    while is_deleting and (excess := tier.file.excess_bytes()) > 0 and len(index):
        is_deleting = tier.delete([entry.block_id for entry in index.take_victims(excess)]) is None
    try:
        tier.compact()
    except StoreError as error:
        allowed = format_size(tier.file.capacity_bytes)
        warnings.warn(
            f"the disk tier takes more than its {allowed} until it can be compacted: {error}",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip


# -- checking every block ----------------------------------------------------------------------------------------------
@dataclass(slots=True)
class VerifyReport:
    """The result of a check of every block.

    num_orphans: values without an index record, or records without a value. num_heads: blocks whose parent is not
    stored: the first of a chain, or one that lost its parent. bad_ids: corrupt blocks and orphans. num_deleted: how
    many of these the caller deleted. is_complete: False when the check had to stop, because the file is damaged or was
    closed.
    """

    num_ok: int = 0
    num_corrupt: int = 0
    num_orphans: int = 0
    num_heads: int = 0
    num_deleted: int = 0
    bad_ids: list[BlockId] = field(default_factory=list)
    is_complete: bool = True

    def as_dict(self) -> dict[str, object]:
        """The report as a dict, with only the first bad ids."""
        return {**asdict(self), "bad_ids": [block_id.hex() for block_id in self.bad_ids[:100]]}

    def check_values(self, txn: Any, tables: Tables, last: bytes) -> bytes:
        """Check the next values behind this one. Returns the last of them."""
        for key, value in keys_after(txn, tables.values, last or None, VALUES_BATCH):
            last, header = key, codec.decode_header(value)
            packed = txn.get(key, db=tables.index)
            if header is None or header.record.block_id != key or not codec.is_intact(value, header):
                self._corrupt(key)
            elif packed is None:
                self._orphan(key)
            elif not _agree(header, disk_format.unpack_index(key, bytes(packed), {}, {}), len(value), tables):
                self._corrupt(key)
            else:
                self.num_ok += 1
                self.num_heads += txn.get(header.record.parent_id, db=tables.index) is None
        return last

    def check_index(self, txn: Any, tables: Tables, last: bytes) -> bytes:
        for key, _ in keys_after(txn, tables.index, last or None, INDEX_BATCH):
            last = key
            if txn.get(key, db=tables.values) is None:
                self._orphan(key)
        return last

    def _corrupt(self, block_id: BlockId) -> None:
        self.num_corrupt += 1
        self.bad_ids.append(block_id)

    def _orphan(self, block_id: BlockId) -> None:
        self.num_orphans += 1
        self.bad_ids.append(block_id)


def _agree(header: codec.Header, entry: IndexEntry | None, value_bytes: int, tables: Tables) -> bool:
    stored_bytes = disk_format.footprint(value_bytes, tables.page_bytes)
    return entry is not None and entry.parent_id == header.record.parent_id and entry.stored_bytes == stored_bytes
