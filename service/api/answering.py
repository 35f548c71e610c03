"""One way to answer on every route that talks: whole, or as a stream, in the words of the route's dialect.

Knows no route and no session.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from kvstore.engine.outputs import Piece
from kvstore.engine.turns import Turn
from kvstore.service.api.edge import json_response
from kvstore.service.api.sse import EventStream

R = TypeVar("R")
Event = tuple[str | None, Any]  # its name, if the dialect names events, and its data


class Dialect(Protocol[R]):
    """One request of a route, and how its answer is said. R: the result of its turns.

    is_streamed: whether the client wants events. has_done: whether they end with [DONE].
    """

    has_done: bool

    @property
    def is_streamed(self) -> bool: ...

    def opened(self) -> AbstractAsyncContextManager[Sequence[Turn[R]]]:
        """Its turns, one for each prompt, once all have begun. They end, at the latest, with this context."""

    def first(self, turns: Sequence[Turn[R]]) -> Iterable[Event]:
        """Before any piece. A stream's headers go out with its first event: until then an error has its status."""

    def piece(self, turns: Sequence[Turn[R]], number: int, piece: Piece) -> Iterable[Event]:
        """Of the turn of this number."""

    def last(self, turns: Sequence[Turn[R]], results: Sequence[R]) -> Iterable[Event]: ...

    def whole(self, turns: Sequence[Turn[R]], results: Sequence[R]) -> msgspec.Struct: ...


async def answer(request: web.Request, dialect: Dialect[R]) -> web.StreamResponse:
    if not dialect.is_streamed:
        async with dialect.opened() as turns:
            for turn in turns:
                async for _ in turn:  # as they come, so that the times between them mean something
                    pass
            results = [await turn.result() for turn in turns]
        return json_response(dialect.whole(turns, results))
    async with EventStream(request, dialect.has_done) as stream, dialect.opened() as turns:
        for name, data in dialect.first(turns):
            await stream.send(data, name)
        async with aclosing(_together(turns)) as pieces:
            async for number, piece in pieces:
                for name, data in dialect.piece(turns, number, piece):
                    await stream.send(data, name)
        results = [await turn.result() for turn in turns]
        for name, data in dialect.last(turns, results):
            await stream.send(data, name)
    return stream.response


async def _together(turns: Sequence[Turn[R]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of all turns as they come, each with its turn's number."""
    if len(turns) == 1:  # without a task and a queue in between
        async for piece in turns[0]:
            yield 0, piece
        return
    items: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(turns) * 4)  # None: it has ended

    async def read(turn: Turn[R], number: int) -> None:
        try:
            async for piece in turn:
                await items.put((number, piece))
        except Exception as error:
            await items.put((number, error))
        else:
            await items.put((number, None))

    readers = [asyncio.create_task(read(turn, number)) for number, turn in enumerate(turns)]
    try:
        num_open = len(turns)
        while num_open:
            number, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
