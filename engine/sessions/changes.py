"""Changes of a session that are no answers: truncation by request, edits, clearing. Each is a turn without messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvstore.blocks.ids import BlockId
from kvstore.engine.client.messages import Forget
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.outputs import AppliedEdit, RequestOutput
from kvstore.engine.sessions.edits import (
    Changed,
    Directive,
    EditResult,
    directives_of,
    edited_turn,
    edits_at,
    edits_of,
)
from kvstore.engine.sessions.window import Window, spliced_blocks
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.language import Language
from kvstore.engine.text.prompts import AnswerOptions
from kvstore.engine.turns import Claims, Hold
from kvstore.errors import SessionBusyError, SessionNotFoundError
from kvstore.sessions.answers import AnswerStore, owner_tag
from kvstore.sessions.record import MessageEdit, SessionKey, Tombstone, TurnRecord
from kvstore.sessions.sharing import Claim
from kvstore.sessions.store import SessionStore

DELETE_TIMEOUT_S = 60.0


class SessionParts:
    """What all sessions of an engine share. claims: which turn has which."""

    def __init__(self, client: CoreClient, language: Language, sessions: SessionStore, answers: AnswerStore) -> None:
        self.client = client
        self.language = language
        self.sessions = sessions
        self.answers = answers
        self.claims = Claims(sessions.sharing.leases)

    def carry_out(self, tombstone: Tombstone, unstored: Sequence[BlockId], timeout_s: float) -> None:
        """Delete what a deletion has left behind, and further unstored blocks. What cannot be deleted stays pending."""
        is_forgotten = self.answers.forget_owner(owner_tag(tombstone.key.tenant, tombstone.key.session_id))
        if self.client.call(Forget([*tombstone.block_ids, *unstored], timeout_s)) and is_forgotten:
            self.sessions.finish_deletion(tombstone.number).wait()


class SessionChanges:
    """The changes of a session, which `ChatSession` is."""

    key: SessionKey
    session_id: str
    tenant: str
    chats: SessionParts
    window: Window
    storing: threading.Lock
    number: int | None
    num_turns: int
    is_deleted: bool
    truncation_reuse: str
    last: RequestOutput | None

    def _lease(self, hold: Hold, undo: ExitStack) -> None:
        raise NotImplementedError

    def store(
        self, turn: TurnRecord, after: Window, lease: Claim | None, forgotten: Sequence[MessageEdit] = ()
    ) -> None:
        raise NotImplementedError

    def keep_last(self, num_turns: int) -> TurnRecord | None:
        """Remove all but the last turns from the window now; the transcript stays. Durable on return.

        It is stored as a turn without messages, which is returned; None when the window has no more turns than that.
        Raises SessionBusyError while a turn runs, SessionNotFoundError when the session was deleted.
        """

        def shortened() -> Changed | None:
            before, template = self.window, self.chats.language.chat_template()
            after = before.last(num_turns, self.chats.client, self.tenant, self.truncation_reuse)
            if after is None:
                return None
            num_tokens = max(0, len(before.token_ids) - after.num_tokens(template))
            number = self.num_turns + 1
            return after, after.record(number, (), truncated_tokens=num_tokens, finish_reason="truncated"), ()

        return self._change(shortened)

    def edit(
        self, edits: Sequence[Directive | Mapping[str, Any]], reuse: str = "exact", expected_turn: int | None = None
    ) -> EditResult:
        """Remove messages, or give them another content; see `Directive`. Durable on return. It is stored as a turn
        without messages; a fork of the turn before goes on without it.

        reuse: of the KV behind the edit. "exact": none; the next turn computes it. "reencode": what is stored, which
        remembers what it has read. "forget": none; it is deleted everywhere, and what was there from the transcript.
        expected_turn: how many turns the session has, else SessionBusyError. Raises RequestError, and as `keep_last`.
        """
        directives, num_reencoded = directives_of(edits, reuse), 0

        def edited() -> Changed:
            nonlocal num_reencoded
            if expected_turn not in (None, self.num_turns):
                raise SessionBusyError(f"session {self.session_id} has {self.num_turns} turns, not {expected_turn}")
            changed, num_reencoded = self._edited(partial(edits_of, directives, self.window, reuse=reuse), reuse)
            return changed

        record = self._change(edited)
        assert record is not None
        done = "exact" if reuse == "reencode" and not num_reencoded else reuse
        return EditResult(record.number, done, len(record.token_ids), num_reencoded)

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
        turns = chats.sessions.turns(self.key, 0, self.num_turns) or ()
        return edited_turn(self.window, turns, make(turns), reuse, chats.language, chats.client, self.tenant)

    def _change(self, change: Callable[[], Changed | None]) -> TurnRecord | None:
        """Store a turn without messages."""
        claims = self.chats.claims
        with ExitStack() as leased:
            hold = claims.hold(self.key)
            leased.callback(claims.release, hold)
            self._lease(hold, leased)
            with self.storing:
                if self.is_deleted or self.number is None:
                    raise SessionNotFoundError(f"there is no session {self.session_id!r}", param="session_id")
                before, changed = self.window, change()
                if changed is None:
                    self.chats.sessions.confirm()
                    return None
                after, record, forgotten = changed
                try:
                    self.store(record, after, hold.lease, forgotten)
                except Exception:
                    self.chats.client.forget(spliced_blocks(after.chain, after.lineage, before.lineage))
                    raise
        self.last = None if forgotten else self.last
        for tombstone in self.chats.sessions.pending_deletions() if forgotten else ():
            if tombstone.key == self.key:
                self.chats.carry_out(tombstone, (), DELETE_TIMEOUT_S)
        return record
