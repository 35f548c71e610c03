"""What the control plane knows of the tiers below the CPU: what is on disk, what a believed tier is thought to have.

What leaves the disk is evicted, deleted or lost; what CPU and disk hold together stays closed under parents. Deletions
are repeated until a tier has confirmed them. What a believed tier has is what it has answered, and what was stored
there; only a read finds out.

Control plane, one thread.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.holdings import Holdings, Place
from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Evict, Evicted, ReadResult
from kvstore.disk.blocks_file import WATERMARK
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.disk.tier import DiskTier
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.remote.spread import Believed
from kvstore.stats import StoreStats
from kvstore.tiers.work import Asked
from kvstore.tiers.worker import TierWorker

# What blocks are lost by (see `kvstore.blocks.records.Loss`), by the read that found out; else "unreadable".
MOST_KNOWN = 1 << 18  # blocks of a believed tier
KNOWN_S = 300.0  # how long its answers are believed
LOST_BY = {ReadResult.CORRUPT: "damaged", ReadResult.MISMATCH: "damaged", ReadResult.MISSING: "damaged"}


class Deletions:
    """most: how many may wait for a server; None: all. Of what is dropped, a believed tier rids itself in time.

    sizes: of all that are not confirmed, in bytes.
    """

    def __init__(self, tier: Believed, most: int | None = None) -> None:
        self._tier, self._most = tier, most
        self.sizes: dict[BlockId, int] = {}
        # Of these: not handed over yet, or to be tried again.
        self._waiting: defaultdict[TierWorker, dict[BlockId, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        """How much will be free."""
        return sum(self.sizes.values())

    def add(self, block_id: BlockId, num_bytes: int = 0) -> None:
        self.sizes[block_id] = num_bytes
        waiting = self._waiting[self._tier.home(block_id)]
        waiting[block_id] = None
        if self._most is not None and len(waiting) > self._most:
            self.drop(next(iter(waiting)))

    def drop(self, block_id: BlockId) -> None:
        """Delete it no more: it is written again."""
        self.sizes.pop(block_id, None)
        self._waiting[self._tier.home(block_id)].pop(block_id, None)

    def pump(self) -> bool:
        """Hand over what waits, but for servers that are away. Returns whether there was anything."""
        ready = [(worker, waiting) for worker, waiting in self._waiting.items() if waiting and not worker.is_away]
        for worker, waiting in ready:
            worker.submit_deletes(tuple(waiting))
            waiting.clear()
        return bool(ready)

    def ended(self, block_ids: Iterable[BlockId], error: str | None) -> None:
        """The tier has tried these."""
        for block_id in block_ids:
            if error is None:
                self.drop(block_id)
            elif block_id in self.sizes:
                self._waiting[self._tier.home(block_id)][block_id] = None

    def has_some(self, block_ids: Iterable[BlockId]) -> bool:
        """Whether some of these are not deleted yet."""
        return not self.sizes.keys().isdisjoint(block_ids)

    def have_failed(self, block_ids: Collection[BlockId]) -> bool:
        """Whether some of these wait for another try."""
        return any(not waiting.keys().isdisjoint(block_ids) for waiting in self._waiting.values())

    def held(self) -> set[BlockId]:
        """Those that wait for a server that is away."""
        return {one for worker, waiting in self._waiting.items() if worker.is_away for one in waiting}

    def in_flight(self) -> Collection[BlockId]:
        """Those that run, and those that could be handed over."""
        held = self.held()
        return self.sizes.keys() - held if held else self.sizes.keys()

    def clear(self) -> None:
        self.sizes.clear()
        self._waiting.clear()


class DiskContents:
    """index: of all that is on disk when the store opens; its conversations are known from then on. removing: blocks
    that are being deleted. holdings: where it reports what comes and goes.
    """

    def __init__(
        self, disk: DiskTier, index: DiskIndex, removing: Deletions, steering: Steering, clock: Callable[[], float],
        holdings: Holdings | None = None,
    ) -> None:  # fmt: skip
        self._disk, self.index, self._clock, self._holdings = disk, index, clock, holdings
        self.removing = removing
        steering.adopt(index.name_conversations(steering.order("disk")))
        self.claim, self.link, self.take_touched = index.claim, index.link, index.take_touched

    def begin_anew(self) -> None:
        """Start again with an empty file, after the old one was set aside."""
        self.index.clear()
        self.removing.clear()
        if self._holdings is not None:
            self._holdings.emptied(Place.DISK)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the disk has this block; False while it is being deleted."""
        return block_id in self.index and block_id not in self.removing.sizes and not self._disk.file.broken

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These blocks and all below them on disk."""
        found = dict.fromkeys(block_ids)
        for block_id, entry in [(block_id, self.index.get(block_id)) for block_id in found]:
            if entry is None or entry.parent_id not in found:  # the others are below one of these
                found |= dict.fromkeys(self.index.links.descendants(block_id))
        return list(found)

    def touch(self, chain: Sequence[BlockId], conversation: Conversation | None = None) -> None:
        """Mark these blocks, head first, as just used. conversation: their owner."""
        self.index.touch(chain, self._clock(), conversation)

    def written(self, record: BlockRecord, stored_bytes: int, conversation: Conversation | None) -> None:
        """Add a block that was written."""
        before = self.index.get(record.parent_id)
        parent_id = record.parent_id if before is None else before.block_id  # one object for each id
        entry = IndexEntry(
            record.block_id, parent_id, stored_bytes, record.created_s, self._clock(), record.model, record.tenant
        )
        self.index.add(entry, conversation)
        if self._holdings is not None:
            self._holdings.stored_record(Place.DISK, record)

    def leaves(self, block_id: BlockId, num_bytes: int) -> None:
        """Note that a block, no longer in the index, is being deleted; this many bytes will be free."""
        self.removing.add(block_id, num_bytes)
        if self._holdings is not None:
            self._holdings.gone(Place.DISK, block_id)

    def remove(self, block_id: BlockId) -> int | None:
        """Remove a block; returns its bytes, None when it is not there."""
        entry = self.index.get(block_id)
        self.index.remove(block_id)
        return None if entry is None else entry.stored_bytes


@dataclass(eq=False)
class DiskSpace:
    _disk: DiskTier
    _cpu: CpuTier
    _contents: DiskContents
    _stats: StoreStats

    @property
    def capacity_bytes(self) -> int:
        """How large the file may become."""
        return self._disk.file.capacity_bytes

    def delete(self, block_ids: Sequence[BlockId]) -> None:
        """Delete blocks from the disk and the CPU tier. Holders of arena blocks keep them."""
        for block_id in reversed(block_ids):
            self._cpu.forget(block_id)
        self._delete(block_ids)

    def delete_written(self, block_id: BlockId) -> None:
        """Delete a block that was written although its arena block was given up. A newer copy in the CPU tier stays."""
        self._delete([block_id])

    def _delete(self, block_ids: Sequence[BlockId]) -> None:
        sizes = [self._contents.remove(block_id) for block_id in block_ids]
        self._stats.disk_removals += len(sizes) - sizes.count(None)
        self._submit([(block_id, size or 0) for block_id, size in zip(block_ids, sizes, strict=True)])

    def _submit(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """Submit deletions of these blocks, given with their sizes. They are no longer in the index."""
        for block_id, size in reversed(blocks):
            self._contents.leaves(block_id, size)
        self._contents.removing.pump()

    def with_descendants(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """These and all that builds on them, on disk or in the CPU tier, parents before children."""
        return self._cpu.with_descendants(self._contents.with_descendants(block_ids))

    def delete_tree(
        self, block_id: BlockId, gone: Sequence[BlockId] = (), result: ReadResult = ReadResult.CORRUPT
    ) -> None:
        """Delete a lost block and all that was computed after it, as nobody could use that.

        gone: what the CPU tier had below it until now. result: of the read that found out.
        """
        lost = self.with_descendants([block_id, *gone])
        self._stats.losses.note(LOST_BY.get(result, "unreadable"), "disk", *lost, why=result.value)
        self.delete(lost)

    def begin_anew(self) -> None:
        """Start again after the file was set aside. Drop the CPU tier's blocks whose parents were only on disk, as
        nobody can use them.
        """
        lost = [one for one in self._cpu.absent_parents() if one in self._contents.index]
        for block_id in self._cpu.with_descendants(lost):
            self._cpu.forget(block_id)
        self._contents.begin_anew()

    def make_room(self, incoming_bytes: int, num_queued_bytes: int) -> bool:
        """Evict, in order, until this much more may be written. Returns False if that must wait.

        num_queued_bytes: how much of it the writer already has.
        """
        excess = self._disk.file.excess_bytes(incoming_bytes) - self._contents.removing.num_bytes
        if excess <= 0:
            return True
        has_evicted = self.evict(excess)
        # Their pages become usable after the next transactions. Half of the space above the watermark bridges that.
        slack = (1 - WATERMARK) * self._disk.file.capacity_bytes / 2
        return has_evicted and (excess <= slack or not num_queued_bytes)

    def evict(self, num_bytes: int) -> bool:
        """Evict at least this much, in order. Returns False if nothing can be evicted."""
        victims = self._contents.index.take_victims(num_bytes, self._cpu.is_needed)
        self._stats.disk_evictions += len(victims)
        self._stats.losses.note("evicted", "disk", *(entry.block_id for entry in victims))
        for entry in reversed(victims):
            self._cpu.forget(entry.block_id)
        self._submit([(entry.block_id, entry.stored_bytes) for entry in victims])
        return bool(victims)

    def select(self, what: Evict) -> tuple[list[BlockId], Evicted]:
        """Matching blocks on disk, tails first, and their size. Blocks in use stay, unless they are named."""
        index = self._contents.index
        named = what.everything or what.block_ids is not None
        chosen = index.select(what) if named else index.select(what, self._cpu.is_needed)
        entries = [index.get(block_id) for block_id in chosen]
        return chosen, Evicted(len(chosen), sum(entry.stored_bytes for entry in entries if entry is not None))


class BelievedContents:
    """name: the tier's."""

    def __init__(self, tier: Believed, clock: Callable[[], float]) -> None:
        self.name, self._tier, self._clock = tier.name, tier, clock
        self._known: OrderedDict[BlockId, float] = OrderedDict()  # when each was last heard of

    def __len__(self) -> int:
        return len(self._known)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is worth reading from there."""
        heard_s = self._known.get(block_id)
        return heard_s is not None and self._clock() - heard_s < KNOWN_S and not self.is_away(block_id)

    def is_away(self, block_id: BlockId) -> bool:
        """Whether the server that has the block, if any has, does not answer."""
        return self._tier.home(block_id).is_away

    def has_had(self, block_id: BlockId) -> bool:
        """Whether the block was there when it was last heard of, however long ago."""
        return block_id in self._known

    def answered(self, asked: Asked) -> None:
        for block_id, is_there in zip(asked.chain.ids, asked.there or (), strict=False):
            if is_there:
                self.learn(block_id)
            else:
                self._known.pop(block_id, None)

    def learn(self, block_id: BlockId) -> None:
        """Note that a block is there."""
        self._known[block_id] = self._clock()
        self._known.move_to_end(block_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def lose(self, block_ids: Iterable[BlockId]) -> None:
        """Note that these are not there, or are about to be deleted."""
        for block_id in block_ids:
            self._known.pop(block_id, None)
