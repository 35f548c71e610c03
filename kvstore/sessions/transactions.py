"""Transactions on tables: reads, and changes in groups, each of which is one synced transaction of a thread of its own.

Knows no table and no change. Every failure is a KVStoreError.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from typing import Any, Generic, TypeVar

import lmdb

from kvstore.disk.env import LostFileError
from kvstore.errors import DegradedError, DiskFullError, KVStoreError, RemoteError, StoreError, StoreLostError
from kvstore.forks import leave_to_parent
from kvstore.sessions.storage import IO_ERRORS, Storage
from kvstore.sessions.tables import StaleViewError, View

MAX_QUEUE = 2048  # tickets waiting for the next group
MAX_RETRIES = 20  # of one group
GIVE_WAY_S, MOST_GIVE_WAY_S = 0.001, 0.1  # before the second try after another server was faster; doubled with each
PAUSE_S = 0.2  # in which others may join a group that nobody waits for
R = TypeVar("R")


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
