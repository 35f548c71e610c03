"""One pool for every memory: which block is in use, which is cached under which id, which goes next.

Owns numbers, not bytes: it does not know which device its blocks are on, and it never touches a tensor.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.block import BlockId


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each in use (counted references) or free.

    A free block may still be cached: it can be found by its id until it is allocated again. Free blocks are kept in
    eviction order: those without an id first, then the least recently released, and of one chain the tail before the
    head (a head without its tail is a shorter hit, a tail without its head is none). Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._block_ids: list[BlockId | None] = [None] * num_blocks
        self._by_id: dict[BlockId, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by an id, in use or free."""
        return len(self._by_id)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def block_id(self, block: int) -> BlockId | None:
        return self._block_ids[block]

    def lookup(self, block_id: BlockId) -> int | None:
        """The block cached under this id. The caller must `acquire` it before anything else is allocated."""
        return self._by_id.get(block_id)

    def is_free(self, block: int) -> bool:
        return self._ref_counts[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the eviction order, one reference each. Needs count <= num_free."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._ref_counts[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; a free one leaves the eviction order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a reference to each block of a chain, given head first; unreferenced ones become free."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} was released once too often"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._block_ids[block] is None:
                    self._free.move_to_end(block, last=False)

    def insert(self, block: int, block_id: BlockId) -> bool:
        """Let `block`, which is in use and holds this content, be found by its id. False when another one holds it."""
        assert self._ref_counts[block] > 0, f"block {block} is cached while nobody holds it"
        if self._by_id.setdefault(block_id, block) != block:
            return False
        assert self._block_ids[block] in (None, block_id), f"block {block} has another id already"
        self._block_ids[block] = block_id
        return True

    def reset(self) -> None:
        """Everything free and nothing cached, as at the start: after an error left counts that cannot be trusted."""
        self.num_evictions += len(self._by_id)
        self._ref_counts = [0] * self.num_blocks
        self._block_ids = [None] * self.num_blocks
        self._by_id.clear()
        self._free = OrderedDict.fromkeys(range(self.num_blocks))

    def evict_all(self) -> int:
        """Forget the ids of all free blocks; returns how many. Blocks in use stay."""
        cached = [block for block in self._free if self._block_ids[block] is not None]
        for block in cached:
            self._forget(block)
        return len(cached)

    def _forget(self, block: int) -> None:
        block_id = self._block_ids[block]
        if block_id is not None:
            del self._by_id[block_id]
            self._block_ids[block] = None
            self.num_evictions += 1

    def check_integrity(self, idle: bool = True) -> None:
        """Assert that counts, ids and the free list agree; with `idle`, that nobody holds a block."""
        for block, count in enumerate(self._ref_counts):
            assert count >= 0 and (count == 0) == (block in self._free), f"block {block}: {count} references"
            block_id = self._block_ids[block]
            assert block_id is None or self._by_id.get(block_id) == block, f"block {block}: its id leads elsewhere"
        assert len(self._by_id) == sum(i is not None for i in self._block_ids), "an id leads to a block without it"
        assert not idle or len(self._free) == self.num_blocks, f"{self.num_blocks - len(self._free)} blocks still held"
