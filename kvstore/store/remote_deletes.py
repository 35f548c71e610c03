"""Deletions that are repeated until the remote tier has confirmed them. Control plane, one thread."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.blocks.ids import BlockId
from kvstore.remote.tier import DeleteDone, RemoteTier

MOST_DELETES = 1 << 20


class RemoteDeletes:
    """Blocks that are to be deleted from the remote tier."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._waiting: dict[BlockId, None] = {}  # not handed over yet, or to be tried again
        self._running: set[BlockId] = set()

    def add(self, block_ids: Iterable[BlockId]) -> None:
        self._waiting |= dict.fromkeys(block_ids)
        while len(self._waiting) > MOST_DELETES:  # they expire all the same
            del self._waiting[next(iter(self._waiting))]

    def pump(self) -> None:
        """Hand over deletions, if the tier takes them now."""
        if self._waiting and self._tier.delete(tuple(self._waiting)):
            self._running |= self._waiting.keys()
            self._waiting.clear()

    def done(self, done: DeleteDone) -> None:
        self._running.difference_update(done.block_ids)
        if done.error is not None:
            self.add(done.block_ids)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._waiting or block_id in self._running

    def has_some(self, block_ids: set[BlockId]) -> bool:
        """Whether some of these are not deleted yet."""
        return not (self._waiting.keys().isdisjoint(block_ids) and self._running.isdisjoint(block_ids))

    def in_flight(self) -> set[BlockId]:
        """Those that run, and those that could be handed over."""
        return self._running if self._tier.is_refusing else self._running | self._waiting.keys()
