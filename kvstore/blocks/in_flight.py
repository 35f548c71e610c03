"""Parents of blocks in flight: no tier evicts them before the blocks have arrived."""

from __future__ import annotations

from collections import Counter

from kvstore.blocks.ids import BlockId


class ParentsInFlight:
    """Parents of blocks that are being computed, copied, read or written, each counted once per block."""

    def __init__(self) -> None:
        self._nums: Counter[BlockId] = Counter()

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._nums

    def __len__(self) -> int:
        return len(self._nums)

    def add(self, parent_id: BlockId) -> None:
        """Count a block in flight that builds on this one."""
        self._nums[parent_id] += 1

    def remove(self, parent_id: BlockId) -> None:
        """Its arrival, or failure, ends the count."""
        self._nums[parent_id] -= 1
        if not self._nums[parent_id]:
            del self._nums[parent_id]
