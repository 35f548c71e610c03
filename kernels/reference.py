"""The torch twins of the kernels: plain, perhaps slow, and right on every device. Tests compare kernels with them."""

import torch
from torch import Tensor

from kvstore.rope.rotary import Rotation


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write new keys and values, [num_tokens, num_kv_heads, head_dim], to their slots, [num_tokens]; -1 is skipped.

    Caches: [num_blocks, block_size, num_kv_heads, head_dim].
    """
    if len(slots) and int(slots.min()) < 0:
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate query, [num_tokens, num_heads, head_dim], and key; write key and value. Returns rotated query and key.

    rotation: one row per token, None to rotate nothing. The rest as `write_kv`.
    """
    if rotation is not None:
        query, key = rotation.apply(query), rotation.apply(key)
    write_kv(key, value, key_cache, value_cache, slots)
    return query, key


def load_blocks(
    layer: tuple[Tensor, Tensor], arena_blocks: Tensor, key_cache: Tensor, value_cache: Tensor, block_numbers: Tensor,
    positions: Tensor, rotation: Rotation | None,
) -> None:  # fmt: skip
    """Load one layer of N blocks from arena blocks, [N], to HBM blocks, [N], and rotate the keys.

    layer: its raw keys and values in the arena, [num_arena_blocks, block_size, num_kv_heads, head_dim] each; caches:
    [num_blocks, block_size, num_kv_heads, head_dim]. positions: of each block's first token, [N]. rotation: the
    layer's full table.
    """
    key, value = (part[arena_blocks].to(key_cache.device) for part in layer)
    if rotation is not None:
        every = (positions[:, None] + torch.arange(key.shape[1])).flatten().to(key.device)
        key = rotation.at(every).apply(key.flatten(0, 1)).view(key.shape)
    block_numbers = block_numbers.to(key_cache.device)
    key_cache[block_numbers] = key
    value_cache[block_numbers] = value


def save_tokens(layer: tuple[Tensor, Tensor], key: Tensor, value: Tensor, places: Tensor) -> None:
    """Save raw keys and values of one layer, [num_tokens, num_kv_heads, head_dim], to these places, [num_tokens].

    layer: as in `load_blocks`; a token's place in it is arena block * block_size + offset, and -1 is skipped.
    """
    kept = places >= 0
    for part, own in zip(layer, (key, value), strict=True):
        where = places[kept].to(part.device)
        part[where // part.shape[1], where % part.shape[1]] = own[kept].to(part.device)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [num_query_tokens, num_heads, head_dim of values]  # fmt: skip
    """Causal attention of the last tokens of one sequence over all of it, in float32.

    query: [num_query_tokens, num_heads, head_dim]; key, value: [context_len, num_kv_heads, head_dim]; heads of values
    may have another size, which is that of the result.
    window: a token sees itself and the window - 1 tokens before it. softcap: scores become softcap * tanh(s / softcap)
    (Gemma 2). sinks: [num_heads], a score that enters the softmax but has no value (gpt-oss).
    """
    num_tokens, num_heads, _ = query.shape
    context_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    key, value = key.repeat_interleave(group, 1).float(), value.repeat_interleave(group, 1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(context_len, device=query.device)
    distance = positions[context_len - num_tokens :, None] - positions
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_tokens, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, query_start: list[int], context_lens: list[int],
    block_table: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]  # fmt: skip
    """Attention of a mixed batch over the paged cache, one request after the other.

    query: [num_tokens, num_heads, head_dim]; block_table: [num_requests, max_blocks]; request i has the tokens
    query_start[i] .. query_start[i + 1] and sees context_lens[i] tokens, its own included. The rest as `attend`.
    """
    out = query.new_empty(*query.shape[:2], value_cache.shape[3])
    block_size = key_cache.shape[1]
    for i, context_len in enumerate(context_lens):
        blocks = block_table[i, : -(-context_len // block_size)].long()
        key = key_cache[blocks].flatten(0, 1)[:context_len]
        value = value_cache[blocks].flatten(0, 1)[:context_len]
        tokens = slice(query_start[i], query_start[i + 1])
        out[tokens] = attend(query[tokens], key, value, scale, window, softcap, sinks)
    return out


def forbid_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Make the tokens that masks, [C, W] int32, have no bit for -inf in these rows, [C], of logits, [R, V].

    Bit b of word w is token 32 w + b.
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
