"""One way to answer on every route that talks: whole, or as a stream of events, in the words of the route's dialect.

Once a stream's headers are sent, errors are events. Knows no route and no session.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ClassVar, Protocol, Self, TypeVar

import msgspec
from aiohttp import web

from kvstore.engine.outputs import Piece
from kvstore.engine.turns import Turn
from kvstore.service.api.context import EXCHANGE
from kvstore.service.http.errors import ApiError, ReaderGone, api_error, json_response

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not hold events back
}
DONE = b"data: [DONE]\n\n"
R = TypeVar("R")
Event = tuple[str | None, Any]  # its name, if the dialect names events, and its data


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
