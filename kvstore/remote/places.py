"""In which object of a shared store a block was seen, and where in it. From any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.blocks.ids import BlockId

MOST_PLACES = 1 << 18


class GroupPlace(NamedTuple):
    """group: name of the object; number: of the block in it."""

    group: str
    number: int


class Places:
    """Of the blocks that were seen last. What is not known here is asked for again with its chain."""

    def __init__(self, most: int = MOST_PLACES) -> None:
        self._most, self._lock = most, threading.Lock()
        self._places: OrderedDict[BlockId, GroupPlace] = OrderedDict()

    def learn(self, places: Iterable[tuple[BlockId, GroupPlace]]) -> None:
        with self._lock:
            for block_id, place in places:
                self._places[block_id] = place
                self._places.move_to_end(block_id)
            while len(self._places) > self._most:
                self._places.popitem(last=False)

    def of(self, block_ids: Sequence[BlockId]) -> list[GroupPlace | None]:
        with self._lock:
            return [self._places.get(one) for one in block_ids]

    def lose(self, block_ids: Iterable[BlockId]) -> None:
        with self._lock:
            for one in block_ids:
                self._places.pop(one, None)
