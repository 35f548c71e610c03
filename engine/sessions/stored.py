"""A session's place in the store, which turn holds it, and what a turn leaves behind.

One turn at a time holds a session, in this process and on all servers that share the sessions. Whoever ends the turn
stores its record. Any thread may call `Claims`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from msgspec import structs

from kvstore.blocks.ids import BlockId, Lineage, extend_chain
from kvstore.engine.client.messages import Pin
from kvstore.engine.client.requests import CoreClient, Handle
from kvstore.engine.outputs import RequestOutput
from kvstore.engine.sessions.misses import MadePrompt, explained
from kvstore.engine.sessions.window import NextTurn, Window
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.language import answer_ids
from kvstore.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineOverloadedError,
    RequestError,
    SessionBusyError,
    SessionExistsError,
    StoreError,
)
from kvstore.sessions.record import SessionHead, SessionKey, SessionState, TurnRecord
from kvstore.sessions.sharing import Claim, Leasing
from kvstore.sessions.store import SessionStore


@dataclass(frozen=True, slots=True)
class OneTurn:
    """A running turn.

    before: the conversation so far, with the history that a first turn may bring. said: what it adds: the user's
    message, or results of tools. next: the prompt. handle: the request's. template: which made the prompt.
    """

    before: Window
    said: Sequence[Message]
    next: NextTurn
    handle: Handle
    idempotency_key: str | None = None
    template: ChatTemplate | None = None

    def explain(self, block_size: int) -> None:
        """Say in its usage what became of thinking, and why it has computed what an earlier turn had, if it has."""
        output = self.handle.output
        output.usage = replace(output.usage, thinking=self.next.thinking)
        if self.template is not None and self.handle.has_missed(block_size):
            shown = [*self.before.kept(self.next.num_dropped), *self.said]
            prompt = MadePrompt(output.prompt_token_ids, shown, self.template)
            output.usage = replace(output.usage, miss=explained(self.handle, prompt, block_size))

    @property
    def lineage(self) -> Lineage:
        """What its chain is built on. The splice was given up where reused KV was missing."""
        return self.handle.lineage or self.next.lineage

    def after(self, tokenizer: Any, template: ChatTemplate, block_size: int) -> Window:
        """The conversation with this turn: text for people, ids for the next prompt."""
        output, lineage = self.handle.output, self.lineage
        said_ids = answer_ids(tokenizer, template, output.prompt_token_ids, output.choices[0])
        token_ids = [*output.prompt_token_ids, *said_ids]
        chain = list(self.next.chain) if lineage == self.next.lineage else []
        extend_chain(chain, lineage.root, token_ids, block_size)
        messages = [*self.before.messages, *self.said, output.choices[0].message]
        return Window(
            self.before.system, messages, self.next.num_dropped, token_ids, chain, lineage, self.next.turn_starts,
            self.next.options,
        )  # fmt: skip

    def record(self, number: int, after: Window) -> TurnRecord:
        """What is stored of it: the ids that it adds, or all ids if they do not continue those before."""
        output, before = self.handle.output, self.before
        append = not self.next.rebase and after.lineage == before.lineage
        messages: Sequence[Message] = after.messages if number == 1 else after.messages[-len(self.said) - 1 :]
        return TurnRecord(
            number=number,
            messages=messages,
            token_ids=after.token_ids[len(before.token_ids) :] if append else after.token_ids,
            chain=after.chain[len(before.chain) :] if append else after.chain,
            base="append" if append else "rebase",
            first_reencoded=after.lineage.splice_index,
            splice_parent=after.lineage.splice_parent,
            splice_end=after.lineage.splice_end,
            turn_starts=after.turn_starts,
            num_dropped_messages=after.num_dropped,
            truncated_tokens=self.next.truncated_tokens,
            finish_reason=output.finish_reason or "",
            usage=_usage(output),
            miss=None if output.usage.miss is None else structs.asdict(output.usage.miss),
            created_s=time.time(),
            idempotency_key=self.idempotency_key,
            options=after.options,
        )

    def unneeded_blocks(self, is_stored: bool, is_deleted: bool, block_size: int) -> Sequence[BlockId]:
        """Blocks that nothing refers to once the turn has ended. is_deleted: its session was deleted before it was
        stored.
        """
        before, spliced = self.before, self.next.spliced_blocks
        if is_stored:
            return spliced(before.lineage, self.lineage)
        return [*(self._own_blocks(block_size) if is_deleted else ()), *spliced(before.lineage)]

    def _own_blocks(self, block_size: int) -> Sequence[BlockId]:
        """Blocks of this turn alone, not of earlier turns or the system prompt."""
        known, chain = self.before.chain, self.handle.chain
        first = self.next.turn_starts[0] // block_size if self.next.turn_starts else 0
        while first < min(len(known), len(chain)) and known[first] == chain[first]:
            first += 1
        return chain[first:]


def record_of_truncation(number: int, before: Window, after: Window, template: ChatTemplate) -> TurnRecord:
    """A turn without messages: what is stored when turns are removed from the window without a new one."""
    return TurnRecord(
        number=number, messages=(), token_ids=after.token_ids, chain=after.chain, base="rebase",
        first_reencoded=after.lineage.splice_index, splice_parent=after.lineage.splice_parent,
        splice_end=after.lineage.splice_end, turn_starts=after.turn_starts, num_dropped_messages=after.num_dropped,
        truncated_tokens=max(0, len(before.token_ids) - after.num_tokens(template)),
        finish_reason="truncated", created_s=time.time(), options=after.options,
    )  # fmt: skip


def _usage(output: RequestOutput) -> dict[str, int]:
    """Counts of tokens, and known times in microseconds."""
    usage, times = output.usage, asdict(output.timings)
    capped = {} if usage.capped_max_tokens is None else {"capped_max_tokens": usage.capped_max_tokens}
    thinking = {} if usage.thinking is None else {"thinking_dropped": int(usage.thinking == "dropped")}
    return {
        **capped,
        **thinking,
        **{f"{name[:-2]}_us": round(seconds * 1e6) for name, seconds in times.items() if seconds is not None},
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        **asdict(usage.cached_tokens_details),
    }


def lineage_of(state: SessionState, root: BlockId) -> Lineage:
    """The lineage of a stored session's chain."""
    if state.first_reencoded is None:
        return Lineage(root)
    return Lineage(root, state.first_reencoded, state.splice_parent, state.splice_end)


def window_of(state: SessionState, client: CoreClient) -> Window:
    """The window of a stored session. Another model's ids are dropped, so that the transcript is tokenized again."""
    head, root = state.head, client.facts.root(state.head.key.tenant)
    system = [dict(message) for message in head.system]
    if head.fingerprint != client.facts.fingerprint:
        num_foreign = len(state.token_ids)
        return Window(
            system, state.messages, state.num_dropped_messages, [], [], Lineage(root), num_foreign=num_foreign
        )
    return Window(
        system, state.messages, state.num_dropped_messages, state.token_ids, state.chain, lineage_of(state, root),
        list(state.turn_starts), state.options,
    )  # fmt: skip


class StoredSession:
    """One session in the store. Other servers may have stored more turns than this object knows.

    number: the store's own for it; None until the first turn is stored. num_turns: of the turns known here.
    truncated_tokens: dropped from the window by all these turns. updated_s: when the last of them was stored.
    """

    def __init__(self, sessions: SessionStore, client: CoreClient, key: SessionKey, state: SessionState | None) -> None:
        self.key = key
        self.number: int | None = None
        self.num_turns = self.truncated_tokens = 0
        self.updated_s = 0.0
        self.is_deleted = False
        self._sessions, self._client = sessions, client
        self._expires_s: float | None = None  # as the core was told
        if state is not None:
            self._adopt(state)

    def _adopt(self, state: SessionState) -> None:
        self.number, self.num_turns, self.truncated_tokens = state.head.number, state.turn, state.truncated_tokens
        self.updated_s = state.head.updated_s

    def is_at(self, head: SessionHead) -> bool:
        """Whether the head is this session's, and all its turns are known here."""
        return not self.is_deleted and self.number == head.number and self.num_turns == head.num_turns

    def catch_up(self, idempotency_key: str | None) -> SessionState | None:
        """Read what other servers have stored since; None if there is nothing new.

        Raises SessionBusyError when one of them has answered the request of this key.
        """
        head = self._sessions.head(self.key)
        if head is None:
            self.is_deleted = self.is_deleted or self.number is not None
        if head is None or self.is_at(head):
            return None
        if idempotency_key is not None and self._sessions.turn_of_request(self.key, idempotency_key) is not None:
            answered = f"session {self.key.session_id} has just answered this request; ask again"
            raise SessionBusyError(answered, retry_after_s=0)
        state = self._sessions.load(self.key)
        if state is not None:
            self._adopt(state)
        return state

    def check_deleted(self) -> bool:
        """Whether it was deleted, perhaps by somebody who did not know this object."""
        if not self.is_deleted and self.number is not None:
            with suppress(StoreError):
                head = self._sessions.head(self.key)
                self.is_deleted = head is None or head.number != self.number
        return self.is_deleted

    def commit(self, turn: TurnRecord, chain: Sequence[BlockId], lease: Claim | None) -> None:
        """Store the next turn, durable on return. chain: the session's whole chain after it."""
        facts = self._client.facts
        committed = self._sessions.commit_turn(self.key, turn, facts.fingerprint, facts.model_name, self.number, lease)
        head = committed.wait()
        self.number, self.updated_s = head.number, head.updated_s
        self.num_turns += 1
        self.truncated_tokens += turn.truncated_tokens
        self._tell_expiry(head, chain)

    def set_ttl(self, ttl_s: float | None, chain: Sequence[BlockId]) -> None:
        """See `ChatSession.set_ttl`."""
        if self.number is None:
            raise RequestError("the session has no turn yet", param="ttl_s")
        self._tell_expiry(self._sessions.set_ttl(self.key, ttl_s).wait(), chain)

    def _tell_expiry(self, head: SessionHead, chain: Sequence[BlockId]) -> None:
        """The core evicts the KV of an expired session before others'. If it takes nothing now, it is told after the
        next turn: this one is stored.
        """
        if head.expires_s != self._expires_s:
            with suppress(EngineOverloadedError, EngineClosedError, EngineDiedError):
                until_s = math.inf if head.expires_s is None else head.expires_s
                self._client.call(Pin(chain, expires_s=until_s))
                self._expires_s = head.expires_s

    def fork(self, session_id: str, turn: int | None) -> SessionKey:
        """See `ChatSession.fork`. Returns the new session's key."""
        if self.num_turns == 0 or (turn is not None and not 1 <= turn <= self.num_turns):
            raise RequestError(f"turn is {turn}; this session has {self.num_turns} turns", param="turn")
        new_key = SessionKey(self.key.tenant, session_id)
        if self._sessions.exists(new_key):
            raise SessionExistsError(f"there is a session {session_id!r} already", param="session_id")
        self._sessions.fork(self.key, turn, new_key).wait()
        return new_key


class Owner(Protocol):
    """Who computes an answer in an event loop. number: of the turn, once it has begun. is_abandoned: nobody reads it
    any more.
    """

    number: int | None
    is_abandoned: bool

    async def stop(self) -> None:
        """End the answer now, and keep what was said."""


class Hold:
    """One turn's hold on its session, from `Claims.hold` to `Claims.release`.

    request_key: its Idempotency-Key. owner: None for a caller that blocks. turn: set once it has begun. lease: the
    right to store it; None where no other server could write. released: completed when the session is free again.
    """

    def __init__(self, key: SessionKey, request_key: str | None, owner: Owner | None) -> None:
        self.key, self.request_key, self.owner = key, request_key, owner
        self.turn: OneTurn | None = None
        self.lease: Claim | None = None
        self.released: Future[None] = Future()
        self.released.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it for the others

    def is_worth_waiting(self, request_key: str | None) -> bool:
        """Whether another turn waits for this one's end: it has no reader any more, or it answers the same request."""
        is_same = request_key is not None and request_key == self.request_key
        return is_same or (self.owner is not None and self.owner.is_abandoned)


class Claims:
    """All sessions that are held in this process."""

    def __init__(self, leases: Leasing | None) -> None:
        """leases: see `Sharing`."""
        self._leases = leases
        self._holds: dict[SessionKey, Hold] = {}
        self._lock = threading.Lock()

    def on(self, key: SessionKey) -> Hold | None:
        return self._holds.get(key)

    def hold(self, key: SessionKey, request_key: str | None = None, owner: Owner | None = None) -> Hold:
        """Hold the session until `release`; never waits. Raises SessionBusyError while another turn holds it here."""
        hold = Hold(key, request_key, owner)
        with self._lock:
            if key in self._holds:
                raise SessionBusyError(f"session {key.session_id} is busy with another turn", param="session_id")
            self._holds[key] = hold
        return hold

    def drop(self, hold: Hold) -> None:
        """Its session was deleted: another turn may have the id from now on."""
        with self._lock:
            if self._holds.get(hold.key) is hold:
                del self._holds[hold.key]

    def release(self, hold: Hold) -> None:
        self.drop(hold)
        hold.released.set_result(None)

    def lease(self, hold: Hold) -> None:
        """Raises SessionBusyError while a turn of the session runs on another server, and RemoteError."""
        if self._leases is not None:
            hold.lease = self._leases.acquire(hold.key)

    def give_back(self, hold: Hold) -> None:
        """The lease; the hold stays."""
        lease, hold.lease = hold.lease, None
        if self._leases is not None and lease is not None:
            self._leases.release(lease)
