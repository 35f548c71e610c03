"""KV of layers with a window: in HBM it lies in slots (`kvstore.engine.core.window_slots`), below it is stored only
behind the last blocks before a border.

There it is a state, of one slot each: its bytes as they are, with rotated keys. A splice turns these to where they go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.kernels.paged_batch import to_device


class WindowStates:
    """`States` whose rows are window slots. caches: of the layers with a window."""

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._caches = [cache for pair in caches for cache in pair]
        self._sizes = [cache[0].nbytes for cache in self._caches]

    def packed(self, rows: Sequence[int]) -> Tensor:
        """A copy of the slots' KV, layer by layer, [num_rows, num_bytes] uint8."""
        where = self._where(rows)
        return torch.cat([cache[where].flatten(1).view(torch.uint8) for cache in self._caches], 1)

    def blank(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, sum(self._sizes), dtype=torch.uint8, device=self._caches[0].device)

    def unpack(self, rows: Sequence[int], packed: Tensor) -> None:
        """Take in what is packed."""
        where = self._where(rows)
        for cache, part in zip(self._caches, packed.split(self._sizes, 1), strict=True):
            cache[where] = part.contiguous().view(cache.dtype).view(-1, *cache.shape[1:])

    def _where(self, rows: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(rows), self._caches[0].device)
