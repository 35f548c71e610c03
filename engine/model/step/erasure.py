"""What was deleted is overwritten in HBM too, at once or as soon as no request holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvstore.blocks.pool import BlockPool
from kvstore.kernels.device import to_device


class Erasure:
    """Of one pool and its caches. To be called between two steps."""

    def __init__(self, pool: BlockPool, caches: Sequence[Any]) -> None:
        self._pool = pool
        self._caches = caches  # per layer: keys and values, [num_blocks, ...]
        self.pending: set[int] = set()  # blocks with something deleted in them that were held at that time

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget these blocks and overwrite them, those that a request still holds once it has released them."""
        for block in blocks:
            self._pool.forget(block)
            self.pending.add(block)
        self.go_on(always=True)

    def go_on(self, always: bool = False) -> None:
        """Overwrite what has become free. always: blocks without an id too, they may be of a deleted session."""
        free = {block for block in self.pending if self._pool.is_free(block)}
        if not free and not always:
            return
        self.pending -= free
        stale = self._pool.take_stale()
        if not stale or not self._caches:
            return
        blocks = to_device(torch.tensor(stale), self._caches[0][0].device)
        for layer in self._caches:
            for cache in layer:
                cache.index_fill_(0, blocks, 0)
