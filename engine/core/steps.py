"""The order of steps: each is scheduled, launched and read. Knows scheduler and runner, no caller.

Where a launch returns before the device has computed, the next step is launched before the tokens of the last one are
read, so that the device goes on without a pause. Who turns out to have ended with them computes one token for nothing,
which is dropped. Its blocks may be given to others at once: the device takes steps in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.outputs import TokenLogprob


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per scheduled request, in order: its sampled tokens (none, one, or n) and, where asked, their logprobs.

    undrawn: requests whose token could not be drawn, since the logits were given up for the next step.
    """

    token_ids: list[Sequence[int]]
    logprobs: dict[int, list[TokenLogprob | None]]  # index in `scheduled` -> one per sampled token
    undrawn: tuple[str, ...] = ()


@dataclass(slots=True)
class StepTimes:
    """Running totals in seconds, and how often; where a step's time goes.

    num_graphs: CUDA graphs that were captured; num_replays: steps that replayed one. On CUDA the forward's time is that
    of its launch, and sampling waits for it.
    """

    num_steps: int = 0
    num_graphs: int = 0
    num_replays: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0


TakeIn = Callable[[SchedulerOutput, StepResult], None]  # what was launched, and what was read of it


class Runner(Protocol):
    """The model, as the loop that steps knows it: computes steps in the order of their launches, all in one thread."""

    times: StepTimes

    def launch(self, output: SchedulerOutput) -> Any:
        """Returns what is to be read, maybe before it is computed."""

    def read(self, launched: Any) -> StepResult:
        """Waits for a step's samples."""

    def prepare(self) -> None:
        """Before the first step."""

    def working(self) -> AbstractContextManager[None]:
        """In here a step may run: what has to be alone in the process waits."""

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Nothing that stood in these HBM blocks is left."""

    def rest(self) -> None:
        """No step is expected for a while."""

    def reset(self) -> None:
        """After an error: no request is in the batch any more."""

    def close(self) -> None:
        """No step comes any more: all KV is given up."""


class Steps:
    """runs_ahead: False reads each step at once."""

    def __init__(self, scheduler: Scheduler, runner: Runner, runs_ahead: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.runs_ahead = runs_ahead
        self._in_flight: tuple[SchedulerOutput, Any] | None = None  # the last step, until it is read

    def step(self, take_in: TakeIn) -> bool:
        """Launch one step, and read it, or the one before, for `take_in`. Whether there was something to compute."""
        if not self._may_run_ahead():
            self._read(take_in)
        started = time.perf_counter()
        output = self._scheduler.schedule()
        self._runner.times.schedule_s += time.perf_counter() - started
        launched = self._runner.launch(output)
        self._read(take_in)
        self._in_flight = (output, launched)
        if not self.runs_ahead or not output.scheduled:
            self._read(take_in)
        return bool(output.scheduled)

    def drop(self) -> None:
        """After an error: what is in flight is of no use to anybody."""
        self._in_flight = None

    def _read(self, take_in: TakeIn) -> None:
        if self._in_flight is None:
            return
        (output, launched), self._in_flight = self._in_flight, None
        result, started = self._runner.read(launched), time.perf_counter()
        for request_id in result.undrawn:
            self._scheduler.compute_again(request_id)
        take_in(output, result)
        self._runner.times.update_s += time.perf_counter() - started

    def _may_run_ahead(self) -> bool:
        """Where all that run go on with one token each: nobody starts, is preempted or comes back, nothing fails."""
        if self._in_flight is None:
            return False
        plan, running = self._in_flight[0].plan, self._scheduler.roster.tenants.running()
        if self._scheduler.num_waiting or self._scheduler.manager.pool.num_free < len(running):
            return False  # each needs a block at most
        if plan is not None and plan.loads:
            return False
        return all(map(_is_decoding, running)) and not all(request.is_answered for request in running)


def _is_decoding(request: Request) -> bool:
    left = request.num_tokens - request.num_computed_tokens
    return left == 1 and request.ask_at is None and not (request.reads_at_once or request.children)
