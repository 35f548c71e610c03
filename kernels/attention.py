"""Paged attention of a step: chooses the implementation by the device and by what is installed."""

import functools
import logging

import torch
from torch import Tensor

from kvstore.kernels import attention_torch
from kvstore.kernels.cuda import flash as attention_flash
from kvstore.kernels.cuda.triton_support import runs_kernels
from kvstore.kernels.paged_batch import PagedBatch, Scoring

log = logging.getLogger(__name__)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch,
    scoring: Scoring,
) -> Tensor:  # [num_tokens, num_heads, head_dim]  # fmt: skip
    """Attention of all tokens of a step. Gives the same result as `kvstore.kernels.reference.paged_attention`.

    query: [num_tokens, num_heads, head_dim]; key, value: this step's, [num_tokens, num_kv_heads, head_dim], already in
    the caches, [num_blocks, block_size, num_kv_heads, head_dim], and used directly if no tokens come before them.
    """
    if runs_kernels(query):
        return attend_paged(query, key_cache, value_cache, batch, scoring)
    return attention_torch.paged_attention(query, key, value, key_cache, value_cache, batch, scoring)


def attend_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scoring: Scoring
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """The same by kernels that read the pages themselves. Prefill: the fastest one available; decode: always Triton's.

    A CUDA graph needs a grid that fits any context, but foreign kernels choose theirs from lengths on the host. And a
    step that runs eagerly, because another request loads, must give the same numbers as a replayed one.
    """
    from kvstore.kernels.cuda import attention as attention_triton  # imports Triton, which may be missing

    layout = batch.device_batch
    has_prefill = layout.num_decodes < layout.num_requests
    foreign = foreign_prefill(_setting(query, key_cache, scoring)) if has_prefill and scoring.sinks is None else None
    if foreign is not None:
        out = foreign(query, key_cache, value_cache, layout, scoring)
    else:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if layout.num_decodes:
        attention_triton.decode(query, key_cache, value_cache, layout, scoring, out)
    if has_prefill and foreign is None:
        attention_triton.prefill(query, key_cache, value_cache, layout, scoring, out)
    return out


def _setting(query: Tensor, key_cache: Tensor, scoring: Scoring) -> attention_flash.PrefillSetting:
    return attention_flash.PrefillSetting(
        device=query.device, dtype=query.dtype, num_heads=query.shape[1], num_kv_heads=key_cache.shape[2],
        head_dim=query.shape[2], block_size=key_cache.shape[1], has_window=scoring.window is not None,
        has_softcap=scoring.softcap is not None,
    )  # fmt: skip


@functools.cache
def foreign_prefill(setting: attention_flash.PrefillSetting) -> attention_flash.Prefill | None:
    """Whose kernel computes prefill, found out once; None means ours. Other kernels know neither sinks nor float32."""
    flash, found = attention_flash, None
    if setting.dtype in (torch.float16, torch.bfloat16):
        if flash.module("flash_attn_interface") is not None and flash.works(flash.flash3, setting):
            found = flash.flash3
        elif not setting.has_softcap and flash.has_torch_varlen() and flash.works(flash.torch_varlen, setting):
            found = flash.torch_varlen
    log.info("prefill attention: %s for %s", "Triton" if found is None else found.__name__, setting)
    return found
