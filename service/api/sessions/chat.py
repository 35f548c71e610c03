"""POST /chat: one turn of a session, streamed or not, its body and its answer. Does not know how `turns` runs it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from kvstore.engine.outputs import AnswerEvent, Piece, TextDelta
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import check_truncation
from kvstore.engine.turns import Turn
from kvstore.service.api import schema
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, answer, tenant_of
from kvstore.service.api.sessions.turns import (
    TurnRequest,
    TurnResult,
    new_session_id,
    open_turn,
    request_key_of,
)
from kvstore.service.http.errors import Route, bad_request
from kvstore.sessions.record import Parent, SessionKey

ROUTE = "/chat"
DEFAULT_TEMPERATURE = 0.7  # where neither the request nor the model's authors name one
MAX_TTL_S = 100 * 365 * 86400
Turns = Sequence[Turn[TurnResult]]


_WHOLE = "a session has whole turns; /v1/chat/completions goes on with a message"


class ForkedTurn(msgspec.Struct):
    """turn: the last one that stays of this session; 0 for none."""

    session_id: str
    turn: Annotated[int, Meta(ge=0, le=2**31)]


class ChatBody(schema.Talking, kw_only=True):
    """A turn. message, or messages: results of tools, or, in a new session, a history. ttl: seconds from its last turn;
    null: for ever.

    Without session_id the turn begins a session; with create, also where there is none of that id; with fork_of, one
    that says again what followed a turn of another, and that there is none of if the turn fails. truncation: "auto"
    or "disabled"; truncation_reuse: "reencode" or "exact"; thinking: "keep" or "drop".
    """

    model: str | None = None
    session_id: str | None = None
    create: bool | None = None
    fork_of: ForkedTurn | None = None
    message: str | schema.MessageIn | None = None
    messages: schema.Messages | None = None
    system: str | None = None
    truncation: str | None = None
    truncation_reuse: str | None = None
    thinking: str | None = None
    ttl: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | UnsetType | None = UNSET

    REFUSED: ClassVar[Mapping[str, str]] = {"continue_final_message": _WHOLE}


class MessageOut(msgspec.Struct, omit_defaults=True):
    """tool_calls, reasoning_content: of an answer; tool_call_id: of a tool's result."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatAnswer(msgspec.Struct):
    """A turn. turn, and the session_id of a new session, are null for a turn that was stopped before it began: it is
    not stored.
    """

    id: str
    session_id: str | None
    turn: int | None
    message: MessageOut
    finish_reason: str
    usage: schema.UsageObject
    timings: schema.TimingsObject
    truncated_tokens: int


class LastEvent(ChatAnswer):
    """The last event of a stream: the whole answer again."""

    delta: dict[str, Any] = {}


def turn_id(session_id: str, turn: int | None) -> str:
    return f"turn-{session_id}-{0 if turn is None else turn}"


def chat_answer(result: TurnResult, is_new: bool, kind: type[ChatAnswer] = ChatAnswer) -> ChatAnswer:
    session_id = None if is_new and result.number is None else result.session_id
    return kind(
        id=turn_id(result.session_id, result.number),
        session_id=session_id,
        turn=result.number,
        message=message_out(result.message),
        finish_reason=result.finish_reason,
        usage=schema.usage_object(result.usage),
        timings=schema.timings_object(result.timings),
        truncated_tokens=result.truncated_tokens,
    )


@dataclass(slots=True)
class ChatDialect(Dialect[TurnResult]):
    """One turn of a session, as events with `delta`s, the last of which has the whole answer again."""

    wanted: TurnRequest

    def first(self, turns: Turns) -> Iterable[Event]:
        yield self._event(turns, {"role": "assistant", "content": ""})

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        for event in piece.parts:
            if (delta := delta_of(event)) is not None:
                yield self._event(turns, delta)

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        yield None, chat_answer(results[0], self.wanted.begins_session, LastEvent)

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> ChatAnswer:
        return chat_answer(results[0], self.wanted.begins_session)

    def _event(self, turns: Turns, delta: dict[str, Any]) -> Event:
        session_id, number = self.wanted.session_id, turns[0].number
        name = turn_id(session_id, number)
        return None, {
            "id": name, "session_id": session_id, "turn": number, "finish_reason": None, "delta": delta
        }  # fmt: skip


def message_out(message: Message) -> MessageOut:
    beside = (message.get(name) for name in ("tool_calls", "tool_call_id", "reasoning_content"))
    return MessageOut(message["role"], message["content"], *beside)


def delta_of(event: AnswerEvent) -> dict[str, Any] | None:
    """As in chat completions. None for what is not said: a call that has begun, or was cut off."""
    if isinstance(event, TextDelta):
        return {"content" if event.kind == "content" else "reasoning_content": event.text}
    if event.state != "whole":
        return None
    function = {"name": event.name, "arguments": event.arguments}
    return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}


async def chat(request: web.Request) -> web.StreamResponse:
    context, body = await schema.accept(request, ChatBody)
    wanted = await _wanted(context, request, body)
    return await answer(request, open_turn(context, request[EXCHANGE], wanted), ChatDialect(wanted), body.stream)


def said_of(body: ChatBody) -> tuple[str | None, list[Message]]:
    """System prompt, if one is named, and the messages after it. Raises ApiError 400."""
    if body.message is None and body.messages is None:
        raise bad_request("message", "give message or messages", "missing")
    if body.message is not None and body.messages is not None:
        raise bad_request("messages", "give message or messages, not both", "invalid_value")
    if body.messages is not None:
        said = schema.messages_of(body.messages)
    elif isinstance(body.message, str):
        said = [{"role": "user", "content": body.message}]
    else:
        assert body.message is not None
        said = [schema.message_of(body.message, "message")]
    if said[0]["role"] != "system":
        return body.system, said
    first = said[0]["content"]
    if body.system is not None and body.system != first:
        raise bad_request("system", "system and the first of messages are two system prompts; give one")
    return first, said[1:]


async def _wanted(context: Context, request: web.Request, body: ChatBody) -> TurnRequest:
    if body.cache_salt is not None:
        raise bad_request("cache_salt", "a session has no cache_salt", "unsupported")
    truncation, reuse = body.truncation or "auto", body.truncation_reuse or "reencode"
    check_truncation(truncation, reuse)
    system, said = said_of(body)
    defaults = {"temperature": DEFAULT_TEMPERATURE, **context.engine.engine.facts.sampling_defaults}
    params = schema.sampling_params(body, defaults)
    tenant, request_key = tenant_of(request), request_key_of(request)
    is_new = body.session_id is None and body.fork_of is None
    if body.fork_of is not None and (body.session_id is not None or body.create):
        raise bad_request("fork_of", "a fork gets an id of its own, which the answer names: leave session_id out")
    parent = None
    if body.fork_of is not None:
        parent = Parent(SessionKey(tenant, body.fork_of.session_id).session_id, body.fork_of.turn, is_version=True)
    if body.session_id is None:
        session_id = await new_session_id(context, request, ROUTE)
    else:
        session_id = SessionKey(tenant, body.session_id).session_id  # refuses what is no id
    options = body.options
    if body.thinking is not None:
        options = replace(options, thinking=body.thinking)
    return TurnRequest(
        tenant, session_id, is_new, system, said, params, truncation, reuse, request_key, bool(body.create),
        fork_of=parent, ttl=body.ttl, options=options,
    )  # fmt: skip


ROUTES = (Route("POST", ROUTE, chat, "user", "One turn of a session.", ChatBody, ChatAnswer, "sessions"),)
