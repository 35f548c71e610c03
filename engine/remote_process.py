"""One life of the engine's process as its parent sees it: started, greeted, spoken to, ended.

Knows sockets and the process; must not know what requests and sessions are.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

import engine
from engine.spinning import spin_briefly
from engine.wire import (
    Close,
    Hello,
    Start,
    Updates,
    decode_announcement,
    decode_updates,
    encode,
    encode_start,
    error_of,
)
from engine.wire_calls import MAX_CALLS, SIGNATURES, Call, decode_answer, raw
from kvstore.errors import ConfigError, EngineDiedError, EngineOverloadedError, RequestError

SOCKET_PATH_BYTES = 107  # of a Unix socket, without its end
SEND_LIMIT = 1 << 16  # messages on their way to the engine: far above what a front's limit on requests lets come
CALL_WAIT_S = 30.0  # for one of MAX_CALLS
POLL_MS = 100
MAX_BATCH = 64  # updates taken at once
READY_POLL_MS = 50
END_POLL_MS = 10


def socket_folder() -> Path:
    """A new folder that only this user can enter: that is what keeps others from the sockets. Raises ConfigError."""
    for parent in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="kvstore-", dir=parent))
        if len(os.fsencode(folder / "99999-requests")) <= SOCKET_PATH_BYTES:
            return folder
        folder.rmdir()
    raise ConfigError("the folder for temporary files has too long a path for sockets; set TMPDIR to a shorter one")


class CoreProcess:
    """A process with an engine, and the sockets to it. Any thread may use it; the one that makes it has to outlive it.

    That is because Linux counts the thread that started a process as its parent.
    """

    def __init__(self, arguments: dict[str, Any], folder: Path, life: int) -> None:
        self._folder, self._life = folder, life
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._retiring = threading.Lock()
        self._retired = False
        self._context = zmq.Context()
        self._requests = self._bound(zmq.PUSH, "requests")
        self._updates = self._bound(zmq.PULL, "updates")
        self._calls: queue.LifoQueue[tuple[int, zmq.Socket | None]] = queue.LifoQueue()
        for number in reversed(range(MAX_CALLS)):
            self._calls.put((number, None))
        self._numbers = itertools.count()
        self._process = self._spawned(Start(os.getpid(), str(folder), life, arguments))

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{self._life}-{name}"

    def _bound(self, kind: int, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = SEND_LIMIT
        socket.bind(self._endpoint(name))
        return socket

    @staticmethod
    def _spawned(start: Start) -> subprocess.Popen[bytes]:
        """Nothing of the configuration is in the list of processes: it goes through a pipe, whose end is ours too."""
        home = str(Path(engine.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        spin_briefly(environment)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for the front
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.core_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: whoever waits for its greeting will see
            process.stdin.write(encode_start(start) + b"\n")
            process.stdin.flush()
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def greeted(self, is_wanted: Callable[[], bool]) -> Hello:
        """Waits until the engine is ready. Raises what kept it from being so, and EngineDiedError."""
        while not self._updates.poll(READY_POLL_MS):
            if not is_wanted():
                raise EngineDiedError("the engine was closed while it was loading")
            if self._process.poll() is not None and not self._updates.poll(0):
                raise EngineDiedError(f"the engine's process ended while it was loading ({self._how()})")
        said = decode_announcement(self._updates.recv())
        if isinstance(said, Hello):
            return said
        raise error_of(said.failure)

    def wait(self) -> str:
        """Returns how it ended, when it has."""
        self._process.wait()
        return self._how()

    def _how(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    # -- requests ----------------------------------------------------------------------------------------------------
    def send(self, message: bytes) -> None:
        """Never waits. Raises EngineOverloadedError, and EngineDiedError when it is gone."""
        with self._sending:
            if self._retired:
                raise EngineDiedError("the engine's process has ended")
            try:
                self._requests.send(message, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineOverloadedError("the engine's process takes nothing more; try again") from None

    def receive(self) -> list[Updates]:
        """What has come since the last time, in order; never waits."""
        found: list[Updates] = []
        with self._receiving:
            while not self._retired and len(found) < MAX_BATCH:
                try:
                    found.append(decode_updates(self._updates.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        return found

    def has_updates(self, timeout_s: float, wake: int) -> bool:
        """Waits for updates, or for the descriptor `wake`."""
        with self._receiving:
            if self._retired:
                return False
            poller = zmq.Poller()
            poller.register(self._updates, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            return self._updates in dict(poller.poll(round(timeout_s * 1000)))

    # -- calls -------------------------------------------------------------------------------------------------------
    def call(self, verb: str, arguments: tuple[object, ...]) -> Any:
        """The result of a verb of the table. Raises as the verb does, EngineDiedError, and EngineOverloadedError."""
        try:
            packed = raw(arguments)
        except UnicodeEncodeError:
            raise RequestError("a text is not valid Unicode: it holds half a surrogate pair") from None
        try:
            number, socket = self._calls.get(timeout=CALL_WAIT_S)
        except queue.Empty:
            raise EngineOverloadedError(f"{MAX_CALLS} calls of the engine wait for their end; try again") from None
        try:
            if self._retired:
                raise EngineDiedError("the engine's process has ended")
            if socket is None:
                socket = self._connected(number)
            return self._answered(socket, Call(next(self._numbers), verb, packed))
        finally:
            self._calls.put((number, socket))

    def _connected(self, number: int) -> zmq.Socket:
        socket = self._context.socket(zmq.PAIR)
        socket.linger = 0
        socket.connect(self._endpoint(f"call-{number}"))
        return socket

    def _answered(self, socket: zmq.Socket, call: Call) -> Any:
        socket.send(encode(call))
        while True:
            if socket.poll(POLL_MS):
                answer = decode_answer(socket.recv())
                if answer.number != call.number:
                    continue  # of a call whose caller was interrupted
                if answer.failure is not None:
                    raise error_of(answer.failure)
                return SIGNATURES[call.verb].decode_result(answer.result)
            if self._retired:
                raise EngineDiedError(f"the engine's process ended during {call.verb}: it is not known to be done")

    # -- the end -----------------------------------------------------------------------------------------------------
    def end(self, timeout_s: float) -> None:
        """Ask it to close and wait for that; kill it after so many seconds."""
        deadline = time.monotonic() + timeout_s
        with suppress(EngineDiedError, EngineOverloadedError):
            self.send(encode(Close()))
            while self._process.poll() is None and time.monotonic() < deadline:
                self._discard_updates()  # else it could wait for room
        self.kill()

    def _discard_updates(self) -> None:
        with self._receiving:
            if self._retired:
                return
            if self._updates.poll(END_POLL_MS):
                self._updates.recv()

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
        with self._retiring:
            if self._retired:
                return
            self._retired = True
        with self._sending:
            self._requests.close()
        with self._receiving:
            self._updates.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        taken = [self._calls.get() for _ in range(MAX_CALLS)]  # who uses one gives it back within POLL_MS
        for number, socket in taken:
            if socket is not None:
                socket.close()
            self._calls.put((number, None))  # for those who come now, and are told
        self._context.term()
