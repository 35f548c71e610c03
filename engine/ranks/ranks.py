"""All other ranks of a model, as the first rank sees them: sends them steps, and watches them."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np

from kvstore.blocks.records import Load, Save, TransferPlan, Transferred
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.process.child import SHOW_S, Child
from kvstore.engine.process.wire import Failed, encode, error_of, failure_of
from kvstore.engine.ranks.launch import Launch
from kvstore.engine.ranks.wire import (
    EndForward,
    FromRank,
    Moved,
    Moves,
    OpenArena,
    Overwrite,
    RankLoaded,
    RankReady,
    decode_from_rank,
    moves_of,
    step_of,
)
from kvstore.errors import EngineDiedError
from kvstore.memory.layout import OwnPart

M = TypeVar("M", RankLoaded, RankReady)
LOOK_MS = 50  # how often to check whether a rank has ended
BLAME_S = 2.0  # how long to wait after an error here for news of the rank that may have caused it


class Blocks(Protocol):
    """Blocks of the store, for ranks without a share of its memory: see `kvstore.memory.far.FarBlocks`."""

    def loaded(self, part: OwnPart, loads: Sequence[Load]) -> bytes: ...

    def put(self, part: OwnPart, saves: Sequence[Save], data: bytes) -> None: ...


class OtherRank:
    """Another rank, as the first one sees it. Any thread may use it.

    part: its layers and heads, once it is ready. error: why it could not go on, if it has told.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.part: OwnPart
        self.error: Exception | None = None
        self._reading = threading.Lock()
        self._received: list[FromRank] = []

    def receive(self) -> list[FromRank]:
        """The messages that have come; never waits."""
        self.look()
        with self._reading:
            messages, self._received = self._received, []
        return messages

    def look(self) -> None:
        """Take in what has come, for `receive`; never waits."""
        with self._reading:
            for message in map(decode_from_rank, self.child.receive()):
                if isinstance(message, Failed):
                    self.error = message.error
                self._received.append(message)

    def wait_for(self, kind: type[M]) -> M:
        """Wait for this message at the start. Raises what the rank has told, and EngineDiedError if it has ended."""
        for message in map(decode_from_rank, self.child.first_messages()):
            if isinstance(message, Failed):
                self.error = message.error
                raise self.end
            if isinstance(message, kind):
                return message
        raise AssertionError("unreachable")

    @property
    def end(self) -> Exception:
        """What to raise when it has ended, or could not start."""
        if self.error is not None and self.child.is_loading:
            return error_of(failure_of(self.error), self.child.name)
        return EngineDiedError(f"{self.child.name} ended ({self.child.how})")

    @property
    def has_followed(self) -> bool:
        """Whether it has ended because another one had."""
        return isinstance(self.error, EngineDiedError)


class Ranks:
    """Implements `Others` for the runner, and `kvstore.memory.ranked.OtherRanks` for the store.

    launch: it owns the other ranks. num_partners: how many of them have the first stage of a pipeline, with this rank.
    One thread at a time sends steps, and one collects ended transfers.
    """

    def __init__(self, launch: Launch, block_size: int, num_partners: int = 0) -> None:
        self.others, self.num_others = [OtherRank(child) for child in launch.others], len(launch.others)
        self.rendezvous, self.host, self.arena_descriptor = launch.rendezvous, launch.host, launch.arena
        self._block_size, self._num_partners = block_size, num_partners
        self._plan: tuple[TransferPlan, Moves] | None = None  # loads and saves of the step that is being prepared
        self._blocks: Blocks | None = None

    # -- start and end -----------------------------------------------------------------------------------------------
    def wait_loaded(self) -> None:
        """Wait until all have read their weights. Raises the first failure, with the number of its rank."""
        for other in self.others:
            other.wait_for(RankLoaded)

    def open_arena(self) -> None:
        """Tell them that the arena has its size, and wait until all are ready for steps. Raises as `wait_loaded`."""
        self._tell(encode(OpenArena()))
        for other in self.others:
            ready = other.wait_for(RankReady)
            other.part = OwnPart(ready.layers, ready.heads)
        for other in self.others:
            other.child.is_loading = False

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
                if lost and (is_over or not lost[0].has_followed):
                    raise lost[0].end from error
                if is_over:
                    raise
                self._poll(LOOK_MS)

    def _poll(self, timeout_ms: int) -> None:
        poller = select.poll()
        for other in self.others:
            if not other.child.channel.ended:
                poller.register(other.child.channel, select.POLLIN)
        poller.poll(timeout_ms)

    @property
    def loss(self) -> str | None:
        """Which rank has ended, and how. No step can be computed after that."""
        lost = next((other for other in _lost(self.others) if other.child.how is not None), None)
        return None if lost is None else str(lost.end)

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
            step.moves.data = self._blocks.loaded(other.part, plan[0].loads)
            other.child.send(encode(step), waits=True)

    def end_forward(self, num_samples: int) -> None:
        message = encode(EndForward(num_samples))
        for other in self.others[: self._num_partners]:
            other.child.send(message, waits=True)

    def overwrite(self, blocks: Sequence[int]) -> None:
        self._tell(encode(Overwrite(list(blocks))))

    def kill(self) -> None:
        for other in self.others:
            other.child.kill()

    def _tell(self, message: bytes) -> None:
        for other in self.others:
            other.child.send(message, waits=True)

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
            for message in other.receive():
                if isinstance(message, Moved):
                    if message.saves and self._blocks is not None and self.loss is None:  # after it they may be others'
                        saves = [Save(*save) for save in message.saves]
                        self._blocks.put(other.part, saves, message.data)
                    found.append(Transferred(message.ticket, message.is_load, message.succeeded))
        return found

    def wait(self, timeout_s: float) -> None:
        self._poll(int(timeout_s * 1000))
        self.check()


def end_hung(others: Sequence[OtherRank], why: str) -> None:
    """In any thread: end ranks each of which may wait for another one for ever."""
    for other in others:
        other.child.show()
    time.sleep(SHOW_S)
    for other in others:
        other.child.kill(why)


def _lost(others: Sequence[OtherRank]) -> list[OtherRank]:
    """Those that have ended, or could not start; first those that have not ended because another one had."""
    found = [other for other in others if other.child.how is not None or other.child.is_loading]
    for other in found:
        other.look()
    found = [other for other in found if other.child.how is not None or other.error is not None]
    return sorted(found, key=lambda other: other.has_followed)
