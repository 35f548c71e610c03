"""One thread that commits changes in groups, so that many share one synced transaction.

Owns the queue and the tickets. Its user defines a change and how a group of them is committed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Generic, TypeVar

from kvstore.errors import KVStoreError, StoreError

T = TypeVar("T")


class Ticket(Generic[T]):
    """A change on its way to the disk."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self._done = threading.Event()
        self._result: T | None = None
        self._error: KVStoreError | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> T:
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

    def finish(self, outcome: T | KVStoreError) -> None:
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
