"""What is given up in HBM by its name, and overwritten: at once, or as soon as no request holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Evict


class Erasure:
    """Of one pool. overwrite: clears these HBM blocks. To be called between two steps."""

    def __init__(self, pool: BlockPool, overwrite: Callable[[Sequence[int]], None]) -> None:
        self._pool = pool
        self._overwrite = overwrite
        self.pending: set[int] = set()  # blocks with something deleted in them that were held at that time

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Forget these blocks and overwrite them, those that a request still holds once it has released them."""
        self._forget(self._known(block_ids))

    def evict(self, what: Evict, block_ids: frozenset[BlockId]) -> int:
        """What matches, and these blocks, unless they are in use. Returns how many."""
        conditions = (what.unused_for_s, what.model, what.block_ids, what.to_bytes)
        if what.everything and all(condition is None for condition in conditions):
            blocks = list(self._pool.cached_blocks())
        else:
            blocks = self._known(block_ids if what.block_ids is None else block_ids | what.block_ids)
        free = [block for block in blocks if self._pool.is_free(block)]
        if not what.dry_run:
            self._forget(free)
        return len(free)

    def _known(self, block_ids: Iterable[BlockId]) -> list[int]:
        return [block for block in map(self._pool.lookup, block_ids) if block is not None]

    def _forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._pool.forget(block)
            self.pending.add(block)
        self.go_on(always=True)

    def go_on(self, always: bool = False) -> None:
        """Overwrite what has become free. always: blocks without an id too, they may be of a deleted session."""
        free = {block for block in self.pending if self._pool.is_free(block)}
        if not free and not always:
            return
        self.pending -= free
        if stale := self._pool.take_stale():
            self._overwrite(stale)
