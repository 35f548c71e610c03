"""POST /chat: one turn of a session, streamed or not. Does not know how `turns` runs it."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import UNSET

from kvstore.engine.outputs import Piece
from kvstore.engine.text.prompts import check_truncation
from kvstore.engine.turns import Turn
from kvstore.service.api.answering import Event, answer
from kvstore.service.api.context import Context, tenant_of
from kvstore.service.api.edge import accept
from kvstore.service.api.schema import sampling_params
from kvstore.service.api.sessions.chat_schema import ChatAnswer, ChatBody, LastEvent, chat_answer, said_of, turn_id
from kvstore.service.api.sessions.turns import (
    TurnRequest,
    TurnResult,
    given_session_id,
    new_session_id,
    open_turn,
    request_key_of,
)
from kvstore.service.http.errors import bad_request
from kvstore.service.http.routes import Route
from kvstore.sessions.record import SessionKey

ROUTE = "/chat"
DEFAULT_TEMPERATURE = 0.7  # where neither the request nor the model's authors name one
Turns = Sequence[Turn[TurnResult]]


@dataclass(slots=True)
class ChatDialect:
    """One turn of a session, as events with `delta`s, the last of which has the whole answer again."""

    context: Context
    wanted: TurnRequest
    is_streamed: bool
    has_done: bool = True

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Turns]:
        async with open_turn(self.context, self.wanted) as turn:
            yield [turn]

    def first(self, turns: Turns) -> Iterable[Event]:
        yield self._event(turns, {"role": "assistant", "content": ""})

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        if piece.text:
            yield self._event(turns, {"content": piece.text})

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        yield None, chat_answer(results[0], self.wanted.is_new, LastEvent)

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> ChatAnswer:
        return chat_answer(results[0], self.wanted.is_new)

    def _event(self, turns: Turns, delta: dict[str, Any]) -> Event:
        session_id, number = self.wanted.session_id, turns[0].number
        name = turn_id(session_id, number)
        return None, {
            "id": name, "session_id": session_id, "turn": number, "finish_reason": None, "delta": delta
        }  # fmt: skip


async def chat(request: web.Request) -> web.StreamResponse:
    context, body = await accept(request, ChatBody)
    return await answer(request, ChatDialect(context, await _wanted(context, request, body), bool(body.stream)))


async def _wanted(context: Context, request: web.Request, body: ChatBody) -> TurnRequest:
    if body.cache_salt is not None:
        raise bad_request("cache_salt", "a session has no cache_salt", "unsupported")
    truncation, reuse = body.truncation or "auto", body.truncation_reuse or "reencode"
    check_truncation(truncation, reuse)
    system, said = said_of(body)
    defaults = {"temperature": DEFAULT_TEMPERATURE, **context.engine.engine.facts.sampling_defaults}
    params = sampling_params(body, defaults)
    tenant, request_key, is_new = tenant_of(request), request_key_of(request), body.session_id is None
    if body.session_id is None:
        given = given_session_id(context, request)
        session_id = await new_session_id(context, tenant, request_key, ROUTE, given)
    else:
        session_id = SessionKey(tenant, body.session_id).session_id  # refuses what is no id
    default_s = context.options.ttl_s
    ttl = default_s if body.ttl is UNSET and is_new and default_s is not None else body.ttl
    return TurnRequest(tenant, session_id, is_new, system, said, params, ROUTE, truncation, reuse, request_key, ttl=ttl)


ROUTES = (Route("POST", ROUTE, chat, "user", "One turn of a session.", ChatBody, ChatAnswer, "sessions"),)
