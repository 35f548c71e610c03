"""The one loop that steps an engine, in a thread of its own: it serves the inbox, steps, and hands out what is new.

Only this thread touches scheduler, runner, news and the pool of HBM; all others use `call`.

Each step is scheduled, launched and read. If a launch returns before the device has computed, the next step is launched
before the tokens of the last one are read, so that the device goes on without a pause. A request that turns out to have
ended computes one token in vain, which is dropped. Its blocks may be given to others at once, because the device runs
steps in their order. In a pipeline, steps of different requests are in flight at once: while later stages compute one,
the first computes the next. Stages, too, run steps in their order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from kvstore.engine.core.kv_cache_manager import Erasure
from kvstore.engine.core.request import News, Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.outputs import TokenLogprob
from kvstore.errors import EngineClosedError, KVStoreError, RequestError, StoreError
from kvstore.store.seam import Prefilled

P = ParamSpec("P")
T = TypeVar("T")
IDLE_WAIT_S = 0.02
REST_AFTER_S = 0.003  # after so long without work the runner rests, and other engines of this process may run


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

    def overwrite(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite these HBM blocks, and slots of states or windows."""

    def rest(self) -> None:
        """No step is expected for a while."""

    def reset(self) -> None:
        """Empty the batch after an error."""

    def close(self) -> None:
        """Release all KV; no further step comes."""


class Steps:
    """Launches steps, and reads them in their order. The last `depth` - 1 may be unread when the next one is scheduled:
    none; one, if a launch returns before the device has computed; in a pipeline one for each other stage.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, runs_ahead: bool = False) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._num_stages = scheduler.config.steps_in_flight
        self.depth = max(self._num_stages, 1 + runs_ahead)
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # the oldest first

    def step(self, take_in: TakeIn) -> bool:
        """Launch a step if one can be scheduled, and hand results to `take_in`. Returns whether there was work."""
        while self._in_flight and not self._may_launch():
            self._read(take_in)
        started = time.perf_counter()
        output = self._scheduler.schedule()
        self._runner.times.schedule_s += time.perf_counter() - started
        launched, has_unread = self._runner.launch(output), bool(self._in_flight)
        if output.scheduled or not has_unread:
            self._in_flight.append((output, launched))
        if not output.scheduled:  # what is read may make room
            self._read(take_in)
        while len(self._in_flight) >= self.depth:
            self._read(take_in)
        return bool(output.scheduled) or has_unread

    def drop(self) -> None:
        """Drop the steps in flight, after an error."""
        self._in_flight.clear()

    def _read(self, take_in: TakeIn) -> None:
        output, launched = self._in_flight.popleft()
        result, started = self._runner.read(launched), time.perf_counter()
        for request_id in result.undrawn:
            self._scheduler.compute_again(request_id)
        take_in(output, result)
        self._runner.times.update_s += time.perf_counter() - started

    def _may_launch(self) -> bool:
        """Not behind loads, which may fail: then their requests lose what they have computed."""
        if any(output.plan is not None and output.plan.loads for output, _ in self._in_flight):
            return False
        return _leaves_all_running(self._scheduler) if self._num_stages > 1 else _goes_on(self._scheduler)


def _goes_on(scheduler: Scheduler) -> bool:
    """Whether all running requests go on with one token each: none starts, is preempted or returns."""
    running = scheduler.roster.tenants.running()
    if scheduler.num_waiting or scheduler.manager.num_free < len(running):
        return False  # each needs at most one block
    return all(map(_is_decoding, running)) and not all(request.is_answered for request in running)


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
    return scheduler.manager.num_free >= most + 2 * len(running)  # a block that is begun, and one that is copied


def _is_decoding(request: Request) -> bool:
    left = request.num_tokens - request.num_computed_tokens
    return left == 1 and request.ask_at is None and not (request.reads_at_once or request.children)


class Inbox:
    """Any thread puts functions in, and one thread calls them. closed: no more are accepted."""

    def __init__(self) -> None:
        self.closed = False
        self._changed = threading.Condition()
        self._asked: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Add a function; never waits.

        The future gets what it returns or raises. Raises EngineClosedError, and StoreError in a forked child, which
        lacks the thread that would call it.
        """
        if os.getpid() != self._pid:
            raise StoreError("the engine was opened before this process was forked; open it again here")
        future: Future[T] = Future()
        with self._changed:
            if self.closed:
                raise EngineClosedError("the engine is closed")
            self._asked.append((future, partial(function, *args, **kwargs)))
            self._changed.notify()
        return future

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something is in it, it is closed, or this time is over. Returns True unless the time is over."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._asked or self.closed, timeout_s))

    def answer(self) -> None:
        """Call all functions that are in it."""
        while self._asked:
            future, function = self._asked.popleft()
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self) -> None:
        """Accept no more; what is in it must still be called."""
        with self._changed:
            self.closed = True
            self._changed.notify()


class StepLoop:
    """Owns what a step needs; its thread keeps nothing else alive. Without `start`, rounds can be run by hand."""

    def __init__(self, scheduler: Scheduler, runner: Runner, runs_ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.news = News()
        self.on_news: Callable[[], None] = lambda: None  # called in its thread while something is in `news`
        self.connector = scheduler.connector
        self.pool = scheduler.manager.pool
        self.erasure = Erasure(scheduler.manager, runner.overwrite)
        self.inbox = Inbox()
        self.on_round: Callable[[], None] = lambda: None  # called in its thread when a round begins
        self.on_rest: Callable[[], None] = lambda: None  # the same when it waits, which may take any time
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self.steps = Steps(scheduler, runner, runs_ahead)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self.inbox) > 0

    @property
    def is_here(self) -> bool:
        """Whether the caller is its own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    # -- its thread --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the thread. Returns when it is ready to step; raises the error that prevented that."""
        self._thread.start()
        self.call(self.runner.prepare)

    def stop(self) -> None:
        """Let a running step end, serve the inbox, and end all requests as aborted. May be called again."""
        self.inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function between two steps and return its result. Raises what it raises, and as `Inbox.put`."""
        return self.inbox.put(function, *args, **kwargs).result()

    def _run(self) -> None:
        error: KVStoreError | None = KVStoreError("the thread that steps the engine has ended")
        try:
            while not self.inbox.closed:
                self.round()
                if not self.scheduler.has_work:
                    self.on_rest()
                    if not self.inbox.wait(REST_AFTER_S):
                        self.runner.rest()
                        self.inbox.wait()
            error = None
        finally:  # however the thread ended, nobody may wait for an answer
            self.inbox.close()
            self.inbox.answer()
            self._end_all(error)
            self.deliver()
            self.on_rest()

    def round(self) -> None:
        """Serve the inbox, and run one step if there is work."""
        self.on_round()
        self.inbox.answer()
        self.deliver()
        is_stalled = False
        if self.scheduler.has_work:
            with suppress(Exception):  # every request has ended with it, and its caller knows
                is_stalled = not self._step()
        self.deliver()
        if is_stalled:  # every request waits for blocks from a slower tier
            self.connector.wait_for_progress(IDLE_WAIT_S)

    def deliver(self) -> None:
        if self.news:
            self.on_news()

    # -- a step ------------------------------------------------------------------------------------------------------
    def _step(self) -> bool:
        """Run one step. Returns whether anything could be scheduled. An error ends all running requests."""
        with self._ending_all_on_error(), self.runner.working():
            has_computed = self.steps.step(self._update)
            self.erasure.go_on()
        return has_computed or not self.scheduler.has_work

    def _update(self, output: SchedulerOutput, result: StepResult) -> None:
        failed_blocks = self.connector.get_finished(result.prefilled)
        for progress in self.scheduler.update(output, result.token_ids, failed_blocks, result.logprobs):
            request = progress.request
            logprobs = result.logprobs.get(progress.scheduled)
            logprob = None if logprobs is None else logprobs[progress.sample]
            if request.matcher is not None and request.matcher.is_error():
                wanted, (why, *_) = request.params.structured_outputs, request.matcher.get_error().splitlines()
                param = "structured_outputs" if wanted is None else wanted.param
                why = f"{param} became too complex for this answer: {why[:200]}"
                self._fail(request.prompt_id, RequestError(why, param))
            else:
                self.news.say(request, progress.token_id, logprob)

    def _fail(self, prompt_id: str, error: Exception) -> None:
        """End a prompt with an error of its own."""
        for request_id in self.news.end(prompt_id, error=error):
            self.scheduler.roster.finish(request_id, "abort")

    @contextmanager
    def _ending_all_on_error(self) -> Iterator[None]:
        """An error in this context may leave any count wrong, so every request ends and all state is reset."""
        try:
            yield
        except Exception as error:
            self._end_all(error)
            raise

    def _end_all(self, error: Exception | None) -> None:
        for prompt_id in self.news.running:
            self.news.end(prompt_id, error=error)
        self.connector.step_failed()
        self.steps.drop()
        self.scheduler.roster.reset("abort")
        self.runner.reset()

    # -- for callers, through `call` or the inbox -------------------------------------------------------------------
    def add(self, prompts: Sequence[Request]) -> None:
        """Queue prompts, each by its first choice; those with a grammar wait for `admit`. An error ends all of them."""
        with suppress(Exception), self._ending_all_on_error():
            for first in prompts:
                self.news.add(first)
            for first in prompts:
                if first.params.structured_outputs is None:
                    self.scheduler.roster.add(first)

    def admit(self, first: Request, error: Exception | None) -> None:
        """Queue a prompt whose grammar is compiled, or end it with why it is not. It may have ended meanwhile."""
        if error is not None:
            self._fail(first.request_id, error)
        elif first.request_id in self.news.running:
            with suppress(Exception), self._ending_all_on_error():
                self.scheduler.roster.add(first)

    def end(self, prompt_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        """End a prompt or one choice of it, and give its blocks back: at a stop string, or as aborted."""
        reason = "abort" if stop_string is None else "stop"
        with self._ending_all_on_error():
            for request_id in self.news.end(prompt_id, index, reason):
                self.scheduler.roster.finish(request_id, reason, stop_string)
            self.erasure.go_on()

    def stats(self, of_hbm: Mapping[str, object]) -> dict[str, object]:
        """Counters and gauges of requests, HBM, steps and the connector. of_hbm: further entries of HBM."""
        scheduler, pool, windows = self.scheduler, self.pool, self.scheduler.manager.windows
        return {
            "requests": {
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "finished": self.news.num_requests,
                "aborted": self.news.num_aborted,
                "preemptions": scheduler.roster.num_preemptions,
            },
            "tokens": self.news.tokens(),
            "hbm": {
                "blocks": pool.num_blocks,
                "free_blocks": pool.num_free,
                "cached_blocks": pool.num_cached,
                "evicted_blocks": pool.num_evictions,
                "removed_blocks": pool.num_forgotten,
                **({} if windows is None else windows.stats()),
                **of_hbm,
            },
            "step": asdict(self.runner.times),
            **self.connector.upkeep.stats(),
        }

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        self.scheduler.roster.check_integrity()
        self.connector.upkeep.check_integrity(idle=not self.scheduler.has_work)
