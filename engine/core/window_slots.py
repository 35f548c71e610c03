"""Slots for the KV of layers with a window, each of one block: an HBM block has one only where that KV is needed.

A running request holds those of the blocks that it can still see. Once it is past a block, its slot stays with it until
another block needs one: a request can begin where all blocks that it sees still have theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class WindowSlots:
    """Slots 1 .. num_slots, each of one HBM block or blank; held as often as requests see it. Slot 0 is never written:
    layers read it, masked, where a block has none.

    of: the slot of each HBM block, or 0. window_blocks: the blocks before a border that a token behind it sees.
    """

    def __init__(self, num_slots: int, num_blocks: int, window_blocks: int) -> None:
        self.num_slots, self.window_blocks = num_slots, window_blocks
        self.of = np.zeros(num_blocks, dtype=np.int32)
        self.reset()
        self._stale.clear()

    def reset(self) -> None:
        """Forget everything: after an error, or once the pool's blocks are forgotten."""
        self.of[:] = 0
        self._block_of = [-1] * (self.num_slots + 1)
        self._ref_counts = [0] * (self.num_slots + 1)
        self._blank = list(range(self.num_slots, 0, -1))
        self._stale = set(self._blank)  # not overwritten since a block had them
        # Of blocks that no running request sees, in the order in which they are given to others: first those in the
        # middle of a chain, then those before a checkpoint.
        self._middle, self._checkpoints = OrderedDict[int, None](), OrderedDict[int, None]()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._blank) + len(self._middle) + len(self._checkpoints)

    def stats(self) -> dict[str, int]:
        """Gauges."""
        return {"window_slots": self.num_slots, "free_window_slots": self.num_free}

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have a slot that nobody holds."""
        return sum(bool(slot) and not self._ref_counts[slot] for slot in self._of(blocks))

    def first_held(self, num_tokens: int, block_size: int) -> int:
        """The first block whose slot a request holds that has computed so many tokens. It may end one block before, as
        what ends an answer may be found some tokens late.
        """
        return max(0, num_tokens // block_size - 1 - self.window_blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold the slots of these blocks, as far as they have any. They keep them until these are released."""
        for slot in self._of(blocks):
            if slot and not self._ref_counts[slot]:
                self._middle.pop(slot, None)
                self._checkpoints.pop(slot, None)
            self._ref_counts[slot] += slot > 0

    def release(self, blocks: Sequence[int], is_checkpoint: bool) -> None:
        """The other way round. is_checkpoint: a later request is likely to begin behind the last of these blocks."""
        for slot in filter(None, self._of(blocks)):
            assert self._ref_counts[slot] > 0, f"window slot {slot} was released once too often"
            self._ref_counts[slot] -= 1
            if not self._ref_counts[slot]:
                (self._checkpoints if is_checkpoint else self._middle)[slot] = None

    def give(self, blocks: Sequence[int]) -> None:
        """Give each of these blocks, which have none, a slot and hold it. Needs len(blocks) <= num_free."""
        for block in blocks:
            slot = self._blank.pop() if self._blank else self._take_slot()
            self._stale.discard(slot)
            self.of[block], self._block_of[slot], self._ref_counts[slot] = slot, block, 1

    def _take_slot(self) -> int:
        slot, _ = (self._middle or self._checkpoints).popitem(last=False)
        self.of[self._block_of[slot]] = 0
        return slot

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks, whose slots nobody holds, have lost their content."""
        for slot in filter(None, self._of(blocks)):
            assert not self._ref_counts[slot], f"window slot {slot} is dropped while somebody holds it"
            self._middle.pop(slot, None)
            self._checkpoints.pop(slot, None)
            self.of[self._block_of[slot]], self._block_of[slot] = 0, -1
            self._blank.append(slot)
            self._stale.add(slot)

    def move(self, source: int, destination: int) -> None:
        """Give the slot of a block, which nobody holds, to another one with the same content, which has none."""
        slot = int(self.of[source])
        self.of[source], self.of[destination], self._block_of[slot] = 0, slot, destination

    def take_stale(self) -> list[int]:
        """The blank slots that some block had since the last call."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def _of(self, blocks: Iterable[int]) -> list[int]:
        return self.of[list(blocks)].tolist()

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that a slot has one block or is blank, and that it is held by those whose blocks these are."""
        counts = [0] * (self.num_slots + 1)
        for slot in (slot for blocks in held for slot in self._of(blocks)):
            counts[slot] += slot > 0
        assert counts == self._ref_counts, "window slots are held by others than those that see them"
        given = {int(slot): block for block, slot in enumerate(self.of) if slot}
        for slot in range(1, self.num_slots + 1):
            assert given.get(slot, -1) == self._block_of[slot], f"window slot {slot} is not where its block says"
        unheld = [slot for slot in given if not counts[slot]]
        assert sorted([*self._middle, *self._checkpoints]) == sorted(unheld), "lost window slots"
        assert len(given) == np.count_nonzero(self.of), "two blocks have one window slot"
        assert sorted([*self._blank, *given]) == list(range(1, self.num_slots + 1)), "lost window slots"
