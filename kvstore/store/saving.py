"""Which of a step's tokens are saved, and where: an arena block is reserved when a block's first token is scheduled.

The transfers of steps are planned, begun and ended here; then the arena blocks that they held are released.

Control plane, one thread. If a block cannot be saved, saving of its request ends, as later blocks would be useless
without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import BlockRecord, Load, Save, StatePiece, TransferPlan, Transferred
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.policy.conversation import Conversation
from kvstore.stats import StoreStats
from kvstore.store.requests import Requests, Tracked
from kvstore.store.seam import StepSpan
from kvstore.store.stored import StoredBlocks

MAX_UNSAVED = 1 << 20


@dataclass(slots=True)
class StepTransfers:
    """The arena blocks that a step's transfers hold."""

    loads: tuple[Load | StatePiece, ...] = ()
    saves: list[Save] = field(default_factory=list)
    states: list[StatePiece] = field(default_factory=list)  # that it saves instead of KV
    written: list[int] = field(default_factory=list)  # by its saves; each holds a reference
    complete: list[int] = field(default_factory=list)  # blocks that it fills
    num_unnamed: int = 0  # blocks that it fills and that have no id yet
    begun: bool = False  # the data plane has it, and will tell how it ends
    has_saved: bool | None = None  # whether its saves succeeded, None until they have ended
    is_garbage: bool = False  # it was computed after blocks that did not come


class StepsInFlight:
    """Knows which arena blocks their transfers hold, and the blocks of HBM that should have been saved and were not.

    has_disk: whether blocks that only HBM has are worth computing again, as the disk has room for all. landed: called
    with each arena block that became READY, whose reference it takes over.
    """

    def __init__(
        self, cpu: CpuTier, requests: Requests, stored: StoredBlocks, stats: StoreStats, has_disk: bool,
        landed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._cpu, self._requests, self._stored, self._stats = cpu, requests, stored, stats
        self._has_disk, self._landed, self._block_size = has_disk, landed, stored.block_size
        self.by_ticket: dict[int, StepTransfers] = {}
        self._last_ticket = 0
        self._next_loads: list[Load | StatePiece] = []  # of the step that is being scheduled
        self._failed_blocks: list[int] = []  # in HBM
        # Block id -> its parent: holes that a later request closes by computing them.
        self._unsaved: OrderedDict[BlockId, BlockId] = OrderedDict()
        # Full blocks whose last token was not read from the device yet: step, request, index, arena block if saved.
        self._unnamed: list[tuple[StepTransfers, Tracked, int, int | None]] = []

    # -- what a step saves, and where --------------------------------------------------------------------------------
    def _plan_saves(self, spans: Sequence[StepSpan], may_save: bool, step: StepTransfers) -> None:
        """Choose arena blocks for the tokens of a step, noted in `step` as they are taken, so that an error leaks none.

        may_save: False if the queue is full, so that every new block is dropped.
        """
        for scheduled, span in enumerate(spans):
            request = self._requests.by_id.get(span.request_id)
            if request is not None:
                self._plan_request(request, scheduled, span, may_save, step)

    def _plan_request(
        self, request: Tracked, scheduled: int, span: StepSpan, may_save: bool, step: StepTransfers
    ) -> None:
        size, end = self._block_size, span.first_token + span.num_tokens
        for index in range(span.first_token // size, (end - 1) // size + 1):
            first = max(span.first_token, index * size)
            last = min(end, (index + 1) * size)
            full = last == (index + 1) * size
            arena_block = self._arena_block_for(request, index, first == index * size, may_save)
            if arena_block is not None:
                save = Save(scheduled, first - span.first_token, last - first, arena_block, first - index * size)
                step.saves.append(save)
                step.written.append(arena_block)
                self._cpu.acquire(arena_block)
            if full and len(request.chain) <= index:
                self._unnamed.append((step, request, index, arena_block))
                step.num_unnamed += 1
            elif full:
                self._filled(request, index, arena_block, step)

    def name_full_blocks(self, ending: Tracked | None = None) -> None:
        """Continue with blocks whose last token is known by now, or whose request has left.

        ending: a request that leaves now; the KV of its last token does not count.
        """
        unnamed, self._unnamed = self._unnamed, []
        for step, request, index, arena_block in unnamed:
            is_here = self._requests.by_id.get(request.request_id) is request
            end = len(request.chain) if request is not ending else request.num_loadable(self._block_size)
            if is_here and end <= index:
                self._unnamed.append((step, request, index, arena_block))
                continue
            step.num_unnamed -= 1
            if is_here:  # else its arena block was released
                arena_block = None if arena_block is None else self._continued(request, index, arena_block)
                self._filled(request, index, arena_block, step)

    def remove(self, request: Tracked) -> None:
        """A request has ended or was preempted: release what was reserved for a block that will not become full."""
        if request.partial is not None:
            self._cpu.release(request.partial[1])
            request.partial = None

    def being_filled(self) -> Iterator[int]:
        """Arena blocks that are being filled with blocks that have no id yet."""
        yield from (one.partial[1] for one in self._requests.by_id.values() if one.partial is not None)
        for step in self.by_ticket.values():
            yield from step.written

    def _filled(self, request: Tracked, index: int, arena_block: int | None, step: StepTransfers) -> None:
        if arena_block is not None:
            self._complete(request, index, arena_block, step)
        elif index == request.hole:
            self._mark(request, index, "no room in the CPU tier")

    def _arena_block_for(self, request: Tracked, index: int, begins: bool, may_save: bool) -> int | None:
        """Where this block's tokens are saved; None when they are not."""
        if not begins and request.partial is not None and request.partial[0] == index:
            return self._continued(request, *request.partial)
        self.remove(request)
        if len(request.chain) > index and self._stored.holds(request.chain[index]):
            self._unsaved.pop(request.chain[index], None)
            return None  # it is already saved
        if not request.is_saved:
            return None
        if not begins:  # another choice of the same prompt computed its first tokens: no lack of room
            request.is_saved, request.hole = False, index
            return None
        if not self._has_parent(request, index):
            self._orphan(request, index)
            return None
        arena_block = self._cpu.reserve() if may_save else None
        if arena_block is None:
            self._drop(request, index)
            return None
        request.partial = (index, arena_block)
        return arena_block

    def _continued(self, request: Tracked, index: int, arena_block: int) -> int | None:
        """Where an earlier step began to save this block, if that step's save has arrived."""
        if self._cpu.state(arena_block) is ArenaBlockState.EMPTY:
            return arena_block
        self.remove(request)
        self._drop(request, index)
        return None

    def _complete(self, request: Tracked, index: int, arena_block: int, step: StepTransfers) -> None:
        """Make a block that this step fills findable, as PENDING. The request's reference becomes the step's."""
        request.partial = None
        if not self._has_parent(request, index):  # evicted or deleted since the block was begun
            self._orphan(request, index)
            self._cpu.release(arena_block)
        elif self._cpu.announce(arena_block, self._stored.record(request, index), request.conversation):
            step.complete.append(arena_block)
            request.num_saved_tokens += self._block_size
            self._unsaved.pop(request.chain[index], None)
            self._stats.losses.stored(request.chain[index])
        else:  # another request of this step fills the same block
            self._cpu.release(arena_block)

    def _plan_state(
        self, records: list[BlockRecord], row: int, conversation: Conversation | None, step: StepTransfers
    ) -> None:
        """Choose arena blocks for a state, all or none."""
        arena_blocks = [one for one in (self._cpu.reserve() for _ in records) if one is not None]
        if len(arena_blocks) < len(records) or not self._stored.holds(records[0].parent_id):
            for arena_block in arena_blocks:
                self._cpu.release(arena_block)
            self._stats.dropped_saves += 1
            self._stats.losses.note("not_written", "cpu", records[0].block_id, why="no room in the CPU tier")
            return
        for arena_block, record in zip(arena_blocks, records, strict=True):
            self._cpu.announce(arena_block, record, conversation)
        step.complete += arena_blocks
        step.states += [StatePiece(row, index, one) for index, one in enumerate(arena_blocks)]

    def _drop(self, request: Tracked, index: int) -> None:
        self._stats.dropped_saves += 1
        request.is_saved, request.hole = False, index

    def _orphan(self, request: Tracked, index: int) -> None:
        """Note that the block's parent was evicted below HBM.

        With a disk, a later turn stores it again. Without one, the CPU tier is too small for what HBM holds, and
        computing again would only evict others.
        """
        self._stats.orphan_saves += 1
        request.is_saved = False
        if self._has_disk:
            first = next(first for first in range(index - 1, -1, -1) if self._has_parent(request, first))
            loss = self._stats.losses.get(request.chain[first])
            if loss is None or (loss.cause, loss.tier) != ("not_written", "disk"):  # it would be refused again
                self._mark(request, first, "its parent was evicted")

    def _has_parent(self, request: Tracked, index: int) -> bool:
        """Whether the block's parent is stored: without it nobody could load the block."""
        return index == 0 or self._stored.keeps(request.chain[index - 1])

    def _mark(self, request: Tracked, index: int, why: str) -> None:
        self._unsaved[request.chain[index]] = request.lineage.parent(request.chain, index)
        if self._stats.losses.get(request.chain[index]) is None:  # else what it was lost by says more
            self._stats.losses.note("not_written", "cpu", request.chain[index], why=why)
        if len(self._unsaved) > MAX_UNSAVED:
            self._unsaved.popitem(last=False)

    def num_usable(self, request: Tracked, num_hit: int) -> int:
        """How many of `num_hit` blocks in HBM come before a hole that can be closed now. The rest is computed and
        saved.
        """
        if not self._unsaved:
            return num_hit
        for index in range(num_hit):
            parent = self._unsaved.get(request.chain[index])
            if parent is None:
                continue
            if self._stored.holds(request.chain[index]):
                del self._unsaved[request.chain[index]]
                continue
            stored = index == 0 or self._stored.keeps(parent) or parent == request.lineage.root
            return index if stored and self._cpu.pool.num_free >= num_hit - index else num_hit
        return num_hit

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    # -- the transfers of a step -------------------------------------------------------------------------------------
    def add_loads(self, loads: Sequence[Load | StatePiece]) -> None:
        """Add loads to the next plan."""
        self._next_loads += loads

    def plan(self, spans: Sequence[StepSpan], may_save: bool) -> TransferPlan | None:
        """The loads that were added since the last plan, and where the step's tokens are saved."""
        # Registered before it holds anything, so that a step that is cut off in here can be dropped.
        ticket = self._last_ticket = self._last_ticket + 1
        step = self.by_ticket[ticket] = StepTransfers()
        self._plan_saves(spans, may_save, step)
        step.loads, self._next_loads = tuple(self._next_loads), []
        if not step.loads and not step.saves:
            del self.by_ticket[ticket]
            return None
        loads = tuple(load for load in step.loads if isinstance(load, Load))
        states = tuple(load for load in step.loads if isinstance(load, StatePiece))
        return TransferPlan(loads, tuple(step.saves), ticket, states)

    def plan_states(
        self, states: Sequence[tuple[int, list[BlockRecord]]], conversation: Conversation | None
    ) -> TransferPlan | None:
        """Save states, each given with its row and the records of its blocks; None if that cannot be. It ends as the
        saves of a step do.
        """
        ticket = self._last_ticket = self._last_ticket + 1
        step = self.by_ticket[ticket] = StepTransfers(begun=True)
        for row, records in states:
            self._plan_state(records, row, conversation, step)
        if not step.states:
            del self.by_ticket[ticket]
            return None
        return TransferPlan(ticket=ticket, states=tuple(step.states))

    def begun(self, ticket: int) -> None:
        """The data plane has the plan of this step. May be called without the lock."""
        self.by_ticket[ticket].begun = True

    def drop_unbegun(self) -> None:
        """Drop steps that were planned and never began, and loads for a step that was never planned."""
        for ticket in [ticket for ticket, step in self.by_ticket.items() if not step.begun]:
            step = self.by_ticket.pop(ticket)
            self._release_loads(step)
            self._end_saves(step, False)
        for step, *_ in self._unnamed:  # all requests are about to end
            step.num_unnamed = 0
        self._unnamed = []
        loads, self._next_loads = self._next_loads, []
        self._release(loads)

    def transferred(self, done: Transferred) -> None:
        if (step := self.by_ticket.get(done.ticket)) is None:  # dropped after it began, but before that was noted
            return
        if not done.is_load:
            step.has_saved = done.succeeded
            return
        if done.succeeded:
            self._stats.loaded += len(step.loads)
        else:
            step.is_garbage = True
            for ticket, later in self.by_ticket.items():  # its request may have left before this was told
                later.is_garbage |= ticket > done.ticket and bool(later.states)
            self._stats.load_failures += len(step.loads)
            self._failed_blocks += [load.block_number for load in step.loads if isinstance(load, Load)]
        self._release_loads(step)

    def end_steps(self) -> None:
        """End steps whose transfers have ended, none before an earlier one: its blocks may build on lost ones.

        A block that has no name yet holds up nobody: it follows when it is named.
        """
        for ticket, step in list(self.by_ticket.items()):
            if step.loads or ((step.saves or step.states) and step.has_saved is None):
                return
            self._end_saves(step, bool(step.has_saved) and not step.is_garbage)
            if not step.num_unnamed:
                del self.by_ticket[ticket]

    def pop_failed_blocks(self) -> tuple[int, ...]:
        """HBM blocks whose load failed since the last call."""
        failed, self._failed_blocks = tuple(self._failed_blocks), []
        return failed

    def _release_loads(self, step: StepTransfers) -> None:
        loads, step.loads = step.loads, ()
        self._release(loads)

    def _release(self, loads: Sequence[Load | StatePiece]) -> None:
        for load in reversed(loads):
            self._cpu.release(load.arena_block)

    def _end_saves(self, step: StepTransfers, succeeded: bool) -> None:
        for arena_block in step.complete:
            if self._cpu.state(arena_block) is not ArenaBlockState.PENDING:  # deleted meanwhile
                self._cpu.release(arena_block)
            elif succeeded:
                self._cpu.publish(arena_block)
                self._stats.saved += 1
                self._landed(arena_block)
            else:
                self._lose(arena_block)
                self._cpu.release(arena_block)
        for arena_block in step.written:
            if not succeeded and self._cpu.state(arena_block) is ArenaBlockState.EMPTY:
                self._cpu.spoil(arena_block)
            elif not succeeded and self._cpu.state(arena_block) is ArenaBlockState.PENDING:
                self._lose(arena_block)  # a later step has filled it
            self._cpu.release(arena_block)
        step.written, step.complete = [], []

    def _lose(self, arena_block: int) -> None:
        """An announced block will not come, nor will what later steps save behind it."""
        record = self._cpu.record(arena_block)
        assert record is not None
        lost = {record.block_id}
        if not record.is_state:  # which nobody computes again
            self._unsaved[record.block_id] = record.parent_id
        gone = filter(None, map(self._cpu.record, self._cpu.fail(arena_block)))
        self._stats.losses.note("not_written", "cpu", *(one.block_id for one in gone), why="its save failed")
        self._stats.dropped_saves += 1
        for step in self.by_ticket.values():
            for other in step.complete:
                record = self._cpu.record(other)
                is_pending = self._cpu.state(other) is ArenaBlockState.PENDING
                if record is not None and record.parent_id in lost and is_pending:
                    self._cpu.fail(other)
                    lost.add(record.block_id)
