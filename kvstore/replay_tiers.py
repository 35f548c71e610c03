"""CPU and disk of a replay: saves, writes, reads and evictions of blocks that have no bytes.

The store's own classes, with rates in place of threads. Knows the requests' chains; no queue, no batch, no HBM.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.block import BlockId
from kvstore.conversation import Conversation
from kvstore.cpu_tier import CpuTier, SlotState
from kvstore.disk_index import DiskIndex, IndexEntry
from kvstore.replay_config import ReplayConfig
from kvstore.replay_guide import Guide, VirtualClock
from kvstore.tier import BlockRecord, Evict

ROOT: BlockId = b""  # what first blocks are built on; a trace's names are numbers
STAGING_BYTES = 64 << 20  # as in the engine, which has a CPU arena of this size where the tier is switched off
GIVE_UP_S, RETRY_S = 1.0, 0.25  # as `WriteBack`: a block for which the disk has no room


@dataclass(slots=True, eq=False)
class Held:
    """A request as the tiers see it.

    chain: names of its full blocks, those of the prompt first. slots: held for it, of the blocks from `first_block` on.
    num_reading: how many of those are on their way from disk. is_saving: until a block of it could not be saved.
    """

    sequence: int
    chain: list[BlockId]
    conversation: Conversation
    begun: bool = False
    first_block: int = 0
    slots: list[int] = field(default_factory=list)
    num_reading: int = 0
    is_saving: bool = True


class LowerTiers:
    """What lies below HBM.

    longest: blocks of the longest request. on_ready: called with requests when the last of their reads has ended;
    on_room: called when a slot was given back by a write.
    """

    def __init__(
        self,
        config: ReplayConfig,
        clock: VirtualClock,
        guide: Guide,
        longest: int,
        on_ready: Callable[[Sequence[Held]], None],
        on_room: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._block_bytes = config.block_bytes
        self._read_s = config.block_bytes / config.service.read_bytes_per_s
        self._write_s = config.block_bytes / config.service.write_bytes_per_s
        self._num_disk_blocks = config.disk_blocks
        self._on_ready, self._on_room = on_ready, on_room
        num_slots = config.cpu_blocks
        if config.disk_blocks and not num_slots:
            most = min(STAGING_BYTES // config.block_bytes, config.disk_blocks)
            num_slots = max(2 * config.service.max_batch + longest, most)
        order = guide.order("cpu") if config.cpu_blocks else None
        self.cpu = CpuTier(num_slots, keep=bool(config.cpu_blocks), order=order)
        self.index = DiskIndex(clock, guide.order("disk")) if config.disk_blocks else None
        self.num_holders = 0  # requests that hold slots
        self.num_saved = self.num_written = self.num_read = 0
        self.num_dropped_saves = self.num_dropped_writes = self.num_evicted = 0
        self._unsaved: dict[BlockId, BlockId] = {}  # blocks that are holes, and their parents
        self._dirty: deque[int] = deque()
        self._num_dirty_below: Counter[BlockId] = Counter()
        self._is_writing = False
        self._stuck_since_s: float | None = None
        self._to_read: deque[int] = deque()
        self._readers: dict[int, list[Held]] = {}  # slots on their way from disk, and who waits for them

    @property
    def is_off(self) -> bool:
        return not self.cpu.pool.num_blocks

    # -- looking -----------------------------------------------------------------------------------------------------
    def holds(self, name: BlockId) -> bool:
        return self.cpu.find(name) is not None or (self.index is not None and name in self.index)

    def tiers(self, chain: Sequence[BlockId], first: int, end: int) -> list[str]:
        """Which tier has each block from `first` on, as far as they are stored; what is still being read is on disk."""
        found: list[str] = []
        for name in chain[first:end]:
            slot = self.cpu.find(name)
            if slot is not None:
                below = slot in self._readers or not self.cpu.keep
                found.append("disk" if below else "cpu")
            elif self.index is not None and name in self.index:
                found.append("disk")
            else:
                break
        return found

    def num_usable(self, chain: Sequence[BlockId], num_hit: int) -> int:
        """Of `num_hit` blocks in HBM, those before a hole that can be closed now by computing from there."""
        if not self._unsaved:
            return num_hit
        for index in range(num_hit):
            parent = self._unsaved.get(chain[index])
            if parent is None:
                continue
            if not self.holds(chain[index]):
                has_parent = not index or self.holds(parent)
                return index if has_parent and self.cpu.pool.num_free >= num_hit - index else num_hit
            del self._unsaved[chain[index]]
        return num_hit

    # -- what a request will load ------------------------------------------------------------------------------------
    def begin(self, held: Held, first: int, end: int, take_less: bool = False) -> int:
        """Hold its blocks from `first` on as far as they are stored, and read what is on disk only.

        Returns how many slots must be given back before that is possible; then it holds nothing. take_less: it takes
        what there are slots for.
        """
        self.let_go(held)
        names = held.chain[first : first + len(self.tiers(held.chain, first, end))]
        slots = [self.cpu.find(name) for name in names]
        self.cpu.pool.acquire([slot for slot in slots if slot is not None])  # before a read may take one of them
        missing = [i for i, slot in enumerate(slots) if slot is None]
        reserved: list[int] = []
        while len(reserved) < len(missing) and (slot := self.cpu.reserve()) is not None:
            reserved.append(slot)
        num_short = len(missing) - len(reserved)
        if num_short and not take_less:
            self.cpu.pool.release(reserved)
            self.cpu.pool.release([slot for slot in slots if slot is not None])
            return num_short
        end = missing[len(reserved)] if num_short else len(slots)
        self.cpu.pool.release([slot for slot in slots[end:] if slot is not None])
        for i, slot in zip(missing, reserved, strict=False):
            slots[i] = slot
            self._read(slot, held.chain, first + i, held.conversation)
        held.begun, held.first_block, held.slots = True, first, [slot for slot in slots[:end] if slot is not None]
        self._hold(held)
        return 0

    def _hold(self, held: Held) -> None:
        self.num_holders += bool(held.slots)
        for slot in held.slots:
            if slot in self._readers:
                self._readers[slot].append(held)
                held.num_reading += 1

    def _read(self, slot: int, chain: Sequence[BlockId], index: int, conversation: Conversation) -> None:
        """The reserved slot is held for the request, and from now on for the read too."""
        is_new = self.cpu.announce(slot, _record(chain, index), self._clock.now_s, conversation)
        assert is_new, "a block was to be read that a slot has"
        self.cpu.acquire(slot)
        self._readers[slot] = []
        self._to_read.append(slot)
        if len(self._to_read) == 1:
            self._clock.at(self._clock.now_s + self._read_s, self._read_done, slot)

    def _read_done(self, slot: int) -> None:
        self._to_read.popleft()
        if self._to_read:
            self._clock.at(self._clock.now_s + self._read_s, self._read_done, self._to_read[0])
        self.num_read += 1
        if self.cpu.state(slot) is SlotState.PENDING:  # else it has expired, after whoever wanted it found it in HBM
            self.cpu.publish(slot)
        self.cpu.release(slot)
        readers = self._readers.pop(slot)
        for held in readers:
            held.num_reading -= 1
        self._on_ready([held for held in readers if not held.num_reading])

    def let_go(self, held: Held) -> None:
        """Give back what is held for it."""
        if held.num_reading:
            for slot in held.slots:
                if slot in self._readers:
                    self._readers[slot].remove(held)
        self.num_holders -= bool(held.slots)
        self.release(held.slots)
        held.slots, held.num_reading, held.begun = [], 0, False

    def release(self, slots: Sequence[int]) -> None:
        """Slots of a chain, head first."""
        for slot in reversed(slots):
            self.cpu.release(slot)

    def leave(self, held: Held) -> None:
        """The request has ended."""
        self.cpu.touch(held.chain, self._clock.now_s, held.conversation)
        if self.index is not None:
            self.index.touch(held.chain, self._clock.now_s, held.conversation)

    # -- saves and writes --------------------------------------------------------------------------------------------
    def save(self, held: Held, first: int, end: int) -> None:
        """Blocks of its chain that were computed: those that nobody has saved get a slot, until one cannot."""
        saved: list[int] = []
        for index in range(first, end):
            if not held.is_saving:
                break
            if self.holds(held.chain[index]):
                self._unsaved.pop(held.chain[index], None)
            elif (slot := self._slot_for(held, index, end)) is not None:
                saved.append(slot)
        self.num_saved += len(saved)
        if self.index is None:
            self.release(saved)
        else:
            self._dirty.extend(saved)
            self._write_next()

    def _slot_for(self, held: Held, index: int, end: int) -> int | None:
        """A READY slot of this block with one reference."""
        slot = self.cpu.reserve() if self._has_parent(held, index) else None
        if slot is not None and not self._has_parent(held, index):  # it had to go for this one
            self.cpu.release(slot)
            slot = None
        if slot is None:
            held.is_saving = False
            self.num_dropped_saves += end - index
            self._mark_hole(held, index)
            return None
        record = _record(held.chain, index)
        self.cpu.announce(slot, record, self._clock.now_s, held.conversation)
        self.cpu.publish(slot)
        self._unsaved.pop(record.block_id, None)
        if self.index is not None:
            self._num_dirty_below[record.parent_id] += 1
        return slot

    def _has_parent(self, held: Held, index: int) -> bool:
        return not index or self.holds(held.chain[index - 1])

    def _mark_hole(self, held: Held, index: int) -> None:
        """The first block of the chain that is not stored: a later turn computes from there, where that can help."""
        if not self._has_parent(held, index):
            if self.index is None:
                return  # the CPU tier is too small for what HBM holds; to compute again would only evict others
            while index and not self.holds(held.chain[index - 1]):
                index -= 1
        self._unsaved[held.chain[index]] = held.chain[index - 1] if index else ROOT

    def _write_next(self, _: object = None) -> None:
        """Begin to write the next dirty block, if the disk has nothing to do and room for it."""
        while self._dirty and not self._is_writing and self.index is not None:
            slot = self._dirty[0]
            record = self.cpu.record(slot)
            assert record is not None
            if self.cpu.find(record.block_id) != slot:  # it has expired, or what it is built on was given up
                self._dirty.popleft()
                self._clean(slot, record)
            elif record.parent_id != ROOT and record.parent_id not in self.index:
                self._drop_write(slot, record)  # staging has no links: what it is built on was given up
            elif self._make_room(self.index):
                self._stuck_since_s = None
                self._is_writing = True
                self._clock.at(self._clock.now_s + self._write_s, self._written, None)
            elif not self._give_up(slot, record):
                self._clock.at(self._clock.now_s + RETRY_S, self._retry, None)
                self._is_writing = True

    def _retry(self, _: object) -> None:
        self._is_writing = False
        self._write_next()

    def _give_up(self, slot: int, record: BlockRecord) -> bool:
        """All that is stored is in use, or what this block is built on. False: wait, somebody may let go."""
        now_s = self._clock.now_s
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < GIVE_UP_S:
            return False
        self._drop_write(slot, record)
        return True

    def _drop_write(self, slot: int, record: BlockRecord) -> None:
        self._dirty.popleft()
        self.num_dropped_writes += 1
        self.cpu.forget(record.block_id)
        self._clean(slot, record)

    def _written(self, _: object) -> None:
        self._is_writing = False
        slot = self._dirty.popleft()
        record = self.cpu.record(slot)
        assert record is not None and self.index is not None
        self.num_written += 1
        if self.cpu.find(record.block_id) == slot:  # else it has expired
            now_s = self._clock.now_s
            entry = IndexEntry(record.block_id, record.parent_id, self._block_bytes, now_s, now_s)
            self.index.add(entry, self.cpu.conversation(slot))
        self._clean(slot, record)
        self._write_next()
        self._on_room()

    def _clean(self, slot: int, record: BlockRecord) -> None:
        self._num_dirty_below[record.parent_id] -= 1
        if not self._num_dirty_below[record.parent_id]:
            del self._num_dirty_below[record.parent_id]
        self.cpu.release(slot)

    def _make_room(self, index: DiskIndex) -> bool:
        if index.num_blocks < self._num_disk_blocks:
            return True
        victims = index.take_victims(self._block_bytes, self._is_pinned)
        self.num_evicted += len(victims)
        for entry in victims:
            self.cpu.forget(entry.block_id)
        return bool(victims)

    def _is_pinned(self, name: BlockId) -> bool:
        """Whether something above the disk builds on this block, or uses it."""
        if name in self._num_dirty_below or self.cpu.is_awaited(name):
            return True
        slot = self.cpu.find(name)
        return slot is not None and (not self.cpu.pool.is_free(slot) or self.cpu.pool.has_children(slot))

    # -- giving up ---------------------------------------------------------------------------------------------------
    def drop(self, names: Sequence[BlockId]) -> int:
        """These are not wanted by anybody any more, each before what it builds on. Returns how many were stored."""
        num_stored = 0
        for name in names:
            num_stored += self.holds(name)
            self.cpu.forget(name)
            if self.index is not None:
                self.index.remove(name)
            self._unsaved.pop(name, None)
        return num_stored

    def check_integrity(self) -> None:
        """Assert that nothing is in flight, counts agree, and what is stored is closed under parents."""
        self.cpu.check_integrity()
        assert not self.num_holders, "requests hold slots while idle"
        assert not (self._dirty or self._readers or self._num_dirty_below), "blocks in flight while idle"
        for slot in self.cpu.blocks():
            record = self.cpu.record(slot)
            assert record is not None and (record.parent_id == ROOT or self.holds(record.parent_id)), "a hole"
        if self.index is not None:
            self.index.check_integrity()
            assert self.index.num_blocks <= self._num_disk_blocks, "more on disk than it holds"
            entries = map(self.index.get, self.index.select(Evict(everything=True)))
            assert all(e and (e.parent_id == ROOT or e.parent_id in self.index) for e in entries), "a hole on disk"


def _record(chain: Sequence[BlockId], index: int) -> BlockRecord:
    return BlockRecord(chain[index], chain[index - 1] if index else ROOT, b"", b"")
