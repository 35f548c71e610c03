"""Administration of a running engine: eviction on all tiers, deletion of sessions, and requests of other processes.

Knows the core's verbs and the stores of sessions and answers; no model.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any, cast

import msgspec

from kvstore.admin.commands import EvictRequest, OneSession, read_arguments, session_info, transcript
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.config import CODEC_NAMES, one_of
from kvstore.engine.client.messages import CompactBlocks, EvictBlocks, Forget, Pin, Prefetch, ReadStats, VerifyBlocks
from kvstore.engine.outputs import MOST_ASKED, Usage
from kvstore.engine.sessions.chat import DELETE_TIMEOUT_S, Chats
from kvstore.engine.sessions.window import lineage_of
from kvstore.engine.stats import EngineStats
from kvstore.errors import EngineClosedError, RequestError, SessionDamagedError, SessionNotFoundError
from kvstore.sessions.record import SessionHead, SessionKey

MAX_PIN_S = 30 * 24 * 3600
MAX_PINS = 10_000  # whose ends are known; the oldest beyond that are forgotten
RETRY_S = 2.0  # for deletions that nobody waits for, in all; the rest waits for the next round


class Admin:
    """Administration of an engine, beside its requests. Any thread may call it. usages: by tenant and id, of the
    answers of a server's last requests, which that server's loop alone changes.
    """

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self.usages = dict[tuple[str, str], tuple[Usage, ...]]()
        self._client = chats.client
        self._sessions = chats.sessions
        self._pins = dict[SessionKey, tuple[float, int]]()  # when the pin ends, and the life of the core that knows it

    def resume(self) -> None:
        """Resume deletions that a crash or a failing disk interrupted, and delete sessions that have expired, for
        RETRY_S at most, half of it each. If sessions are shared, resume those of other servers, too. A session in the
        middle of a turn stays.
        """
        if self._sessions.sharing.has_missed_deletions():
            self._client.call(EvictBlocks(Evict(everything=True)))
            self._chats.answers.forget_owner(b"")
        self._sessions.renew()
        began = time.monotonic()
        for tombstone in self._sessions.pending_deletions():
            if (left := began + RETRY_S / 2 - time.monotonic()) <= 0:
                break
            self._chats.carry_out(tombstone, (), left)
        for key in self._sessions.expired(self._sessions.clock()):
            if time.monotonic() >= began + RETRY_S:
                return
            with suppress(SessionDamagedError):  # it stays until `check` has mended it
                self._delete_one(key, 0.0, only_expired=True)

    # -- the store ---------------------------------------------------------------------------------------------------
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        counters = self._client.call(ReadStats())
        of_stores = {"sessions": self._sessions.stats(), "answers": self._chats.answers.stats()}
        return cast(EngineStats, {"model": self._client.facts.model_name, **counters, **of_stores})

    def evict(self, what: Evict) -> dict[str, Evicted]:
        """Evict matching KV from HBM, CPU, disk and the write queue, but not blocks in use. Returns counts per tier."""
        return self._client.call(EvictBlocks(what))

    def verify(self, delete: bool = False) -> dict[str, object]:
        """Check every stored block and every session's records."""
        return {**self._client.call(VerifyBlocks(delete)), "sessions": asdict(self._sessions.check())}

    def compact(self, codec: str | None = None) -> dict[str, object]:
        """Rewrite the store's files without deleted data, and the blocks in this codec (`CacheTiers.codec`).

        Raises ConfigError for an unknown codec.
        """
        if codec is not None:
            one_of(*CODEC_NAMES).check("codec", codec)
        # First, because it restores a removed file, for which the blocks may leave no room.
        self._sessions.compact()
        return self._client.call(CompactBlocks(codec))

    # -- sessions ----------------------------------------------------------------------------------------------------
    def list_sessions(
        self, tenant: str = "", limit: int = 100, after: str | None = None, is_personal: bool | None = None
    ) -> Sequence[SessionHead]:
        """Sessions, most recently used first. after: the `cursor` of the previous page's last session. is_personal:
        only those that are, or are not; None: all. Works while the core restarts.
        """
        if self._client.closed:
            raise EngineClosedError("the engine is closed")
        return self._sessions.list(tenant, limit, after, is_personal)

    def delete_session(self, session_id: str, tenant: str = "") -> int:
        """Delete transcript, ids and the KV that no other session refers to, on all tiers. Returns how many blocks.

        A running turn ends first and is not stored. A session without a turn has nothing stored, but its
        object can be deleted. Raises RequestError if there is no such session, and StoreError if it cannot be deleted.
        """
        self._client.check_open()
        num_blocks = self._delete_one(SessionKey(tenant, session_id), DELETE_TIMEOUT_S)
        if num_blocks is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        return num_blocks

    def fork_session(self, session_id: str, turn: int | None, new_id: str, tenant: str = "") -> SessionHead:
        """Begin another session with turns 1 to `turn` (None: all) of this one, which may be damaged behind them.

        Raises RequestError if there is no such session or turn, and StoreError if the new id is taken or one of these
        turns is damaged.
        """
        self._client.check_open()
        return self._sessions.fork(SessionKey(tenant, session_id), turn, SessionKey(tenant, new_id)).wait()

    def _delete_one(self, key: SessionKey, timeout_s: float, only_expired: bool = False) -> int | None:
        """Delete one session. Returns the number of its own blocks, None if there is no session to delete. Its turn has
        ended by then, none begins meanwhile, and none is stored.
        """
        unstored, claims, chat = set[BlockId](), self._chats.claims, self._chats.known.get(key)
        with nullcontext() if chat is None else chat.storing:
            hold = claims.on(key)
            if only_expired and hold is not None:
                return None
            if chat is not None and hold is not None and hold.turn is not None:
                self._client.abort(hold.turn.handle)
            tombstone = self._sessions.delete(key, self._sessions.clock() if only_expired else None).wait()
            if tombstone is None and only_expired:
                return None
            self._pins.pop(key, None)
            if chat is not None:
                chat.is_deleted = True
                self._chats.drop(key)
                unstored |= chat.unstored
                if hold is not None and hold.turn is not None:  # it will not be stored
                    claims.drop(hold)
                    lineage, block_size = chat.window.lineage, self._client.facts.block_size
                    unstored.update(hold.turn.unneeded_blocks(False, True, block_size, lineage))
        if tombstone is not None:
            self._chats.carry_out(tombstone, unstored, timeout_s)
            return len(tombstone.block_ids)
        if unstored := self._sessions.unshared(0, unstored):
            self._client.call(Forget(list(unstored), RETRY_S))
        return None if chat is None else 0

    def prefetch(self, session_id: str, tenant: str = "") -> None:
        """See `Engine.prefetch`."""
        self._client.check_open()
        key = SessionKey(tenant, session_id)
        state = self._sessions.load(key)
        if state is None and key in self._chats.known:
            return  # it has no turn yet
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint == self._client.facts.fingerprint:  # else its KV is of another model
            lineage = lineage_of(state, self._client.facts.root(tenant))
            self._client.call(Prefetch(lineage.with_copies(state.chain), state.token_ids, lineage, tenant))

    def pin(self, session_id: str, seconds: float, tenant: str = "") -> None:
        """Keep this session's KV longer than other KV, for so many seconds from now; 0 ends the pin.

        A pin is a priority with an end, not a lock: KV that a waiting request needs comes before it, and pinned KV is
        evicted when nothing else is left. It does not outlive the process. All pins of a tenant may take half of the
        largest tier; beyond that, the earlier ones end. Raises RequestError for an unknown session
        and for more than MAX_PIN_S.
        """
        self._client.check_open()
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_PIN_S:
            raise RequestError(f"seconds is {seconds!r}; give 0 to {MAX_PIN_S:,} seconds", param="seconds")
        state = self._sessions.load(SessionKey(tenant, session_id))
        if state is None:
            raise SessionNotFoundError(f"there is no session {session_id!r}", param="session_id")
        if state.head.fingerprint == self._client.facts.fingerprint:
            lineage = lineage_of(state, self._client.facts.root(tenant))
            self.pin_chain(lineage.with_copies(state.chain), seconds, tenant)
            with self._chats.lock:
                self._pins.pop(state.head.key, None)
                self._pins[state.head.key] = (time.time() + seconds, self._client.life)
                if len(self._pins) > MAX_PINS:
                    self._pins.pop(next(iter(self._pins)))

    def pin_chain(self, chain: Sequence[BlockId], seconds: float, tenant: str = "") -> None:
        """`pin` for a conversation that is no session; chain: of its last answer."""
        self._client.call(Pin(chain, seconds, tenant=tenant))

    def pinned_until(self, key: SessionKey) -> float | None:
        """When this session's pin ends, in seconds since the epoch; None without a pin. A restart ends pins."""
        until_s, life = self._pins.get(key, (0.0, None))
        return until_s if until_s > time.time() and life == self._client.life else None

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
        """The blocks of the session that no other session shares."""
        if not self._sessions.exists(key):
            raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
        return self._sessions.unshared_blocks_of(key)

    def why(self, request_id: str, tenant: str = "") -> dict[str, object]:
        """What a request of the server has computed although an earlier one of its conversation had it, and why: a
        usage for each of its answers. Raises RequestError if it is none of the last ones of this tenant.
        """
        usages = self.usages.get((tenant, request_id))
        if not usages:
            raise RequestError(f"there is no request {request_id[:64]!r} among the last {MOST_ASKED:,}", param="id")
        return {"request_id": request_id, "answers": msgspec.to_builtins(usages)}

    def _show(self, wanted: OneSession) -> dict[str, object]:
        key = wanted.session.key
        state = self._sessions.load(key)
        if state is None:
            raise SessionNotFoundError(f"there is no session {key.session_id!r}", param="session_id")
        return transcript(state)


_COMMANDS: dict[str, Callable[[Admin, Any], dict[str, object]]] = {
    "stats": lambda admin, _: {**admin.stats()},
    "evict": Admin._evict,
    "verify": lambda admin, wanted: admin.verify(wanted.delete),
    "compact": lambda admin, wanted: admin.compact(wanted.codec),
    "sessions": lambda admin, wanted: {
        "sessions": [session_info(head) for head in admin.list_sessions(wanted.tenant, wanted.limit)]
    },
    "sessions.show": Admin._show,
    "sessions.delete": lambda admin, wanted: {
        "deleted": True,
        "blocks": admin.delete_session(wanted.session.session_id, wanted.session.tenant),
    },
    "why": lambda admin, wanted: admin.why(wanted.request_id, wanted.tenant),
    "sessions.accept_loss": lambda admin, _: {"accepted": admin._sessions.accept_loss()},
}


def weak_handler(admin: Admin) -> Callable[[str, dict[str, object]], dict[str, object]]:
    """A handler that does not keep the engine alive once its owner has dropped it."""
    held = weakref.ref(admin)

    def handle(command: str, arguments: dict[str, object]) -> dict[str, object]:
        target = held()
        if target is None:
            raise EngineClosedError("the engine is closed")
        return target.handle(command, arguments)

    return handle
