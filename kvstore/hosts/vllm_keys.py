"""The keys of a vLLM request in order: vLLM hands them over one by one, or as sets.

A request tells where each key ends in the prompt, and lists them all in a private field. Only this module reads that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvstore.hosts.vllm_identity import field


def groups_of(keys: Iterable[OffloadKey]) -> set[int]:
    """The groups of layers that these keys stand for."""
    return set(map(get_offload_group_idx, keys))


def chain_of(context: ReqContext, group: int) -> list[OffloadKey]:
    """A request's keys for one group of layers, head first."""
    own = [key for key in all_keys(context) if get_offload_group_idx(key) == group]
    return sorted(own, key=lambda key: end_of(key, context))


def end_of(key: OffloadKey, context: ReqContext) -> int:
    """The number of tokens up to this chunk's end, in prompt and answer."""
    return context.get_offload_key_position(key) or 0


class RequestKeys:
    """A request's keys, each with the one before it in its group.

    vLLM adds keys while the request grows; each is looked at once.
    """

    def __init__(self, context: ReqContext) -> None:
        self._context = context
        self._before: dict[OffloadKey, OffloadKey | None] = {}
        self._last: dict[int, OffloadKey] = {}  # by group

    def before(self, keys: Collection[OffloadKey]) -> dict[OffloadKey, OffloadKey | None]:
        """For each key the one before it, or None for a first one; in the order of their ends."""
        for key in islice(all_keys(self._context), len(self._before), None):
            group = get_offload_group_idx(key)
            self._before[key] = self._last.get(group)
            self._last[group] = key
        return {key: self._before.get(key) for key in sorted(keys, key=lambda key: end_of(key, self._context))}


def all_keys(context: ReqContext) -> dict[OffloadKey, int]:
    """Of all groups, as they came."""
    keys: dict[OffloadKey, int] = field(context, "_offload_key_positions")
    return keys
