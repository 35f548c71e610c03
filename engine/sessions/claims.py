"""Which turn runs on which session: one at a time, in this process and on all servers that share the sessions.

Knows neither prompts nor answers. Any thread may call it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from kvstore.engine.sessions.one_turn import OneTurn
from kvstore.errors import SessionBusyError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.sharing import Claim, Sharing


class Owner(Protocol):
    """Who computes an answer in an event loop. is_abandoned: nobody reads it any more."""

    is_abandoned: bool

    async def stop(self) -> None:
        """End the answer now, and keep what was said."""


class Hold:
    """One turn's hold on its session, from `Claims.hold` to `Claims.release`.

    request_key: its Idempotency-Key. owner: None for a caller that blocks. turn: set once it has begun. lease: the
    right to store it; None where no other server could write. released: completed when the session is free again.
    """

    def __init__(self, key: SessionKey, request_key: str | None, owner: Owner | None) -> None:
        self.key, self.request_key, self.owner = key, request_key, owner
        self.turn: OneTurn | None = None
        self.lease: Claim | None = None
        self.released: Future[None] = Future()
        self.released.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it for the others

    def is_worth_waiting(self, request_key: str | None) -> bool:
        """Whether another turn waits for this one's end: it has no reader any more, or it answers the same request."""
        is_same = request_key is not None and request_key == self.request_key
        return is_same or (self.owner is not None and self.owner.is_abandoned)


class Claims:
    """All sessions that are held in this process."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._holds: dict[SessionKey, Hold] = {}
        self._lock = threading.Lock()

    def on(self, key: SessionKey) -> Hold | None:
        return self._holds.get(key)

    def hold(self, key: SessionKey, request_key: str | None = None, owner: Owner | None = None) -> Hold:
        """Hold the session until `release`; never waits. Raises SessionBusyError while another turn holds it here."""
        hold = Hold(key, request_key, owner)
        with self._lock:
            if key in self._holds:
                raise SessionBusyError(f"session {key.session_id} is busy with another turn", param="session_id")
            self._holds[key] = hold
        return hold

    def drop(self, hold: Hold) -> None:
        """Its session was deleted: another turn may have the id from now on."""
        with self._lock:
            if self._holds.get(hold.key) is hold:
                del self._holds[hold.key]

    def release(self, hold: Hold) -> None:
        self.drop(hold)
        hold.released.set_result(None)

    def lease(self, hold: Hold) -> None:
        """Raises SessionBusyError while a turn of the session runs on another server, and RemoteError."""
        hold.lease = self._sharing.begin_turn(hold.key)

    def give_back(self, hold: Hold) -> None:
        """The lease; the hold stays."""
        lease, hold.lease = hold.lease, None
        self._sharing.end_turn(lease)
