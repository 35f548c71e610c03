"""A session in the store, as one server knows it: whether it exists, how many turns it has, and when it expires.

Knows no prompt and no request, only the records of turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.engine.client.messages import Pin
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.sessions.window import Window
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
from kvstore.sessions.sharing import Claim
from kvstore.sessions.store import SessionStore


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
        return Window(system, state.messages, state.num_dropped_messages, [], [], Lineage(root))
    return Window(
        system, state.messages, state.num_dropped_messages, state.token_ids, state.chain, lineage_of(state, root),
        list(state.turn_starts),
    )  # fmt: skip


class StoredSession:
    """One session in the store. Other servers may have stored more turns than this object knows.

    number: the store's own for it; None until the first turn is stored. num_turns: of the turns known here.
    truncated_tokens: dropped from the window by all these turns.
    """

    def __init__(self, sessions: SessionStore, client: CoreClient, key: SessionKey, state: SessionState | None) -> None:
        self.key = key
        self.number: int | None = None
        self.num_turns = self.truncated_tokens = 0
        self.is_deleted = False
        self._sessions, self._client = sessions, client
        self._expires_s: float | None = None  # as the core was told
        if state is not None:
            self._adopt(state)

    def _adopt(self, state: SessionState) -> None:
        self.number, self.num_turns, self.truncated_tokens = state.head.number, state.turn, state.truncated_tokens

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
        self.number = head.number
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
