"""The front's hold on the engine's process: starts, watches, restarts and closes it, and knows its requests.

A thread starts the process and waits for its end. Knows no text beyond `RemoteOutputs`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from kvstore.engine.core.output_processor import tell
from kvstore.engine.process.life import CoreProcess
from kvstore.engine.process.outputs import RemoteOutputs
from kvstore.engine.process.readiness import Readiness
from kvstore.engine.process.restarts import Restarts
from kvstore.engine.process.wire import SIGNATURES, End, Hello, Update, encode
from kvstore.errors import EngineClosedError, EngineDiedError, EngineOverloadedError, KVStoreError

State = Literal["starting", "running", "restarting", "failed", "closed"]
POLL_S = 1.0
LOGGER = logging.getLogger("kvstore.engine")
WATCH, READ = "kvstore-core-watch", "kvstore-core-read"


class Link:
    """Any thread may use it. Nobody waits for the process while holding the lock of `changed`.

    start: starts a process. max_restarts: how often, within an hour. started: done when the engine is ready; has the
    error if it could not be opened.
    """

    def __init__(self, start: Callable[[], CoreProcess], max_restarts: int) -> None:
        self._start = start
        self.changed = threading.Condition()  # a request has ended, or the state has changed
        self.state: State = "starting"
        self.restarts = Restarts(max_restarts)
        self.outputs = RemoteOutputs()
        self.hello: Hello  # of the process that runs, or ran last
        self._life: CoreProcess | None = None
        self._owner = os.getpid()
        self.readiness = Readiness()
        self.reader: threading.Thread | None = None  # the thread that reads the process' messages
        self.started: Future[None] = Future()
        self._watcher = threading.Thread(target=self._watch, name=WATCH, daemon=True)
        self._watcher.start()

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
                    self.outputs.end_all(EngineDiedError(f"the engine's process ended ({how})"))
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
            hello = life.greeted(lambda: not self.is_over)
            with self.changed:
                if self.is_over:
                    raise EngineClosedError("the engine is closed")
                life.watch_with(self.readiness.selector)
                self._life, self.hello, self.state = life, hello, "running"
                self.changed.notify_all()
        except Exception:
            life.kill()
            raise
        return life

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
            self.outputs.end_all(None)
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
    def check_open(self) -> CoreProcess:
        """The running process. Raises EngineClosedError or EngineDiedError."""
        with self.changed:
            if self.state == "closed":
                raise EngineClosedError("the engine is closed")
            if self._life is None:
                again = "and is being started again; try again"
                following = again if self.state == "restarting" else "too often and stays down; restart the server"
                raise EngineDiedError(f"the engine's process ended ({self.restarts.why}) {following}")
            return self._life

    def call(self, verb: str, *arguments: object) -> Any:
        """Call a verb of the core and return its result. Raises what it raises, EngineDiedError, and
        EngineOverloadedError.
        """
        with self.changed:
            life = self.check_open()
            self.read()
        answer = life.ask(verb, arguments)
        while self.reader is threading.current_thread() and not answer.done():  # nobody else would read it
            self.readiness.wait(POLL_S)
            self.receive()
        return SIGNATURES[verb].decode_result(answer.result())

    def end_request(self, request_id: str, index: int | None, reason: str) -> None:
        """End a request. Call it with the lock. A process that does not accept this is gone, or stuck and killed."""
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
        """Start a reading thread unless somebody reads. Call it with the lock, before a first request or call."""
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name=READ, daemon=True)
            self.reader.start()

    def fileno(self) -> int:
        """A descriptor, always the same, that is readable when there is something to `receive`."""
        return self.readiness.fileno()

    def read_here(self) -> None:
        """From now on only this thread calls `receive`; it must not wait for the engine in any other way."""
        with self.changed:
            before, self.reader = self.reader, threading.current_thread()
        if before is not None and before.name == READ:
            self.readiness.wake()
            before.join()

    def _read(self) -> None:
        while self.reader is threading.current_thread() and (not self.is_over or self.outputs.untold):
            self.readiness.wait(POLL_S)
            self.receive()

    def receive(self) -> None:
        """Read what has come, and notify listeners. One thread at a time; never waits."""
        self.readiness.drain()
        with self.changed:
            touched = {id(handle): handle for handle in self.outputs.take_untold()}
            for update in self._received():
                try:
                    handle, stopped = self.outputs.apply(update)
                except Exception as error:  # our bug: it ends this request, not others
                    LOGGER.exception("an update could not be taken in")
                    handle, stopped = self.outputs.end(update.request_id, error), ()
                    self.end_request(update.request_id, None, "abort")
                if handle is not None:
                    touched[id(handle)] = handle
                for index in stopped:
                    self.end_request(update.request_id, index, "stop")
            if touched:
                self.changed.notify_all()
        tell(touched.values())

    def _received(self) -> list[Update]:
        """Received messages. A process whose messages cannot be decoded is killed, with what runs there."""
        if (life := self._life) is None:
            return []
        try:
            return [update for updates in life.receive() for update in updates.updates]
        except Exception:
            LOGGER.exception("the engine's process cannot be understood; it is ended")
            life.stop()
            return []
