"""Bodies and answers of /chat and /sessions. Knows no handler."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from kvstore.engine.text.chat_template import Message
from kvstore.service.api.schema import MessageIn, Messages, Sampling, message_of, messages_of, read_body
from kvstore.service.api.sessions.turns import TurnResult, result_of
from kvstore.service.api.usage import TimingsObject, UsageObject, timings_object, usage_object
from kvstore.service.http.errors import bad_request
from kvstore.sessions.record import SessionHead, TurnRecord

T = TypeVar("T")

MAX_TTL_S = 100 * 365 * 86400
MAX_PIN_S = 30 * 86400
MAX_TURNS = 2**31

Seconds = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]
TurnNumber = Annotated[int, Meta(ge=1, le=MAX_TURNS)]


# -- bodies ----------------------------------------------------------------------------------------------------------
class ChatBody(Sampling, kw_only=True):
    """A turn. message, or messages: a new session may bring a history. ttl: seconds from its last turn; null: for ever.

    Without session_id the turn begins a session. truncation: "auto" or "disabled"; truncation_reuse: "reencode" or
    "exact".
    """

    model: str | None = None
    session_id: str | None = None
    message: str | MessageIn | None = None
    messages: Messages | None = None
    system: str | None = None
    truncation: str | None = None
    truncation_reuse: str | None = None
    ttl: Seconds | UnsetType | None = UNSET


class ForkBody(msgspec.Struct):
    """turn: the last turn that the fork keeps; all turns if it is not given."""

    REFUSED: ClassVar[dict[str, str]] = {"session_id": "a fork gets an id of its own, which the answer names"}
    turn: TurnNumber | None = None


class PinBody(msgspec.Struct):
    """ttl: for how many seconds from now; 0 ends it."""

    ttl: Annotated[float, Meta(ge=0, le=MAX_PIN_S)]


class TruncateBody(msgspec.Struct):
    """turns: how many of the last ones stay in the window."""

    turns: Annotated[int, Meta(ge=0, le=MAX_TURNS)]


class EmptyBody(msgspec.Struct):
    """An empty body."""


# -- answers ---------------------------------------------------------------------------------------------------------
class MessageOut(msgspec.Struct):
    role: str
    content: str


class ChatAnswer(msgspec.Struct):
    """A turn. turn, and the session_id of a new session, are null for a turn that was stopped before it began: it is
    not stored.
    """

    id: str
    session_id: str | None
    turn: int | None
    message: MessageOut
    finish_reason: str
    usage: UsageObject
    timings: TimingsObject
    truncated_tokens: int


class LastEvent(ChatAnswer):
    """The last event of a stream: the whole answer again."""

    delta: dict[str, str] = {}


class ParentOut(msgspec.Struct):
    """The session that this one is a fork of; it may be deleted by now."""

    session_id: str
    turn: int


class SessionInfo(msgspec.Struct):
    """tokens: in the window. created_at, updated_at, expires_at, pinned_until: seconds since the epoch."""

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


class SessionList(msgspec.Struct):
    """Most recently used first. last_id: pass it as `after` to get the next page."""

    object: str
    data: list[SessionInfo]
    has_more: bool
    last_id: str | None


class TurnOut(msgspec.Struct):
    """messages: what the turn added; none for a truncation by request."""

    turn: int
    messages: list[MessageOut]
    finish_reason: str
    usage: UsageObject
    timings: TimingsObject
    truncated_tokens: int
    created_at: int


class SessionOut(SessionInfo):
    """system: its system prompt. messages, turns_data: of this page of turns; has_more: whether another follows."""

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


class Stopped(msgspec.Struct):
    """stopped: whether a turn ran."""

    id: str
    stopped: bool


# -- from the engine's words -----------------------------------------------------------------------------------------
def turn_id(session_id: str, turn: int | None) -> str:
    return f"turn-{session_id}-{0 if turn is None else turn}"


def chat_answer(result: TurnResult, is_new: bool, kind: type[ChatAnswer] = ChatAnswer) -> ChatAnswer:
    session_id = None if is_new and result.number is None else result.session_id
    return kind(
        id=turn_id(result.session_id, result.number),
        session_id=session_id,
        turn=result.number,
        message=MessageOut("assistant", result.text),
        finish_reason=result.finish_reason,
        usage=usage_object(result.usage),
        timings=timings_object(result.timings),
        truncated_tokens=result.truncated_tokens,
    )


def session_fields(head: SessionHead, is_running: bool, pinned_until_s: float | None) -> SessionInfo:
    parent = None if head.parent is None else ParentOut(head.parent.session_id, head.parent.turn)
    return SessionInfo(
        head.key.session_id, head.title, head.num_turns, int(head.created_s), int(head.updated_s), head.num_tokens,
        head.model, None if head.expires_s is None else int(head.expires_s), parent, is_running,
        None if pinned_until_s is None else int(pinned_until_s),
    )  # fmt: skip


def turn_out(session_id: str, record: TurnRecord) -> TurnOut:
    result = result_of(session_id, record)
    return TurnOut(
        record.number, messages_out(record.messages[len(record.system) :]), result.finish_reason,
        usage_object(result.usage), timings_object(result.timings), result.truncated_tokens, int(result.created_s),
    )  # fmt: skip


def messages_out(messages: Sequence[Message]) -> list[MessageOut]:
    return [MessageOut(message["role"], message["content"]) for message in messages]


# -- from the client's words -----------------------------------------------------------------------------------------
def said_of(body: ChatBody) -> tuple[str | None, list[Message]]:
    """System prompt, if one is named, and the messages after it. Raises ApiError 400."""
    if body.message is None and body.messages is None:
        raise bad_request("message", "give message or messages", "missing")
    if body.message is not None and body.messages is not None:
        raise bad_request("messages", "give message or messages, not both", "invalid_value")
    if body.messages is not None:
        said = messages_of(body.messages)
    elif isinstance(body.message, str):
        said = [{"role": "user", "content": body.message}]
    else:
        assert body.message is not None
        said = [message_of(body.message, "message")]
    if said[0]["role"] != "system":
        return body.system, said
    first = said[0]["content"]
    if body.system is not None and body.system != first:
        raise bad_request("system", "system and the first of messages are two system prompts; give one")
    return first, said[1:]


async def read_optional_body(request: web.Request, type_: type[T]) -> T:
    """Like `read_body`; a missing body counts as an empty one."""
    return await read_body(request, type_) if request.body_exists else type_()
