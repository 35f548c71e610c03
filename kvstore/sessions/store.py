"""Sessions that survive: turns, forks and deletions by their keys; expiry, damage, lost files, and counts.

What a transaction does is in `tables`, how it is carried out, and where, in `storage`, what is stored in `record`. Says
which blocks a deletion leaves behind; whoever owns the KV deletes them. Knows no KV, no tier and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.blocks.ids import BlockId
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import StoreEnvironment, open_environment
from kvstore.errors import RemoteError, SessionDamagedError, StoreError, StoreLostError
from kvstore.sessions import remains, tables
from kvstore.sessions.check import CheckReport, mend
from kvstore.sessions.forgetting import forget
from kvstore.sessions.marker import SessionMarker
from kvstore.sessions.memory import MemoryTables, RecentSessions
from kvstore.sessions.record import (
    Fork,
    MessageEdit,
    Parent,
    SessionHead,
    SessionKey,
    SessionState,
    Tombstone,
    TurnRecord,
)
from kvstore.sessions.sharing import Sharing
from kvstore.sessions.storage import IO_ERRORS, DiskTables, Storage, Ticket, Transactions
from kvstore.sessions.tables import TABLES, View

if TYPE_CHECKING:
    from kvstore.sessions.shared.leases import Lease

T = TypeVar("T")
MAP_BYTES = 256 << 30  # of addresses, no memory and no disk: more than the file will ever have

SHOWN = {  # among the counts, by table
    "sessions": tables.HEADS, "turns": tables.TURNS, "refs": tables.REFS, "pending_deletions": tables.TOMBSTONES,
}  # fmt: skip
ON_LOSS = ": no turn is kept; if it was removed, `kvstore compact` writes all of it again, before this process ends"


class SessionStore:
    """Durable sessions. Every method may be called from any thread; none may be called in a forked child.

    A change returns a Ticket at once; changes are carried out in the order of the calls. A read sees what is durable,
    not what is still queued, and no session that has expired. Reading and waiting raise StoreError, which names a
    damaged session.

    open_environment: see `DiskTables`. None: sessions are kept in memory, which is the same in all but durability, and
    only the `max_sessions` used last. shared: tables that servers share, instead. sharing: who may write where servers
    share.
    """

    def __init__(
        self,
        open_environment: Callable[[], StoreEnvironment] | None,
        clock: Callable[[], float] | None = None,
        max_sessions: int = 10_000,
        shared: Storage | None = None,
    ) -> None:
        self._recent: RecentSessions | None = None
        storage = shared
        try:
            if storage is None and open_environment is not None:
                storage = DiskTables(open_environment, TABLES)
        except IO_ERRORS as error:
            raise StoreError(f"the session store cannot be opened: {error}") from error
        if storage is None:
            storage = in_memory = MemoryTables(TABLES)
            self._recent = RecentSessions(in_memory, max_sessions)
        keep_within = None if self._recent is None else self._recent.keep_within
        self.transactions = Transactions("the session store", storage, keep_within)
        self.damage = remains.Damage()
        self.sharing: Sharing = storage.sharing
        self.clock = clock or self.sharing.now
        self._marker: SessionMarker | None = None
        self._missing: str | None = None  # what the store held before
        self._counted = dict.fromkeys((*SHOWN, "damaged", "bytes"), 0)  # when it was read the last time

    def _read(self, key: SessionKey, work: Callable[[View], T | None]) -> T | None:
        """Read this session; None if there is none, as when it has expired."""
        now_s = self.clock()

        def living(view: View) -> T | None:
            head = tables.read_head(view, key)
            return None if head is None or head.is_over(now_s) else work(view)

        return self.transactions.read(self._explaining(key, living))

    def _submit(self, key: SessionKey, work: Callable[[View], T]) -> Ticket[T]:
        """Queue a change of this session."""
        return self.transactions.submit(self._explaining(key, work))

    def _explaining(self, key: SessionKey, work: Callable[[View], T]) -> Callable[[View], T]:
        def explaining(view: View) -> T:
            try:
                return work(view)
            except SessionDamagedError as error:
                raise self.damage.explained(view, key, error) from None

        return explaining

    def commit_turn(
        self, key: SessionKey, *turns: TurnRecord, fingerprint: bytes = b"", model: str = "",
        session_number: int | None = None, lease: Lease | None = None, forgotten: Sequence[MessageEdit] = (),
        fork: Fork | None = None, **changes: Any,
    ) -> Ticket[SessionHead]:  # fmt: skip
        """Store the next turn, or several, all or none; of a new session if the id is unknown. Refused unless their
        numbers follow the last one's.

        fingerprint, model: replace the session's unless empty. session_number: the `number` of the head that the turn
        was computed for; refused if that session is gone, so that a turn cannot bring back a deleted session. lease:
        from `Leases.acquire`; refused if another server has the session by now. forgotten: see
        `kvstore.sessions.forgetting`; the KV is a pending deletion then. fork: what the new session begins with;
        refused if that has changed meanwhile. changes: see `tables.change_head`.
        """
        draft = tables.draft_head(key, self.clock(), (), fingerprint, model)
        begun, every = (None, turns) if fork is None else (fork.draft, (*fork.turns, *turns))
        payloads = [tables.encode_turn(turn, key) for turn in every]

        def append(view: View) -> SessionHead:
            if lease is not None:
                lease.check(view)
            if fork is not None:
                remains.check_fork(view, fork)
            if forgotten:
                assert session_number is not None
                return forget(view, key, session_number, forgotten, turns[0], draft)
            return tables.append(view, draft, every, payloads, session_number, begun, **changes)

        return self._submit(key, append)

    def fork(self, source: SessionKey, turn: int | None, new_key: SessionKey) -> Ticket[SessionHead]:
        """A new session with turns 1 to `turn` (None: all there are when it is carried out) of another."""
        made = partial(remains.fork, source=source, turn=turn, new_key=new_key, now_s=self.clock())
        return self._submit(source, lambda view: remains.store_fork(view, made(view)))

    def version(self, parent: Parent, key: SessionKey) -> Fork:
        """A fork of this key, for `commit_turn` to store with its next turn."""
        now_s, source, turn = self.clock(), SessionKey(key.tenant, parent.session_id), parent.turn
        made = partial(remains.fork, source=source, turn=turn, new_key=key, now_s=now_s, is_version=parent.is_version)
        return self.transactions.read(self._explaining(source, made))

    def set_ttl(self, key: SessionKey, ttl_s: float | None) -> Ticket[SessionHead]:
        """Counted from the last turn, so a session idle for longer expires at once."""
        return self._change(key, ttl_s=ttl_s)

    def label(self, key: SessionKey, title: str | None, is_personal: bool | None) -> Ticket[SessionHead]:
        """Give it a title, and say whether it is a person's; None leaves that as it is."""
        given = {"title": title, "is_personal": is_personal}
        return self._change(key, **{name: value for name, value in given.items() if value is not None})

    def _change(self, key: SessionKey, **changes: Any) -> Ticket[SessionHead]:
        return self._submit(key, partial(tables.change_head, key=key, now_s=self.clock(), **changes))

    def delete(self, key: SessionKey, if_over_s: float | None = None) -> Ticket[Tombstone | None]:
        """Delete a session. The tombstone names the blocks to forget; None if there is no such session.

        A turn that another server is computing for it will not be stored. if_over_s: delete it only if it has expired
        by this time and no turn of it runs.
        """

        def delete(view: View) -> Tombstone | None:
            if if_over_s is None:
                self.sharing.end_turns_of(view, key)
            elif self.sharing.has_turn(view, key):
                return None
            return tables.delete(view, key, if_over_s)

        return self._submit(key, delete)

    def head(self, key: SessionKey) -> SessionHead | None:
        return self._read(key, lambda view: tables.read_head(view, key))

    def exists(self, key: SessionKey) -> bool:
        return self.head(key) is not None

    def load(self, key: SessionKey, turn: int | None = None) -> SessionState | None:
        """The session at the end of `turn` (None: the last). Returns None if there is no such session or turn."""
        state = self._read(key, lambda view: tables.load(view, key, turn))
        if state is not None and self._recent is not None:
            self._recent.note_use(key)
        return state

    def turn(self, key: SessionKey, number: int) -> TurnRecord | None:
        return self._read(key, lambda view: tables.read_turn(view, key, number))

    def turns(self, key: SessionKey, after: int, limit: int) -> Sequence[TurnRecord] | None:
        """At most so many turns after turn `after`; None if there is no such session."""
        return self._read(key, lambda view: tables.read_page(view, key, after, limit))

    def turn_of_request(self, key: SessionKey, idempotency_key: str) -> TurnRecord | None:
        """The turn that answered the request of this key, if there is one; as safe as when it was stored in order."""
        turn = self._read(key, lambda view: tables.turn_of_request(view, key, idempotency_key))
        if turn is not None:
            self.confirm()
        return turn

    def confirm(self) -> None:
        """Call this before what another call has stored is acknowledged: that one may have failed for lack of replicas.
        Raises StoreError.
        """
        if self.sharing.is_shared:
            self.transactions.submit(self.sharing.confirm).wait()

    def list(
        self, tenant: str, limit: int = 100, after: str | None = None, is_personal: bool | None = None
    ) -> Sequence[SessionHead]:
        """The most recently updated first. after: the `cursor` of the last head of the page before. is_personal: only
        those that are, or are not; None: all.

        A session updated between two pages moves to the front, so it never appears twice, but may not appear at all.
        Damaged sessions are left out and counted in `stats`. Raises RequestError for a wrong cursor.
        """
        now_s = self.clock()
        heads, are_damaged = self.transactions.read(
            lambda view: tables.list_heads(view, tenant, limit, after, is_personal, now_s)
        )
        self.damage.numbers |= are_damaged
        return heads

    # -- the whole store ---------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, object]:
        """Counters and gauges."""
        with suppress(RemoteError, StoreLostError):  # then what was so a while ago is told
            self._counted = self.transactions.read(self._count)
        numbers = {"dropped": 0 if self._recent is None else self._recent.num_dropped, **self._counted}
        missing = int(self._missing is not None)
        return {**numbers, **self.transactions.stats(), "missing": missing, **self.sharing.stats()}

    def _count(self, view: View) -> dict[str, int]:
        self._note_missing(view)
        counted = {name: view.count(table) for name, table in SHOWN.items()}
        return counted | {"damaged": self.damage.count(view), "bytes": view.num_bytes()}

    def close(self) -> None:
        """Carry out what is queued, sync and close. Calling it again does nothing."""
        self.transactions.close()

    # -- deletions ---------------------------------------------------------------------------------------------------
    def expired(self, now: float, limit: int = 1000) -> Sequence[SessionKey]:
        """Sessions that have expired, the longest expired first. They stay until they are deleted."""
        return self.transactions.read(lambda view: tables.expired(view, now, limit))

    def unshared(self, number: int, block_ids: set[BlockId]) -> set[BlockId]:
        """Those of the blocks that no session but this one refers to."""
        return self.transactions.read(lambda view: tables.unshared(view, block_ids, number))

    def unshared_blocks_of(self, key: SessionKey) -> set[BlockId]:
        """The blocks that a deletion would name now: those of all turns, also from before a truncation."""
        return self.transactions.read(lambda view: tables.unshared_blocks_of(view, key))

    def pending_deletions(self) -> Sequence[Tombstone]:
        """Deletions that are not finished. Read them at the start, too: a crash may have interrupted some."""
        return self.transactions.read(self.sharing.pending)

    def finish_deletion(self, number: int) -> Ticket[None]:
        """Say that the blocks of this tombstone are gone from all tiers of this server."""
        return self.transactions.submit(lambda view: self.sharing.finish(view, number))

    def renew(self) -> None:
        """Call this now and then: see `Sharing.renew`."""
        if self.sharing.is_shared:
            self.transactions.submit(self.sharing.renew).wait()

    # -- damage ------------------------------------------------------------------------------------------------------
    def check(self) -> CheckReport:
        """Read and compare everything in one snapshot, then make the entries again that whole sessions lack."""
        self.transactions.read(self._note_missing)
        report, lacking = self.sharing.checked(self.transactions.read)
        missing = () if self._missing is None else (self._missing,)
        mended = (self._mend(lacking),) if lacking else ()
        return replace(report, problems=(*missing, *report.problems, *mended))

    def _mend(self, numbers: Sequence[int]) -> str:
        """Returns what came of it."""
        try:
            for number in numbers:
                with suppress(SessionDamagedError):  # it was deleted just now
                    self.transactions.submit(partial(mend, number=number)).wait()
        except StoreError as error:
            return f"the entries that whole sessions lack cannot be made again: {error}"
        return "the entries that whole sessions lacked are made again"

    # -- the file ----------------------------------------------------------------------------------------------------
    def compact(self) -> None:
        """See `Transactions.compact`."""
        self.transactions.compact()

    def mark(self, marker: SessionMarker) -> None:
        """Find out whether this is the file that the store had. Called once, before it is used."""

        def name_it(name: bytes) -> None:  # by the thread that writes: a compaction may be under way
            self.transactions.submit(lambda view: tables.set_file_name(view, name)).wait()

        self._marker = marker
        with suppress(StoreError, OSError):  # a full disk: the next start does it
            self._missing = marker.settle(self.transactions.read(tables.file_name), name_it)

    def _note_missing(self, view: View) -> None:
        """After a fatal error of LMDB, the file that was opened again may be a new one."""
        if self._missing is None and self._marker is not None and tables.file_name(view) is None:
            with suppress(OSError):
                self._missing = self._marker.begun_anew()

    def accept_loss(self) -> bool:
        """Give up the sessions that are missing; False when none are. Raises StoreError."""
        if self._missing is None or self._marker is None:
            return self.sharing.accept_loss()
        try:
            self._marker.remove()
        except OSError as error:
            raise StoreError(f"the marker of the sessions cannot be removed: {error.strerror or error}") from None
        self._missing = None
        self.mark(self._marker)
        return True


def open_sessions(directory: StoreDirectory | None) -> SessionStore:
    """The sessions of an owned store; without one, in memory."""
    if directory is None:
        return SessionStore(None)
    path = directory.path / "sessions"
    sessions = SessionStore(lambda: open_environment(path, MAP_BYTES, max_dbs=16, metasync=True, on_loss=ON_LOSS))
    sessions.mark(SessionMarker(directory.path))
    return sessions
