"""What is on disk, as the control plane sees it: parents, sizes, and which block is evicted next.

One thread, no lock, no file. Built from a scan before the store opens, then updated with every write.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kvstore.blocks.forest import Candidate, EvictionTree, select
from kvstore.blocks.ids import NO_TOKENS, BlockId, child_block_id
from kvstore.blocks.records import Evict
from kvstore.policy.conversation import Conversation

if TYPE_CHECKING:
    from kvstore.policy.policies import EvictionOrder


class TenantBytes:
    """A sum of bytes, by tenant. of_tenants: of those that have some."""

    def __init__(self) -> None:
        self.total = 0
        self.of_tenants: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        return self.of_tenants.get(tenant, 0)

    def add(self, tenant: str, num_bytes: int) -> None:
        """Add to the sum; a negative number takes away from it."""
        self.total += num_bytes
        if left := self.of_tenants.get(tenant, 0) + num_bytes:
            self.of_tenants[tenant] = left
        else:
            self.of_tenants.pop(tenant, None)

    def clear(self) -> None:
        self.total = 0
        self.of_tenants.clear()


class IndexEntry(msgspec.Struct, frozen=True, gc=False):  # a million of them: smaller and made faster than dataclasses
    """One block on disk. stored_bytes: what it takes in the file; last_access_s: in seconds since the epoch."""

    block_id: BlockId
    parent_id: BlockId
    stored_bytes: int
    last_access_s: float
    model: str = ""
    tenant: str = ""


class DiskIndex:
    """Blocks by id, in the eviction order of their conversations (`kvstore.blocks.forest`).

    A block is evicted after those that build on it, so conversations shrink from their tails, and every kept block has
    its parents. Every operation is O(1) a block.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.bytes = TenantBytes()
        self._clock = clock
        self._entries: dict[BlockId, IndexEntry] = {}
        self.tree: EvictionTree[BlockId] = EvictionTree(None, is_state=self._is_state)
        self.links = self.tree.links  # which block builds on which
        self._touched: dict[BlockId, float] = {}
        self.state_shape = (0, 0)  # blocks that a state takes, and their tokens; set before conversations are named

    @classmethod
    def build(cls, batches: Iterable[list[IndexEntry]], clock: Callable[[], float] = time.time) -> DiskIndex:
        """Build it from `DiskTier.scan()`, in any order. A block that comes twice has its last entry."""
        index = cls(clock)
        entries = index._entries
        for batch in batches:
            for entry in batch:
                entries[entry.block_id] = entry
        for entry in entries.values():
            index.bytes.add(entry.tenant, entry.stored_bytes)
        parents = {block_id: entry.parent_id for block_id, entry in entries.items()}
        index.tree.fill(parents, lambda block_id: entries[block_id].last_access_s)
        return index

    def name_conversations(self, order: EvictionOrder) -> list[tuple[Hashable, Conversation]]:
        """Make a conversation for each leaf, known only by its last use; returns them with their last blocks. From now
        on `order` has them. Where a conversation goes on behind a state, that is no other's.

        Their numbers are negative, older than any of the registry's.
        """
        self.tree.order = order
        leaves = self.links.leaves()
        leaves.sort(key=lambda leaf: self._entries[leaf].last_access_s)
        found: list[tuple[Hashable, Conversation]] = []
        now_s = self._clock()
        for number, leaf in enumerate(leaves, start=-len(leaves)):
            entry = self._entries[leaf]
            root = int.from_bytes(leaf[:8], "little")
            used_s = min(entry.last_access_s, now_s)  # the clock may have been set back
            one = Conversation(number, root, used_s, used_s, use=number)
            self.tree.claim(one, leaf)
            if (name := self._name_of(leaf)) is not None:
                found.append((name, one))
        return found

    def _name_of(self, leaf: BlockId) -> BlockId | None:
        """By which block the conversation that ends here is known: of a state, the one it stands behind. None: it goes
        on from there.
        """
        num_blocks, name = self.state_shape[0], leaf
        if not self._is_state(leaf):
            return leaf
        for _ in range(num_blocks):
            name = self._entries[name].parent_id
            if name not in self._entries:
                return None
        return name if len(self.links.children(name)) == 1 else None

    def _is_state(self, block_id: BlockId) -> bool:
        num_blocks, block_size = self.state_shape
        if not num_blocks:
            return False
        return block_id == child_block_id(self._entries[block_id].parent_id, NO_TOKENS * block_size)

    # -- looking -----------------------------------------------------------------------------------------------------
    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, block_id: BlockId) -> IndexEntry | None:
        """The entry, with the last access that is known here."""
        return self._entries.get(block_id)

    # -- changing ----------------------------------------------------------------------------------------------------
    def add(self, entry: IndexEntry, conversation: Conversation | None = None) -> None:
        """Add a block that was just written. The same id again replaces the entry."""
        block_id = entry.block_id
        known = self._entries.get(block_id)
        if known is not None and (known.parent_id != entry.parent_id or known.tenant != entry.tenant):
            self.remove(block_id)
            known = None
        self._entries[block_id] = entry
        if known is None:
            self.bytes.add(entry.tenant, entry.stored_bytes)
            self.tree.add(block_id, entry.parent_id, conversation)
        else:
            self.bytes.add(entry.tenant, entry.stored_bytes - known.stored_bytes)
            self.tree.touch(block_id)

    def resize(self, block_id: BlockId, stored_bytes: int) -> None:
        """Note what a block takes in the file now; does nothing if it is not here."""
        if (entry := self._entries.get(block_id)) is not None:
            self.bytes.add(entry.tenant, stored_bytes - entry.stored_bytes)
            self._entries[block_id] = replace(entry, stored_bytes=stored_bytes)

    def _known(self, block_id: BlockId) -> BlockId | None:
        return block_id if block_id in self._entries else None

    def remove(self, block_id: BlockId) -> None:
        """Remove a block that is deleted or about to be; does nothing if it is not here."""
        if block_id in self._entries:
            self.tree.remove(block_id)
            self._drop(block_id)

    def _drop(self, block_id: BlockId) -> IndexEntry:
        """Drop the entry of a block that the tree no longer has."""
        entry = self._entries.pop(block_id)
        self.bytes.add(entry.tenant, -entry.stored_bytes)
        self._touched.pop(block_id, None)
        return entry

    def touch(self, block_id: BlockId, now_s: float, conversation: Conversation | None = None) -> None:
        """Mark a block that is here as used; those that it builds on stay with it. conversation: ends there."""
        self._entries[block_id] = replace(self._entries[block_id], last_access_s=now_s)
        self._touched[block_id] = now_s
        if conversation is not None:
            self.tree.claim(conversation, block_id)
        self.tree.touch(block_id)

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use since the last call, to be written with the next transaction."""
        touched, self._touched = self._touched, {}
        return touched

    def clear(self) -> None:
        """Remove all entries."""
        self.tree.clear()
        self._entries.clear()
        self._touched.clear()
        self.bytes.clear()

    # -- choosing ----------------------------------------------------------------------------------------------------
    def take_victims(self, num_bytes: int, is_pinned: Callable[[BlockId], bool] = lambda _: False) -> list[IndexEntry]:
        """Remove blocks to evict, of at least this size in all, or as many as possible; each before its parent."""
        if num_bytes <= 0:
            return []
        gone = self.tree.evict(num_bytes, lambda block_id: self._entries[block_id].stored_bytes, is_pinned)
        return [self._drop(block_id) for block_id in gone]

    def select(self, what: Evict, is_pinned: Callable[[BlockId], bool] | None = None) -> list[BlockId]:
        """All blocks that `what` selects; see `kvstore.blocks.forest.select`."""
        return select(what, self.links, self._candidate, self._known, self.bytes.total, self._clock(), is_pinned)

    def _candidate(self, block_id: BlockId) -> Candidate:
        entry = self._entries[block_id]
        return Candidate(block_id, entry.model, entry.last_access_s, entry.stored_bytes)

    def check_integrity(self) -> None:
        """Assert that the order and the sums agree."""
        self.tree.check_integrity()
        assert set(self.links.leaves()) <= self._entries.keys(), "a leaf that is not here"
        assert all(block_id in self.tree for block_id in self._entries), "an entry that is not in the order"
        assert self.bytes.total == sum(entry.stored_bytes for entry in self._entries.values()), "bytes disagree"
        assert self._touched.keys() <= self._entries.keys(), "a block that is gone was touched"
        found = Counter[str]()
        for entry in self._entries.values():
            found[entry.tenant] += entry.stored_bytes
        assert found == self.bytes.of_tenants, "bytes by tenant disagree"
