"""A turn of a session over HTTP: its owner, whether it is a retry, and the answer as it comes.

Knows no route, and none of the routes' bodies and events.
"""

import hmac
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from msgspec import UNSET, UnsetType

from kvstore.engine.async_engine import LONG_TEXT_CHARS
from kvstore.engine.engine import Engine
from kvstore.engine.outputs import CachedTokensDetails, Miss, Piece, RequestOutput, Timings, Usage, events_of
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.window import OneTurn
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.language import NO_OPTIONS, AnswerOptions
from kvstore.engine.text.prompts import num_chars_of, texts_of
from kvstore.engine.turns import Hold, Turn, held
from kvstore.errors import KVStoreError, SessionBusyError, SessionExistsError, SessionNotFoundError, StoreError
from kvstore.service.api.exchange import Context, Exchange, tenant_of
from kvstore.service.api.schema import check_chars_of
from kvstore.service.http.errors import ApiError, bad_request, unavailable
from kvstore.sessions.record import Parent, SessionHead, SessionKey, TurnRecord

ID_BYTES = 16  # of a session's id, which is hexadecimal: it can stand in a command line
MAX_REQUEST_KEY = 255
NEW_SESSION = "X-New-Session"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a turn is asked to do.

    messages: without the system prompt; system: that, or None if none is given. is_new: this turn creates the session.
    create: it does if there is none of this id; fork_of: then as a fork of another one. after_turn: the session must
    have this number of turns, or it is busy. request_key: the Idempotency-Key. ttl: seconds, or None for ever; unset
    leaves it as it is, and gives a new session the server's. pin_s: for how many seconds the session is pinned.
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

    @property
    def begins_session(self) -> bool:
        """Whether there is no session of this id unless the turn is stored."""
        return self.is_new or self.fork_of is not None


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


def result_of(session_id: str, turn: TurnRecord) -> TurnResult:
    counts = turn.usage
    details = CachedTokensDetails(*(counts.get(tier, 0) for tier in ("hbm", "cpu", "disk", "remote", "reencoded")))
    num_prompt, num_completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
    miss = None if turn.miss is None else Miss(**turn.miss)
    thinking = {None: None, 0: "kept", 1: "dropped"}[counts.get("thinking_dropped")]
    num_written = counts.get("cache_write_tokens", 0)
    usage = Usage(num_prompt, num_completion, details, counts.get("capped_max_tokens"), miss, thinking, num_written)
    times = [counts.get(f"{name}_us") for name in ("queue", "load", "prefill", "ttft", "decode")]
    timings = Timings(*(None if us is None else us / 1e6 for us in times))
    message = turn.messages[-1] if turn.messages else {"role": "assistant", "content": ""}
    return TurnResult(
        session_id, turn.number, message, turn.finish_reason, usage, timings, turn.truncated_tokens, turn.created_s
    )


@asynccontextmanager
async def open_turn(context: Context, exchange: Exchange, wanted: TurnRequest) -> AsyncIterator[list[Turn[TurnResult]]]:
    """Begin a turn, or find the stored one with the same Idempotency-Key.

    A turn that has not ended when the context exits is not stored. Raises ApiError 429 or 503 where there is no room,
    SessionBusyError, SessionNotFoundError, and what `ChatSession.begin` raises.
    """
    for text in (wanted.system or "", *texts_of(wanted.messages)):
        check_chars_of(context, [text])
    async with context.reading(context.engine.turn(partial(_session_turn, context, wanted)), exchange) as turn:
        yield [turn]


async def _session_turn(context: Context, wanted: TurnRequest, turn: Turn[TurnResult]) -> TurnResult:
    async with _admitted(context, wanted):
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


@asynccontextmanager
async def _admitted(context: Context, wanted: TurnRequest) -> AsyncIterator[None]:
    """Like `Limits.admit`, but an unknown session is reported as unknown even where there is no room."""
    async with AsyncExitStack() as stack:
        try:
            stack.enter_context(context.limits.admit(wanted.tenant))
        except ApiError:
            if not (wanted.begins_session or wanted.create):
                await check_exists(context, wanted.key)
            raise
        yield


async def _computed(context: Context, wanted: TurnRequest, turn: Turn[TurnResult], hold: Hold) -> TurnResult:
    engine, port, params = context.engine, context.engine.port, wanted.params
    chat: ChatSession | None = None
    is_stored = False

    def begin() -> OneTurn | int:
        """The turn; or the number of characters that it has to encode, where they are many."""
        nonlocal chat
        turn.check_wanted()
        is_opened = chat is not None
        chat = chat or _open_chat(engine.engine, wanted)
        num_chars = num_chars_of([*wanted.messages, *([] if chat.token_ids else chat.messages)])
        if num_chars > LONG_TEXT_CHARS and not is_opened:
            return num_chars
        recall = partial(context.recall.prompt_ids, wanted.tenant, "", options=wanted.options)
        said = chat.check(wanted.messages, params)
        return chat.begin(hold, said, params, port, wanted.after_turn, wanted.options, recall)

    def end() -> TurnResult:
        nonlocal is_stored
        assert chat is not None and not isinstance(begun, int)
        try:
            record = chat.end(hold, keep=not turn.is_abandoned)
            begun.handle.raise_error()
        except StoreError:
            if chat.is_deleted:
                raise unknown_session(wanted.session_id) from None
            raise
        is_stored = record is not None
        return _settled(context, wanted, chat, record, begun.handle.output, turn.is_stopped)

    try:
        begun = await engine.call_with_text(len(wanted.system or ""), begin)
        if isinstance(begun, int):
            begun = await engine.call_with_text(begun, begin)
        assert chat is not None and not isinstance(begun, int)
        turn.session_id, turn.number = wanted.session_id, chat.num_turns + 1
        try:
            await turn.computed(begun.handle)
        finally:
            result = await engine.call(end)
        return result
    finally:
        if wanted.fork_of is not None and not is_stored:
            with suppress(SessionNotFoundError):
                await engine.call(engine.engine.admin.delete_session, wanted.session_id, wanted.tenant)


def _settled(
    context: Context, wanted: TurnRequest, chat: ChatSession, record: TurnRecord | None, output: RequestOutput,
    is_stopped: bool,
) -> TurnResult:  # fmt: skip
    """What came of a turn. Its session's lifetime is stored, and the answer noted, for stateless clients to quote."""
    if record is None:
        if chat.is_deleted:
            raise unknown_session(wanted.session_id)
        if not is_stopped:
            raise unavailable("the request was ended by the server", "aborted", 1)
        message = output.choices[0].message
        return TurnResult(wanted.session_id, None, message, "abort", output.usage, output.timings, 0, time.time())
    is_first, default_s = record.number == 1, context.options.ttl_s
    ttl = default_s if wanted.ttl is UNSET and is_first and default_s is not None else wanted.ttl
    if not isinstance(ttl, UnsetType):
        chat.set_ttl(ttl)
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
    key = wanted.key
    if wanted.is_new and wanted.request_key is not None and engine.sessions.exists(key):
        raise SessionExistsError("the session of this Idempotency-Key has another history", param="session_id")
    if wanted.is_new or (wanted.create and not engine.sessions.exists(key)):
        engine.chats.drop(key)  # left over from a first turn that failed
        return engine.chat(
            wanted.session_id, wanted.tenant, wanted.system, wanted.truncation, wanted.truncation_reuse, is_new=True
        )
    if wanted.fork_of is not None and not engine.sessions.exists(key):
        parent = wanted.fork_of
        engine.admin.fork_session(parent.session_id, parent.turn, wanted.session_id, wanted.tenant, parent.is_version)
    head = find_session(engine, key)
    said = "".join(message["content"] for message in head.system)
    if wanted.system is not None and wanted.system != said:
        raise bad_request(
            "system", "system is not the session's; leave it out, or begin a new session", "system_mismatch"
        )
    if wanted.after_turn not in (None, head.num_turns):
        raise SessionBusyError(f"session {wanted.session_id} has gone on since turn {wanted.after_turn}")
    known = engine.chats.get(key)
    if known is not None and known.is_at(head):
        known.set_truncation(wanted.truncation, wanted.truncation_reuse)
        return known
    if known is not None:
        engine.chats.drop(key)  # another server has stored turns since
    chat = engine.chat(wanted.session_id, wanted.tenant, None, wanted.truncation, wanted.truncation_reuse)
    if chat.num_turns < head.num_turns:  # it was deleted just now
        raise unknown_session(wanted.session_id)
    return chat


# -- sessions --------------------------------------------------------------------------------------------------------
def find_session(engine: Engine, key: SessionKey) -> SessionHead:
    """Raises SessionNotFoundError, also for another tenant's session, which has another key."""
    head = engine.sessions.head(key)
    if head is not None and head.expires_s is not None and head.expires_s <= time.time():
        engine.admin.expire(key)
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
    num_blocks = await context.engine.call(context.engine.engine.admin.delete_session, key.session_id, key.tenant)
    await context.engine.call(context.recall.forget_session, key.tenant, key.session_id)
    return num_blocks


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
    said = [message for message in record.messages[:-1] if message["role"] != "system"]
    system = "".join(message["content"] for message in record.system)
    is_same = said == list(wanted.messages) and (not wanted.is_new or system == (wanted.system or ""))
    if not is_same:
        said_else = "a request with this Idempotency-Key said something else; take a new key"
        raise bad_request("Idempotency-Key", said_else, "idempotency_mismatch")
    return record
