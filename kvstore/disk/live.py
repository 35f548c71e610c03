"""The tables of an LMDB environment that threads use: reopening, replacement, compaction, closing.

Knows no particular table: its user passes the function that opens them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import lmdb

from kvstore.disk import check as disk_check
from kvstore.disk.check import DATA_FILE
from kvstore.disk.env import StoreEnvironment, keys_after
from kvstore.errors import StoreError

MAX_INSIDE = 64  # LMDB has 126 places for readers, and each thread keeps some
COPY_RECORDS, COPY_BYTES = 4096, 64 << 20  # of one transaction, at most


class OpenTables(Protocol):
    """An open environment and what belongs to it."""

    @property
    def env(self) -> StoreEnvironment: ...


T = TypeVar("T", bound=OpenTables)


class LiveTables(Generic[T]):
    """`with live as tables:` holds them open. They are None after `shut`, and if they could not be reopened.

    Many threads may be inside, or one that is `alone()`, which has priority; LMDB's map must not move under a reader.
    open_tables: called to open them, after the previous ones were closed. Raises whatever it raises.
    """

    def __init__(self, open_tables: Callable[[], T]) -> None:
        self._open_tables = open_tables
        self._changed = threading.Condition(threading.Lock())
        self._num_inside = 0
        self._is_alone = False
        self._tables: T | None = open_tables()

    def __enter__(self) -> T | None:
        with self._changed:
            while self._is_alone or self._num_inside == MAX_INSIDE:
                self._changed.wait()
            self._num_inside += 1
        return self._tables

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._num_inside -= 1
            if self._is_alone or self._num_inside == MAX_INSIDE - 1:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
            self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    # -- alone -------------------------------------------------------------------------------------------------------
    def shut(self, clean: bool = True) -> None:
        """Close the environment; clean: mark it as complete. Call it, and all that follow, `alone()`."""
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.env.close(clean)

    def open(self) -> None:
        """Open it again, unless it is open."""
        if self._tables is None:
            self._tables = self._open_tables()

    def close(self, clean: bool = True) -> None:
        with self.alone():
            self.shut(clean)

    # -- compaction --------------------------------------------------------------------------------------------------
    def compact(self, env: StoreEnvironment, databases: Mapping[str, Any]) -> None:
        """Copy the records of these databases, and replace the file by the copy.

        Nobody may write meanwhile. A removed file is restored. A foreign file in its place is not touched:
        LostFileError. After any failure the file is unchanged, and open if it can be opened.
        """
        place = copy_path(env.directory)
        is_removed = env.is_removed()
        if not is_removed:
            env.check_in_place()
        env.directory.mkdir(mode=0o700, exist_ok=True)
        discard_copy(env.directory)
        try:
            _copy_records(env, databases, place)
            with self.alone():
                try:
                    self._swap(env.directory, is_removed)
                finally:
                    self.open()
        finally:
            discard_copy(env.directory)

    def _swap(self, directory: Path, is_removed: bool) -> None:
        if not is_removed:  # else its bytes would be lost with the last open descriptor
            self.shut(clean=False)
        os.replace(copy_path(directory) / DATA_FILE, directory / DATA_FILE)
        disk_check.sync_directory(directory)
        self.shut(clean=False)
        disk_check.mark_clean(directory)


def copy_path(directory: Path) -> Path:
    """The path of a compacted copy of this environment."""
    return directory.with_name(directory.name + ".compact")


def discard_copy(directory: Path) -> None:
    """Delete the copy of an interrupted compaction. It may hold the text of sessions deleted since. Raises
    StoreError.
    """
    place = copy_path(directory)
    try:
        if place.is_dir():
            shutil.rmtree(place)
    except OSError as error:
        raise StoreError(f"{place} is left of a compaction and cannot be removed: {error.strerror or error}") from None


def _copy_records(env: StoreEnvironment, databases: Mapping[str, Any], place: Path) -> None:
    """Copy record by record: LMDB's own copy keeps deleted data in the gaps of used pages."""
    place.mkdir(mode=0o700)
    # Synced once at the end: nobody uses it before that.
    copy = lmdb.open(
        str(place), map_size=env.info()["map_size"], max_dbs=len(databases), sync=False, lib_version=0, mode=0o700
    )
    try:
        for name, db in databases.items():
            _copy_database(env, db, copy, copy.open_db(name.encode()))
        copy.sync(True)
    finally:
        copy.close()
    disk_check.sync_directory(place)


def _copy_database(env: StoreEnvironment, source: Any, copy: lmdb.Environment, target: Any) -> None:
    last: bytes | None = None
    while True:
        first, num_bytes = last, 0
        with env.begin(buffers=True) as reading, copy.begin(write=True) as writing:
            for key, value in keys_after(reading, source, first, COPY_RECORDS):
                writing.put(key, value, append=True, db=target)
                last = key
                num_bytes += len(value)
                if num_bytes >= COPY_BYTES:
                    break
        if last == first:
            return
