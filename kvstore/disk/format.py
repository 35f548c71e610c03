"""The LMDB environment of the disk tier: its databases, an index record, what an error of it means.

Knows the file's format, no policy. A value is `kvstore.disk.codec`'s.
"""

import errno
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import lmdb

from kvstore.blocks.ids import BLOCK_ID_BYTES, BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk import codec
from kvstore.disk.env import LostFileError, StoreEnvironment
from kvstore.disk.index import IndexEntry

FORMAT_KEY, FORMAT = b"format", b"kvstore blocks 1"
COUNTER_KEY = b"counter"
SCAN_BATCH = 4096
SHORT_FINGERPRINT_BYTES = 8
_PAGE_HEADER_BYTES, _NODE_BYTES = 16, 8 + BLOCK_ID_BYTES

# parent id, created, last access, bytes on disk, short fingerprint, tenant bytes, model bytes; then tenant, model.
_INDEX = struct.Struct("<32sddQ8sHH")
_LAST_ACCESS = struct.Struct("<d")
_LAST_ACCESS_OFFSET = 40


class WriteError(StrEnum):
    """Why a transaction left nothing behind."""

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
    """An open environment with its databases: values and index by block id, and a few facts under names."""

    env: StoreEnvironment
    page_bytes: int
    values: Any
    index: Any
    meta: Any


class WrongFormatError(Exception):
    """A sound LMDB file that some other program or version wrote."""


def open_tables(env: StoreEnvironment) -> Tables:
    """Create them where they are missing. Raises lmdb.Error and WrongFormatError."""
    tables = Tables(env, env.stat()["psize"], env.open_db(b"values"), env.open_db(b"index"), env.open_db(b"meta"))
    with env.begin() as txn:
        found = txn.get(FORMAT_KEY, db=tables.meta)
    if found is None:
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, FORMAT, db=tables.meta)
    elif found != FORMAT:
        raise WrongFormatError(f"its format is {found[:40]!r}, this program reads {FORMAT!r}")
    return tables


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
def pack_index(record: BlockRecord, stored_bytes: int, now_s: float) -> bytes:
    tenant, model = codec.label(record.tenant), codec.label(record.model)
    short = record.fingerprint[:SHORT_FINGERPRINT_BYTES]
    fixed = _INDEX.pack(record.parent_id, record.created_s, now_s, stored_bytes, short, len(tenant), len(model))
    return fixed + tenant + model


def unpack_index(block_id: BlockId, packed: bytes) -> IndexEntry | None:
    """None when these are not bytes of an index record."""
    if len(packed) < _INDEX.size or len(block_id) != BLOCK_ID_BYTES:
        return None
    parent_id, created_s, access_s, stored_bytes, _, tenant_bytes, model_bytes = _INDEX.unpack_from(packed)
    middle = _INDEX.size + tenant_bytes
    if len(packed) != middle + model_bytes or parent_id == block_id:
        return None
    if not (math.isfinite(created_s) and math.isfinite(access_s)):
        return None
    tenant, model = _text(packed[_INDEX.size : middle]), _text(packed[middle:])
    if tenant is None or model is None:
        return None
    return IndexEntry(block_id, parent_id, stored_bytes, created_s, access_s, model, tenant)


@lru_cache(maxsize=1024)  # a million records name a few models: one object each, not a million
def _text(label: bytes) -> str | None:
    try:
        return label.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def with_access(packed: bytes, now_s: float) -> bytes:
    """The same record, last used at another time."""
    return packed[:_LAST_ACCESS_OFFSET] + _LAST_ACCESS.pack(now_s) + packed[_LAST_ACCESS_OFFSET + _LAST_ACCESS.size :]


def scan_index(txn: Any, tables: Tables, after: BlockId | None) -> tuple[list[IndexEntry], BlockId | None]:
    """The next entries in the order of ids, and where to go on; None at the end."""
    entries, last = [], None
    for key, packed in keys_after(txn, tables.index, after, SCAN_BATCH):
        last = key
        entry = unpack_index(key, packed)
        if entry is not None:
            entries.append(entry)
    return entries, last


def keys_after(txn: Any, db: Any, after: bytes | None, limit: int) -> Iterator[tuple[bytes, Any]]:
    """Up to `limit` keys with their values, beginning behind `after`."""
    cursor = txn.cursor(db)
    found = cursor.first() if after is None else cursor.set_range(after)
    if found and after is not None and bytes(cursor.key()) == after:
        found = cursor.next()
    for _ in range(limit):
        if not found:
            return
        yield bytes(cursor.key()), cursor.value()
        found = cursor.next()


# -- errors ----------------------------------------------------------------------------------------------------------
_BY_ERRNO = {
    errno.ENOSPC: WriteError.NO_SPACE, errno.EDQUOT: WriteError.NO_SPACE, errno.EFBIG: WriteError.NO_SPACE,
    errno.EROFS: WriteError.READ_ONLY, errno.EACCES: WriteError.READ_ONLY, errno.EPERM: WriteError.READ_ONLY,
    errno.ENOMEM: WriteError.MEMORY,
}  # fmt: skip


def write_error(error: Exception, free_bytes: int) -> WriteError:
    """What to call a failed write. A full disk shows as a short write, which LMDB reports as EIO."""
    if isinstance(error, LostFileError):
        return WriteError.LOST
    if isinstance(error, MemoryError | lmdb.MemoryError):
        return WriteError.MEMORY
    if isinstance(error, lmdb.MapFullError):
        return WriteError.MAP_FULL
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if code == errno.EIO and free_bytes < 1 << 20:
        return WriteError.NO_SPACE
    return _BY_ERRNO.get(code or 0, WriteError.IO)


def free_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Of the file system: what is free for us, and its size."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
