"""Routes of sessions: list, import, show, delete, label, fork, prefetch, pin, truncate, edit, stop. Each tenant sees
its own.

Another tenant's session gets the same answer as one that does not exist.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta
from msgspec.structs import replace

from kvstore.engine.admin import MAX_PIN_S
from kvstore.engine.outputs import EditResult, Timings
from kvstore.engine.sessions.edits import Directives, Place, message_id
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import texts_of, without_spans
from kvstore.engine.turns import ending
from kvstore.errors import ContextLengthError, SessionNotFoundError, StoreError
from kvstore.service.api import schema
from kvstore.service.api.exchange import Context, context_of, tenant_of
from kvstore.service.api.schema import UsageObject, read_body, read_query, usage_object
from kvstore.service.api.sessions import turns
from kvstore.service.api.sessions.turns import MessageOut, message_out
from kvstore.service.http.errors import Route, bad_request, json_response
from kvstore.sessions.record import SessionHead, SessionKey, TurnRecord, transcript

T = TypeVar("T")

MAX_TURNS = 2**31
MAX_TITLE_CHARS = 200
Title = Annotated[str, Meta(min_length=1, max_length=MAX_TITLE_CHARS)]
Listed = Annotated[int, Meta(ge=1, le=1000)]


# -- queries, bodies and answers -------------------------------------------------------------------------------------
class SessionsQuery(msgspec.Struct):
    """after: `next` of the page before. personal: only those that are a person's (true), or are not (false)."""

    limit: Listed = 100
    after: str | None = None
    personal: bool | None = None


class TurnsQuery(msgspec.Struct):
    """The turns after `turns_after`, at most `limit` of them."""

    turns_after: Annotated[int, Meta(ge=0, le=MAX_TURNS)] = 0
    limit: Listed = 100


class ImportBody(msgspec.Struct):
    """A conversation from elsewhere: messages up to an answer, the system prompt first if there is one."""

    messages: schema.Messages
    title: Title | None = None
    personal: bool | None = None


class LabelBody(msgspec.Struct):
    """title: what it is called. personal: whether it is a person's. What is not given stays."""

    title: Title | None = None
    personal: bool | None = None


class ForkBody(msgspec.Struct):
    """turn: the last turn that the fork keeps; all turns if it is not given."""

    REFUSED: ClassVar[dict[str, str]] = {"session_id": "a fork gets an id of its own, which the answer names"}
    turn: Annotated[int, Meta(ge=1, le=MAX_TURNS)] | None = None


class PinBody(msgspec.Struct):
    """ttl: for how many seconds from now; 0 ends it."""

    ttl: Annotated[float, Meta(ge=0, le=MAX_PIN_S)]


class TruncateBody(msgspec.Struct):
    """turns: how many of the last ones stay in the window."""

    turns: Annotated[int, Meta(ge=0, le=MAX_TURNS)]


class EditBody(msgspec.Struct):
    """edits: messages to remove, or to give another content. reuse: of the KV behind the first of them: "exact" (it is
    computed again), "reencode" (it is kept, and remembers what it has read), "forget" (it is deleted, with what was
    there). expected_turn: how many turns the session has; else nothing is changed.
    """

    edits: Directives
    reuse: str = "exact"
    expected_turn: Annotated[int, Meta(ge=1, le=MAX_TURNS)] | None = None


class EmptyBody(msgspec.Struct):
    """An empty body."""


class ParentOut(msgspec.Struct):
    """The session that this one is a fork of; it may be deleted by now. version: it says again what followed that
    turn.
    """

    session_id: str
    turn: int
    version: bool


class SessionInfo(msgspec.Struct):
    """tokens: in the window. created_at, updated_at, expires_at, pinned_until: seconds since the epoch. personal: a
    person's conversation, as a client has said.
    """

    id: str
    title: str
    turns: int
    created_at: int
    updated_at: int
    tokens: int
    model: str
    expires_at: int | None
    parent: ParentOut | None
    running: bool
    pinned_until: int | None
    personal: bool


class SessionList(msgspec.Struct):
    """Most recently used first. last_id: pass it as `after` to get the next page."""

    object: str
    data: list[SessionInfo]
    has_more: bool
    last_id: str | None


class EditOut(msgspec.Struct):
    """id: of the message. message: what stands there instead; null: nothing."""

    id: str
    message: MessageOut | None


class TurnOut(msgspec.Struct):
    """messages: what the turn added, as it was said; none for a truncation by request and for an edit. edits: what that
    one changed, unless it was to be forgotten.
    """

    turn: int
    messages: list[MessageOut]
    finish_reason: str
    usage: UsageObject
    timings: Timings
    truncated_tokens: int
    created_at: int
    edits: list[EditOut]


class SessionOut(SessionInfo):
    """system: its system prompt. messages: what is left of this page of turns, after all edits; turns_data: the turns.
    has_more: whether another page follows.
    """

    system: MessageOut | None
    messages: list[MessageOut]
    turns_data: list[TurnOut]
    has_more: bool


class Deleted(msgspec.Struct):
    """blocks: KV blocks that only this session had."""

    id: str
    deleted: bool
    blocks: int


class Prefetching(msgspec.Struct):
    id: str
    prefetching: bool


class Pinned(msgspec.Struct):
    """pinned_until: seconds since the epoch; null when there is no pin."""

    id: str
    pinned: bool
    pinned_until: int | None


class Truncated(msgspec.Struct):
    """turn: the entry stored for it; null when there was nothing to remove."""

    id: str
    turn: int | None
    truncated_tokens: int


class Edited(msgspec.Struct):
    """turn: the entry stored for it. reuse: what was done: "exact" also where there was no KV to keep. tokens: in the
    window now; reencoded_tokens: of these, whose KV was kept behind the edit.
    """

    id: str
    turn: int
    reuse: str
    tokens: int
    reencoded_tokens: int


class Stopped(msgspec.Struct):
    """stopped: whether a turn ran."""

    id: str
    stopped: bool


def _info(context: Context, head: SessionHead) -> SessionInfo:
    is_running = context.claims.on(head.key) is not None
    pinned_until_s = context.engine.engine.admin.pinned_until(head.key)
    origin = head.parent
    parent = None if origin is None else ParentOut(origin.session_id, origin.turn, origin.is_version)
    return SessionInfo(
        head.key.session_id, head.title, head.num_turns, int(head.created_s), int(head.updated_s), head.num_tokens,
        head.model, None if head.expires_s is None else int(head.expires_s), parent, is_running,
        None if pinned_until_s is None else int(pinned_until_s), head.is_personal,
    )  # fmt: skip


def turn_out(session_id: str, record: TurnRecord) -> TurnOut:
    result = turns.result_of(session_id, record)
    return TurnOut(
        record.number, messages_out(transcript([replace(record, edits=())])), result.finish_reason,
        usage_object(result.usage), result.timings, result.truncated_tokens, int(result.created_s),
        [EditOut(message_id(one.place), message_out(one.message) if one.message else None) for one in record.edits],
    )  # fmt: skip


def messages_out(said: Mapping[Place, Message]) -> list[MessageOut]:
    """Without the system prompt."""
    return [message_out(one, message_id(place)) for place, one in said.items() if one["role"] != "system"]


def key_of(request: web.Request) -> SessionKey:
    """Tenant and id of the session. Raises RequestError for an invalid id."""
    return SessionKey(tenant_of(request), request.match_info["id"])


# -- looking ---------------------------------------------------------------------------------------------------------
async def list_sessions(request: web.Request) -> web.Response:
    context, tenant, page = context_of(request), tenant_of(request), read_query(request, SessionsQuery)
    listed = context.engine.engine.admin.list_sessions
    heads = await context.engine.call(listed, tenant, page.limit + 1, page.after or None, page.personal)
    shown = heads[: page.limit]
    data = [_info(context, head) for head in shown]
    return json_response(SessionList("list", data, len(heads) > page.limit, shown[-1].cursor if shown else None))


async def show(request: web.Request) -> web.Response:
    context, key, page = context_of(request), key_of(request), read_query(request, TurnsQuery)
    try:
        head, records, said = await context.engine.call(_read, context, key, page.turns_after, page.limit)
    except SessionNotFoundError:
        if not context.is_begun(key):
            raise
        head, records, said = SessionHead(key, 0, time.time(), time.time(), model=context.model_name), [], {}
    return json_response(_shown(_info(context, head), head, records, said))


def _read(
    context: Context, key: SessionKey, after: int, limit: int
) -> tuple[SessionHead, Sequence[TurnRecord], dict[Place, Message]]:
    """A page of turns, and what is left of their messages: later turns may be edits of these."""
    engine = context.engine.engine
    head = turns.find_session(engine, key)
    records = engine.sessions.turns(key, after, min(limit, head.num_turns - after))
    if records is None:
        raise turns.unknown_session(key.session_id)  # deleted meanwhile
    later = (engine.sessions.turns(key, first, limit) for first in range(after + limit, head.num_turns, limit))
    edits = [record for page in later for record in page or () if record.edits]
    said, last = transcript([*records, *edits]), after + len(records)
    return head, records, {place: message for place, message in said.items() if after < place[0] <= last}


def _shown(
    info: SessionInfo, head: SessionHead, records: Sequence[TurnRecord], said: Mapping[Place, Message]
) -> SessionOut:
    return SessionOut(
        **msgspec.structs.asdict(info),
        system=message_out(head.system[0]) if head.system else None,
        messages=messages_out(said),
        turns_data=[turn_out(head.key.session_id, record) for record in records],
        has_more=bool(records) and records[-1].number < head.num_turns,
    )


# -- changing --------------------------------------------------------------------------------------------------------
async def import_session(request: web.Request) -> web.Response:
    """Nothing is computed: the next turn reads the whole history."""
    context, body = context_of(request), await read_body(request, ImportBody)
    said = without_spans(schema.messages_of(body.messages))
    schema.check_chars_of(context, texts_of(said))
    key = SessionKey(tenant_of(request), await turns.new_session_id(context, request, "/sessions"))
    head = await context.engine.call(_import, context, key, _exchanges(said), body, turns.request_key_of(request))
    return json_response(_info(context, head))


def _exchanges(said: Sequence[Message]) -> list[list[Message]]:
    """The messages of each turn, which ends with an answer. Raises ApiError 400 where the last one has none."""
    exchanges: list[list[Message]] = [[]]
    for number, message in enumerate(said):
        if number and message["role"] == "system":
            raise bad_request(f"messages[{number}].role", "only the first message may be a system prompt")
        exchanges[-1].append(message)
        if message["role"] == "assistant":
            exchanges.append([])
    if exchanges.pop():
        raise bad_request("messages", "the last of messages must be an answer; send what follows it to /chat")
    return exchanges


def _import(
    context: Context, key: SessionKey, exchanges: Sequence[list[Message]], body: ImportBody, request_key: str | None
) -> SessionHead:
    """All turns at once, of which the last has the Idempotency-Key, or what was stored under that key before."""
    sessions, now_s = context.engine.engine.sessions, time.time()
    records = [
        TurnRecord(number, said, (), (), finish_reason="stop", created_s=now_s)
        for number, said in enumerate(exchanges, 1)
    ]
    records[-1] = replace(records[-1], idempotency_key=request_key)
    given = {"ttl_s": context.options.ttl_s, "title": body.title, "is_personal": body.personal}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return sessions.commit_turn(key, *records, **changes).wait()
    except StoreError:
        last = None if request_key is None else sessions.turn_of_request(key, request_key)
        if last is None:
            raise
    stored = sessions.turns(key, 0, last.number) or ()
    if [one.messages for one in stored] != [one.messages for one in records]:
        raise turns.said_else()
    return turns.find_session(context.engine.engine, key)


async def label(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    body = await read_body(request, LabelBody)
    labelled = context.engine.engine.sessions.label(key, body.title, body.personal)
    return json_response(_info(context, await context.engine.call(labelled.wait)))


async def delete(request: web.Request) -> web.Response:
    key = key_of(request)
    num_blocks = await turns.delete(context_of(request), key)
    return json_response(Deleted(key.session_id, True, num_blocks))


async def fork(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    body = await read_body(request, ForkBody)
    new_id, admin = secrets.token_hex(turns.ID_BYTES), context.engine.engine.admin
    head = await context.engine.call(admin.fork_session, key.session_id, body.turn, new_id, key.tenant)
    return json_response(_info(context, head))


async def prefetch(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    await read_body(request, EmptyBody)
    await turns.check_exists(context, key)
    await context.engine.call(context.engine.engine.prefetch, key.session_id, key.tenant)
    return json_response(Prefetching(key.session_id, True), 202)


async def pin(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    body = await read_body(request, PinBody)
    await context.engine.call(context.engine.engine.admin.pin, key.session_id, body.ttl, key.tenant)
    until_s = context.engine.engine.admin.pinned_until(key)
    return json_response(Pinned(key.session_id, until_s is not None, None if until_s is None else int(until_s)))


async def truncate(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    body = await read_body(request, TruncateBody)
    await context.engine.call(turns.find_session, context.engine.engine, key)
    await ending(context.claims, key)
    record = await context.engine.call(_truncate, context, key, body.turns)
    number, num_tokens = (None, 0) if record is None else (record.number, record.truncated_tokens)
    return json_response(Truncated(key.session_id, number, num_tokens))


def _truncate(context: Context, key: SessionKey, num_turns: int) -> TurnRecord | None:
    return context.engine.engine.chat(key.session_id, key.tenant).keep_last(num_turns)


async def edit(request: web.Request) -> web.Response:
    context, key = context_of(request), key_of(request)
    body = await read_body(request, EditBody)
    for index, one in enumerate(body.edits):
        try:
            schema.check_chars_of(context, [one.content or ""])
        except ContextLengthError as error:
            error.param = f"edits[{index}].content"
            raise
    await context.engine.call(turns.find_session, context.engine.engine, key)
    await ending(context.claims, key)
    with context.limits.admit(key.tenant) if body.reuse == "reencode" else nullcontext():  # which computes
        done = await context.engine.call_that_waits(_edit, context, key, body)
    return json_response(Edited(key.session_id, done.turn, done.reuse, done.num_tokens, done.num_reencoded_tokens))


def _edit(context: Context, key: SessionKey, body: EditBody) -> EditResult:
    return context.engine.engine.chat(key.session_id, key.tenant).edit(body.edits, body.reuse, body.expected_turn)


async def stop(request: web.Request) -> web.Response:
    """End the running turn now, and keep what was said."""
    context, key = context_of(request), key_of(request)
    await read_body(request, EmptyBody)
    await turns.check_exists(context, key)
    hold = context.claims.on(key)
    turn = None if hold is None else hold.owner  # an edit and a truncation have none
    if turn is not None:
        await turn.stop()
    return json_response(Stopped(key.session_id, turn is not None))


_TAG = "sessions"
ROUTES = (
    Route(
        "GET", "/sessions", list_sessions, "user", "One's own sessions.", None, SessionList, _TAG, query=SessionsQuery
    ),
    Route("POST", "/sessions", import_session, "user", "A conversation from elsewhere.", ImportBody, SessionInfo, _TAG),
    Route("GET", "/sessions/{id}", show, "user", "A session with its turns.", None, SessionOut, _TAG, query=TurnsQuery),
    Route("DELETE", "/sessions/{id}", delete, "user", "Delete a session and its KV.", None, Deleted, _TAG),
    Route("POST", "/sessions/{id}/label", label, "user", "Its title, and whose it is.", LabelBody, SessionInfo, _TAG),
    Route("POST", "/sessions/{id}/fork", fork, "user", "A new session like this.", ForkBody, SessionInfo, _TAG),
    Route("POST", "/sessions/{id}/prefetch", prefetch, "user", "Its person types.", EmptyBody, Prefetching, _TAG, 202),
    Route("POST", "/sessions/{id}/pin", pin, "user", "Keep its KV longer than others'.", PinBody, Pinned, _TAG),
    Route("POST", "/sessions/{id}/truncate", truncate, "user", "Shorten its window.", TruncateBody, Truncated, _TAG),
    Route("POST", "/sessions/{id}/edit", edit, "user", "Take messages back, or change them.", EditBody, Edited, _TAG),
    Route("POST", "/sessions/{id}/stop", stop, "user", "End its answer, keeping it.", EmptyBody, Stopped, _TAG),
)
