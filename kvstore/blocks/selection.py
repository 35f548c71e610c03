"""Which blocks a selection evicts from a tier: whole tails of chains, the least recently used first."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from kvstore.blocks.forest import Links
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict

K = TypeVar("K", bound=Hashable)


class Candidate(NamedTuple):
    """The facts about a block that a selection uses. used_s: its last use, in seconds since the epoch."""

    block_id: BlockId
    model: str
    used_s: float
    num_bytes: int


def select(
    what: Evict,
    links: Links[K],
    candidate: Callable[[K], Candidate],
    key_of: Callable[[BlockId], K | None],
    num_bytes: int,
    now_s: float,
    is_pinned: Callable[[K], bool] | None = None,
) -> list[K]:
    """Keys of all blocks of a tier that `what` selects, tails first.

    A block stays if one that builds on it stays. key_of: None for a block that is not there. num_bytes: the size of all
    blocks of the tier. is_pinned: blocks that stay, whatever `what` selects.
    """
    conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
    if not what.everything and all(condition is None for condition in conditions):
        return []

    def may_go(key: K) -> bool:
        if is_pinned is not None and is_pinned(key):
            return False
        one = candidate(key)
        if what.unused_for_s is not None and now_s - one.used_s < what.unused_for_s:
            return False
        return what.model in (None, one.model) and (what.block_ids is None or one.block_id in what.block_ids)

    if what.block_ids is None:
        leaves = links.leaves()
    else:
        named = map(key_of, what.block_ids)
        leaves = [key for key in named if key is not None and key not in links.children_of]
    leaves.sort(key=lambda key: candidate(key).used_s)
    excess = math.inf if what.to_bytes is None else num_bytes - what.to_bytes
    chosen: list[K] = []
    for key in _from_tails(links, leaves, may_go):
        if excess <= 0:
            break
        excess -= candidate(key).num_bytes
        chosen.append(key)
    return chosen


def _from_tails(links: Links[K], leaves: Iterable[K], may_go: Callable[[K], bool]) -> Iterator[K]:
    """These leaves, each followed by its ancestors that have no other child left.

    may_go: False keeps a block and all its ancestors.
    """
    num_left: dict[K, int] = {}  # children that stay, of parents that lose some
    for leaf in leaves:
        key: K | None = leaf
        while key is not None and key in links and may_go(key):
            yield key
            key = links.parents.get(key)
            if key is not None:
                num_left[key] = num_left.get(key, len(links.children(key))) - 1
                if num_left[key]:
                    break
