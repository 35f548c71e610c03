"""Stores tables in LMDB or in memory: opens them, and runs transactions.

Knows nothing of what is done to them. Failures are LMDB's or the system's own exceptions, except for an environment
that cannot be opened again: that is a DegradedError.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import lmdb

from kvstore.config import format_size
from kvstore.disk.env import LostFileError, StoreEnvironment
from kvstore.disk.format import FULL_BELOW_BYTES, WriteError, free_bytes, write_error
from kvstore.disk.live import LiveTables, discard_copy
from kvstore.errors import DegradedError, DiskFullError
from kvstore.sessions.sharing import Alone, Sharing
from kvstore.sessions.tables import Place, View

IO_ERRORS = (lmdb.Error, OSError, MemoryError)
ENTRY_BYTES = 200  # what a record in memory takes beside its bytes


class Storage(Protocol):
    """Where the tables are. A transaction is committed when its context is left without an exception, and may then
    raise `StaleViewError`. sharing: how servers share the tables.
    """

    sharing: Sharing

    def read(self) -> AbstractContextManager[View]: ...

    def write(self) -> AbstractContextManager[View]: ...

    def compact(self) -> None: ...

    def reopen(self) -> None: ...

    def is_lost(self) -> bool: ...

    def close(self) -> None: ...


class DiskView:
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

    def num_bytes(self) -> int:
        stats = map(self._txn.stat, self._handles.values())
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

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

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        return [[key for key, _ in islice(self.scan(table, prefix), limit)] for prefix in prefixes]

    def expect(self, places: Sequence[Place]) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Opened:
    """handles: of the tables by their names."""

    env: StoreEnvironment
    handles: dict[str, Any]


class DiskTables:
    """The tables of these names in LMDB. One thread writes, compacts and reopens them; any thread may read.

    open_environment: called at the start, after `compact` and after a fatal error of LMDB, each time after the previous
    environment was closed; it must allow as many named databases. Raises whatever it raises.
    """

    sharing: Sharing = Alone()

    def __init__(self, open_environment: Callable[[], StoreEnvironment], names: Sequence[str]) -> None:
        self._open_environment, self._names = open_environment, names
        self._live = LiveTables(self._open)
        with self._opened() as opened:
            self._path = opened.env.directory
        discard_copy(self._path)
        self._is_closed = False

    def _open(self) -> _Opened:
        env = self._open_environment()
        with ExitStack() as undo:
            undo.callback(env.close)
            with env.begin(write=True) as txn:
                handles = {name: env.open_db(name.encode(), txn=txn) for name in self._names}
            undo.pop_all()
        return _Opened(env, handles)

    @contextmanager
    def _opened(self) -> Iterator[_Opened]:
        """The open tables. If opening them failed the last time, it is tried again: the disk may be well by now."""
        with self._live as opened:
            if opened is not None:
                yield opened
                return
        with self._live.alone():
            self._open_again()
        with self._live as opened:
            if opened is None:
                raise DegradedError(f"the {self._path.name} cannot be opened again: look at their disk, then restart")
            yield opened

    def _open_again(self) -> None:
        if self._is_closed:
            raise DegradedError(f"the {self._path.name} are closed")
        self._live.open()

    @contextmanager
    def read(self) -> Iterator[View]:
        with self._opened() as opened, opened.env.begin() as txn:
            yield DiskView(txn, opened.handles)

    @contextmanager
    def write(self) -> Iterator[View]:
        with self._opened() as opened:
            try:
                with opened.env.begin(write=True) as txn:
                    yield DiskView(txn, opened.handles)
            except LostFileError:
                raise
            except (lmdb.Error, OSError) as error:
                free, size = free_bytes(self._path)
                if free < FULL_BELOW_BYTES and write_error(error, free) is WriteError.NO_SPACE:
                    used = f"{format_size(size - free)} of {format_size(size)}"
                    raise DiskFullError(f"the disk is full ({used})") from error
                raise
            opened.env.check_in_place()  # again: what is acknowledged now has to be found again

    def is_lost(self) -> bool:
        """Whether the file, or what makes us its owner, was removed or replaced while it was open."""
        with self._live as opened:
            return opened is not None and opened.env.loss() is not None

    def reopen(self) -> None:
        """After LMDB gave the environment up: a failed write of its meta page."""
        with self._live.alone():
            self._live.shut()
            self._open_again()

    def compact(self) -> None:
        """Copy the live records, and put the copy in the file's place. The old file's space goes back to the file
        system.
        """
        with self._opened() as opened:
            pass  # stays open: only this thread closes it
        self._live.compact(opened.env, opened.handles)

    def close(self) -> None:
        self._is_closed = True
        self._live.close()


class _MemoryTable:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []  # sorted


class MemoryTables:
    """The same tables in memory, one transaction at a time. Nothing fails in here, so nothing is rolled back."""

    sharing: Sharing = Alone()

    def __init__(self, names: Sequence[str]) -> None:
        self._tables = {name: _MemoryTable() for name in names}
        self._num_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[View]:
        with self._lock:
            yield self

    write = read

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._tables[table].values.get(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self.delete(table, key)
        it = self._tables[table]
        insort(it.keys, key)
        it.values[key] = value
        self._num_bytes += len(key) + len(value) + ENTRY_BYTES

    def delete(self, table: str, key: bytes) -> None:
        it = self._tables[table]
        value = it.values.pop(key, None)
        if value is not None:
            del it.keys[bisect_left(it.keys, key)]
            self._num_bytes -= len(key) + len(value) + ENTRY_BYTES

    def count(self, table: str) -> int:
        return len(self._tables[table].keys)

    def num_bytes(self) -> int:
        return self._num_bytes

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

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        return [[key for key, _ in islice(self.scan(table, prefix), limit)] for prefix in prefixes]

    def expect(self, places: Sequence[Place]) -> None:
        return

    def compact(self) -> None:
        """There is no file."""

    reopen = close = compact

    def is_lost(self) -> bool:
        return False
