"""The servers that share sessions, as one of them sees the others, and which deletions each has yet to carry out.

A server is a member from before it holds KV of any session. A deletion stays until all members have carried it out.
"""

from __future__ import annotations

from contextlib import suppress

from kvstore.errors import RemoteError
from kvstore.sessions import tables
from kvstore.sessions.check import Checked, check_apart
from kvstore.sessions.record import SessionKey, Tombstone
from kvstore.sessions.shared.leases import LEASE_S, Leases
from kvstore.sessions.shared.server import RefusedError
from kvstore.sessions.shared.storage import IN_MEMORY, SharedTables
from kvstore.sessions.shared.view import SharedView
from kvstore.sessions.sharing import Read, Sharing
from kvstore.sessions.tables import COUNTERS, TOMBSTONES, be64

CONFIRMED = b"confirmed"  # a key of COUNTERS
AWAY_S = 7 * 24 * 3600.0  # after which a member is not waited for any more
AWAY_IN_MEMORY_S = 600.0  # and one without a store, which is a new member when it starts again
MAX_DELETIONS = 10_000  # looked at together


class Fleet(Sharing):
    """Of the server whose tables these are. One thread calls `renew` and `finish`.

    In Redis, a hash has for each member the last deletion that it has carried out, and when it was seen.
    """

    is_shared = True

    def __init__(self, storage: SharedTables, lease_s: float = LEASE_S) -> None:
        self._storage, self._server, self._member = storage, storage.server, storage.identity.member
        self._members = storage.server.names.members
        self.leases: Leases = Leases(storage.server, self._member, lease_s)
        self._carried = 0  # all deletions up to this number
        self._done: set[int] = set()  # beyond it
        self.now = storage.server.now
        storage.sharing, storage.on_close = self, self._leave_fleet

    def has_turn(self, view: SharedView, key: SessionKey) -> bool:
        return view.lease_of(key) is not None

    def end_turns_of(self, view: SharedView, key: SessionKey) -> None:
        view.end_lease(key)

    def confirm(self, view: SharedView) -> None:
        if self._server.num_awaited:  # what is written now is on a replica behind all that was before
            view.put(COUNTERS, CONFIRMED, b"")

    def checked(self, read: Read) -> Checked:
        return check_apart(read, self._storage.version)

    def accept_loss(self) -> bool:
        return self._storage.accept_loss()

    def stats(self) -> dict[str, int]:
        """servers: that share, 0 where Redis does not say."""
        try:
            (num_servers,) = self._server.ask(("HLEN", self._members))
        except RemoteError:
            num_servers = 0
        return {
            "servers": num_servers if isinstance(num_servers, int) else 0, "leases": self.leases.num_held,
            "conflicts": self._storage.num_conflicts, "failures": self._server.num_failures,
            "unreachable": int(self._server.is_failing),
        }  # fmt: skip

    # -- deletions ---------------------------------------------------------------------------------------------------
    def has_missed_deletions(self) -> bool:
        """Whether it was a member and no longer is one, so that deletions were not kept for it. Raises RemoteError."""
        (record,) = self._server.ask(("HGET", self._members, self._member))
        return record is None and self._storage.identity.was_member

    def renew(self, view: SharedView) -> None:
        """Say that this server is running. If it was no member, it becomes one, for deletions from now on."""
        (record,) = self._server.ask(("HGET", self._members, self._member))
        if record is None:
            self._carried = tables.last_number(view, tables.DELETION)
        else:
            self._carried = max(self._carried, _record_of(record)[0])
        self._storage.identity.was_member = True
        self._say()

    def pending(self, view: SharedView) -> list[Tombstone]:
        return [one for one in tables.pending_deletions(view, self._carried) if one.number not in self._done]

    def finish(self, view: SharedView, number: int) -> None:
        """Note a deletion as carried out here; one that all members have carried out is removed."""
        self._done.add(number)
        (places,) = view.keys_below(TOMBSTONES, [b""], MAX_DELETIONS)
        numbers = [int.from_bytes(place, "big") for place in places]
        for one in numbers:
            if one > self._carried and one not in self._done:
                break
            self._carried = max(self._carried, one)
        self._done = {one for one in self._done if one > self._carried}
        self._say()
        least = self._least_carried()
        for one in numbers:
            if one <= least:
                view.delete(TOMBSTONES, be64(one))

    def _leave_fleet(self) -> None:
        self.leases.close()
        if self._storage.identity.path is None:
            with suppress(RemoteError):
                self._server.ask(("HDEL", self._members, self._member))

    def _say(self) -> None:
        """Where Redis is out of memory it is said later: what makes room must go on."""
        with suppress(RefusedError):
            self._server.ask(("HSET", self._members, self._member, f"{self._carried} {self._server.now():.0f}"))

    def _least_carried(self) -> int:
        """The last deletion that all members have carried out. Removes members that were away for too long."""
        (reply,) = self._server.ask(("HGETALL", self._members))
        flat = reply if isinstance(reply, list) else []
        records = {member: _record_of(record) for member, record in zip(flat[::2], flat[1::2], strict=True)}
        gone = [member for member, (_, seen_s) in records.items() if seen_s < self._server.now() - _away_s(member)]
        if gone:
            self._server.ask(("HDEL", self._members, *gone))  # type: ignore[arg-type]
        return min((carried for member, (carried, _) in records.items() if member not in gone), default=0)


def _away_s(member: object) -> float:
    return AWAY_IN_MEMORY_S if isinstance(member, bytes) and member.startswith(IN_MEMORY.encode()) else AWAY_S


def _record_of(value: object) -> tuple[int, float]:
    carried, seen_s = (value if isinstance(value, bytes) else b"0 0").split()
    return int(carried), float(seen_s)
