"""Parts of an engine in another process, each verb a call: its sessions, its answers, its connector.

Same names and meanings as the parts themselves; but for answers, what changes something has happened on return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.blocks.ids import BlockId, Lineage
from kvstore.blocks.records import Evict, Evicted
from kvstore.errors import KVStoreError
from kvstore.sessions.check import CheckReport
from kvstore.sessions.record import Message, SessionHead, SessionKey, SessionState, Tombstone, TurnRecord

if TYPE_CHECKING:
    from kvstore.engine.process.link import Link

T = TypeVar("T")
NO_OWNER = bytes(16)
MAX_PUTS = 256  # answers on their way


class Done(Generic[T]):
    """A ticket whose change is durable."""

    done = True

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> T:
        return self._result


class RemoteSessions:
    """See `SessionStore`. A change that is refused raises at once."""

    def __init__(self, link: Link) -> None:
        self._call = link.call

    def create(
        self, key: SessionKey, system: Sequence[Message] = (), fingerprint: bytes = b"", model: str = "",
        ttl_s: float | None = None,
    ) -> Done[SessionHead]:  # fmt: skip
        return Done(self._call("sessions.create", key, system, fingerprint, model, ttl_s))

    def commit_turn(
        self, key: SessionKey, turn: TurnRecord, fingerprint: bytes = b"", model: str = "",
        session_number: int | None = None,
    ) -> Done[SessionHead]:  # fmt: skip
        return Done(self._call("sessions.commit_turn", key, turn, fingerprint, model, session_number))

    def fork(self, source: SessionKey, turn: int | None, new_key: SessionKey) -> Done[SessionHead]:
        return Done(self._call("sessions.fork", source, turn, new_key))

    def set_ttl(self, key: SessionKey, ttl_s: float | None) -> Done[SessionHead]:
        return Done(self._call("sessions.set_ttl", key, ttl_s))

    def delete(self, key: SessionKey) -> Done[Tombstone | None]:
        return Done(self._call("sessions.delete", key))

    def finish_deletion(self, number: int) -> Done[None]:
        return Done(self._call("sessions.finish_deletion", number))

    def compact(self) -> None:
        self._call("sessions.compact")

    def head(self, key: SessionKey) -> SessionHead | None:
        return self._call("sessions.head", key)

    def exists(self, key: SessionKey) -> bool:
        return self.head(key) is not None

    def load(self, key: SessionKey, turn: int | None = None) -> SessionState | None:
        return self._call("sessions.load", key, turn)

    def turn(self, key: SessionKey, number: int) -> TurnRecord | None:
        return self._call("sessions.turn", key, number)

    def turn_of_request(self, key: SessionKey, idempotency_key: str) -> TurnRecord | None:
        return self._call("sessions.turn_of_request", key, idempotency_key)

    def list(self, tenant: str, limit: int = 100, after: str | None = None) -> Sequence[SessionHead]:
        return self._call("sessions.list", tenant, limit, after)

    def expired(self, now: float, limit: int = 1000) -> Sequence[SessionKey]:
        return self._call("sessions.expired", now, limit)

    def blocks_of(self, key: SessionKey) -> set[BlockId]:
        return self._call("sessions.blocks_of", key)

    def unshared_blocks_of(self, key: SessionKey) -> set[BlockId]:
        return self._call("sessions.unshared_blocks_of", key)

    def pending_deletions(self) -> Sequence[Tombstone]:
        return self._call("sessions.pending_deletions")

    def check(self) -> CheckReport:
        return self._call("sessions.check")

    def stats(self) -> dict[str, int]:
        return self._call("sessions.stats")


class RemoteAnswers:
    """See `AnswerStore`. What is put goes out behind the caller's back; whatever comes after it waits for that."""

    def __init__(self, link: Link) -> None:
        self._call = link.call
        self._sender = ThreadPoolExecutor(1, "kvstore-answers")
        self._sent: deque[Future[None]] = deque(maxlen=MAX_PUTS)  # the last ones

    def put(self, keys: Sequence[bytes], token_ids: Sequence[int], owner: bytes = NO_OWNER) -> None:
        if len(self._sent) == MAX_PUTS and not self._sent[0].done():
            return  # the engine is far behind: this answer will be tokenized again
        self._sent.append(self._sender.submit(self._put, keys, token_ids, owner))

    def _put(self, keys: Sequence[bytes], token_ids: Sequence[int], owner: bytes) -> None:
        with suppress(KVStoreError):  # a cache, and the engine may have ended
            self._call("answers.put", keys, token_ids, owner)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all that was put has arrived, or until the time is over."""
        if self._sent:
            wait(self._sent, timeout_s)

    def find(self, groups: Sequence[Sequence[bytes]]) -> Sequence[Sequence[int] | None]:
        self.settle()
        return self._call("answers.find", groups)

    def forget_owner(self, owner: bytes) -> bool:
        self.settle()
        return self._call("answers.forget_owner", owner)

    def flush(self) -> None:
        self.settle()
        self._call("answers.flush")

    def stats(self) -> dict[str, int]:
        return self._call("answers.stats")


class RemoteConnector:
    """See `KVConnector`, of which this has what administration and sessions use. `evict` and `forget` include HBM."""

    def __init__(self, link: Link) -> None:
        self._call = link.call

    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        self._call("connector.prefetch", chain, token_ids, lineage, tenant)

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        return self._call("admin.evict", what), frozenset()

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        return frozenset(), self._call("admin.forget", block_ids, timeout_s)

    def verify(self, delete: bool = False) -> dict[str, object]:
        return self._call("connector.verify", delete)

    def compact(self) -> dict[str, object]:
        return self._call("connector.compact")
