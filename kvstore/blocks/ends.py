"""At which cached block of a tier each conversation ends, and which of these ends is evicted next.

The order of conversations is passed in (see `kvstore.policy.policies`). Knows no links between blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from kvstore.policy.conversation import Conversation

K = TypeVar("K", bound=Hashable)
MAX_ENDS = 16  # conversations that end at one block: any number may share a system prompt


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
