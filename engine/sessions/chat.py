"""A conversation as exact token ids, and its place in the store: a turn's prompt is these and what the template adds.

A turn is durable before its last piece is yielded. When the window is full, the oldest turns are dropped, and the KV of
the rest is spliced (see `engine/sessions/window.py`). `Chats` opens sessions by their ids, so that callers share one
object per session. Knows no engine: a `CoreClient` computes.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.client.messages import Forget, Pin
from kvstore.engine.client.requests import CoreClient, Listener
from kvstore.engine.outputs import AppliedEdit, EditResult, Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.edits import Changed, Directive, directives_of, edited_turn, edits_at, edits_of, shortened
from kvstore.engine.sessions.window import OneTurn, Window
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.language import Language
from kvstore.engine.text.prompts import (
    NO_OPTIONS,
    AnswerOptions,
    ToolsGiven,
    check_results,
    check_truncation,
    checked_turn,
    messages_of,
    options_of,
    without_spans,
)
from kvstore.engine.turns import Claims, Hold, blocking
from kvstore.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineOverloadedError,
    RequestError,
    SessionBusyError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
)
from kvstore.sessions.answers import AnswerStore, owner_tag
from kvstore.sessions.record import Fork, MessageEdit, SessionHead, SessionKey, SessionState, Tombstone, TurnRecord
from kvstore.sessions.store import SessionStore

DELETE_TIMEOUT_S = 60.0
Recalled = Callable[[list[Message]], list[int]]


class ChatSession:
    """One conversation; made by `Engine.chat`. One turn at a time. Other servers may have stored more turns of it.

    last: the last turn's output. truncation, truncation_reuse: see `Engine.chat`. window: the transcript, and the part
    of it that the model sees. chats: what all sessions of an engine share. storing: held while a turn begins, while it
    is stored, and while the session is deleted. life: the core's life when this object was made; a later core knows
    nothing of it. unstored: blocks that turns have computed which are not stored.

    number: the store's own for it; None until the first turn is stored; fork_of: what a fork begins with until then.
    num_turns: that are stored, as far as known here, or that a fork begins with. truncated_tokens: dropped from the
    window by these. updated_s: when the last of them was stored.
    """

    def __init__(self, chats: Chats, key: SessionKey, system: str | None, state: SessionState | None) -> None:
        self.key = key
        self.session_id, self.tenant = key.session_id, key.tenant
        self.last: RequestOutput | None = None
        self.truncation, self.truncation_reuse = "auto", "reencode"
        self.chats, self.life = chats, chats.client.life
        self.storing = threading.Lock()
        self.number: int | None = None
        self.fork_of: Fork | None = None
        self.num_turns = self.truncated_tokens = 0
        self.updated_s = 0.0
        self.is_deleted = False
        self._expires_s: float | None = None  # as the core was told
        self.unstored = set[BlockId]()
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.window = Window(first, list(first), 0, [], [], Lineage(chats.client.facts.root(key.tenant)))
        if state is not None:
            self._adopt(state)

    def __dir__(self) -> list[str]:
        public = "edit fork keep_last last messages num_turns send session_id set_truncation set_ttl stream tenant"
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
        asked = (self.check(messages_of(said), chosen), chosen)
        return blocking(
            self.chats.client, self.chats.claims, self.key,
            lambda hold: self.begin(hold, *asked, options=options_of(tools, thinking)), self.end,
        )  # fmt: skip

    def check(self, messages: Sequence[Message], params: SamplingParams) -> list[Message]:
        """See `checked_turn`. Only a session without turns takes a history."""
        tokenizer = self.chats.language.tokenizer
        return checked_turn(messages, params, tokenizer, self.chats.client.facts.max_request_tokens)

    def begin(
        self, hold: Hold, messages: Sequence[Message], params: SamplingParams, listener: Listener | None = None,
        after_turn: int | None = None, options: AnswerOptions = NO_OPTIONS, recall: Recalled | None = None,
    ) -> OneTurn:  # fmt: skip
        """Queue a turn of the holder. `check` has passed `messages` and `params`. The caller must call `end`, whatever
        happens.

        listener: see `CoreClient.submit`. after_turn: the number of turns that the session must have. recall: gives the
        prompt of a history, with the ids of known answers, and stand-ins around spans. Raises SessionBusyError if it
        has other turns, or while a turn runs on a server that shares the sessions, SessionNotFoundError when it was
        deleted, and as `send`.
        """
        with ExitStack() as undo:
            self._lease(hold, undo)
            if after_turn not in (None, self.num_turns):
                raise SessionBusyError(f"session {self.session_id} has gone on since turn {after_turn}")
            with self.storing:
                if self.is_deleted:
                    why = f"there is no session {self.session_id!r}: it was deleted"
                    raise SessionNotFoundError(why, param="session_id")
                cleared, applied = self._cleared(messages, options)
                before, edit = (self.window, None) if cleared is None else cleared[:2]
                new = () if edit is None else {*before.chain}.difference(self.window.chain)
                self.unstored.update(new)
                undo.callback(self.chats.client.forget, [*new])
                hold.turn = turn = self._submit(before, edit, messages, params, hold, listener, options, recall)
            undo.pop_all()
            turn.handle.output.applied_edits = applied
            return turn

    def _lease(self, hold: Hold, undo: ExitStack) -> None:
        """Keep other servers from writing, and read what they have stored since the last turn. Raises as `begin`."""
        claims = self.chats.claims
        claims.lease(hold)
        undo.callback(claims.give_back, hold)
        if hold.lease is not None:
            self.catch_up(hold.request_key)

    def _submit(
        self, before: Window, cleared: TurnRecord | None, said: Sequence[Message], params: SamplingParams, hold: Hold,
        listener: Listener | None, options: AnswerOptions, recall: Recalled | None,
    ) -> OneTurn:  # fmt: skip
        client, language, prompt = self.chats.client, self.chats.language, None
        template = language.chat_template(options)
        old = max((i for i, m in enumerate(said) if m["role"] in ("system", "assistant")), default=-1) + 1
        if old:
            if self.num_turns:
                raise RequestError("a session that has turns takes one user message at a time", param="messages")
            before = before.with_history(without_spans(said[:old]))
            history = [*said] if said[0]["role"] == "system" else [*before.system, *said]
            prompt = template.prompt_ids(template.marked(history)) if recall is None else recall(history)
        asked, new = template.marked(said[old:]), without_spans(said[old:])
        check_results(new, before.messages)
        following = before.next_turn(
            client, template, asked, params, self.tenant, self.truncation, self.truncation_reuse, options.digest,
            prompt, language.thought_in if options.thinking == "drop" else None,
        )  # fmt: skip
        try:
            if not params.kv_exact:
                following = following.with_reuse(client, self.tenant, hold.computing)
            starts = following.turn_starts or template.first_start(before.system, following.prompt)
            handle = client.submit(
                following.prompt, language.constrained(params, options), self.tenant, listener=listener,
                spliced=(following.chain, following.lineage), turn_starts=starts, parser=language.parser(options),
                shared_ends=before.shared_ends(client, self.chats.sessions, self.number, starts),
                earlier=replace(before.had_of(following, template, new, self.updated_s), begun_s=following.begun_s),
            )  # fmt: skip
        except Exception:
            self.unstored.update(client.forget(following.spliced_blocks(before.lineage)))
            raise
        finally:
            self.unstored.update(*(one.own_blocks(client.facts.block_size) for one in hold.computed))
        return OneTurn(before, new, following, handle, hold.request_key, template, cleared)

    def end(self, hold: Hold, keep: bool = True) -> TurnRecord | None:
        """End the holder's turn and store it, durable on return; delete reused KV that no turn refers to.

        A turn that failed, said nothing or is not to be kept is not stored. Raises as `send`.
        """
        client, turn, record = self.chats.client, hold.turn, None
        assert turn is not None
        with ExitStack() as leased:
            leased.callback(self.chats.claims.give_back, hold)
            client.abort(turn.handle)
            turn.explain(client.facts.block_size)
            with self.storing:  # a deletion that has ended the turn marks the session before it leaves this
                pass
            try:
                if turn.handle.error is None and keep:
                    self.last = turn.handle.output
                    record = self._commit(hold, turn) if self.last.token_ids else None
            finally:
                size, sessions = client.facts.block_size, self.chats.sessions
                left = turn.unneeded_blocks(record is not None, False, size, self.window.lineage)
                if record is None:  # they stay for another try
                    self.unstored.update(turn.own_blocks(size))
                is_lone = record is None and self.fork_of is None and not self.check_deleted()
                if not (is_lone and turn.is_found(sessions, self.number, size)):
                    left, self.unstored = [*left, *self.unstored], set()
                self.unstored.update(client.forget(left))
        return record

    def _commit(self, hold: Hold, turn: OneTurn) -> TurnRecord:
        """Add the turn to the conversation. Waits for the disk."""
        client, language = self.chats.client, self.chats.language
        with self.storing:
            if self.is_deleted:
                raise StoreError(f"session {self.session_id} was deleted meanwhile: the turn is not stored")
            after = turn.after(language.chat_template(), client.facts.block_size)
            cleared = () if turn.cleared is None else (turn.cleared,)
            record = turn.record(self.num_turns + len(cleared) + 1, after)
            self.store((*cleared, record), after, hold)
            return record

    # -- changes that are no answers: each is a turn without messages --------------------------------------------------
    def keep_last(self, num_turns: int) -> TurnRecord | None:
        """Remove all but the last turns from the window now; the transcript stays. Durable on return.

        It is stored as a turn without messages, which is returned; None when the window has no more turns than that.
        Raises SessionBusyError while a turn runs, SessionNotFoundError when the session was deleted.
        """
        with self._changing() as hold:
            chats, number, reuse = self.chats, self.num_turns + 1, self.truncation_reuse
            client, language = chats.client, chats.language
            changed = shortened(self.window, num_turns, number, reuse, language, client, self.tenant)
            if changed is None:
                chats.sessions.confirm()
                return None
            self._store_change(changed, hold)
            return changed[1]

    def edit(
        self, edits: Sequence[Directive | Mapping[str, Any]], reuse: str = "exact", expected_turn: int | None = None
    ) -> EditResult:
        """Remove messages, or give them another content; see `Directive`. Durable on return. It is stored as a turn
        without messages; a fork of the turn before goes on without it.

        reuse: of the KV behind the edit. "exact": none; the next turn computes it. "reencode": what is stored, which
        remembers what it has read. "forget": none; it is deleted everywhere, and what was there from the transcript.
        expected_turn: how many turns the session has, else SessionBusyError. Raises RequestError, and as `keep_last`.
        """
        directives = directives_of(edits, reuse)
        with self._changing() as hold:
            if expected_turn not in (None, self.num_turns):
                raise SessionBusyError(f"session {self.session_id} has {self.num_turns} turns, not {expected_turn}")
            changed, num_reencoded = self._edited(partial(edits_of, directives, self.window, reuse=reuse), reuse)
            self._store_change(changed, hold)
        _, record, forgotten = changed
        self.last = None if forgotten else self.last
        for tombstone in self.chats.sessions.pending_deletions() if forgotten else ():
            if tombstone.key == self.key:
                self.chats.carry_out(tombstone, (), DELETE_TIMEOUT_S)
        done = "exact" if reuse == "reencode" and not num_reencoded else reuse
        return EditResult(record.number, done, len(record.token_ids), num_reencoded)

    @contextmanager
    def _changing(self) -> Iterator[Hold]:
        """Within it, no turn runs, no other server writes, and what they have stored is known."""
        claims = self.chats.claims
        with ExitStack() as leased:
            hold = claims.hold(self.key)
            leased.callback(claims.release, hold)
            self._lease(hold, leased)
            with self.storing:
                if self.is_deleted or self.number is None:
                    raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id")
                yield hold

    def _store_change(self, changed: Changed, hold: Hold) -> None:
        (after, record, forgotten), before = changed, self.window
        try:
            self.store([record], after, hold, forgotten)
        except Exception:
            self.unstored.update(self.chats.client.forget([*{*after.chain}.difference(before.chain)]))
            raise

    def _cleared(
        self, said: Sequence[Message], options: AnswerOptions
    ) -> tuple[Changed | None, Sequence[AppliedEdit]]:  # fmt: skip
        """What the options want cleared before a turn that adds `said`, as an edit, which is stored with that turn."""
        chats, wanted = self.chats, options.context_management
        if wanted is None or not self.num_turns:  # what begins with a history is not stored yet
            return None, ()
        shown = [*self.window.shown, *said]
        messages, applied = chats.language.cleared(shown, options, chats.client.facts, is_session=True)
        if not messages:
            return None, applied
        return self._edited(partial(edits_at, messages, self.window), wanted.reuse or "exact")[0], applied

    def _edited(self, make: Callable[[Sequence[TurnRecord]], list[MessageEdit]], reuse: str) -> tuple[Changed, int]:
        chats = self.chats
        turns = self.fork_of.turns if self.fork_of else chats.sessions.turns(self.key, 0, self.num_turns) or ()
        return edited_turn(self.window, turns, make(turns), reuse, chats.language, chats.client, self.tenant)

    # -- in the store ------------------------------------------------------------------------------------------------
    def _adopt(self, state: SessionState) -> None:
        self.number = state.head.number or None
        self.num_turns, self.truncated_tokens = state.turn, state.truncated_tokens
        self.updated_s, self.window = state.head.updated_s, Window.of(state, self.chats.client)

    def is_at(self, head: SessionHead) -> bool:
        """Whether the head is this session's, and all its turns are known here."""
        return not self.is_deleted and self.number == head.number and self.num_turns == head.num_turns

    def catch_up(self, idempotency_key: str | None) -> None:
        """Read what other servers have stored since.

        Raises SessionBusyError when one of them has answered the request of this key.
        """
        sessions = self.chats.sessions
        head = sessions.head(self.key)
        if head is None:
            self.is_deleted = self.is_deleted or self.number is not None
        if head is None or self.is_at(head):
            return
        if idempotency_key is not None and sessions.turn_of_request(self.key, idempotency_key) is not None:
            answered = f"session {self.session_id} has just answered this request; ask again"
            raise SessionBusyError(answered, retry_after_s=0)
        if (state := sessions.load(self.key)) is not None:
            self._adopt(state)

    def check_deleted(self) -> bool:
        """Whether it was deleted, perhaps by somebody who did not know this object."""
        if not self.is_deleted and self.number is not None:
            with suppress(StoreError):
                head = self.chats.sessions.head(self.key)
                self.is_deleted = head is None or head.number != self.number
        return self.is_deleted

    def store(
        self, turns: Sequence[TurnRecord], after: Window, hold: Hold, forgotten: Sequence[MessageEdit] = ()
    ) -> None:
        """Store the next turns, durable on return. after: the window with them. forgotten: see `SessionStore`."""
        facts = self.chats.client.facts
        head = self.chats.sessions.commit_turn(
            self.key, *turns, fingerprint=facts.fingerprint, model=facts.model_name, session_number=self.number,
            lease=hold.lease, forgotten=forgotten, fork=self.fork_of, **hold.changes,
        ).wait()  # fmt: skip
        self.number, self.num_turns, self.updated_s, self.fork_of = head.number, head.num_turns, head.updated_s, None
        self.truncated_tokens += sum(turn.truncated_tokens for turn in turns)
        self.window = after
        self._tell_expiry(head)

    def _tell_expiry(self, head: SessionHead) -> None:
        """The core evicts the KV of an expired session before others'. If it takes nothing now, it is told after the
        next turn: this one is stored.
        """
        if head.expires_s != self._expires_s:
            with suppress(EngineOverloadedError, EngineClosedError, EngineDiedError):
                until_s = math.inf if head.expires_s is None else head.expires_s
                self.chats.client.call(Pin(self.window.chain, expires_s=until_s))
                self._expires_s = head.expires_s

    # -- the whole session -------------------------------------------------------------------------------------------
    def fork(self, session_id: str, turn: int | None = None) -> ChatSession:
        """A new session of this id with turns 1 to `turn` (None: all) of this one; they share their KV.

        Raises RequestError for a bad id, if it is taken, or if there is no such turn.
        """
        if self.num_turns == 0 or (turn is not None and turn not in range(1, self.num_turns + 1)):
            raise RequestError(f"turn is {turn!r}; this session has {self.num_turns} turns", param="turn")
        chats, key = self.chats, SessionKey(self.tenant, session_id)
        if chats.sessions.exists(key):
            raise SessionExistsError(f"there is a session {session_id!r} already", param="session_id")
        chats.sessions.fork(self.key, turn, key).wait()
        chats.drop(key)
        return chats.open(key, None, self.truncation, self.truncation_reuse)

    def set_ttl(self, ttl_s: float | None) -> None:
        """Let the session expire this many seconds after its last turn; None keeps it. Needs a first turn."""
        if ttl_s is not None and (isinstance(ttl_s, str | bool) or not 0 < ttl_s < math.inf):
            raise RequestError(f"ttl_s is {ttl_s!r}; give seconds, more than 0, or None", param="ttl_s")
        if self.number is None:
            raise RequestError("the session has no turn yet", param="ttl_s")
        self._tell_expiry(self.chats.sessions.set_ttl(self.key, ttl_s).wait())


MAX_KEPT = 256  # sessions
MAX_KEPT_TOKENS = 2_000_000  # about 40 bytes each


class Chats:
    """The sessions of one engine. claims: which turn has which. known: the objects in use. lock: held while one is
    made.
    """

    def __init__(self, client: CoreClient, language: Language, sessions: SessionStore, answers: AnswerStore) -> None:
        self.client, self.language, self.sessions, self.answers = client, language, sessions, answers
        client.unreferenced = partial(sessions.unshared, 0)
        self.claims = Claims(sessions.sharing.leases)
        self.on_deleted: Callable[[SessionKey], object] = lambda key: None  # token ids of it may be in memory
        self.known: weakref.WeakValueDictionary[SessionKey, ChatSession] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()
        self._kept: OrderedDict[SessionKey, ChatSession] = OrderedDict()  # the last used last

    def open(
        self, key: SessionKey, system: str | None = None, truncation: str | None = None,
        truncation_reuse: str | None = None, is_new: bool = False, fork: Fork | None = None,
    ) -> ChatSession:  # fmt: skip
        """See `Engine.chat`; its arguments are already checked. fork: what a new session begins with."""
        chat, state = None if is_new else self.get(key), None if fork is None else fork.state
        if chat is not None and chat.number is not None and not (self.claims.on(key) or self.sessions.exists(key)):
            self.drop(key)  # it has expired
            chat = None
        if chat is None and not is_new:
            state = self.sessions.load(key)  # outside the lock: it reads the disk
        with self.lock:
            self.client.check_open()
            chat = self.get(key)
            if chat is None:
                if not is_new and self.sessions.head(key) != (None if state is None else state.head):
                    state = self.sessions.load(key)  # it may have changed since
                chat = self.known[key] = ChatSession(self, key, system, state)
                chat.fork_of = fork
            chat.set_truncation(truncation, truncation_reuse)
            return chat

    def get(self, key: SessionKey, head: SessionHead | None = None) -> ChatSession | None:
        """The object in use. None if there is none, if the core has restarted since, if the session was deleted, or if
        another server has stored turns since, so that the head is not what the object knows.
        """
        chat = self.known.get(key)
        if chat is None or chat.life != self.client.life or chat.is_deleted:
            return None
        return chat if head is None or chat.is_at(head) else None

    def keep(self, chat: ChatSession) -> None:
        """Keep the object in memory for its next turn, as one of those used last."""
        with self.lock:
            self._kept[chat.key] = chat
            self._kept.move_to_end(chat.key)
            num_tokens = sum(len(one.token_ids) for one in self._kept.values())
            while len(self._kept) > MAX_KEPT or (num_tokens > MAX_KEPT_TOKENS and len(self._kept) > 1):
                num_tokens -= len(self._kept.popitem(last=False)[1].token_ids)

    def drop(self, key: SessionKey) -> None:
        """Forget the object: the next `open` makes a new one."""
        with self.lock:
            self.known.pop(key, None)
            self._kept.pop(key, None)

    def carry_out(self, tombstone: Tombstone, unstored: Iterable[BlockId], timeout_s: float) -> None:
        """Delete a deletion's blocks and unstored ones, but for those that sessions have. What cannot stays pending."""
        self.on_deleted(tombstone.key)
        is_forgotten = self.answers.forget_owner(owner_tag(tombstone.key.tenant, tombstone.key.session_id))
        block_ids = self.sessions.unshared(0, {*tombstone.block_ids, *unstored})
        if self.client.call(Forget(list(block_ids), timeout_s)) and is_forgotten:
            self.sessions.finish_deletion(tombstone.number).wait()
