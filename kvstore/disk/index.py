"""What is on disk, as the control plane sees it: parents, sizes, and which block goes next.

One thread, no lock, no file. Built from a scan in the background, then kept up to date by whoever writes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from kvstore.blocks.forest import EvictionTree, Order
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict
from kvstore.policy.conversation import Conversation


class IndexEntry(NamedTuple):  # a million of them: made faster than dataclasses, and not watched by the collector
    """One block on disk. stored_bytes: what it takes in the file; times in seconds since the epoch."""

    block_id: BlockId
    parent_id: BlockId
    stored_bytes: int
    created_s: float
    last_access_s: float
    model: str = ""
    tenant: str = ""


def _never(block_id: BlockId) -> bool:
    return False


class DiskIndex:
    """Blocks by id, in the eviction order of their conversations (`kvstore.blocks.forest`).

    A block goes after those that are built on it, so a conversation is eaten from its tail and what stays is closed
    under parents. Every operation is O(1) a block. order: of conversations on this tier.
    """

    def __init__(self, clock: Callable[[], float] = time.time, order: Order | None = None) -> None:
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[BlockId, IndexEntry] = {}
        self._tree: EvictionTree[BlockId] = EvictionTree(order)
        self._tenant_bytes: dict[str, int] = {}  # of those that have blocks here
        self._touched: dict[BlockId, float] = {}

    @classmethod
    def build(
        cls,
        batches: Iterable[list[IndexEntry]],
        clock: Callable[[], float] = time.time,
        order: Order | None = None,
    ) -> DiskIndex:
        """From `DiskTier.scan()`, in any order. May run in any thread, as long as nobody else has the object.

        What is added and removed meanwhile is to be repeated on the result; what the scan saw already does no harm.
        """
        entries = [entry for batch in batches for entry in batch]
        entries.sort(key=lambda entry: entry.last_access_s)
        index = cls(clock, order)
        for entry in entries:
            index.add(entry)
        return index

    def name_conversations(self) -> list[tuple[Hashable, Conversation]]:
        """A conversation for each leaf of nobody, known only by its last use; returns them with their last blocks.

        Their numbers are negative, older than any that the registry makes.
        """
        leaves = [leaf for leaf in self._tree.leaves() if not any(self._tree.conversations(leaf))]
        leaves.sort(key=lambda leaf: self._entries[leaf].last_access_s)
        found: list[tuple[Hashable, Conversation]] = []
        now_s = self._clock()
        for number, leaf in enumerate(leaves, start=-len(leaves)):
            entry = self._entries[leaf]
            root = int.from_bytes(leaf[:8], "little")
            used_s = min(entry.last_access_s, now_s)  # the clock may have been set back
            one = Conversation(number, root, entry.created_s, used_s, use=number)
            self._tree.claim(one, (leaf,))
            found.append((leaf, one))
        return found

    # -- looking -----------------------------------------------------------------------------------------------------
    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_blocks(self) -> int:
        return len(self._entries)

    def get(self, block_id: BlockId) -> IndexEntry | None:
        """The entry, with the last access that is known here."""
        return self._entries.get(block_id)

    def bytes_of(self, tenant: str) -> int:
        """What the blocks of this tenant take."""
        return self._tenant_bytes.get(tenant, 0)

    def has_children(self, block_id: BlockId) -> bool:
        return self._tree.has_children(block_id)

    def descendants(self, block_id: BlockId) -> list[BlockId]:
        """The block itself and all that hangs below it here, parents before children."""
        return self._tree.descendants(block_id)

    # -- changing ----------------------------------------------------------------------------------------------------
    def add(self, entry: IndexEntry, conversation: Conversation | None = None) -> None:
        """A block was written, just now as far as the order goes. The same id again replaces what was there."""
        block_id = entry.block_id
        known = self._entries.get(block_id)
        if known is not None and (known.parent_id != entry.parent_id or known.tenant != entry.tenant):
            self.remove(block_id)
            known = None
        self._entries[block_id] = entry
        if known is None:
            self._count(entry.tenant, entry.stored_bytes)
            self._tree.add(block_id, entry.parent_id, conversation)
            if conversation is not None and (prefix := conversation.prefix_at(block_id)) is not None:
                self._tree.settle(prefix, self._known)
        else:
            self._count(entry.tenant, entry.stored_bytes - known.stored_bytes)
            self._tree.touch(block_id)

    def _known(self, block_id: BlockId) -> BlockId | None:
        return block_id if block_id in self._entries else None

    def remove(self, block_id: BlockId) -> None:
        """A block is gone, or is to go. Nothing happens when it is not here."""
        if block_id in self._entries:
            self._tree.remove(block_id)
            self._drop(block_id)

    def _drop(self, block_id: BlockId) -> IndexEntry:
        """What the tree does not have any more."""
        entry = self._entries.pop(block_id)
        self._count(entry.tenant, -entry.stored_bytes)
        self._touched.pop(block_id, None)
        return entry

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        of_tenant = self._tenant_bytes.get(tenant, 0) + num_bytes
        if of_tenant:
            self._tenant_bytes[tenant] = of_tenant
        else:
            self._tenant_bytes.pop(tenant, None)

    def touch(self, chain: Sequence[BlockId], now_s: float, conversation: Conversation | None = None) -> None:
        """These blocks, head first, were of use. Noted is the last of them that is here: the others stay with it.

        conversation: whose they are.
        """
        end = len(chain)
        while end and chain[end - 1] not in self._entries:
            end -= 1
        if not end:
            return
        entry = self._entries[chain[end - 1]]
        self._entries[entry.block_id] = entry._replace(last_access_s=now_s)
        self._touched[entry.block_id] = now_s
        if conversation is not None:
            self._tree.claim(conversation, chain[:end])
            self._tree.settle(conversation.prefix, self._known)
        self._tree.touch(entry.block_id)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """These blocks, head first, are wanted by this conversation, as far as they are here."""
        end = len(chain)
        while end and chain[end - 1] not in self._entries:
            end -= 1
        if end:
            self._tree.claim(conversation, chain[:end])
            self._tree.settle(conversation.prefix, self._known)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """The first block of a splice goes before the block in front of it, though it names another parent."""
        self._tree.link(block_id, parent_id)

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use that were not handed out before, to be written with the next transaction."""
        touched, self._touched = self._touched, {}
        return touched

    def clear(self) -> None:
        """Nothing is on disk any more."""
        self._tree.clear()
        self._entries.clear()
        self._touched.clear()
        self._tenant_bytes.clear()
        self.num_bytes = 0

    # -- choosing ----------------------------------------------------------------------------------------------------
    def take_victims(self, num_bytes: int, is_pinned: Callable[[BlockId], bool] = _never) -> list[IndexEntry]:
        """Remove blocks to evict, so that at least so many bytes go, or as many as may; each before its parent."""
        if num_bytes <= 0:
            return []
        taken = self._tree.take(num_bytes, self._size_of, is_pinned)
        return [self._drop(block_id) for block_id in taken]

    def _size_of(self, block_id: BlockId) -> int:
        return self._entries[block_id].stored_bytes

    def select(self, what: Evict, is_pinned: Callable[[BlockId], bool] = _never) -> list[BlockId]:
        """All blocks that `what` means, tails first, the least recently used first. A block stays if a child does."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if not what.everything and all(condition is None for condition in conditions):
            return []
        now_s = self._clock()

        def matches(block_id: BlockId) -> bool:
            entry = self._entries[block_id]
            if what.unused_for_s is not None and now_s - entry.last_access_s < what.unused_for_s:
                return False
            if what.model is not None and entry.model != what.model:
                return False
            return (what.block_ids is None or block_id in what.block_ids) and not is_pinned(block_id)

        excess = None if what.to_bytes is None else self.num_bytes - what.to_bytes
        tails = self._tree.leaves() if what.block_ids is None else self._leaves_among(what.block_ids)
        leaves = sorted(tails, key=lambda block_id: self._entries[block_id].last_access_s)
        chosen: list[BlockId] = []
        for block_id in self._tree.from_tails(leaves, matches):
            if excess is not None:
                if excess <= 0:
                    break
                excess -= self._entries[block_id].stored_bytes
            chosen.append(block_id)
        return chosen

    def _leaves_among(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        return [one for one in block_ids if one in self._entries and not self._tree.has_children(one)]

    def check_integrity(self) -> None:
        """Assert that the order and the sums agree."""
        self._tree.check_integrity()
        assert set(self._tree.leaves()) <= self._entries.keys(), "a leaf that is not here"
        assert all(block_id in self._tree for block_id in self._entries), "an entry that is not in the order"
        assert self.num_bytes == sum(entry.stored_bytes for entry in self._entries.values()), "bytes disagree"
        assert self._touched.keys() <= self._entries.keys(), "a block that is gone was touched"
        found = Counter[str]()
        for entry in self._entries.values():
            found[entry.tenant] += entry.stored_bytes
        assert found == self._tenant_bytes, "bytes by tenant disagree"
