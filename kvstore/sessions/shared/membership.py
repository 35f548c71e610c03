"""Which servers share the sessions, and which deletions each of them has yet to carry out.

A server is a member from before it holds KV of any session. A deletion stays until all members have carried it out.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.disk import check as disk_check
from kvstore.sessions import tables
from kvstore.sessions.record import Tombstone
from kvstore.sessions.shared.server import SessionServer
from kvstore.sessions.shared.view import SharedView
from kvstore.sessions.tables import TOMBSTONES, be64

FILE_NAME = "shared-sessions.id"
AWAY_S = 7 * 24 * 3600.0  # after which a member is not waited for any more
MAX_DELETIONS = 10_000  # looked at together
NAME_BYTES, MEMBER_BYTES = 16, 8


@dataclass(slots=True)
class MemberIdentity:
    """What a server's own store remembers of the sessions that it shares: their name, and its own.

    path: None without a store; the server is then a new member each time, as its KV does not outlive it. name: of the
    sessions; None if it has shared none yet.
    """

    path: Path | None
    name: bytes | None
    member: str

    @classmethod
    def of(cls, store: Path | None) -> MemberIdentity:
        path = None if store is None else store / FILE_NAME
        try:
            name, member = ("", "") if path is None else path.read_text().split()
            if len(name) == 2 * NAME_BYTES and len(member) == 2 * MEMBER_BYTES:
                return cls(path, bytes.fromhex(name), member)
        except (FileNotFoundError, ValueError):
            pass
        return cls(path, None, secrets.token_hex(MEMBER_BYTES))

    def keep(self, name: bytes) -> None:
        """Raises OSError."""
        self.name = name
        if self.path is not None:
            disk_check.write_durably(self.path, f"{name.hex()} {self.member}\n".encode())


class Membership:
    """One server's membership. One thread calls `renew` and `finish`.

    In Redis, a hash has for each member the last deletion that it has carried out, and when it was seen.
    """

    def __init__(self, server: SessionServer, identity: MemberIdentity) -> None:
        self._server, self._members = server, server.names.members
        self._member = identity.member
        self._was_member = identity.name is not None
        self._carried = 0  # all deletions up to this number
        self._done: set[int] = set()  # beyond it

    def has_missed_deletions(self) -> bool:
        """Whether it was a member and no longer is one, so that deletions were not kept for it. Raises RemoteError."""
        (record,) = self._server.ask(("HGET", self._members, self._member))
        return record is None and self._was_member

    def renew(self, view: SharedView) -> None:
        """Say that this server is running. If it was no member, it becomes one, for deletions from now on."""
        (record,) = self._server.ask(("HGET", self._members, self._member))
        if record is None:
            self._carried = tables.last_number(view, tables.DELETION)
        else:
            self._carried = max(self._carried, _record_of(record)[0])
        self._was_member = True
        self._say()

    def pending(self, view: SharedView) -> list[Tombstone]:
        return [
            one for one in tables.pending_deletions(view) if one.number > self._carried and one.number not in self._done
        ]

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

    def num_members(self) -> int:
        (count,) = self._server.ask(("HLEN", self._members))
        return count if isinstance(count, int) else 0

    def _say(self) -> None:
        self._server.ask(("HSET", self._members, self._member, f"{self._carried} {time.time():.0f}"))

    def _least_carried(self) -> int:
        """The last deletion that all members have carried out. Removes members that were away for too long."""
        (reply,) = self._server.ask(("HGETALL", self._members))
        flat = reply if isinstance(reply, list) else []
        records = {member: _record_of(record) for member, record in zip(flat[::2], flat[1::2], strict=True)}
        gone = [member for member, (_, seen_s) in records.items() if seen_s < time.time() - AWAY_S]
        if gone:
            self._server.ask(("HDEL", self._members, *gone))  # type: ignore[arg-type]
        return min(carried for member, (carried, _) in records.items() if member not in gone)


def _record_of(value: object) -> tuple[int, float]:
    carried, seen_s = (value if isinstance(value, bytes) else b"0 0").split()
    return int(carried), float(seen_s)
