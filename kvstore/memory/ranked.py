"""One arena for several ranks, each of which moves its heads and layers of every block and window: the first rank's
side, which keeps count, and that of a rank without a store, which moves its own to and from that arena, or as bytes.

A block is one record with all heads, so it does not say how many ranks have written it; nor does a state of layers with
a window. A step's loads or saves have ended when they have on all ranks, and failed when they have on one. Knows no
process: see `OtherRanks`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch

from kvstore.blocks.records import Save, SaveFence, TransferPlan, Transferred
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout, OwnPart, States
from kvstore.memory.streams import CudaStreams
from kvstore.memory.transfer import Arena, Transfer, rows_of

WAIT_S = 0.01  # between two checks for lost ranks
LEAST_ARENA_BLOCKS = 16  # of a rank's own memory
DataPlane: TypeAlias = "Transfer | DeviceTransfer"  # moves KV between HBM and the arena


def make_transfer(device: torch.device, arena: Arena, on_progress: Callable[[], None]) -> DataPlane:
    if device.type == "cuda":
        return DeviceTransfer(arena, CudaStreams(device), on_progress)
    return Transfer(arena)


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """Parts of blocks out of the arena and into it, as bytes, for ranks that have no share of it."""

    arena: Arena

    def loaded(self, part: OwnPart, plan: TransferPlan) -> bytes:
        """This part of the blocks that a step loads, one after the other, and then of the states."""
        own_part, (first, last) = self._part(part), part.windows
        state_bytes = 2 * (last - first) * own_part[0, 0].nbytes
        packed = torch.empty(len(rows_of(plan.states)), state_bytes, dtype=torch.uint8)
        self.arena.read_states(packed, plan.states, part)
        return bytes_of([*(own_part[load.arena_block] for load in plan.loads), packed])

    def put(self, part: OwnPart, plan: TransferPlan, data: bytes) -> None:
        """Write what a rank has saved into its part of blocks, in the order of the plan's saves. Without any, these are
        the plan's states.
        """
        own_part = self._part(part)
        values = torch.frombuffer(bytearray(data), dtype=self.arena.layout.dtype)
        for save in plan.saves:
            place = own_part[save.arena_block, :, save.offset : save.offset + save.num_tokens]
            own, values = values[: place.numel()], values[place.numel() :]
            place.copy_(own.view(place.shape))
        if not plan.saves:
            packed = values.view(torch.uint8).view(len(rows_of(plan.states)), -1)
            self.arena.write_states(packed, plan.states, part)

    def _part(self, part: OwnPart) -> torch.Tensor:
        """This part of all blocks: [num_arena_blocks, 2 * num_layers, block_size, num_heads, head_dim]."""
        [run], (first, last) = self.arena.runs, part.layers  # all layers have one shape
        heads = run.unflatten(3, (self.arena.layout.shapes[0].num_kv_heads, -1))
        return heads[:, 2 * first : 2 * last, :, slice(*part.heads)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


class OtherRanks(Protocol):
    """The other ranks, as known to whoever moves KV.

    num_others: how many there are. arena_descriptor: of the memory that all of them map; None: they have no share of
    the arena, and their part of blocks comes and goes with the steps.
    """

    @property
    def num_others(self) -> int: ...

    @property
    def arena_descriptor(self) -> int | None: ...

    def use(self, blocks: FarBlocks) -> None:
        """Blocks for those without a share of the arena."""
        ...

    @property
    def loss(self) -> str | None:
        """Which of them has ended; after that, none tells anything useful."""
        ...

    def begin_transfers(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        """Send them this plan with the step's arrays."""
        ...

    def save_states(self, plan: TransferPlan) -> None:
        """Send them this plan behind the steps that they have got."""
        ...

    def end_transfers(self) -> bool:
        """The step has ended here. Returns False if they never got it."""
        ...

    def transferred(self) -> list[Transferred]:
        """What they have told since the last call. One thread at a time calls it."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until one of them has told something. Raises EngineDiedError if one is lost."""
        ...


@dataclass(slots=True)
class _Told:
    """One step's loads or saves: what this rank said, and how many others have not said anything yet."""

    num_left: int
    own: Transferred | None = None
    failed: bool = False


@dataclass(eq=False)
class RankedTransfer:
    """A data plane for all ranks. own: the one for this rank's heads."""

    own: DataPlane
    others: OtherRanks
    _ticket: int | None = None  # ticket of the running step, if it has transfers
    _has_loads: bool = False
    _open: dict[tuple[int, bool], _Told] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.load_seconds = self.own.load_seconds
        self.register, self.wait_for_layer_load = self.own.register, self.own.wait_for_layer_load
        self.save_kv_layer = self.own.save_kv_layer

    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self.own.begin(plan, row_starts)
        with self._lock:
            for is_load, moves in ((True, plan.loads), (False, plan.saves)):
                if moves:
                    self._open[plan.ticket, is_load] = _Told(self.others.num_others)
        self.others.begin_transfers(plan, row_starts)
        self._ticket, self._has_loads = plan.ticket, bool(plan.loads)

    def save_states(self, plan: TransferPlan) -> None:
        """Save the plan's states, each rank its part. Called between two steps."""
        with self._lock:
            self._open[plan.ticket, False] = _Told(self.others.num_others)
        self.others.save_states(plan)
        self.own.save_states(plan)

    def end(self, succeeded: bool = True) -> SaveFence | None:
        """End the step as for this rank's heads. If it has loads, those of all ranks have ended on return."""
        fence = self.own.end(succeeded)
        was_told, ticket = self.others.end_transfers(), self._ticket
        self._ticket = None
        if ticket is None:
            return fence
        if not was_told:
            with self._lock:
                for is_load in (True, False):
                    if (told := self._open.get((ticket, is_load))) is not None:
                        told.num_left = 0
        elif self._has_loads and succeeded:
            while not self._has_ended(ticket):
                self.others.wait(WAIT_S)
        return fence

    def _has_ended(self, ticket: int) -> bool:
        with self._lock:
            self._take_in()
            told = self._open.get((ticket, True))
            return told is None or not told.num_left

    def _take_in(self) -> None:
        for done in self.others.transferred():
            if (told := self._open.get((done.ticket, done.is_load))) is not None:  # else it ended with a lost rank
                told.num_left -= 1
                told.failed |= not done.succeeded

    @property
    def can_save(self) -> bool:
        return self.own.can_save

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended on all ranks since the last call. If a rank is lost, all have
        failed.
        """
        with self._lock:
            self._take_in()
            for done in self.own.completed():
                self._open[done.ticket, done.is_load].own = done
            is_lost, found = self.others.loss is not None, list[Transferred]()
            for name, told in list(self._open.items()):
                if told.own is not None and (is_lost or not told.num_left):
                    del self._open[name]
                    has_failed = is_lost or told.failed  # lost: what the others summed may be wrong
                    found.append(replace(told.own, succeeded=told.own.succeeded and not has_failed))
            return found

    def close(self) -> None:
        self.own.close()


# -- another rank's side ----------------------------------------------------------------------------------------------
def rank_transfer(
    layout: KVLayout, descriptor: int, device: torch.device, on_progress: Callable[[], None]
) -> DataPlane:
    """Moves KV of a share of the first rank's arena. descriptor: of its memory, whose size the first rank has set.
    on_progress: on CUDA, called in a thread of its own when loads or saves have ended.
    """
    num_arena_blocks = os.fstat(descriptor).st_size // layout.block_bytes
    arena = Arena(layout, num_arena_blocks, device.type == "cuda", descriptor)
    return make_transfer(device, arena, on_progress)


class FarTransfer:
    """Moves KV of a rank that has no share of the arena: it has memory of its own, for the blocks of one step."""

    def __init__(self, layout: KVLayout) -> None:
        assert layout.own is not None
        first, last = layout.own.heads
        shapes = (replace(layout.shapes[0], num_kv_heads=last - first),) * len(layout.own_rotations)
        self._layout = KVLayout(shapes, layout.block_size, layout.dtype, layout.own_rotations)
        self._own = own = Transfer(Arena(self._layout, LEAST_ARENA_BLOCKS, pin=False))
        self._saves: Sequence[Save] = ()
        self._states: States | None = None
        self.end, self.completed = own.end, own.completed
        self.wait_for_layer_load, self.save_kv_layer = own.wait_for_layer_load, own.save_kv_layer

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], states: States | None = None) -> None:
        self._own.register(caches)
        self._states = states

    def begin(self, plan: TransferPlan, row_starts: Sequence[int], loaded: bytes) -> None:
        """loaded: see `FarBlocks.loaded`."""
        num_loads, num_arena_blocks = len(plan.loads), len(plan.loads) + len(plan.saves)
        if num_arena_blocks > self._own.arena.num_arena_blocks:
            self._own.arena = Arena(self._layout, num_arena_blocks, pin=False)
        arena = self._own.arena
        if num_loads:
            arena.reach(num_loads - 1)
            values = torch.frombuffer(bytearray(loaded), dtype=self._layout.dtype)
            blocks, packed = values.tensor_split([num_loads * self._layout.block_numbers])
            arena.tensor[:num_loads] = blocks.view(num_loads, -1)
            if self._states is not None and (rows := rows_of(plan.states)):
                self._states.unpack(rows, packed.view(torch.uint8).view(len(rows), -1))
        loads = tuple(replace(load, arena_block=index) for index, load in enumerate(plan.loads))
        self._saves = tuple(replace(save, arena_block=index) for index, save in enumerate(plan.saves, num_loads))
        self._own.begin(TransferPlan(loads, self._saves, plan.ticket), row_starts)

    def erase(self) -> None:
        """Overwrite what earlier steps have left. Called between two steps."""
        self._own.arena.tensor.zero_()

    def saved(self) -> bytes:
        """What the last step has saved; see `FarBlocks.put`."""
        [run] = self._own.arena.runs  # all layers have one shape
        return bytes_of(run[s.arena_block, :, s.offset : s.offset + s.num_tokens] for s in self._saves)

    def saved_states(self, plan: TransferPlan) -> bytes:
        """The plan's states as they are now."""
        assert self._states is not None
        return bytes_of([self._states.packed(rows_of(plan.states))])
