"""The cached blocks of one tier as a forest, and which is evicted next: a tail of the least valuable conversation.

Owns no blocks: keys are whatever identifies a block in its tier. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from kvstore.blocks.ends import Ends, Order
from kvstore.blocks.links import Links
from kvstore.policy.conversation import Conversation, Prefix

K = TypeVar("K", bound=Hashable)


class EvictionTree(Generic[K]):
    """A block is evicted only when nobody holds it and no cached block builds on it.

    Each conversation ends at its last block here; when that is evicted, at its parent. A leaf at which several
    conversations end counts as the most valuable of them; the others move off it first. Leaves without a conversation
    are evicted before all others, the least recently used first. Every operation is O(1) a block, beside the cost of
    the order. order None: there are no conversations. is_free: whether nobody uses a block; one in use is never next.
    """

    def __init__(self, order: Order | None, is_free: Callable[[K], bool] = lambda _: True) -> None:
        self.links: Links[K] = Links()
        self.ends: Ends[K] = Ends(order)
        self._is_free = is_free
        self._unclaimed: OrderedDict[K, None] = OrderedDict()  # leaves without a conversation that can be evicted

    def __contains__(self, key: K) -> bool:
        return key in self.links.keys

    # -- changing ----------------------------------------------------------------------------------------------------
    def add(self, key: K, parent: K | None, conversation: Conversation | None) -> None:
        """Add a block that was not cached. parent: the block that it builds on, cached here or not."""
        self.links.keys.add(key)
        if parent is not None:
            self._link(key, parent)
        if conversation is not None and (left := self.ends.extend(conversation, key, parent)) is not None:
            self.rest(left)
        self.rest(key)

    def _link(self, key: K, parent: K) -> None:
        self.hold(parent)
        self.links.link(key, parent)

    def claim(self, conversation: Conversation, path: Sequence[K]) -> None:
        """Give these blocks, head first, to the conversation: from now on it ends at the last one.

        Blocks that it leaves on another branch keep their value, under a copy.
        """
        old, end = self.ends.block_of.get(conversation), path[-1]
        if old != end:
            self.ends.claim(conversation, path)
            if old is not None:
                self.rest(old)
            self.rest(end)

    def settle(self, prefix: Prefix | None, key_of: Callable[[Any], K | None]) -> None:
        """Let a prefix, and those it builds on, end at their last blocks if these are cached. key_of: keys by block
        ids.
        """
        while prefix is not None:
            key, old = key_of(prefix.end), self.ends.block_of.get(prefix.entry)
            if key is not None and key != old:
                self.ends.move(prefix.entry, key)
                if old is not None:
                    self.rest(old)
                self.rest(key)
            prefix = prefix.parent

    def link(self, key: K, parent: K) -> None:
        """Link a block to its predecessor although it names no cached block as its parent: a splice."""
        links = self.links
        if key in links.keys and parent in links.keys and links.parents.get(key) not in links.keys:
            links.unlink(key)
            self._link(key, parent)

    def remove(self, key: K) -> None:
        """Remove a block. If its parent becomes a leaf without a conversation, that is evicted before other such
        leaves.
        """
        links = self.links
        links.keys.discard(key)
        self._unclaimed.pop(key, None)
        parent = links.unlink(key)
        if parent is None or parent not in links.keys:
            self.ends.move_all(key, None)
            return
        is_leaf = parent not in links.children_of
        if is_leaf and key not in links.children_of and self._is_free(parent) and self.ends.shorten(key, parent):
            return
        self.ends.move_all(key, parent)
        if is_leaf:
            self.rest(parent, first=True)

    # -- what can be evicted -----------------------------------------------------------------------------------------
    def hold(self, key: K) -> None:
        """Keep a block: it is in use, or a block that builds on it was added."""
        if key not in self.links.children_of:
            self._unclaimed.pop(key, None)
            if key in self.ends.at:
                self.ends.withdraw(key)

    def rest(self, key: K, first: bool = False) -> None:
        """Let a block be evicted, unless it is in use or built on. first: before others without a conversation."""
        links = self.links
        if key not in links.keys or key in links.children_of or not self._is_free(key):
            return
        if key in self.ends.at:
            self._unclaimed.pop(key, None)
            self.ends.admit(key)
        elif key not in self._unclaimed:
            self._unclaimed[key] = None
            if first:
                self._unclaimed.move_to_end(key, last=False)

    def touch(self, key: K) -> None:
        """Mark a block as just used: of those without a conversation it is evicted last."""
        if key in self._unclaimed:
            self._unclaimed.move_to_end(key)

    def next(self) -> K | None:
        """The block to evict next, without removing it; None when all are held."""
        return next(iter(self._unclaimed)) if self._unclaimed else self.ends.next()

    def evict(self, size: int, size_of: Callable[[K], int], is_pinned: Callable[[K], bool]) -> list[K]:
        """Remove blocks of at least this size in all, or all that can be evicted; returns them, tails first.

        is_pinned: blocks that stay although nobody holds them.
        """
        gone: list[K] = []
        aside: list[K] = []
        while size > 0 and (key := self.next()) is not None:
            if is_pinned(key):
                self.hold(key)
                aside.append(key)
            else:
                size -= size_of(key)
                self.remove(key)
                gone.append(key)
        for key in reversed(aside):
            self.rest(key, first=True)  # where it was
        return gone

    def clear(self) -> None:
        """Remove everything."""
        self.ends.clear()
        self.links.clear()
        self._unclaimed.clear()

    def check_integrity(self) -> None:
        """Assert that links, ends and leaves agree."""
        links, ends = self.links, self.ends
        links.check_integrity()
        ends.check_integrity()
        assert ends.at.keys() <= links.keys, "a conversation ends at a block that is not cached"
        for key in links.keys:
            free = key not in links.children_of and self._is_free(key)
            assert (key in self._unclaimed) == (free and key not in ends.at), f"{key!r} is {'not ' * free}to be next"
            for conversation in ends.conversations(key):
                assert ends.order is not None
                assert (conversation in ends.order) == free, f"{key!r}: its conversation is out of order"
