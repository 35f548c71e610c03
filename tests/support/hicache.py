"""HiCache's interface for storage back ends as SGLang 0.5.23 has it, for where that is not installed; and a host pool.

The names, arguments and fields are SGLang's: a test compares them where its package is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

import torch

HICACHE = "sglang.srt.mem_cache.hicache_storage"
PAGE_TOKENS, LAYERS, HEADS, HEAD_DIM = 4, 3, 4, 64


@dataclass(frozen=True, slots=True)
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict | None = None


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        if not hasattr(self, "registered_pools"):
            self.registered_pools = {}
        self.registered_pools[host_pool_name] = host_pool

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        raise NotImplementedError

    def batch_get_v2(self, transfers, extra_info=None):
        raise NotImplementedError

    def batch_set_v2(self, transfers, extra_info=None):
        raise NotImplementedError

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        raise NotImplementedError

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        raise NotImplementedError

    def batch_exists(self, keys, extra_info=None):
        raise NotImplementedError

    def clear(self):
        raise NotImplementedError

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def exists(self, key): ...


def provide() -> None:
    """Makes `sglang.srt.mem_cache.hicache_storage` importable: SGLang's own without the rest of it, which wants a GPU's
    libraries, or the stand-in.
    """
    if HICACHE in sys.modules:
        return
    found = importlib.util.find_spec("sglang")
    package = ModuleType("sglang")
    sys.modules["sglang"] = package
    if found is not None:
        package.__path__ = list(found.submodule_search_locations or [])
        return
    package.__path__ = []
    for name in ("sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[HICACHE] = sys.modules[__name__]


class HostPool:
    """As SGLang's pool of keys and values: `layer_first` is copied, `page_first` has two pieces of memory a page."""

    def __init__(self, layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, num_pages: int = 16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE_TOKENS
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, HEAD_DIM
        self.size = num_pages * PAGE_TOKENS
        inner = (LAYERS, self.size) if layout == "layer_first" else (self.size, LAYERS)
        self.kv_buffer = torch.zeros((2, *inner, HEADS, HEAD_DIM), dtype=dtype)

    def get_page_buffer_meta(self, indices):
        assert self.layout == "page_first" and len(indices) % PAGE_TOKENS == 0
        token = LAYERS * HEADS * HEAD_DIM * self.dtype.itemsize
        starts = [self.kv_buffer.data_ptr() + index * token for index in indices.tolist()[::PAGE_TOKENS]]
        pointers = [at for start in starts for at in (start, start + self.size * token)]
        return pointers, [PAGE_TOKENS * token] * len(pointers)

    def _page(self, index):
        tokens = slice(index, index + PAGE_TOKENS)
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]

    def get_data_page(self, index, flat=True):
        return self._page(index).flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index, data_page):
        self._page(index).copy_(data_page.reshape(self._page(index).shape))

    def compute(self, pages: list[str], at: int = 0) -> torch.Tensor:
        """Puts what belongs to these pages into the pool from page `at` on. Returns their tokens' indices."""
        for i, page in enumerate(pages, start=at):
            seed = int.from_bytes(hashlib.sha256(page.encode()).digest()[:6])
            values = torch.randn(self._page(0).shape, generator=torch.Generator().manual_seed(seed))
            self._page(i * PAGE_TOKENS).copy_(values)
        return torch.arange(at * PAGE_TOKENS, (at + len(pages)) * PAGE_TOKENS)

    def has(self, page: str, at: int) -> bool:
        """Whether the pool's page `at` is bit for bit that page."""
        other = HostPool(self.layout, self.dtype, 1)
        other.compute([page])
        return torch.equal(other.get_data_page(0), self.get_data_page(at * PAGE_TOKENS))


class LogicalPool:
    """As SGLang's anchor of a model whose KV is in other pools: a page has no bytes here."""

    layout, page_size = "page_first", PAGE_TOKENS

    def get_page_buffer_meta(self, indices):
        return None

    def get_data_page(self, index, flat=True):
        return torch.empty(0, dtype=torch.uint8)

    def get_dummy_flat_data_page(self):
        return self.get_data_page(0)

    def set_from_flat_data_page(self, index, data_page):
        """There is nothing to set."""


def pages_of(name: str, num_pages: int) -> list[str]:
    return [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(num_pages)]
