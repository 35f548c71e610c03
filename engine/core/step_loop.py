"""The one loop that steps an engine, in a thread of its own: it answers the inbox, steps, and tells who waits.

It alone touches scheduler, runner, outputs and the pool of HBM; all others ask through `call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import ParamSpec, TypeVar

from kvstore.engine.core.inbox import Inbox
from kvstore.engine.core.kv_cache_manager import Erasure
from kvstore.engine.core.output_processor import Handle, OutputProcessor, Totals, tell
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.core.steps import Runner, StepResult, Steps
from kvstore.errors import KVStoreError

P = ParamSpec("P")
T = TypeVar("T")
IDLE_WAIT_S = 0.02
REST_AFTER_S = 0.003  # without work: other engines of this process may have some


class Watch:
    """Who wants to know whether the loop hangs; this one does not."""

    def begin(self) -> None:
        """A round begins."""

    def rest(self) -> None:
        """What follows is waiting, which may take any time."""


class StepLoop:
    """Owns what a step needs, and is all that its thread keeps alive. Without `start` its rounds can be run by hand."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, outputs: OutputProcessor, runs_ahead: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.outputs = outputs
        self.connector = scheduler.connector
        self.pool = scheduler.manager.pool
        self.erasure = Erasure(self.pool, runner.overwrite)
        self.inbox = Inbox()
        self.watch = Watch()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self._totals = Totals()
        self.steps = Steps(scheduler, runner, runs_ahead)
        self._touched: list[Handle] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self.inbox) > 0

    @property
    def is_here(self) -> bool:
        """Whether its own thread asks, which must not wait for itself."""
        return threading.current_thread() is self._thread

    # -- its thread --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when the thread is ready to step. Raises what keeps it from being so."""
        self._thread.start()
        self.call(self.runner.prepare)

    def stop(self) -> None:
        """Let a running step end, answer what was asked, and end all requests as aborted. It can be repeated."""
        self.inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, called between two steps. Raises as it does, and as `Inbox.put`."""
        return self.inbox.put(function, *args, **kwargs).result()

    def _run(self) -> None:
        error: KVStoreError | None = KVStoreError("the thread that steps the engine has ended")
        try:
            while not self.inbox.closed:
                self.round()
                if not self.scheduler.has_work:
                    self.watch.rest()
                    if not self.inbox.wait(REST_AFTER_S):
                        self.runner.rest()
                        self.inbox.wait()
            error = None
        finally:  # whatever ended it, nobody may wait for it
            self.inbox.close()
            self.inbox.answer()
            self._end_all(error)
            self._deliver()
            self.watch.rest()

    def round(self) -> list[Handle]:
        """Answer what was asked, and run one step if there is work. Returns the handles that got something new."""
        self.watch.begin()
        self.inbox.answer()
        is_stalled = False
        if self.scheduler.has_work:
            with suppress(Exception):  # it has ended every request, whose caller is told
                is_stalled = not self._step()
        touched = self._deliver()
        if is_stalled:  # every request waits for blocks from a slower tier
            self.connector.wait_for_progress(IDLE_WAIT_S)
        return touched

    def _deliver(self) -> list[Handle]:
        touched = list({id(handle): handle for handle in self._touched}.values())
        self._touched = []
        tell(touched)
        return touched

    # -- a step ------------------------------------------------------------------------------------------------------
    def _step(self) -> bool:
        """Whether anything could be scheduled. An error ends all that run."""
        with self._ending_all_on_error(), self.runner.working():
            has_computed = self.steps.step(self._update)
            self.erasure.go_on()
        return has_computed or not self.scheduler.has_work

    def _update(self, output: SchedulerOutput, result: StepResult) -> None:
        failed_blocks = self.connector.get_finished()
        for progress in self.scheduler.update(output, result.token_ids, failed_blocks):
            request = progress.request
            logprobs = result.logprobs.get(progress.scheduled)
            logprob = None if logprobs is None else logprobs[progress.sample]
            handle, stopped = self.outputs.process(request, progress.token_id, logprob)
            if stopped:
                self.scheduler.roster.finish(request.request_id, "stop", request.stop_reason)
            if handle is not None:
                self._touched.append(handle)
                if handle.done:
                    self._totals.add(handle.output.usage)

    @contextmanager
    def _ending_all_on_error(self) -> Iterator[None]:
        """An error in here may have torn any count: every request ends and all state begins anew."""
        try:
            yield
        except Exception as error:
            self._end_all(error)
            raise

    def _end_all(self, error: Exception | None) -> None:
        ended = self.outputs.handles()
        for handle in ended:
            self.outputs.abort(handle, error)
        self._totals.num_aborted += len(ended)
        self._touched += ended
        self.connector.step_failed()
        self.steps.drop()
        self.scheduler.roster.reset("abort")
        self.runner.reset()

    # -- what is asked of it, through `call` or the inbox ------------------------------------------------------------
    def add(self, prompts: Sequence[tuple[Handle, list[Request]]]) -> None:
        """Queue prompts, each with its choices. An error is told to all of them."""
        try:
            with self._ending_all_on_error():
                for handle, choices in prompts:
                    self.outputs.add(handle, choices)
                    self.scheduler.roster.add(choices[0])
        except Exception as error:
            for handle, _ in prompts:
                if not handle.done:
                    handle.fail(error)
                    handle.done = True
                    self._touched.append(handle)

    def abort(self, handle: Handle, index: int | None = None, reason: str = "abort") -> None:
        """End a request or one choice of it, and give its blocks back."""
        if handle.done:
            return
        with self._ending_all_on_error():
            ended = self.outputs.abort(handle, None, index, reason)
            if reason == "abort":
                self._totals.num_aborted += bool(ended)
            elif not self.outputs.is_running(handle):
                self._totals.add(handle.output.usage)
            self._touched.append(handle)
            for request_id in ended:
                self.scheduler.roster.finish(request_id, reason)
            self.erasure.go_on()

    def stats(self, of_hbm: Mapping[str, object]) -> dict[str, object]:
        """Counters and gauges of requests, HBM and steps, and the connector's. of_hbm: what else is said of HBM."""
        scheduler, pool = self.scheduler, self.pool
        return {
            "requests": {
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "finished": self._totals.num_requests,
                "aborted": self._totals.num_aborted,
                "preemptions": scheduler.roster.num_preemptions,
            },
            "tokens": self._totals.as_dict(),
            "hbm": {
                "blocks": pool.num_blocks,
                "free_blocks": pool.num_free,
                "cached_blocks": pool.num_cached,
                "evicted_blocks": pool.num_evictions,
                "removed_blocks": pool.num_forgotten,
                **of_hbm,
            },
            "step": asdict(self.runner.times),
            **self.connector.stats(),
        }

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        self.scheduler.roster.check_integrity()
        self.connector.upkeep.check_integrity(idle=not self.scheduler.has_work)
