"""Where ranks of other machines come in: connections that prove, both ends, that they know one secret.

Nothing is encrypted: the proof keeps others out who can only connect. Knows no model and no step.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Self

from kvstore.errors import ConfigError, EngineDiedError

CHANNEL, PULSE = 0, 1  # what a connection is for
KINDS = (CHANNEL, PULSE)
NONCE_BYTES, PROOF_BYTES = 32, 32
CLAIM = struct.Struct(f"!{NONCE_BYTES}sHB")  # nonce, rank, what for
PROVE_S = 10.0  # how long either end may take to prove what it knows
AGAIN_S = 0.2
IDLE_S, PROBE_S, NUM_PROBES = 15, 5, 3  # keepalive: a machine that is gone is noticed after half a minute


class Door:
    """Listens for the other ranks at an address of this machine. Raises ConfigError if it has no such address."""

    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._num_refused = 0
        try:
            family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(where[:2], family=family)
            self._socket.settimeout(AGAIN_S)
        except OSError as error:
            raise ConfigError(f"ranks cannot be waited for at {host}: {error}") from error
        self.host, self.port = host, self._socket.getsockname()[1]

    def others(
        self, size: int, timeout_s: float, check: Callable[[], object] = lambda: None
    ) -> dict[int, dict[int, socket.socket]]:
        """Wait until all other ranks have come. Returns their connections by rank and use. check: called meanwhile.

        Raises EngineDiedError, which names those that have not come in time, and what `check` raises.
        """
        found: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(1, size)}
        end = time.monotonic() + timeout_s
        with ExitStack() as undo:
            undo.callback(_close, found)
            while missing := [rank for rank, each in found.items() if len(each) < len(KINDS)]:
                if time.monotonic() > end:
                    raise EngineDiedError(self._who_is_missing(missing, size, timeout_s))
                check()
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue
                self._let_in(connection, found)
            undo.pop_all()
        return found

    def _let_in(self, connection: socket.socket, found: dict[int, dict[int, socket.socket]]) -> None:
        claim = _proven_claim(connection, self._key)
        if claim is None or claim[0] not in found or claim[1] not in KINDS:
            self._num_refused += 1
            connection.close()
            return
        rank, kind = claim
        found[rank][kind] = connection

    def _who_is_missing(self, missing: list[int], size: int, timeout_s: float) -> str:
        names = ", ".join(map(str, missing))
        refused = f"; {self._num_refused} connections did not know the secret" if self._num_refused else ""
        return (
            f"rank {names} of {size} has not come to {self.host} port {self.port} within {timeout_s:g} s{refused}: "
            "let the other machines reach this one's ports"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _close(connections: Mapping[int, Mapping[int, socket.socket]]) -> None:
    for each in connections.values():
        for one in each.values():
            one.close()


def entered(host: str, port: int, rank: int, kind: int, key: bytes) -> socket.socket:
    """A connection to the first rank. Raises OSError if it is not there, ConfigError if the secrets are not equal."""
    with ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection((host, port), PROVE_S))
        nonce = _received(connection, NONCE_BYTES)
        claim = CLAIM.pack(secrets.token_bytes(NONCE_BYTES), rank, kind)
        connection.sendall(claim + _proof(key, b"other", nonce, claim))
        try:
            proof = _received(connection, PROOF_BYTES)
        except (EOFError, ConnectionError):
            raise ConfigError(f"rank {rank}: the first rank at {host} port {port} has another secret") from None
        if not hmac.compare_digest(proof, _proof(key, b"first", nonce, claim)):
            raise ConfigError(f"rank {rank}: what listens at {host} port {port} does not know the secret")
        undo.pop_all()
    return _ready(connection)


def _proven_claim(connection: socket.socket, key: bytes) -> tuple[int, int] | None:
    """Rank and use of a connection that has proven to know the key; None otherwise."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    with suppress(OSError, EOFError):
        connection.settimeout(PROVE_S)
        connection.sendall(nonce)
        claim, proof = _received(connection, CLAIM.size), _received(connection, PROOF_BYTES)
        if hmac.compare_digest(proof, _proof(key, b"other", nonce, claim)):
            connection.sendall(_proof(key, b"first", nonce, claim))
            _ready(connection)
            _, rank, kind = CLAIM.unpack(claim)
            return rank, kind
    return None


def _proof(key: bytes, who: bytes, nonce: bytes, claim: bytes) -> bytes:
    return hmac.digest(key, who + nonce + claim, "sha256")


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (more := connection.recv(num_bytes - len(found))):
            raise EOFError
        found += more
    return found


def _ready(connection: socket.socket) -> socket.socket:
    """Steps are small and at once on their way; a machine that is gone is noticed."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", NUM_PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
