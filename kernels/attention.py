"""Paged attention of a step: which implementation computes it, by the device."""

import torch

from kernels import attention_torch
from kernels.paged_batch import PagedBatch, Scoring

__all__ = ["PagedBatch", "Scoring", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scoring: Scoring,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attention of all tokens of a step. Same result as `kernels.reference.paged_attention`.

    query: [num_tokens, num_heads, head_dim]; key, value: this step's, [num_tokens, num_kv_heads, head_dim], already in
    the caches, [num_blocks, block_size, num_kv_heads, head_dim], and used directly where there is nothing before them.
    """
    return attention_torch.paged_attention(query, key, value, key_cache, value_cache, batch, scoring)
