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

    Blocks may be linked to their parents (see `insert`): then a block is never handed out while a child of it is
    cached, and when the last child goes, its parent is next in the order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._clear()

    def _clear(self) -> None:
        self._ref_counts = [0] * self.num_blocks
        self._block_ids: list[BlockId | None] = [None] * self.num_blocks
        self._by_id: dict[BlockId, int] = {}
        self._parents: dict[int, int] = {}
        self._children: dict[int, set[int]] = {}
        self._stale: set[int] = set()
        self._num_in_use = 0
        # In eviction order: what nobody holds and no cached child keeps.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out at once, cached ones included."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Blocks that somebody holds."""
        return self._num_in_use

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds: what `allocate` could hand out one after the other, children before parents."""
        return self.num_blocks - self._num_in_use

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

    def has_children(self, block: int) -> bool:
        """Whether a cached block is linked below this one."""
        return block in self._children

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the eviction order, one reference each. Needs count <= num_free."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        return [self._take() for _ in range(count)]

    def try_allocate(self) -> int | None:
        """One block as `allocate` gives it, or None when everything is held."""
        return self._take() if self._free else None

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.num_evictions += self._unname(block)
        self._stale.discard(block)
        self._ref_counts[block] = 1
        self._num_in_use += 1
        return block

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; a free one leaves the eviction order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._free.pop(block, None)
                self._num_in_use += 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a reference to each block of a chain, given head first; unreferenced ones become free."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} was released once too often"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._num_in_use -= 1
                self._make_free(block, first=self._block_ids[block] is None)

    def _make_free(self, block: int, first: bool) -> None:
        if block in self._children:
            return  # it becomes free when the last of them goes
        self._free[block] = None
        if first:
            self._free.move_to_end(block, last=False)
        if self._block_ids[block] is None:
            self._stale.add(block)

    def touch(self, blocks: Sequence[int]) -> None:
        """Blocks of a chain, head first, were useful: the free ones among them go last, the tail before the head."""
        for block in reversed(blocks):
            if block in self._free:
                self._free.move_to_end(block)

    def insert(self, block: int, block_id: BlockId, parent_id: BlockId | None = None) -> bool:
        """Let `block`, which is in use and holds this content, be found by its id. False when another one holds it.

        parent_id: link it to its parent if that is cached here, which then stays as long as this one.
        """
        assert self._ref_counts[block] > 0, f"block {block} is cached while nobody holds it"
        if self._by_id.setdefault(block_id, block) != block:
            return False
        assert self._block_ids[block] in (None, block_id), f"block {block} has another id already"
        self._block_ids[block] = block_id
        parent = None if parent_id is None else self._by_id.get(parent_id)
        if parent is not None and block not in self._parents:
            self._parents[block] = parent
            self._children.setdefault(parent, set()).add(block)
            self._free.pop(parent, None)
        return True

    def descendants(self, block: int) -> list[int]:
        """The block itself and all that is linked below it, parents before children."""
        found = [block]
        for one in found:
            found += self._children.get(one, ())
        return found

    def forget(self, block: int) -> list[int]:
        """This block's content is not to be found any more, nor what is linked below it; returns all that were.

        Whoever holds one of them keeps it.
        """
        gone = self.descendants(block)
        for one in reversed(gone):  # tails first
            self._unname(one)
            if self._ref_counts[one] == 0:
                self._free.pop(one, None)
                self._make_free(one, first=True)
        return gone

    def reset(self) -> None:
        """Everything free and nothing cached, as at the start: after an error left counts that cannot be trusted."""
        self.num_evictions += len(self._by_id)
        self._clear()
        self._stale.update(range(self.num_blocks))

    def evict_all(self) -> int:
        """Forget the ids of all free blocks; returns how many. Blocks in use stay."""
        count = 0
        while cached := [block for block in self._free if self._block_ids[block] is not None]:
            for block in cached:  # its parent may become free with it
                self._unname(block)
                self._stale.add(block)
            count += len(cached)
        self.num_evictions += count
        return count

    def cached_blocks(self) -> list[int]:
        """All blocks that can be found by an id."""
        return sorted(self._by_id.values())

    def take_stale(self) -> list[int]:
        """Free blocks without an id that were held since the last call: their content is of no use to anybody."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def _unname(self, block: int) -> bool:
        """Take the id and the links of a block without cached children. False when it had none."""
        block_id, self._block_ids[block] = self._block_ids[block], None
        if block_id is None:
            return False
        del self._by_id[block_id]
        parent = self._parents.pop(block, None)
        if parent is not None:
            self._children[parent].discard(block)
            if not self._children[parent]:
                del self._children[parent]
                if self._ref_counts[parent] == 0:
                    self._make_free(parent, first=True)
        return True

    def check_integrity(self, idle: bool = True) -> None:
        """Assert that counts, ids and the free list agree; with `idle`, that nobody holds a block."""
        for block, count in enumerate(self._ref_counts):
            free = count == 0 and block not in self._children
            assert count >= 0 and free == (block in self._free), f"block {block}: {count} references"
            block_id = self._block_ids[block]
            assert block_id is None or self._by_id.get(block_id) == block, f"block {block}: its id leads elsewhere"
        assert len(self._by_id) == sum(i is not None for i in self._block_ids), "an id leads to a block without it"
        for block, parent in self._parents.items():
            assert block in self._children.get(parent, ()), f"block {block}: its parent does not know it"
            assert self._block_ids[block] is not None and self._block_ids[parent] is not None, f"link of block {block}"
        assert sum(map(len, self._children.values())) == len(self._parents), "a child without a parent"
        assert self._num_in_use == sum(count > 0 for count in self._ref_counts), "blocks in use are miscounted"
        assert not idle or not self.num_in_use, f"{self.num_in_use} blocks still held"
