"""KVStoreBackend: the store below SGLang's hierarchical cache (HiCache), as its `dynamic` storage backend.

SGLang loads it by name into each rank's process and calls it from its storage threads, which may block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore.block_store import BlockStore
from kvstore.disk.weights import weights_digest
from kvstore.errors import ConfigError, ModelError, StoreError, StoreLockedError
from kvstore.hosts.given import field, model_folder
from kvstore.hosts.jobs import WaitingStore
from kvstore.hosts.sglang_pages import PoolPages, memory_of

logger = logging.getLogger("sglang.kvstore")
FORMAT = "sglang 1"  # incremented when the meaning of a stored page changes
OPTIONS = {"path", "disk", "policy", "identity", "model", "timeout_s"}
OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}
_ARGUMENTS = ("kv_cache_dtype", "dtype", "quantization", "json_model_override_args")


class KVStoreBackend(HiCacheStorage):
    """Options, in `--hicache-storage-backend-extra-config`: path: where each rank has a folder; disk: how much a rank
    may use; policy: the order of eviction; model: the folder or hub id of the weights, if SGLang does not say;
    identity: a name for the weights, if they are not safetensors files; timeout_s: how long SGLang waits for the disk.

    Raises ConfigError and StoreError before SGLang serves. After that, what cannot be read or written is answered with
    False.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        _check(storage_config, extra)
        root = Path(str(extra["path"])).expanduser()
        self._path = root / (
            f"tp{storage_config.tp_rank}-pp{storage_config.pp_rank}-cp{storage_config.attn_cp_rank}"
            f"-dp{storage_config.dp_rank}"
        )
        self._store = _open_store(self._path, _namespace(storage_config, extra, root / "weights.json"), extra)
        self._blocks = WaitingStore(self._store, float(extra.get("timeout_s", 30)))
        self._has_pointers = bool(extra.get("interface_v1"))
        self._pools: dict[str, PoolPages] = {}
        if not self._has_pointers:
            logger.warning('kvstore: set "interface_v1": 1 in the extra config; without it every page is copied')

    # -- pools -------------------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV.value] = PoolPages(PoolName.KV.value, mem_pool_host, self._has_pointers)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._pools[_name(host_pool_name)] = PoolPages(_name(host_pool_name), host_pool)

    # -- what is stored ----------------------------------------------------------------------------------------------
    def exists(self, key: str) -> bool:
        return self._stored(PoolName.KV, [key])[0]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._stored(PoolName.KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        num_pages = _leading(self._stored(PoolName.KV, keys))
        hits = {PoolName.KV: num_pages} if num_pages else {}
        lengths = list(range(1, num_pages + 1))  # prefixes that can be restored
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages: it decides nothing
            stored = self._stored(transfer.name, keys[:num_pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                fits = set(range(1, _leading(stored) + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                fits = {end for end in range(1, num_pages + 1) if all(stored[max(0, end - window) : end])}
            if fits:
                hits[transfer.name] = max(fits)
            lengths = [end for end in lengths if end in fits]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _stored(self, name: Any, keys: Sequence[str]) -> list[bool]:
        pages = self._pools.get(_name(name))
        if pages is None:
            return [False] * len(keys)
        return pages.by_page(self._blocks.lookup(pages.keys(keys)))

    # -- calls that name places in a pool ----------------------------------------------------------------------------
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._get(one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._set(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers}

    def _get(self, name: Any, keys: list[str], indices: Any) -> list[bool]:
        pages = self._pools.get(_name(name))
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        memories, tensors = pages.lend(indices, is_read=True)
        read = pages.by_page(self._blocks.read(pages.blocks(keys, memories, ())))
        if tensors:
            pages.put_back(indices, tensors, read)
        return read

    def _set(self, name: Any, keys: list[str], indices: Any, info: HiCacheStorageExtraInfo | None) -> list[bool]:
        pages = self._pools.get(_name(name))
        if pages is None or not pages.fits(keys, indices):
            return [False] * len(keys)
        prefix = (None if info is None else info.prefix_keys) or ()
        memories, _tensors = pages.lend(indices, is_read=False)  # which live until the disk has them
        blocks = pages.blocks(keys, memories, prefix)
        if name != PoolName.KV and prefix and not self._stored(name, prefix[-1:])[0]:
            blocks[0] = replace(blocks[0], parent=None)  # the pool keeps these only for the ends of histories
        return pages.by_page(self._blocks.write(blocks))

    # -- calls with tensors; SGLang uses those for many pages if interface_v1 is not set -----------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        targets = target_locations or []
        pages = self._whole(keys, targets)
        if pages is None:
            return [None] * len(keys)
        read = self._blocks.read(pages.blocks(keys, [memory_of(one) for one in targets], ()))
        return [target if ok else None for target, ok in zip(targets, read, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages = self._whole(keys, values or [])
        if pages is None:
            return False
        tensors = [one.contiguous() for one in values]
        return all(self._blocks.write(pages.blocks(keys, [memory_of(one) for one in tensors], ())))

    def _whole(self, keys: list[str], tensors: Sequence[Any]) -> PoolPages | None:
        """None if pages come in pieces, or are not as many as their keys."""
        pages = self._pools.get(PoolName.KV.value)
        fits = len(keys) == len(tensors) > 0 and all(one is not None for one in tensors)
        return pages if fits and pages is not None and pages.num_pieces == 1 else None

    # -- looking after -----------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Raises StoreError rather than pretend: it would delete the pages of other models, too."""
        raise StoreError(f"SGLang does not clear a kvstore; run: kvstore evict --all --store {self._path}")

    def close(self) -> None:
        self._store.close()


def _name(pool_name: Any) -> str:
    return PoolName(pool_name).value


def _leading(found: Sequence[bool]) -> int:
    return next((i for i, ok in enumerate(found) if not ok), len(found))


def _check(config: HiCacheStorageConfig, extra: dict[str, Any]) -> None:
    """Raises ConfigError."""
    missing = [name for name in ("path", "disk") if name not in extra]
    if missing:
        raise ConfigError(f'the extra config of KVStoreBackend has no "{missing[0]}"; give "path" and "disk"')
    unknown = sorted(extra.keys() - OPTIONS - OF_SGLANG)
    if unknown:
        raise ConfigError(f'KVStoreBackend knows no "{unknown[0]}"; its options are {", ".join(sorted(OPTIONS))}')
    if config.is_mla_model and config.tp_size > 1:
        raise ConfigError(
            f"of an MLA model at tensor parallelism {config.tp_size} SGLang stores one rank's KV for all, and a store "
            "has one owner; use --enable-dp-attention with as many dp as tp ranks, or tensor parallelism 1"
        )


def _open_store(path: Path, namespace: bytes, extra: dict[str, Any]) -> BlockStore:
    options = {"policy": extra["policy"]} if "policy" in extra else {}
    try:
        return BlockStore(path, namespace=namespace, capacity=extra["disk"], owner="SGLang", **options)
    except StoreLockedError as error:
        text = f'{error}. A store has one owner: give each SGLang a "path" of its own'
        raise StoreLockedError(text, error.pid) from error


def _namespace(config: HiCacheStorageConfig, extra: dict[str, Any], cache: Path) -> bytes:
    """What KV depends on beside the tokens and the pool, which the keys cover. Raises ConfigError."""
    runtime = sys.modules.get("sglang.srt.runtime_context")  # loaded wherever SGLang serves
    arguments = None if runtime is None else runtime.get_server_args()
    parts = {
        "format": FORMAT,
        "sglang": _version(),
        "model": {"identity": extra["identity"]} if "identity" in extra else _model(config, extra, arguments, cache),
        "arguments": {name: str(_argument(arguments, name)) for name in _ARGUMENTS},
        "config": {
            name: value for name, value in asdict(config).items()
            if name not in ("extra_config", "enable_storage_metrics", "model_name", "dp_rank")
        },
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _argument(arguments: Any, name: str) -> Any:
    """arguments: those of SGLang's server; None where none runs."""
    return None if arguments is None else field(arguments, name, "SGLang")


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def _model(config: HiCacheStorageConfig, extra: dict[str, Any], arguments: Any, cache: Path) -> dict[str, str]:
    name = str(extra.get("model") or _argument(arguments, "model_path") or config.model_name)
    try:
        folder = model_folder(name, _argument(arguments, "revision"), _argument(arguments, "download_dir"))
        weights = weights_digest(folder, cache)
    except ModelError as error:
        raise ConfigError(f'{error}; give the weights\' folder as "model", or a text as "identity"') from error
    settings = folder / "config.json"
    digest = hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else ""
    return {"weights": weights, "config": digest}
