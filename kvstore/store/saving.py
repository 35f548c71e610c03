"""Which of a step's tokens are saved, and where to: a slot per block, reserved when its first token is scheduled.

Control plane, one thread. A block that cannot be saved ends the saving of its request: what would follow it could not
be used without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Save
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.stats import StoreStats
from kvstore.store.requests import Requests, Tracked
from kvstore.store.seam import StepSpan
from kvstore.store.stored import StoredBlocks

MAX_UNSAVED = 1 << 20


@dataclass(slots=True)
class SaveStep:
    """Slots of one step's saves."""

    saves: list[Save] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # each holds a reference for it
    complete: list[int] = field(default_factory=list)  # those that are full with it
    num_unnamed: int = 0  # blocks that are full with it, too, and have no id yet


@dataclass(eq=False)
class Saver:
    """Plans saves, and knows the blocks of HBM that should have been saved and were not.

    has_disk: what was evicted below HBM is worth computing again, as there is room for all.
    """

    _cpu: CpuTier
    _requests: Requests
    _stored: StoredBlocks
    _stats: StoreStats
    _has_disk: bool

    def __post_init__(self) -> None:
        self._block_size = self._stored.block_size
        # Block id -> its parent: holes that a later request closes by computing from there.
        self._unsaved: OrderedDict[BlockId, BlockId] = OrderedDict()
        # Full blocks whose last token was not read from the device yet: step, request, index, and slot if it is saved.
        self._unnamed: list[tuple[SaveStep, Tracked, int, int | None]] = []

    def plan(self, spans: Sequence[StepSpan], may_save: bool, step: SaveStep) -> None:
        """Slots for the tokens of a step, noted in `step` as they are taken, so that an error leaves none behind.

        may_save False: the queue is full, so every block that begins is dropped.
        """
        for scheduled, span in enumerate(spans):
            request = self._requests.by_id.get(span.request_id)
            if request is not None:
                self._plan_request(request, scheduled, span, may_save, step)

    def _plan_request(self, request: Tracked, scheduled: int, span: StepSpan, may_save: bool, step: SaveStep) -> None:
        size, end = self._block_size, span.first_token + span.num_tokens
        for index in range(span.first_token // size, (end - 1) // size + 1):
            first = max(span.first_token, index * size)
            last = min(end, (index + 1) * size)
            full = last == (index + 1) * size
            slot = self._slot_for(request, index, first == index * size, may_save)
            if slot is not None:
                save = Save(scheduled, first - span.first_token, last - first, slot, first - index * size)
                step.saves.append(save)
                step.written.append(slot)
                self._cpu.acquire(slot)
            if full and len(request.chain) <= index:
                self._unnamed.append((step, request, index, slot))
                step.num_unnamed += 1
            elif full:
                self._filled(request, index, slot, step)

    def name_full_blocks(self, ending: Tracked | None = None) -> None:
        """Go on with the blocks whose last token is known by now, or whose request has left.

        ending: a request that leaves now. Its last token was computed for nothing, if at all.
        """
        unnamed, self._unnamed = self._unnamed, []
        for step, request, index, slot in unnamed:
            is_here = self._requests.by_id.get(request.request_id) is request
            end = len(request.chain) if request is not ending else request.num_loadable(self._block_size)
            if is_here and end <= index:
                self._unnamed.append((step, request, index, slot))
                continue
            step.num_unnamed -= 1
            if is_here:  # else its slot was given back
                slot = None if slot is None else self._continued(request, index, slot)
                self._filled(request, index, slot, step)

    def drop_unnamed(self) -> None:
        """All requests are going to end."""
        for step, *_ in self._unnamed:
            step.num_unnamed = 0
        self._unnamed = []

    def drop_partial(self, request: Tracked) -> None:
        """Give back the slot of a block that will not become full."""
        if request.saving.partial is not None:
            self._cpu.release(request.saving.partial[1])
            request.saving.partial = None

    def _filled(self, request: Tracked, index: int, slot: int | None, step: SaveStep) -> None:
        if slot is not None:
            self._complete(request, index, slot, step)
        elif index == request.saving.hole:
            self._mark(request, index)

    def _slot_for(self, request: Tracked, index: int, begins: bool, may_save: bool) -> int | None:
        """Where this block's tokens go; None when they are not saved."""
        saving = request.saving
        if not begins and saving.partial is not None and saving.partial[0] == index:
            return self._continued(request, *saving.partial)
        self.drop_partial(request)
        if len(request.chain) > index and self._stored.holds(request.chain[index]):
            self._unsaved.pop(request.chain[index], None)
            return None  # somebody has saved it
        if not saving.goes_on:
            return None
        if not begins:  # its first tokens were computed by another choice of the same prompt: nothing to do with room
            saving.goes_on, saving.hole = False, index
            return None
        if not self._has_parent(request, index):
            self._orphan(request, index)
            return None
        slot = self._cpu.reserve() if may_save else None
        if slot is None:
            self._drop(request, index)
            return None
        saving.partial = (index, slot)
        return slot

    def _continued(self, request: Tracked, index: int, slot: int) -> int | None:
        """The slot of a block that an earlier step began, unless what that step saved has not arrived."""
        if self._cpu.state(slot) is SlotState.EMPTY:
            return slot
        self.drop_partial(request)
        self._drop(request, index)
        return None

    def _complete(self, request: Tracked, index: int, slot: int, step: SaveStep) -> None:
        """The step fills this block: from now on it is found, PENDING. The request's reference becomes the step's."""
        request.saving.partial = None
        if not self._has_parent(request, index):  # evicted or deleted since the block was begun
            self._orphan(request, index)
            self._cpu.release(slot)
        elif self._cpu.announce(slot, self._stored.record(request, index), request.conversation):
            step.complete.append(slot)
            self._unsaved.pop(request.chain[index], None)
        else:  # another request of this step fills the same block
            self._cpu.release(slot)

    def _drop(self, request: Tracked, index: int) -> None:
        self._stats.dropped_saves += 1
        request.saving.goes_on, request.saving.hole = False, index

    def _orphan(self, request: Tracked, index: int) -> None:
        """What this block is built on was evicted below HBM: where there is a disk, a later turn stores it again.

        Without one the CPU tier is too small for what HBM holds, and computing again would only evict others.
        """
        self._stats.orphan_saves += 1
        request.saving.goes_on = False
        if self._has_disk:
            self._mark(request, next(first for first in range(index - 1, -1, -1) if self._has_parent(request, first)))

    def _has_parent(self, request: Tracked, index: int) -> bool:
        """Whether what this block is built on is stored: without it nobody could ever load the block."""
        return index == 0 or self._stored.holds(request.chain[index - 1])

    def _mark(self, request: Tracked, index: int) -> None:
        self._unsaved[request.chain[index]] = request.lineage.parent(request.chain, index)
        if len(self._unsaved) > MAX_UNSAVED:
            self._unsaved.popitem(last=False)

    def lost(self, slot: int) -> None:
        """A save has failed after its slot was announced."""
        if (record := self._cpu.record(slot)) is not None:
            self._unsaved[record.block_id] = record.parent_id

    def num_usable(self, request: Tracked, num_hit: int) -> int:
        """Of `num_hit` blocks in HBM those before a hole that can be closed now: what follows is computed and saved."""
        if not self._unsaved:
            return num_hit
        for index in range(num_hit):
            parent = self._unsaved.get(request.chain[index])
            if parent is None:
                continue
            if self._stored.holds(request.chain[index]):
                del self._unsaved[request.chain[index]]
                continue
            stored = index == 0 or self._stored.holds(parent) or parent == request.lineage.root
            return index if stored and self._cpu.pool.num_free >= num_hit - index else num_hit
        return num_hit

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)
