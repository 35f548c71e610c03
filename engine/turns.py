"""An answer in an event loop is a task of its own: it is told that it shall end, and is never cancelled. And which turn
holds a session.

So whatever an answer holds is given back in the order in which it was taken, and whoever reads its pieces may leave at
any time. What the task does is a script of those who make it. One turn at a time holds a session, in this process and
on all servers that share the sessions, also where no event loop runs. Knows no engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

from kvstore.engine.client.requests import CoreClient, Handle
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sessions.window import OneTurn
from kvstore.errors import EngineClosedError, KVStoreError, SessionBusyError
from kvstore.sessions.record import SessionKey

if TYPE_CHECKING:
    from kvstore.sessions.shared.leases import Lease, Leases

LOGGER = logging.getLogger("kvstore.engine")
R = TypeVar("R")


class Port:
    """The listener to all requests of one event loop; only that loop waits for it. end: tells the core that a request
    shall end; never waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[Handle], None]) -> None:
        self.loop = loop
        self.readers: dict[str, asyncio.Future[None]] = {}  # by request: woken by a piece, and by the end
        self.tasks: dict[str, asyncio.Future[None]] = {}  # by request: woken by the end alone
        self.end = end
        self._thread = threading.get_ident()

    def __call__(self, handles: Sequence[Handle]) -> None:
        if threading.get_ident() == self._thread:  # the loop itself reads the engine's messages
            self._wake(handles)
            return
        try:
            self.loop.call_soon_threadsafe(self._wake, handles)
        except RuntimeError:  # the loop was closed, so nobody reads this
            for handle in handles:
                self.end(handle)

    def _wake(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            wake(self.readers, handle.request_id)
            if handle.done:
                wake(self.tasks, handle.request_id)

    async def wait(self, waiting: dict[str, asyncio.Future[None]], handle: Handle) -> None:
        """Until woken. A request has one reader at a time, and one task."""
        waiter = waiting[handle.request_id] = self.loop.create_future()
        try:
            await waiter
        finally:
            waiting.pop(handle.request_id, None)

    async def next_piece(self, handle: Handle) -> Piece | None:
        """The next piece, None at the end."""
        while True:
            done = handle.done  # read before the pieces, as none follow once it is set
            if handle.pieces:
                return handle.pieces.popleft()
            if done:
                return None
            await self.wait(self.readers, handle)


def wake(waiting: dict[str, asyncio.Future[None]], request_id: str) -> None:
    waiter = waiting.pop(request_id, None)
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Turn(Generic[R]):
    """One answer: an asynchronous iterator of pieces, and a context manager that leaves it. One task may read it.

    The last piece is handed out when the script has returned: what it stores is durable then, and what it held is free
    again. Iterating and `result` raise what ended the answer.

    script: what the task does; R is what it returns. session_id, number: of the session's turn, once it has begun.
    gaps_s: seconds between pieces with tokens, as they were read. is_abandoned: nobody reads any more. is_stopped:
    somebody asked for its end.
    """

    def __init__(self, port: Port, script: Script[R]) -> None:
        self.session_id = ""
        self.number: int | None = None
        self.gaps_s: list[float] = []
        self.is_abandoned = self.is_stopped = False
        self._port = port
        self._handle: Handle | None = None
        self._before: Handle | None = None
        self._known: Piece | None = None
        self._num_ended = 0  # choices whose last piece was read
        self._is_read = False
        self._read_s: float | None = None  # when a piece with tokens was
        self._begun, self._over = asyncio.Event(), asyncio.Event()
        self._value: R | None = None
        self._error: Exception | None = EngineClosedError("the event loop ended before the answer")
        self._trace: TracebackType | None = None
        self.task = asyncio.create_task(self._run(script))

    # -- who reads it --------------------------------------------------------------------------------------------------
    async def begun(self) -> Self:
        """Returns once its request is queued, or its answer known. Raises what prevented that. A caller that is
        cancelled here has left.
        """
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self._handle is None:
            self._raise_error()
        return self

    @property
    def is_computed(self) -> bool:
        """Whether it has a request, which may run still."""
        return self._handle is not None

    @property
    def output(self) -> RequestOutput:
        """Complete once the answer has ended."""
        assert self._handle is not None, "it has not begun"
        return self._handle.output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        await self._begun.wait()
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        if piece.token_ids:
            now_s = time.perf_counter()
            if self._read_s is not None:
                self.gaps_s.append(now_s - self._read_s)
            self._read_s = now_s
        return piece

    async def _next(self) -> Piece | None:
        """None at the end. The last piece, and one of an answer that was broken off, waits for the script's end."""
        if self._handle is None:
            piece, self._known = self._known, None
            if piece is None:
                self._raise_error()
        elif self._is_read:
            piece = None
        else:
            piece = await self._port.next_piece(self._handle)
            self._num_ended += piece is not None and piece.finish_reason is not None
            self._is_read = piece is None or self._num_ended == len(self._handle.output.choices)
            if self._is_read or (piece is not None and piece.finish_reason == "abort"):
                await self._over.wait()
                self._is_read = self._is_read or self._error is not None
                self._raise_error()
        return piece

    async def result(self) -> R:
        """What the script returned, once it has."""
        await self._over.wait()
        self._raise_error()
        return self._value  # type: ignore[return-value]

    def abandon(self) -> None:
        """Nobody reads it any more: it ends, and is not stored. Returns at once."""
        if not self._over.is_set():
            self.is_abandoned = True
            self._tell()

    async def aclose(self) -> None:
        """`abandon`, and wait until all that it held is free. Does nothing after its end."""
        self.abandon()
        await self._over.wait()

    async def stop(self) -> None:
        """End the answer now and keep what was said: the iteration ends with a piece whose finish_reason is "abort"."""
        self.is_stopped = True
        self._tell()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- its script ----------------------------------------------------------------------------------------------------
    def check_wanted(self) -> None:
        """Raises EngineClosedError when whoever asked for it has left. Any thread may ask."""
        if self.is_abandoned:
            raise EngineClosedError("nobody waits for this request any more")

    def waits_for(self, handle: Handle) -> None:
        """The script waits for this request before its own, in another thread: it ends when the answer shall."""
        self._before = handle
        if self.is_abandoned or self.is_stopped:
            self._port.end(handle)

    def answered(self, piece: Piece) -> None:
        """Hand out an answer that was given before, in one piece."""
        self._known = piece
        self._begun.set()

    async def computed(self, handle: Handle) -> None:
        """Hand out the pieces of this request, and wait for its end; end it once that is asked for."""
        self._handle = handle
        self._begun.set()
        is_ending = False
        while not handle.done:
            if is_ending or not (self.is_abandoned or self.is_stopped):
                await self._port.wait(self._port.tasks, handle)
            else:
                is_ending = True
                self._port.end(handle)

    async def _run(self, script: Script[R]) -> None:
        try:
            self._value = await script(self)
            self._error = None
        except Exception as error:  # the reader gets it
            self._error, self._trace = error, error.__traceback__
            if self.is_abandoned and not isinstance(error, KVStoreError):
                LOGGER.error("an answer failed after its reader had left", exc_info=error)
        finally:
            self._begun.set()
            self._over.set()

    def _tell(self) -> None:
        if self._handle is not None:
            wake(self._port.tasks, self._handle.request_id)
        elif self._before is not None:
            self._port.end(self._before)

    def _raise_error(self) -> None:
        if self._over.is_set() and self._error is not None:
            raise self._error.with_traceback(self._trace)


Script: TypeAlias = Callable[[Turn[R]], Coroutine[Any, Any, R]]


# -- holding a session ---------------------------------------------------------------------------------------------
class Hold:
    """One turn's hold on its session, from `Claims.hold` to `Claims.release`.

    request_key: its Idempotency-Key. owner: None for a caller that blocks. turn: set once it has begun. lease: the
    right to store it; None where no other server could write. changes: of the session's head, stored with the turn.
    released: completed when the session is free again.
    computed: requests that the turn has waited for before its own.
    """

    def __init__(self, key: SessionKey, request_key: str | None, owner: Turn[Any] | None) -> None:
        self.key, self.request_key, self.owner = key, request_key, owner
        self.turn: OneTurn | None = None
        self.lease: Lease | None = None
        self.changes = dict[str, Any]()
        self.computed: list[Handle] = []
        self.released: Future[None] = Future()
        self.released.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it for the others

    def computing(self, handle: Handle) -> None:
        self.computed.append(handle)
        if self.owner is not None:
            self.owner.waits_for(handle)

    def is_worth_waiting(self, request_key: str | None) -> bool:
        """Whether another turn waits for this one's end: it has no reader any more, or it answers the same request."""
        is_same = request_key is not None and request_key == self.request_key
        return is_same or (self.owner is not None and self.owner.is_abandoned)


class Claims:
    """All sessions that are held in this process."""

    def __init__(self, leases: Leases | None) -> None:
        """leases: see `Sharing`."""
        self._leases = leases
        self._holds: dict[SessionKey, Hold] = {}
        self._lock = threading.Lock()

    def on(self, key: SessionKey) -> Hold | None:
        return self._holds.get(key)

    def hold(self, key: SessionKey, request_key: str | None = None, owner: Turn[Any] | None = None) -> Hold:
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
        if self._leases is not None:
            hold.lease = self._leases.acquire(hold.key)

    def give_back(self, hold: Hold) -> None:
        """The lease; the hold stays."""
        lease, hold.lease = hold.lease, None
        if self._leases is not None and lease is not None:
            self._leases.release(lease)


def blocking(
    client: CoreClient, claims: Claims, key: SessionKey, begin: Callable[[Hold], OneTurn],
    end: Callable[[Hold], object],
) -> Iterator[Piece]:  # fmt: skip
    """One turn of a session, for a caller that blocks; its last piece is held back until the turn is durable."""
    final: Piece | None = None
    hold = claims.hold(key)
    with ExitStack() as held:
        held.callback(claims.release, hold)
        turn = begin(hold)
        held.callback(end, hold)
        for piece in client.stream(turn.handle):
            if piece.finish_reason is None:
                yield piece
            else:
                final = piece
    if final is not None:
        yield final


async def ending(claims: Claims, key: SessionKey, request_key: str | None = None) -> None:
    """Wait for a turn that ends anyway, and for an earlier attempt of the same request."""
    while (other := claims.on(key)) is not None and other.is_worth_waiting(request_key):
        await asyncio.wrap_future(other.released)


@asynccontextmanager
async def held(
    claims: Claims, key: SessionKey, request_key: str | None = None, owner: Turn[Any] | None = None
) -> AsyncIterator[Hold]:
    """`Claims.hold` for as long as this context lasts, after `ending`. Raises SessionBusyError."""
    await ending(claims, key, request_key)
    hold = claims.hold(key, request_key, owner)
    try:
        yield hold
    finally:
        claims.release(hold)
