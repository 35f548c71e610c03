"""The keys of a request of vLLM in their order: vLLM hands them over one by one or as sets.

It tells where each key ends in the prompt, and lists them all in a private field, which is read here alone.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx


def chain_of(context: ReqContext, group: int | None = None) -> list[OffloadKey]:
    """A request's keys of one group of layers, head first. None: of the first group."""
    keys = _all_keys(context)
    if group is None:
        group = min(map(get_offload_group_idx, keys), default=0)
    own = [key for key in keys if get_offload_group_idx(key) == group]
    return sorted(own, key=lambda key: end_of(key, context))


def end_of(key: OffloadKey, context: ReqContext) -> int:
    """Tokens of the prompt and answer up to this chunk's end."""
    return context.get_offload_key_position(key) or 0


def keys_before(keys: Collection[OffloadKey], context: ReqContext) -> dict[OffloadKey, OffloadKey | None]:
    """Of each the one before it, None for a first one; in the order of their ends.

    All keys but the latest are looked at only where needed: what is stored while decoding stands at the end.
    """
    found: dict[OffloadKey, OffloadKey | None] = dict.fromkeys(sorted(keys, key=lambda key: end_of(key, context)))
    left = set(found)
    later: dict[int, OffloadKey] = {}  # by group: the key that was seen last, going backwards
    for key in reversed(_all_keys(context)):
        if not left:
            break
        group = get_offload_group_idx(key)
        after = later.get(group)
        if after is not None and after in left:
            found[after] = key
            left.discard(after)
        later[group] = key
    return found


def _all_keys(context: ReqContext) -> dict[OffloadKey, int]:
    return getattr(context, "_offload_key_positions", {})
