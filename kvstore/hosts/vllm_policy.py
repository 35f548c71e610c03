"""KVStorePolicy: who stays in vLLM's own memory tier, by our order of conversations.

vLLM loads it by name (`cache_policy_module_path`), keeps the chunks' bytes and says when a chunk may go. Decides with
keys alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvstore.blocks.forest import EvictionTree
from kvstore.hosts.vllm_keys import chain_of, keys_before
from kvstore.policy.conversation import Conversation
from kvstore.policy.steering import Steering

TIER = "cpu"


class KVStorePolicy(CachePolicy):
    """Chunks leave from the tails of the conversations that are least likely to return soon; what runs goes last.

    What was learned of returns ends with the process: vLLM tells a policy no place to keep it.
    """

    def __init__(self, cache_capacity: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(cache_capacity)
        self._steering = Steering("return", clock, {TIER: cache_capacity})
        self._tree = EvictionTree[OffloadKey](self._steering.order(TIER), self._is_held)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable: dict[OffloadKey, None] = {}
        self._open: dict[str, Conversation] = {}  # by request
        self._coming: dict[OffloadKey, tuple[OffloadKey | None, Conversation]] = {}  # to be inserted

    # -- chunks ------------------------------------------------------------------------------------------------------
    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        parent, conversation = self._coming.pop(key, (None, None))
        self._chunks[key] = chunk
        if chunk.ref_cnt == 0:
            self._evictable[key] = None
        self._tree.add(key, parent, conversation)
        if conversation is not None and (prefix := conversation.prefix_at(key)) is not None:
            self._tree.settle(prefix, self._known)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._evictable.pop(key, None)
        self._tree.remove(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._evictable[key] = None
        self._tree.rest(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        del self._evictable[key]
        self._tree.hold(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """All of them or none. A chunk goes before one that builds on it only where that one cannot go at all."""
        if len(self._evictable) - sum(key in self._evictable for key in protected) < n:
            return None
        keys = self._tree.take(n, lambda key: 1, protected.__contains__) if n else []
        for key in keys:
            del self._evictable[key]
        others = list(islice((key for key in self._evictable if key not in protected), n - len(keys)))
        for key in others:
            del self._evictable[key]
            self._tree.remove(key)
        return [(key, self._chunks.pop(key)) for key in (*keys, *others)]

    def clear(self) -> None:
        for conversation in self._open.values():
            self._steering.leave(conversation, ())
        self._tree.clear()
        for each in (self._chunks, self._evictable, self._open, self._coming):
            each.clear()

    # -- requests ----------------------------------------------------------------------------------------------------
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self._tree.touch(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """These are inserted next, unless there is no room: the one time that vLLM tells whose they are."""
        conversation = self._arrive(req_context)
        if len(self._coming) > self.cache_capacity:
            self._coming.clear()
        for key, parent in keys_before(list(keys), req_context).items():
            self._coming[key] = (parent, conversation)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        if not key_groups:
            return  # it had no whole chunk
        conversation = self._arrive(req_context)
        del self._open[req_context.req_id]
        chain = chain_of(req_context)
        end = next((i for i in range(len(chain), 0, -1) if chain[i - 1] in self._chunks), 0)
        if end:
            self._tree.claim(conversation, chain[:end])
            self._tree.settle(conversation.prefix, self._known)
        self._steering.leave(conversation, chain)
        self._steering.poll()

    def _arrive(self, context: ReqContext) -> Conversation:
        conversation = self._open.get(context.req_id)
        if conversation is None:
            chain = chain_of(context)
            is_stored = bool(chain) and chain[-1] in self._chunks
            conversation = self._open[context.req_id] = self._steering.arrive(chain, is_stored=is_stored)
            conversation.num_running = conversation.num_open
            self._steering.refresh(conversation)
        return conversation

    def check_integrity(self) -> None:
        """Assert that chunks, their order and what may go agree; for a tier in which nobody runs."""
        self._tree.check_integrity()
        idle = {key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0}
        assert idle == self._evictable.keys(), "a chunk that nobody uses cannot go, or one in use can"
        assert len(self._chunks) <= self.cache_capacity and not self._open, "a request is open while idle"

    def _is_held(self, key: OffloadKey) -> bool:
        return key in self._chunks and key not in self._evictable

    def _known(self, key: OffloadKey) -> OffloadKey | None:
        return key if key in self._chunks else None
