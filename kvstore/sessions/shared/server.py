"""A Redis that keeps sessions: connections to it, the settings it must have, and how long to wait during an outage.

Knows no table and no session. Nothing here waits longer than its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from kvstore.config import SESSION_DURABILITIES
from kvstore.errors import RemoteError
from kvstore.forks import leave_to_parent
from kvstore.sessions.shared.address import SessionAddress
from kvstore.sessions.shared.connection import Arg, RefusedReply, Reply, SessionConnection
from kvstore.sessions.shared.names import Names

ANSWER_S = 3.0  # that one pipeline may take
OUTAGE_S = 5.0  # that a commit waits for a Redis which has gone away: a restart takes less
RETRY_S = 0.1
PAUSE_S = 0.5  # after no answer in time, in which nobody else waits for one
LOGGER = logging.getLogger("kvstore.store")
PERSISTENCE: dict[str, dict[str, tuple[str, ...]]] = {  # what is asked for: the settings that will do
    "always": {"appendonly": ("yes",), "appendfsync": ("always",), "no-appendfsync-on-rewrite": ("no",)},
    "everysec": {"appendonly": ("yes",), "appendfsync": ("always", "everysec"), "no-appendfsync-on-rewrite": ("no",)},
    "unchecked": {},
}
assert tuple(PERSISTENCE) == SESSION_DURABILITIES
PASSING = {"LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN"}  # codes of errors that end by themselves
MOVED = {"READONLY", "MOVED", "ASK", "CLUSTERDOWN"}  # and of those that end where another Redis is asked
Command = Sequence[Arg]


class RefusedError(RemoteError):
    """Redis answered that it has not done what was asked; because it is out of memory, for example."""


class UnfitError(RefusedError):
    """It is set up in a way in which it cannot keep these sessions. Asking again changes nothing."""


@dataclass(frozen=True, slots=True)
class Durability:
    """When a turn counts as stored. level: of `PERSISTENCE`. num_replicas: of Redis, that must have it, too; None: one,
    where there is one and it may take over by itself.
    """

    level: str = "always"
    num_replicas: int | None = None


class SessionServer:
    """Any thread may ask; each call has a connection of its own. Every failure is a RemoteError, and is counted."""

    def __init__(self, address: SessionAddress, durability: Durability) -> None:
        self.address, self.durability, self.names = address, durability, Names.of(address.is_cluster)
        self.num_failures = 0
        self._num_replicas: int | None = None  # that were connected when this was last said
        self._began_s: float | None = None  # its clock when our monotonic one was 0
        self._lock = threading.Lock()
        self._idle: list[SessionConnection] = []
        self._quiet_until_s = 0.0  # monotonic
        self._failing_since_s: float | None = None
        self._has_answered = False  # before that, whoever opens it is told what fails
        self._said = ""
        self._is_closed = False
        leave_to_parent(self, str(address))

    @property
    def is_failing(self) -> bool:
        """Whether the last call failed."""
        return self._failing_since_s is not None

    def ask(self, *commands: Command) -> list[Reply]:
        """The answer to each, none of them an error. Raises RemoteError: RefusedError where one of the answers is an
        error, else what was done is not known.
        """
        with self._lock:
            if self._is_closed:
                raise RemoteError(f"{self.address}: the session store is closed")
            if time.monotonic() < self._quiet_until_s:
                raise RemoteError(f"{self.address} did not answer a moment ago")
            client = self._idle.pop() if self._idle else SessionConnection(self.address, self.names.prefix)
        try:
            if not client.is_connected:
                self._connect(client)
            replies = client.pipeline(commands, timeout_s=ANSWER_S)
            self._refuse_errors(client, replies)
        except RemoteError as error:
            self._note_failure(error)
            raise
        finally:
            self._give_back(client)
        self._note_answer()
        return replies

    def now(self) -> float:
        """Seconds since the epoch by the clock of Redis, as it was when it was connected, so that nobody who sets our
        clock ends sessions; by our clock where Redis tells no time.
        """
        return time.time() if self._began_s is None else time.monotonic() + self._began_s

    def await_back(self) -> None:
        """Wait until it answers again. Raises RemoteError if it does not within OUTAGE_S."""
        while True:
            try:
                self.ask(("PING",))
                return
            except RemoteError:
                since_s = self._failing_since_s
                if self._is_closed or since_s is None or time.monotonic() - since_s > OUTAGE_S:
                    raise
            time.sleep(RETRY_S)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()

    # -- connections -------------------------------------------------------------------------------------------------
    def _give_back(self, client: SessionConnection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(client)
                return
        client.close()

    def _connect(self, client: SessionConnection) -> None:
        """A connection to a Redis that is fit for sessions. Raises RemoteError: UnfitError where it is not."""
        asked = [("CONFIG", "GET", name) for name in PERSISTENCE[self.durability.level]]
        about, *settings = client.pipeline([("INFO",), *asked], timeout_s=ANSWER_S)
        wrong = self._why_not(about, settings)
        if wrong is not None:
            client.close()
            if facts_of(about).get("role") != "slave":
                raise UnfitError(wrong)
            raise (RemoteError if self.address.follows else RefusedError)(wrong)  # until a failover has ended
        self.note_replicas(about)
        if told_us := facts_of(about).get("server_time_usec"):
            self._began_s = int(told_us) / 1e6 - time.monotonic()

    def _why_not(self, about: Reply, settings: Sequence[Reply]) -> str | None:
        """Why this Redis is unfit for sessions, and the remedy; None if it is fit."""
        facts = facts_of(about)
        if facts.get("role", "master") != "master":
            return f"{self.address} is a replica; give the address of its primary"
        if facts.get("cluster_enabled") == "1" and not self.address.is_cluster:
            return f"{self.address} is part of a Redis Cluster; give redis+cluster:// with some of its hosts"
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            return (
                f"{self.address} has maxmemory-policy {policy}, which would drop sessions when memory is short; "
                "`CONFIG SET maxmemory-policy noeviction` and the same in its file, or give a Redis of its own"
            )
        for (name, accepted), reply in zip(PERSISTENCE[self.durability.level].items(), settings, strict=True):
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], bytes):
                said = f": {reply}" if isinstance(reply, RefusedReply) else ""
                return (
                    f"{self.address} does not tell its {name}{said}; allow CONFIG GET to this user, or "
                    "--session-durability unchecked where you have made sure of it"
                )
            found = reply[1].decode(errors="replace")
            if found not in accepted:
                return (
                    f"{self.address} has {name} {found}, so an acknowledged turn could be lost; "
                    f"`CONFIG SET {name} {accepted[0]}` and the same in its file, or a weaker --session-durability"
                )
        return None

    def _refuse_errors(self, client: SessionConnection, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, RefusedReply):
                if reply.code in MOVED:
                    client.close()
                kind = RemoteError if reply.code in PASSING | MOVED else RefusedError
                raise kind(f"{self.address} refused: {reply}")

    # -- replicas ----------------------------------------------------------------------------------------------------
    @property
    def num_awaited(self) -> int:
        """How many replicas must have what is committed."""
        if self.durability.num_replicas is not None:
            return self.durability.num_replicas
        return min(1, self._num_replicas or 0) if self.address.follows else 0

    @property
    def counts_replicas(self) -> bool:
        """Whether `note_replicas` is to be told of them at each commit, since it depends on them how many must have
        it.
        """
        return self.durability.num_replicas is None and self.address.follows and self._num_replicas is not None

    def note_replicas(self, info: Reply) -> None:
        """From INFO's answer: how many there are that have all but what was written just now."""
        facts = facts_of(info)
        lines = [value for name, value in facts.items() if name.startswith("slave") and "state=online" in value]
        self._num_replicas = len(lines) if "connected_slaves" in facts else None

    # -- outages -----------------------------------------------------------------------------------------------------
    def _note_failure(self, error: RemoteError) -> None:
        with self._lock:
            self.num_failures += 1
            now = time.monotonic()
            if self._failing_since_s is None and not isinstance(error, RefusedError):
                self._failing_since_s = now
            if isinstance(error.__cause__, TimeoutError | redis.TimeoutError):
                self._quiet_until_s = now + PAUSE_S
            is_new, self._said = str(error) != self._said, str(error)
        if is_new and self._has_answered:
            LOGGER.error("sessions: %s", error)

    def _note_answer(self) -> None:
        with self._lock:
            was_failing, self._failing_since_s = self._failing_since_s is not None, None
            self._quiet_until_s, self._has_answered = 0.0, True
            if was_failing:
                self._said = ""
        if was_failing:
            LOGGER.warning("sessions: %s answers again", self.address)


def facts_of(info: Reply) -> dict[str, str]:
    """Of INFO's answer; empty where there is none."""
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return dict(line.partition(":")[::2] for line in lines if ":" in line)
