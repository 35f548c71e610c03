"""All other ranks of a model, as the first rank sees them: sends them steps, and watches them."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from kvstore.blocks.records import Load, Save, TransferPlan, Transferred
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.process.pulse import SHOW_S
from kvstore.engine.process.wire import Failure, error_of
from kvstore.engine.ranks.far import FarRank
from kvstore.engine.ranks.launch import Launch
from kvstore.engine.ranks.process import RankProcess
from kvstore.engine.ranks.wire import (
    EndForward,
    FromRank,
    Moved,
    Moves,
    OpenArena,
    Overwrite,
    RankLoaded,
    RankReady,
    encode,
    moves_of,
    step_of,
)
from kvstore.errors import EngineDiedError
from kvstore.memory.layout import OwnPart

LOOK_MS = 50  # at the start: how often to check whether a rank has ended
BLAME_S = 2.0  # how long to wait after an error here for news of the rank that may have caused it


class Blocks(Protocol):
    """Blocks of the store, for ranks without a share of its memory: see `kvstore.memory.far.FarBlocks`."""

    def loaded(self, part: OwnPart, loads: Sequence[Load]) -> bytes: ...

    def put(self, part: OwnPart, saves: Sequence[Save], data: bytes) -> None: ...


class Ranks:
    """Implements `Others` for the runner, and `kvstore.memory.ranked.OtherRanks` for the store.

    launch: it owns the other ranks. num_partners: how many of them have the first stage of a pipeline, with this rank.
    One thread at a time sends steps, and one collects ended transfers.
    """

    def __init__(self, launch: Launch, block_size: int, num_partners: int = 0) -> None:
        self.others, self.num_others = launch.others, len(launch.others)
        self.rendezvous, self.host, self.arena_descriptor = launch.rendezvous, launch.host, launch.arena
        self._block_size, self._num_partners = block_size, num_partners
        self._plan: tuple[TransferPlan, Moves] | None = None  # loads and saves of the step that is being prepared
        self._blocks: Blocks | None = None
        self._parts: dict[int, OwnPart] = {}  # by rank

    @property
    def size(self) -> int:
        """The number of ranks, the first one included."""
        return self.num_others + 1

    # -- start and end -----------------------------------------------------------------------------------------------
    def wait_loaded(self) -> None:
        """Wait until all have read their weights. Raises the first failure, with the number of its rank."""
        self._await(RankLoaded)

    def open_arena(self) -> None:
        """Tell them that the arena has its size, and wait until all are ready for steps. Raises as `wait_loaded`."""
        self._tell(encode(OpenArena()))
        self._await(RankReady)
        for other in self.others:
            other.pulse.is_loading = False

    def _await(self, kind: type[FromRank]) -> None:
        for other in self.others:
            while True:
                has_ended = other.line.how is not None  # checked first: what it sent before can still be received
                messages = other.line.receive()
                if other.line.failure is not None:
                    raise _error_of(_name(other, self.size), other.line.failure)
                if found := [message for message in messages if isinstance(message, kind)]:
                    if isinstance(found[0], RankReady):
                        self._parts[other.rank] = OwnPart(found[0].layers, found[0].heads)
                    break
                if has_ended:
                    raise EngineDiedError(f"{_name(other, self.size)} ended while it was loading ({other.line.how})")
                self._poll(LOOK_MS)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """If another rank has caused an error in this context, raise that rank's error instead."""
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + BLAME_S
            while True:
                lost = _lost(self.others)
                is_over = not isinstance(error, EngineDiedError) or time.monotonic() > deadline
                if lost and (is_over or not _has_followed(lost[0])):
                    raise _end_of(lost[0], self.size) from error
                if is_over:
                    raise
                self._poll(LOOK_MS)

    def _poll(self, timeout_ms: int) -> None:
        poller = select.poll()
        for other in self.others:
            other.line.watch_with(poller)
        poller.poll(timeout_ms)

    @property
    def loss(self) -> str | None:
        """Which rank has ended, and how. No step can be computed after that."""
        lost = next((other for other in _lost(self.others) if other.line.how is not None), None)
        return None if lost is None else str(_end_of(lost, self.size))

    def check(self) -> None:
        """Raises EngineDiedError if a rank has ended."""
        if (loss := self.loss) is not None:
            raise EngineDiedError(loss)

    # -- steps -------------------------------------------------------------------------------------------------------
    def begin_step(self, inputs: StepInputs, block_table: np.ndarray, copies: Sequence[tuple[int, int]]) -> None:
        self.check()
        plan, self._plan = self._plan, None
        step = step_of(inputs, block_table, self._block_size, copies, None if plan is None else plan[1])
        if plan is None or self.arena_descriptor is not None:
            self._tell(encode(step))
            return
        assert self._blocks is not None and step.moves is not None
        for other in self.others:
            step.moves.data = self._blocks.loaded(self._parts[other.rank], plan[0].loads)
            other.line.send(encode(step))

    def end_forward(self, num_samples: int) -> None:
        message = encode(EndForward(num_samples))
        for other in self.others[: self._num_partners]:
            other.line.send(message)

    def overwrite(self, blocks: Sequence[int]) -> None:
        self._tell(encode(Overwrite(list(blocks))))

    def kill(self) -> None:
        for other in self.others:
            other.kill()

    def _tell(self, message: bytes) -> None:
        for other in self.others:
            other.line.send(message)

    # -- transfers ---------------------------------------------------------------------------------------------------
    def use(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def begin_transfers(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self._plan = plan, moves_of(plan, row_starts)

    def end_transfers(self) -> bool:
        plan, self._plan = self._plan, None
        return plan is None

    def transferred(self) -> list[Transferred]:
        found: list[Transferred] = []
        for other in self.others:
            for message in other.line.receive():
                if isinstance(message, Moved):
                    if message.saves and self._blocks is not None and self.loss is None:  # after it they may be others'
                        saves = [Save(*save) for save in message.saves]
                        self._blocks.put(self._parts[other.rank], saves, message.data)
                    found.append(Transferred(message.ticket, message.is_load, message.succeeded))
        return found

    def wait(self, timeout_s: float) -> None:
        self._poll(int(timeout_s * 1000))
        self.check()


def end_hung(others: Sequence[RankProcess | FarRank], why: str) -> None:
    """In any thread: end ranks each of which may wait for another one for ever."""
    for other in others:
        other.show()
    time.sleep(SHOW_S)
    for other in others:
        other.kill(why)


def _lost(others: Sequence[RankProcess | FarRank]) -> list[RankProcess | FarRank]:
    """Those that have ended, or could not start; first those that have not ended because another one had."""
    found = [other for other in others if other.line.how is not None or other.pulse.is_loading]
    for other in found:
        other.line.look()
    found = [other for other in found if other.line.how is not None or other.line.failure is not None]
    return sorted(found, key=_has_followed)


def _has_followed(other: RankProcess | FarRank) -> bool:
    return other.line.failure is not None and other.line.failure.kind == EngineDiedError.__name__


def _end_of(other: RankProcess | FarRank, size: int) -> Exception:
    if other.line.failure is not None and other.pulse.is_loading:
        return _error_of(_name(other, size), other.line.failure)
    return EngineDiedError(f"{_name(other, size)} ended ({other.line.how})")


def _name(other: RankProcess | FarRank, size: int) -> str:
    return f"rank {other.rank} of {size}"


def _error_of(name: str, failure: Failure) -> Exception:
    return error_of(Failure(failure.kind, f"{name}: {failure.message}", failure.more))
