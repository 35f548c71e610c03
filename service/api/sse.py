"""Server-sent events: one answer as a stream of JSON, with errors as events once the headers are sent.

Does not know what the events mean.
"""

import asyncio
from contextlib import suppress
from typing import Any, Self

import msgspec
from aiohttp import web

from kvstore.service.api.context import EXCHANGE
from kvstore.service.http.errors import ApiError, api_error

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not hold events back
}
DONE = b"data: [DONE]\n\n"
LAST_WORDS_S = 1.0  # for a reader to receive the error event of an abandoned stream


class ReaderGone(ConnectionError):
    """The reader is gone: the connection was closed, or dropped because its reader received nothing for too long."""


class EventStream:
    """`async with EventStream(request) as events: await events.send(...)`; it ends with [DONE], whatever happens.

    Headers are sent with the first event, so that an error before it still has its status. An exception that leaves the
    block, or the end of the request's time, becomes an error event; the exception is raised again to be logged and
    counted. If the block does not end in time, `abandon` sends the last event for it. done: whether "data: [DONE]"
    closes the stream.
    """

    def __init__(self, request: web.Request, done: bool = True) -> None:
        self._request = request
        self._done = done
        self._is_over = False
        self.response = web.StreamResponse(headers=HEADERS)

    async def send(self, data: Any, event: str | None = None) -> None:
        """Send one event. Returns when the reader, or at least the kernel, has accepted it. Raises ReaderGone."""
        name = b"" if event is None else b"event: " + event.encode() + b"\n"
        await self._write(name + b"data: " + msgspec.json.encode(data) + b"\n\n")

    async def abandon(self, error: ApiError) -> None:
        """End the stream with this error, unless it has ended. Later events are refused."""
        if self._is_over:
            return
        self._is_over = True
        event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
        with suppress(ReaderGone, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._put(event + (DONE if self._done else b""))

    async def _write(self, data: bytes) -> None:
        if self._is_over:
            raise ReaderGone("the stream has been ended")
        await self._put(data)

    async def _put(self, data: bytes) -> None:
        try:
            if not self.response.prepared:
                exchange = self._request[EXCHANGE]
                exchange.response, exchange.abandon = self.response, self.abandon
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
            await self.send(told.body())
        if self._done:
            await self._write(DONE)
        self._is_over = True

    def _told(self, error: BaseException | None) -> ApiError | None:
        if isinstance(error, asyncio.CancelledError):  # the time is over, or the client went away
            deadline = self._request[EXCHANGE].deadline
            return None if deadline is None else deadline.error
        if isinstance(error, Exception) and not isinstance(error, ReaderGone):
            return api_error(error)
        return None
