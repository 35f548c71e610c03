"""Looking after a running engine: eviction over all tiers, deletion of sessions, and the requests of other processes.

Knows the engine's pool, its connector and its session store; no model.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from engine.prompts import check_session_id
from kvstore.block import BlockId
from kvstore.connector import (
    Evict,
    Evicted,
    deletion_from_dict,
    evict_from_dict,
    nothing_from_dict,
    session_info,
    sessions_from_dict,
    verify_from_dict,
)
from kvstore.errors import ConfigError, EngineClosedError, RequestError
from kvstore.session_store import SessionHead, SessionKey, Tombstone

if TYPE_CHECKING:
    from engine.engine import Engine

DELETE_TIMEOUT_S = 60.0
EXPIRY_ROUND_S = 30.0


class Admin:
    """What is done to an engine from outside its requests. Any thread may call it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions = engine.sessions
        self._last_expiry_s = 0.0
        self._expiring = threading.Lock()
        self._commands: dict[str, Callable[[dict[str, object]], dict[str, object]]] = {
            "stats": self._stats,
            "evict": self._evict,
            "verify": self._verify,
            "compact": self._compact,
            "sessions": self._list,
            "sessions.delete": self._delete,
        }

    def resume(self) -> None:
        """Carry out deletions that a crash cut off."""
        for tombstone in self._sessions.pending_deletions():
            self._carry_out(tombstone)

    # -- eviction ----------------------------------------------------------------------------------------------------
    def evict(self, what: Evict) -> dict[str, Evicted]:
        """Give up KV that matches, in HBM, CPU, disk and what waits to be written; blocks in use stay. Per tier."""
        self._engine.check_open()
        below, block_ids = self._engine.connector.evict(what)
        with self._engine.lock:
            pool = self._engine.pool
            conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
            if what.everything and all(condition is None for condition in conditions):
                blocks = pool.cached_blocks()
            else:
                named = block_ids if what.block_ids is None else block_ids | what.block_ids
                blocks = [block for block in map(pool.lookup, named) if block is not None]
            free = [block for block in blocks if pool.is_free(block)]
            if not what.dry_run:
                self._forget_hbm(free)
        return {"hbm": Evicted(len(free), len(free) * self._engine.block_bytes), **below}

    def _forget_hbm(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._engine.pool.forget(block)
        self._engine.erase_hbm(self._engine.pool.take_stale())

    def verify(self, delete: bool = False) -> dict[str, object]:
        """Check every stored block and every session's records."""
        return {**self._engine.connector.verify(delete), "sessions": asdict(self._sessions.check())}

    def compact(self) -> dict[str, object]:
        """Rewrite the store's files without what was deleted."""
        found = self._engine.connector.compact()
        self._sessions.compact()
        return found

    # -- sessions ----------------------------------------------------------------------------------------------------
    def list_sessions(self, tenant: str = "", limit: int = 100, after: str | None = None) -> Sequence[SessionHead]:
        """The last used first. after: the `cursor` of the last one of the page before."""
        self._engine.check_open()
        self.expire()
        return self._sessions.list(tenant, limit, after)

    def delete_session(self, session_id: str, tenant: str = "") -> int:
        """Transcript, ids and the KV that no other session refers to, everywhere. Returns how many blocks that were.

        Raises RequestError when there is no such session.
        """
        self._engine.check_open()
        check_session_id(session_id)
        key = SessionKey(tenant, session_id)
        chat = self._engine.chats.pop(key, None)
        if chat is not None:
            chat.deleted = True
        tombstone = self._sessions.delete(key).wait()
        if tombstone is None:
            raise RequestError(f"there is no session {session_id!r}", param="session_id")
        self._carry_out(tombstone)
        return len(tombstone.block_ids)

    def _carry_out(self, tombstone: Tombstone) -> None:
        block_ids: tuple[BlockId, ...] = tombstone.block_ids
        with self._engine.lock:
            pool = self._engine.pool
            self._forget_hbm([block for block in map(pool.lookup, block_ids) if block is not None])
        if self._engine.connector.forget(block_ids, DELETE_TIMEOUT_S):
            self._sessions.finish_deletion(tombstone.number).wait()

    def expire(self) -> None:
        """Delete sessions whose time is over, at most once in EXPIRY_ROUND_S seconds."""
        now = time.monotonic()
        if now - self._last_expiry_s < EXPIRY_ROUND_S or not self._expiring.acquire(blocking=False):
            return
        try:
            self._last_expiry_s = now
            for key in self._sessions.expired(time.time()):
                tombstone = self._sessions.delete(key).wait()
                if tombstone is not None:
                    self._carry_out(tombstone)
        finally:
            self._expiring.release()

    # -- other processes ---------------------------------------------------------------------------------------------
    def handle(self, command: str, arguments: dict[str, object]) -> dict[str, object]:
        """Answer one request of the store's socket. Raises KVStoreError."""
        if command not in self._commands:
            raise ConfigError(f"unknown command {command!r}; known are {', '.join(self._commands)}")
        return self._commands[command](arguments)

    def _stats(self, arguments: dict[str, object]) -> dict[str, object]:
        nothing_from_dict("stats", arguments)
        return self._engine.stats()

    def _evict(self, arguments: dict[str, object]) -> dict[str, object]:
        request = evict_from_dict(arguments)
        what = request.selection(None if request.session is None else frozenset(self._blocks_of(request.session)))
        amounts = {tier: {"blocks": e.num_blocks, "bytes": e.num_bytes} for tier, e in self.evict(what).items()}
        return {"dry_run": what.dry_run, "tiers": amounts}

    def _blocks_of(self, key: SessionKey) -> set[BlockId]:
        """The session's KV that is not also another's."""
        if not self._sessions.exists(key):
            raise RequestError(f"there is no session {key.session_id!r}", param="session_id")
        return self._sessions.unshared_blocks_of(key)

    def _verify(self, arguments: dict[str, object]) -> dict[str, object]:
        return self.verify(verify_from_dict(arguments))

    def _compact(self, arguments: dict[str, object]) -> dict[str, object]:
        nothing_from_dict("compact", arguments)
        return self.compact()

    def _list(self, arguments: dict[str, object]) -> dict[str, object]:
        wanted = sessions_from_dict(arguments)
        return {"sessions": [session_info(head) for head in self.list_sessions(wanted.tenant, wanted.limit)]}

    def _delete(self, arguments: dict[str, object]) -> dict[str, object]:
        key = deletion_from_dict(arguments)
        return {"deleted": True, "blocks": self.delete_session(key.session_id, key.tenant)}


def weak_handler(admin: Admin) -> Callable[[str, dict[str, object]], dict[str, object]]:
    """The socket's thread must not keep an engine alive that its owner has dropped."""
    held = weakref.ref(admin)

    def handle(command: str, arguments: dict[str, object]) -> dict[str, object]:
        target = held()
        if target is None:
            raise EngineClosedError("the engine is closed")
        return target.handle(command, arguments)

    return handle
