"""Which tiers hold which blocks, and what others were told of that (`kvstore.remote.kv_events`).

The tiers report here, which costs a dictionary's update. Another thread takes the changes and tells others. What came
and went in between is never told, so what waits is bounded by what the tiers hold, and nothing has to be dropped.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord


class Place:
    """Tiers, as bits of a set of them: plain numbers, since those of `enum` take ten times as long."""

    HBM = 1
    CPU = 2
    DISK = 4


NOWHERE = 0


class HeldBlock:
    """tokens: little-endian u32 (see `kvstore.blocks.ids.token_bytes`). places: where it is; told: where others were
    told that it is.
    """

    __slots__ = ("parent_id", "places", "tenant", "tokens", "told")

    def __init__(self, parent_id: BlockId, tokens: bytes, tenant: str) -> None:
        self.parent_id, self.tokens, self.tenant = parent_id, tokens, tenant
        self.places = self.told = NOWHERE


class Change(NamedTuple):
    """What others are to be told of a block. parent_id: None of the first one of a chain."""

    block_id: BlockId
    parent_id: BlockId | None
    block: HeldBlock
    added: int
    removed: int


class Holdings:
    """Any thread may use it. root_of: the lineage root of a tenant's chains without a salt. Others are told only of
    what hangs below such a root: so not of salted chains, other models, or splices, whose parent is no block. on_disk:
    what is there when the store is opened, in any order; of a parent others are told before its children.
    """

    def __init__(self, root_of: Callable[[str], BlockId], on_disk: Iterable[BlockRecord] = ()) -> None:
        self._root_of = root_of
        self._roots: dict[str, BlockId] = {}
        self._lock = threading.Lock()
        self._blocks: dict[BlockId, HeldBlock] = {}
        self._changed = OrderedDict[BlockId, None]()  # in the order of the changes
        self._unplaced: dict[BlockId, set[BlockId]] = {}  # by a parent that others were not told of
        for record in on_disk:
            self.stored_record(Place.DISK, record)
        self._changed = OrderedDict.fromkeys(block_id for block_id, _ in self.from_roots())

    # -- the tiers' side ---------------------------------------------------------------------------------------------
    def stored(self, place: int, block_id: BlockId, parent_id: BlockId, tokens: bytes, tenant: str) -> None:
        with self._lock:
            block = self._blocks.get(block_id)
            if block is None:
                block = self._blocks[block_id] = HeldBlock(parent_id, tokens, tenant)
            if not block.places & place:
                block.places |= place
                self._changed[block_id] = None

    def stored_record(self, place: int, record: BlockRecord) -> None:
        """Nobody is told of states, which have no tokens."""
        if not record.is_state:
            self.stored(place, record.block_id, record.parent_id, record.tokens, record.tenant)

    def gone(self, place: int, block_id: BlockId) -> None:
        """A block is gone from this place. Ignores unknown ones."""
        with self._lock:
            self._remove(place, block_id)

    def emptied(self, place: int) -> None:
        """A place is empty now."""
        with self._lock:
            for block_id in [block_id for block_id, block in self._blocks.items() if block.places & place]:
                self._remove(place, block_id)

    def _remove(self, place: int, block_id: BlockId) -> None:
        block = self._blocks.get(block_id)
        if block is None or not block.places & place:
            return
        block.places &= ~place
        if block.places or block.told:
            self._changed[block_id] = None
        else:
            del self._blocks[block_id]
            self._changed.pop(block_id, None)
            unplaced = self._unplaced.get(block.parent_id, set())
            unplaced.discard(block_id)
            if not unplaced:
                self._unplaced.pop(block.parent_id, None)

    # -- the side of who tells others --------------------------------------------------------------------------------
    def take_changes(self, most: int) -> list[Change]:
        """The first changes that others were not told of. From now on they count as told."""
        found: list[Change] = []
        with self._lock:
            while self._changed and len(found) < most:
                block_id, _ = self._changed.popitem(last=False)
                block = self._blocks.get(block_id)
                if block is None:
                    continue
                if not (block.told or self._can_be_told(block)):
                    self._unplaced.setdefault(block.parent_id, set()).add(block_id)
                    continue
                self._changed |= dict.fromkeys(self._unplaced.pop(block_id, ()))
                added, removed = block.places & ~block.told, block.told & ~block.places
                found.append(Change(block_id, self._parent(block), block, added, removed))
                block.told = block.places
                if not block.places:
                    del self._blocks[block_id]
        return found

    def _can_be_told(self, block: HeldBlock) -> bool:
        """Whether others can place it, by what they were told."""
        parent = self._blocks.get(block.parent_id)
        return self._parent(block) is None if parent is None else parent.told != NOWHERE

    def _parent(self, block: HeldBlock) -> BlockId | None:
        if (root := self._roots.get(block.tenant)) is None:
            root = self._roots[block.tenant] = self._root_of(block.tenant)
        return None if block.parent_id == root else block.parent_id

    def all_told(self) -> Iterator[Change]:
        """All that others can place, parents first, as if nobody had been told anything. For the thread that takes
        changes.
        """
        told: set[BlockId | None] = {None}
        for block_id, block in self.from_roots():
            if block.told and (parent_id := self._parent(block)) in told:
                told.add(block_id)
                yield Change(block_id, parent_id, block, block.told, NOWHERE)

    def from_roots(self) -> list[tuple[BlockId, HeldBlock]]:
        """All of these, each after its parent if that is held."""
        with self._lock:
            blocks = dict(self._blocks)
        done: set[BlockId] = set()
        found: list[tuple[BlockId, HeldBlock]] = []
        for first in blocks:
            path, block_id = [], first
            while block_id not in done and (block := blocks.get(block_id)) is not None:
                done.add(block_id)
                path.append((block_id, block))
                block_id = block.parent_id
            found += reversed(path)
        return found

    @property
    def num_waiting(self) -> int:
        """The number of blocks with a change that nobody was told of."""
        return len(self._changed)

    def __len__(self) -> int:
        return len(self._blocks)
