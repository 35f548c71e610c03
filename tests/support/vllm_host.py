"""vLLM's own manager of tiers over our tier, without a model: what its scheduler would ask, asked by hand.

Imported by tests that run where vLLM is installed, and only inside of them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm.config import CacheConfig, KVTransferConfig, set_current_vllm_config
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvstore.admin.control import ask
from kvstore.hosts.vllm_cpu import CPUTieringSpec
from kvstore.hosts.vllm_policy import KVStorePolicy
from tests.support.waiting import wait_until

BLOCK_TOKENS, BLOCK_BYTES, ROWS = 16, 4096, 64
PARALLEL = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)


def config(tiers: list[dict[str, Any]], num_groups: int = 1, **extra: Any) -> OffloadingConfig:
    """Of a model with so many groups of two layers."""
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(BLOCK_TOKENS, (f"layer.{2 * i}", f"layer.{2 * i + 1}"), i) for i in range(num_groups)
        ),
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


def vllm_config_of(algorithm: str = "sha256_cbor", policy: str = "recompute") -> Any:
    """What our tier reads of vLLM's configuration, where the weights have an identity."""
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both", kv_load_failure_policy=policy)
    cache, device = CacheConfig(prefix_caching_hash_algo=algorithm), SimpleNamespace(device_type="cpu")
    steps = SimpleNamespace(max_num_batched_tokens=2048)
    return SimpleNamespace(
        cache_config=cache, kv_transfer_config=transfer, device_config=device, scheduler_config=steps
    )


def keys_of(name: str, num_blocks: int, num_groups: int = 1) -> list[bytes]:
    """A chain: each key stands for its whole history. num_groups: that have a key each."""
    digests = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(num_blocks)]
    return [make_offload_key(digest, group) for digest in digests for group in range(num_groups)]


class NotedPolicy(KVStorePolicy):
    """Ours, to be found by a test after vLLM has made it."""

    made: ClassVar[list[KVStorePolicy]] = []

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.made.append(self)


class Scheduler:
    """vLLM's manager, driven as its scheduler drives it. A row's bytes are made of its key."""

    def __init__(
        self,
        path: Path,
        dtype: str = "float32",
        offload_prompt_only: bool = False,
        block_bytes: int = BLOCK_BYTES,
        vllm_config: Any = None,
        num_groups: int = 1,
        **options: Any,
    ) -> None:
        made = config([tier_options(path, **options)], num_groups, offload_prompt_only=offload_prompt_only)
        made.extra_config["cpu_bytes_to_use"] = ROWS * block_bytes
        made = replace(made, worker_kv_bytes_per_block=block_bytes)
        self.spec = CPUTieringSpec(replace(made, model=OffloadingModelConfig("a-model", dtype)))
        with set_current_vllm_config(vllm_config or vllm_config_of()):
            self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self._path = path
        self._rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._num = 0

    def close(self) -> None:
        self._rows.release()
        self.manager.shutdown()

    def request(self, keys: Sequence[bytes], is_hint: bool = False, **params: Any) -> ReqContext:
        """is_hint: what it says comes as an action of its kv_hints."""
        self._num += 1
        context = ReqContext(f"request {self._num}", kv_transfer_params=params or None)
        if is_hint:
            actions = [KvHintAction(f"action {name}", name, "1", payload) for name, payload in params.items()]
            context = ReqContext(f"request {self._num}", kv_hints=KvHintsEnvelope("1", "message", actions))
        self.manager.on_new_request(context)
        for i, key in enumerate(keys):  # which vLLM tells later
            context.set_offload_key_position(key, (i + 1) * BLOCK_TOKENS)
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

    def kept(self, keys: Sequence[bytes]) -> int:
        """How many blocks from the head are stored; nothing is computed."""
        self.forget_rows()
        context = self.request(keys)
        hits = self.hits(context, keys)
        self.manager.on_request_finished(context)
        return hits

    def store_stats(self) -> Any:
        return ask(self._path, "stats", {}, 60.0)["store"]

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

    def turn(self, keys: Sequence[bytes], is_hint: bool = False, **params: Any) -> int:
        """A whole request: what is stored is loaded and compared, the rest computed and stored. Returns the hits."""
        context = self.request(keys, is_hint, **params)
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
        if hasattr(self.manager, "on_reset_flushed"):  # from vLLM 0.33 on
            self.manager.on_reset_flushed()


def content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)
