"""A core in a process of its own: starts, watches, restarts and closes it, and speaks with it.

A thread starts the process and waits for its end. So tokenizing, templates, the text of answers and HTTP do not share
an interpreter with the engine's steps.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from kvstore.engine.client.core import State
from kvstore.engine.client.life import CoreProcess
from kvstore.engine.client.messages import Call, End, Facts, ReadStats, Submit, decode_result, encode
from kvstore.engine.core.news import Ended, Update
from kvstore.engine.process.readiness import Readiness
from kvstore.engine.process.restarts import Restarts
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError, KVStoreError

R = TypeVar("R")
MAX_REQUESTS = 16384
POLL_S = 1.0
LOGGER = logging.getLogger("kvstore.engine")
WATCH, READ = "kvstore-core-watch", "kvstore-core-read"


class RemoteCore:
    """A `Core`. Nobody waits for the process while holding the lock of `changed`.

    start: starts a process. max_restarts: how often, within an hour. max_requests: in the process at once; this bounds
    what is queued between the two processes. facts: of the process that runs, or ran last. started: done when it is
    ready; has the error if it could not be opened.
    """

    def __init__(self, start: Callable[[], CoreProcess], max_restarts: int) -> None:
        self._start = start
        self.max_requests = MAX_REQUESTS
        self.changed = threading.Condition()  # the state has changed
        self.state: State = "starting"
        self.restarts = Restarts(max_restarts)
        self.facts: Facts
        self.on_news: Callable[[], None] = lambda: None
        self._running = set[str]()  # ids of requests
        self._lost = list[Update]()  # the ends of those that ended with their process
        self._life: CoreProcess | None = None
        self._owner = os.getpid()
        self.readiness = Readiness()
        self.reader: threading.Thread | None = None  # the thread that reads the process' messages
        self.started: Future[None] = Future()
        self._watcher = threading.Thread(target=self._watch, name=WATCH, daemon=True)
        self._watcher.start()

    @property
    def life(self) -> int:
        return self.restarts.num_restarts

    @property
    def num_requests(self) -> int:
        return len(self._running)

    @property
    def is_over(self) -> bool:
        """Whether no process runs any more, and none is started again."""
        return self.state in ("closed", "failed")

    # -- the process -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Start and watch one process after the other; they live only as long as this thread, their parent."""
        try:
            life: CoreProcess | None = self._begin()
        except Exception as error:
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        while life is not None:
            how = life.wait()
            with self.changed:
                if not self.is_over:
                    self._life = None
                    self._lose_all(EngineDiedError(f"the engine's process ended ({how})"))
                    self._note_end(how)  # behind that, or the reader could end before it has told them
            self.readiness.wake()  # the reader tells whoever waits for these requests
            life.retire()
            self.readiness.wake()
            life = self._begun_again()

    def _begun_again(self) -> CoreProcess | None:
        """Start the next process; None when the engine is closed or has failed."""
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: self.is_over, self.restarts.delay_s):
                    return None
            self.restarts.num_restarts += 1
            try:
                return self._begin()
            except Exception as error:  # also when memory or descriptors are lacking
                why = str(error) if isinstance(error, KVStoreError) else f"{type(error).__name__}: {error}"
                with self.changed:
                    if not self.is_over:
                        self._note_end(f"it could not be started: {why}")
                self.readiness.wake()

    def _begin(self) -> CoreProcess:
        life = self._start()
        try:
            facts = life.greeted(lambda: not self.is_over)
            with self.changed:
                if self.is_over:
                    raise EngineClosedError("the engine is closed")
                life.watch_with(self.readiness.selector)
                self._life, self.facts, self.state = life, facts, "running"
                self.changed.notify_all()
        except Exception:
            life.kill()
            raise
        return life

    def _lose_all(self, error: Exception | None) -> None:
        """All requests have ended, aborted or with this error. Call it with the lock."""
        self._lost += [Update(request_id, [], Ended(error=error)) for request_id in self._running]
        self._running.clear()

    def _note_end(self, how: str) -> None:
        """A process has ended, or could not be started. Call it with the lock."""
        self.state = "restarting" if self.restarts.note_end(how) else "failed"
        self.changed.notify_all()

    def close(self) -> None:
        """End running requests as aborted, close the engine in order and end its process. Nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self.changed:
            life, self._life = self._life, None
            self._lose_all(None)
            if not self.is_over:
                self.state = "closed"
            self.changed.notify_all()
        self.readiness.wake()
        if life is not None:
            life.end()
        for thread in (self._watcher, self.reader):
            if thread is not None and thread.name in (WATCH, READ) and thread is not threading.current_thread():
                thread.join()

    @property
    def pid(self) -> int | None:
        return None if (life := self._life) is None else life.pid

    @property
    def silent_s(self) -> float:
        """Seconds since the process gave a sign of life."""
        return 0.0 if (life := self._life) is None else life.pulse.silent_s

    # -- what is said to it ------------------------------------------------------------------------------------------
    def check_open(self) -> None:
        self._open_life()

    def _open_life(self) -> CoreProcess:
        """The running process. Raises EngineClosedError or EngineDiedError."""
        with self.changed:
            if self.state == "closed":
                raise EngineClosedError("the engine is closed")
            if self._life is None:
                again = "and is being started again; try again"
                following = again if self.state == "restarting" else "too often and stays down; restart the server"
                raise EngineDiedError(f"the engine's process ended ({self.restarts.why}) {following}")
            return self._life

    def submit(self, prompts: Sequence[Submit]) -> None:
        messages = [encode(prompt) for prompt in prompts]
        with self.changed:
            life = self._open_life()
            if len(self._running) + len(prompts) > self.max_requests:
                raise EngineOverloadedError(f"{self.max_requests} requests run or wait; try again")
            self.read()
            for prompt, message in zip(prompts, messages, strict=True):
                self._running.add(prompt.request_id)
                try:
                    life.send(message)
                except KVStoreError:
                    self._running.discard(prompt.request_id)
                    raise

    def end(self, request_id: str, index: int | None = None, stop_string: str | None = None) -> None:
        """A process that does not accept this is gone, or stuck and killed."""
        with self.changed:
            if (life := self._life) is None or request_id not in self._running:
                return
            try:
                life.send(encode(End(request_id, index, stop_string)))
            except EngineDiedError:
                pass  # its watcher will end the request
            except EngineOverloadedError:
                life.stop()

    def call(self, verb: Call[R]) -> R:
        with self.changed:
            life = self._open_life()
            self.read()
        answer = life.ask(verb)
        while self.is_reader and not answer.done():  # nobody else would read it
            self.readiness.wait(POLL_S)
            self.on_news()
        result = decode_result(verb, answer.result())
        return cast(R, {**cast(Any, result), "process": self.process}) if isinstance(verb, ReadStats) else result

    @property
    def process(self) -> dict[str, object]:
        """The counters of its process."""
        return {"state": self.state, "pid": self.pid, "restarts": self.life, "requests": self.num_requests}

    # -- what comes from it ------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Start a reading thread unless somebody reads. Call it with the lock, before a first request or call."""
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name=READ, daemon=True)
            self.reader.start()

    def fileno(self) -> int:
        return self.readiness.fileno()

    def read_here(self) -> bool:
        with self.changed:
            before, self.reader = self.reader, threading.current_thread()
        if before is not None and before.name == READ:
            self.readiness.wake()
            before.join()
        return True

    @property
    def is_reader(self) -> bool:
        return self.reader is threading.current_thread()

    def _read(self) -> None:
        while self.is_reader and (not self.is_over or self._lost):
            self.readiness.wait(POLL_S)
            self.on_news()

    def take_news(self) -> list[Update]:
        """A process whose messages cannot be decoded is killed, with what runs there."""
        self.readiness.drain()
        with self.changed:
            updates, self._lost = self._lost, []
            if (life := self._life) is not None:
                try:
                    updates += life.receive()
                except Exception:
                    LOGGER.exception("the engine's process cannot be understood; it is ended")
                    life.stop()
            self._running.difference_update(update.request_id for update in updates if update.ended is not None)
        return updates
