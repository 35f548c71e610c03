"""A tier's cached blocks, by what they build on and which conversations end at them, and which is evicted next.

The order of conversations is passed in (see `kvstore.policy.policies`). Parents of blocks in flight are not evicted
before these have arrived. Knows not who else holds a block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from kvstore.blocks.ids import BlockId
from kvstore.policy.conversation import Conversation, Prefix

MAX_ENDS = 16  # conversations that end at one block: any number may share a system prompt
K = TypeVar("K", bound=Hashable)


class Order(Protocol):
    """Conversations that have a block to evict now (`kvstore.policy.policies.EvictionOrder`)."""

    def add(self, conversation: Conversation) -> None: ...

    def discard(self, conversation: Conversation) -> None: ...

    def first(self) -> Conversation | None:
        """The least valuable conversation; it stays in the order."""
        ...

    def __contains__(self, conversation: Conversation) -> bool: ...


def _claim_of(conversation: Conversation) -> tuple[bool, bool, int, int]:
    """The value of a claim to a shared block, to choose which claims to keep when there are too many."""
    is_pinned = conversation.pinned_until_s > 0
    return conversation.wanted is not None, is_pinned, conversation.use, conversation.branch


class Ends(Generic[K]):
    """Each conversation ends at one block: `block_of`. At most MAX_ENDS of them are kept per block: `at`.

    Whoever knows which blocks can be evicted calls `admit` and `withdraw`. order: None ignores all conversations.
    """

    def __init__(self, order: Order | None) -> None:
        self.order = order
        self.at: dict[K, Conversation | set[Conversation]] = {}
        self.block_of: dict[Conversation, K] = {}
        self._num_branches = 0

    def conversations(self, key: K) -> Collection[Conversation]:
        """The conversations that end at this block."""
        ends = self.at.get(key)
        if ends is None:
            return ()
        return ends if isinstance(ends, set) else (ends,)

    # -- moving ------------------------------------------------------------------------------------------------------
    def move(self, conversation: Conversation, key: K | None) -> None:
        """Move a conversation's end to this block; None: it has no block here any more."""
        if self.order is None:
            return
        old = self.block_of.pop(conversation, None)
        if old is not None:
            self.order.discard(conversation)
            ends = self.at[old]
            if isinstance(ends, set) and len(ends) > 1:
                ends.discard(conversation)
            else:
                del self.at[old]
        if key is None:
            return
        self.block_of[conversation] = key
        ends_here = self.at.get(key)
        if ends_here is None:
            self.at[key] = conversation
        elif isinstance(ends_here, set):
            ends_here.add(conversation)
            if len(ends_here) > MAX_ENDS:
                self.move(min(ends_here, key=_claim_of), None)
        else:
            self.at[key] = {ends_here, conversation}

    def extend(self, conversation: Conversation, key: K, parent: K | None) -> K | None:
        """Extend a conversation by a block. Returns the block where a copy of it stays, if it leaves a branch."""
        if self.block_of.get(conversation) == parent:  # the usual case
            self.move(conversation, key)
            return None
        own = None if parent is None else self._own_end(conversation, parent)
        left = self._leave_branch(conversation) if own is None else None
        self.move(own or conversation, key)
        return left

    def claim(self, conversation: Conversation, path: Sequence[K]) -> None:
        """Let a conversation end at the last block of a path, head first; a copy stays on a branch that it leaves."""
        old, end = self.block_of.get(conversation), path[-1]
        if old is not None and old not in path:
            if (own := self._own_end(conversation, end)) is not None:  # from now on it stands for the other branch
                self.move(conversation, None)
                self.move(own, old)
            else:
                self._leave_branch(conversation)
        self.move(conversation, end)

    def _own_end(self, conversation: Conversation, key: K) -> Conversation | None:
        """Which of the conversations that end here is this one, or its copy for this branch."""
        own = [one for one in self.conversations(key) if one.number == conversation.number]
        return max(own, key=lambda one: one.branch, default=None)

    def _leave_branch(self, conversation: Conversation) -> K | None:
        """Put a copy of the conversation in its place, so that the blocks there keep their value."""
        old = self.block_of.get(conversation)
        if old is not None:
            self._num_branches -= 1  # so that it is evicted before the original when all else is equal
            remnant = replace(
                conversation, branch=self._num_branches, num_open=0, num_running=0, wanted=None, pinned_until_s=0.0
            )
            self.move(conversation, None)
            self.move(remnant, old)
        return old

    def shorten(self, key: K, parent: K) -> bool:
        """The usual case of `move_all`, in which the order does not change: one conversation ends here, none there."""
        conversation = self.at.get(key)
        if conversation is None or isinstance(conversation, set) or parent in self.at:
            return False
        del self.at[key]
        self.at[parent] = conversation
        self.block_of[conversation] = parent
        if self.order is not None:
            self.order.add(conversation)  # does nothing, unless the block had been held
        return True

    def move_all(self, key: K, to: K | None) -> None:
        """Move all conversations that end at this block."""
        for conversation in list(self.conversations(key)):
            self.move(conversation, to)

    # -- the order ---------------------------------------------------------------------------------------------------
    def admit(self, key: K) -> None:
        """The block can be evicted now."""
        if self.order is not None:
            for conversation in self.conversations(key):
                self.order.add(conversation)

    def withdraw(self, key: K) -> None:
        """The block cannot be evicted any more."""
        if self.order is not None:
            for conversation in self.conversations(key):
                self.order.discard(conversation)

    def next(self) -> K | None:
        """The end of the least valuable conversation; of several that end there, only the most valuable stays."""
        while self.order is not None and (conversation := self.order.first()) is not None:
            key = self.block_of.get(conversation)
            if key is None:  # left behind by another tier's table of this order that was dropped
                self.order.discard(conversation)
                continue
            if not isinstance(ends := self.at[key], set) or len(ends) == 1:
                return key
            self.move(conversation, None)  # other conversations value the block more
        return None

    def clear(self) -> None:
        for conversation in list(self.block_of):
            self.move(conversation, None)

    def check_integrity(self) -> None:
        """Assert that both tables agree."""
        for conversation, key in self.block_of.items():
            assert conversation in self.conversations(key), f"conversation {conversation.number} ends nowhere"
        assert sum(len(self.conversations(key)) for key in self.at) == len(self.block_of), "a lost end"


class Links(Generic[K]):
    """parents: the cached blocks, each with the one that it builds on, cached or not; None: it is the first.

    A parent may be named before it is added, and removed before its children: links are kept by key. Others read both
    tables, and change them by the methods.
    """

    def __init__(self) -> None:
        self.parents: dict[K, K | None] = {}
        # One child, or the set of them: most have one, and a set takes 200 bytes.
        self.children_of: dict[K, K | set[K]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self.parents

    def children(self, key: K) -> Collection[K]:
        children = self.children_of.get(key)
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)

    def descendants(self, key: K) -> list[K]:
        """The block itself and all that is linked below it, parents before children."""
        found = [key]
        for one in found:
            found += [child for child in self.children(one) if child != key]  # a forged file may have a loop
        return found

    def leaves(self) -> list[K]:
        """All blocks on which no cached block builds."""
        return [key for key in self.parents if key not in self.children_of]

    def add(self, key: K, parent: K | None) -> None:
        """Add a block that is not here."""
        self.parents[key] = parent
        if parent is None:
            return
        children = self.children_of.setdefault(parent, key)
        if isinstance(children, set):
            children.add(key)
        elif children is not key:
            self.children_of[parent] = {children, key}

    def remove(self, key: K) -> K | None:
        """Remove a block, and return its parent. Ignores unknown ones."""
        parent = self.parents.pop(key, None)
        if parent is not None:
            children = self.children_of[parent]
            if isinstance(children, set) and len(children) > 1:
                children.discard(key)
            else:
                del self.children_of[parent]
        return parent

    def clear(self) -> None:
        self.parents.clear()
        self.children_of.clear()

    def check_integrity(self) -> None:
        """Assert that parents and children agree."""
        linked = {key: parent for key, parent in self.parents.items() if parent is not None}
        for key, parent in linked.items():
            assert key in self.children(parent), f"{key!r}: its parent does not know it"
        assert sum(len(self.children(key)) for key in self.children_of) == len(linked), "a lost child"


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
        return key in self.links

    # -- changing ----------------------------------------------------------------------------------------------------
    def fill(self, parents: Mapping[K, K], last_use: Callable[[K], float]) -> None:
        """Begin with these blocks, each with its parent. Nobody uses them, and none has a conversation."""
        for key, parent in parents.items():
            self.links.add(key, parent)
        self._unclaimed = OrderedDict.fromkeys(sorted(self.links.leaves(), key=last_use))

    def add(self, key: K, parent: K | None, conversation: Conversation | None) -> None:
        """Add a block that was not cached. parent: the block that it builds on, cached here or not."""
        if parent is not None:
            self.hold(parent)
        self.links.add(key, parent)
        if conversation is not None and (left := self.ends.extend(conversation, key, parent)) is not None:
            self.rest(left)
        self.rest(key)

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
        if key in links and parent in links and links.parents[key] not in links.parents:
            links.remove(key)
            self.hold(parent)
            links.add(key, parent)

    def remove(self, key: K) -> None:
        """Remove a block. If its parent becomes a leaf without a conversation, that is evicted before other such
        leaves.
        """
        links = self.links
        self._unclaimed.pop(key, None)
        parent = links.remove(key)
        if parent is None or parent not in links:
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
        if key not in links.parents or key in links.children_of or not self._is_free(key):
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
        assert ends.at.keys() <= links.parents.keys(), "a conversation ends at a block that is not cached"
        for key in links.parents:
            free = key not in links.children_of and self._is_free(key)
            assert (key in self._unclaimed) == (free and key not in ends.at), f"{key!r} is {'not ' * free}to be next"
            for conversation in ends.conversations(key):
                assert ends.order is not None
                assert (conversation in ends.order) == free, f"{key!r}: its conversation is out of order"


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
