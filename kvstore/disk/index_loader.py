"""Builds the disk's index from a scan, in its own thread: there may be millions of blocks.

Does not see what is written meanwhile; the taker of the index adds that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvstore.blocks.ends import Order
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.tier import DiskTier
from kvstore.policy.conversation import Conversation


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """found: a conversation for each leaf, with that leaf. is_whole False: only of the blocks that could be read."""

    index: DiskIndex
    found: list[tuple[Hashable, Conversation]]
    is_whole: bool


class IndexLoader:
    """Starts loading at once."""

    def __init__(self, disk: DiskTier, order: Order, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._order = order
        self._clock = clock
        self._loaded: deque[LoadedIndex] = deque()
        threading.Thread(target=self._load, name="kvstore-index", daemon=True).start()

    def take_loaded(self) -> LoadedIndex | None:
        """The loaded index; returned once."""
        return self._loaded.popleft() if self._loaded else None

    def _load(self) -> None:
        batches: list[list[IndexEntry]] = []
        try:
            batches.extend(self._disk.scan())
            index, is_whole = DiskIndex.build(batches, self._clock, self._order), True
            found = index.name_conversations()  # last, since the order is the same for whatever index there is
            self._order.first()  # sorts them here, not where somebody waits
        except Exception:  # the border of a thread: what was not found is computed and written again
            index, is_whole, found = self._partial_index(batches), False, []
        self._loaded.append(LoadedIndex(index, found, is_whole))

    def _partial_index(self, batches: list[list[IndexEntry]]) -> DiskIndex:
        try:
            return DiskIndex.build(batches, self._clock, self._order)
        except Exception:  # what was read is what cannot be used
            return DiskIndex(self._clock, self._order)
