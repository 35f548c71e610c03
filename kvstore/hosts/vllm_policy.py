"""KVStorePolicy: what stays in vLLM's own memory tier, by our order of conversations.

vLLM loads it by name (`cache_policy_module_path`), keeps the chunks' bytes, and says when a chunk may be evicted. Sees
only keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvstore.blocks.forest import EvictionTree
from kvstore.hosts.read_ahead import KeptFile
from kvstore.hosts.vllm_identity import store_folder
from kvstore.hosts.vllm_keys import RequestKeys, all_keys, chain_of, groups_of
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering

TIER = "cpu"
FILE_NAME = "vllm-policy.json"
_learned = msgspec.json.Decoder(dict[str, Any])


class KVStorePolicy(CachePolicy):
    """Evicts chunks from the tails of the conversations that are least likely to return soon, running ones last.

    What it learns of returns is kept in the directory of the first KVStoreTier among vLLM's tiers, if there is one, and
    if `KVStoreConnector` has shown the configuration.
    """

    def __init__(self, cache_capacity: int, clock: Callable[[], float] = time.time) -> None:
        super().__init__(cache_capacity)
        config = get_current_vllm_config_or_none()
        folder = None if config is None else store_folder(config)
        self._file = None if folder is None else KeptFile(folder / FILE_NAME, _learned)
        self._steering = Steering("return", clock, {TIER: cache_capacity}, self._file and self._file.found)
        self._tree = EvictionTree[OffloadKey](self._steering.order(TIER), self._is_free)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable: dict[OffloadKey, None] = {}
        # By request: a conversation for each group of layers, as each has a chain of its own.
        self._open: dict[str, tuple[dict[int, Conversation], RequestKeys]] = {}
        self._coming: dict[OffloadKey, tuple[OffloadKey | None, Conversation]] = {}  # to be inserted

    # -- chunks ------------------------------------------------------------------------------------------------------
    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """req_context: given since vLLM 0.33; `on_store_miss` has told more."""
        parent, conversation = self._coming.pop(key, (None, None))
        self._chunks[key] = chunk
        if chunk.ref_cnt == 0:
            self._evictable[key] = None
        self._tree.add(key, parent, conversation)

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
        """Evict n chunks, or none. A chunk is evicted before one that builds on it only if that one cannot be evicted
        at all.
        """
        if len(self._evictable) - sum(key in self._evictable for key in protected) < n:
            return None
        keys = self._tree.evict(n, lambda key: 1, protected.__contains__) if n else []
        for key in keys:
            del self._evictable[key]
        others = list(islice((key for key in self._evictable if key not in protected), n - len(keys)))
        for key in others:
            del self._evictable[key]
            self._tree.remove(key)
        return [(key, self._chunks.pop(key)) for key in (*keys, *others)]

    def clear(self) -> None:
        for conversations, _ in self._open.values():
            for conversation in conversations.values():
                self._steering.end_request(conversation, ())
        self._tree.clear()
        for each in (self._chunks, self._evictable, self._open, self._coming):
            each.clear()

    # -- requests ----------------------------------------------------------------------------------------------------
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self._tree.touch(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """vLLM is about to insert these, if there is room. Only here does it tell whose they are."""
        found = list(keys)
        conversations, request_keys = self._arrive(req_context, groups_of(found))
        if len(self._coming) > self.cache_capacity:
            self._coming.clear()
        for key, parent in request_keys.before(found).items():
            self._coming[key] = (parent, conversations[get_offload_group_idx(key)])

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        if not key_groups:
            return  # it had no whole chunk
        conversations, _ = self._arrive(req_context, groups_of(all_keys(req_context)))
        del self._open[req_context.req_id]
        for group, conversation in conversations.items():
            chain = chain_of(req_context, group)
            end = next((key for key in reversed(chain) if key in self._chunks), None)
            if end is not None:
                self._tree.claim(conversation, end)
            self._steering.end_request(conversation, chain)
        self._steering.poll(is_idle=not self._open)
        if self._file is not None and self._file.is_due:
            self._file.keep(self._steering.state())

    def _arrive(self, context: ReqContext, groups: set[int]) -> tuple[dict[int, Conversation], RequestKeys]:
        found = self._open.get(context.req_id)
        if found is None:
            found = self._open[context.req_id] = {}, RequestKeys(context)
        for group in groups - found[0].keys():
            chain = chain_of(context, group)
            conversation = self._steering.arrive(chain, is_stored=bool(chain) and chain[-1] in self._chunks)
            conversation.num_running = conversation.num_open
            self._steering.refresh(conversation)
            found[0][group] = conversation
        return found

    def check_integrity(self) -> None:
        """Assert that chunks, their order and what can be evicted agree. Call it only while nothing runs."""
        self._tree.check_integrity()
        idle = {key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0}
        assert idle == self._evictable.keys(), "a chunk that nobody uses cannot go, or one in use can"
        assert len(self._chunks) <= self.cache_capacity and not self._open, "a request is open while idle"

    def _is_free(self, key: OffloadKey) -> bool:
        return key in self._evictable or key not in self._chunks
