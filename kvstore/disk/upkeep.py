"""Upkeep of a disk tier: check every block, rewrite the file without what was deleted, fit it into a lower capacity."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from kvstore.blocks.ids import BlockId
from kvstore.config import format_size
from kvstore.disk import check as disk_check
from kvstore.disk import codec
from kvstore.disk import format as disk_format
from kvstore.disk.check import DATA_FILE
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.errors import StoreError

if TYPE_CHECKING:
    from kvstore.disk.tier import DiskTier

VERIFY_BATCH = 32
COPY_BATCH = 64
DELETE_BATCH = 4096
COPY_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check of every block found.

    num_orphans: values without an index record, or the other way round. num_heads: blocks whose parent is not stored:
    the first of a chain, or one that lost what was before it. bad_ids: corrupt ones and orphans. num_deleted: of them.
    is_complete: False when the check had to stop, because the file is damaged or was closed.
    """

    num_ok: int = 0
    num_corrupt: int = 0
    num_orphans: int = 0
    num_heads: int = 0
    num_deleted: int = 0
    bad_ids: tuple[BlockId, ...] = ()
    is_complete: bool = True

    def as_dict(self) -> dict[str, object]:
        """For people: the first of the bad ones."""
        return {**asdict(self), "bad_ids": [block_id.hex() for block_id in self.bad_ids[:100]]}


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Size of the file before and after, in bytes."""

    before_bytes: int
    after_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


# -- verify ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Findings:
    num_ok: int = 0
    num_heads: int = 0
    corrupt: list[BlockId] = field(default_factory=list)
    orphans: list[BlockId] = field(default_factory=list)


_Step = Callable[[Any, disk_format.Tables, BlockId | None, _Findings], BlockId | None]


def verify(tier: DiskTier, delete: bool, progress: Callable[[int], None] | None) -> VerifyReport:
    """See `DiskTier.verify`. Each batch has a short transaction, so the store can be used meanwhile."""
    found = _Findings()
    is_complete = all(_each_batch(tier, step, found, progress) for step in (_check_values, _check_index))
    bad, num_deleted = tuple(found.corrupt + found.orphans), 0
    for first in range(0, len(bad) if delete else 0, DELETE_BATCH):
        some = bad[first : first + DELETE_BATCH]
        num_deleted += len(some) if tier.write((), some).error is None else 0
    return VerifyReport(
        found.num_ok, len(found.corrupt), len(found.orphans), found.num_heads, num_deleted, bad, is_complete
    )


def _each_batch(tier: DiskTier, step: _Step, found: _Findings, progress: Callable[[int], None] | None) -> bool:
    """False when it could not go through to the end."""
    last: BlockId | None = None
    while True:
        with tier.tables() as tables:
            if tables is None:
                return False
            try:
                with tables.env.begin(buffers=True) as txn:
                    last = step(txn, tables, last, found)
            except (lmdb.Error, OSError, MemoryError) as error:
                tier.note(error)
                return False
        if last is None:
            return True
        if progress is not None:
            progress(found.num_ok + len(found.corrupt) + len(found.orphans))


def _check_values(txn: Any, tables: disk_format.Tables, after: BlockId | None, found: _Findings) -> BlockId | None:
    last = None
    for key, value in disk_format.keys_after(txn, tables.values, after, VERIFY_BATCH):
        last = key
        header = codec.decode_header(value)
        packed = txn.get(key, db=tables.index)
        if header is None or header.record.block_id != key or not codec.is_intact(value, header):
            found.corrupt.append(key)
        elif packed is None:
            found.orphans.append(key)
        elif not _agree(header, disk_format.unpack_index(key, bytes(packed)), _footprint(value, tables)):
            found.corrupt.append(key)
        else:
            found.num_ok += 1
            found.num_heads += txn.get(header.record.parent_id, db=tables.index) is None
    return last


def _check_index(txn: Any, tables: disk_format.Tables, after: BlockId | None, found: _Findings) -> BlockId | None:
    last = None
    for key, _ in disk_format.keys_after(txn, tables.index, after, DELETE_BATCH):
        last = key
        if txn.get(key, db=tables.values) is None:
            found.orphans.append(key)
    return last


def _footprint(value: memoryview, tables: disk_format.Tables) -> int:
    return disk_format.footprint(len(value), tables.page_bytes)


def _agree(header: codec.Header, entry: IndexEntry | None, stored_bytes: int) -> bool:
    if entry is None:
        return False
    return entry.parent_id == header.record.parent_id and entry.stored_bytes == stored_bytes


# -- compact ---------------------------------------------------------------------------------------------------------
def copy_path(blocks: Path) -> Path:
    """Where a compacted copy is made."""
    return blocks.with_name(blocks.name + ".compact")


def compact(tier: DiskTier) -> CompactReport:
    """See `DiskTier.compact`; the caller holds the write lock, so the copy is complete when it is swapped in."""
    started = time.perf_counter()
    place = copy_path(tier.path)
    try:
        with tier.tables() as tables:
            if tables is None:
                raise StoreError(f"{tier.path} is closed or damaged, and cannot be compacted")
            tables.env.check_in_place()
            before_bytes = tables.env.file_bytes()
            _check_room(tier)
            _copy(tables, place)
        tier.reopen(place / DATA_FILE)
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{tier.path} could not be compacted: {error}; it is as it was") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    after_bytes = (tier.path / DATA_FILE).stat().st_size
    return CompactReport(before_bytes, after_bytes, time.perf_counter() - started)


def _check_room(tier: DiskTier) -> None:
    needed = tier.used_bytes() + COPY_MARGIN_BYTES
    free, _ = disk_format.free_bytes(tier.path)
    if free < needed:
        raise StoreError(
            f"{tier.path} needs {format_size(needed)} beside it to be compacted, {format_size(free)} are free; "
            "free some, or evict first"
        )


def _copy(tables: disk_format.Tables, place: Path) -> None:
    """Record by record, because LMDB's own copy keeps what was deleted in the gaps of pages that are in use."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    # Synced once at the end: before that, nobody looks at it.
    copy = lmdb.open(
        str(place), map_size=tables.env.info()["map_size"], max_dbs=4, sync=False, lib_version=0, mode=0o700
    )
    try:
        for name, db in ((b"values", tables.values), (b"index", tables.index), (b"meta", tables.meta)):
            _copy_database(tables, db, copy, copy.open_db(name))
        copy.sync(True)
    finally:
        copy.close()
    disk_check.sync_directory(place)


def _copy_database(tables: disk_format.Tables, source: Any, copy: lmdb.Environment, target: Any) -> None:
    last: bytes | None = None
    while True:
        with tables.env.begin(buffers=True) as reading, copy.begin(write=True) as writing:
            first = last
            for key, value in disk_format.keys_after(reading, source, first, COPY_BATCH):
                last = key
                writing.put(key, value, append=True, db=target)
        if last == first:
            return


# -- a lower capacity ------------------------------------------------------------------------------------------------
def shrink(tier: DiskTier) -> None:
    """At open, when the file is larger than the capacity: evict the least recently used, then compact.

    Where that fails the file stays larger than it should be, with a warning: better than no store.
    """
    index = DiskIndex.build(tier.scan())
    is_deleting = True
    while is_deleting and (excess := tier.excess_bytes()) > 0 and index.num_blocks:
        victims = [entry.block_id for entry in index.take_victims(excess)]
        for first in range(0, len(victims), DELETE_BATCH):
            if tier.write((), victims[first : first + DELETE_BATCH]).error is not None:
                is_deleting = False
                break
    try:
        tier.compact()
    except StoreError as error:
        warnings.warn(
            f"the disk tier takes more than its {format_size(tier.capacity_bytes)} until it can be compacted: {error}",
            RuntimeWarning, stacklevel=3,
        )  # fmt: skip
