"""One arena for several ranks, each of which moves its heads of every block. This is the first rank's side, which keeps
count.

A block is one record with all heads, so it does not say how many ranks have written it. A step's loads or saves have
ended when they have on all ranks, and failed when they have on one. Knows no process: see `OtherRanks`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch

from kvstore.blocks.records import Load, Save, SaveFence, TransferPlan, Transferred
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import OwnPart
from kvstore.memory.transfer import Arena, Transfer

WAIT_S = 0.01  # between two checks for lost ranks
DataPlane: TypeAlias = "Transfer | DeviceTransfer"  # moves KV between HBM and the arena


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """Parts of blocks out of the arena and into it, as bytes, for ranks that have no share of it."""

    arena: Arena

    def loaded(self, part: OwnPart, loads: Sequence[Load]) -> bytes:
        """This part of the blocks that a step loads, one after the other."""
        own_part = self._part(part)
        return bytes_of(own_part[load.arena_block] for load in loads)

    def put(self, part: OwnPart, saves: Sequence[Save], data: bytes) -> None:
        """Write what a rank has saved, in the order of `saves`, into its part of their blocks."""
        own_part = self._part(part)
        values = torch.frombuffer(bytearray(data), dtype=self.arena.layout.dtype)
        for save in saves:
            place = own_part[save.arena_block, :, save.offset : save.offset + save.num_tokens]
            own, values = values[: place.numel()], values[place.numel() :]
            place.copy_(own.view(place.shape))

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
        self.register, self.save_states = self.own.register, self.own.save_states
        self.wait_for_layer_load = self.own.wait_for_layer_load
        self.save_kv_layer = self.own.save_kv_layer

    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self.own.begin(plan, row_starts)
        with self._lock:
            for is_load, moves in ((True, plan.loads), (False, plan.saves)):
                if moves:
                    self._open[plan.ticket, is_load] = _Told(self.others.num_others)
        self.others.begin_transfers(plan, row_starts)
        self._ticket, self._has_loads = plan.ticket, bool(plan.loads)

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
