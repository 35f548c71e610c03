"""Which cached block of a tier builds on which. Knows no conversation, and not who holds a block."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Links(Generic[K]):
    """keys: the cached blocks. parents: of a cached block, the one that it builds on, cached or not.

    A parent may be named before it is added, and removed before its children: links are kept by key. Others read the
    three tables, and change them by the methods.
    """

    def __init__(self) -> None:
        self.keys: set[K] = set()
        self.parents: dict[K, K] = {}
        # One child, or the set of them: most have one, and a set takes 200 bytes.
        self.children_of: dict[K, K | set[K]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self.keys

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
        return [key for key in self.keys if key not in self.children_of]

    def link(self, key: K, parent: K) -> None:
        """Link a block to its parent. It has none yet."""
        self.parents[key] = parent
        children = self.children_of.get(parent)
        if children is None:
            self.children_of[parent] = key
        elif isinstance(children, set):
            children.add(key)
        else:
            self.children_of[parent] = {children, key}

    def unlink(self, key: K) -> K | None:
        """Unlink a block from its parent, and return that."""
        parent = self.parents.pop(key, None)
        if parent is not None:
            children = self.children_of[parent]
            if isinstance(children, set) and len(children) > 1:
                children.discard(key)
            else:
                del self.children_of[parent]
        return parent

    def clear(self) -> None:
        for each in (self.keys, self.parents, self.children_of):
            each.clear()

    def check_integrity(self) -> None:
        """Assert that parents and children agree."""
        for key, parent in self.parents.items():
            assert key in self.keys, "a link from a block that is not cached"
            assert key in self.children(parent), f"{key!r}: its parent does not know it"
        assert sum(len(self.children(key)) for key in self.children_of) == len(self.parents), "a lost child"
