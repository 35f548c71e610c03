"""The transfers of the engine's steps: planned, begun, and ended. Then the arena blocks that they held are released.

Control plane, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.blocks.records import Load, TransferPlan, Transferred
from kvstore.memory.tier import ArenaBlockState, CpuTier
from kvstore.stats import StoreStats
from kvstore.store.saving import Saver, SaveStep
from kvstore.store.seam import StepSpan


@dataclass(slots=True)
class StepTransfers:
    """The arena blocks that a step's transfers hold."""

    loads: tuple[Load, ...] = ()
    saves: SaveStep = field(default_factory=SaveStep)
    begun: bool = False  # the data plane has it, and will tell how it ends
    has_saved: bool | None = None  # whether its saves succeeded, None until they have ended
    is_garbage: bool = False  # it was computed after blocks that did not come


class StepsInFlight:
    """landed: called with each arena block that became READY, whose reference it takes over."""

    def __init__(self, cpu: CpuTier, saver: Saver, stats: StoreStats, landed: Callable[[int], None]) -> None:
        self._cpu, self._saver, self._stats, self._landed = cpu, saver, stats, landed
        self.by_ticket: dict[int, StepTransfers] = {}
        self._last_ticket = 0
        self._next_loads: list[Load] = []  # of the step that is being scheduled
        self._failed_blocks: list[int] = []  # in HBM

    def add_loads(self, loads: Sequence[Load]) -> None:
        """Add loads to the next plan."""
        self._next_loads += loads

    def plan(self, spans: Sequence[StepSpan], may_save: bool) -> TransferPlan | None:
        """The loads that were added since the last plan, and where the step's tokens are saved."""
        # Registered before it holds anything, so that a step that is cut off in here can be dropped.
        ticket = self._last_ticket = self._last_ticket + 1
        step = self.by_ticket[ticket] = StepTransfers()
        self._saver.plan(spans, may_save, step.saves)
        step.loads, self._next_loads = tuple(self._next_loads), []
        if not step.loads and not step.saves.saves:
            del self.by_ticket[ticket]
            return None
        return TransferPlan(step.loads, tuple(step.saves.saves), ticket)

    def begun(self, ticket: int) -> None:
        """The data plane has the plan of this step. May be called without the lock."""
        self.by_ticket[ticket].begun = True

    def drop_unbegun(self) -> None:
        """Drop steps that were planned and never began, and loads for a step that was never planned."""
        for ticket in [ticket for ticket, step in self.by_ticket.items() if not step.begun]:
            step = self.by_ticket.pop(ticket)
            self._release_loads(step)
            self._end_saves(step, False)
        self._saver.drop_unnamed()
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
            self._stats.load_failures += len(step.loads)
            self._failed_blocks += [load.block_number for load in step.loads]
        self._release_loads(step)

    def end_steps(self) -> None:
        """End steps whose transfers have ended, none before an earlier one: its blocks may build on lost ones.

        A block that has no name yet holds up nobody: it follows when it is named.
        """
        for ticket, step in list(self.by_ticket.items()):
            if step.loads or (step.saves.saves and step.has_saved is None):
                return
            self._end_saves(step, bool(step.has_saved) and not step.is_garbage)
            if not step.saves.num_unnamed:
                del self.by_ticket[ticket]

    def pop_failed_blocks(self) -> tuple[int, ...]:
        """HBM blocks whose load failed since the last call."""
        failed, self._failed_blocks = tuple(self._failed_blocks), []
        return failed

    def _release_loads(self, step: StepTransfers) -> None:
        loads, step.loads = step.loads, ()
        self._release(loads)

    def _release(self, loads: Sequence[Load]) -> None:
        for load in reversed(loads):
            self._cpu.release(load.arena_block)

    def _end_saves(self, step: StepTransfers, succeeded: bool) -> None:
        for arena_block in step.saves.complete:
            if self._cpu.state(arena_block) is not ArenaBlockState.PENDING:  # deleted meanwhile
                self._cpu.release(arena_block)
            elif succeeded:
                self._cpu.publish(arena_block)
                self._stats.saved += 1
                self._landed(arena_block)
            else:
                self._lose(arena_block)
                self._cpu.release(arena_block)
        for arena_block in step.saves.written:
            if not succeeded and self._cpu.state(arena_block) is ArenaBlockState.EMPTY:
                self._cpu.spoil(arena_block)
            elif not succeeded and self._cpu.state(arena_block) is ArenaBlockState.PENDING:
                self._lose(arena_block)  # a later step has filled it
            self._cpu.release(arena_block)
        step.saves.written, step.saves.complete = [], []

    def _lose(self, arena_block: int) -> None:
        """An announced block will not come, nor will what later steps save behind it."""
        lost = {self._cpu.record(arena_block).block_id}  # type: ignore[union-attr]
        self._saver.lost(arena_block)
        self._cpu.fail(arena_block)
        self._stats.dropped_saves += 1
        for step in self.by_ticket.values():
            for other in step.saves.complete:
                record = self._cpu.record(other)
                is_pending = self._cpu.state(other) is ArenaBlockState.PENDING
                if record is not None and record.parent_id in lost and is_pending:
                    self._cpu.fail(other)
                    lost.add(record.block_id)
