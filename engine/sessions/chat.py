"""A conversation as exact token ids: each turn's prompt is the ids so far plus what the template adds.

A turn is durable before its last piece is yielded. When the window is full, the oldest turns are dropped, and the KV of
the rest is spliced (see `engine/sessions/window.py`). Knows no engine: a `Core` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.core.output_processor import Listener
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Core, stream
from kvstore.engine.sessions.one_turn import OneTurn, TurnLock, record_of_truncation
from kvstore.engine.sessions.stored import StoredSession, window_of
from kvstore.engine.sessions.window import Window, spliced_blocks
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.prompts import check_truncation, checked_turn
from kvstore.errors import EngineClosedError, EngineDiedError, RequestError, SessionNotFoundError, StoreError
from kvstore.sessions.record import SessionKey, SessionState, TurnRecord
from kvstore.sessions.store import SessionStore

FORGET_S = 2.0  # to wait for unneeded blocks to be deleted; otherwise they age out


@dataclass(frozen=True, slots=True)
class Means:
    """What all sessions of an engine share. reopened: opens a session with these truncation settings, after its object
    was dropped.
    """

    core: Core
    tokenizer: Any
    template: ChatTemplate
    sessions: SessionStore
    reopened: Callable[[SessionKey, str, str], ChatSession]


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time.

    last: the last turn's output. truncation, truncation_reuse: see `Engine.chat`. window: the transcript, and the part
    of it that the model sees. stored: the session in the store. lock: held while a turn runs. life: the core's life
    when this object was made; a later core knows nothing of it.
    """

    def __init__(self, means: Means, key: SessionKey, system: str | None, state: SessionState | None) -> None:
        self.key = key
        self.session_id, self.tenant = key.session_id, key.tenant
        self.last: RequestOutput | None = None
        self.truncation, self.truncation_reuse = "auto", "reencode"
        self.means, self.life = means, means.core.life
        self.stored = StoredSession(means.sessions, means.core, key, state)
        self.lock = TurnLock(key, means.core, means.sessions.sharing)
        if state is not None:
            self.window = window_of(state, means.core)
        else:
            first: list[Message] = [{"role": "system", "content": system}] if system else []
            self.window = Window(first, list(first), 0, [], [], Lineage(means.core.root(key.tenant)))

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
        return self.lock.is_held

    # -- turns -------------------------------------------------------------------------------------------------------
    def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """One turn: the user's message in, the answer out, both added to the conversation; durable on return.

        When prompt and `max_tokens` exceed the window, the oldest turns go, down to half the window; the system prompt
        stays. Raises RequestError while another turn runs or if the session was deleted, ContextLengthError when the
        message alone is too long (or anything is, with truncation "disabled"), and StoreError when the turn could not
        be stored; it is then not part of the conversation.
        """
        for _ in self.stream(text, params):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """`send`, piece by piece; afterwards `last` is the whole output. Leaving early ends the answer there."""
        params = SamplingParams() if params is None else params
        return _pieces(self, self.check([{"role": "user", "content": text}], params), params)

    def check(self, messages: Sequence[Message], params: SamplingParams) -> list[Message]:
        """See `checked_turn`. Only a session without turns takes a history."""
        return checked_turn(messages, params, self.means.tokenizer, self.means.core.facts.max_request_tokens)

    def begin(
        self, messages: Sequence[Message], params: SamplingParams, idempotency_key: str | None = None,
        listener: Listener | None = None,
    ) -> OneTurn:  # fmt: skip
        """Queue a turn. `check` has passed `messages` and `params`. The caller must call `end`, whatever happens.

        idempotency_key: stored with the turn. listener: see `Engine.submit`. Raises SessionBusyError while another
        turn runs, on this server or on one that shares the sessions, SessionNotFoundError when the session was deleted,
        and as `send`.
        """
        self.lock.acquire()
        with ExitStack() as undo:
            undo.callback(self.lock.release)
            self._catch_up(idempotency_key)
            with self.lock.storing:
                if self.stored.is_deleted:
                    why = f"there is no session {self.session_id!r}: it was deleted"
                    raise SessionNotFoundError(why, param="session_id")
                turn = self.lock.running = self._submit(messages, params, idempotency_key, listener)
            undo.pop_all()
            return turn

    def _catch_up(self, idempotency_key: str | None = None) -> None:
        """Read what other servers have stored since the last turn here. Raises as `begin`."""
        state = None if self.lock.lease is None else self.stored.catch_up(idempotency_key)
        if state is not None:
            self.window = window_of(state, self.means.core)

    def _submit(
        self, said: Sequence[Message], params: SamplingParams, idempotency_key: str | None, listener: Listener | None
    ) -> OneTurn:
        before, text, core = self.window, said[-1]["content"], self.means.core
        if len(said) > 1:
            if self.num_turns:
                raise RequestError("a session that has turns takes one user message at a time", param="messages")
            before = before.with_history(said[:-1])
        following = before.next_turn(
            core, self.means.template, text, params, self.tenant, self.truncation, self.truncation_reuse
        )
        try:
            starts = following.turn_starts or self.means.template.first_start(before.system, following.prompt)
            asked, spliced = [(following.prompt, params)], (following.chain, following.lineage)
            [handle] = core.submit_all(asked, self.tenant, spliced=spliced, listener=listener, turn_starts=starts)
        except Exception:
            _forget(core, following.spliced_blocks(before.lineage))
            raise
        return OneTurn(before, text, following, handle, idempotency_key)

    def end(self, turn: OneTurn, keep: bool = True) -> TurnRecord | None:
        """End the turn and store it, durable on return; delete reused KV that no turn refers to.

        A turn that failed, said nothing or is not to be kept is not stored. Raises as `send`.
        """
        core, output, record = self.means.core, turn.handle.output, None
        with self.lock.released_at_end():
            core.abort(turn.handle)
            with self.lock.storing:  # a deletion that has ended the turn marks the session before it leaves this
                pass
            try:
                if turn.handle.error is None and keep:
                    self.last = output
                    record = self._commit(turn) if output.token_ids else None
            finally:
                is_stored = record is not None
                is_deleted = not is_stored and self.stored.check_deleted()
                _forget(core, turn.unneeded_blocks(is_stored, is_deleted, core.facts.block_size))
        return record

    def _commit(self, turn: OneTurn) -> TurnRecord:
        """Add the turn to the conversation. Waits for the disk."""
        means = self.means
        with self.lock.storing:
            if self.stored.is_deleted:
                raise StoreError(f"session {self.session_id} was deleted meanwhile: the turn is not stored")
            after = turn.after(means.tokenizer, means.template, means.core.facts.block_size)
            record = turn.record(self.num_turns + 1, after)
            self.stored.commit(record, after.chain, self.lock.lease)
            self.window = after
            return record

    # -- the whole session -------------------------------------------------------------------------------------------
    def fork(self, session_id: str, turn: int | None = None) -> ChatSession:
        """A new session of this id with turns 1 to `turn` (None: all) of this one; they share their KV.

        Raises RequestError for a bad id, StoreError when it is taken or there is no such turn.
        """
        return self.means.reopened(self.stored.fork(session_id, turn), self.truncation, self.truncation_reuse)

    def keep_last(self, num_turns: int) -> TurnRecord | None:
        """Remove all but the last turns from the window now; the transcript stays. Durable on return.

        It is stored as a turn without messages, which is returned; None when the window has no more turns than that.
        Raises SessionBusyError while a turn runs, SessionNotFoundError when the session was deleted.
        """
        core = self.means.core
        self.lock.acquire()
        with self.lock.released_at_end():
            self._catch_up()
            with self.lock.storing:
                if self.stored.is_deleted or self.stored.number is None:
                    raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id")
                before = self.window
                after = before.last(num_turns, core, self.tenant, self.truncation_reuse)
                if after is None:
                    self.means.sessions.confirm()
                    return None
                record = record_of_truncation(self.num_turns + 1, before, after, self.means.template)
                try:
                    self.stored.commit(record, after.chain, self.lock.lease)
                except Exception:
                    _forget(core, spliced_blocks(after.chain, after.lineage, before.lineage))
                    raise
                self.window = after
                return record

    def set_ttl(self, ttl_s: float | None) -> None:
        """Let the session expire this many seconds after its last turn; None keeps it. Needs a first turn."""
        self.stored.set_ttl(ttl_s, self.window.chain)

    def mark_deleted(self) -> Sequence[BlockId]:
        """Call this inside `lock.ending`. Returns the blocks of the turn that was running, which will not be stored."""
        self.stored.is_deleted = True
        turn, block_size = self.lock.running, self.means.core.facts.block_size
        return () if turn is None else turn.unneeded_blocks(is_stored=False, is_deleted=True, block_size=block_size)


def _pieces(chat: ChatSession, said: list[Message], params: SamplingParams) -> Iterator[Piece]:
    """One turn; its last piece is held back until the turn is durable."""
    turn = chat.begin(said, params)
    final: Piece | None = None
    try:
        for piece in stream(chat.means.core, turn.handle):
            if piece.finish_reason is None:
                yield piece
            else:
                final = piece
    finally:
        chat.end(turn)
    if final is not None:
        yield final


def _forget(core: Core, block_ids: Sequence[BlockId]) -> None:
    """Delete KV that nothing refers to any more, unless the core is gone."""
    if block_ids and not core.closed:
        with suppress(StoreError, EngineClosedError, EngineDiedError):
            core.forget(block_ids, FORGET_S)
