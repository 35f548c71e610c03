"""What is on disk, as the control plane knows it, also before the index of the disk is loaded.

Control plane, one thread; the index is built in another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.index_loader import IndexLoader
from kvstore.disk.tier import DiskTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats

ADOPTED_AT_ONCE = 2000  # conversations that are found at a start
MAX_EARLY_TOUCHES = 1 << 12  # chains remembered until the index is loaded


class DiskContents:
    """Until the index is loaded LMDB itself is asked, and what happens is noted, to be repeated on the index."""

    def __init__(self, disk: DiskTier, steering: Steering, stats: StoreStats, clock: Callable[[], float]) -> None:
        self._disk, self._steering, self._stats, self._clock = disk, steering, stats, clock
        self.index: DiskIndex | None = None
        self.removing: dict[BlockId, int] = {}  # what is being deleted, and the bytes that will be free
        # The last that happened to each block: written, or None: deleted.
        self._journal: dict[BlockId, tuple[IndexEntry, Conversation | None] | None] = {}
        self._early_touches = deque[tuple[tuple[BlockId, ...], float, Conversation | None]](maxlen=MAX_EARLY_TOUCHES)
        self._to_adopt: list[tuple[Hashable, Conversation]] = []
        self._loader = IndexLoader(disk, steering.order("disk"), clock)

    def poll(self) -> bool:
        """Whether the index has just come."""
        loaded, has_come = self._loader.take(), False
        if loaded is not None:
            self._stats.housekeeping_errors += not loaded.is_whole
            if has_come := self.index is None:
                self._to_adopt, self.index = loaded.found, loaded.index
                self._repeat(loaded.index)
            else:  # of a file that was put aside meanwhile
                loaded.index.clear()
        if self._to_adopt:  # a part at a time, the last used first: there may be very many
            part, self._to_adopt = self._to_adopt[-ADOPTED_AT_ONCE:], self._to_adopt[:-ADOPTED_AT_ONCE]
            self._steering.adopt(part)
        return has_come

    def _repeat(self, index: DiskIndex) -> None:
        for block_id, change in self._journal.items():
            if change is None:
                index.remove(block_id)
            else:
                index.add(*change)
        for chain, used_s, conversation in self._early_touches:
            index.touch(chain, used_s, conversation)
        self._journal.clear()
        self._early_touches.clear()

    def begin_anew(self) -> None:
        """The file was put aside; the one in its place is empty."""
        if self.index is not None:
            self.index.clear()
        self.index = DiskIndex(self._clock, self._steering.order("disk"))
        self._journal.clear()
        self._early_touches.clear()
        self._to_adopt = []
        self.removing.clear()

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; false for one that is being deleted."""
        if block_id in self.removing or self._disk.file.broken:
            return False
        if self.index is not None:
            return block_id in self.index
        return self._disk.contains(block_id)

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all that hangs below them on disk, as far as that is known: before the index is, nothing."""
        found = dict.fromkeys(block_ids)
        if (index := self.index) is None:
            return list(found)
        for block_id, entry in [(block_id, index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(index.descendants(block_id))
        return list(found)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """These blocks, head first, are wanted by this conversation, as far as they are on disk."""
        if self.index is not None:
            self.index.claim(chain, conversation)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """The first block of a splice goes before the block in front of it."""
        if self.index is not None:
            self.index.link(block_id, parent_id)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """These blocks, head first, were of use just now. conversation: whose they are."""
        now = self._clock()
        if self.index is not None:
            self.index.touch(chain, now, conversation)
        else:
            self._early_touches.append((tuple(chain), now, conversation))

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """A block is on disk from now on."""
        entry = IndexEntry(
            record.block_id, record.parent_id, stored_bytes, record.created_s, self._clock(), record.model,
            record.tenant,
        )  # fmt: skip
        if self.index is None:
            self._journal.pop(entry.block_id, None)  # the order is that of the last changes
            self._journal[entry.block_id] = (entry, conversation)
        else:
            self.index.add(entry, conversation)

    def remove(self, block_id: BlockId) -> int | None:
        """A block is to go; returns the bytes that it takes, None when it is not known to be there."""
        if self.index is None:
            self._journal.pop(block_id, None)
            self._journal[block_id] = None
            return None
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use that were not handed out before."""
        return {} if self.index is None else self.index.take_touched()
