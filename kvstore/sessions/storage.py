"""Stores tables in LMDB, and runs transactions on tables: reads, and changes in groups, each of which is one synced
transaction of a thread of its own.

Knows nothing of what is done to them. A failure of `Transactions` is a KVStoreError; those of tables are LMDB's or the
system's own exceptions, except for an environment that cannot be opened again: that is a DegradedError.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

import lmdb

from kvstore.config import format_size
from kvstore.disk.env import LiveTables, LostFileError, StoreEnvironment, discard_copy
from kvstore.disk.format import FULL_BELOW_BYTES, WriteError, free_bytes, write_error
from kvstore.errors import DegradedError, DiskFullError, KVStoreError, RemoteError, StoreError, StoreLostError
from kvstore.forks import leave_to_parent
from kvstore.sessions.sharing import Sharing
from kvstore.sessions.tables import StaleViewError, View

MAX_QUEUE = 2048  # tickets waiting for the next group
MAX_RETRIES = 20  # of one group
GIVE_WAY_S, MOST_GIVE_WAY_S = 0.001, 0.1  # before the second try after another server was faster; doubled with each
PAUSE_S = 0.2  # in which others may join a group that nobody waits for
IO_ERRORS = (lmdb.Error, OSError, MemoryError)
R = TypeVar("R")


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


class DiskView(View):
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

    sharing = Sharing()

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


class Ticket(Generic[R]):
    """A change on its way to the disk. is_urgent: somebody waits for it."""

    def __init__(self, change: Any, is_urgent: bool) -> None:
        self.change, self.is_urgent = change, is_urgent
        self._done = threading.Event()
        self._result: R | None = None
        self._error: KVStoreError | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> R:
        """Wait until it is durable.

        Raises what it was refused with, DegradedError when the disk failed. After a failure or a timeout
        (seconds) it may be stored or not: load the session to find out.
        """
        if not self._done.wait(timeout):
            raise StoreError(f"not durable after {timeout} s: the disk is slow; it may still become so")
        if self._error is not None:
            # Each wait raises its own exception: two threads that raise the same one mix their tracebacks.
            raise copy(self._error) from self._error
        return self._result  # type: ignore[return-value]

    def finish(self, outcome: R | KVStoreError) -> None:
        if isinstance(outcome, KVStoreError):
            self._error = outcome
        else:
            self._result = outcome
        self._done.set()


class Transactions:
    """Any thread may call it, but none in a forked child.

    what: the user's name in errors. then: called in the committing thread after each group, with the outcomes of its
    changes: results, or errors. After any other exception of a change or of `then`, which is a bug, all tickets fail
    and nothing more is accepted.
    """

    def __init__(self, what: str, storage: Storage, then: Callable[[Sequence[object]], None] | None = None) -> None:
        self.storage = storage
        self._what, self._then = what, then
        self._is_closed = False
        self._refusal: str | None = None  # why nothing more is accepted
        self._counts = dict.fromkeys(("commits", "committed", "refused", "failed", "largest_group"), 0)
        self._last_failure: str | None = None
        self._changed = threading.Condition()
        self._queue: deque[Ticket[Any]] = deque()
        self._thread = threading.Thread(target=self._run, name="kvstore-commit", daemon=True)
        self._thread.start()
        leave_to_parent(self, what)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def read(self, work: Callable[[View], R]) -> R:
        """Run `work` in one snapshot. Raises StoreError."""
        if self._is_closed:
            raise StoreError(f"{self._what} is closed")
        for number in range(MAX_RETRIES):
            try:
                with self.storage.read() as view:
                    return work(view)
            except StaleViewError:
                _give_way(number)
            except IO_ERRORS as error:
                raise StoreError(f"{self._what} cannot be read: {error}") from error
        raise StoreError(f"{self._what} cannot be read: other servers change all the time what is read")

    def submit(self, change: Callable[[View], R] | None, is_urgent: bool = True) -> Ticket[R]:
        """Queue a change, or None to compact; they are carried out in order. Waits only while MAX_QUEUE of them wait.

        is_urgent: do not wait PAUSE_S for others to share its commit. Raises StoreError after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < MAX_QUEUE or self._refusal)
            if self._refusal:
                raise StoreError(self._refusal)
            ticket = Ticket[R](change, is_urgent)
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def compact(self) -> None:
        """Rewrite the file without what was deleted. Returns when it is done; needs the file's size in free space."""
        self.submit(None).wait()

    def stats(self) -> dict[str, object]:
        now = {"queued": self.num_queued, "lost": int(self.storage.is_lost())}
        return {**self._counts, **now, "last_failure": self._last_failure}

    def close(self) -> None:
        """Carry out what is queued, sync and close. Calling it again does nothing."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._refusal = self._refusal or f"{self._what} is closed"
            self._changed.notify_all()
        self._thread.join()
        if was_closed:
            return
        try:
            self.storage.close()
        except IO_ERRORS as error:
            raise DegradedError(f"{self._what} cannot be closed in order: {error}") from error

    # -- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit(group)
            except Exception as error:
                self._stop(group, f"{self._what} stopped after an internal error: {error!r}")
                raise  # the thread's own report

    def _next_group(self) -> list[Ticket[Any]]:
        """All waiting changes. Empty: closed, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._refusal)
            self._changed.wait_for(lambda: self._refusal or any(one.is_urgent for one in self._queue), PAUSE_S)
            group = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return group

    def _stop(self, group: Sequence[Ticket[Any]], refusal: str) -> None:
        with self._changed:
            self._refusal = refusal
            waiting = [*group, *self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for ticket in waiting:
            if not ticket.done:
                ticket.finish(StoreError(refusal))

    def _commit(self, group: Sequence[Ticket[Any]]) -> None:
        """Commit the group in one transaction; a compaction splits it into those before and those after."""
        for _, part in groupby(group, key=lambda ticket: ticket if ticket.change is None else None):
            some = list(part)
            outcomes = self._outcomes(some)
            if self._then is not None:
                self._then(outcomes)
            for ticket, outcome in zip(some, outcomes, strict=True):
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
            return [DegradedError(f"not stored, the disk failed ({error}): free space and try again")]
        num_refused = sum(isinstance(outcome, KVStoreError) for outcome in outcomes)
        self._counts["commits"] += 1
        self._counts["refused"] += num_refused
        self._counts["committed"] += len(outcomes) - num_refused
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
