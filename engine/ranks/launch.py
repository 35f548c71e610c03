"""Starts the other ranks of a model on this machine, or lets in those that are started on other ones.

Those prove that they know a secret, and so does the first rank. Nothing is encrypted: the proof keeps others out who
can only connect. Knows no model and no step.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self

from kvstore.engine.process.child import SLOW_FACTOR, Child
from kvstore.engine.process.wire import Start, encode
from kvstore.engine.ranks.wire import Leave
from kvstore.errors import ConfigError, EngineDiedError

END_S = 10.0  # how long a rank may take to end in order
CLAIM = struct.Struct("!H")  # the rank
PROVE_S = 10  # how long either end may take to prove what it knows
AGAIN_S = 0.2
IDLE_S, PROBE_S, NUM_PROBES = 15, 5, 3  # keepalive: a machine that is gone is noticed after half a minute
FIRST, OTHER = b"first", b"other"  # no end's proof is the other's


@dataclass(frozen=True, slots=True)
class Launch:
    """The other ranks, in the order of their numbers, and where all meet.

    arena: descriptor of the memory that all of them map; None: they have no share of it. host: address of this machine
    for the others; None: all are on one.
    """

    others: Sequence[Child]
    rendezvous: str
    arena: int | None = None
    host: str | None = None


@contextmanager
def started_here(
    arguments: Sequence[Mapping[str, Any]], silence_s: float, settings: Mapping[str, str]
) -> Iterator[Launch]:
    """Start processes, which end with this context. arguments: those of `Engine` for each other rank. settings:
    environment variables for them. Raises ConfigError where processes cannot share memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a model in several processes needs Linux, where they can share memory")
    with ExitStack() as opened:
        folder = tempfile.mkdtemp(prefix="kvstore-ranks-")
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        arena = os.memfd_create("kvstore-arena")
        opened.callback(os.close, arena)
        others, rendezvous = list[Child](), str(Path(folder) / "rendezvous")
        for rank, each in enumerate(arguments, 1):
            start = Start(silence_s, dict(each), None, rank, len(arguments) + 1, arena, rendezvous)
            others.append(Child(start, settings))
            opened.callback(others[-1].end, encode(Leave()), END_S)
        yield Launch(others, rendezvous, arena)


@contextmanager
def awaited(
    door: Door, arguments: Sequence[Mapping[str, Any]], silence_s: float, rendezvous: str,
    invite: Callable[[Door], object], check: Callable[[], object] = lambda: None,
) -> Iterator[Launch]:  # fmt: skip
    """Wait for ranks that others start. They end with this context. invite: tells them where the door is. check: called
    while one is missing; may raise.

    Raises EngineDiedError if one does not come in time: ten times the silence that is allowed to a rank that runs.
    """
    size = len(arguments) + 1
    with ExitStack() as opened:
        with door:
            invite(door)
            found = door.others(size, SLOW_FACTOR * silence_s, check)
        others = list[Child]()
        for rank, each in enumerate(arguments, 1):
            start = Start(silence_s, dict(each), None, rank, size, None, rendezvous)
            others.append(Child(start, end=found[rank]))
            opened.callback(others[-1].end, encode(Leave()), END_S)
        yield Launch(others, rendezvous, host=door.host)


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
    ) -> dict[int, socket.socket]:
        """Wait until all other ranks have come. Returns their connections by rank. check: called meanwhile.

        Raises EngineDiedError, which names those that have not come in time, and what `check` raises.
        """
        found = dict[int, socket.socket]()
        end = time.monotonic() + timeout_s
        with ExitStack() as undo:
            while missing := [rank for rank in range(1, size) if rank not in found]:
                if time.monotonic() > end:
                    raise EngineDiedError(self._who_is_missing(missing, size, timeout_s))
                check()
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue
                rank = _proven_claim(connection, self._key)
                if rank in missing:
                    found[rank] = undo.enter_context(connection)
                else:
                    self._num_refused += 1
                    connection.close()
            undo.pop_all()
        return found

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


def entered(host: str, port: int, rank: int, key: bytes) -> socket.socket:
    """A connection to the first rank. Raises OSError if it is not there, ConfigError if the secrets are not equal."""
    with ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection((host, port), PROVE_S))
        claim = CLAIM.pack(rank)
        with _proving(connection) as proving:
            try:
                proving.send_bytes(claim)
                answer_challenge(proving, key + OTHER + claim)
            except (EOFError, ConnectionError, AuthenticationError):
                raise ConfigError(f"rank {rank}: the first rank at {host} port {port} has another secret") from None
            try:
                deliver_challenge(proving, key + FIRST + claim)
            except (EOFError, ConnectionError, AuthenticationError):
                raise ConfigError(f"rank {rank}: what listens at {host} port {port} does not know the secret") from None
        undo.pop_all()
    return connection


def _proven_claim(connection: socket.socket, key: bytes) -> int | None:
    """The rank of a connection that has proven to know the key; None otherwise."""
    with suppress(OSError, EOFError, AuthenticationError, AssertionError), _proving(connection) as proving:
        claim = proving.recv_bytes(CLAIM.size)
        deliver_challenge(proving, key + OTHER + claim)
        answer_challenge(proving, key + FIRST + claim)
        return int(CLAIM.unpack(claim)[0])
    return None


@contextmanager
def _proving(connection: socket.socket) -> Iterator[Connection]:
    """For proofs, with a deadline. Afterwards steps are small and at once on their way, and a machine that is gone is
    noticed.
    """
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PROVE_S, 0))
    with Connection(os.dup(connection.fileno())) as proving:
        yield proving
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", NUM_PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
