"""How servers share a store of sessions: which one may write to a session, and which have yet to carry out a
deletion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.sessions import tables
from kvstore.sessions.check import Checked, check
from kvstore.sessions.record import SessionKey, Tombstone
from kvstore.sessions.tables import View

if TYPE_CHECKING:
    from kvstore.sessions.shared.leases import Leases

Read = Callable[[Callable[[View], Any]], Any]  # runs something in a view


class Sharing:
    """The store is this server's own, unless a subclass says otherwise. Any thread may call it. A method with a view
    belongs to that view's transaction.

    is_shared: there may be other servers. leases: None if no other server could write. now: seconds since the epoch.
    """

    is_shared = False
    leases: Leases | None = None
    now: Callable[[], float] = time.time

    def has_turn(self, view: Any, key: SessionKey) -> bool:
        """Whether any server is computing a turn of this session."""
        return False

    def end_turns_of(self, view: Any, key: SessionKey) -> None:
        """Called when the session is deleted: a turn that a server is computing for it will not be stored."""

    def pending(self, view: Any) -> list[Tombstone]:
        """Deletions that this server has yet to carry out."""
        return tables.pending_deletions(view)

    def finish(self, view: Any, number: int) -> None:
        """Called when this server has carried out the deletion of this number."""
        view.delete(tables.TOMBSTONES, tables.be64(number))

    def confirm(self, view: Any) -> None:
        """Let this transaction end only when all that was stored before is as safe as itself."""

    def has_missed_deletions(self) -> bool:
        """Whether this server was away for so long that deletions were no longer kept for it; all its KV must go
        then.
        """
        return False

    def renew(self, view: Any) -> None:
        """Say that this server is running, so that deletions are kept for it."""

    def checked(self, read: Read) -> Checked:
        found: Checked = read(check)
        return found

    def accept_loss(self) -> bool:
        """Give up the sessions that are missing; False if none are."""
        return False

    def stats(self) -> dict[str, int]:
        return {}
