"""What is on disk, as the control plane sees it: parents, sizes, and which block goes next.

One thread, no lock, no file. Built from a scan in the background, then kept up to date by whoever writes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvstore.block import BlockId
from kvstore.tier import Evict


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
    """Blocks by id, and their leaves in eviction order: least recently used first.

    A leaf has no child here. When a leaf goes and its parent has no other child, the parent is next in the order, so a
    conversation is eaten from its tail and what stays is closed under parents. Every operation is O(1) a block.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[BlockId, IndexEntry] = {}
        # Of a parent, here or not yet: its only child, or the set of them. Most have one, and a set takes 200 bytes.
        self._children: dict[BlockId, BlockId | set[BlockId]] = {}
        self._leaves: OrderedDict[BlockId, None] = OrderedDict()
        self._touched: dict[BlockId, float] = {}

    @classmethod
    def build(cls, batches: Iterable[list[IndexEntry]], clock: Callable[[], float] = time.time) -> DiskIndex:
        """From `DiskTier.scan()`, in any order. May run in any thread, as long as nobody else has the object.

        What is added and removed meanwhile is to be repeated on the result; what the scan saw already does no harm.
        """
        entries = [entry for batch in batches for entry in batch]
        entries.sort(key=lambda entry: entry.last_access_s)
        index = cls(clock)
        for entry in entries:
            index.add(entry)
        return index

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

    def has_children(self, block_id: BlockId) -> bool:
        return block_id in self._children

    def _children_of(self, block_id: BlockId) -> tuple[BlockId, ...]:
        children = self._children.get(block_id)
        if children is None:
            return ()
        return tuple(children) if isinstance(children, set) else (children,)

    def descendants(self, block_id: BlockId) -> list[BlockId]:
        """The block itself and all that hangs below it here, parents before children."""
        found, seen = [block_id], {block_id}
        for one in found:
            fresh = [child for child in self._children_of(one) if child not in seen]  # a forged file may have a loop
            seen.update(fresh)
            found += fresh
        return found

    # -- changing ----------------------------------------------------------------------------------------------------
    def add(self, entry: IndexEntry) -> None:
        """A block was written, just now as far as the order goes. The same id again replaces what was there."""
        block_id = entry.block_id
        known = self._entries.get(block_id)
        if known is not None and known.parent_id != entry.parent_id:
            self.remove(block_id)
            known = None
        self.num_bytes += entry.stored_bytes - (known.stored_bytes if known is not None else 0)
        self._entries[block_id] = entry
        if known is None:
            self._link(block_id, entry.parent_id)
        if block_id not in self._children:
            self._leaves[block_id] = None
            self._leaves.move_to_end(block_id)

    def _link(self, block_id: BlockId, parent_id: BlockId) -> None:
        children = self._children.get(parent_id)
        if children is None:
            self._children[parent_id] = block_id
            self._leaves.pop(parent_id, None)
        elif isinstance(children, set):
            children.add(block_id)
        else:
            self._children[parent_id] = {children, block_id}

    def remove(self, block_id: BlockId) -> None:
        """A block is gone, or is to go. Nothing happens when it is not here."""
        entry = self._entries.pop(block_id, None)
        if entry is None:
            return
        self.num_bytes -= entry.stored_bytes
        self._leaves.pop(block_id, None)
        self._touched.pop(block_id, None)
        children = self._children[entry.parent_id]
        if isinstance(children, set) and len(children) > 1:
            children.discard(block_id)
            return
        del self._children[entry.parent_id]
        if entry.parent_id in self._entries:
            self._leaves[entry.parent_id] = None
            self._leaves.move_to_end(entry.parent_id, last=False)

    def touch(self, block_id: BlockId, now_s: float) -> None:
        """This block was of use; nothing happens when it is not here."""
        entry = self._entries.get(block_id)
        if entry is None:
            return
        self._entries[block_id] = IndexEntry(
            entry.block_id, entry.parent_id, entry.stored_bytes, entry.created_s, now_s, entry.model, entry.tenant
        )
        self._touched[block_id] = now_s
        if block_id in self._leaves:
            self._leaves.move_to_end(block_id)

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use that were not handed out before, to be written with the next transaction."""
        touched, self._touched = self._touched, {}
        return touched

    # -- choosing ----------------------------------------------------------------------------------------------------
    def victims(self, num_bytes: int, is_pinned: Callable[[BlockId], bool] = _never) -> list[BlockId]:
        """Blocks to evict so that at least so many bytes go, or as many as may; each before its parent.

        Nothing is removed here: the caller does, for those that it evicts.
        """
        return self._choose(lambda entry: not is_pinned(entry.block_id), num_bytes)

    def select(self, what: Evict, is_pinned: Callable[[BlockId], bool] = _never) -> list[BlockId]:
        """All blocks that `what` means, tails first. A block stays while a child of it does."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if not what.everything and all(condition is None for condition in conditions):
            return []
        now_s = self._clock()

        def matches(entry: IndexEntry) -> bool:
            if what.unused_for_s is not None and now_s - entry.last_access_s < what.unused_for_s:
                return False
            if what.model is not None and entry.model != what.model:
                return False
            return (what.block_ids is None or entry.block_id in what.block_ids) and not is_pinned(entry.block_id)

        return self._choose(matches, None if what.to_bytes is None else self.num_bytes - what.to_bytes)

    def _choose(self, may_go: Callable[[IndexEntry], bool], num_bytes: int | None) -> list[BlockId]:
        chosen: list[BlockId] = []
        num_left: dict[BlockId, int] = {}  # children that stay, of parents that lose some
        for leaf in self._leaves:
            for entry in self._from_tail(leaf, num_left):
                if num_bytes is not None and num_bytes <= 0:
                    return chosen
                if not may_go(entry):
                    break
                chosen.append(entry.block_id)
                if num_bytes is not None:
                    num_bytes -= entry.stored_bytes
        return chosen

    def _from_tail(self, leaf: BlockId, num_left: dict[BlockId, int]) -> Iterator[IndexEntry]:
        """A leaf, then as long as the caller takes each, its ancestors that have no other child left."""
        entry = self._entries.get(leaf)
        while entry is not None:
            yield entry
            parent_id = entry.parent_id
            if parent_id not in num_left:
                children = self._children[parent_id]
                num_left[parent_id] = len(children) if isinstance(children, set) else 1
            num_left[parent_id] -= 1
            entry = self._entries.get(parent_id) if num_left[parent_id] == 0 else None

    def check_integrity(self) -> None:
        """Assert that links, leaves and sums agree."""
        links: dict[BlockId, set[BlockId]] = {}
        for block_id, entry in self._entries.items():
            assert entry.block_id == block_id, "an entry under another id"
            links.setdefault(entry.parent_id, set()).add(block_id)
        assert links == {parent: set(self._children_of(parent)) for parent in self._children}, "links disagree"
        assert set(self._leaves) == {i for i in self._entries if i not in links}, "leaves disagree"
        assert self.num_bytes == sum(entry.stored_bytes for entry in self._entries.values()), "bytes disagree"
        assert self._touched.keys() <= self._entries.keys(), "a block that is gone was touched"
