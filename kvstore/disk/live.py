"""The tables of an LMDB environment that threads use: reopening, replacement, compaction, closing.

One thread commits changes in groups, so that many share one synced transaction. Knows no particular table and no
change: its user passes the functions that open and commit them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import lmdb

from kvstore.disk import check as disk_check
from kvstore.disk.check import DATA_FILE
from kvstore.disk.env import StoreEnvironment, keys_after
from kvstore.errors import KVStoreError, StoreError

MAX_INSIDE = 64  # LMDB has 126 places for readers, and each thread keeps some
COPY_RECORDS, COPY_BYTES = 4096, 64 << 20  # of one transaction, at most
R = TypeVar("R")


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


class Ticket(Generic[R]):
    """A change on its way to the disk."""

    def __init__(self, change: Any) -> None:
        self.change = change
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


class Committer:
    """commit: called in the thread with the waiting changes, in order; finishes each ticket.

    If it raises, which is a bug, all tickets fail and nothing more is accepted. what: the user's name in errors.
    max_queue: tickets that may wait. pause_s: time for others to join a group, unless somebody waits in `flush`.
    """

    def __init__(
        self, what: str, commit: Callable[[Sequence[Ticket[Any]]], None], max_queue: int, pause_s: float = 0.0
    ) -> None:
        self._what = what
        self._commit = commit
        self._max_queue = max_queue
        self._pause_s = pause_s
        self._changed = threading.Condition()
        self._queue: deque[Ticket[Any]] = deque()
        self._num_taken = self._num_ended = 0
        self._num_flushing = 0
        self._refusal: str | None = None  # why nothing more is accepted
        self._thread = threading.Thread(target=self._run, name="kvstore-commit", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def submit(self, change: Any) -> Ticket[Any]:
        """Queue a change; changes are committed in order. Waits while the queue is full. Raises StoreError after
        `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self._max_queue or self._refusal)
            if self._refusal:
                raise StoreError(self._refusal)
            ticket = Ticket[Any](change)
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def flush(self) -> None:
        """Wait until all that was submitted has ended, successfully or not."""
        with self._changed:
            last = self._num_taken + len(self._queue)
            self._num_flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_ended >= last)
            self._num_flushing -= 1

    def close(self) -> None:
        """Commit what is queued, and end the thread. Calling it again does nothing."""
        with self._changed:
            self._refusal = self._refusal or f"{self._what} is closed"
            self._changed.notify_all()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit(group)
            except Exception as error:
                self._stop(group, f"{self._what} stopped after an internal error: {error!r}")
                raise  # the thread's own report
            with self._changed:
                self._num_ended = self._num_taken
                self._changed.notify_all()

    def _next_group(self) -> list[Ticket[Any]]:
        """All waiting changes. Empty: closed, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._refusal)
            if self._pause_s:
                self._changed.wait_for(lambda: self._refusal or self._num_flushing, self._pause_s)
            group = list(self._queue)
            self._queue.clear()
            self._num_taken += len(group)
            self._changed.notify_all()
        return group

    def _stop(self, group: Sequence[Ticket[Any]], refusal: str) -> None:
        with self._changed:
            self._refusal = refusal
            waiting = [*group, *self._queue]
            self._num_ended = self._num_taken = self._num_taken + len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for ticket in waiting:
            if not ticket.done:
                ticket.finish(StoreError(refusal))
