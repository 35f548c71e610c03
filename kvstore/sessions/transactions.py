"""Reads the tables of sessions, and commits changes in groups: each group is one synced transaction.

Knows how tables can fail, and nothing of what is done to sessions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

import lmdb

from kvstore.disk.env import LostFileError
from kvstore.disk.live import Committer, Ticket
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
from kvstore.sessions.storage import Storage
from kvstore.sessions.tables import StaleViewError, View

T = TypeVar("T")
MAX_QUEUE = 256  # tickets waiting for the next group
MAX_RETRIES = 20  # of one group: each doubles the map
GIVE_WAY_S, MOST_GIVE_WAY_S = 0.001, 0.1  # before the second try after another server was faster; doubled with each
IO_ERRORS = (lmdb.Error, OSError, MemoryError)


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
