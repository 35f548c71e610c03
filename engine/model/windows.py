"""KV of layers with a window: in HBM it lies as any, below it is stored only behind the last blocks before a border.

There it is a state, of one HBM block each: its bytes as they are, with rotated keys. A splice turns these to where they
go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WindowStates:
    """`States` whose rows are HBM blocks. caches: of the layers with a window."""

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._caches = [cache for pair in caches for cache in pair]

    def packed(self, row: int) -> Tensor:
        """A copy of the block's KV, layer by layer, [num_bytes] uint8."""
        return torch.cat([cache[row].reshape(-1).view(torch.uint8) for cache in self._caches])

    def unpack(self, row: int, packed: Tensor) -> None:
        """Take in what `packed` gave, after it was overwritten."""
        parts = packed.split([cache[row].nbytes for cache in self._caches])
        for cache, part in zip(self._caches, parts, strict=True):
            cache[row].copy_(part.view(cache.dtype).view(cache.shape[1:]))
