"""POST /chat: one turn of a session, streamed or not. Does not know how `turns` runs it."""

from aiohttp import web
from msgspec import UNSET

from kvstore.engine.text.prompts import check_truncation
from kvstore.service.api.context import Context, context_of, tenant_of
from kvstore.service.api.edge import check_model, json_response
from kvstore.service.api.schema import read_body, sampling_params
from kvstore.service.api.sessions.chat_schema import ChatAnswer, ChatBody, LastEvent, chat_answer, said_of, turn_id
from kvstore.service.api.sessions.turns import (
    TurnRequest,
    given_session_id,
    new_session_id,
    open_turn,
    request_key_of,
)
from kvstore.service.api.sse import EventStream
from kvstore.service.http.errors import bad_request
from kvstore.service.http.routes import Route
from kvstore.sessions.record import SessionKey

ROUTE = "/chat"
DEFAULT_TEMPERATURE = 0.7  # where neither the request nor the model's authors name one


async def chat(request: web.Request) -> web.StreamResponse:
    context, body = context_of(request), await read_body(request, ChatBody)
    check_model(context, body.model)
    wanted = await _wanted(context, request, body)
    if body.stream:
        return await _streamed(request, context, wanted)
    async with open_turn(context, wanted) as turn:
        async for _ in turn:
            pass
        result = await turn.result()
    return json_response(chat_answer(result, wanted.is_new))


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


async def _streamed(request: web.Request, context: Context, wanted: TurnRequest) -> web.StreamResponse:
    async with EventStream(request) as events, open_turn(context, wanted) as turn:
        name = turn_id(wanted.session_id, turn.number)
        event = {"id": name, "session_id": wanted.session_id, "turn": turn.number, "finish_reason": None}
        await events.send({**event, "delta": {"role": "assistant", "content": ""}})
        async for piece in turn:
            if piece.text:
                await events.send({**event, "delta": {"content": piece.text}})
        result = await turn.result()
        await events.send(chat_answer(result, wanted.is_new, LastEvent))
    return events.response


ROUTES = (Route("POST", ROUTE, chat, "user", "One turn of a session.", ChatBody, ChatAnswer, "sessions"),)
