"""The servers that share sessions, as one of them sees the others."""

from __future__ import annotations

from kvstore.errors import RemoteError
from kvstore.sessions.check import Checked, check_apart
from kvstore.sessions.record import SessionKey, Tombstone
from kvstore.sessions.shared.leases import LEASE_S, Leases
from kvstore.sessions.shared.membership import Membership
from kvstore.sessions.shared.storage import SharedTables
from kvstore.sessions.shared.view import SharedView
from kvstore.sessions.sharing import Read, Sharing
from kvstore.sessions.tables import COUNTERS

CONFIRMED = b"confirmed"  # a key of COUNTERS


class Fleet(Sharing):
    """Of the server whose tables these are."""

    is_shared = True

    def __init__(self, storage: SharedTables, lease_s: float = LEASE_S) -> None:
        self._storage = storage
        self._server = storage.server
        self.leases = Leases(storage.server, storage.identity.member, lease_s)
        self._membership = Membership(storage.server, storage.identity)
        storage.sharing, storage.on_close = self, self.leases.close

    def has_turn(self, view: SharedView, key: SessionKey) -> bool:
        return view.lease_of(key) is not None

    def end_turns_of(self, view: SharedView, key: SessionKey) -> None:
        view.end_lease(key)

    def pending(self, view: SharedView) -> list[Tombstone]:
        return self._membership.pending(view)

    def finish(self, view: SharedView, number: int) -> None:
        self._membership.finish(view, number)

    def confirm(self, view: SharedView) -> None:
        if self._server.num_awaited:  # what is written now is on a replica behind all that was before
            view.put(COUNTERS, CONFIRMED, b"")

    def has_missed_deletions(self) -> bool:
        return self._membership.has_missed_deletions()

    def renew(self, view: SharedView) -> None:
        self._membership.renew(view)

    def checked(self, read: Read) -> Checked:
        return check_apart(read, self._storage.version)

    def accept_loss(self) -> bool:
        return self._storage.accept_loss()

    def stats(self) -> dict[str, int]:
        """servers: that share, 0 where Redis does not say."""
        try:
            num_servers = self._membership.num_members()
        except RemoteError:
            num_servers = 0
        return {
            "servers": num_servers, "leases": self.leases.num_held, "conflicts": self._storage.num_conflicts,
            "failures": self._server.num_failures, "unreachable": int(self._server.is_failing),
        }  # fmt: skip
