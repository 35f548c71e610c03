"""Beginnings of prompts that others reuse: documents, system prompts; and when they are reused.

Control plane, one thread. Recognises them by a sample of block ids; knows no tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from kvstore.policy.conversation import Conversation, Learner, Prefix

MAX_SAMPLED = 1 << 16  # block ids remembered; larger stores use only a part of all blocks
MAX_PREFIXES = 1 << 14


class Prefixes:
    """Every newcomer's prompt may be the first of several that begin with it, and so has a prefix of its own: at first
    all of the prompt; from the second one that begins like it, what they have in common. A prefix rests and returns as
    conversations do: it returns when a new prompt begins with it.

    num_blocks: of the largest tier. A large store remembers only sampled ids of a prompt, so a prefix may seem shorter
    than it is by the distance between two samples.
    """

    def __init__(self, learner: Learner, num_blocks: int) -> None:
        self._learner = learner
        self._mask = (1 << max(0, (2 * num_blocks // MAX_SAMPLED).bit_length())) - 1
        self._owners: OrderedDict[Hashable, Prefix] = OrderedDict()  # of sampled blocks, in order of use
        self._known: OrderedDict[Prefix, None] = OrderedDict()  # in order of use

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, newcomer: Conversation, chain: Sequence[Hashable], make: Callable[[float], Conversation]) -> None:
        """Note a first prompt: it gets a prefix as long as the prompt, and shorter prefixes of it are marked as used.

        make: makes a conversation of that time to stand for a prefix.
        """
        owner, num_shared = self._longest_known(chain)
        own = used = None
        if owner is not None:
            own = used = self._part_of(owner, chain, num_shared, make(newcomer.used_s))
        while used is not None:
            self._use(used, newcomer)
            used = used.parent
        if num_shared < len(chain):
            own = self._make(chain, len(chain), own, make(newcomer.used_s))
            self._rest(own, newcomer)
        newcomer.prefix = own
        self._remember(chain, own)
        while len(self._known) > MAX_PREFIXES:
            self._forget(next(iter(self._known)))

    def _longest_known(self, chain: Sequence[Hashable]) -> tuple[Prefix | None, int]:
        """The prefix that owns the chain's last known block, and the number of known blocks."""
        for index in range(len(chain) - 1, -1, -1):
            owner = self._owners.get(chain[index])
            if owner is not None and owner in self._known:
                return owner, index + 1
        return None, 0

    def _part_of(self, owner: Prefix, chain: Sequence[Hashable], num_shared: int, entry: Conversation) -> Prefix:
        """The prefix of this many blocks, the last of which belongs to `owner`. entry: for a new one."""
        if owner.num_blocks == num_shared:
            return owner
        if owner.num_blocks > num_shared and owner.entry.turn == 1:
            owner.num_blocks, owner.end = (
                num_shared,
                chain[num_shared - 1],
            )  # the part that others do not share was not the prefix
            return owner
        if owner.num_blocks < num_shared:  # of a prompt that is longer than the common part was then
            return self._make(chain, num_shared, owner, entry)
        shorter = self._make(chain, num_shared, owner.parent, entry)
        entry.turn, entry.created_s = owner.entry.turn, owner.entry.created_s
        owner.parent = shorter
        return shorter

    def _make(self, chain: Sequence[Hashable], num_blocks: int, parent: Prefix | None, entry: Conversation) -> Prefix:
        made = entry.prefix = Prefix(entry, chain[num_blocks - 1], num_blocks, parent)
        entry.turn = 1
        self._known[made] = None
        return made

    def _use(self, prefix: Prefix, newcomer: Conversation) -> None:
        entry, now_s = prefix.entry, newcomer.used_s
        entry.turn += 1
        entry.gap_s = max(0.0, now_s - entry.created_s) / (entry.turn - 1)
        self._learner.returned(entry, max(0.0, now_s - entry.used_s))
        self._rest(prefix, newcomer)

    def _rest(self, prefix: Prefix, newcomer: Conversation) -> None:
        prefix.entry.used_s, prefix.entry.use = newcomer.used_s, newcomer.use
        self._known[prefix] = None
        self._known.move_to_end(prefix)
        self._learner.rested(prefix.entry, newcomer.used_s)

    def _remember(self, chain: Sequence[Hashable], own: Prefix | None) -> None:
        """Remember a chain's sampled blocks as used; each belongs to the shortest prefix with it."""
        owners, mask, end = self._owners, self._mask, len(chain)
        while own is not None:
            first = 0 if own.parent is None else own.parent.num_blocks
            for name in chain[first:end]:
                if not hash(name) & mask:
                    owners[name] = own
                    owners.move_to_end(name)
            own, end = own.parent, first
        while len(owners) > MAX_SAMPLED:
            owners.popitem(last=False)

    def _forget(self, prefix: Prefix) -> None:
        del self._known[prefix]
        self._learner.forgotten(prefix.entry)
