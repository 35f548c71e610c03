"""Looking after a running engine: eviction over all tiers, deletion of sessions, and the requests of other processes.

Knows the core's verbs and the stores of sessions and answers; no model.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any

from kvstore.admin.commands import EvictRequest, OneSession, read_arguments, repaired, session_info, transcript
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.engine.sessions.chats import Chats
from kvstore.errors import (
    EngineClosedError,
    EngineDiedError,
    RequestError,
    SessionBusyError,
    SessionNotFoundError,
    StoreError,
)
from kvstore.sessions.answers import AnswerStore, owner_tag
from kvstore.sessions.record import SessionHead, SessionKey, Tombstone
from kvstore.sessions.repair import Repaired

DELETE_TIMEOUT_S = 60.0
EXPIRY_ROUND_S = 30.0
MAX_PIN_S = 30 * 24 * 3600
MAX_PINS = 10_000  # that are told about; of more, the oldest are forgotten here
RETRY_S = 2.0  # for all deletions together that a crash or a failing disk cut off; what is left waits for a round


class Admin:
    """What is done to an engine from outside its requests. Any thread may call it."""

    def __init__(self, chats: Chats, answers: AnswerStore) -> None:
        self._chats = chats
        self._core = chats.core
        self._sessions = chats.sessions
        self._answers = answers
        self._last_expiry_s = 0.0
        self._expiring = threading.Lock()
        self._pins = dict[SessionKey, tuple[float, int]]()  # until when, and in which life of the core

    def resume(self) -> None:
        """Carry out deletions that a crash or a failing disk cut off, as far as that takes RETRY_S at most."""
        deadline = time.monotonic() + RETRY_S
        for tombstone in self._sessions.pending_deletions():
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._carry_out(tombstone, (), left)

    # -- the store ---------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, object]:
        """See `Engine.stats`."""
        return {"model": self._core.facts.model_name, **self._core.stats(), "sessions": self._sessions.stats()}

    def evict(self, what: Evict) -> dict[str, Evicted]:
        """Give up KV that matches, in HBM, CPU, disk and what waits to be written; blocks in use stay. Per tier."""
        self._core.check_open()
        return self._core.evict(what)

    def verify(self, delete: bool = False) -> dict[str, object]:
        """Check every stored block and every session's records."""
        return {**self._core.verify(delete), "sessions": asdict(self._sessions.check())}

    def compact(self) -> dict[str, object]:
        """Rewrite the store's files without what was deleted."""
        self._sessions.compact()  # first: it brings a removed file back, for which the blocks may leave no room
        return self._core.compact()

    # -- sessions ----------------------------------------------------------------------------------------------------
    def list_sessions(self, tenant: str = "", limit: int = 100, after: str | None = None) -> Sequence[SessionHead]:
        """The last used first. after: the `cursor` of the last one of the page before. Also while the core restarts."""
        if self._core.closed:
            raise EngineClosedError("the engine is closed")
        self.expire()
        return self._sessions.list(tenant, limit, after)

    def delete_session(self, session_id: str, tenant: str = "") -> int:
        """Transcript, ids and the KV that no other session refers to, everywhere. Returns how many blocks that were.

        A turn that runs ends first, and is not stored. A session without a turn has nothing stored, but its object can
        be deleted. Raises RequestError when there is no such session, and StoreError when it cannot be deleted.
        """
        self._core.check_open()
        num_blocks = self._delete_one(SessionKey(tenant, session_id), DELETE_TIMEOUT_S)
        if num_blocks is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        return num_blocks

    def repair_session(self, session_id: str, tenant: str = "") -> Repaired:
        """Of a damaged session, the whole turns from its beginning become the session, the rest is set aside in it.

        Raises RequestError when there is no such session or a turn of it runs, and StoreError.
        """
        self._core.check_open()
        key = SessionKey(tenant, session_id)
        chat = self._chats.known.get(key)
        if chat is not None and chat.is_busy:
            raise SessionBusyError(f"session {session_id} is busy with a turn", param="session_id")
        found = self._sessions.repair(key).wait()
        if found is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if found.tombstone is not None:
            self._chats.drop(key)  # what it knows is not the session any more
            self._carry_out(found.tombstone, (), DELETE_TIMEOUT_S)
        return found

    def _delete_one(self, key: SessionKey, timeout_s: float, only_expired: bool = False) -> int | None:
        """How many blocks the session had for itself; None when there is none, or none to delete."""
        unstored = list[BlockId]()
        chat = self._chats.known.get(key)
        if only_expired and chat is not None and chat.is_busy:
            return None
        with nullcontext() if chat is None else chat.ending():
            if only_expired and not self._is_over(key):
                return None
            tombstone = self._sessions.delete(key).wait()
            self._pins.pop(key, None)
            if chat is not None:
                unstored = chat.mark_deleted()
                self._chats.drop(key)
        if tombstone is not None:
            self._carry_out(tombstone, unstored, timeout_s)
            return len(tombstone.block_ids)
        if unstored:
            self._core.forget(unstored, RETRY_S)
        return None if chat is None else 0

    def _is_over(self, key: SessionKey) -> bool:
        head = self._sessions.head(key)
        return head is not None and head.expires_s is not None and head.expires_s <= time.time()

    def _carry_out(self, tombstone: Tombstone, unstored: Sequence[BlockId], timeout_s: float) -> None:
        self._answers.forget_owner(owner_tag(tombstone.key.tenant, tombstone.key.session_id))
        if self._core.forget([*tombstone.block_ids, *unstored], timeout_s):
            self._sessions.finish_deletion(tombstone.number).wait()

    def pin(self, session_id: str, seconds: float, tenant: str = "") -> None:
        """Keep this session's KV longer than that of others for so long from now; 0 ends it.

        A priority with an end, not a lock: what a waiting request needs stays before it, and when there is nothing
        else to evict, pinned KV goes too. It does not outlive the process. Raises RequestError for an
        unknown session and for more than MAX_PIN_S.
        """
        self._core.check_open()
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_PIN_S:
            raise RequestError(f"seconds is {seconds!r}; give 0 to {MAX_PIN_S:,} seconds", param="seconds")
        state = self._sessions.load(SessionKey(tenant, session_id))
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint == self._core.facts.fingerprint:
            self._core.pin(state.chain, seconds)
            with self._chats.lock:
                self._pins.pop(state.head.key, None)
                self._pins[state.head.key] = (time.time() + seconds, self._core.life)
                if len(self._pins) > MAX_PINS:
                    self._pins.pop(next(iter(self._pins)))

    def pinned_until(self, key: SessionKey) -> float | None:
        """When a pin of this session ends, in seconds since the epoch; None without one. It ends with its process."""
        until_s, life = self._pins.get(key, (0.0, None))
        return until_s if until_s > time.time() and life == self._core.life else None

    def expire(self, key: SessionKey | None = None) -> None:
        """Delete this session if its time is over, and at most once in EXPIRY_ROUND_S seconds all whose time is over.

        One in the middle of a turn stays. A round also goes on with deletions that were cut off. Raises StoreError when
        the given session cannot be deleted; what fails in a round is tried again in the next one.
        """
        if key is not None and self._is_over(key):
            self._delete_one(key, RETRY_S, only_expired=True)
        now = time.monotonic()
        if now - self._last_expiry_s < EXPIRY_ROUND_S or not self._expiring.acquire(blocking=False):
            return
        try:
            self._last_expiry_s = now
            with suppress(StoreError, EngineDiedError):
                for over in self._sessions.expired(time.time()):
                    self._delete_one(over, 0.0, only_expired=True)
                self.resume()
        finally:
            self._expiring.release()

    # -- other processes ---------------------------------------------------------------------------------------------
    def handle(self, command: str, arguments: dict[str, object]) -> dict[str, object]:
        """Answer one request of the store's socket. Raises KVStoreError."""
        request = read_arguments(command, arguments)
        return _COMMANDS[command](self, request)

    def _evict(self, request: EvictRequest) -> dict[str, object]:
        what = request.selection(None if request.session is None else frozenset(self._blocks_of(request.session.key)))
        amounts = {tier: {"blocks": e.num_blocks, "bytes": e.num_bytes} for tier, e in self.evict(what).items()}
        return {"dry_run": what.dry_run, "tiers": amounts}

    def _blocks_of(self, key: SessionKey) -> set[BlockId]:
        """The session's KV that is not also another's."""
        if not self._sessions.exists(key):
            raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
        return self._sessions.unshared_blocks_of(key)

    def _show(self, wanted: OneSession) -> dict[str, object]:
        key = wanted.session.key
        self.expire(key)
        state = self._sessions.load(key)
        if state is None:
            raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
        return transcript(state, self._sessions.aside(key))


_COMMANDS: dict[str, Callable[[Admin, Any], dict[str, object]]] = {
    "stats": lambda admin, _: admin.stats(),
    "evict": Admin._evict,
    "verify": lambda admin, wanted: admin.verify(wanted.delete),
    "compact": lambda admin, _: admin.compact(),
    "sessions": lambda admin, wanted: {
        "sessions": [session_info(head) for head in admin.list_sessions(wanted.tenant, wanted.limit)]
    },
    "sessions.show": Admin._show,
    "sessions.delete": lambda admin, wanted: {
        "deleted": True,
        "blocks": admin.delete_session(wanted.session.session_id, wanted.session.tenant),
    },
    "sessions.repair": lambda admin, wanted: repaired(
        admin.repair_session(wanted.session.session_id, wanted.session.tenant)
    ),
    "sessions.accept_loss": lambda admin, _: {"accepted": admin._sessions.accept_loss()},
}


def weak_handler(admin: Admin) -> Callable[[str, dict[str, object]], dict[str, object]]:
    """The socket's thread must not keep an engine alive that its owner has dropped."""
    held = weakref.ref(admin)

    def handle(command: str, arguments: dict[str, object]) -> dict[str, object]:
        target = held()
        if target is None:
            raise EngineClosedError("the engine is closed")
        return target.handle(command, arguments)

    return handle
