"""Checks every block on disk: its value, its index record, and that they agree. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from kvstore.blocks.ids import BlockId
from kvstore.disk import codec
from kvstore.disk import format as disk_format
from kvstore.disk.blocks_file import BlocksFile
from kvstore.disk.env import keys_after
from kvstore.disk.format import Tables
from kvstore.disk.index import IndexEntry

VALUES_BATCH, INDEX_BATCH = 32, 4096  # of one transaction, so that the store can be used meanwhile


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
            elif not _agree(header, disk_format.unpack_index(key, bytes(packed)), len(value), tables):
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


def verify(file: BlocksFile, progress: Callable[[int], None] = lambda _: None) -> VerifyReport:
    """Check every block. progress: called with the number of blocks so far."""
    report = VerifyReport()
    for check in (report.check_values, report.check_index):
        before: bytes | None = None
        last: bytes | None = b""
        while last is not None and last != before:
            before, last = last, file.look_up(partial(check, last=last), None)
            if last not in (None, before):
                progress(report.num_ok + len(report.bad_ids))
        report.is_complete = report.is_complete and last is not None
    return report


def _agree(header: codec.Header, entry: IndexEntry | None, value_bytes: int, tables: Tables) -> bool:
    stored_bytes = disk_format.footprint(value_bytes, tables.page_bytes)
    return entry is not None and entry.parent_id == header.record.parent_id and entry.stored_bytes == stored_bytes
