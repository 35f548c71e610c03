"""One life of the core's process as its parent sees it: start, greeting, messages, end.

Knows sockets and the process; must not know requests and sessions.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from kvstore.engine.client import messages
from kvstore.engine.core.news import Update
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import SHOW, SHOW_S, Pulse
from kvstore.engine.process.spawn import spawned
from kvstore.engine.progress import begin
from kvstore.errors import EngineDiedError, EngineOverloadedError

SEND_LIMIT = 1 << 16  # unsent messages; a front's limit on requests keeps it far below
READY_POLL_MS = 50
END_POLL_MS = 10


class CoreProcess:
    """A process with a core, and the channel to it. Any thread may use it.

    The thread that makes it must outlive it, because Linux counts the thread that started a process as its parent.
    store: shared with the process, see `Start`. silence_s: the process is killed after so long without a sign of life.
    shutdown_s: how long `end` waits before it kills the process. settings: environment variables for it.
    """

    def __init__(
        self, arguments: dict[str, Any], store: tuple[str, int, int] | None, silence_s: float, shutdown_s: float,
        settings: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._shutdown_s = shutdown_s
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._retired = False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._selector: selectors.BaseSelector | None = None
        self._calls: dict[int, Future[msgspec.Raw]] = {}  # by number, until they are answered
        self._numbers = itertools.count()
        self._is_hung = False
        self.pulse = Pulse(silence_s, self._end_hung)
        start = messages.Start(os.getpid(), theirs.fileno(), self.pulse.writer, silence_s, store, arguments)
        with theirs:
            try:
                descriptors = (start.channel, start.pulse, *(start.store[1:] if start.store is not None else ()))
                module = "kvstore.engine.core_process"
                self._process = spawned(module, messages.encode_start(start), descriptors, settings)
            except Exception:
                self.pulse.close()
                self._channel.close()
                raise
        self.pulse.listen()

    @property
    def pid(self) -> int:
        return self._process.pid

    def greeted(self, is_wanted: Callable[[], bool]) -> messages.Facts:
        """Wait until the engine is ready. Raises what prevented that, or EngineDiedError."""
        while True:
            if not is_wanted():
                raise EngineDiedError("the engine was closed while it was loading")
            has_ended = self._process.poll() is not None  # asked first: its messages can still be received
            received = self._receive(READY_POLL_MS)
            if has_ended and not received:
                raise EngineDiedError(f"the engine's process ended while it was loading ({self._how()})")
            for said in map(messages.decode_announcement, received):
                if isinstance(said, messages.Hello):
                    self.pulse.is_loading = False
                    return said.facts
                if isinstance(said, messages.NotStarted):
                    raise said.error
                begin(said.stage)

    def wait(self) -> str:
        """Wait for its end, and return how it ended."""
        self._process.wait()
        return self._how()

    def _end_hung(self) -> None:
        self._is_hung = True
        self._process.send_signal(SHOW)
        time.sleep(SHOW_S)
        self.stop()

    def _how(self) -> str:
        if self._is_hung:
            return f"killed: no sign of life for {self.pulse.silent_s:g} s"
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    # -- what is said to it, and by it -------------------------------------------------------------------------------
    def ask(self, verb: messages.Call[Any]) -> Future[msgspec.Raw]:
        """Send a call; never waits. The future gets the result or the core's error, or EngineDiedError."""
        number, answer = next(self._numbers), Future[msgspec.Raw]()
        self._calls[number] = answer
        try:
            self.send(messages.encode(messages.Called(number, verb)))  # type: ignore[arg-type]
        except Exception:
            self._calls.pop(number, None)
            raise
        return answer

    def send(self, message: bytes) -> None:
        """Send a message; never waits. Raises EngineOverloadedError, and EngineDiedError when the process is gone."""
        with self._sending:
            if self._retired:
                raise EngineDiedError("the engine's process has ended")
            if self._channel.num_unsent >= SEND_LIMIT:
                raise EngineOverloadedError("the engine's process takes nothing more; try again")
            self._channel.send(message)
            self._watch()

    def watch_with(self, selector: selectors.BaseSelector) -> None:
        """Register with the selector, which tells when there is something to `receive`, until it is retired."""
        with self._sending:
            self._selector = selector
            selector.register(self._channel, selectors.EVENT_READ)
            self._watch()

    def _watch(self) -> None:
        """Watch for room, too, while something is unsent; report an end once. Call it with the sending lock."""
        if self._selector is None:
            return
        if self._channel.ended or self._retired:
            self._unwatch()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.num_unsent else 0)
        if self._selector.get_key(self._channel).events != events:
            self._selector.modify(self._channel, events)

    def _unwatch(self) -> None:
        if self._selector is not None:
            self._selector.unregister(self._channel)
            self._selector = None

    def receive(self) -> list[Update]:
        """Updates since the last call, in order; never waits. Sends what is unsent as far as there is room."""
        with self._receiving:
            if self._retired:
                return []
            received = self._channel.receive()
            if self._channel.num_unsent or self._channel.ended:
                with self._sending:
                    self._channel.flush()
                    self._watch()
        updates: list[Update] = []
        for said in map(messages.decode_outbound, received):
            if isinstance(said, messages.Updates):
                updates += said.updates
            else:
                self._answer(said)
        return updates

    def _answer(self, said: messages.Answered) -> None:
        answer = self._calls.pop(said.number)
        if said.error is None:
            answer.set_result(said.result)
        else:
            answer.set_exception(said.error)

    def _receive(self, timeout_ms: int) -> list[bytes]:
        """Wait for messages, for use at the start and at the end. None come once the process is retired."""
        with self._receiving:
            if self._retired or not self._channel.poll(timeout_ms):
                return []
            return self._channel.receive()

    # -- the end -----------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Ask it to close, wait for that, and kill it if it takes too long."""
        deadline = time.monotonic() + self._shutdown_s
        with self._sending:
            self._unwatch()  # what still comes is read here
        with suppress(EngineDiedError, EngineOverloadedError):
            self.send(messages.encode(messages.Close()))
            while self._process.poll() is None and time.monotonic() < deadline:
                self._receive(END_POLL_MS)  # else it could block for lack of room
        self.kill()

    def stop(self) -> None:
        """Kill it without waiting for its end."""
        self._process.kill()

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait()
        self.retire()

    def retire(self) -> None:
        """After its end: send and receive nothing more, and fail open calls with EngineDiedError."""
        with self._receiving, self._sending:
            if self._retired:
                return
            self._retired = True
            self._watch()
            self._channel.close()
        self.pulse.end()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for answer in list(self._calls.values()):  # no more are added
            answer.set_exception(EngineDiedError("the engine's process ended in a call: it is not known to be done"))
        self._calls.clear()
