"""A turn of a session over HTTP: whose session, whether it is a retry, and the answer as it comes.

Shared by the routes that talk. Knows no route, and none of their bodies and events.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from kvstore.engine.async_engine import Answer
from kvstore.engine.front import Front
from kvstore.engine.outputs import CachedTokensDetails, Piece, Timings, Usage
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.text.chat_template import Message
from kvstore.errors import SessionBusyError, SessionExistsError, SessionNotFoundError, StoreError
from kvstore.service.api.context import Context
from kvstore.service.api.openai.generation import Stopwatch
from kvstore.service.api.schema import check_chars_of
from kvstore.service.api.sessions.running import Running
from kvstore.service.http.errors import ApiError, bad_request, unavailable
from kvstore.sessions.record import Parent, SessionHead, SessionKey, TurnRecord

ID_BYTES = 16  # of a session's id, which is hexadecimal: it can stand in a command line
MAX_REQUEST_KEY = 255


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a turn is asked for.

    messages: without the system prompt, which stands in `system`; None: none is named. is_new: the session is made by
    this turn. fork_of: it is made as a fork of another one, if there is none of this id yet. after_turn: the session
    has so many turns, or it is busy. request_key: the Idempotency-Key. ttl: seconds, or None for ever; unset leaves it
    as it is. route: of the metrics.
    """

    tenant: str
    session_id: str
    is_new: bool
    system: str | None
    messages: Sequence[Message]
    params: SamplingParams
    route: str
    truncation: str = "auto"
    truncation_reuse: str = "reencode"
    request_key: str | None = None
    fork_of: Parent | None = None
    after_turn: int | None = None
    ttl: float | UnsetType | None = UNSET

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A turn that has ended. number: None when it was stopped before anything was said, so that it is not stored."""

    session_id: str
    number: int | None
    text: str
    finish_reason: str
    usage: Usage
    timings: Timings
    truncated_tokens: int
    created_s: float


def result_of(session_id: str, turn: TurnRecord) -> TurnResult:
    counts = turn.usage
    details = CachedTokensDetails(*(counts.get(tier, 0) for tier in ("hbm", "cpu", "disk", "reencoded")))
    usage = Usage(counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0), details)
    times = [counts.get(f"{name}_us") for name in ("queue", "load", "prefill", "ttft", "decode")]
    timings = Timings(*(None if us is None else us / 1e6 for us in times))
    text = turn.messages[-1]["content"] if turn.messages else ""
    return TurnResult(
        session_id, turn.number, text, turn.finish_reason, usage, timings, turn.truncated_tokens, turn.created_s
    )


class StoredTurn:
    """A turn that was answered before, as `LiveTurn` would show it."""

    def __init__(self, wanted: TurnRequest, record: TurnRecord) -> None:
        self._result = result_of(wanted.session_id, record)
        self.session_id = wanted.session_id
        self.number = record.number

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield Piece(0, self._result.text, ())

    async def finish(self) -> TurnResult:
        return self._result


class LiveTurn:
    """A turn that runs: iterate over its pieces, then call `finish`, after which it is durable in all it was asked for.

    number: which it will be. Raises what ended it.
    """

    def __init__(
        self, context: Context, wanted: TurnRequest, chat: ChatSession, answer: Answer, running: Running
    ) -> None:
        self.session_id = wanted.session_id
        self.number = chat.num_turns + 1
        self.watch = Stopwatch()
        self._context = context
        self._wanted = wanted
        self._chat = chat
        self._answer = answer
        self._running = running

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for piece in self._answer:
                self.watch.saw(piece)
                yield piece
        except StoreError:
            if self._chat.deleted:
                raise unknown_session(self._wanted.session_id) from None
            raise

    async def finish(self) -> TurnResult:
        record, output = self._answer.turn, self._answer.output
        if record is None and self._chat.deleted:
            raise unknown_session(self._wanted.session_id)
        if record is None and not self._running.stopped:
            raise unavailable("the request was ended by the server", "aborted", 1)
        if record is None:
            return TurnResult(
                self._wanted.session_id, None, output.text, "abort", output.usage, output.timings, 0, time.time()
            )
        await self._context.engine.call(self._settle)
        if not self._chat.deleted:
            self._context.turns.keep(self._chat)
        return result_of(self._wanted.session_id, record)

    def _settle(self) -> None:
        """How long the session lives, and that stateless clients may quote the answer."""
        chat = self._chat
        if not isinstance(self._wanted.ttl, UnsetType):
            chat.set_ttl(self._wanted.ttl)
        with suppress(StoreError):  # it only saves work
            self._context.recall.note(
                chat.tenant, "", chat.window.shown[:-1], self._answer.output, chat.window.chain, chat.window.lineage,
                chat.window.turn_starts, chat.session_id,
            )  # fmt: skip
            if chat.deleted:  # since: its deletion may have come before the note
                self._context.recall.forget_session(chat.tenant, chat.session_id)


OpenTurn = StoredTurn | LiveTurn


@asynccontextmanager
async def open_turn(context: Context, wanted: TurnRequest) -> AsyncIterator[OpenTurn]:
    """Begin a turn, or find the stored one of the same Idempotency-Key; what has not ended at the end is not stored.

    Raises ApiError 429 or 503 where there is no room, SessionBusyError and SessionNotFoundError, and as
    `ChatSession.begin`.
    """
    for text in (wanted.system or "", *(message["content"] for message in wanted.messages)):
        check_chars_of(context, [text])
    async with _admitted(context, wanted), AsyncExitStack() as stack:
        record = await _answered(context, wanted)
        if record is None:
            running = await stack.enter_async_context(context.turns.claim(wanted.key, wanted.request_key))
            record = await _answered(context, wanted)  # while this request waited
        if record is not None:
            yield StoredTurn(wanted, record)
        else:
            yield await stack.enter_async_context(_live(context, wanted, running))


@asynccontextmanager
async def _admitted(context: Context, wanted: TurnRequest) -> AsyncIterator[None]:
    """As `Limits.admit`; where there is no room, a session that is not there is still told to be unknown."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(context.limits.admit(wanted.tenant))
        except ApiError:
            if not wanted.is_new and wanted.fork_of is None:
                await check_exists(context, wanted.key)
            raise
        yield


@asynccontextmanager
async def _live(context: Context, wanted: TurnRequest, running: Running) -> AsyncIterator[LiveTurn]:
    chat: ChatSession | None = None
    num_before = 0
    try:
        num_chars = len(wanted.system or "")
        opening = asyncio.ensure_future(
            context.engine.call_with_text(num_chars, _open_chat, context.engine.engine, wanted)
        )
        await _ended(opening, running)
        chat = opening.result()
        num_before = chat.num_turns
        starting = asyncio.ensure_future(
            context.engine.start_turn(chat, wanted.messages, wanted.params, wanted.request_key)
        )
        try:
            await _ended(starting, running)
        except asyncio.CancelledError:
            if starting.exception() is None:
                await starting.result().aclose()
            raise
        async with starting.result() as answer:
            running.answer = answer
            if running.stopped:
                await answer.stop()
            turn = LiveTurn(context, wanted, chat, answer, running)
            try:
                yield turn
            finally:
                running.leaving = True
                context.answer_ended(answer.output, wanted.route, turn.watch.gaps_s)
    finally:
        if wanted.fork_of is not None and (chat is None or chat.num_turns == num_before):
            with suppress(SessionNotFoundError):
                await context.engine.call(
                    context.engine.engine.admin.delete_session, wanted.session_id, wanted.tenant
                )


async def _ended(task: asyncio.Future[Any], running: Running) -> None:
    """Wait for its end even when the request is cancelled, so that the session is given back only then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            running.leaving, cancelled = True, error
    if cancelled is not None:
        task.exception()  # seen: nobody else will look
        raise cancelled


def _open_chat(engine: Front, wanted: TurnRequest) -> ChatSession:
    key = wanted.key
    if wanted.is_new:
        if wanted.request_key is not None and engine.sessions.exists(key):
            raise SessionExistsError("the session of this Idempotency-Key has another history", param="session_id")
        engine.chats.drop(key)  # left over from a first turn that failed
        return engine.chat(
            wanted.session_id, wanted.tenant, wanted.system, wanted.truncation, wanted.truncation_reuse, is_new=True
        )
    if wanted.fork_of is not None and not engine.sessions.exists(key):
        fork(engine, SessionKey(wanted.tenant, wanted.fork_of.session_id), wanted.fork_of.turn, key)
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
    chat = engine.chat(wanted.session_id, wanted.tenant, None, wanted.truncation, wanted.truncation_reuse)
    if chat.num_turns < head.num_turns:  # it was deleted just now
        raise unknown_session(wanted.session_id)
    return chat


# -- sessions --------------------------------------------------------------------------------------------------------
def find_session(engine: Front, key: SessionKey) -> SessionHead:
    """Raises SessionNotFoundError, the same for a foreign one, which has another key."""
    head = engine.sessions.head(key)
    if head is not None and head.expires_s is not None and head.expires_s <= time.time():
        engine.admin.expire(key)
        head = engine.sessions.head(key)
    if head is None:
        raise unknown_session(key.session_id)
    return head


async def check_exists(context: Context, key: SessionKey) -> None:
    """As `find_session`; one that its first turn is just making exists too."""
    try:
        await context.engine.call(find_session, context.engine.engine, key)
    except SessionNotFoundError:
        running = context.turns.running_on(key)
        if running is None or running.answer is None:
            raise


def unknown_session(session_id: str) -> SessionNotFoundError:
    return SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")


def fork(engine: Front, source: SessionKey, turn: int | None, new_key: SessionKey) -> SessionHead:
    """Raises SessionNotFoundError, and ApiError 400 for a turn that the session does not have."""
    head = find_session(engine, source)
    if head.num_turns == 0 or (turn is not None and not 1 <= turn <= head.num_turns):
        raise bad_request("turn", f"turn is {turn}; session {source.session_id!r} has turns 1 to {head.num_turns}")
    return engine.sessions.fork(source, turn, new_key).wait()


async def delete(context: Context, key: SessionKey) -> int:
    """The session, its turn that runs, and what stateless clients could quote of it. Returns its number of blocks."""
    num_blocks = await context.engine.call(context.engine.engine.admin.delete_session, key.session_id, key.tenant)
    context.turns.drop(key)
    await context.engine.call(context.recall.forget_session, key.tenant, key.session_id)
    return num_blocks


# -- requests --------------------------------------------------------------------------------------------------------
def request_key_of(request: web.Request) -> str | None:
    """The Idempotency-Key. Raises ApiError 400."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not (1 <= len(key) <= MAX_REQUEST_KEY and key.isascii() and key.isprintable()):
        raise bad_request("Idempotency-Key", f"Idempotency-Key has 1 to {MAX_REQUEST_KEY} printable ASCII characters")
    return key


async def new_session_id(context: Context, tenant: str, request_key: str | None, purpose: str) -> str:
    """Random; for a request that may come again, one that only it leads to."""
    if request_key is None:
        return secrets.token_hex(ID_BYTES)
    root = await context.engine.call(partial(context.engine.engine.root, tenant))
    named = f"session of a request\0{purpose}\0{request_key}".encode()
    return hmac.digest(root, named, "sha256")[:ID_BYTES].hex()


async def _answered(context: Context, wanted: TurnRequest) -> TurnRecord | None:
    """The stored turn of the same request. Raises ApiError 400 when it said something else."""
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
