"""Which server writes to which session: each running turn has a key in Redis that expires, and a thread that renews it.

The key's value is a fencing token of that one turn, which is compared again by the commit that stores the turn.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvstore.errors import RemoteError, SessionBusyError, SessionTakenError
from kvstore.forks import leave_to_parent
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared.server import RefusedError, SessionServer

LEASE_S = 10.0  # how long a session stays busy after its server was killed
RETRY_S = 0.5  # between tries to renew a lease, or to give it back, while Redis cannot be told
# KEYS: the lease. ARGV: the token, how those of this server and those of this process begin, milliseconds. A process
# that has ended holds nothing: what it left is taken over by the one that owns its store now. -1: it is ours.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  local is_ours = string.sub(held, 1, #ARGV[2]) == ARGV[2]
  if not is_ours or string.sub(held, 1, #ARGV[3]) == ARGV[3] then return redis.call('PTTL', KEYS[1]) end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[4])
return -1
"""
RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to store the next turn of a session, until it ends."""

    key: SessionKey
    token: bytes

    def check(self, view: Any) -> None:
        """In the transaction that stores the turn. Raises SessionTakenError where another server has the session."""
        if view.lease_of(self.key) != self.token:
            raise SessionTakenError(
                f"session {self.key.session_id} was given up for another server while this one did not answer for "
                "longer than its lease: the turn is not stored"
            )


class Leases:
    """The leases that this process holds. member: the server's name, which stays over restarts. Any thread may call
    it.
    """

    def __init__(self, server: SessionServer, member: str, lease_s: float = LEASE_S) -> None:
        self._server, self._name = server, server.names.lease
        self._lease_ms = int(lease_s * 1000)
        self._member = f"{member}:"
        self._process = f"{member}:{secrets.token_hex(8)}:"
        self._numbers = count(1)
        self._held: dict[bytes, Lease] = {}  # by token
        self._ended: dict[Lease, float] = {}  # not given back yet, and when each has expired
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep, name="kvstore-leases", daemon=True)
        self._thread.start()
        leave_to_parent(self, "the session store")

    @property
    def num_held(self) -> int:
        return len(self._held)

    def acquire(self, key: SessionKey) -> Lease:
        """Raises SessionBusyError while another turn holds it, here or elsewhere, and RemoteError."""
        lease = Lease(key, f"{self._process}{next(self._numbers)}".encode())
        try:
            (left_ms,) = self._server.ask(
                (
                    "EVAL",
                    ACQUIRE,
                    1,
                    self._server.names.lease(key),
                    lease.token,
                    self._member,
                    self._process,
                    self._lease_ms,
                )
            )
        except RefusedError:
            raise
        except RemoteError:
            self._give_back_later(lease)  # Redis may have got it, and answered too late
            raise
        if left_ms != -1:
            assert isinstance(left_ms, int)
            busy = f"session {key.session_id} is busy with another turn, on this server or on another one"
            raise SessionBusyError(busy, param="session_id", retry_after_s=left_ms / 1000)
        with self._changed:
            self._held[lease.token] = lease
            self._changed.notify_all()
        return lease

    def release(self, lease: Lease) -> None:
        """Give the lease back. If Redis cannot be told, it is told later, unless the lease has expired by then."""
        with self._changed:
            self._held.pop(lease.token, None)
        try:
            self._give_back([lease])
        except RemoteError:
            self._give_back_later(lease)

    def _give_back_later(self, lease: Lease) -> None:
        with self._changed:
            self._ended[lease] = time.monotonic() + self._lease_ms / 1000
            self._changed.notify_all()

    def _give_back(self, leases: Sequence[Lease]) -> None:
        self._server.ask(*(("EVAL", RELEASE, 1, self._name(one.key), one.token) for one in leases))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _keep(self) -> None:
        pause_s = round_s = self._lease_ms / 3000
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._ended or self._is_closed)
            if self._wait(pause_s):
                return
            pause_s = min(RETRY_S, round_s)
            held = list(self._held.values())
            commands = [("EVAL", RENEW, 1, self._name(one.key), one.token, self._lease_ms) for one in held]
            with suppress(RemoteError):  # the next round tries again; the commit finds out
                if commands:
                    self._server.ask(*commands)
                pause_s = round_s
                self._give_back_ended()

    def _give_back_ended(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            self._ended = {one: until_s for one, until_s in self._ended.items() if until_s > now_s}
            ended = list(self._ended)
        if ended:
            self._give_back(ended)
            with self._changed:
                for one in ended:
                    del self._ended[one]

    def _wait(self, seconds: float) -> bool:
        """Whether it was closed meanwhile. Shorter while something is to be given back."""
        until_s = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or self._ended, seconds):
                return False
            self._changed.wait_for(lambda: self._is_closed, min(RETRY_S, max(0.0, until_s - time.monotonic())))
            return self._is_closed
