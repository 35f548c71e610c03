"""A conversation as exact token ids: each turn's prompt is the ids so far plus what the template adds.

A turn is durable before its last piece is handed out. When the window is full the oldest turns go; the KV of what is
kept is spliced (see `engine/sessions/window.py`). Knows no engine: a `Core` computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.engine.core.output_processor import Handle, Listener
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.core import Core, stream
from kvstore.engine.sessions.recall_ids import answer_ids
from kvstore.engine.sessions.window import NextTurn, Window
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.prompts import check_length, check_params, check_text, check_truncation
from kvstore.errors import (
    EngineClosedError,
    EngineDiedError,
    RequestError,
    SessionBusyError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
)
from kvstore.sessions.record import SessionHead, SessionKey, SessionState, TurnRecord
from kvstore.sessions.store import SessionStore

FORGET_S = 2.0  # that blocks nobody needs are waited for; they age out otherwise
MAX_HISTORY_CHARS = 2**21  # that a first turn brings, whatever is then left of it


def lineage_of(state: SessionState, root: BlockId) -> Lineage:
    """What the chain of a stored session is built on."""
    if state.first_reencoded is None:
        return Lineage(root)
    return Lineage(root, state.first_reencoded, state.splice_parent, state.splice_end)


@dataclass(frozen=True, slots=True)
class Means:
    """What all sessions of an engine share. reopened: the session of an id with these kinds of truncation, after its
    object was dropped.
    """

    core: Core
    tokenizer: Any
    template: ChatTemplate
    sessions: SessionStore
    reopened: Callable[[SessionKey, str, str], ChatSession]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that runs. said: what the person said, after a history that a first turn may bring."""

    said: list[Message]
    next: NextTurn
    handle: Handle
    idempotency_key: str | None = None


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time.

    messages: the transcript, whole. token_ids: exactly what the model has seen and said, as far as it still is in the
    window. last: the last turn's output. truncated_tokens: how many tokens were dropped to stay within the window.
    num_turns: how many are stored. truncation, truncation_reuse: see `Engine.chat`. state: what is stored of it.
    life: of the core that knows what this object told it. window: what the model sees of it.
    """

    def __init__(self, means: Means, key: SessionKey, system: str | None, state: SessionState | None) -> None:
        self.session_id = key.session_id
        self.tenant = key.tenant
        self.last: RequestOutput | None = None
        self.truncation = "auto"
        self.truncation_reuse = "reencode"
        self.deleted = False
        self._key = key
        self.life = means.core.life
        self._means = means
        self._core = means.core
        self._busy = threading.Lock()
        self._ending = threading.Lock()  # held to begin a turn, to store it, and to delete the session
        self._running: Turn | None = None
        self._expires_s: float | None = None  # what the store was told last
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._number: int | None = None  # of the stored session, once there is one
        self.messages: list[Message] = list(self._system)
        self.num_turns = self.truncated_tokens = 0
        self.window = Window(self._system, self.messages, 0, [], [], Lineage(means.core.root(key.tenant)))
        if state is not None:
            self._resume(state)

    def _resume(self, state: SessionState) -> None:
        self._number = state.head.number
        self._system = [dict(message) for message in state.head.system]
        self.messages, self.num_turns, self.truncated_tokens = state.messages, state.turn, state.truncated_tokens
        root = self._core.root(self.tenant)
        if state.head.fingerprint == self._core.facts.fingerprint:
            ids, chain, lineage, starts = state.token_ids, state.chain, lineage_of(state, root), state.turn_starts
        else:  # another model, whose ids may mean other texts: the transcript is tokenized again
            ids, chain, lineage, starts = [], [], Lineage(root), []
        self.window = Window(self._system, self.messages, state.num_dropped_messages, ids, chain, lineage, list(starts))

    def set_truncation(self, truncation: str | None, truncation_reuse: str | None) -> None:
        """See `Engine.chat`; None leaves one as it is. Raises RequestError."""
        kept = self.truncation if truncation is None else truncation
        reuse = self.truncation_reuse if truncation_reuse is None else truncation_reuse
        check_truncation(kept, reuse)
        self.truncation, self.truncation_reuse = kept, reuse

    def is_at(self, head: SessionHead) -> bool:
        """Whether this object is of that stored session, and knows all its turns."""
        return not self.deleted and self._number == head.number and self.num_turns == head.num_turns

    @property
    def token_ids(self) -> list[int]:
        return self.window.token_ids

    # -- turns -------------------------------------------------------------------------------------------------------
    def send(self, text: str, params: SamplingParams | None = None) -> RequestOutput:
        """One turn: the user's message in, the answer out, both added to the conversation; durable on return.

        When prompt and answer would exceed the window, the oldest turns go, down to half the window; the system prompt
        stays. Raises RequestError while another turn runs or when the session was deleted, ContextLengthError when the
        message alone is too long (or anything is, with truncation "disabled"), and StoreError when the turn could not
        be stored: it then is not part of the conversation.
        """
        for _ in self.stream(text, params):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """`send`, piece by piece; afterwards `last` is the whole output. Leaving early ends the answer there."""
        params = SamplingParams() if params is None else params
        said = self.check([{"role": "user", "content": text}], params)
        return self._run(said, params)

    def _run(self, said: list[Message], params: SamplingParams) -> Iterator[Piece]:
        turn = self.begin(said, params)
        final: Piece | None = None
        try:
            for piece in stream(self._core, turn.handle):
                if piece.finish_reason is None:
                    yield piece
                else:
                    final = piece  # held back until the turn is durable
        finally:
            self.end(turn)
        if final is not None:
            yield final

    def check(self, messages: Sequence[Message], params: SamplingParams) -> list[Message]:
        """The messages of a turn. Raises RequestError unless they are a user's, or a history that ends with one.

        A history, which only a session without turns takes, is the system prompt first if there is one, then user and
        assistant in turn.
        """
        check_params(params)
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a turn has one answer", param="n")
        if not params.detokenize:
            raise RequestError("detokenize is False; a turn is kept as text", param="detokenize")
        for message in messages:
            check_text(message["content"], "message")
            check_length([message["content"]], self._means.tokenizer, self._core.facts.max_request_tokens)
        if sum(len(message["content"]) for message in messages) > MAX_HISTORY_CHARS:
            raise RequestError(f"messages have more than {MAX_HISTORY_CHARS} characters", param="messages")
        said = [dict(message) for message in messages]
        history = said[1:] if said and said[0]["role"] == "system" else said
        expected = ["user", "assistant"] * (len(history) // 2) + ["user"]
        if [message["role"] for message in history] != expected:
            why = "messages must take turns, user and assistant, and end with the user"
            raise RequestError(why, param="messages")
        return said

    def begin(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        idempotency_key: str | None = None,
        listener: Listener | None = None,
    ) -> Turn:
        """Queue a turn; `messages` and `params` went through `check`. `end` has to be called, whatever happens.

        idempotency_key: stored with the turn. listener: see `Engine.submit`. Raises SessionBusyError while another
        turn runs, SessionNotFoundError when the session was deleted, and as `send`.
        """
        if not self._busy.acquire(blocking=False):
            raise SessionBusyError(f"session {self.session_id} is busy with another turn", param="session_id")
        try:
            with self._ending:
                if self.deleted:
                    raise SessionNotFoundError(
                        f"there is no session {self.session_id!r}: it was deleted", param="session_id"
                    )
                self._running = self._begin(list(messages), params, idempotency_key, listener)
                return self._running
        finally:
            if self._running is None:
                self._busy.release()

    def _begin(
        self, said: list[Message], params: SamplingParams, idempotency_key: str | None, listener: Listener | None
    ) -> Turn:
        window = self.window
        if len(said) > 1:
            window, said = self._with_history(said)
        text = said[-1]["content"]
        following = window.next_turn(
            self._core, self._means.template, text, params, self.tenant, self.truncation, self.truncation_reuse
        )
        try:
            spliced = (following.chain, following.lineage)
            asked = [(following.prompt, params)]
            [handle] = self._core.submit_all(asked, self.tenant, spliced=spliced, listener=listener)
        except Exception:
            self._forget(self._unused(following, None))
            raise
        return Turn(said, following, handle, idempotency_key)

    def _with_history(self, said: list[Message]) -> tuple[Window, list[Message]]:
        """A first turn that brings the conversation so far: the window it makes, and all but the system prompt."""
        if self.num_turns:
            raise RequestError("a session that has turns takes one user message at a time", param="messages")
        if said[0]["role"] == "system":
            self._system, said = said[:1], said[1:]
        self.messages = list(self._system)
        transcript = [*self._system, *said[:-1]]
        return Window(self._system, transcript, 0, [], [], self.window.lineage), said

    def end(self, turn: Turn, keep: bool = True) -> TurnRecord | None:
        """The turn becomes part of the conversation, durable on return; reused KV that no turn refers to goes.

        Not when it failed, said nothing, or is not to be kept. Raises as `send`.
        """
        try:
            return self._end(turn, keep)
        finally:
            self._running = None
            self._busy.release()

    def _end(self, turn: Turn, keep: bool) -> TurnRecord | None:
        handle = turn.handle
        self._core.abort(handle)
        if handle.output.finish_reason == "abort":
            with self._ending:  # a deletion that has ended it marks the session before it lets go of this
                pass
        lineage = handle.lineage or turn.next.lineage
        unused: Sequence[BlockId] = ()
        record = None
        try:
            if handle.error is None and keep:
                self.last = handle.output
                if handle.output.token_ids:
                    with self._ending:
                        if self.deleted:
                            gone = f"session {self.session_id} was deleted meanwhile: the turn is not stored"
                            raise StoreError(gone)
                        unused = self._unused(turn.next, lineage)
                        record = self._commit(turn, lineage)
        finally:
            if record is None:
                own = self._own(turn.next, handle) if self._is_gone() else ()
                unused = [*self._unused(turn.next, None), *own]
            self._forget(unused)
        return record

    def _unused(self, turn: NextTurn, stored: Lineage | None) -> Sequence[BlockId]:
        """Blocks that were spliced for this turn, unless it was stored with them or an earlier turn was."""
        first = turn.lineage.splice_index
        if first is None or turn.lineage in (stored, self.window.lineage):
            return ()
        return turn.chain[first:]

    def _own(self, turn: NextTurn, handle: Handle) -> list[BlockId]:
        """Blocks that only this turn has: neither of the turns before it nor of the system prompt alone."""
        known, first = self.window.chain, turn.turn_starts[0] // self._core.facts.block_size if turn.turn_starts else 0
        while first < min(len(known), len(handle.chain)) and known[first] == handle.chain[first]:
            first += 1
        return list(handle.chain[first:])

    def _is_gone(self) -> bool:
        """Whether the session was deleted, be it by somebody who did not know of this object."""
        if self.deleted or self._number is None:
            return self.deleted
        with suppress(StoreError):
            head = self._means.sessions.head(self._key)
            return head is None or head.number != self._number
        return False

    def _forget(self, block_ids: Sequence[BlockId]) -> None:
        if block_ids and not self._core.closed:
            with suppress(StoreError, EngineClosedError, EngineDiedError):
                self._core.forget(block_ids, FORGET_S)

    def _commit(self, running: Turn, lineage: Lineage) -> TurnRecord:
        """The turn becomes part of the conversation: text for people, ids for the next prompt. Waits for the disk."""
        turn, output = running.next, running.handle.output
        said: list[Message] = [*running.said, {"role": "assistant", "content": output.text}]
        said_ids = answer_ids(self._means.tokenizer, self._means.template, output.prompt_token_ids, output.choices[0])
        token_ids = [*output.prompt_token_ids, *said_ids]
        chain = list(turn.chain) if lineage == turn.lineage else []  # given up: the reused KV was missing
        extend_chain(chain, lineage.root, token_ids, self._core.facts.block_size)
        append = not turn.rebase and lineage == self.window.lineage
        known, num_blocks = len(self.window.token_ids), len(self.window.chain)
        record = TurnRecord(
            number=self.num_turns + 1,
            messages=[*(self._system if self.num_turns == 0 else []), *said],
            token_ids=token_ids[known:] if append else token_ids,
            chain=chain[num_blocks:] if append else chain,
            base="append" if append else "rebase",
            first_reencoded=lineage.splice_index,
            splice_parent=lineage.splice_parent,
            splice_end=lineage.splice_end,
            turn_starts=turn.turn_starts,
            num_dropped_messages=turn.num_dropped,
            truncated_tokens=turn.truncated_tokens,
            finish_reason=output.finish_reason or "",
            usage=_usage(output),
            created_s=time.time(),
            idempotency_key=running.idempotency_key,
        )
        head = self._store(record)
        self.messages += said
        self.truncated_tokens += turn.truncated_tokens
        starts = turn.turn_starts
        self.window = Window(self._system, self.messages, turn.num_dropped, token_ids, chain, lineage, starts)
        self._expire(head.expires_s)
        return record

    # -- the whole session -------------------------------------------------------------------------------------------
    def fork(self, session_id: str, turn: int | None = None) -> ChatSession:
        """A new session of this id with turns 1 to `turn` (None: all) of this one; they share their KV.

        Raises RequestError for a bad id, StoreError when it is taken or there is no such turn.
        """
        if self.num_turns == 0 or (turn is not None and not 1 <= turn <= self.num_turns):
            raise RequestError(f"turn is {turn}; this session has {self.num_turns} turns", param="turn")
        key = SessionKey(self.tenant, session_id)
        if self._means.sessions.exists(key):
            raise SessionExistsError(f"there is a session {session_id!r} already", param="session_id")
        try:
            self._means.sessions.fork(self._key, turn, key).wait()
        except StoreError as error:
            if self._means.sessions.exists(self._key):
                raise
            raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id") from error
        return self._means.reopened(key, self.truncation, self.truncation_reuse)

    def keep_last(self, num_turns: int) -> TurnRecord | None:
        """Take all but the last turns out of the window now; the transcript stays. Durable on return.

        It is stored as a turn without messages, which is returned; None when the window has no more turns than that.
        Raises SessionBusyError while a turn runs, SessionNotFoundError when the session was deleted.
        """
        if not self._busy.acquire(blocking=False):
            raise SessionBusyError(f"session {self.session_id} is busy with another turn", param="session_id")
        try:
            with self._ending:
                if self.deleted or self._number is None:
                    raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id")
                return self._keep_last(num_turns)
        finally:
            self._busy.release()

    def _keep_last(self, num_turns: int) -> TurnRecord | None:
        before = self.window
        window = before.last(num_turns, self._core, self.tenant, self.truncation_reuse)
        if window is None:
            return None
        lineage = window.lineage
        record = TurnRecord(
            number=self.num_turns + 1, messages=(), token_ids=window.token_ids, chain=window.chain, base="rebase",
            first_reencoded=lineage.splice_index, splice_parent=lineage.splice_parent, splice_end=lineage.splice_end,
            turn_starts=window.turn_starts, num_dropped_messages=window.num_dropped,
            truncated_tokens=max(0, len(before.token_ids) - (len(window.token_ids) or self._num_rendered(window))),
            finish_reason="truncated", created_s=time.time(),
        )  # fmt: skip
        try:
            self._store(record)
        except Exception:
            if lineage.splice_index is not None and lineage != before.lineage:
                self._forget(window.chain[lineage.splice_index :])
            raise
        self.truncated_tokens += record.truncated_tokens
        self.window = window
        return record

    def _num_rendered(self, window: Window) -> int:
        """Tokens of a window whose ids are not known yet."""
        return len(self._means.template.prompt_ids(window.shown)) if window.shown else 0

    def _store(self, record: TurnRecord) -> SessionHead:
        """Durable on return."""
        facts = self._core.facts
        committed = self._means.sessions.commit_turn(
            self._key, record, facts.fingerprint, facts.model_name, self._number
        )
        head = committed.wait()
        self._number = head.number
        self.num_turns += 1
        return head

    def set_ttl(self, ttl_s: float | None) -> None:
        """Delete the session by itself so many seconds after its last turn; None keeps it. Needs a first turn."""
        if self._number is None:
            raise RequestError("the session has no turn yet", param="ttl_s")
        head = self._means.sessions.set_ttl(self._key, ttl_s).wait()
        self._expire(head.expires_s)

    def _expire(self, at_s: float | None) -> None:
        """Its KV goes before that of others from then on."""
        if at_s != self._expires_s:
            self._core.expire(self.window.chain, at_s)
        self._expires_s = at_s

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs."""
        return self._busy.locked()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """In here the session can be deleted: its turn has been ended, none begins, and none is stored."""
        with self._ending:
            if self._running is not None:
                self._core.abort(self._running.handle)
            yield

    def mark_deleted(self) -> list[BlockId]:
        """To be called in `ending`. Returns the blocks of a turn that ran and will not be stored."""
        self.deleted = True
        if self._running is None:
            return []
        turn = self._running
        return [*self._own(turn.next, turn.handle), *self._unused(turn.next, None)]


def _usage(output: RequestOutput) -> dict[str, int]:
    """Counts of tokens, and times in microseconds as far as they are known."""
    usage, times = output.usage, asdict(output.timings)
    return {
        **{f"{name[:-2]}_us": round(seconds * 1e6) for name, seconds in times.items() if seconds is not None},
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        **asdict(usage.cached_tokens_details),
    }
