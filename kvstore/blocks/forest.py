"""The cached blocks of one tier as a forest, and which of them goes next: a tail of the least valuable conversation.

Owns links and ends, not blocks: keys are whatever names a block in its tier. The order of conversations is given (see
`kvstore.policy.policies`). One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from kvstore.policy.conversation import Conversation, Prefix

K = TypeVar("K", bound=Hashable)
MAX_ENDS = 16  # conversations that end at one block: behind a system prompt there may be any number


class Order(Protocol):
    """Conversations that could give up a block now (`kvstore.policy.policies.EvictionOrder`)."""

    def add(self, conversation: Conversation) -> None: ...

    def discard(self, conversation: Conversation) -> None: ...

    def first(self) -> Conversation | None:
        """The least valuable one, which stays."""
        ...

    def __contains__(self, conversation: Conversation) -> bool: ...


def _claim_of(conversation: Conversation) -> tuple[bool, bool, int, int]:
    """What a claim to a shared block is worth, where there are too many."""
    is_pinned = conversation.pinned_until_s > 0
    return conversation.wanted is not None, is_pinned, conversation.use, conversation.branch


class EvictionTree(Generic[K]):
    """A block goes only when nobody holds it and no cached block builds on it.

    Each conversation ends at the last of its blocks here; when that goes, at its parent. A leaf at which several end
    counts as the most valuable of them: the others resign first. Of very many that end at one block some are kept.
    Leaves of no conversation go before all others, the least recently used first. Every operation is O(1) a block,
    beside what the order takes.

    A parent may be named before it comes, and may go before its children: links are kept by key.

    order None: there are no conversations. is_held: whether somebody uses a block, which then is never next.
    """

    def __init__(self, order: Order | None, is_held: Callable[[K], bool] = lambda _: False) -> None:
        self._order = order
        self._is_held = is_held
        self._parents: dict[K, K] = {}
        # One child, or the set of them: most have one, and a set takes 200 bytes.
        self._children: dict[K, K | set[K]] = {}
        self._keys: set[K] = set()
        self._ends: dict[K, Conversation | set[Conversation]] = {}
        self._end_of: dict[Conversation, K] = {}
        self._nobodys: OrderedDict[K, None] = OrderedDict()
        self._num_branches = 0

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    # -- looking -----------------------------------------------------------------------------------------------------
    def has_children(self, key: K) -> bool:
        return key in self._children

    def parent(self, key: K) -> K | None:
        return self._parents.get(key)

    def children(self, key: K) -> Collection[K]:
        children = self._children.get(key)
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)

    def conversations(self, key: K) -> Collection[Conversation]:
        """Those that end at this block."""
        ends = self._ends.get(key)
        if ends is None:
            return ()
        return ends if isinstance(ends, set) else (ends,)

    def descendants(self, key: K) -> list[K]:
        """The block itself and all that is linked below it, parents before children."""
        found, seen = [key], {key}
        for one in found:
            fresh = [child for child in self.children(one) if child not in seen]  # a forged file may have a loop
            seen.update(fresh)
            found += fresh
        return found

    def leaves(self) -> list[K]:
        """All blocks on which no cached block builds."""
        return [key for key in self._keys if key not in self._children]

    def from_tails(self, leaves: Iterable[K], may_go: Callable[[K], bool]) -> Iterator[K]:
        """These leaves, each followed by its ancestors that have no other child left. Nothing is removed.

        may_go: False keeps a block and with it what is above it.
        """
        num_left: dict[K, int] = {}  # children that stay, of parents that lose some
        for leaf in leaves:
            key: K | None = leaf
            while key is not None and key in self._keys and may_go(key):
                yield key
                key = self._parents.get(key)
                if key is not None:
                    num_left[key] = num_left.get(key, len(self.children(key))) - 1
                    if num_left[key]:
                        break

    # -- changing ----------------------------------------------------------------------------------------------------
    def add(self, key: K, parent: K | None, conversation: Conversation | None) -> None:
        """A block is cached from now on, which was not. parent: what it is built on, cached here or not."""
        self._keys.add(key)
        if parent is not None:
            self._link(key, parent)
        if conversation is not None and self._order is not None:
            self._extend(conversation, key, parent)
        self.rest(key)

    def _link(self, key: K, parent: K) -> None:
        self._parents[key] = parent
        children = self._children.get(parent)
        if children is None:
            self.hold(parent)
            self._children[parent] = key
        elif isinstance(children, set):
            children.add(key)
        else:
            self._children[parent] = {children, key}

    def _extend(self, conversation: Conversation, key: K, parent: K | None) -> None:
        """The conversation goes on with this block; what it leaves on another branch keeps its value."""
        if parent is not None and self._end_of.get(conversation) == parent:  # the usual case: thousands may end there
            self._move_end(conversation, key)
            return
        own = None if parent is None else self._own_end(conversation, parent)
        if own is None:
            self._leave_branch(conversation)
        self._move_end(own or conversation, key)

    def _own_end(self, conversation: Conversation, key: K) -> Conversation | None:
        """Of those that end here it, or the copy that stands for this branch."""
        own = [one for one in self.conversations(key) if one.number == conversation.number]
        return max(own, key=lambda one: one.branch, default=None)

    def _leave_branch(self, conversation: Conversation) -> None:
        old = self._end_of.get(conversation)
        if old is not None:
            self._num_branches -= 1  # so that it goes before the original where all else is equal
            nobodys = {"num_open": 0, "num_running": 0, "wanted": None, "pinned_until_s": 0.0}
            remnant = replace(conversation, branch=self._num_branches, **nobodys)  # type: ignore[arg-type]
            self._move_end(conversation, None)
            self._move_end(remnant, old)
            self.rest(old)

    def claim(self, conversation: Conversation, path: Sequence[K]) -> None:
        """These blocks, head first, are the conversation's: it ends at the last of them from now on.

        What it leaves on another branch keeps its value, under a copy.
        """
        old, end = self._end_of.get(conversation), path[-1]
        if old == end or self._order is None:
            return
        if old is not None and old not in path:
            if (own := self._own_end(conversation, end)) is not None:  # now it stands for the other branch
                self._move_end(conversation, None)
                self._move_end(own, old)
            else:
                self._leave_branch(conversation)
        self._move_end(conversation, end)
        if old is not None:
            self.rest(old)
        self.rest(end)

    def settle(self, prefix: Prefix | None, key_of: Callable[[Any], K | None]) -> None:
        """A prefix, and those it stands on, end at their last blocks where these are cached. key_of: by their ids."""
        while prefix is not None:
            key, old = key_of(prefix.end), self._end_of.get(prefix.entry)
            if key is not None and key != old and self._order is not None:
                self._move_end(prefix.entry, key)
                if old is not None:
                    self.rest(old)
                self.rest(key)
            prefix = prefix.parent

    def link(self, key: K, parent: K) -> None:
        """A block that names no cached block as its parent goes before this one all the same: a splice."""
        if key not in self._keys or parent not in self._keys or self._parents.get(key) in self._keys:
            return
        if (before := self._parents.pop(key, None)) is not None:
            self._unlink(key, before)
        self._link(key, parent)

    def _move_end(self, conversation: Conversation, key: K | None) -> None:
        """From where it ended, if anywhere, to this block; None: it has nothing here any more."""
        old = self._end_of.pop(conversation, None)
        if old is not None:
            if self._order is not None:
                self._order.discard(conversation)
            ends = self._ends[old]
            if isinstance(ends, set) and len(ends) > 1:
                ends.discard(conversation)
            else:
                del self._ends[old]
        if key is None:
            return
        self._end_of[conversation] = key
        ends_here = self._ends.get(key)
        if ends_here is None:
            self._ends[key] = conversation
        elif isinstance(ends_here, set):
            ends_here.add(conversation)
            if len(ends_here) > MAX_ENDS:
                self._move_end(min(ends_here, key=_claim_of), None)
        else:
            self._ends[key] = {ends_here, conversation}

    def remove(self, key: K) -> None:
        """A block is not cached any more. Its parent, should it become a leaf of nobody, goes before others of that."""
        self._keys.discard(key)
        self._nobodys.pop(key, None)
        parent = self._parents.pop(key, None)
        is_freed = parent is not None and self._unlink(key, parent)
        if parent is not None and is_freed and self._shorten(key, parent):
            return
        for conversation in list(self.conversations(key)):
            self._move_end(conversation, parent if parent in self._keys else None)
        if parent is not None and is_freed:
            self.rest(parent, first=True)

    def _unlink(self, key: K, parent: K) -> bool:
        """Take a child from its parent; whether that has none any more."""
        children = self._children[parent]
        if isinstance(children, set) and len(children) > 1:
            children.discard(key)
            return False
        del self._children[parent]
        return True

    def _shorten(self, key: K, parent: K) -> bool:
        """The usual case, in which the order does not change: one conversation ends here, and then at the parent."""
        conversation = self._ends.get(key)
        if conversation is None or isinstance(conversation, set) or parent in self._ends:
            return False
        if parent not in self._keys or self._is_held(parent) or key in self._children:
            return False
        del self._ends[key]
        self._ends[parent] = conversation
        self._end_of[conversation] = parent
        if self._order is not None:
            self._order.add(conversation)  # does nothing, unless the block had been held
        return True

    def hold(self, key: K) -> None:
        """It is not to go: somebody uses it, or a block that builds on it has come."""
        if key in self._children:
            return
        self._nobodys.pop(key, None)
        if self._order is not None:
            for conversation in self.conversations(key):
                self._order.discard(conversation)

    def rest(self, key: K, first: bool = False) -> None:
        """It may go, unless somebody uses it or builds on it. first: before others that are nobody's."""
        if key not in self._keys or key in self._children or self._is_held(key):
            return
        if self._order is not None and key in self._ends:
            self._nobodys.pop(key, None)
            for conversation in self.conversations(key):
                self._order.add(conversation)
        elif key not in self._nobodys:
            self._nobodys[key] = None
            if first:
                self._nobodys.move_to_end(key, last=False)

    def touch(self, key: K) -> None:
        """Of use just now: of what is nobody's it goes last."""
        if key in self._nobodys:
            self._nobodys.move_to_end(key)

    def next(self) -> K | None:
        """The block that goes next, which stays for now; None when all are held."""
        if self._nobodys:
            return next(iter(self._nobodys))
        while self._order is not None and (conversation := self._order.first()) is not None:
            key = self._end_of.get(conversation)
            if key is None:  # left behind by another tree of this order, which was given up
                self._order.discard(conversation)
                continue
            if not isinstance(ends := self._ends[key], set) or len(ends) == 1:
                return key
            self._move_end(conversation, None)  # the others value it more
        return None

    def take(self, size: int, size_of: Callable[[K], int], is_pinned: Callable[[K], bool]) -> list[K]:
        """Remove blocks that together have at least this size, or all that may go; returns them, tails first.

        is_pinned: those that stay for another reason than being held.
        """
        taken: list[K] = []
        aside: list[K] = []
        while size > 0 and (key := self.next()) is not None:
            if is_pinned(key):
                self.hold(key)
                aside.append(key)
            else:
                size -= size_of(key)
                self.remove(key)
                taken.append(key)
        for key in reversed(aside):
            self.rest(key, first=True)  # where it was
        return taken

    def clear(self) -> None:
        """Nothing is cached any more."""
        for conversation in list(self._end_of):
            self._move_end(conversation, None)
        for each in (self._parents, self._children, self._keys, self._nobodys):
            each.clear()

    def check_integrity(self) -> None:
        """Assert that links, ends and leaves agree."""
        for key, parent in self._parents.items():
            assert key in self._keys, "a link from a block that is not cached"
            assert key in self.children(parent), f"{key!r}: its parent does not know it"
        assert sum(len(self.children(key)) for key in self._children) == len(self._parents), "a lost child"
        for conversation, key in self._end_of.items():
            assert key in self._keys, f"conversation {conversation.number} ends at a block that is not cached"
            assert conversation in self.conversations(key), f"conversation {conversation.number} ends nowhere"
        assert sum(len(self.conversations(key)) for key in self._ends) == len(self._end_of), "a lost end"
        for key in self._keys:
            free = key not in self._children and not self._is_held(key)
            is_nobodys = self._order is None or key not in self._ends
            assert (key in self._nobodys) == (free and is_nobodys), f"{key!r} is {'not ' * free}to be next"
            if self._order is not None:
                for conversation in self.conversations(key):
                    assert (conversation in self._order) == free, f"{key!r}: its conversation is out of order"
