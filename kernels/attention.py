"""Paged attention of a step: chooses the implementation by the device and by what is installed; in torch, if by none.

A mixed batch has decode and prefill tokens of many requests.
"""

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from kvstore.kernels.cpu.attention import prefill
from kvstore.kernels.cuda import flash
from kvstore.kernels.kv import runs_kernels
from kvstore.kernels.paged_batch import DecodeGroup, PagedBatch, Scoring

log = logging.getLogger(__name__)
FUSED_TOKENS = 256  # per call of torch's fused attention behind others: more would look at more that they do not see
PIECE_TOKENS = 128  # query tokens per matrix product in prefill: small enough for the scores to stay in cache


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch,
    scoring: Scoring,
) -> Tensor:  # [num_tokens, num_heads, head_dim of the values]  # fmt: skip
    """Attention of all tokens of a step. Gives the same result as `kvstore.kernels.reference.paged_attention`.

    query: [num_tokens, num_heads, head_dim]; key, value: this step's, [num_tokens, num_kv_heads, head_dim], already in
    the caches, [num_blocks, block_size, num_kv_heads, head_dim], and used directly if no tokens come before them. Heads
    of values may have a size of their own.
    """
    if runs_kernels(query):
        return attend_paged(query, key_cache, value_cache, batch, scoring)
    return attend_by_torch(query, key, value, key_cache, value_cache, batch, scoring)


def attend_paged(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scoring: Scoring
) -> Tensor:  # [num_tokens, num_heads, head_dim of the values]
    """The same by kernels that read the pages themselves. Prefill: the fastest one available; decode: always Triton's.

    A CUDA graph needs a grid that fits any context, but foreign kernels choose theirs from lengths on the host. And a
    step that runs eagerly, because another request loads, must give the same numbers as a replayed one.
    """
    from kvstore.kernels.cuda import attention as attention_triton  # imports Triton, which may be missing

    layout = batch.device_batch
    has_prefill = layout.num_decodes < layout.num_requests
    is_common = scoring.sinks is None and key_cache.shape == value_cache.shape
    foreign = foreign_prefill(_setting(query, key_cache, scoring)) if has_prefill and is_common else None
    if foreign is not None:
        out = foreign(query, key_cache, value_cache, layout, scoring)
    else:
        out = _out_of(query, value_cache)
    if layout.num_decodes:
        attention_triton.decode(query, key_cache, value_cache, layout, scoring, out)
    if has_prefill and foreign is None:
        attention_triton.prefill(query, key_cache, value_cache, layout, scoring, out)
    return out


def _out_of(query: Tensor, value_cache: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[3])


def _setting(query: Tensor, key_cache: Tensor, scoring: Scoring) -> flash.PrefillSetting:
    return flash.PrefillSetting(
        device=query.device, dtype=query.dtype, num_heads=query.shape[1], num_kv_heads=key_cache.shape[2],
        head_dim=query.shape[2], block_size=key_cache.shape[1], has_window=scoring.window is not None,
        has_softcap=scoring.softcap is not None,
    )  # fmt: skip


@functools.cache
def foreign_prefill(setting: flash.PrefillSetting) -> flash.Prefill | None:
    """Whose kernel computes prefill, found out once; None means ours. Other kernels know neither sinks nor float32, nor
    heads of values of another size."""
    found = None
    if setting.dtype in (torch.float16, torch.bfloat16):
        if flash.module("flash_attn_interface") is not None and flash.works(flash.flash3, setting):
            found = flash.flash3
        elif not setting.has_softcap and flash.has_torch_varlen() and flash.works(flash.torch_varlen, setting):
            found = flash.torch_varlen
    log.info("prefill attention: %s for %s", "Triton" if found is None else found.__name__, setting)
    return found


def attend_by_torch(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch,
    scoring: Scoring,
) -> Tensor:  # [num_tokens, num_heads, head_dim of the values]  # fmt: skip
    """As `paged_attention`, but uses the batch's lists on the host."""
    num_requests = len(batch.context_lens)
    groups = batch.decode_groups(scoring.window, query.dtype) if batch.num_decodes else []
    if len(groups) == 1 and groups[0].rows is None and batch.num_decodes == num_requests:
        return _decode(query, key_cache, value_cache, groups[0], scoring)
    out = _out_of(query, value_cache)
    for group in groups:
        attended = _decode(query, key_cache, value_cache, group, scoring)
        if group.rows is None:
            out[: group.size] = attended
        else:
            out.index_copy_(0, group.rows, attended)
    for i in range(batch.num_decodes, num_requests):
        start, end = batch.query_start[i], batch.query_start[i + 1]
        if prefill(query[start:end], key_cache, value_cache, batch, i, scoring, out[start:end]):
            continue
        if batch.context_lens[i] == end - start:
            keys, values = key[start:end], value[start:end]
        else:
            keys, values = (batch.gather(cache, i, scoring.window) for cache in (key_cache, value_cache))
        _prefill(query[start:end], keys, values, scoring, out[start:end], batch)
    return out


def _decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scoring: Scoring
) -> Tensor:  # [size, num_heads, head_dim of the values]
    """One call for a group. The query heads that share a KV head take the place of query positions."""
    num_kv_heads = key_cache.shape[2]
    queries = query[: group.size] if group.rows is None else query.index_select(0, group.rows)
    grouped = queries.view(group.size, num_kv_heads, -1, query.shape[2])
    keys, values = (_read(cache, group) for cache in (key_cache, value_cache))
    if scoring.plain:
        result = F.scaled_dot_product_attention(grouped, keys, values, group.mask, scale=scoring.scale)
    else:
        sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1, 1)
        scores = torch.matmul(grouped * scoring.scale, keys.transpose(2, 3))
        result = torch.matmul(_weights(scores, group.mask, scoring.softcap, sinks), values)
    return result.reshape(group.size, -1, value_cache.shape[3])


def _read(cache: Tensor, group: DecodeGroup) -> Tensor:  # [size, num_kv_heads, context_len, head_dim]
    _, block_size, num_kv_heads, head_dim = cache.shape
    if group.run is None:
        blocks = cache.index_select(0, group.blocks)
        return blocks.view(group.size, -1, num_kv_heads, head_dim).transpose(1, 2)
    row = num_kv_heads * head_dim
    shape, strides = (1, num_kv_heads, group.context_len, head_dim), (0, head_dim, row, 1)
    return cache.as_strided(shape, strides, cache.storage_offset() + group.run * block_size * row)


def _prefill(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, out: Tensor, batch: PagedBatch) -> None:
    """Attention of several tokens of one request over its whole context, in pieces of queries.

    query, out: [num_tokens, num_heads, head_dim]; key, value: [context_len, num_kv_heads, head_dim], or without the
    first ones, which no token sees.
    """
    num_tokens, _, head_dim = query.shape
    context_len, num_kv_heads, _ = key.shape
    before = context_len - num_tokens
    windowed = scoring.window is not None and scoring.window < context_len
    if scoring.plain and not windowed and _fused_is_fast(query):
        _prefill_fused(query, key, value, scoring, out, batch)
        return
    grouped = (query * scoring.scale).view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys = key.permute(1, 2, 0).contiguous()  # [num_kv_heads, head_dim, context_len]
    values = value.transpose(0, 1).contiguous()
    out_grouped = out.view(num_tokens, num_kv_heads, -1, value.shape[2]).permute(1, 2, 0, 3)
    sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1, 1, 1)
    for start in range(0, num_tokens, PIECE_TOKENS):
        end = min(start + PIECE_TOKENS, num_tokens)
        first = max(0, before + start - scoring.window + 1) if windowed and scoring.window else 0
        last = before + end
        piece = grouped[:, :, start:end]
        scores = torch.bmm(piece.flatten(1, 2), keys[:, :, first:last]).view(*piece.shape[:3], last - first)
        _hide(scores, before + start - first, scoring.window if windowed else None)
        weights = _weights(scores, None, scoring.softcap, sinks)
        result = torch.bmm(weights.flatten(1, 2), values[:, first:last])
        out_grouped[:, :, start:end] = result.view(*piece.shape[:3], -1)


def _prefill_fused(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, out: Tensor, batch: PagedBatch) -> None:
    """The same by torch's fused attention. Tokens behind others need a mask: one for all pieces, the last columns of
    which say what each piece sees.
    """
    (num_tokens, num_heads, _), (context_len, num_kv_heads, _) = query.shape, key.shape
    before = context_len - num_tokens
    size = min(num_tokens, FUSED_TOKENS) if before else num_tokens
    masks = batch.causal_mask(size, context_len - size, query.dtype) if before else None
    for end in range(num_tokens, 0, -size):
        start = max(0, end - size)
        seen, first = before + end, num_tokens - size - start
        mask = None if masks is None else masks[: end - start, first : first + seen]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query[start:end], key[:seen], value[:seen]))
        result = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=not before, scale=scoring.scale, enable_gqa=num_heads != num_kv_heads
        )
        out[start:end].copy_(result[0].transpose(0, 1))


def _hide(scores: Tensor, offset: int, window: int | None) -> None:
    """Mask in place, [..., num_queries, num_keys]; query q is at the position of key `offset + q`."""
    num_queries, num_keys = scores.shape[-2:]
    positions = torch.arange(num_keys, device=scores.device)
    own = offset + torch.arange(num_queries, device=scores.device)[:, None]
    if window is not None:
        scores.masked_fill_((positions > own) | (positions <= own - window), float("-inf"))
    elif num_queries > 1:
        scores[..., offset:].masked_fill_(positions[offset:] > own, float("-inf"))


def _weights(scores: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax of [..., num_queries, num_keys]. Sinks, broadcastable to [..., num_queries, 1], only reduce weights."""
    if softcap is not None:
        hidden = scores == float("-inf")
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill_(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def _fused_is_fast(query: Tensor) -> bool:
    """Whether torch's fused attention beats matrix products: not for 16-bit floats on a CPU without tiles (AMX)."""
    return query.device.type != "cpu" or query.dtype == torch.float32 or _has_amx()


def _has_amx() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
