"""The front's hold on the engine's process: started, watched, started again, closed; and the requests in it.

A thread starts the process and waits for its end. Knows no text beyond `RemoteOutputs`.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

from kvstore.engine.core.output_processor import Handle, tell
from kvstore.engine.process.life import CoreProcess
from kvstore.engine.process.outputs import RemoteOutputs
from kvstore.engine.process.wire import SIGNATURES, End, Hello, Update, encode
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError, KVStoreError

State = Literal["starting", "running", "restarting", "failed", "closed"]
RESTART_WINDOW_S = 3600.0  # in which only so many restarts are tried
MAX_DELAY_S = 60.0  # before a restart; the first comes at once, then it doubles from a second
POLL_S = 1.0
LOGGER = logging.getLogger("kvstore.engine")
WATCH, READ = "kvstore-core-watch", "kvstore-core-read"


class Link:
    """state: of the engine. What is said in `lock` is for all threads; nobody waits for the process in it.

    store: of which each process gets a share, see `wire.Start`.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        store: tuple[str, int, int] | None,
        shutdown_s: float,
        silence_s: float,
        max_restarts: int,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # something has ended, or the state is another
        self.state: State = "starting"
        self.num_restarts = 0
        self.outputs = RemoteOutputs()
        self.undelivered: list[Handle] = []  # ended without the engine's doing; to be told with the next
        self.hello: Hello
        self._arguments = arguments
        self._store = store
        self._shutdown_s = shutdown_s
        self._silence_s = silence_s
        self._max_restarts = max_restarts
        self._owner = os.getpid()
        self._life: CoreProcess | None = None
        self._over = False  # closed; a state of "failed" stays
        self._ends_s: deque[float] = deque()  # of processes and of tries to start one, within RESTART_WINDOW_S
        self._why, self._delay_s = "", 0.0
        self.reader: threading.Thread | None = None  # who takes in what the process says
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._is_woken = False
        self.selector = selectors.DefaultSelector()  # ready when there is something to take in, whatever process lives
        self.selector.register(self._woken, selectors.EVENT_READ)
        weakref.finalize(self, _close_all, self.selector, self._woken, self._wake)
        self.started: Future[None] = Future()  # or what kept the engine from being opened
        self._thread = threading.Thread(target=self._watch, name=WATCH, daemon=True)
        self._thread.start()

    # -- the process -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """The parent of every process in turn: as long as this thread lives, so do they."""
        try:
            life: CoreProcess | None = self._begin()
        except Exception as error:
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        while life is not None:
            how = life.wait()
            with self.changed:
                if not self._over:  # what ran ends with an error
                    self._life = None
                    self._note_end(how)
                    self.undelivered += self.outputs.end_all(EngineDiedError(f"the engine's process ended ({how})"))
            self.wake()  # whoever waits for updates hands out these ends instead
            life.retire()
            self.wake()
            life = self._begun_again()

    def _begun_again(self) -> CoreProcess | None:
        """The next process, as soon as there is one; None when the engine is closed or has failed."""
        while True:
            with self.changed:
                if self.state == "restarting":
                    self.changed.wait_for(lambda: self._over, self._delay_s)
                if self.state != "restarting":
                    return None
            self.num_restarts += 1
            try:
                return self._begin()
            except Exception as error:  # also no memory or no descriptors for another process
                why = str(error) if isinstance(error, KVStoreError) else f"{type(error).__name__}: {error}"
                with self.changed:
                    if not self._over:
                        self._note_end(f"it could not be started: {why}")
                self.wake()

    def _begin(self) -> CoreProcess:
        life = CoreProcess(self._arguments, self._store, self._silence_s)
        try:
            hello = life.greeted(lambda: not self._over)
            with self.changed:
                if self._over:
                    raise EngineClosedError("the engine is closed")
                life.watch_with(self.selector)
                self._life, self.hello, self.state = life, hello, "running"
                self.changed.notify_all()
        except Exception:
            life.kill()
            raise
        return life

    def _note_end(self, how: str) -> None:
        """Decide whether there is to be another one."""
        now = time.monotonic()
        self._ends_s.append(now)
        while now - self._ends_s[0] > RESTART_WINDOW_S:
            self._ends_s.popleft()
        self._why, num_ends = how, len(self._ends_s)
        self._delay_s = min(2.0 ** (num_ends - 2), MAX_DELAY_S) if num_ends > 1 else 0.0
        if num_ends > self._max_restarts:
            self.state = "failed"
            following = f"it is not started again: the limit of restarts an hour is {self._max_restarts}"
        else:
            self.state = "restarting"
            following = f"it is started again in {self._delay_s:g} s, {num_ends} of {self._max_restarts} an hour"
        LOGGER.error("the engine's process ended (%s); %s", how, following)
        self.changed.notify_all()

    def close(self) -> None:
        """End running requests as aborted, close the engine in order and end its process. Nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with self.changed:
            if self._over:
                return
            self._over = True
            if self.state != "failed":
                self.state = "closed"
            life, self._life = self._life, None
            self.undelivered += self.outputs.end_all(None)
            self.changed.notify_all()
        self.wake()
        if life is not None:
            life.end(self._shutdown_s)
        for thread in (self._thread, self.reader):
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
    def check_open(self) -> CoreProcess:
        """The process, which was there a moment ago. Raises EngineClosedError or EngineDiedError."""
        with self.lock:
            if self.state == "closed":
                raise EngineClosedError("the engine is closed")
            if self._life is None:
                again = "and is being started again; try again"
                following = again if self.state == "restarting" else "too often and stays down; restart the server"
                raise EngineDiedError(f"the engine's process ended ({self._why}) {following}")
            return self._life

    def call(self, verb: str, *arguments: object) -> Any:
        """The result of a verb of the core. Raises as it does, EngineDiedError, and EngineOverloadedError."""
        with self.lock:
            life = self.check_open()
            self.read()
        answer = life.ask(verb, arguments)
        while self.reader is threading.current_thread() and not answer.done():  # who else would take it in?
            self.selector.select(POLL_S)
            self.receive()
        return SIGNATURES[verb].decode_result(answer.result())

    def end_request(self, request_id: str, index: int | None, reason: str) -> None:
        """To be called with the lock. One that cannot be told is gone, or stuck and killed for it."""
        if (life := self._life) is None:
            return
        try:
            life.send(encode(End(request_id, index, reason)))
        except EngineDiedError:
            pass  # its watcher will end the request
        except EngineOverloadedError:
            life.stop()

    # -- what comes from it ------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Take in what comes, in a thread of its own unless somebody does. To be called with the lock, before a first
        request or call.
        """
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name=READ, daemon=True)
            self.reader.start()

    def fileno(self) -> int:
        """A descriptor, the same all the time, that can be read when there is something to `receive`."""
        return self.selector.fileno()

    def read_here(self) -> None:
        """From now on this thread calls `receive`, and no other one, and waits for nothing else of the engine."""
        with self.lock:
            before, self.reader = self.reader, threading.current_thread()
        if before is not None and before.name == READ:
            self.wake()
            before.join()

    def _read(self) -> None:
        while self.reader is threading.current_thread() and (not self._over or self.undelivered):
            self.selector.select(POLL_S)
            self.receive()

    def receive(self) -> None:
        """Take in what has come, and tell who listens. By one thread at a time; never waits."""
        tell(self._taken_in())

    def _taken_in(self) -> list[Handle]:
        """The handles that got something new or have ended."""
        self._drain_wake()
        with self.changed:
            ended, self.undelivered = self.undelivered, []
            touched = {id(handle): handle for handle in ended}
            for update in self._received():
                try:
                    handle, stopped = self.outputs.apply(update)
                except Exception as error:  # a defect of ours: the end of this request, not of others
                    LOGGER.exception("an update could not be taken in")
                    handle, stopped = self.outputs.end(update.request_id, error), ()
                    self.end_request(update.request_id, None, "abort")
                if handle is not None:
                    touched[id(handle)] = handle
                for index in stopped:
                    self.end_request(update.request_id, index, "stop")
            if touched:
                self.changed.notify_all()
            return list(touched.values())

    def _received(self) -> list[Update]:
        """A process that cannot be understood is ended, and with it what runs there."""
        if (life := self._life) is None:
            return []
        try:
            return [update for updates in life.receive() for update in updates.updates]
        except Exception:
            LOGGER.exception("the engine's process cannot be understood; it is ended")
            life.stop()
            return []

    def wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, b"\0")
        self._is_woken = True  # after the writing: else what is drained in between is never drained again
        with self.changed:
            self.changed.notify_all()

    def _drain_wake(self) -> None:
        if not self._is_woken:
            return
        self._is_woken = False
        with suppress(BlockingIOError):
            while os.read(self._woken, 64):
                pass


def _close_all(selector: selectors.BaseSelector, *descriptors: int) -> None:
    selector.close()
    for descriptor in descriptors:
        os.close(descriptor)
