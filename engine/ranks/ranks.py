"""All other ranks of a model, as the first rank sees them: sends them steps, and watches them."""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from kvstore.blocks.records import TransferPlan, Transferred
from kvstore.engine.core.input_batch import Copies, StepInputs
from kvstore.engine.process import SHOW_S, Child, Failed, Start, encode
from kvstore.engine.ranks.wire import (
    EndForward,
    FromRank,
    Leave,
    Moved,
    Moves,
    OpenArena,
    Overwrite,
    RankLoaded,
    RankReady,
    SaveStates,
    decode_from_rank,
    step_of,
)
from kvstore.errors import ConfigError, EngineDiedError
from kvstore.memory.layout import OwnPart

END_S = 10.0  # how long a rank may take to end in order
CLAIM = struct.Struct("!H")  # the rank
PROVE_S = 10  # how long either end may take to prove what it knows
AGAIN_S = 0.2
IDLE_S, PROBE_S, NUM_PROBES = 15, 5, 3  # keepalive: a machine that is gone is noticed after half a minute
FIRST, OTHER = b"first", b"other"  # no end's proof is the other's
M = TypeVar("M", RankLoaded, RankReady)
LOOK_MS = 50  # how often to check whether a rank has ended
BLAME_S = 2.0  # how long to wait after an error here for news of the rank that may have caused it


@contextmanager
def started_here(
    arguments: Sequence[Mapping[str, Any]], silence_s: float, num_partners: int, settings: Mapping[str, str]
) -> Iterator[Ranks]:
    """Start processes, which end with this context. arguments: those of `Engine` for each other rank. num_partners: see
    `Ranks`. settings: environment variables for them. Raises ConfigError where processes cannot share memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a model in several processes needs Linux, where they can share memory")
    with ExitStack() as opened:
        folder = tempfile.mkdtemp(prefix="kvstore-ranks-")
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        arena = os.memfd_create("kvstore-arena")
        opened.callback(os.close, arena)
        rendezvous = str(Path(folder) / "rendezvous")
        others = opened.enter_context(children(arguments, silence_s, rendezvous, arena, settings))
        yield Ranks(others, num_partners, rendezvous, arena)


@contextmanager
def children(
    arguments: Sequence[Mapping[str, Any]], silence_s: float, rendezvous: str, arena: int | None = None,
    settings: Mapping[str, str] | None = None, ends: Mapping[int, socket.socket] = MappingProxyType({}),
) -> Iterator[list[Child]]:  # fmt: skip
    """Other ranks, which end with this context. ends: connections by rank, to those that others have started."""
    with ExitStack() as opened:
        others = list[Child]()
        for rank, each in enumerate(arguments, 1):
            start = Start(silence_s, dict(each), None, rank, len(arguments) + 1, arena, rendezvous)
            others.append(Child(start, settings, ends.get(rank)))
            opened.callback(others[-1].end, encode(Leave()), END_S)
        yield others


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


class Blocks(Protocol):
    """Blocks of the store, for ranks without a share of its memory: see `kvstore.memory.ranked.FarBlocks`."""

    def loaded(self, part: OwnPart, plan: TransferPlan) -> bytes: ...

    def put(self, part: OwnPart, plan: TransferPlan, data: bytes) -> None: ...


class OtherRank:
    """Another rank, as the first one sees it. Any thread may use it.

    part: its part of blocks, once it is ready. error: why it could not go on, if it has told.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.part: OwnPart
        self.error: Exception | None = None
        self._reading = threading.Lock()
        self._received: list[FromRank] = []

    def receive(self) -> list[FromRank]:
        """The messages that have come; never waits."""
        self.look()
        with self._reading:
            messages, self._received = self._received, []
        return messages

    def look(self) -> None:
        """Take in what has come, for `receive`; never waits."""
        with self._reading:
            for message in map(decode_from_rank, self.child.receive()):
                if isinstance(message, Failed):
                    self.error = message.error
                self._received.append(message)

    def wait_for(self, kind: type[M]) -> M:
        """Wait for this message at the start. Raises what the rank has told, and EngineDiedError if it has ended."""
        for message in map(decode_from_rank, self.child.first_messages()):
            if isinstance(message, Failed):
                self.error = message.error
                raise self.end
            if isinstance(message, kind):
                return message
        raise AssertionError("unreachable")

    @property
    def end(self) -> Exception:
        """What to raise when it has ended, or could not start."""
        if self.error is not None and self.child.is_loading:
            said, *more = self.error.args
            return type(self.error)(f"{self.child.name}: {said}", *more)
        return EngineDiedError(f"{self.child.name} ended ({self.child.how})")

    @property
    def has_followed(self) -> bool:
        """Whether it has ended because another one had."""
        return isinstance(self.error, EngineDiedError)


class Ranks:
    """Implements `Others` for the runner, and `kvstore.memory.ranked.OtherRanks` for the store.

    others: in the order of their numbers. num_partners: how many of them have the first stage of a pipeline, with this
    rank. rendezvous: where all meet. arena: descriptor of the memory that all map; None: the others have no share of
    it. host: address of this machine for the others; None: all are on one. One thread at a time sends steps, and one
    collects ended transfers.
    """

    def __init__(
        self, others: Sequence[Child], num_partners: int, rendezvous: str, arena: int | None = None,
        host: str | None = None,
    ) -> None:  # fmt: skip
        self.others, self.num_others = [OtherRank(child) for child in others], len(others)
        self.rendezvous, self.host, self.arena_descriptor = rendezvous, host, arena
        self._num_partners = num_partners
        self._moves: Moves | None = None  # loads and saves of the step that is being prepared
        self._blocks: Blocks | None = None

    # -- start and end -----------------------------------------------------------------------------------------------
    def wait_loaded(self) -> None:
        """Wait until all have read their weights. Raises the first failure, with the number of its rank."""
        for other in self.others:
            other.wait_for(RankLoaded)

    def open_arena(self) -> None:
        """Tell them that the arena has its size, and wait until all are ready for steps. Raises as `wait_loaded`."""
        self._tell(encode(OpenArena()))
        for other in self.others:
            other.part = other.wait_for(RankReady).part
        for other in self.others:
            other.child.is_loading = False

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """If another rank has caused an error in this context, raise that rank's error instead."""
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + BLAME_S
            while True:
                lost = _lost(self.others)
                is_over = not isinstance(error, EngineDiedError) or time.monotonic() > deadline
                if lost and (is_over or not lost[0].has_followed):
                    raise lost[0].end from error
                if is_over:
                    raise
                self._poll(LOOK_MS)

    def _poll(self, timeout_ms: int) -> None:
        poller = select.poll()
        for other in self.others:
            if not other.child.channel.ended:
                poller.register(other.child.channel, select.POLLIN)
        poller.poll(timeout_ms)

    @property
    def loss(self) -> str | None:
        """Which rank has ended, and how. No step can be computed after that."""
        lost = next((other for other in _lost(self.others) if other.child.how is not None), None)
        return None if lost is None else str(lost.end)

    def check(self) -> None:
        """Raises EngineDiedError if a rank has ended."""
        if (loss := self.loss) is not None:
            raise EngineDiedError(loss)

    # -- steps -------------------------------------------------------------------------------------------------------
    def begin_step(
        self, inputs: StepInputs, table: np.ndarray, window_of: np.ndarray | None, copies: tuple[Copies, Copies]
    ) -> None:
        self.check()
        moves, self._moves = self._moves, None
        step = step_of(inputs, table, window_of, copies, moves)
        if moves is None or self.arena_descriptor is not None:
            self._tell(encode(step))
            return
        assert self._blocks is not None
        for other in self.others:
            moves.data = self._blocks.loaded(other.part, moves.plan)
            other.child.send(encode(step), waits=True)

    def end_forward(self, num_samples: int) -> None:
        message = encode(EndForward(num_samples))
        for other in self.others[: self._num_partners]:
            other.child.send(message, waits=True)

    def overwrite(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._tell(encode(Overwrite(list(blocks), list(slots))))

    def kill(self) -> None:
        for other in self.others:
            other.child.kill()

    def _tell(self, message: bytes) -> None:
        for other in self.others:
            other.child.send(message, waits=True)

    # -- transfers ---------------------------------------------------------------------------------------------------
    def use(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def begin_transfers(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self._moves = Moves(plan, row_starts)

    def end_transfers(self) -> bool:
        moves, self._moves = self._moves, None
        return moves is None

    def save_states(self, plan: TransferPlan) -> None:
        self._tell(encode(SaveStates(Moves(plan))))

    def transferred(self) -> list[Transferred]:
        found: list[Transferred] = []
        for other in self.others:
            for message in other.receive():
                if isinstance(message, Moved):
                    if (saved := message.saved) is not None and self._blocks is not None and self.loss is None:
                        self._blocks.put(other.part, saved.plan, saved.data)  # after a loss they may be others'
                    found.append(Transferred(message.ticket, message.is_load, message.succeeded))
        return found

    def wait(self, timeout_s: float) -> None:
        self._poll(int(timeout_s * 1000))
        self.check()


def end_hung(others: Sequence[OtherRank], why: str) -> None:
    """In any thread: end ranks each of which may wait for another one for ever."""
    for other in others:
        other.child.show()
    time.sleep(SHOW_S)
    for other in others:
        other.child.kill(why)


def _lost(others: Sequence[OtherRank]) -> list[OtherRank]:
    """Those that have ended, or could not start; first those that have not ended because another one had."""
    found = [other for other in others if other.child.how is not None or other.child.is_loading]
    for other in found:
        other.look()
    found = [other for other in found if other.child.how is not None or other.error is not None]
    return sorted(found, key=lambda other: other.has_followed)
