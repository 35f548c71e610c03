"""Checks every block on disk: its value, its index record, and that they agree. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.blocks.ids import BlockId
from kvstore.disk import codec
from kvstore.disk import format as disk_format
from kvstore.disk.blocks_file import BlocksFile
from kvstore.disk.env import keys_after
from kvstore.disk.format import Tables
from kvstore.disk.index import IndexEntry

VALUES_BATCH, INDEX_BATCH = 32, 4096  # of one transaction, so that the store can be used meanwhile


@dataclass(frozen=True, slots=True)
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
    bad_ids: tuple[BlockId, ...] = ()
    is_complete: bool = True

    def as_dict(self) -> dict[str, object]:
        """The report as a dict, with only the first bad ids."""
        return {**asdict(self), "bad_ids": [block_id.hex() for block_id in self.bad_ids[:100]]}


@dataclass(slots=True)
class _Survey:
    """The state of a check. stopped: it could not reach the end."""

    num_ok: int = 0
    num_heads: int = 0
    corrupt: list[BlockId] = field(default_factory=list)
    orphans: list[BlockId] = field(default_factory=list)
    last: BlockId | None = None
    stopped: bool = False

    def values(self, txn: Any, tables: Tables) -> bool:
        """Check the next values; False at the end."""
        after = self.last
        for key, value in keys_after(txn, tables.values, after, VALUES_BATCH):
            self.last = key
            header = codec.decode_header(value)
            packed = txn.get(key, db=tables.index)
            if header is None or header.record.block_id != key or not codec.is_intact(value, header):
                self.corrupt.append(key)
            elif packed is None:
                self.orphans.append(key)
            elif not _agree(header, disk_format.unpack_index(key, bytes(packed)), len(value), tables):
                self.corrupt.append(key)
            else:
                self.num_ok += 1
                self.num_heads += txn.get(header.record.parent_id, db=tables.index) is None
        return self.last != after

    def index(self, txn: Any, tables: Tables) -> bool:
        after = self.last
        for key, _ in keys_after(txn, tables.index, after, INDEX_BATCH):
            self.last = key
            if txn.get(key, db=tables.values) is None:
                self.orphans.append(key)
        return self.last != after


def verify(file: BlocksFile, progress: Callable[[int], None] | None = None) -> VerifyReport:
    """Check every block. progress: called with the number of blocks so far."""
    survey = _Survey()
    for step in (survey.values, survey.index):
        survey.last = None
        while goes_on := file.look_up(step, None):
            if progress is not None:
                progress(survey.num_ok + len(survey.corrupt) + len(survey.orphans))
        survey.stopped = survey.stopped or goes_on is None
    bad = tuple(survey.corrupt + survey.orphans)
    return VerifyReport(
        survey.num_ok, len(survey.corrupt), len(survey.orphans), survey.num_heads,
        bad_ids=bad, is_complete=not survey.stopped,
    )  # fmt: skip


def _agree(header: codec.Header, entry: IndexEntry | None, value_bytes: int, tables: Tables) -> bool:
    stored_bytes = disk_format.footprint(value_bytes, tables.page_bytes)
    return entry is not None and entry.parent_id == header.record.parent_id and entry.stored_bytes == stored_bytes
