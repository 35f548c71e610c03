"""Server-sent events: one answer as a stream of JSON, with errors as events once the headers are out.

Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from service.context import EXCHANGE
from service.errors import ApiError, api_error

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy must not hold events back
}
DONE = b"data: [DONE]\n\n"


class ReaderGone(ConnectionError):
    """Nobody reads any more: the connection was closed, or dropped because its reader took nothing for too long."""


class EventStream:
    """`async with EventStream(request) as events: await events.send(...)`; it ends with [DONE], whatever happens.

    Headers go out with the first event, so that an error before it still has its status. An exception that leaves the
    block, and the end of the request's time, become an error event; the exception goes on to be logged and counted.
    done: whether "data: [DONE]" closes the stream.
    """

    def __init__(self, request: web.Request, done: bool = True) -> None:
        self._request = request
        self._done = done
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def begun(self) -> bool:
        """Whether the headers are out."""
        return self.response.prepared

    async def send(self, data: Any, event: str | None = None) -> None:
        """One event. Returns when the reader has taken it, or at least the kernel. Raises ReaderGone."""
        name = b"" if event is None else b"event: " + event.encode() + b"\n"
        await self._write(name + b"data: " + msgspec.json.encode(data) + b"\n\n")

    async def fail(self, error: Exception, event: str | None = None) -> None:
        """The error as an event."""
        await self.send(api_error(error).body(), event)

    async def _write(self, data: bytes) -> None:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told = self._told(error)
        if error is not None and (told is None or not self.begun):
            return  # the client is gone, or it gets an answer with a status
        if told is not None:
            await self.fail(told)
        if self._done:
            await self._write(DONE)

    def _told(self, error: BaseException | None) -> ApiError | None:
        if isinstance(error, asyncio.CancelledError):  # the time is over, or the client went away
            deadline = self._request[EXCHANGE].deadline
            return None if deadline is None else deadline.error
        if isinstance(error, Exception) and not isinstance(error, ReaderGone):
            return api_error(error)
        return None
