"""The LMDB environment of the disk tier: its databases, index records, and the meaning of its errors.

Knows the file's format, no policy. A value is `kvstore.disk.codec`'s.
"""

import errno
import os
import time
from dataclasses import dataclass
from dataclasses import replace as with_fields
from enum import StrEnum
from typing import Any

import lmdb
from msgspec.structs import replace

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId
from kvstore.blocks.records import BlockRecord, Count, Id, Record, Seconds
from kvstore.disk.env import LostFileError, StoreEnvironment, keys_after
from kvstore.disk.index import IndexEntry
from kvstore.disk.records import pack, stored, unpack

FORMAT_KEY, FORMAT = b"format", b"kvstore blocks 2"
CREATED_KEY = b"created"
COUNTER_KEY = b"counter"
SCAN_BATCH = 4096
_PAGE_HEADER_BYTES, _NODE_BYTES = 16, 8 + BLOCK_ID_BYTES


class WriteError(StrEnum):
    """Why a transaction failed; it left nothing behind."""

    MAP_FULL = "map full"
    NO_SPACE = "no space"
    READ_ONLY = "read-only"
    IO = "i/o error"
    MEMORY = "out of memory"
    BROKEN = "broken"
    CLOSED = "closed"
    LOST = "its files were removed or replaced"


@dataclass(frozen=True, slots=True)
class Tables:
    """An open environment with its databases: values and index by block id, and a few facts under names.

    created_s: when it was begun, in seconds since the epoch; None if that is not known.
    """

    env: StoreEnvironment
    page_bytes: int
    values: Any
    index: Any
    meta: Any
    created_s: float | None = None

    @property
    def databases(self) -> dict[str, Any]:
        return {"values": self.values, "index": self.index, "meta": self.meta}


class WrongFormatError(Exception):
    """An intact LMDB file that another program or version wrote."""


def open_tables(env: StoreEnvironment) -> Tables:
    """Create them where they are missing. Raises lmdb.Error and WrongFormatError."""
    tables = Tables(env, env.stat()["psize"], env.open_db(b"values"), env.open_db(b"index"), env.open_db(b"meta"))
    with env.begin() as txn:
        found, created = txn.get(FORMAT_KEY, db=tables.meta), txn.get(CREATED_KEY, db=tables.meta)
    if found is None:
        created = repr(time.time()).encode()
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, FORMAT, db=tables.meta)
            txn.put(CREATED_KEY, created, db=tables.meta)
    elif found != FORMAT:
        raise WrongFormatError(f"its format is {found[:40]!r}, this program reads {FORMAT!r}")
    return tables if created is None else with_fields(tables, created_s=float(created))


def used_bytes(txn: Any, tables: Tables) -> int:
    """Pages in use as this transaction sees it; free ones are in the file too, but will be used again."""
    stats = [txn.stat(), *(txn.stat(db) for db in (tables.values, tables.index, tables.meta))]
    pages = 2 + sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
    # The list of free pages is in pages too, 8 bytes for each; LMDB does not say how many.
    free = max(0, tables.env.info()["last_pgno"] + 1 - pages)
    return (pages + 1 + 8 * free // tables.page_bytes) * tables.page_bytes


def footprint(value_bytes: int, page_bytes: int) -> int:
    """Bytes that a value takes in the file. LMDB puts what is over half a page into pages of its own."""
    if value_bytes + _NODE_BYTES <= page_bytes // 2:
        return value_bytes + _NODE_BYTES
    return -(-(_PAGE_HEADER_BYTES + value_bytes) // page_bytes) * page_bytes


# -- index records ---------------------------------------------------------------------------------------------------
@stored
class IndexRecord(Record, frozen=True):
    """The index entry of a block, under its id."""

    parent_id: Id
    stored_bytes: Count
    created_s: Seconds
    last_access_s: Seconds
    model: str
    tenant: str


def pack_index(record: BlockRecord, stored_bytes: int, now_s: float) -> bytes:
    return pack(IndexRecord(record.parent_id, stored_bytes, record.created_s, now_s, record.model, record.tenant))


def unpack_index(
    block_id: BlockId, packed: bytes | memoryview, ids: dict[BlockId, BlockId], facts: dict[Any, Any]
) -> IndexEntry | None:
    """None when these are not bytes of an index record. ids, facts: see `scan_index`."""
    try:
        found = unpack(IndexRecord, packed)
    except ValueError:
        return None
    if found.parent_id == block_id or len(block_id) != BLOCK_ID_BYTES:
        return None
    parent_id, size, used_s, model, tenant = (
        found.parent_id, found.stored_bytes, found.last_access_s, found.model, found.tenant,
    )  # fmt: skip
    once = facts.setdefault
    return IndexEntry(
        block_id, ids.setdefault(parent_id, parent_id), once(size, size), once(used_s, used_s), once(model, model),
        once(tenant, tenant),
    )  # fmt: skip


def changed(packed: bytes | memoryview, **fields: float) -> bytes | memoryview:
    """The same record with other values of these fields. A damaged one stays as it is."""
    try:
        return pack(replace(unpack(IndexRecord, packed), **fields))
    except ValueError:
        return packed


def scan_index(
    txn: Any, tables: Tables, ids: dict[BlockId, BlockId], facts: dict[Any, Any], after: BlockId | None
) -> tuple[list[IndexEntry], BlockId | None]:
    """The next entries in the order of ids, and where to go on; None at the end. ids, facts: what the whole scan has
    read, so that what is equal is one object: a block's id and the parent that others name; sizes, models, and the time
    of all in a transaction.
    """
    entries, last = [], None
    for key, packed in keys_after(txn, tables.index, after, SCAN_BATCH):
        last = ids.setdefault(key, key)
        entry = unpack_index(last, packed, ids, facts)
        if entry is not None:
            entries.append(entry)
    return entries, last


# -- errors ----------------------------------------------------------------------------------------------------------
FULL_BELOW_BYTES = 1 << 20  # of free space
_BY_ERRNO = {
    errno.ENOSPC: WriteError.NO_SPACE, errno.EDQUOT: WriteError.NO_SPACE, errno.EFBIG: WriteError.NO_SPACE,
    errno.EROFS: WriteError.READ_ONLY, errno.EACCES: WriteError.READ_ONLY, errno.EPERM: WriteError.READ_ONLY,
    errno.ENOMEM: WriteError.MEMORY,
}  # fmt: skip


def write_error(error: Exception, free_bytes: int) -> WriteError:
    """Classify a failed write. A full disk causes a short write, which LMDB reports as EIO."""
    if isinstance(error, LostFileError):
        return WriteError.LOST
    if isinstance(error, MemoryError | lmdb.MemoryError):
        return WriteError.MEMORY
    if isinstance(error, lmdb.MapFullError):
        return WriteError.MAP_FULL
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if code == errno.EIO and free_bytes < FULL_BELOW_BYTES:
        return WriteError.NO_SPACE
    return _BY_ERRNO.get(code or 0, WriteError.IO)


def free_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """The file system's free bytes for this user, and its size."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
