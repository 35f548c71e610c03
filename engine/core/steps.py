"""The order of steps: each is scheduled, launched and read. Knows scheduler and runner, no caller.

If a launch returns before the device has computed, the next step is launched before the tokens of the last one are
read, so that the device goes on without a pause. A request that turns out to have ended computes one token in vain,
which is dropped. Its blocks may be given to others at once, because the device runs steps in their order.

In a pipeline, steps of different requests are in flight at once: while later stages compute one, the first computes the
next. Stages, too, run steps in their order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.outputs import TokenLogprob
from kvstore.store.seam import Prefilled


@dataclass(frozen=True, slots=True)
class StepResult:
    """For each scheduled request, in order: its sampled tokens (none, one, or n), and their logprobs if asked for."""

    token_ids: list[Sequence[int]]
    logprobs: dict[int, list[TokenLogprob | None]]  # index in `scheduled` -> one per sampled token
    undrawn: tuple[str, ...] = ()  # requests whose token could not be drawn: the next step reused the logits
    prefilled: Sequence[Prefilled] = ()  # steps that were timed since the previous result


@dataclass(slots=True)
class StepTimes:
    """Where a step's time goes: running totals in seconds, and counts.

    On CUDA, the time of the forward is the time of its launch, and sampling waits for the forward.
    """

    num_steps: int = 0
    num_graphs: int = 0  # CUDA graphs that were captured
    num_replays: int = 0  # steps that replayed one
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0


TakeIn = Callable[[SchedulerOutput, StepResult], None]  # the launched step and its result


class Runner(Protocol):
    """The model as the stepping loop knows it: computes steps in the order of their launches, all in one thread."""

    times: StepTimes

    def launch(self, output: SchedulerOutput) -> Any:
        """Launch a step. Returns the argument of `read`, possibly before the step is computed."""

    def read(self, launched: Any) -> StepResult:
        """Wait for a step's samples."""

    def prepare(self) -> None:
        """Get ready for the first step."""

    def working(self) -> AbstractContextManager[None]:
        """A step may run in this context."""

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Overwrite these HBM blocks."""

    def rest(self) -> None:
        """No step is expected for a while."""

    def reset(self) -> None:
        """Empty the batch after an error."""

    def close(self) -> None:
        """Release all KV; no further step comes."""


class Steps:
    """runs_ahead: False reads each step at once."""

    def __init__(self, scheduler: Scheduler, runner: Runner, runs_ahead: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.runs_ahead = runs_ahead
        self._in_flight: tuple[SchedulerOutput, Any] | None = None  # the last step, until it is read

    def step(self, take_in: TakeIn) -> bool:
        """Launch one step, and hand its result, or the previous one's, to `take_in`. Returns whether there was work."""
        if not self._may_run_ahead():
            self._read(take_in)
        output, launched = _launch(self._scheduler, self._runner)
        self._read(take_in)
        self._in_flight = (output, launched)
        if not self.runs_ahead or not output.scheduled:
            self._read(take_in)
        return bool(output.scheduled)

    def drop(self) -> None:
        """Drop the step in flight, after an error."""
        self._in_flight = None

    def _read(self, take_in: TakeIn) -> None:
        if self._in_flight is None:
            return
        (output, launched), self._in_flight = self._in_flight, None
        _read(self._scheduler, self._runner, output, launched, take_in)

    def _may_run_ahead(self) -> bool:
        """Whether all running requests go on with one token each: none starts, is preempted or returns, and nothing
        failed.
        """
        if self._in_flight is None:
            return False
        plan, running = self._in_flight[0].plan, self._scheduler.roster.tenants.running()
        if self._scheduler.num_waiting or self._scheduler.manager.pool.num_free < len(running):
            return False  # each needs at most one block
        if plan is not None and plan.loads:
            return False
        return all(map(_is_decoding, running)) and not all(request.is_answered for request in running)


class PipelinedSteps:
    """Steps of which as many are in flight as the scheduler says. A request is in one of them, unless its prompt takes
    several; these are computed in their order.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # the oldest first

    def step(self, take_in: TakeIn) -> bool:
        """Launch a step if one can be scheduled, else read the oldest. Returns whether there was work."""
        if len(self._in_flight) >= self._scheduler.config.steps_in_flight:
            self._read(take_in)
        while self._in_flight and not self._may_launch():
            self._read(take_in)
        output, launched = _launch(self._scheduler, self._runner)
        if output.scheduled:
            self._in_flight.append((output, launched))
            return True
        if not self._in_flight:
            return False
        self._read(take_in)
        return True

    def drop(self) -> None:
        """Drop the steps in flight, after an error."""
        self._in_flight.clear()

    def _may_launch(self) -> bool:
        """Not behind loads, which may fail: then their requests lose what they have computed."""
        has_loads = any(output.plan is not None and output.plan.loads for output, _ in self._in_flight)
        return not has_loads and _leaves_all_running(self._scheduler)

    def _read(self, take_in: TakeIn) -> None:
        _read(self._scheduler, self._runner, *self._in_flight.popleft(), take_in)


def _leaves_all_running(scheduler: Scheduler) -> bool:
    """Whether the next step leaves all running requests their places and blocks: their last step may be unread."""
    tenants, limits = scheduler.roster.tenants, scheduler.config
    running = tenants.running()
    if any(tenants.ahead_of(tenant) is not None for tenant in tenants.waiting()):
        return False
    if any(request.ask_at is not None for request in running):
        return False
    num_left = sum(request.num_tokens - request.num_computed_tokens for request in running)
    most = scheduler.manager.num_blocks(min(num_left, limits.max_num_batched_tokens))
    return scheduler.manager.pool.num_free >= most + 2 * len(running)  # a block that is begun, and one that is copied


def _launch(scheduler: Scheduler, runner: Runner) -> tuple[SchedulerOutput, Any]:
    started = time.perf_counter()
    output = scheduler.schedule()
    runner.times.schedule_s += time.perf_counter() - started
    return output, runner.launch(output)


def _read(scheduler: Scheduler, runner: Runner, output: SchedulerOutput, launched: Any, take_in: TakeIn) -> None:
    result, started = runner.read(launched), time.perf_counter()
    for request_id in result.undrawn:
        scheduler.compute_again(request_id)
    take_in(output, result)
    runner.times.update_s += time.perf_counter() - started


def _is_decoding(request: Request) -> bool:
    left = request.num_tokens - request.num_computed_tokens
    return left == 1 and request.ask_at is None and not (request.reads_at_once or request.children)
