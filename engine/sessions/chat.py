"""A conversation as exact token ids: each turn's prompt is the ids so far plus what the template adds.

A turn is durable before its last piece is yielded. When the window is full, the oldest turns are dropped, and the KV of
the rest is spliced (see `engine/sessions/window.py`). `Chats` opens sessions by their ids, so that callers share one
object per session. Knows no engine: a `CoreClient` computes.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.client.messages import Forget, Prefetch
from kvstore.engine.client.requests import CoreClient, Listener
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.stored import (
    Claims,
    Hold,
    OneTurn,
    StoredSession,
    lineage_of,
    record_of_truncation,
    window_of,
)
from kvstore.engine.sessions.window import Window, spliced_blocks
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.language import NO_OPTIONS, AnswerOptions, Language, ToolsGiven, options_of
from kvstore.engine.text.prompts import (
    check_length,
    check_messages,
    check_owner,
    check_text,
    check_truncation,
    checked_turn,
    is_conversation,
)
from kvstore.errors import (
    EngineClosedError,
    EngineDiedError,
    RequestError,
    SessionBusyError,
    SessionNotFoundError,
    StoreError,
)
from kvstore.sessions.record import SessionKey, SessionState, TurnRecord
from kvstore.sessions.store import SessionStore

Recalled = Callable[[list[Message]], list[int]]
FORGET_S = 2.0  # to wait for unneeded blocks to be deleted; otherwise they age out


@dataclass(frozen=True, slots=True)
class Means:
    """What all sessions of an engine share. reopened: opens a session with these truncation settings, after its object
    was dropped.
    """

    client: CoreClient
    language: Language
    sessions: SessionStore
    claims: Claims
    reopened: Callable[[SessionKey, str, str], ChatSession]


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time.

    last: the last turn's output. truncation, truncation_reuse: see `Engine.chat`. window: the transcript, and the part
    of it that the model sees. stored: the session in the store. storing: held while a turn begins, while it is stored,
    and while the session is deleted. life: the core's life when this object was made; a later core knows nothing of it.
    """

    def __init__(self, means: Means, key: SessionKey, system: str | None, state: SessionState | None) -> None:
        self.key = key
        self.session_id, self.tenant = key.session_id, key.tenant
        self.last: RequestOutput | None = None
        self.truncation, self.truncation_reuse = "auto", "reencode"
        self.means, self.life = means, means.client.life
        self.stored = StoredSession(means.sessions, means.client, key, state)
        self.storing = threading.Lock()
        if state is not None:
            self.window = window_of(state, means.client)
        else:
            first: list[Message] = [{"role": "system", "content": system}] if system else []
            self.window = Window(first, list(first), 0, [], [], Lineage(means.client.facts.root(key.tenant)))

    def __dir__(self) -> list[str]:
        public = "fork is_busy keep_last last messages num_turns send session_id set_truncation set_ttl stream tenant"
        return [*public.split(), "token_ids", "truncated_tokens", "truncation", "truncation_reuse"]

    def __repr__(self) -> str:
        return f"ChatSession({self.session_id!r}, {self.num_turns} turns)"

    def set_truncation(self, truncation: str | None, truncation_reuse: str | None) -> None:
        """See `Engine.chat`; None leaves a value as it is. Raises RequestError."""
        kept = self.truncation if truncation is None else truncation
        reuse = self.truncation_reuse if truncation_reuse is None else truncation_reuse
        check_truncation(kept, reuse)
        self.truncation, self.truncation_reuse = kept, reuse

    @property
    def messages(self) -> list[Message]:
        """The transcript, whole."""
        return self.window.messages

    @property
    def token_ids(self) -> list[int]:
        """The ids in the window: exactly what the model has seen and said."""
        return self.window.token_ids

    @property
    def num_turns(self) -> int:
        """The number of stored turns."""
        return self.stored.num_turns

    @property
    def truncated_tokens(self) -> int:
        """Tokens dropped to stay within the window."""
        return self.stored.truncated_tokens

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs."""
        return self.means.claims.on(self.key) is not None

    # -- turns -------------------------------------------------------------------------------------------------------
    def send(
        self, said: str | Sequence[Message], params: SamplingParams | None = None, tools: ToolsGiven = (),
        thinking: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        """One turn: the user's message in, the answer out, both added to the conversation; durable on return.

        said: a text, or messages: a user's, results of the calls in the last answer, or, in a session without turns, a
        history that ends with one of these. tools: as in chat completions, or AnswerOptions; each turn names its own.
        thinking: "keep" (the default) or "drop", see AnswerOptions.

        When prompt and `max_tokens` exceed the window, the oldest turns go, down to half the window; the system prompt
        stays. Raises RequestError while another turn runs or if the session was deleted, ContextLengthError when the
        message alone is too long (or anything is, with truncation "disabled"), and StoreError when the turn could not
        be stored; it is then not part of the conversation.
        """
        for _ in self.stream(said, params, tools, thinking):
            pass
        assert self.last is not None
        return self.last

    def stream(
        self, said: str | Sequence[Message], params: SamplingParams | None = None, tools: ToolsGiven = (),
        thinking: str | None = None,
    ) -> Iterator[Piece]:  # fmt: skip
        """`send`, piece by piece; afterwards `last` is the whole output. Leaving early ends the answer there."""
        chosen = SamplingParams() if params is None else params
        return _pieces(self, self.check(messages_of(said), chosen), chosen, options_of(tools, thinking))

    def check(self, messages: Sequence[Message], params: SamplingParams) -> list[Message]:
        """See `checked_turn`. Only a session without turns takes a history."""
        tokenizer = self.means.language.tokenizer
        return checked_turn(messages, params, tokenizer, self.means.client.facts.max_request_tokens)

    def begin(
        self, hold: Hold, messages: Sequence[Message], params: SamplingParams, listener: Listener | None = None,
        after_turn: int | None = None, options: AnswerOptions = NO_OPTIONS, recall: Recalled | None = None,
    ) -> OneTurn:  # fmt: skip
        """Queue a turn of the holder. `check` has passed `messages` and `params`. The caller must call `end`, whatever
        happens.

        listener: see `CoreClient.submit`. after_turn: the number of turns that the session must have. recall: gives the
        prompt of a history, with the ids of the answers in it that are known. Raises SessionBusyError if it has other
        turns, or while a turn runs on a server that shares the sessions, SessionNotFoundError when the session was
        deleted, and as `send`.
        """
        with ExitStack() as undo:
            self._lease(hold, undo)
            if after_turn not in (None, self.num_turns):
                raise SessionBusyError(f"session {self.session_id} has gone on since turn {after_turn}")
            with self.storing:
                if self.stored.is_deleted:
                    why = f"there is no session {self.session_id!r}: it was deleted"
                    raise SessionNotFoundError(why, param="session_id")
                turn = hold.turn = self._submit(messages, params, hold.request_key, listener, options, recall)
            undo.pop_all()
            return turn

    def _lease(self, hold: Hold, undo: ExitStack) -> None:
        """Keep other servers from writing, and read what they have stored since the last turn. Raises as `begin`."""
        claims = self.means.claims
        claims.lease(hold)
        undo.callback(claims.give_back, hold)
        state = None if hold.lease is None else self.stored.catch_up(hold.request_key)
        if state is not None:
            self.window = window_of(state, self.means.client)

    def _submit(
        self, said: Sequence[Message], params: SamplingParams, idempotency_key: str | None, listener: Listener | None,
        options: AnswerOptions, recall: Recalled | None,
    ) -> OneTurn:  # fmt: skip
        before, client, language = self.window, self.means.client, self.means.language
        old = max((i for i, m in enumerate(said) if m["role"] in ("system", "assistant")), default=-1) + 1
        if old:
            if self.num_turns:
                raise RequestError("a session that has turns takes one user message at a time", param="messages")
            before = before.with_history(said[:old])
        new, template = said[old:], language.chat_template(options)
        check_results(new, before.messages)
        following = before.next_turn(
            client, template, new, params, self.tenant, self.truncation, self.truncation_reuse, options.digest,
            recall([*before.shown, *new]) if recall is not None and old else None,
            language.thought_in if options.thinking == "drop" else None,
        )  # fmt: skip
        try:
            starts = following.turn_starts or template.first_start(before.system, following.prompt)
            handle = client.submit(
                following.prompt, language.constrained(params, options), self.tenant,
                spliced=(following.chain, following.lineage), listener=listener, turn_starts=starts,
                parser=language.parser(options), earlier=before.had_of(following, template, new, self.stored.updated_s),
            )  # fmt: skip
        except Exception:
            _forget(client, following.spliced_blocks(before.lineage))
            raise
        return OneTurn(before, new, following, handle, idempotency_key, template)

    def end(self, hold: Hold, keep: bool = True) -> TurnRecord | None:
        """End the holder's turn and store it, durable on return; delete reused KV that no turn refers to.

        A turn that failed, said nothing or is not to be kept is not stored. Raises as `send`.
        """
        client, turn, record = self.means.client, hold.turn, None
        assert turn is not None
        output = turn.handle.output
        with ExitStack() as leased:
            leased.callback(self.means.claims.give_back, hold)
            client.abort(turn.handle)
            turn.explain(client.facts.block_size)
            with self.storing:  # a deletion that has ended the turn marks the session before it leaves this
                pass
            try:
                if turn.handle.error is None and keep:
                    self.last = output
                    record = self._commit(hold, turn) if output.token_ids else None
            finally:
                is_stored = record is not None
                is_deleted = not is_stored and self.stored.check_deleted()
                _forget(client, turn.unneeded_blocks(is_stored, is_deleted, client.facts.block_size))
        return record

    def _commit(self, hold: Hold, turn: OneTurn) -> TurnRecord:
        """Add the turn to the conversation. Waits for the disk."""
        means = self.means
        with self.storing:
            if self.stored.is_deleted:
                raise StoreError(f"session {self.session_id} was deleted meanwhile: the turn is not stored")
            language = means.language
            after = turn.after(language.tokenizer, language.chat_template(), means.client.facts.block_size)
            record = turn.record(self.num_turns + 1, after)
            self.stored.commit(record, after.chain, hold.lease)
            self.window = after
            return record

    # -- the whole session -------------------------------------------------------------------------------------------
    def fork(self, session_id: str, turn: int | None = None) -> ChatSession:
        """A new session of this id with turns 1 to `turn` (None: all) of this one; they share their KV.

        Raises RequestError for a bad id, StoreError when it is taken or there is no such turn.
        """
        return self.means.reopened(self.stored.fork(session_id, turn), self.truncation, self.truncation_reuse)

    def keep_last(self, num_turns: int, hold: Hold | None = None) -> TurnRecord | None:
        """Remove all but the last turns from the window now; the transcript stays. Durable on return.

        It is stored as a turn without messages, which is returned; None when the window has no more turns than that.
        hold: the caller's, if it holds the session already. Raises SessionBusyError while a turn runs,
        SessionNotFoundError when the session was deleted.
        """
        client = self.means.client
        with ExitStack() as leased:
            if hold is None:
                hold = self.means.claims.hold(self.key)
                leased.callback(self.means.claims.release, hold)
            self._lease(hold, leased)
            with self.storing:
                if self.stored.is_deleted or self.stored.number is None:
                    raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id")
                before = self.window
                after = before.last(num_turns, client, self.tenant, self.truncation_reuse)
                if after is None:
                    self.means.sessions.confirm()
                    return None
                record = record_of_truncation(self.num_turns + 1, before, after, self.means.language.chat_template())
                try:
                    self.stored.commit(record, after.chain, hold.lease)
                except Exception:
                    _forget(client, spliced_blocks(after.chain, after.lineage, before.lineage))
                    raise
                self.window = after
                return record

    def set_ttl(self, ttl_s: float | None) -> None:
        """Let the session expire this many seconds after its last turn; None keeps it. Needs a first turn."""
        self.stored.set_ttl(ttl_s, self.window.chain)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """In this context the session can be deleted: its turn has ended, none begins, and none is stored."""
        with self.storing:
            hold = self.means.claims.on(self.key)
            if hold is not None and hold.turn is not None:
                self.means.client.abort(hold.turn.handle)
            yield

    def mark_deleted(self) -> Sequence[BlockId]:
        """Call this inside `ending`. Returns the blocks of the turn that was running, which will not be stored."""
        self.stored.is_deleted = True
        hold, block_size = self.means.claims.on(self.key), self.means.client.facts.block_size
        if hold is None or hold.turn is None:
            return ()
        self.means.claims.drop(hold)
        return hold.turn.unneeded_blocks(is_stored=False, is_deleted=True, block_size=block_size)


def messages_of(said: str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if not is_conversation(said):
        raise RequestError(f"the message is {said!r}; give a text, or a list of messages", param="messages")
    check_messages(said)
    return said


def check_results(said: Sequence[Message], before: Sequence[Message]) -> None:
    """Raises RequestError for results of calls that the last answer has not made."""
    called = [call["id"] for call in (before[-1].get("tool_calls") or () if before else ())]
    for message in said:
        if message["role"] == "tool" and message.get("tool_call_id") not in called:
            wrong = f"tool_call_id is {str(message.get('tool_call_id'))[:80]!r}, which is no call of the last answer"
            raise RequestError(wrong, param="messages")


def _pieces(chat: ChatSession, said: list[Message], params: SamplingParams, options: AnswerOptions) -> Iterator[Piece]:
    """One turn; its last piece is held back until the turn is durable."""
    final: Piece | None = None
    claims = chat.means.claims
    hold = claims.hold(chat.key)
    with ExitStack() as held:
        held.callback(claims.release, hold)
        turn = chat.begin(hold, said, params, options=options)
        held.callback(chat.end, hold)
        for piece in chat.means.client.stream(turn.handle):
            if piece.finish_reason is None:
                yield piece
            else:
                final = piece
    if final is not None:
        yield final


def _forget(client: CoreClient, block_ids: Sequence[BlockId]) -> None:
    """Delete KV that nothing refers to any more, unless the core is gone."""
    if block_ids and not client.closed:
        with suppress(StoreError, EngineClosedError, EngineDiedError):
            client.call(Forget(block_ids, FORGET_S))


MAX_KEPT = 256


MAX_KEPT_TOKENS = 2_000_000  # about 40 bytes each


class Chats:
    """The sessions of one engine. claims: which turn has which. known: the objects in use. lock: held while one is
    made.
    """

    def __init__(self, client: CoreClient, language: Language, sessions: SessionStore) -> None:
        self.client = client
        self.language = language
        self.sessions = sessions
        self.claims = Claims(sessions.sharing.leases)
        self.known: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()
        self._kept: OrderedDict[SessionKey, tuple[ChatSession, int]] = OrderedDict()  # with its tokens then
        self._num_kept_tokens = 0

    def check(self, key: SessionKey, system: str | None) -> None:
        """Check the arguments for a session. Raises RequestError, and as `CoreClient.check_open`."""
        check_owner(key.tenant, "", 0)
        if system is not None:
            check_text(system, "system")
        self.language.chat_template()
        if system is not None:
            check_length([system], self.language.tokenizer, self.client.facts.max_request_tokens)
        self.client.check_open()

    def open(
        self,
        key: SessionKey,
        system: str | None = None,
        truncation: str | None = None,
        truncation_reuse: str | None = None,
        is_new: bool = False,
    ) -> ChatSession:
        """See `Engine.chat`; its arguments are already checked."""
        is_known = is_new or self.get(key) is not None
        state = None if is_known else self.sessions.load(key)  # outside the lock: it reads the disk
        with self.lock:
            self.client.check_open()
            chat = self.get(key)
            if chat is None:
                if not is_new and self.sessions.head(key) != (None if state is None else state.head):
                    state = self.sessions.load(key)  # it may have changed since
                chat = self.known[key] = ChatSession(self._means(), key, system, state)
            chat.set_truncation(truncation, truncation_reuse)
            return chat

    def get(self, key: SessionKey) -> ChatSession | None:
        """The object in use. None if there is none, if the core has restarted since, or if the session was deleted."""
        chat = self.known.get(key)
        return chat if chat is not None and chat.life == self.client.life and not chat.stored.is_deleted else None

    def keep(self, chat: ChatSession) -> None:
        """Keep the object in memory for its next turn, as one of those used last."""
        num_tokens = len(chat.token_ids)
        with self.lock:
            self._let_go(chat.key)
            self._kept[chat.key] = (chat, num_tokens)
            self._num_kept_tokens += num_tokens
            while len(self._kept) > MAX_KEPT or (self._num_kept_tokens > MAX_KEPT_TOKENS and len(self._kept) > 1):
                self._let_go(next(iter(self._kept)))

    def _let_go(self, key: SessionKey) -> None:
        _, num_tokens = self._kept.pop(key, (None, 0))
        self._num_kept_tokens -= num_tokens

    def drop(self, key: SessionKey) -> None:
        """Forget the object: the next `open` makes a new one."""
        with self.lock:
            self.known.pop(key, None)
            self._let_go(key)

    def _means(self) -> Means:
        self.language.chat_template()
        return Means(self.client, self.language, self.sessions, self.claims, self._reopened)

    def _reopened(self, key: SessionKey, truncation: str, truncation_reuse: str) -> ChatSession:
        self.drop(key)
        return self.open(key, None, truncation, truncation_reuse)

    def prefetch(self, session_id: str, tenant: str) -> None:
        """See `Engine.prefetch`."""
        self.client.check_open()
        key = SessionKey(tenant, session_id)
        state = self.sessions.load(key)
        if state is None and key in self.known:
            return  # it has no turn yet
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint != self.client.facts.fingerprint:
            return  # its KV is of another model
        lineage = lineage_of(state, self.client.facts.root(tenant))
        self.client.call(Prefetch(state.chain, state.token_ids, lineage, tenant))
