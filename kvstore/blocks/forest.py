"""A tier's cached blocks, by what they build on and whose they are, which is evicted next, and which are by hand.

The order of conversations is passed in (see `kvstore.policy.policies`). Parents of blocks in flight are not evicted
before these have arrived. Knows not who else holds a block.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.policy.conversation import Conversation

if TYPE_CHECKING:
    from kvstore.policy.policies import EvictionOrder

K = TypeVar("K", bound=Hashable)


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

    A conversation owns the block at which it ends here, and no other. When that is evicted, it owns the parent, unless
    the parent's owner is worth more. A leaf that it leaves for another branch stays with a remnant of it, which ages.
    The prefix that ends at a leaf takes it from an owner that is worth less. Leaves without an owner are evicted before
    all others, the least recently used first. When a part of a state goes, so does the rest of it, and the KV before it
    that only it made usable, unless its owner runs.

    Every operation is O(1) a block, beside the cost of the order. order None: blocks have no owners. is_free: whether
    nobody uses a block; one in use is never next. id_of: the block id of a key. is_state: whether a block that is here
    holds a part of a state.
    """

    def __init__(
        self,
        order: EvictionOrder | None,
        is_free: Callable[[K], bool] = lambda _: True,
        id_of: Callable[[K], Hashable] = lambda key: key,
        is_state: Callable[[K], bool] = lambda _: False,
    ) -> None:
        self.links: Links[K] = Links()
        self.owner_of: dict[K, Conversation] = {}
        self.end_of: dict[Conversation, K] = {}
        self.order = order
        self._is_free = is_free
        self._id_of, self._is_state = id_of, is_state
        self._unowned: OrderedDict[K, None] = OrderedDict()  # leaves without an owner that can be evicted

    def __contains__(self, key: K) -> bool:
        return key in self.links

    # -- changing ----------------------------------------------------------------------------------------------------
    def fill(self, parents: Mapping[K, K], last_use: Callable[[K], float]) -> None:
        """Begin with these blocks, each with its parent. Nobody uses them, and none has an owner."""
        for key, parent in parents.items():
            self.links.add(key, parent)
        self._unowned = OrderedDict.fromkeys(sorted(self.links.leaves(), key=last_use))

    def add(self, key: K, parent: K | None, conversation: Conversation | None) -> None:
        """Add a block that was not cached: the conversation ends there now. parent: the block that it builds on, cached
        here or not.
        """
        if parent is not None:
            self.hold(parent)
        self.links.add(key, parent)
        if conversation is not None:
            before = None if parent is None else self.owner_of.get(parent)
            if before is not None and before.number == conversation.number:
                conversation = before  # itself, or its remnant on this branch
            self._give(key, conversation)
        self.rest(key)

    def claim(self, conversation: Conversation, key: K, keeps_pin: bool = False) -> None:
        """Let the conversation end at this cached block. keeps_pin: so does the leaf that it leaves for that."""
        if self.owner_of.get(key) is not conversation:
            self._give(key, conversation, keeps_pin)
            self.rest(key)

    def _give(self, key: K, conversation: Conversation, keeps_pin: bool = False) -> None:
        if self.order is None:
            return
        self.hold(key)
        if (before := self.owner_of.get(key)) is not None:
            del self.end_of[before]
        if (left := self.end_of.get(conversation)) is not None:
            self.hold(left)
            del self.owner_of[left]
            if left not in self.links.children_of:
                pinned_until_s = conversation.pinned_until_s if keeps_pin else 0.0
                remnant = replace(conversation, num_open=0, num_running=0, wanted=None, pinned_until_s=pinned_until_s)
                self.owner_of[left], self.end_of[remnant] = remnant, left
                self.rest(left)
        self.owner_of[key], self.end_of[conversation] = conversation, key

    def link(self, key: K, parent: K) -> None:
        """Link a block to its predecessor although it names no cached block as its parent: a splice."""
        links = self.links
        if key in links and parent in links and links.parents[key] not in links.parents:
            links.remove(key)
            self.hold(parent)
            links.add(key, parent)

    def remove(self, key: K) -> None:
        """Remove a block. If its parent becomes a leaf without an owner, that is evicted before other such leaves."""
        links = self.links
        self._unowned.pop(key, None)
        owner, parent = self.owner_of.pop(key, None), links.remove(key)
        if parent is None or parent not in links:
            if owner is not None:
                self._drop(owner)
            return
        if self._is_state(key):
            owner = self._unless_idle(owner)
            if parent not in links.children_of and self._unless_idle(self.owner_of.get(parent)) is None:
                self.owner_of.pop(parent, None)
        if owner is not None:
            self._inherit(parent, owner)
        self.rest(parent, first=True)

    def _unless_idle(self, owner: Conversation | None) -> Conversation | None:
        """It, if a request of it runs, which will leave another state; if not, it owns nothing any more."""
        if owner is None or owner.num_running:
            return owner
        self._drop(owner)
        return None

    def _inherit(self, key: K, owner: Conversation) -> None:
        """Let the owner of a block that is gone own its parent, unless that has one that is worth more."""
        if (other := self.owner_of.get(key)) is not None:
            stays, goes = (owner, other) if self._is_worth_more(owner, other) else (other, owner)
            stays.prefix = stays.prefix or goes.prefix  # of one that was found in a store it is not known
            self._drop(goes)
            if goes is owner:
                return
        self.owner_of[key], self.end_of[owner] = owner, key
        if key in self.links.children_of or not self._is_free(key):
            self._withdraw(owner)

    def _drop(self, owner: Conversation) -> None:
        """It owns nothing any more."""
        del self.end_of[owner]
        self._withdraw(owner)

    def _withdraw(self, owner: Conversation | None) -> None:
        if self.order is not None and owner is not None:
            self.order.discard(owner)

    def _is_worth_more(self, one: Conversation, other: Conversation) -> bool:
        return self.order is not None and self.order.value(one) > self.order.value(other)

    # -- what can be evicted -----------------------------------------------------------------------------------------
    def hold(self, key: K) -> None:
        """Keep a block: it is in use, or a block that builds on it was added."""
        if key not in self.links.children_of:
            self._unowned.pop(key, None)
            self._withdraw(self.owner_of.get(key))

    def rest(self, key: K, first: bool = False) -> None:
        """Let a block be evicted, unless it is in use or built on. first: before others without an owner."""
        links = self.links
        if key not in links.parents or key in links.children_of or not self._is_free(key):
            return
        owner = self.owner_of.get(key)
        if self.order is not None and owner is not None:
            self.order.add(owner)
        elif key not in self._unowned:
            self._unowned[key] = None
            if first:
                self._unowned.move_to_end(key, last=False)

    def touch(self, key: K) -> None:
        """Mark a block as just used: of those without an owner it is evicted last."""
        if key in self._unowned:
            self._unowned.move_to_end(key)

    def next(self) -> K | None:
        """The block to evict next, without removing it; None when all are held."""
        if self._unowned:
            return next(iter(self._unowned))
        while self.order is not None and (owner := self.order.first()) is not None:
            key = self.end_of.get(owner)
            if key is None:  # left behind by another tier's table of this order that was dropped
                self.order.discard(owner)
                continue
            prefix = owner.prefix and owner.prefix_at(self._id_of(key))
            if prefix is None or not self._is_worth_more(prefix.entry, owner):
                return key
            self.claim(prefix.entry, key)
        return None

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
        for owner in self.end_of:
            self._withdraw(owner)
        self.links.clear()
        for each in (self.owner_of, self.end_of, self._unowned):
            each.clear()

    def check_integrity(self) -> None:
        """Assert that links, owners and leaves agree."""
        links = self.links
        links.check_integrity()
        assert self.owner_of.keys() <= links.parents.keys(), "a block that is not cached has an owner"
        assert {owner: key for key, owner in self.owner_of.items()} == self.end_of, "owners and ends disagree"
        for key in links.parents:
            free, owner = key not in links.children_of and self._is_free(key), self.owner_of.get(key)
            assert (key in self._unowned) == (free and owner is None), f"{key!r} is {'not ' * free}to be next"
            if owner is not None:
                assert self.order is not None
                assert (owner in self.order) == free, f"{key!r}: its owner is out of order"


def children_of(records: Iterable[BlockRecord]) -> dict[BlockId, list[BlockId]]:
    """For each block that one of these builds on, those that do."""
    children: dict[BlockId, list[BlockId]] = {}
    for record in records:
        children.setdefault(record.parent_id, []).append(record.block_id)
    return children


def with_descendants(block_ids: Iterable[BlockId], records: Iterable[BlockRecord]) -> list[BlockId]:
    """These blocks, and all of the records' that build on them, parents before children."""
    children, found = children_of(records), list(dict.fromkeys(block_ids))
    given = set(found)
    for block_id in found:
        found += [child for child in children.pop(block_id, ()) if child not in given]
    return found


class InFlight(Counter[K]):
    """What is in flight, counted as often as it is: parents of blocks that are computed, copied, read or written."""

    def end(self, one: K) -> None:
        """It is once less, and not in here any more after the last time."""
        self[one] -= 1
        if not self[one]:
            del self[one]


# -- by hand -----------------------------------------------------------------------------------------------------------
class Candidate(NamedTuple):
    """The facts about a block that a selection uses. used_s: its last use, in seconds since the epoch."""

    block_id: BlockId
    model: str
    used_s: float
    num_bytes: int


def select(
    what: Evict,
    links: Links[K],
    candidate: Callable[[K], Candidate],
    key_of: Callable[[BlockId], K | None],
    num_bytes: int,
    now_s: float,
    is_pinned: Callable[[K], bool] | None = None,
) -> list[K]:
    """Keys of all blocks of a tier that `what` selects: whole tails of chains, the least recently used first.

    A block stays if one that builds on it stays. key_of: None for a block that is not there. num_bytes: the size of all
    blocks of the tier. is_pinned: blocks that stay, whatever `what` selects.
    """
    conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
    if not what.everything and all(condition is None for condition in conditions):
        return []

    def may_go(key: K) -> bool:
        if is_pinned is not None and is_pinned(key):
            return False
        one = candidate(key)
        if what.unused_for_s is not None and now_s - one.used_s < what.unused_for_s:
            return False
        return what.model in (None, one.model) and (what.block_ids is None or one.block_id in what.block_ids)

    if what.block_ids is None:
        leaves = links.leaves()
    else:
        named = map(key_of, what.block_ids)
        leaves = [key for key in named if key is not None and key not in links.children_of]
    leaves.sort(key=lambda key: candidate(key).used_s)
    excess = math.inf if what.to_bytes is None else num_bytes - what.to_bytes
    chosen: list[K] = []
    for key in _from_tails(links, leaves, may_go):
        if excess <= 0:
            break
        excess -= candidate(key).num_bytes
        chosen.append(key)
    return chosen


def _from_tails(links: Links[K], leaves: Iterable[K], may_go: Callable[[K], bool]) -> Iterator[K]:
    """These leaves, each followed by its ancestors that have no other child left.

    may_go: False keeps a block and all its ancestors.
    """
    num_left: dict[K, int] = {}  # children that stay, of parents that lose some
    for leaf in leaves:
        key: K | None = leaf
        while key is not None and key in links and may_go(key):
            yield key
            key = links.parents.get(key)
            if key is not None:
                num_left[key] = num_left.get(key, len(links.children(key))) - 1
                if num_left[key]:
                    break
