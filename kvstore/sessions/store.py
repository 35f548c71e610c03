"""Sessions that survive: what callers hand in is committed in groups, each group one synced transaction.

What a transaction does is in `tables`, what is stored in `record`, where in `storage`. Knows no KV, no tier and no
request. Nothing here calls back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

import lmdb

from kvstore.blocks.ids import BlockId
from kvstore.disk.committer import Committer, Ticket
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import LostFileError, StoreEnvironment, open_environment
from kvstore.errors import DegradedError, SessionDamagedError, StoreError, StoreLostError
from kvstore.forks import leave_to_parent
from kvstore.sessions import repair as session_repair
from kvstore.sessions import tables
from kvstore.sessions.check import CheckReport, check
from kvstore.sessions.marker import SessionMarker
from kvstore.sessions.record import SessionHead, SessionKey, SessionState, Tombstone, TurnRecord
from kvstore.sessions.repair import AsideTurn, Repaired
from kvstore.sessions.storage import FIRST_MAP_BYTES, DiskTables, MemoryTables
from kvstore.sessions.tables import View

T = TypeVar("T")
MAX_QUEUE = 256  # tickets waiting for the next group
ON_LOSS = ": no turn is kept; if it was removed, `kvstore compact` writes all of it again, before this process ends"
MAX_RETRIES = 20  # of one group: each doubles the map
IO_ERRORS = (lmdb.Error, OSError, MemoryError)


class SessionStore:
    """Durable sessions. Every method may be called from any thread; none may be called in a forked child.

    What changes something returns a Ticket at once and is carried out in the order of the calls; the caller blocks only
    while MAX_QUEUE tickets wait. What reads sees what is durable, not what is still on its way. Reading and waiting
    raise StoreError, naming a session that is damaged.

    open_environment: called at the start, after `compact` and after a fatal error of LMDB, each time with the one
    before closed; it must allow 9 named databases. None: everything is kept in memory, the same in all but durability,
    and holds the `max_sessions` used last.
    """

    def __init__(
        self,
        open_environment: Callable[[], StoreEnvironment] | None,
        clock: Callable[[], float] = time.time,
        max_sessions: int = 10_000,
    ) -> None:
        try:
            self._storage = MemoryTables() if open_environment is None else DiskTables(open_environment)
        except IO_ERRORS as error:
            raise StoreError(f"the session store cannot be opened: {error}") from error
        self._clock = clock
        self._max_sessions = max_sessions
        self._recent: OrderedDict[SessionKey, None] = OrderedDict()  # in memory only; the oldest use first
        self._recent_lock = threading.Lock()
        self._marker: SessionMarker | None = None
        self._missing: str | None = None  # what the store held before
        self._closing = False
        self._counts = dict.fromkeys(("commits", "committed", "refused", "failed", "grown", "dropped"), 0)
        self._damaged: frozenset[int] = frozenset()  # numbers of sessions that were met
        self._largest_group = 0
        self._committer = Committer("the session store", self._commit, MAX_QUEUE)
        leave_to_parent(self, "the session store")

    def commit_turn(
        self, key: SessionKey, turn: TurnRecord, fingerprint: bytes = b"", model: str = "",
        session_number: int | None = None,
    ) -> Ticket[SessionHead]:  # fmt: skip
        """The next turn, of a new session when the id is unknown. Refused when turn.number is not the last one's + 1.

        fingerprint, model: replace the session's unless empty. session_number: the `number` of the head that the turn
        was computed for; refused when that session is gone, so that a deletion during a turn keeps what it deleted.
        """
        payload = tables.encode_turn(turn, key)
        draft = tables.draft_head(key, self._clock(), turn.system, fingerprint, model)
        return self._submit(self._explaining(key, lambda v: tables.append(v, draft, turn, payload, session_number)))

    def fork(self, source: SessionKey, turn: int | None, new_key: SessionKey) -> Ticket[SessionHead]:
        """A new session with turns 1 to `turn` (None: all there are when it is carried out) of another."""
        now_s = self._clock()
        return self._submit(self._explaining(source, lambda view: tables.fork(view, source, turn, new_key, now_s)))

    def set_ttl(self, key: SessionKey, ttl_s: float | None) -> Ticket[SessionHead]:
        """Counted from the last turn, so a session idle for longer expires at once."""
        return self._submit(self._explaining(key, lambda view: tables.set_ttl(view, key, ttl_s)))

    def delete(self, key: SessionKey) -> Ticket[Tombstone | None]:
        """Remove a session; its tombstone names the blocks to forget. None when there is no such session."""
        return self._submit(self._explaining(key, lambda view: tables.delete(view, key)))

    def repair(self, key: SessionKey) -> Ticket[Repaired | None]:
        """See `session_repair.repair`. Like a deletion, it leaves a tombstone to be carried through."""
        now_s = self._clock()
        return self._submit(lambda view: session_repair.repair(view, key, now_s))

    def finish_deletion(self, number: int) -> Ticket[None]:
        """The blocks of this tombstone are gone everywhere."""
        return self._submit(lambda view: view.delete(tables.TOMBSTONES, tables.be64(number)))

    def compact(self) -> None:
        """Rewrite the file without what was deleted. Returns when it is done; needs the file's size in free space."""
        self._submit(None).wait()

    def head(self, key: SessionKey) -> SessionHead | None:
        return self._read_of(key, lambda view: tables.read_head(view, key))

    def exists(self, key: SessionKey) -> bool:
        return self.head(key) is not None

    def load(self, key: SessionKey, turn: int | None = None) -> SessionState | None:
        """The session at the end of `turn` (None: the last). None: there is no such session, or no such turn."""
        state = self._read_of(key, lambda view: tables.load(view, key, turn))
        if state is not None:
            self._note_use(key)
        return state

    def turn(self, key: SessionKey, number: int) -> TurnRecord | None:
        return self._read_of(key, lambda view: tables.read_turn(view, key, number))

    def turn_of_request(self, key: SessionKey, idempotency_key: str) -> TurnRecord | None:
        """The turn that answered the request of this key, if there is one."""
        return self._read_of(key, lambda view: tables.turn_of_request(view, key, idempotency_key))

    def aside(self, key: SessionKey) -> Sequence[AsideTurn]:
        """Turns that a repair has set aside."""
        return self._read_of(key, lambda view: session_repair.aside(view, key))

    def list(self, tenant: str, limit: int = 100, after: str | None = None) -> Sequence[SessionHead]:
        """The most recently updated first. after: the `cursor` of the last head of the page before.

        A session updated between two pages moves to the front, so it is not met twice, and may not be met at all.
        Damaged ones are left out and counted in `stats`. Raises RequestError for a cursor that is none.
        """
        heads, are_damaged = self._read(lambda view: tables.list_heads(view, tenant, limit, after))
        self._damaged |= are_damaged
        return heads

    def expired(self, now: float, limit: int = 1000) -> Sequence[SessionKey]:
        """Sessions whose time is over, the longest first. They stay until they are deleted."""
        return self._read(lambda view: tables.expired(view, now, limit))

    def unshared_blocks_of(self, key: SessionKey) -> set[BlockId]:
        """The blocks that a deletion would name at this moment: of all its turns, also those before a truncation."""
        return self._read_of(key, lambda view: tables.unshared_blocks_of(view, key))

    def pending_deletions(self) -> Sequence[Tombstone]:
        """Deletions to be carried through; to be read at the start too, for those that a crash cut off."""
        return self._read(tables.pending_deletions)

    def check(self) -> CheckReport:
        """Read and compare everything, in one snapshot. Commits may wait for its end, where the map has to grow."""
        self._read(self._note_missing)
        report = self._read(check)
        missing = () if self._missing is None else (self._missing,)
        return replace(report, problems=(*missing, *report.problems))

    def mark(self, marker: SessionMarker) -> None:
        """Find out whether this is the file that the store had. Called once, before it is used."""

        def name_it(name: bytes) -> None:  # by the thread that writes: a compaction may be under way
            self._submit(lambda view: tables.set_file_name(view, name)).wait()

        self._marker = marker
        with suppress(StoreError, OSError):  # a full disk: the next start does it
            self._missing = marker.settle(self._read(tables.file_name), name_it)

    def _note_missing(self, view: View) -> None:
        """When LMDB gave the file up and it was opened again, it may have been begun anew."""
        if self._missing is None and self._marker is not None and tables.file_name(view) is None:
            with suppress(OSError):
                self._missing = self._marker.begun_anew()

    def accept_loss(self) -> bool:
        """Give up the sessions that are missing; False when none are. Raises StoreError."""
        if self._missing is None or self._marker is None:
            return False
        try:
            self._marker.remove()
        except OSError as error:
            raise StoreError(f"the marker of the sessions cannot be removed: {error.strerror or error}") from None
        self._missing = None
        self.mark(self._marker)
        return True

    def stats(self) -> dict[str, int]:
        def count(view: View) -> dict[str, int]:
            self._note_missing(view)
            shown = {"sessions": tables.HEADS, "turns": tables.TURNS, "refs": tables.REFS}
            shown["pending_deletions"] = tables.TOMBSTONES
            damaged = sum(tables.is_there(view, number) for number in self._damaged)
            return {name: view.count(table) for name, table in shown.items()} | {"damaged": damaged}

        return self._read(count) | self._counts | {
            "bytes": self._storage.num_bytes(), "queued": self._committer.num_queued,
            "largest_group": self._largest_group, "lost": int(self._storage.is_lost()),
            "missing": int(self._missing is not None),
        }  # fmt: skip

    def close(self) -> None:
        """Carry out what is queued, sync and close. Calling it again does nothing."""
        if self._closing:
            return
        self._closing = True
        self._committer.close()
        try:
            self._storage.close()
        except IO_ERRORS as error:
            raise DegradedError(f"the session store cannot be closed in order: {error}") from error

    def _read(self, work: Callable[[View], T]) -> T:
        if self._closing:
            raise StoreError("the session store is closed")
        try:
            with self._storage.read() as view:
                return work(view)
        except IO_ERRORS as error:
            raise StoreError(f"the session store cannot be read: {error}") from error

    def _read_of(self, key: SessionKey, work: Callable[[View], T]) -> T:
        return self._read(self._explaining(key, work))

    def _explaining(self, key: SessionKey, work: Callable[[View], T]) -> Callable[[View], T]:
        """The same; but damage that it meets is counted, and told with what is whole and what can be done."""

        def explaining(view: View) -> T:
            try:
                return work(view)
            except SessionDamagedError as error:
                with suppress(StoreError):
                    found = session_repair.remains(view, key)
                    self._damaged |= set() if found is None else {found.number}
                    error = session_repair.explained(error, key, found)
                raise error from None

        return explaining

    def _submit(self, work: Callable[[View], T] | None) -> Ticket[T]:
        return self._committer.submit(work)

    def _commit(self, group: Sequence[Ticket[Any]]) -> None:
        """One transaction, but for a compaction, which stands alone between those before it and those behind."""
        for _, part in groupby(group, key=lambda ticket: ticket if ticket.change is None else None):
            some = list(part)
            for ticket, outcome in zip(some, self._outcomes(some), strict=True):
                ticket.finish(outcome)

    def _outcomes(self, group: Sequence[Ticket[Any]]) -> Sequence[object]:
        """What became of each ticket: its result, or a StoreError. All of it durable, or said not to be."""
        self._largest_group = max(self._largest_group, len(group))
        try:
            outcomes = self._transact(group)
        except LostFileError as error:
            self._counts["failed"] += len(group)
            return [StoreLostError(f"not stored: {error}")] * len(group)
        except (*IO_ERRORS, StoreError) as error:  # StoreError: open_environment may refuse to open it again
            if len(group) > 1:
                # One may be what the others failed for: too large for the disk, or on a damaged page.
                return [self._outcomes([ticket])[0] for ticket in group]
            self._counts["failed"] += 1
            return [DegradedError(f"not stored, the session store's disk failed ({error}): free space and try again")]
        num_refused = sum(isinstance(outcome, StoreError) for outcome in outcomes)
        self._counts["commits"] += 1
        self._counts["refused"] += num_refused
        self._counts["committed"] += len(outcomes) - num_refused
        if isinstance(self._storage, MemoryTables):
            self._keep_within(outcomes)
        return outcomes

    def _transact(self, group: Sequence[Ticket[Any]]) -> Sequence[object]:
        for _ in range(MAX_RETRIES):
            try:
                if group[0].change is None:
                    self._storage.compact()
                    return [None]
                with self._storage.write() as view:
                    return [_outcome(view, ticket) for ticket in group]
            except lmdb.MapFullError:
                self._storage.grow()
                self._counts["grown"] += 1
            except lmdb.PanicError:
                self._storage.reopen()
        raise DegradedError("its map is still full after it was doubled many times")

    def _note_use(self, key: SessionKey) -> None:
        if isinstance(self._storage, MemoryTables):
            with self._recent_lock:
                self._recent[key] = None
                self._recent.move_to_end(key)

    def _keep_within(self, outcomes: Sequence[object]) -> None:
        """Drop the least recently used sessions over the limit. Their blocks age out of the cache by themselves."""
        for outcome in outcomes:
            if isinstance(outcome, SessionHead):
                self._note_use(outcome.key)
            elif isinstance(outcome, Tombstone):
                with self._recent_lock:
                    self._recent.pop(outcome.key, None)
        with self._storage.write() as view, self._recent_lock:
            while view.count(tables.HEADS) > self._max_sessions:
                key, _ = self._recent.popitem(last=False)
                number = tables.find(view, key)
                if number is not None:  # else it was deleted while it was being read
                    tables.remove(view, key, number)
                    self._counts["dropped"] += 1


def _outcome(view: View, ticket: Ticket[Any]) -> object:
    try:
        return ticket.change(view)
    except StoreError as error:
        return error  # it has written nothing: the others of the group go on


def open_sessions(directory: StoreDirectory | None) -> SessionStore:
    """The sessions of an owned store; without one, in memory."""
    if directory is None:
        return SessionStore(None)
    path = directory.path / "sessions"
    sessions = SessionStore(lambda: open_environment(path, FIRST_MAP_BYTES, max_dbs=16, metasync=True, on_loss=ON_LOSS))
    sessions.mark(SessionMarker(directory.path))
    return sessions
