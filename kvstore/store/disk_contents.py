"""What the control plane knows to be on disk, even before the disk's index is loaded.

Control plane, one thread. Another thread builds the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.index_loader import IndexLoader
from kvstore.disk.tier import DiskTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats

ADOPTED_AT_ONCE = 2000  # of the conversations found at a start
MAX_EARLY_TOUCHES = 1 << 12  # touched chains that are remembered until the index is loaded


class DiskContents:
    """Until the index is loaded, it asks LMDB itself, and notes changes so that they can be repeated on the index.

    holdings: where it reports what is on disk.
    """

    def __init__(
        self, disk: DiskTier, steering: Steering, stats: StoreStats, clock: Callable[[], float],
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk, self._steering, self._stats, self._clock = disk, steering, stats, clock
        self._holdings = holdings
        self.index: DiskIndex | None = None
        self.removing: dict[BlockId, int] = {}  # blocks being deleted, with the bytes that will be free
        # Each block's last change: its entry if written, None if deleted.
        self._journal: dict[BlockId, tuple[IndexEntry, Conversation | None] | None] = {}
        self._early_touches = deque[tuple[tuple[BlockId, ...], float, Conversation | None]](maxlen=MAX_EARLY_TOUCHES)
        self._to_adopt: list[tuple[Hashable, Conversation]] = []
        self._loader = IndexLoader(disk, steering.order("disk"), clock)

    def poll(self) -> bool:
        """Poll the loader. Returns whether the index has just been loaded."""
        loaded, has_come = self._loader.take_loaded(), False
        if loaded is not None:
            self._stats.housekeeping_errors += not loaded.is_whole
            if has_come := self.index is None:
                self._to_adopt, self.index = loaded.found, loaded.index
                self._repeat(loaded.index)
            else:  # it is of a file that was set aside meanwhile
                loaded.index.clear()
        if self._to_adopt:  # in parts, most recently used first, as there may be very many
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
        """Start again with an empty file, after the old one was set aside."""
        if self.index is not None:
            self.index.clear()
        self.index = DiskIndex(self._clock, self._steering.order("disk"))
        self._journal.clear()
        self._early_touches.clear()
        self._to_adopt = []
        self.removing.clear()
        if self._holdings is not None:
            self._holdings.emptied(Place.DISK)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; False while it is being deleted."""
        if block_id in self.removing or self._disk.file.broken:
            return False
        if self.index is not None:
            return block_id in self.index
        return self._disk.contains(block_id)

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all below them on disk. Without the index, nothing is known below them."""
        found = dict.fromkeys(block_ids)
        if (index := self.index) is None:
            return list(found)
        for block_id, entry in [(block_id, index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(index.links.descendants(block_id))
        return list(found)

    def claim(self, chain: Sequence[BlockId], conversation: Conversation) -> None:
        """Give these blocks, head first, to this conversation, as far as they are on disk."""
        if self.index is not None:
            self.index.claim(chain, conversation)

    def link(self, block_id: BlockId, parent_id: BlockId) -> None:
        """Link a splice's first block to the block before it."""
        if self.index is not None:
            self.index.link(block_id, parent_id)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """Mark these blocks, head first, as just used. conversation: their owner."""
        now = self._clock()
        if self.index is not None:
            self.index.touch(chain, now, conversation)
        else:
            self._early_touches.append((tuple(chain), now, conversation))

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """Add a block that was written."""
        entry = IndexEntry(
            record.block_id, record.parent_id, stored_bytes, record.created_s, self._clock(), record.model,
            record.tenant,
        )  # fmt: skip
        if self.index is None:
            self._journal.pop(entry.block_id, None)  # entries are in the order of their last changes
            self._journal[entry.block_id] = (entry, conversation)
        else:
            self.index.add(entry, conversation)
        if self._holdings is not None:
            self._holdings.stored_record(Place.DISK, record)

    def leaves(self, block_id: BlockId, num_bytes: int) -> None:
        """Note that a block, no longer in the index, is being deleted; this many bytes will be free."""
        self.removing[block_id] = num_bytes
        if self._holdings is not None:
            self._holdings.gone(Place.DISK, block_id)

    def remove(self, block_id: BlockId) -> int | None:
        """Remove a block; returns its bytes, None when it is not known to be there."""
        if self.index is None:
            self._journal.pop(block_id, None)
            self._journal[block_id] = None
            return None
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes

    def take_touched(self) -> dict[BlockId, float]:
        """Times of last use since the last call."""
        return {} if self.index is None else self.index.take_touched()
