"""One life of the engine's process as its parent sees it: started, greeted, spoken to, ended.

Knows sockets and the process; must not know what requests and sessions are.
"""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import kvstore
from kvstore.engine.process import wire
from kvstore.engine.process.channel import Channel
from kvstore.engine.process.pulse import Pulse
from kvstore.errors import EngineDiedError, EngineOverloadedError, RequestError

SEND_LIMIT = 1 << 16  # messages on their way to the engine: far above what a front's limit on requests lets come
READY_POLL_MS = 50
END_POLL_MS = 10
SPIN_COUNT = "10000"  # some ten microseconds: longer than the gaps between the operations of a step


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """How long a compute thread without work spins before it sleeps. To be called before torch is loaded.

    GCC's OpenMP spins for milliseconds. Where another process wants the same core, a step then waits for threads that
    wait: 50 times slower beside one busy process (bench/LOG.md, 2026-11-22). What the user has set counts.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


class CoreProcess:
    """A process with a core, and the channel to it. Any thread may use it; the one that makes it has to outlive it.

    That is because Linux counts the thread that started a process as its parent. store: see `wire.Start`.
    """

    def __init__(self, arguments: dict[str, Any], store: tuple[str, int, int] | None, silence_s: float) -> None:
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
        start = wire.Start(os.getpid(), theirs.fileno(), self.pulse.writer, silence_s, store, arguments)
        with theirs:
            try:
                self._process = self._spawned(start)
            except Exception:
                self.pulse.close()
                self._channel.close()
                raise
        self.pulse.listen()

    @staticmethod
    def _spawned(start: wire.Start) -> subprocess.Popen[bytes]:
        """Nothing of the configuration is in the list of processes: it goes through a pipe, whose end is ours too."""
        home = str(Path(kvstore.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        spin_briefly(environment)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for the front
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstore.engine.core_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(start.channel, start.pulse, *(start.store[1:] if start.store is not None else ())),
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: whoever waits for its greeting will see
            process.stdin.write(wire.encode_start(start) + b"\n")
            process.stdin.flush()
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def greeted(self, is_wanted: Callable[[], bool]) -> wire.Hello:
        """Waits until the engine is ready. Raises what kept it from being so, and EngineDiedError."""
        messages: list[bytes] = []
        while not messages:
            if not is_wanted():
                raise EngineDiedError("the engine was closed while it was loading")
            has_ended = self._process.poll() is not None  # asked first: what it said before is still there
            messages = self._receive(READY_POLL_MS)
            if has_ended and not messages:
                raise EngineDiedError(f"the engine's process ended while it was loading ({self._how()})")
        said = wire.decode_announcement(messages[0])
        if isinstance(said, wire.Hello):
            self.pulse.is_loading = False
            return said
        raise wire.error_of(said.failure)

    def wait(self) -> str:
        """Returns how it ended, when it has."""
        self._process.wait()
        return self._how()

    def _end_hung(self) -> None:
        self._is_hung = True
        self.stop()

    def _how(self) -> str:
        if self._is_hung:
            return f"killed: no sign of life for {self.pulse.silent_s:g} s"
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    # -- what is said to it, and by it -------------------------------------------------------------------------------
    def ask(self, verb: str, arguments: tuple[object, ...]) -> Future[msgspec.Raw]:
        """A call; never waits. Its result or the core's own error is there once it has come, else EngineDiedError."""
        try:
            packed = msgspec.Raw(wire.encode(arguments))
        except UnicodeEncodeError:
            raise RequestError("a text is not valid Unicode: it holds half a surrogate pair") from None
        number, answer = next(self._numbers), Future[msgspec.Raw]()
        self._calls[number] = answer
        try:
            self.send(wire.encode(wire.Call(number, verb, packed)))
        except Exception:
            self._calls.pop(number, None)
            raise
        return answer

    def send(self, message: bytes) -> None:
        """Never waits. Raises EngineOverloadedError, and EngineDiedError when it is gone."""
        with self._sending:
            if self._retired:
                raise EngineDiedError("the engine's process has ended")
            if self._channel.num_unsent >= SEND_LIMIT:
                raise EngineOverloadedError("the engine's process takes nothing more; try again")
            self._channel.send(message)
            self._watch()

    def watch_with(self, selector: selectors.BaseSelector) -> None:
        """From now on the selector tells when there is something to `receive`, until it is retired."""
        with self._sending:
            self._selector = selector
            selector.register(self._channel, selectors.EVENT_READ)
            self._watch()

    def _watch(self) -> None:
        """Room for what is unsent is waited for, too; an end is told once. To be called with the lock of sending."""
        if self._selector is None:
            return
        if self._channel.ended or self._retired:
            self._selector.unregister(self._channel)
            self._selector = None
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.num_unsent else 0)
        if self._selector.get_key(self._channel).events != events:
            self._selector.modify(self._channel, events)

    def receive(self) -> list[wire.Updates]:
        """What has come since the last time, in order; never waits. What is unsent goes out as far as there is room."""
        with self._receiving:
            if self._retired:
                return []
            messages = self._channel.receive()
            if self._channel.num_unsent or self._channel.ended:
                with self._sending:
                    self._channel.flush()
                    self._watch()
        updates: list[wire.Updates] = []
        for said in map(wire.decode_outbound, messages):
            if isinstance(said, wire.Updates):
                updates.append(said)
            else:
                self._answer(said)
        return updates

    def _answer(self, said: wire.Answered) -> None:
        answer = self._calls.pop(said.number)
        if said.failure is None:
            answer.set_result(said.result)
        else:
            answer.set_exception(wire.error_of(said.failure))

    def _receive(self, timeout_ms: int) -> list[bytes]:
        """Waits for messages, at the beginning and at the end. None come once it is retired."""
        with self._receiving:
            if self._retired or not self._channel.poll(timeout_ms):
                return []
            return self._channel.receive()

    # -- the end -----------------------------------------------------------------------------------------------------
    def end(self, timeout_s: float) -> None:
        """Ask it to close and wait for that; kill it after so many seconds."""
        deadline = time.monotonic() + timeout_s
        with suppress(EngineDiedError, EngineOverloadedError):
            self.send(wire.encode(wire.Close()))
            while self._process.poll() is None and time.monotonic() < deadline:
                self._receive(END_POLL_MS)  # else it could wait for room
        self.kill()

    def stop(self) -> None:
        """Let it be dead; who waits for its end will see."""
        self._process.kill()

    def kill(self) -> None:
        """Returns when it is dead."""
        self._process.kill()
        self._process.wait()
        self.retire()

    def retire(self) -> None:
        """It has ended: nothing is sent or received any more, and who waits for an answer gets EngineDiedError."""
        with self._receiving, self._sending:
            if self._retired:
                return
            self._retired = True
            self._watch()
            self._channel.close()
        self.pulse.end()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for answer in list(self._calls.values()):  # none is added any more
            answer.set_exception(EngineDiedError("the engine's process ended in a call: it is not known to be done"))
        self._calls.clear()
