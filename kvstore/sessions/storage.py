"""Where the tables of sessions are: an LMDB environment over its life, or memory. Transactions, growth, compaction.

Knows no session. All failures are LMDB's or the system's own exceptions, but for an environment that cannot be opened
again, which is a DegradedError.
"""

from __future__ import annotations

import os
import shutil
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import lmdb

from kvstore.disk.env import StoreEnvironment
from kvstore.errors import DegradedError
from kvstore.sessions.tables import TABLES, View

FIRST_MAP_BYTES = 64 << 20
Environment = lmdb.Environment | StoreEnvironment
MAX_READERS = 64  # reads at a time; LMDB has 126 places for them


def open_plain_environment(path: str | Path, map_size: int = FIRST_MAP_BYTES) -> lmdb.Environment:
    """An environment of its own in the directory `path`, made when it is missing, with full sync."""
    path = Path(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    env = lmdb.open(
        str(path), map_size=map_size, max_dbs=16, mode=0o600, sync=True, metasync=True, writemap=False, lib_version=0
    )
    # LMDB syncs its file, not the directory entries that lead to it.
    _sync_directory(path)
    _sync_directory(path.parent)
    return env


def _sync_directory(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Storage(Protocol):
    """Where the tables are: on disk or in memory."""

    def read(self) -> AbstractContextManager[View]: ...

    def write(self) -> AbstractContextManager[View]: ...

    def grow(self) -> None: ...

    def reopen(self) -> None: ...

    def compact(self) -> None: ...

    def is_lost(self) -> bool: ...

    def num_bytes(self) -> int: ...

    def close(self) -> None: ...


class _LmdbView:
    def __init__(self, txn: Any, handles: dict[str, Any]) -> None:
        self._txn, self._handles = txn, handles

    def get(self, table: str, key: bytes) -> bytes | None:
        value: bytes | None = self._txn.get(key, db=self._handles[table])
        return value

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._handles[table])

    def delete(self, table: str, key: bytes) -> None:
        self._txn.delete(key, db=self._handles[table])

    def count(self, table: str) -> int:
        return int(self._txn.stat(self._handles[table])["entries"])

    def scan(
        self, table: str, prefix: bytes = b"", reverse: bool = False, before: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._txn.cursor(db=self._handles[table])
        if not reverse:
            entries = cursor.iternext() if cursor.set_range(prefix) else iter(())
        else:
            end = prefix + b"\xff" * 32 if before is None else before
            entries = cursor.iterprev() if (cursor.prev() if cursor.set_range(end) else cursor.last()) else iter(())
        for key, value in entries:
            if not key.startswith(prefix):
                return
            yield key, value


class DiskTables:
    """The LMDB environment over its life: many short reads, and moments when nobody may be in it."""

    def __init__(self, open_environment: Callable[[], Environment]) -> None:
        self._open = open_environment
        self._changed = threading.Condition()
        self._num_reading = 0
        self._closed_to_readers = False
        self._closed = False  # for good
        self._env: Environment | None = None
        self._handles: dict[str, Any] = {}
        self.reopen()
        self._path = Path(self._opened().path())
        self._discard_copy()

    def _opened(self) -> Environment:
        if self._env is None:
            raise DegradedError("the session store's file could not be opened again: look at its disk, then restart")
        return self._env

    @contextmanager
    def read(self) -> Iterator[View]:
        self._reopen_if_lost()
        with self._changed:
            self._changed.wait_for(lambda: not self._closed_to_readers and self._num_reading < MAX_READERS)
            self._num_reading += 1
        try:
            with self._opened().begin() as txn:
                yield _LmdbView(txn, self._handles)
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[View]:
        self._reopen_if_lost()
        with self._opened().begin(write=True) as txn:
            yield _LmdbView(txn, self._handles)
        self._check_in_place()  # again: what is acknowledged now has to be found again

    def _check_in_place(self) -> None:
        env = self._env
        if isinstance(env, StoreEnvironment):
            env.check_in_place()

    def is_lost(self) -> bool:
        """Whether the file, or what makes us its owner, was removed or replaced while it was open."""
        env = self._env
        return isinstance(env, StoreEnvironment) and env.loss() is not None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No reader inside: LMDB's map must not move under one. No writer either: it is the one that asks, or waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed_to_readers)
            self._closed_to_readers = True
            self._changed.wait_for(lambda: self._num_reading == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed_to_readers = False
                self._changed.notify_all()

    def grow(self) -> None:
        with self._alone():
            env = self._opened()
            env.set_mapsize(2 * env.info()["map_size"])

    def reopen(self) -> None:
        """After LMDB gave the environment up (a failed write of its meta page), or when it was not open."""
        with self._alone():
            self._close_environment()
            self._open_environment()

    def _reopen_if_lost(self) -> None:
        """When it could not be opened again the last time, another try may find the disk well again."""
        if self._env is None:
            with self._alone():
                if self._env is None:
                    self._open_environment()

    def _open_environment(self) -> None:
        if self._closed:
            raise DegradedError("the session store is closed")
        env = self._open()
        try:
            env.reader_check()
            with env.begin(write=True) as txn:
                handles = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}
        except BaseException:
            env.close()
            raise
        self._env, self._handles = env, handles

    def _close_environment(self) -> None:
        env, self._env, self._handles = self._env, None, {}
        if env is not None:
            env.close()

    def _copy_path(self) -> Path:
        return self._path.with_name(self._path.name + ".compact")

    def _discard_copy(self) -> None:
        """Of a compaction that was cut off. It may hold the text of sessions that were deleted since."""
        if self._copy_path().is_dir():
            shutil.rmtree(self._copy_path())

    def compact(self) -> None:
        """Copy what is live, and put the copy in the file's place. The old file's bytes are the file system's now.

        A file that somebody removed is there again afterwards, as long as we have it open. One that stands in its place
        is not touched: LostFileError.
        """
        env = self._opened()
        is_removed = isinstance(env, StoreEnvironment) and env.is_removed()
        if not is_removed:
            self._check_in_place()
        self._path.mkdir(mode=0o700, exist_ok=True)
        self._discard_copy()
        self._copy_path().mkdir(mode=0o700)
        try:
            self._copy_to(self._copy_path())
            copied = self._copy_path() / "data.mdb"
            copied.chmod(0o600)
            with open(copied, "rb") as file:
                os.fsync(file.fileno())
            with self._alone():
                if not is_removed:  # else its bytes go when it is closed
                    self._close_environment()
                os.replace(copied, self._path / "data.mdb")
                _sync_directory(self._path)
                self._close_environment()
        finally:
            self._reopen_if_lost()
            self._discard_copy()

    def _copy_to(self, path: Path) -> None:
        """Record by record: LMDB's own copy keeps what was deleted in the gaps of pages that are in use."""
        env = self._opened()
        size = env.info()["map_size"]
        copy = lmdb.open(str(path), map_size=size, max_dbs=16, sync=False, lib_version=0, mode=0o700)
        try:
            with env.begin() as reading, copy.begin(write=True) as writing:
                for name in TABLES:
                    target = copy.open_db(name.encode(), txn=writing)
                    for key, value in reading.cursor(self._handles[name]):
                        writing.put(key, value, append=True, db=target)
            copy.sync(True)
        finally:
            copy.close()

    def num_bytes(self) -> int:
        try:
            return (self._path / "data.mdb").stat().st_size
        except FileNotFoundError:  # somebody removed it
            return 0

    def close(self) -> None:
        with self._alone():
            self._closed = True
            if self._env is not None:
                self._env.sync(True)
            self._close_environment()


class _MemoryTable:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []  # sorted


class MemoryTables:
    """The same tables in memory, one transaction at a time. Nothing fails in here, so nothing is rolled back."""

    def __init__(self) -> None:
        self._tables = {name: _MemoryTable() for name in TABLES}
        self._lock = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[View]:
        with self._lock:
            yield self

    write = read

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._tables[table].values.get(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        it = self._tables[table]
        if key not in it.values:
            insort(it.keys, key)
        it.values[key] = value

    def delete(self, table: str, key: bytes) -> None:
        it = self._tables[table]
        if it.values.pop(key, None) is not None:
            del it.keys[bisect_left(it.keys, key)]

    def count(self, table: str) -> int:
        return len(self._tables[table].keys)

    def scan(
        self, table: str, prefix: bytes = b"", reverse: bool = False, before: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        it = self._tables[table]
        step = -1 if reverse else 1
        end = prefix + b"\xff" * 32 if before is None else before
        at = bisect_left(it.keys, end) - 1 if reverse else bisect_left(it.keys, prefix)
        while 0 <= at < len(it.keys) and it.keys[at].startswith(prefix):
            yield it.keys[at], it.values[it.keys[at]]
            at += step

    def grow(self) -> None:
        raise MemoryError

    def reopen(self) -> None: ...

    def compact(self) -> None: ...

    def is_lost(self) -> bool:
        return False

    def num_bytes(self) -> int:
        return sum(len(k) + len(v) for it in self._tables.values() for k, v in it.values.items())

    def close(self) -> None: ...
