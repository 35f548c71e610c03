"""vLLM's own manager of tiers over our tier, without a model: what its scheduler would ask, asked by hand.

Imported by tests that run where vLLM is installed, and only inside of them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstore.hosts.vllm_cpu import CPUTieringSpec
from kvstore.hosts.vllm_policy import KVStorePolicy
from tests.support.waiting import wait_until

BLOCK_TOKENS, BLOCK_BYTES, ROWS = 16, 4096, 64
PARALLEL = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)


def config(tiers: list[dict[str, Any]], **extra: Any) -> OffloadingConfig:
    """Of a model with one group of two layers."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": ROWS * BLOCK_BYTES, "offload_prompt_only": False, "secondary_tiers": tiers, **extra
        },
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig("a-model", "float32"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=PARALLEL,
        kv_cache_layout="LBHNC",
    )  # fmt: skip


def tier_options(path: Path, **options: Any) -> dict[str, Any]:
    return {
        "type": "KVStoreTier", "module_path": "kvstore.hosts.vllm", "path": str(path), "disk": "16MiB",
        "identity": "these weights", "load": "always", **options,
    }  # fmt: skip


def keys_of(name: str, num_blocks: int) -> list[bytes]:
    """A chain: each key stands for its whole history."""
    return [make_offload_key(hashlib.sha256(f"{name} {i}".encode()).digest(), 0) for i in range(num_blocks)]


class NotedPolicy(KVStorePolicy):
    """Ours, to be found by a test after vLLM has made it."""

    made: ClassVar[list[KVStorePolicy]] = []

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.made.append(self)


class Scheduler:
    """vLLM's manager, driven as its scheduler drives it. A row's bytes are made of its key."""

    def __init__(self, path: Path, dtype: str = "float32", **options: Any) -> None:
        made = config([tier_options(path, **options)])
        self.spec = CPUTieringSpec(replace(made, model=OffloadingModelConfig("a-model", dtype)))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self._rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._num = 0

    def close(self) -> None:
        self._rows.release()
        self.manager.shutdown()

    def request(self, keys: Sequence[bytes], **params: Any) -> ReqContext:
        self._num += 1
        context = ReqContext(f"request {self._num}", kv_transfer_params=params or None)
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * BLOCK_TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self, *req_ids: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(req_ids, ()))

    def settle(self) -> None:
        def is_settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_until(is_settled)

    def hits(self, context: ReqContext, keys: Sequence[bytes]) -> int:
        """How many blocks from the head can be loaded, after waiting for those that are on their way."""
        while True:
            found = []
            for key in keys:
                found.append(self.manager.lookup(key, context))
                if found[-1] is LookupResult.MISS:
                    break
            self.settle()
            if LookupResult.HIT_PENDING not in found and LookupResult.RETRY not in found:
                return found.count(LookupResult.HIT)

    def store(self, context: ReqContext, keys: Sequence[bytes]) -> None:
        """As after a computation: into rows, and from there on."""
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.block_ids.tolist(), strict=True):
            self._rows[row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES] = content(key)
        self.manager.complete_store(set(out.keys_to_store), context)

    def loaded(self, context: ReqContext, keys: Sequence[bytes]) -> list[bytes]:
        rows = self.manager.prepare_load(keys, context).block_ids.tolist()
        found = [bytes(self._rows[row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES]) for row in rows]
        self.manager.complete_load(keys, context)
        return found

    def turn(self, keys: Sequence[bytes], **params: Any) -> int:
        """A whole request: what is stored is loaded and compared, the rest computed and stored. Returns the hits."""
        context = self.request(keys, **params)
        hits = self.hits(context, keys)
        assert self.loaded(context, keys[:hits]) == [content(key) for key in keys[:hits]]
        self.step(context.req_id)
        if hits < len(keys):
            self.store(context, keys[hits:])
        self.manager.on_request_finished(context)
        self.settle()
        return hits

    def forget_rows(self) -> None:
        """As after a restart: the primary tier is empty."""
        self.manager.reset_cache()


def content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)
