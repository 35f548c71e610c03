"""The one loop that steps an engine, in a thread of its own: it serves the inbox, steps, and hands out what is new.

Only this thread touches scheduler, runner, news and the pool of HBM; all others use `call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import ParamSpec, TypeVar

from kvstore.engine.core.inbox import Inbox
from kvstore.engine.core.kv_cache_manager import Erasure
from kvstore.engine.core.news import News
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.core.steps import PipelinedSteps, Runner, StepResult, Steps
from kvstore.errors import KVStoreError, RequestError

P = ParamSpec("P")
T = TypeVar("T")
IDLE_WAIT_S = 0.02
REST_AFTER_S = 0.003  # after so long without work the runner rests, and other engines of this process may run


class Watch:
    """Watches whether the loop hangs. This class does nothing."""

    def begin(self) -> None:
        """A round begins."""

    def rest(self) -> None:
        """The loop waits now, which may take any time."""


class StepLoop:
    """Owns what a step needs; its thread keeps nothing else alive. Without `start`, rounds can be run by hand."""

    def __init__(self, scheduler: Scheduler, runner: Runner, runs_ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.news = News()
        self.on_news: Callable[[], None] = lambda: None  # called in its thread while something is in `news`
        self.connector = scheduler.connector
        self.pool = scheduler.manager.pool
        self.erasure = Erasure(self.pool, runner.overwrite)
        self.inbox = Inbox()
        self.watch = Watch()
        self._thread = threading.Thread(target=self._run, name="kvstore-engine", daemon=True)
        self.steps: Steps | PipelinedSteps = Steps(scheduler, runner, runs_ahead)
        if scheduler.config.steps_in_flight > 1:
            self.steps = PipelinedSteps(scheduler, runner)

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
                    self.watch.rest()
                    if not self.inbox.wait(REST_AFTER_S):
                        self.runner.rest()
                        self.inbox.wait()
            error = None
        finally:  # however the thread ended, nobody may wait for an answer
            self.inbox.close()
            self.inbox.answer()
            self._end_all(error)
            self.deliver()
            self.watch.rest()

    def round(self) -> None:
        """Serve the inbox, and run one step if there is work."""
        self.watch.begin()
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
        for progress in self.scheduler.update(output, result.token_ids, failed_blocks):
            request = progress.request
            logprobs = result.logprobs.get(progress.scheduled)
            logprob = None if logprobs is None else logprobs[progress.sample]
            if request.matcher is not None and request.matcher.is_error():
                why = f"structured_outputs became too complex for this answer: {request.matcher.get_error()[:200]}"
                self._fail(request.prompt_id, RequestError(why, "structured_outputs"))
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
        scheduler, pool = self.scheduler, self.pool
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
                **of_hbm,
            },
            "step": asdict(self.runner.times),
            **self.connector.upkeep.stats(),
        }

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        self.scheduler.roster.check_integrity()
        self.connector.upkeep.check_integrity(idle=not self.scheduler.has_work)
