"""A request and its answer: what every handler can reach, what is known of one request, and the one way to answer it.

On every route that talks an answer is whole, or a stream of events, in the words of the route's dialect. Once a
stream's headers are sent, errors are events. Knows no route and no session.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import msgspec
from aiohttp import web

from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.turns import Claims, Turn
from kvstore.service.api.metrics import Metrics
from kvstore.service.api.traces import Traces
from kvstore.service.http.access import Access
from kvstore.service.http.errors import ApiError, ReaderGone, api_error, json_response
from kvstore.service.http.limits import Deadline, Limits
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.sessions.record import SessionKey

WAIT_S = 0.5
STUCK_S = 10.0  # longer than any step, unless the device is far too small for its model
FAILING_S = 60.0
R = TypeVar("R")
State = Literal["starting", "running", "stopping"]
CLEAN_UP_S = 1.0  # for an answer whose reader has gone, unless its engine does not answer
SILENT_S = 5.0  # without a sign of life; there should be two a second
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not hold events back
}
DONE = b"data: [DONE]\n\n"
Event = tuple[str | None, Any]  # its name, if the dialect names events, and its data


class RecentStats:
    """The counters of one engine. Used in the server's event loop only.

    stuck_s: longer than any step takes; failing_s: for so long a failure is told, unless something is stored sooner.
    """

    def __init__(self, engine: AsyncEngine, stuck_s: float = STUCK_S, failing_s: float = FAILING_S) -> None:
        self._engine, self._stuck_s, self._failing_s = engine, stuck_s, failing_s
        self._known: dict[str, Any] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0  # when the last question was put, on the monotonic clock
        self._outcomes = (0, 0)  # of changes to sessions: failed, stored
        self._failing_until_s = 0.0  # monotonic

    async def get(self) -> dict[str, Any]:
        """The counters; older ones while a long step keeps the engine from answering."""
        if self._asking is None or self._asking.done():
            self._asking, self._asked_s = asyncio.create_task(self._ask()), time.monotonic()
        await asyncio.wait({self._asking}, timeout=WAIT_S)
        return self._known

    @property
    def is_stuck(self) -> bool:
        """Whether a query has been open for longer than any step takes."""
        is_open = self._asking is not None and not self._asking.done()
        return is_open and time.monotonic() > self._asked_s + self._stuck_s

    @property
    def sessions_fail(self) -> bool:
        """Whether turns recently could not be stored."""
        return time.monotonic() < self._failing_until_s

    async def _ask(self) -> None:
        try:
            self._known = {**await self._engine.call(self._engine.engine.stats)}
        except Exception as error:  # whatever it is, it must not be /health that fails
            self._known = {"error": type(error).__name__}
            return
        sessions = self._known.get("sessions") or {}
        before, self._outcomes = self._outcomes, (sessions.get("failed", 0), sessions.get("committed", 0))
        if self._outcomes[0] > before[0]:
            self._failing_until_s = time.monotonic() + self._failing_s
        elif self._outcomes[1] > before[1]:
            self._failing_until_s = 0.0


@dataclass(slots=True)
class Context:
    """The parts of one server. `engine`, `recall` and `stats` are set once `state` is no longer "starting".

    Until then only public routes are served. traces: None where no collector is named.
    """

    options: ServeOptions
    access: Access
    limits: Limits
    metrics: Metrics
    started_s: int  # since the epoch
    traces: Traces | None = None
    state: State = "starting"
    engine: AsyncEngine = field(init=False)
    recall: Recall = field(init=False)
    stats: RecentStats = field(init=False)

    def open(self, engine: AsyncEngine, recall: Recall) -> None:
        """Mark the model as loaded: requests are served from now on."""
        self.engine, self.recall, self.stats = engine, recall, RecentStats(engine)
        self.state = "running"

    @property
    def has_failed(self) -> bool:
        """Whether the engine ended without being asked to."""
        return self.state == "running" and self.engine.engine.client.closed

    @property
    def is_silent(self) -> bool:
        """Whether the engine's own process has given no sign of life for long enough to doubt it."""
        limit_s = min(SILENT_S, self.options.engine_timeout_s / 2)
        return self.state == "running" and self.engine.engine.core.silent_s >= limit_s

    @asynccontextmanager
    async def reading(self, turn: Turn[R], exchange: "Exchange", has_gaps: bool = True) -> AsyncIterator[Turn[R]]:
        """The turn once it has begun. Whoever leaves this context before its end abandons it.

        Then it is counted, for /metrics and for its request's line in the log: only at its end it is known how much was
        said to a client that has gone, so that is waited for a while. has_gaps: it is read as it comes, so the times
        between its tokens mean something.
        """
        try:
            yield await turn.begun()
        finally:
            turn.abandon()
            if turn.is_computed:
                await asyncio.wait([turn.task], timeout=CLEAN_UP_S)
                self.metrics.answer_ended(turn.output, exchange.route, turn.gaps_s if has_gaps else None)
                exchange.outputs.append(turn.output)
                usages = [output.usage for output in exchange.outputs]
                self.engine.engine.admin.usages.note(exchange.tenant, exchange.request_id, usages)

    @property
    def claims(self) -> Claims:
        return self.engine.engine.chats.claims

    def is_begun(self, key: SessionKey) -> bool:
        """Whether a turn of this session runs, perhaps its first."""
        hold = self.claims.on(key)
        return hold is not None and hold.turn is not None

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.engine.engine.facts.model_name


@dataclass(slots=True)
class Exchange:
    """What is known of one open request.

    route: the label in the metrics. response: its stream, if any. status, error_code: its error's. outputs: of its
    answers that have ended.
    """

    request_id: str
    route: str
    tenant: str = ""
    deadline: Deadline | None = None
    response: web.StreamResponse | None = None
    status: int | None = None
    error_code: str | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)


EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)


def context_of(request: web.Request) -> Context:
    return request.app[CONTEXT]


def tenant_of(request: web.Request) -> str:
    """The tenant whose key the request carries; "" where there are no keys."""
    return request[EXCHANGE].tenant


# -- an answer -------------------------------------------------------------------------------------------------------
def error_event(error: ApiError) -> Event:
    return None, error.body()


class Dialect(Protocol[R]):
    """How the answer to one request of a route is said. R: the result of its turns, one for each prompt.

    has_done: whether events end with [DONE].
    """

    has_done: ClassVar[bool] = True

    def first(self, turns: Sequence[Turn[R]]) -> Iterable[Event]:
        """Before any piece. A stream's headers go out with its first event: until then an error has its status."""
        return ()

    def piece(self, turns: Sequence[Turn[R]], number: int, piece: Piece) -> Iterable[Event]:
        """Of the turn of this number."""
        ...

    def last(self, turns: Sequence[Turn[R]], results: Sequence[R]) -> Iterable[Event]: ...

    def whole(self, turns: Sequence[Turn[R]], results: Sequence[R]) -> msgspec.Struct: ...

    def error(self, error: ApiError) -> Event:
        """Of a stream that has begun."""
        return error_event(error)


async def answer(
    request: web.Request,
    opened: AbstractAsyncContextManager[Sequence[Turn[R]]],
    dialect: Dialect[R],
    stream: bool | None,
) -> web.StreamResponse:
    """opened: the turns once all have begun; they end, at the latest, with this context. stream: the client's field."""
    if not stream:
        async with opened as turns:
            for turn in turns:
                async for _ in turn:  # as they come, so that the times between them mean something
                    pass
            results = [await turn.result() for turn in turns]
        return json_response(dialect.whole(turns, results))
    async with EventStream(request, dialect.has_done, dialect.error) as events, opened as turns:
        for name, data in dialect.first(turns):
            await events.send(data, name)
        async with aclosing(_together(turns)) as pieces:
            async for number, piece in pieces:
                for name, data in dialect.piece(turns, number, piece):
                    await events.send(data, name)
        results = [await turn.result() for turn in turns]
        for name, data in dialect.last(turns, results):
            await events.send(data, name)
    return events.response


async def _together(turns: Sequence[Turn[R]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of all turns as they come, each with its turn's number."""
    if len(turns) == 1:  # without a task for each piece
        async for piece in turns[0]:
            yield 0, piece
        return
    reads = {asyncio.ensure_future(anext(turn, None)): number for number, turn in enumerate(turns)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                number = reads.pop(read)
                if (said := read.result()) is not None:
                    reads[asyncio.ensure_future(anext(turns[number], None))] = number
                    yield number, said
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


# -- server-sent events ----------------------------------------------------------------------------------------------
class EventStream:
    """`async with EventStream(request) as events: await events.send(...)`; it ends with [DONE], whatever happens.

    Headers are sent with the first event, so that an error before it still has its status. An exception that leaves the
    block, or the end of the request's time, becomes an error event; the exception is raised again to be logged and
    counted. done: whether "data: [DONE]" closes the stream. error: how it says an error.
    """

    def __init__(
        self, request: web.Request, done: bool = True, error: Callable[[ApiError], Event] = error_event
    ) -> None:
        self._request = request
        self._done = done
        self._error = error
        self.response = web.StreamResponse(headers=HEADERS)

    async def send(self, data: Any, event: str | None = None) -> None:
        """Send one event. Returns when the reader, or at least the kernel, has accepted it. Raises ReaderGone."""
        name = b"" if event is None else b"event: " + event.encode() + b"\n"
        await self._put(name + b"data: " + msgspec.json.encode(data) + b"\n\n")

    async def _put(self, data: bytes) -> None:
        try:
            if not self.response.prepared:
                self._request[EXCHANGE].response = self.response
                await self.response.prepare(self._request)
            await self.response.write(data)
            await self._request.writer.drain()
        except ConnectionError as error:
            raise ReaderGone("the client is gone") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told = self._told(error)
        if error is not None and (told is None or not self.response.prepared):
            return  # the client is gone, or it gets an answer with a status
        if told is not None:
            name, data = self._error(told)
            await self.send(data, name)
        if self._done:
            await self._put(DONE)

    def _told(self, error: BaseException | None) -> ApiError | None:
        if isinstance(error, asyncio.CancelledError):  # the time is over, or the client went away
            deadline = self._request[EXCHANGE].deadline
            return None if deadline is None else deadline.error
        if isinstance(error, Exception) and not isinstance(error, ReaderGone):
            return api_error(error)
        return None
