"""One connection to the Redis that has the sessions, by redis-py: found by Sentinel or by a Cluster's slots, and found
again after it was lost.

For one thread at a time. Knows no session. Never retries.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from kvstore.errors import RemoteError
from kvstore.forks import leave_to_parent
from kvstore.remote.address import PASSWORD_VARIABLE, RedisAddress
from kvstore.sessions.shared.address import SessionAddress

CONNECT_S = 2.0
FIND_SHARE = 0.5  # of the time for a call, in which the servers that know the primary are asked one after the other
Arg: TypeAlias = "bytes | str | int"
Reply: TypeAlias = "int | bytes | RefusedReply | list[Reply] | None"


class RefusedReply(str):
    """Redis' error for one command of a pipeline, with its code; the other commands have their own answers."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word: OOM, READONLY, MOVED, ..."""
        return self.partition(" ")[0]


class SessionConnection:
    """key: of which a Cluster's node must be the primary. Raises RemoteError if no primary is found, it cannot be
    reached, refuses user, password or database, or does not answer in time. It is then unknown how much of the call was
    done.
    """

    def __init__(self, address: SessionAddress, key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: redis.Connection | None = None
        leave_to_parent(self, str(address), _connection=None)

    def let_go(self) -> None:
        """In a forked child: drop the parent's connection without sending anything, not even the end of TLS."""
        self.close()  # which only closes the descriptor there

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection with nothing to read: unasked bytes are its end, or garbage."""
        try:
            return self._connection is not None and self._connection.is_connected and not self._connection.can_read(0)
        except RedisError:
            return False

    def pipeline(self, commands: Sequence[Sequence[Arg]], timeout_s: float) -> list[Reply]:
        """Send all commands, then return the answer of each in order. Errors in answers raise nothing."""
        until_s, is_whole = time.monotonic() + timeout_s, False
        try:
            if not self.is_connected:
                self._connect(timeout_s)
            connection = self._connection
            assert connection is not None
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies = [_answer(connection, until_s) for _ in commands]
            is_whole = True
        except (RedisError, OSError) as error:
            raise RemoteError(f"{self._address}: {_words(error)}") from error
        finally:
            if not is_whole:  # unread answers would be taken for those to the next commands
                self.close()
        return replies

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    # -- the primary -------------------------------------------------------------------------------------------------
    def _connect(self, timeout_s: float) -> None:
        self.close()
        until_s = time.monotonic() + timeout_s
        at = self._address.servers[0]
        host, port = self._primary(timeout_s * FIND_SHARE) if self._address.follows else (at.host, at.port)
        left_s = max(until_s - time.monotonic(), 0.001)
        kind = redis.SSLConnection if at.tls else redis.Connection
        # socket_timeout stays with the connection, so it is that of a whole call.
        options = {**_signing_in(at), "db": at.database, "socket_connect_timeout": min(CONNECT_S, left_s)}
        self._connection = kind(
            host=host, port=port, protocol=2, socket_timeout=timeout_s, socket_keepalive=True, driver_info=None,
            **options,
        )  # fmt: skip
        self._connection.connect()

    def _primary(self, timeout_s: float) -> tuple[str, int]:
        each: dict[str, Any] = {
            "socket_timeout": timeout_s / len(self._address.servers), "retry": Retry(NoBackoff(), 0), "protocol": 2,
            "driver_info": None,
        }  # fmt: skip
        if self._address.service is not None:
            return self._named_by_sentinel(self._address.service, each)
        failures = []
        for at in self._address.servers:
            try:
                with redis.Redis(at.host, at.port, ssl=at.tls, **_signing_in(at), **each) as node:
                    found = self._owner(node.connection_pool)
            except (RedisError, OSError) as error:
                failures.append(f"{at.host}:{at.port}: {_words(error)}")
                continue
            if found is not None:
                return found[0] or at.host, found[1]
            failures.append(f"{at.host}:{at.port}: it knows of no primary")
        raise RemoteError(f"{self._address}: {'; '.join(failures)}")

    def _owner(self, pool: Any) -> tuple[str, int] | None:
        connection = pool.get_connection()
        try:
            asked = [("CLUSTER", "KEYSLOT", self._key), ("CLUSTER", "SLOTS")]
            connection.send_packed_command(connection.pack_commands(asked), check_health=False)
            place, ranges = connection.read_response(), connection.read_response()
        finally:
            pool.release(connection)
        owners = (owner for first, last, owner, *_ in ranges if first <= place <= last)
        owner = next(owners, None)
        return None if owner is None else ((owner[0] or b"").decode(), owner[1])

    def _named_by_sentinel(self, service: str, each: dict[str, Any]) -> tuple[str, int]:
        tls = {name: value for name, value in _signing_in(self._address.servers[0]).items() if name.startswith("ssl_")}
        more = {**tls, **each, "ssl": self._address.servers[0].tls, "password": self._address.sentinel_password}
        known = Sentinel([(at.host, at.port) for at in self._address.servers], sentinel_kwargs=more)
        try:
            host, port = known.discover_master(service)
        except MasterNotFoundError:
            raise RemoteError(f"{self._address}: no Sentinel answers that names a primary of {service}") from None
        finally:
            known.close()
        return host, port


def _signing_in(at: RedisAddress) -> dict[str, Any]:
    """What redis-py is told of user, password and TLS."""
    found: dict[str, Any] = {} if at.password is None else {"username": at.user, "password": at.password}
    if at.tls:
        found |= {"ssl_ca_certs": at.ca_file, "ssl_certfile": at.cert_file, "ssl_keyfile": at.key_file}
    return found


def _answer(connection: redis.Connection, until_s: float) -> Reply:
    try:
        reply: Reply = connection.read_response(
            disable_decoding=True, timeout=max(until_s - time.monotonic(), 0.001), disconnect_on_error=False
        )
    except redis.ResponseError as error:
        return RefusedReply(_with_code(error))
    return reply


def _with_code(error: RedisError) -> str:
    return f"{error.status_code} {error}" if error.status_code else str(error)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError | redis.TimeoutError):
        return "no answer in time"
    if isinstance(error, AuthenticationError) and error.status_code == "NOAUTH":
        return f"it wants a password (NOAUTH); set ${PASSWORD_VARIABLE}, or give ?password_file=FILE"
    return _with_code(error) if isinstance(error, RedisError) else str(getattr(error, "strerror", None) or error)
