"""Looks after a store of sessions: expiry, unfinished deletions, damage, lost files, and counts.

Says which blocks a deletion leaves behind; whoever owns the KV deletes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvstore.blocks.ids import BlockId
from kvstore.errors import RemoteError, SessionDamagedError, StoreError, StoreLostError
from kvstore.sessions import tables
from kvstore.sessions.check import CheckReport, mend
from kvstore.sessions.marker import SessionMarker
from kvstore.sessions.record import SessionKey, Tombstone
from kvstore.sessions.remains import Damage
from kvstore.sessions.storage import Ticket, Transactions
from kvstore.sessions.tables import View

SHOWN = {  # among the counts, by table
    "sessions": tables.HEADS, "turns": tables.TURNS, "refs": tables.REFS, "pending_deletions": tables.TOMBSTONES,
}  # fmt: skip


class SessionUpkeep:
    """Administration of a store of sessions, beside its turns. Any thread may call it; see `SessionStore`."""

    def __init__(self, transactions: Transactions, damage: Damage) -> None:
        self._transactions, self._damage = transactions, damage
        self._sharing = transactions.storage.sharing
        self._marker: SessionMarker | None = None
        self._missing: str | None = None  # what the store held before
        self._counted = dict.fromkeys((*SHOWN, "damaged", "bytes"), 0)  # when it was read the last time

    # -- deletions ---------------------------------------------------------------------------------------------------
    def expired(self, now: float, limit: int = 1000) -> Sequence[SessionKey]:
        """Sessions that have expired, the longest expired first. They stay until they are deleted."""
        return self._transactions.read(lambda view: tables.expired(view, now, limit))

    def unshared_blocks_of(self, key: SessionKey) -> set[BlockId]:
        """The blocks that a deletion would name now: those of all turns, also from before a truncation."""
        return self._transactions.read(lambda view: tables.unshared_blocks_of(view, key))

    def pending_deletions(self) -> Sequence[Tombstone]:
        """Deletions that are not finished. Read them at the start, too: a crash may have interrupted some."""
        return self._transactions.read(self._sharing.pending)

    def finish_deletion(self, number: int) -> Ticket[None]:
        """Say that the blocks of this tombstone are gone from all tiers of this server."""
        return self._transactions.submit(lambda view: self._sharing.finish(view, number))

    def renew(self) -> None:
        """Call this now and then: see `Sharing.renew`."""
        if self._sharing.is_shared:
            self._transactions.submit(self._sharing.renew).wait()

    # -- damage ------------------------------------------------------------------------------------------------------
    def check(self) -> CheckReport:
        """Read and compare everything in one snapshot, then make the entries again that whole sessions lack."""
        self._transactions.read(self._note_missing)
        report, lacking = self._sharing.checked(self._transactions.read)
        missing = () if self._missing is None else (self._missing,)
        mended = (self._mend(lacking),) if lacking else ()
        return replace(report, problems=(*missing, *report.problems, *mended))

    def _mend(self, numbers: Sequence[int]) -> str:
        """Returns what came of it."""
        try:
            for number in numbers:
                with suppress(SessionDamagedError):  # it was deleted just now
                    self._transactions.submit(partial(mend, number=number)).wait()
        except StoreError as error:
            return f"the entries that whole sessions lack cannot be made again: {error}"
        return "the entries that whole sessions lacked are made again"

    # -- the file ----------------------------------------------------------------------------------------------------
    def compact(self) -> None:
        """Rewrite the file without what was deleted. Returns when it is done; needs the file's size in free space."""
        self._transactions.compact()

    def mark(self, marker: SessionMarker) -> None:
        """Find out whether this is the file that the store had. Called once, before it is used."""

        def name_it(name: bytes) -> None:  # by the thread that writes: a compaction may be under way
            self._transactions.submit(lambda view: tables.set_file_name(view, name)).wait()

        self._marker = marker
        with suppress(StoreError, OSError):  # a full disk: the next start does it
            self._missing = marker.settle(self._transactions.read(tables.file_name), name_it)

    def _note_missing(self, view: View) -> None:
        """After a fatal error of LMDB, the file that was opened again may be a new one."""
        if self._missing is None and self._marker is not None and tables.file_name(view) is None:
            with suppress(OSError):
                self._missing = self._marker.begun_anew()

    def accept_loss(self) -> bool:
        """Give up the sessions that are missing; False when none are. Raises StoreError."""
        if self._missing is None or self._marker is None:
            return self._sharing.accept_loss()
        try:
            self._marker.remove()
        except OSError as error:
            raise StoreError(f"the marker of the sessions cannot be removed: {error.strerror or error}") from None
        self._missing = None
        self.mark(self._marker)
        return True

    # -- numbers -----------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, object]:
        transactions = self._transactions
        with suppress(RemoteError, StoreLostError):  # then what was so a while ago is told
            self._counted = transactions.read(self._count)
        missing = int(self._missing is not None)
        return {**self._counted, **transactions.stats(), "missing": missing, **self._sharing.stats()}

    def _count(self, view: View) -> dict[str, int]:
        self._note_missing(view)
        counted = {name: view.count(table) for name, table in SHOWN.items()}
        return counted | {"damaged": self._damage.count(view), "bytes": view.num_bytes()}
