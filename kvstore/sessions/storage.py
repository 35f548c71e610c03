"""Stores the tables of sessions in LMDB or in memory: opens them, runs transactions, lets the file grow.

Changes are committed in groups, each one synced transaction. Knows nothing of what is done to sessions. Failures are
LMDB's or the system's own exceptions, except for an environment that cannot be opened again: that is a DegradedError.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Protocol, TypeVar

import lmdb

from kvstore.config import format_size
from kvstore.disk.check import DATA_FILE
from kvstore.disk.env import LostFileError, StoreEnvironment
from kvstore.disk.format import FULL_BELOW_BYTES, WriteError, free_bytes, write_error
from kvstore.disk.live import Committer, LiveTables, Ticket, discard_copy
from kvstore.errors import (
    DegradedError,
    DiskFullError,
    KVStoreError,
    RemoteError,
    SessionDamagedError,
    StoreError,
    StoreLostError,
)
from kvstore.forks import leave_to_parent
from kvstore.sessions import repair
from kvstore.sessions.record import SessionKey
from kvstore.sessions.sharing import Alone, Sharing
from kvstore.sessions.tables import TABLES, Place, StaleViewError, View

FIRST_MAP_BYTES = 64 << 20
T = TypeVar("T")
MAX_QUEUE = 256  # tickets waiting for the next group
MAX_RETRIES = 20  # of one group: each doubles the map
GIVE_WAY_S, MOST_GIVE_WAY_S = 0.001, 0.1  # before the second try after another server was faster; doubled with each
IO_ERRORS = (lmdb.Error, OSError, MemoryError)


class Storage(Protocol):
    """Where the tables are. A transaction is committed when its context is left without an exception, and may then
    raise `StaleViewError`. sharing: how servers share the tables.
    """

    sharing: Sharing

    def read(self) -> AbstractContextManager[View]: ...

    def write(self) -> AbstractContextManager[View]: ...

    def compact(self) -> None: ...

    def grow(self) -> None: ...

    def reopen(self) -> None: ...

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

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        return [[key for key, _ in islice(self.scan(table, prefix), limit)] for prefix in prefixes]

    def expect(self, places: Sequence[Place]) -> None:
        return


@dataclass(frozen=True, slots=True)
class _SessionTables:
    """handles: of the tables by their names."""

    env: StoreEnvironment
    handles: dict[str, Any]


class DiskTables:
    """The tables in LMDB. One thread writes, grows, compacts and reopens them; any thread may read."""

    sharing: Sharing = Alone()

    def __init__(self, open_environment: Callable[[], StoreEnvironment]) -> None:
        self._open_environment = open_environment
        self._live = LiveTables(self._open)
        with self._opened() as opened:
            self._path = opened.env.directory
        discard_copy(self._path)
        self._is_closed = False

    def _open(self) -> _SessionTables:
        env = self._open_environment()
        with ExitStack() as undo:
            undo.callback(env.close)
            with env.begin(write=True) as txn:
                handles = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}
            undo.pop_all()
        return _SessionTables(env, handles)

    @contextmanager
    def _opened(self) -> Iterator[_SessionTables]:
        """The open tables. If opening them failed the last time, it is tried again: the disk may be well by now."""
        with self._live as opened:
            if opened is not None:
                yield opened
                return
        with self._live.alone():
            self._open_again()
        with self._live as opened:
            if opened is None:
                raise DegradedError("the sessions' file could not be opened again: look at its disk, then restart")
            yield opened

    def _open_again(self) -> None:
        if self._is_closed:
            raise DegradedError("the session store is closed")
        self._live.open()

    @contextmanager
    def read(self) -> Iterator[View]:
        with self._opened() as opened, opened.env.begin() as txn:
            yield _LmdbView(txn, opened.handles)

    @contextmanager
    def write(self) -> Iterator[View]:
        with self._opened() as opened:
            try:
                with opened.env.begin(write=True) as txn:
                    yield _LmdbView(txn, opened.handles)
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

    def grow(self) -> None:
        with self._opened() as opened:
            env = opened.env
        with self._live.alone():
            env.set_mapsize(2 * env.info()["map_size"])

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

    def num_bytes(self) -> int:
        try:
            return (self._path / DATA_FILE).stat().st_size
        except FileNotFoundError:  # somebody removed it
            return 0

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

    def keys_below(self, table: str, prefixes: Sequence[bytes], limit: int) -> list[list[bytes]]:
        return [[key for key, _ in islice(self.scan(table, prefix), limit)] for prefix in prefixes]

    def expect(self, places: Sequence[Place]) -> None:
        return

    def compact(self) -> None:
        """There is no file."""

    grow = reopen = close = compact

    def is_lost(self) -> bool:
        return False

    def num_bytes(self) -> int:
        return sum(len(k) + len(v) for it in self._tables.values() for k, v in it.values.items())


class SessionTransactions:
    """Any thread may call it, but none in a forked child.

    damaged: numbers of the sessions in which damage was found. then: called in the committing thread after each group,
    with the outcomes of its changes.
    """

    def __init__(self, storage: Storage, then: Callable[[Sequence[object]], None] | None = None) -> None:
        self.storage = storage
        self.damaged: frozenset[int] = frozenset()
        self._then = then
        self._is_closed = False
        self._counts = dict.fromkeys(("commits", "committed", "refused", "failed", "grown", "largest_group"), 0)
        self._last_failure: str | None = None
        self._committer = Committer("the session store", self._commit, MAX_QUEUE)
        leave_to_parent(self, "the session store")

    def read(self, work: Callable[[View], T], key: SessionKey | None = None) -> T:
        """Run `work` in one snapshot. key: see `submit`. Raises StoreError."""
        explained = self._explaining(work, key)
        if self._is_closed:
            raise StoreError("the session store is closed")
        for number in range(MAX_RETRIES):
            try:
                with self.storage.read() as view:
                    return explained(view)
            except StaleViewError:
                _give_way(number)
            except IO_ERRORS as error:
                raise StoreError(f"the session store cannot be read: {error}") from error
        raise StoreError("the session store cannot be read: other servers change all the time what is read")

    def submit(self, work: Callable[[View], T], key: SessionKey | None = None) -> Ticket[T]:
        """Queue a change; changes are carried out in order. Blocks only while MAX_QUEUE of them wait.

        key: of the session that is changed. If it turns out to be damaged, that is noted, and the error says what is
        whole.
        """
        return self._committer.submit(self._explaining(work, key))

    def compact(self) -> None:
        """Rewrite the file without what was deleted. Returns when it is done; needs the file's size in free space."""
        self._committer.submit(None).wait()

    def stats(self) -> dict[str, object]:
        now = {"queued": self._committer.num_queued, "lost": int(self.storage.is_lost())}
        return {**self._counts, **now, "last_failure": self._last_failure}

    def close(self) -> None:
        """Carry out what is queued, sync and close. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._committer.close()
        try:
            self.storage.close()
        except IO_ERRORS as error:
            raise DegradedError(f"the session store cannot be closed in order: {error}") from error

    def _explaining(self, work: Callable[[View], T], key: SessionKey | None) -> Callable[[View], T]:
        """The same work; if it finds damage, that is noted, and the error says what is whole and what can be done."""
        if key is None:
            return work

        def explaining(view: View) -> T:
            try:
                return work(view)
            except SessionDamagedError as error:
                with suppress(StoreError):
                    found = repair.remains(view, key)
                    self.damaged |= set() if found is None else {found.number}
                    error = repair.explained(error, key, found)
                raise error from None

        return explaining

    # -- the thread that commits -------------------------------------------------------------------------------------
    def _commit(self, group: Sequence[Ticket[Any]]) -> None:
        """Commit the group in one transaction; a compaction splits it into those before and those after."""
        for _, part in groupby(group, key=lambda ticket: ticket if ticket.change is None else None):
            some = list(part)
            for ticket, outcome in zip(some, self._outcomes(some), strict=True):
                ticket.finish(outcome)

    def _outcomes(self, group: Sequence[Ticket[Any]]) -> Sequence[object]:
        """The outcome of each ticket: a durable result, or a KVStoreError."""
        self._counts["largest_group"] = max(self._counts["largest_group"], len(group))
        try:
            outcomes = self._transact(group)
        except LostFileError as error:
            self._note_failure(error, len(group))
            return [StoreLostError(f"not stored: {error}")] * len(group)
        except (RemoteError, StoreLostError) as error:
            self._note_failure(error, len(group))
            return [type(error)(f"not stored: {error}")] * len(group)
        except (*IO_ERRORS, StoreError) as error:  # StoreError: the file may refuse to be opened again
            if len(group) > 1:
                # One may be what the others failed for: too large for the disk, or on a damaged page.
                return [self._outcomes([ticket])[0] for ticket in group]
            self._note_failure(error, 1)
            if isinstance(error, DiskFullError):
                return [DiskFullError(f"this was not stored: {error}; free some space and try again")]
            return [DegradedError(f"not stored, the session store's disk failed ({error}): free space and try again")]
        num_refused = sum(isinstance(outcome, KVStoreError) for outcome in outcomes)
        self._counts["commits"] += 1
        self._counts["refused"] += num_refused
        self._counts["committed"] += len(outcomes) - num_refused
        if self._then is not None:
            self._then(outcomes)
        return outcomes

    def _note_failure(self, error: Exception, num_changes: int) -> None:
        self._counts["failed"] += num_changes
        self._last_failure = str(error)

    def _transact(self, group: Sequence[Ticket[Any]]) -> Sequence[object]:
        is_stale = False
        for number in range(MAX_RETRIES):
            try:
                if group[0].change is None:
                    self.storage.compact()
                    return [None]
                with self.storage.write() as view:
                    return [_outcome(view, ticket) for ticket in group]
            except lmdb.MapFullError:
                self.storage.grow()
                self._counts["grown"] += 1
            except lmdb.PanicError:
                self.storage.reopen()
            except StaleViewError:
                is_stale = True
                _give_way(number)
        if is_stale:
            raise RemoteError("other servers change all the time what is written")
        raise DegradedError(f"it could not be written in {MAX_RETRIES} tries")


def _give_way(number: int) -> None:
    """Wait before the next try, for as long as chance says: servers that come again at once meet again."""
    time.sleep(random.uniform(0.0, min(GIVE_WAY_S * 2 ** min(number, 10), MOST_GIVE_WAY_S)))


def _outcome(view: View, ticket: Ticket[Any]) -> object:
    try:
        return ticket.change(view)
    except RemoteError:
        raise
    except KVStoreError as error:
        return error  # it has written nothing: the others of the group go on
