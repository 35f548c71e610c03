"""A turn of a session over HTTP: POST /chat, in its own words, and what every route needs that asks for a turn.

That is its owner, whether it is a retry, and the answer as it comes. Knows no other route.
"""

import hmac
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from kvstore.engine.engine import Engine
from kvstore.engine.outputs import (
    AnswerEvent,
    AppliedEdit,
    Piece,
    RequestOutput,
    TextDelta,
    Timings,
    Usage,
    events_of,
    usage_of,
)
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.clearing import ContextManagement
from kvstore.engine.text.prompts import NO_OPTIONS, AnswerOptions, check_truncation, texts_of, without_spans
from kvstore.engine.turns import Hold, Turn, held
from kvstore.errors import KVStoreError, SessionBusyError, SessionExistsError, SessionNotFoundError, StoreError
from kvstore.service.api import schema
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, Exchange, Opened, answer, tenant_of
from kvstore.service.http.errors import ApiError, Route, bad_request, unavailable
from kvstore.sessions.record import Parent, SessionHead, SessionKey, TurnRecord

ID_BYTES = 16  # of a session's id, which is hexadecimal: it can stand in a command line
MAX_REQUEST_KEY = 255
NEW_SESSION = "X-New-Session"
ROUTE = "/chat"
DEFAULT_TEMPERATURE = 0.7  # where neither the request nor the model's authors name one
MAX_TTL_S = 100 * 365 * 86400
_WHOLE = "a session has whole turns; /v1/chat/completions goes on with a message"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a turn is asked to do.

    messages: without the system prompt; system: that, or None if none is given. is_new: this turn creates the session;
    fork_of: as a fork of another one. create: it does if there is none of this id. after_turn: the session must have
    this number of turns, or it is busy. request_key: the Idempotency-Key. ttl: seconds, or None for ever; unset leaves
    it as it is, and gives a new session the server's. pin_s: for how many seconds the session is pinned.
    """

    tenant: str
    session_id: str
    is_new: bool
    system: str | None
    messages: Sequence[Message]
    params: SamplingParams
    truncation: str = "auto"
    truncation_reuse: str = "reencode"
    request_key: str | None = None
    create: bool = False
    fork_of: Parent | None = None
    after_turn: int | None = None
    ttl: float | UnsetType | None = UNSET
    options: AnswerOptions = NO_OPTIONS
    pin_s: float | None = None

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A turn that has ended. number: None when it was stopped before anything was said, and so is not stored. message:
    the answer, with its calls and its reasoning.
    """

    session_id: str
    number: int | None
    message: Message
    finish_reason: str
    usage: Usage
    timings: Timings
    truncated_tokens: int
    created_s: float
    applied_edits: Sequence[AppliedEdit] = ()


def has_answer(turn: TurnRecord) -> bool:
    """A truncation and an edit have none, nor has a turn whose answer was forgotten."""
    return bool(turn.messages) and turn.messages[-1]["role"] == "assistant"


def result_of(session_id: str, turn: TurnRecord) -> TurnResult:
    message = turn.messages[-1] if has_answer(turn) else {"role": "assistant", "content": ""}
    return TurnResult(
        session_id, turn.number, message, turn.finish_reason, *usage_of(turn), turn.truncated_tokens, turn.created_s,
        _applied_edits(turn),
    )  # fmt: skip


def _applied_edits(turn: TurnRecord) -> list[AppliedEdit]:
    """What `kvstore.engine.sessions.window` has made counts of."""
    found = dict[str, dict[str, int]]()
    for kind, _, name in (name.rpartition(".") for name in turn.usage):
        if name in AppliedEdit.__struct_fields__:  # a later version may count more
            found.setdefault(kind, {})[name] = turn.usage[f"{kind}.{name}"]
    return [AppliedEdit(kind, **counts) for kind, counts in found.items()]


def open_turn(context: Context, exchange: Exchange, wanted: TurnRequest) -> Opened[TurnResult]:
    """Begin a turn, or find the stored one with the same Idempotency-Key.

    A turn that has not ended when the context exits is not stored. Raises ApiError 429 or 503 where there is no room,
    SessionBusyError, SessionNotFoundError, and what `ChatSession.begin` raises.
    """
    for text in (wanted.system or "", *texts_of(wanted.messages)):
        schema.check_chars_of(context, [text])
    return context.reading(partial(_session_turn, context, wanted), exchange)


async def _session_turn(context: Context, wanted: TurnRequest, turn: Turn[TurnResult]) -> TurnResult:
    with ExitStack() as place:
        try:
            place.enter_context(context.limits.admit(wanted.tenant, wanted.params.num_sequences))
        except ApiError:  # an unknown session is reported as unknown even where there is no room
            if not (wanted.is_new or wanted.create):
                await check_exists(context, wanted.key)
            raise
        record = await _answered(context, wanted)
        if record is None:
            async with held(context.claims, wanted.key, wanted.request_key, turn) as hold:
                record = await _answered(context, wanted)  # while this request waited
                if record is None:
                    return await _computed(context, wanted, turn, hold)
        result = result_of(wanted.session_id, record)
        turn.session_id, turn.number = result.session_id, result.number
        turn.answered(Piece(0, result.message["content"], (), events=events_of(result.message)))
        return result


async def _computed(context: Context, wanted: TurnRequest, turn: Turn[TurnResult], hold: Hold) -> TurnResult:
    engine, default_s = context.engine, context.options.ttl_s
    chat: ChatSession | None = None

    def opened() -> ChatSession:
        nonlocal chat
        chat = _open_chat(engine.engine, wanted)
        ttl = default_s if wanted.ttl is UNSET and default_s is not None and not chat.num_turns else wanted.ttl
        if ttl is not UNSET:
            hold.changes["ttl_s"] = ttl
        return chat

    def ended(chat: ChatSession, record: TurnRecord | None, output: RequestOutput) -> TurnResult:
        return _settled(context, wanted, chat, record, output, turn.is_stopped)

    recall = partial(context.recall.prompt_ids, wanted.tenant, "", options=wanted.options)
    try:
        return await engine.computed(
            turn, hold, opened, wanted.messages, wanted.params, ended, wanted.after_turn, wanted.options, recall,
            len(wanted.system or ""),
        )  # fmt: skip
    except StoreError:
        if chat is not None and chat.is_deleted:
            raise unknown_session(wanted.session_id) from None
        raise


def _settled(
    context: Context, wanted: TurnRequest, chat: ChatSession, record: TurnRecord | None, output: RequestOutput,
    is_stopped: bool,
) -> TurnResult:  # fmt: skip
    """What came of a turn. The answer is noted, for stateless clients to quote."""
    if record is None:
        if chat.is_deleted:
            raise unknown_session(wanted.session_id)
        if not is_stopped:
            raise unavailable("the request was ended by the server", "aborted", 1)
        message = output.choices[0].message
        return TurnResult(wanted.session_id, None, message, "abort", output.usage, output.timings, 0, time.time())
    with suppress(StoreError):  # the note only saves work
        context.recall.note(chat.tenant, "", chat.window.shown[:-1], output, chat.session_id, wanted.options)
        if chat.is_deleted:  # its deletion may have come before the note
            context.recall.forget_session(chat.tenant, chat.session_id)
    if wanted.pin_s is not None:
        with suppress(KVStoreError):  # the turn is stored without it
            context.engine.engine.admin.pin(wanted.session_id, wanted.pin_s, wanted.tenant)
    if not chat.is_deleted:
        context.engine.engine.chats.keep(chat)
    return result_of(wanted.session_id, record)


def _open_chat(engine: Engine, wanted: TurnRequest) -> ChatSession:
    key, truncation = wanted.key, (wanted.truncation, wanted.truncation_reuse)
    if wanted.is_new and wanted.request_key is not None and engine.sessions.exists(key):
        raise SessionExistsError("the session of this Idempotency-Key has another history", param="session_id")
    if wanted.is_new or (wanted.create and not engine.sessions.exists(key)):
        engine.chats.drop(key)  # left over from a first turn that failed
        if wanted.fork_of is None:
            return engine.chat(wanted.session_id, wanted.tenant, wanted.system, *truncation, is_new=True)
        fork = engine.sessions.version(wanted.fork_of, key)
        _check_system(wanted, fork.draft)
        return engine.chats.open(key, None, *truncation, is_new=True, fork=fork)
    head = find_session(engine, key)
    _check_system(wanted, head)
    if wanted.after_turn not in (None, head.num_turns):
        raise SessionBusyError(f"session {wanted.session_id} has gone on since turn {wanted.after_turn}")
    known = engine.chats.get(key, head)
    if known is not None:
        known.set_truncation(*truncation)
        return known
    engine.chats.drop(key)  # another server has stored turns since
    chat = engine.chat(wanted.session_id, wanted.tenant, None, *truncation)
    if chat.num_turns < head.num_turns:  # it was deleted just now
        raise unknown_session(wanted.session_id)
    return chat


def _check_system(wanted: TurnRequest, head: SessionHead) -> None:
    """Raises ApiError 400 for another system prompt than the session's."""
    said = "".join(message["content"] for message in head.system)
    if wanted.system not in (None, said):
        raise bad_request(
            "system", "system is not the session's; leave it out, or begin a new session", "system_mismatch"
        )


# -- sessions --------------------------------------------------------------------------------------------------------
def find_session(engine: Engine, key: SessionKey) -> SessionHead:
    """Raises SessionNotFoundError, also for another tenant's session, which has another key."""
    head = engine.sessions.head(key)
    if head is None:
        raise unknown_session(key.session_id)
    return head


async def check_exists(context: Context, key: SessionKey) -> None:
    """Like `find_session`, but a session counts while its first turn is creating it."""
    try:
        await context.engine.call(find_session, context.engine.engine, key)
    except SessionNotFoundError:
        if not context.is_begun(key):
            raise


def unknown_session(session_id: str) -> SessionNotFoundError:
    return SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")


async def delete(context: Context, key: SessionKey) -> int:
    """Delete the session, its running turn, and what stateless clients could quote of it. Returns its number of
    blocks.
    """
    delete = context.engine.engine.admin.delete_session
    return await context.engine.call_that_waits(delete, key.session_id, key.tenant)


# -- requests --------------------------------------------------------------------------------------------------------
def request_key_of(request: web.Request) -> str | None:
    """The Idempotency-Key. Raises ApiError 400."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not (1 <= len(key) <= MAX_REQUEST_KEY and key.isascii() and key.isprintable()):
        raise bad_request("Idempotency-Key", f"Idempotency-Key has 1 to {MAX_REQUEST_KEY} printable ASCII characters")
    return key


async def new_session_id(context: Context, request: web.Request, purpose: str) -> str:
    """A random id; with an Idempotency-Key, an id that only this request leads to. Where the front of a fleet chooses
    it, so that it finds the session's replica again, the id that it gave.
    """
    if context.options.takes_session_names and NEW_SESSION in request.headers:
        return request.headers[NEW_SESSION]
    request_key = request_key_of(request)
    if request_key is None:
        return secrets.token_hex(ID_BYTES)
    root = await context.engine.call(partial(context.engine.engine.facts.root, tenant_of(request)))
    named = f"session of a request\0{purpose}\0{request_key}".encode()
    return hmac.digest(root, named, "sha256")[:ID_BYTES].hex()


async def _answered(context: Context, wanted: TurnRequest) -> TurnRecord | None:
    """The stored turn of the same request. Raises ApiError 400 when that request had other content."""
    if wanted.request_key is None:
        return None
    engine = context.engine.engine
    record = await context.engine.call(engine.sessions.turn_of_request, wanted.key, wanted.request_key)
    if record is None:
        return None
    kept = record.messages[:-1] if has_answer(record) else record.messages
    said = [message for message in kept if message["role"] != "system"]
    system = "".join(message["content"] for message in record.system)
    brings_system = wanted.is_new and wanted.fork_of is None
    if said != without_spans(wanted.messages) or (brings_system and system != (wanted.system or "")):
        raise said_else()
    return record


def said_else() -> ApiError:
    why = "a request with this Idempotency-Key said something else; take a new key"
    return bad_request("Idempotency-Key", why, "idempotency_mismatch")


# -- POST /chat --------------------------------------------------------------------------------------------------------
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
    context_management: ContextManagement | None = None
    ttl: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | UnsetType | None = UNSET

    REFUSED: ClassVar[Mapping[str, str]] = {"continue_final_message": _WHOLE}


class MessageOut(msgspec.Struct, omit_defaults=True):
    """tool_calls, reasoning_content: of an answer; tool_call_id: of a tool's result. id: as edits name it."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    id: str | None = None


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
    timings: Timings
    truncated_tokens: int
    context_management: schema.AppliedEdits | UnsetType = UNSET


def turn_id(session_id: str, turn: int | None) -> str:
    return f"turn-{session_id}-{0 if turn is None else turn}"


def chat_answer(result: TurnResult, wanted: TurnRequest) -> ChatAnswer:
    session_id = None if wanted.is_new and result.number is None else result.session_id
    return ChatAnswer(
        id=turn_id(result.session_id, result.number),
        session_id=session_id,
        turn=result.number,
        message=message_out(result.message),
        finish_reason=result.finish_reason,
        usage=schema.usage_object(result.usage),
        timings=result.timings,
        truncated_tokens=result.truncated_tokens,
        context_management=schema.edits_in(wanted.options, result.applied_edits),
    )


Turns = Sequence[Turn[TurnResult]]


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
        yield None, {**msgspec.to_builtins(chat_answer(results[0], self.wanted)), "delta": {}}

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> ChatAnswer:
        return chat_answer(results[0], self.wanted)

    def _event(self, turns: Turns, delta: dict[str, Any]) -> Event:
        session_id, number = self.wanted.session_id, turns[0].number
        name = turn_id(session_id, number)
        return None, {
            "id": name, "session_id": session_id, "turn": number, "finish_reason": None, "delta": delta
        }  # fmt: skip


def message_out(message: Message, id: str | None = None) -> MessageOut:
    beside = {name: message.get(name) for name in ("tool_calls", "tool_call_id", "reasoning_content")}
    return MessageOut(message["role"], message["content"], **beside, id=id)


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
    if body.priority:
        raise bad_request("priority", "a session's turns have no priority", "unsupported")
    truncation, reuse = body.truncation or "auto", body.truncation_reuse or "reencode"
    check_truncation(truncation, reuse)
    system, said = said_of(body)
    defaults = {"temperature": DEFAULT_TEMPERATURE, **context.engine.engine.facts.sampling_defaults}
    params = schema.sampling_params(body, defaults)
    tenant, request_key = tenant_of(request), request_key_of(request)
    if body.fork_of is not None and (body.session_id is not None or body.create):
        raise bad_request("fork_of", "a fork gets an id of its own, which the answer names: leave session_id out")
    parent = None
    if body.fork_of is not None:
        parent = Parent(SessionKey(tenant, body.fork_of.session_id).session_id, body.fork_of.turn, is_version=True)
    if body.session_id is None:
        session_id = await new_session_id(context, request, ROUTE)
    else:
        session_id = SessionKey(tenant, body.session_id).session_id  # refuses what is no id
    options = body.options.with_clearing(body.context_management, is_session=True)
    if body.thinking is not None:
        options = replace(options, thinking=body.thinking)
    given = [*(body.messages or ()), body.message]
    contents = [one.content for one in given if isinstance(one, schema.MessageIn)]
    return TurnRequest(
        tenant, session_id, body.session_id is None, system, said, params, truncation, reuse, request_key,
        create=bool(body.create), fork_of=parent, ttl=body.ttl, options=options,
        pin_s=schema.pin_s_of(body.prompt_cache_options, schema.breakpoints_in(contents)),
    )  # fmt: skip


ROUTES = (Route("POST", ROUTE, chat, "user", "One turn of a session.", ChatBody, ChatAnswer, "sessions"),)
