"""Prefill of a step by foreign attention kernels that read the paged cache: flash-attn's, or torch's own.

Each function takes the whole step and computes the requests after the decodes. They start at `query_start[first]`;
earlier rows are undefined. This module does not know what a kernel supports: `works` tries it.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kvstore.kernels import reference
from kvstore.kernels.paged_batch import DeviceBatch, PagedBatch, Scoring

log = logging.getLogger(__name__)

Prefill = Callable[[Tensor, Tensor, Tensor, DeviceBatch, Scoring], Tensor]


@dataclass(frozen=True, slots=True)
class PrefillSetting:
    """Everything that decides whether a kernel can compute a layer."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    has_window: bool
    has_softcap: bool


@functools.cache
def module(name: str) -> ModuleType | None:
    """A package that may be missing or built for another torch, in which case its import may raise anything."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        if not isinstance(error, ModuleNotFoundError):
            reason = str(error).strip().splitlines()[:1]
            log.warning("%s is installed but cannot be used (%s)", name, *reason or ["?"])
        return None


def has_torch_varlen() -> bool:
    """Whether torch's attention over sequences of different lengths takes a block table (from 2.13 on)."""
    varlen = module("torch.nn.attention.varlen")
    return varlen is not None and "block_table" in inspect.signature(varlen.varlen_attn).parameters


def flash3(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: DeviceBatch, scoring: Scoring
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    flash_attn_interface = importlib.import_module("flash_attn_interface")

    first = layout.num_decodes
    return flash_attn_interface.flash_attn_with_kvcache(
        query, key_cache, value_cache, cache_seqlens=layout.context_lens[first:],
        page_table=layout.block_table[first:], cu_seqlens_q=layout.query_start[first:],
        max_seqlen_q=layout.max_query_len, softmax_scale=scoring.scale, causal=True, window_size=_window(scoring),
        softcap=scoring.softcap or 0.0,
    )  # fmt: skip


def torch_varlen(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: DeviceBatch, scoring: Scoring
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    from torch.nn.attention.varlen import varlen_attn

    first = layout.num_decodes
    return varlen_attn(
        query, key_cache, value_cache, layout.query_start[first:], None, layout.max_query_len, layout.max_context_len,
        scale=scoring.scale, window_size=_window(scoring), enable_gqa=query.shape[1] != key_cache.shape[2],
        seqused_k=layout.context_lens[first:], block_table=layout.block_table[first:],
    )  # fmt: skip


def _window(scoring: Scoring) -> tuple[int, int]:
    """How many tokens before and after its own a token sees; -1 is all."""
    return (-1 if scoring.window is None else scoring.window - 1, 0)


def works(prefill: Prefill, setting: PrefillSetting) -> bool:
    """Whether `prefill` computes attention as `reference` does: tries three small requests, one of them a decode.

    Only a build of a foreign kernel knows which cards, head sizes and page sizes it takes.
    """
    block_size, device = setting.block_size, setting.device
    context_lens, query_start = [3, 2 * block_size + 3, block_size + 5], [0, 1, 1 + block_size + 2, block_size + 8]
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[5, 5, 5], [4, 0, 2], [3, 1, 1]])
    shape = (6, block_size, setting.num_kv_heads, setting.head_dim)
    key_cache, value_cache, query = (
        torch.randn(size, generator=generator).to(device, setting.dtype)
        for size in (shape, shape, (query_start[-1], setting.num_heads, setting.head_dim))
    )
    scoring = Scoring(0.1, block_size + 1 if setting.has_window else None, 2.0 if setting.has_softcap else None)
    slots = torch.zeros(query_start[-1], dtype=torch.int64, device=device)
    layout = PagedBatch(query_start, context_lens, table, slots, block_size).device_batch
    try:
        got = prefill(query, key_cache, value_cache, layout, scoring)
    except (RuntimeError, TypeError, ValueError, AssertionError):  # the ways in which it refuses
        return False
    expected = reference.paged_attention(
        query, key_cache, value_cache, query_start, context_lens, table.to(device),
        scoring.scale, scoring.window, scoring.softcap,
    )  # fmt: skip
    return got.shape == query.shape and torch.allclose(got[1:].float(), expected[1:].float(), rtol=0.05, atol=0.05)
