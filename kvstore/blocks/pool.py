"""One pool for every memory: which block is in use, which is cached under which id, which is evicted next.

Owns numbers, not bytes: it does not know which device its blocks are on, and it never touches a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.blocks.forest import EvictionTree
from kvstore.blocks.ids import BlockId
from kvstore.policy.conversation import Conversation

if TYPE_CHECKING:
    from kvstore.policy.policies import EvictionOrder


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each in use (counted references) or free.

    A free block may still be cached: it can be found by its id until it is allocated again. `allocate` takes free
    blocks without an id first, then cached ones in the order of `kvstore.blocks.forest`: the tail of the least valuable
    conversation; of blocks without a conversation, the least recently released.

    Of one chain the tail goes before the head: a head without its tail is a shorter hit, a tail without its head is
    none. A block that is linked to its parent (see `insert`) keeps that from being allocated. order: of conversations
    on this tier. on_gone: each is called with the id of each block that can no longer be found. is_state: see
    `EvictionTree`.
    """

    def __init__(
        self, num_blocks: int, order: EvictionOrder | None = None, on_gone: Sequence[Callable[[BlockId], None]] = (),
        is_state: Callable[[int], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self._on_gone = on_gone
        self.num_evictions = 0  # to make room
        self.num_forgotten = 0  # for any other reason
        self._ref_counts = [0] * num_blocks
        self.tree: EvictionTree[int] = EvictionTree(order, self.is_free, self.block_id, is_state)
        self._clear()

    def _clear(self) -> None:
        self._ref_counts = [0] * self.num_blocks
        self._block_ids: list[BlockId | None] = [None] * self.num_blocks
        self._by_id: dict[BlockId, int] = {}
        self._stale: set[int] = set()
        self.num_in_use = 0  # blocks that somebody holds
        self.tree.clear()
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # free and without an id

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included. `allocate` can take them if each holder of a block also holds
        its parents.
        """
        return self.num_blocks - self.num_in_use

    @property
    def num_blank(self) -> int:
        """Free blocks in which nothing is cached."""
        return len(self._blank)

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
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        found = [self.try_allocate() for _ in range(count)]
        assert None not in found, "a block is held whose parent nobody holds"
        return found  # type: ignore[return-value]

    def try_allocate(self) -> int | None:
        """One block as `allocate` gives it, or None when everything is held."""
        if self._blank:
            block, _ = self._blank.popitem(last=False)
        elif (block := self.tree.next()) is None:  # type: ignore[assignment]
            return None
        else:
            self._unname(block)
            self.num_evictions += 1
        self._stale.discard(block)
        self._ref_counts[block] = 1
        self.num_in_use += 1
        return block

    def evict_one(self) -> int | None:
        """Evict the next block and return it; None when every cached block is held."""
        block = self.tree.next()
        if block is not None:
            self._unname(block)
            self._make_blank(block, first=False)
            self.num_evictions += 1
        return block

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; a free one leaves the eviction order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if self._block_ids[block] is None:
                    del self._blank[block]
                else:
                    self.tree.hold(block)
                self.num_in_use += 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release a reference to each block of a chain, given head first; unreferenced ones become free."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} was released once too often"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self.num_in_use -= 1
                if self._block_ids[block] is None:
                    self._make_blank(block)
                else:
                    self.tree.rest(block)

    def _make_blank(self, block: int, first: bool = True) -> None:
        self._blank[block] = None
        if first:
            self._blank.move_to_end(block, last=False)
        self._stale.add(block)

    def touch(self, blocks: Sequence[int], conversation: Conversation | None = None, keeps_pin: bool = False) -> None:
        """Mark blocks of a chain, head first, as just used: of free blocks without a conversation, they are evicted
        last, tail first.

        conversation: ends at the last one from now on. keeps_pin: see `EvictionTree.claim`.
        """
        if conversation is not None and blocks:
            self.tree.claim(conversation, blocks[-1], keeps_pin)
            return
        for block in reversed(blocks):
            self.tree.touch(block)

    def insert(
        self, block: int, block_id: BlockId, parent_id: BlockId | None = None, conversation: Conversation | None = None
    ) -> bool:
        """Make `block`, which is in use and holds this content, findable by its id.

        False when another block holds it. parent_id: link it to its parent if that is cached here; the parent then
        stays as long as this one.
        """
        assert self._ref_counts[block] > 0, f"block {block} is cached while nobody holds it"
        if self._by_id.setdefault(block_id, block) != block:
            return False
        assert self._block_ids[block] in (None, block_id), f"block {block} has another id already"
        if self._block_ids[block] is None:
            self._block_ids[block] = block_id
            parent = None if parent_id is None else self._by_id.get(parent_id)
            self.tree.add(block, parent, conversation)
        return True

    def forget(self, block: int) -> list[int]:
        """Forget this block's content and all linked below it; returns the forgotten blocks.

        Holders keep theirs.
        """
        gone = self.tree.links.descendants(block)
        for one in reversed(gone):  # tails first
            if self._unname(one):
                self.num_forgotten += 1
                if self._ref_counts[one] == 0:
                    self._make_blank(one)
        return gone

    def reset(self) -> None:
        """Free everything and cache nothing, as at the start, after an error that may have left wrong counts."""
        self.num_evictions += len(self._by_id)
        for tell in self._on_gone:
            for block_id in self._by_id:
                tell(block_id)
        self._clear()
        self._stale.update(range(self.num_blocks))

    def evict_all(self) -> int:
        """Forget the ids of all free blocks; returns their number. Blocks in use and their parents stay."""
        return sum(1 for _ in iter(self.evict_one, None))

    def cached_blocks(self) -> list[int]:
        """All blocks that can be found by an id."""
        return sorted(self._by_id.values())

    def take_stale(self) -> list[int]:
        """Free blocks without an id that were held since the last call: nobody can use their content."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def _unname(self, block: int) -> bool:
        """Remove the id and the links of a block without cached children. False when it had no id."""
        block_id, self._block_ids[block] = self._block_ids[block], None
        if block_id is None:
            return False
        del self._by_id[block_id]
        self.tree.remove(block)
        for tell in self._on_gone:
            tell(block_id)
        return True

    def check_integrity(self, idle: bool = True) -> None:
        """Assert that counts, ids and the free list agree; with `idle`, that nobody holds a block."""
        for block, count in enumerate(self._ref_counts):
            block_id = self._block_ids[block]
            assert count >= 0 and (block in self._blank) == (count == 0 and block_id is None), f"block {block}: {count}"
            assert block_id is None or self._by_id.get(block_id) == block, f"block {block}: its id leads elsewhere"
            assert (block_id is not None) == (block in self.tree), f"block {block}: cached and not in the order"
        assert len(self._by_id) == sum(i is not None for i in self._block_ids), "an id leads to a block without it"
        self.tree.check_integrity()
        assert self.num_in_use == sum(count > 0 for count in self._ref_counts), "blocks in use are miscounted"
        assert not idle or not self.num_in_use, f"{self.num_in_use} blocks still held"
