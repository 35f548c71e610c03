"""The blocks' file over its life: opening, compaction, recovery, quarantine; and the space it may take.

Knows no block. Its user reports errors from inside, and learns here whether they mean damage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import lmdb

from kvstore.config import format_size
from kvstore.disk import check as disk_check
from kvstore.disk import format as disk_format
from kvstore.disk.check import DATA_FILE
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import (
    STRUCTURAL_ERRORS,
    Change,
    LiveTables,
    LostFileError,
    discard_copy,
    is_damage,
    open_environment,
)
from kvstore.disk.format import Tables
from kvstore.errors import DegradedError, StoreError

R = TypeVar("R")
WATERMARK = 0.85
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.05, 1 << 30
SHRINK_SLACK_BYTES = 32 << 20
COPY_MARGIN_BYTES = 1 << 20
WORLD_ERRORS = (lmdb.Error, OSError, MemoryError)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Size of the file before and after, in bytes."""

    before_bytes: int
    after_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class BlocksFile:
    """The environment `blocks/` of a store directory. `with file as tables:` they stay open inside; None when closed or
    broken.

    write_lock: held for one transaction or one compaction, and while the file is recovered or replaced. broken: the
    file is damaged or gone, until `quarantine`. was_reset: a damaged file was moved aside and an empty one begun. lost:
    it was removed or replaced while open. is_too_large: for the capacity, when it was opened. used_bytes: of the pages
    in use after the last transaction; deleted data does not count. created_s: see `Tables`. Raises StoreError when it
    cannot be opened at all.
    """

    def __init__(self, directory: StoreDirectory, capacity_bytes: int) -> None:
        self.path = directory.path / "blocks"
        self.capacity_bytes = capacity_bytes
        self.broken = False
        self.was_reset = False
        self.lost: str | None = None
        self.is_too_large = False
        self.used_bytes = self._usable_bytes = 0
        self.created_s: float | None = None
        self.write_lock = threading.Lock()
        self._directory = directory
        self._is_new = False  # a damaged file was set aside, and the owner does not know yet
        discard_copy(self.path)
        self._live: LiveTables[Tables] = LiveTables(self._open)

    def __enter__(self) -> Tables | None:
        tables = self._live.__enter__()
        return None if self.broken else tables

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__()

    def look_up(self, work: Callable[[Any, Tables], R], otherwise: R) -> R:
        """The result of `work` in a short transaction; `otherwise` if the file cannot be read."""
        with self as tables:
            if tables is None:
                return otherwise
            try:
                with tables.env.begin(buffers=True) as txn:
                    return work(txn, tables)
            except WORLD_ERRORS as error:
                self.note(error)
                return otherwise

    # -- opening and closing -----------------------------------------------------------------------------------------
    def _open(self) -> Tables:
        try:
            return self._open_tables(self._map_bytes())
        except (*STRUCTURAL_ERRORS, disk_format.WrongFormatError) as error:
            disk_check.quarantine(self.path, str(error))
            self.was_reset = True
            return self._open_tables(self.capacity_bytes)

    def _map_bytes(self) -> int:
        """The capacity, or more if the file is larger: eviction writes, too, and needs room."""
        try:
            needed_bytes = disk_check.read_meta(self.path / DATA_FILE).needed_bytes
        except (OSError, disk_check.UnreadableFileError):
            needed_bytes = 0
        return self.capacity_bytes if needed_bytes <= self.capacity_bytes else needed_bytes + SHRINK_SLACK_BYTES

    def _open_tables(self, map_bytes: int) -> Tables:
        self.is_too_large = map_bytes > self.capacity_bytes
        env = open_environment(self.path, map_bytes)
        with ExitStack() as undo:
            undo.callback(env.close, clean=False)
            try:
                tables = disk_format.open_tables(env)
                with env.begin() as txn:
                    self.note_space(tables, disk_format.used_bytes(txn, tables))
            except lmdb.Error as error:
                if is_damage(error):
                    raise
                raise StoreError(f"{self.path} cannot be used: {error}; is the disk full or read-only?") from None
            undo.pop_all()
        self.was_reset = self.was_reset or env.quarantined is not None
        self.created_s = tables.created_s
        return tables

    def close(self) -> None:
        """Sync everything and mark it as complete."""
        with self.write_lock:
            self._live.close(clean=not self.broken)

    def sync(self) -> None:
        """Sync: everything written survives a power loss afterwards. Raises DegradedError."""
        with self as tables:
            if tables is None:
                raise DegradedError(f"{self.path} is closed or damaged; nothing more is made durable")
            try:
                tables.env.check_in_place()
                tables.env.sync()
            except lmdb.Error as error:
                raise DegradedError(f"{self.path} cannot be synced: {error}; look at its disk") from None

    # -- damage and loss ---------------------------------------------------------------------------------------------
    def note(self, error: Exception) -> None:
        """Note an error of the environment. Returns whether it means damage."""
        self.broken = self.broken or is_damage(error)
        if isinstance(error, LostFileError):
            self._note_loss(str(error))

    def look(self) -> None:
        """Check that the file is still in its place; otherwise it counts as damaged, unless the whole store is lost."""
        with self._live as tables:
            loss = None if tables is None else tables.env.loss()
        if loss is not None:
            self._note_loss(loss)

    def _note_loss(self, loss: str) -> None:
        if self._directory.loss() is None:
            self.lost, self.broken = loss, True

    def quarantine(self) -> None:
        """Move the environment aside and begin an empty one.

        Raises StoreError when the file system does not let it; then it stays broken, and may be tried again.
        """
        with self.write_lock, self._live.alone():
            if not self._is_new:
                try:
                    self._live.shut(clean=False)
                    if self.path.exists():
                        disk_check.quarantine(self.path, self.lost or "LMDB found its structure damaged")
                    self._live.open()
                except (*WORLD_ERRORS, RuntimeWarning) as error:  # the warning, where warnings are errors
                    raise StoreError(f"{self.path} is damaged and cannot be put aside: {error}") from None
            self.broken = self._is_new = False

    def recover(self) -> None:
        """Reopen after LMDB gave up on a failed write of its meta page; the file is most likely intact."""
        was_reset, self.was_reset = self.was_reset, False
        try:
            with self._live.alone():
                self._live.shut(clean=False)
                self._live.open()
        except (OSError, StoreError, RuntimeWarning):  # the warning about damage, where warnings are errors
            self.broken = True
        else:
            self.broken = self._is_new = self.was_reset  # then the owner must learn that it is empty
        self.was_reset = self.was_reset or was_reset

    def make_writable(self) -> None:
        """After MapFullError every commit fails until one that is not empty has passed. Raises WORLD_ERRORS."""
        with self as tables:
            if tables is not None:
                with tables.env.begin(write=True) as txn:
                    txn.put(disk_format.COUNTER_KEY, str(txn.id()).encode(), db=tables.meta)

    # -- space -------------------------------------------------------------------------------------------------------
    def note_space(self, tables: Tables, used_bytes: int) -> None:
        """Update the used and the usable space: the file, and its growth before the file system's reserve is
        touched.
        """
        free, size = disk_format.free_bytes(self.path)
        reserve = min(int(size * RESERVE_SHARE), MAX_RESERVE_BYTES)
        self.used_bytes = used_bytes
        self._usable_bytes = min(self.capacity_bytes, tables.env.file_bytes() + max(0, free - reserve))

    def has_space(self, tables: Tables, incoming_bytes: int) -> bool:
        """Whether the file system keeps its reserve if the file has to grow for so many bytes."""
        self.note_space(tables, self.used_bytes)
        growth = self.used_bytes + incoming_bytes - tables.env.file_bytes()
        return growth <= 0 or self.used_bytes + incoming_bytes <= self._usable_bytes

    def excess_bytes(self, incoming_bytes: int = 0) -> int:
        """How much must be deleted before this much may be written; 0 or less: nothing.

        On a nearly full disk, the tier makes do with the file as it is.
        """
        return self.used_bytes + incoming_bytes - int(WATERMARK * self._usable_bytes)

    def compact(self, change: Change | None = None, grows: bool = False) -> CompactReport:
        """Rewrite the file without free pages; reads go on until the swap. Raises StoreError, then nothing changed.

        change: of `LiveTables.compact`. grows: the file becomes larger by it.
        """
        started = time.perf_counter()
        with self.write_lock:
            try:
                with self as tables:
                    if tables is None:
                        raise StoreError(f"{self.path} is closed or damaged, and cannot be compacted")
                    before_bytes = tables.env.file_bytes()
                    self._check_room(2 if grows else 1)
                self._live.compact(tables.env, tables.databases, change)
            except lmdb.MapFullError:
                said = f"{self.path} would take more than its {format_size(self.capacity_bytes)} in this codec"
                raise StoreError(f"{said}; it is as it was. Give more, or evict first") from None
            except (lmdb.Error, OSError) as error:
                raise StoreError(f"{self.path} could not be compacted: {error}; it is as it was") from None
        after_bytes = (self.path / DATA_FILE).stat().st_size
        return CompactReport(before_bytes, after_bytes, time.perf_counter() - started)

    def _check_room(self, times: int) -> None:
        needed = times * self.used_bytes + COPY_MARGIN_BYTES
        free, _ = disk_format.free_bytes(self.path)
        if free < needed:
            raise StoreError(
                f"{self.path} needs {format_size(needed)} beside it to be compacted, {format_size(free)} are free; "
                "free some, or evict first"
            )
