"""A request and its answer, on every route: what handlers can reach and what is known of the request; what happens
around each handler: request id, errors, access, counts; and the one way to answer on those that talk.

That is whole, or as a stream of events, in the words of the route's dialect. Once a stream's headers are sent, errors
are events. Knows no route and no session.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web

from kvstore.engine.async_engine import AsyncEngine
from kvstore.engine.outputs import MOST_ASKED, Piece, RequestOutput
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.turns import Claims, Script, Turn
from kvstore.service.api.metrics import RecentStats
from kvstore.service.http.access import Access
from kvstore.service.http.errors import (
    ApiError,
    Handler,
    ReaderGone,
    Route,
    api_error,
    error_response,
    json_response,
    unavailable,
)
from kvstore.service.http.limits import Deadline, Limits, new_request_id
from kvstore.service.http.telling import Metrics, Traces, counts_of, log
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.sessions.record import SessionKey

R = TypeVar("R")
State = Literal["starting", "running", "stopping"]
Opened: TypeAlias = AbstractAsyncContextManager[Sequence[Turn[R]]]
CLEAN_UP_S = 1.0  # for an answer whose reader has gone, unless its engine does not answer
SILENT_S = 5.0  # without a sign of life; there should be two a second
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not hold events back
}
DONE = b"data: [DONE]\n\n"
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# W3C Trace Context: version, trace, span, flags. A later version may have more, which is left out.
TRACE = re.compile(r"(?!ff|00.{54})([0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(?:-.*)?")
CLIENT_GONE = 499  # nginx's number for a client that did not wait; it is never sent
Event = tuple[str | None, Any]  # its name, if the dialect names events, and its data


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
    async def reading(
        self, script: Script[R], exchange: "Exchange", has_gaps: bool = True
    ) -> AsyncIterator[list[Turn[R]]]:  # fmt: skip
        """The answer that this script gives, once it has begun. Whoever leaves this context before its end abandons it.

        Then it is counted, for /metrics and for its request's line in the log: only at its end it is known how much was
        said to a client that has gone, so that is waited for a while. has_gaps: it is read as it comes, so the times
        between its tokens mean something.
        """
        turn = self.engine.turn(script)
        try:
            yield [await turn.begun()]
        finally:
            turn.abandon()
            if turn.is_computed:
                await asyncio.wait([turn.task], timeout=CLEAN_UP_S)
                self.metrics.answer_ended(turn.output, exchange.route, turn.gaps_s if has_gaps else None)
                exchange.outputs.append(turn.output)
                known, name = self.engine.engine.admin.usages, (exchange.tenant, exchange.request_id)
                known.pop(name, None)
                known[name] = tuple(output.usage for output in exchange.outputs)
                if len(known) > MOST_ASKED:
                    del known[next(iter(known))]

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


# -- what happens around each handler ----------------------------------------------------------------------------------
def route_of(request: web.Request) -> Route | None:
    """None for an unknown path or method."""
    return getattr(request.match_info.handler, "route", None)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "kvstore"
    for name in ("X-Request-Id", "Request-Id"):  # OpenAI's clients read the one, Anthropic's the other
        response.headers[name] = request[EXCHANGE].request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(context_of(request).access.shared_with(request))
    response.headers.setdefault("Cache-Control", "no-store")
    # The rest of a body must not be read as the next request. Who is told to go elsewhere must connect anew.
    if not request.content.is_eof() or context_of(request).limits.is_draining:
        response.force_close()
        response.headers["Connection"] = "close"


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write one line in the log and count one for every request, however it ends."""
    given = request.headers.get("X-Request-Id", "")
    route = route_of(request)
    exchange = request[EXCHANGE] = Exchange(
        given if REQUEST_ID.fullmatch(given) else new_request_id(), "unknown" if route is None else route.template
    )
    started_s, status = time.monotonic(), CLIENT_GONE
    try:
        response = await handler(request)
        status = exchange.status or response.status
        return response
    finally:
        _tell(request, route, status, started_s)


def _tell(request: web.Request, route: Route | None, status: int, started_s: float) -> None:
    exchange, context, seconds = request[EXCHANGE], context_of(request), time.monotonic() - started_s
    trace = TRACE.fullmatch(request.headers.get("traceparent", ""))
    context.metrics.request_ended(exchange.route, request.method, status, seconds)
    fields = {
        "request_id": exchange.request_id,
        "method": request.method[:20],
        "route": exchange.route,
        "status": status,
        "seconds": seconds,
        "traceparent": trace and trace[1],
        "tenant": exchange.tenant or None,
        "code": exchange.error_code,
        **counts_of(exchange.outputs),
    }
    is_polled = route is not None and route.is_polled
    log("request", fields, logging.DEBUG if is_polled else logging.INFO)
    if context.traces is not None and not is_polled:
        context.traces.request_ended(fields, request.headers, exchange.outputs, started_s)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an answer. After a stream's headers it has already been sent as an event."""
    exchange = request[EXCHANGE]
    try:
        async with context_of(request).limits.deadline() as exchange.deadline:
            return await handler(request)
    except ReaderGone:
        raise asyncio.CancelledError from None  # as for every client that went away
    except Exception as error:
        told = api_error(error)
        if told.code in ("internal_error", "store_error"):  # the client is not told why
            log("a handler failed", {"request_id": exchange.request_id}, logging.ERROR, error)
        _let_go(error)
        if told.status in (401, 403, 413, 429, 503) and told.code is not None:  # refused before any work
            context_of(request).metrics.refused(told.code)
        exchange.status, exchange.error_code = told.status, told.code
        begun = exchange.response
        if begun is not None and begun.prepared:
            return begun
        route = route_of(request)
        return error_response(told, None if route is None else route.errors.of(told, exchange.request_id))


def _let_go(error: BaseException | None) -> None:
    """Drop the exception's frames: their tasks refer to it, and their texts would stay for the collector."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests without the route's key, and all but public routes until the model is loaded."""
    context, route = context_of(request), route_of(request)
    if request.version not in (HttpVersion10, HttpVersion11):  # aiohttp takes a line without a version for HTTP/0.9
        raise ApiError(400, "this is not HTTP/1.0 or HTTP/1.1", code="bad_request")
    if (preflight := context.access.preflight(request)) is not None:
        return preflight
    if route is not None:
        exchange = request[EXCHANGE]
        exchange.tenant = context.access.check(request, route)
        if exchange.deadline is not None:
            exchange.deadline.check_key = partial(context.access.check, request, route)
        if route.access != "public":
            _check_state(context)
    elif isinstance(request.match_info.http_exception, web.HTTPNotFound):
        raise _nowhere(request)
    return await handler(request)


def _nowhere(request: web.Request) -> ApiError:
    """A client of OpenAI's is told which of those routes there are."""
    message, prefix = "there is nothing at this path", "/v1/"
    if request.path.startswith(prefix):
        known = (getattr(one.handler, "route", None) for one in request.app.router.routes())
        paths = {route.template for route in known if route is not None and route.path.startswith(prefix)}
        message += f"; there are {', '.join(sorted(paths))}"
    return ApiError(404, message, code="not_found")


def _check_state(context: Context) -> None:
    if context.state == "starting":
        raise unavailable("the model is being loaded; try again", "starting")
    if context.state == "stopping":
        raise unavailable("the server is shutting down", "stopping")
    if context.has_failed:
        raise unavailable("the engine has failed", "engine_failed")


# -- an answer -------------------------------------------------------------------------------------------------------
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
        return None, error.body()


async def answer(
    request: web.Request, opened: Opened[R], dialect: Dialect[R], stream: bool | None
) -> web.StreamResponse:
    """opened: the turns once all have begun; they end, at the latest, with this context. stream: the client's field."""
    if not stream:
        async with opened as turns:
            for turn in turns:
                async for _ in turn:  # as they come, so that the times between them mean something
                    pass
            results = [await turn.result() for turn in turns]
        return json_response(dialect.whole(turns, results))
    async with EventStream(request, dialect) as events, opened as turns:
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
    """`async with EventStream(request, dialect) as events: await events.send(...)`; it ends as that says, whatever
    happens.

    Headers are sent with the first event, so that an error before it still has its status. An exception that leaves the
    block, or the end of the request's time, becomes an error event; the exception is raised again to be logged and
    counted.
    """

    def __init__(self, request: web.Request, dialect: Dialect[Any]) -> None:
        self._request, self._dialect = request, dialect
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
            name, data = self._dialect.error(told)
            await self.send(data, name)
        if self._dialect.has_done:
            await self._put(DONE)

    def _told(self, error: BaseException | None) -> ApiError | None:
        if isinstance(error, asyncio.CancelledError):  # the time is over, or the client went away
            deadline = self._request[EXCHANGE].deadline
            return None if deadline is None else deadline.error
        if isinstance(error, Exception) and not isinstance(error, ReaderGone):
            return api_error(error)
        return None
