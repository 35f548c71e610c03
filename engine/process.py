"""A process that computes for this one, whatever that is, seen from both ends: channel, start, signs of life, end.

There is one channel to a process, and nothing beside it: its first message says what to be, an empty one twice a second
is a sign of life, and its end is the end of either. So a process of another machine differs in two things: others have
started it, and a signal does not reach it. One that others have not started is this one's child, whose end is seen by
a `pidfd`, and dies with its parent (parent-death signal, and the end of the channel).

A thread in a process gives the sign, unless one round of the loop takes too long. The other end counts silence, and
kills a process of which nothing came and nothing lies unread. It counts its own ticks, so time in which the machine
slept does not count.

Messages are msgpack and never name code; exceptions are plain data in them. Knows no HTTP, no core and no rank.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import kvstore.errors as errors
from kvstore.errors import EngineDiedError, KVStoreError, RequestError

PROGRAM = "kvstore.engine.program"
BEAT_S = 0.5
SLOW_FACTOR = 10  # loading, and one step, may take this many times the allowed silence without a sign
SHOW = signal.SIGUSR2  # at which a process shows where its threads are, also if one holds the interpreter
SHOW_S = 1.0  # that it has for that before it is killed
READY_POLL_MS = 50
ROOM_POLL_MS = 100  # while it reads nothing: how often to check whether it has ended
END_POLL_MS = 10
SPIN_COUNT = "10000"  # tens of microseconds, longer than the gaps between a step's operations
READ_BYTES = 2**16
GONE = (ConnectionError, TimeoutError)  # a machine that has vanished times out
MAX_MESSAGE_CHARS = 2000
_LENGTH = struct.Struct("=Q")  # a step may carry gigabytes of KV to a rank of another machine


# -- messages ----------------------------------------------------------------------------------------------------------
class Start(msgspec.Struct):
    """The first message to a process: what it is to be."""

    silence_s: float  # it is ended after so long without a sign of life
    arguments: dict[str, Any]  # of `Engine`
    store: tuple[str, int, int] | None = None  # path of the directory that the front owns, descriptors with its locks
    rank: int = 0  # of a model in several processes; 0: it is the engine's process
    size: int = 1  # number of ranks
    arena: int | None = None  # descriptor of the first rank's; None: the rank is elsewhere, and KV comes with steps
    rendezvous: str = ""  # where the ranks find each other: see `kvstore.engine.model.parallel.group`
    parent: int | None = None  # id of the process that has started it; None: another machine has

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.size}" if self.rank else "the engine's process"

    @property
    def descriptors(self) -> list[int]:
        """What it inherits."""
        return [*(self.store or ())[1:], *([] if self.arena is None else [self.arena])]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The process could not start, or could not go on, and ends."""

    error: Exception


def _as_data(error: object) -> tuple[str, list[Any]]:
    """An exception: the name of its class, and its arguments. One that is no KVStoreError becomes one that names its
    class.
    """
    if not isinstance(error, Exception):
        raise NotImplementedError(f"{type(error).__name__} is no part of a message")
    if not isinstance(error, KVStoreError):
        return "KVStoreError", [f"the engine failed: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]]
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return kind, [part[:MAX_MESSAGE_CHARS] if isinstance(part, str) else part for part in error.args]


def as_error(_: type, data: Any) -> Exception:
    """The hook of decoders of messages that have exceptions in them: the exception again, of the same class."""
    kind, arguments = data
    error: Exception = getattr(errors, kind)(*arguments)
    return error


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_data)


def encode(message: object) -> bytes:
    """Raises RequestError for a text that is not valid Unicode."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        raise RequestError("a text is not valid Unicode: it holds half a surrogate pair") from None


# -- the channel -------------------------------------------------------------------------------------------------------
class Channel:
    """One end of a stream. Any thread may send and `flush`; one at a time receives.

    ended: the other end is gone, and all that it sent was received. What is sent after that is dropped. is_heard:
    something was received; the owner may reset it. It has no thread of its own, so a message costs no change of
    threads. Hence bytes that the kernel does not accept at once stay here until `flush`.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._unsent: deque[memoryview] = deque()
        self._sending = threading.Lock()
        self._received = bytearray()
        self.ended = self.is_heard = False

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def num_unsent(self) -> int:
        """The number of messages that wait for `flush`, whole or in part."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message; never waits."""
        with self._sending:
            self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
            self._flush()

    def beat(self) -> None:
        """Send a sign of life, which is no message to the other end. Bytes that wait are one, too."""
        if self._unsent:
            self.flush()
        else:
            self.send(b"")

    def flush(self) -> None:
        """Send as much as the kernel accepts now."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                view = self._unsent[0]
                num_bytes = self.socket.send(view)
                if num_bytes < len(view):
                    self._unsent[0] = view[num_bytes:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except GONE:  # messages from before the end can still be received
            self._unsent.clear()

    def send_all(self, message: bytes) -> None:
        """Send everything that is unsent, waiting for the other end as long as needed."""
        self.send(message)
        if self._unsent:
            poller = select.poll()
            poller.register(self.socket, select.POLLOUT)
            while self._unsent:
                poller.poll()
                self.flush()

    def poll(self, timeout_ms: int) -> bool:
        """Wait until something can be received, or unsent bytes can go out, and send these."""
        poller = select.poll()
        if not self.ended:
            poller.register(self.socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        found = poller.poll(timeout_ms)
        self.flush()
        return bool(found)

    def receive(self) -> list[bytes]:
        """The messages that have come since the last time; never waits."""
        try:
            while not self.ended:
                data = self.socket.recv(READ_BYTES)
                self._received += data
                self.is_heard = self.is_heard or bool(data)
                self.ended = not data
                if len(data) < READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except GONE:
            self.ended = True
        return self._whole()

    def _whole(self) -> list[bytes]:
        """The complete messages among the received bytes; the rest stays."""
        messages, start = [], 0
        while len(self._received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            if end > begin:
                messages.append(bytes(self._received[begin:end]))
            start = end
        if start:
            del self._received[:start]
        return messages

    def close(self) -> None:
        self.socket.close()


# -- the end of the process that has started it ------------------------------------------------------------------------
class Child:
    """A process, and the channel to it. Any thread may use it; one at a time sends with `waits`.

    start: its first message. end: of a connection to it, if it is on another machine, where others have started it;
    then it ends with that. settings: environment variables. beat_s: how often it is looked at.

    how: how it ended; None while it runs. What it has sent before can still be received. is_loading: set by whoever
    waits for it; until then it may be silent for SLOW_FACTOR times `start.silence_s` before it is killed. on_unread:
    called in a thread of this object when nobody has read what is here now.
    """

    def __init__(
        self, start: Start, settings: Mapping[str, str] | None = None, end: socket.socket | None = None,
        beat_s: float = BEAT_S,
    ) -> None:  # fmt: skip
        self.name = start.name
        self.is_loading, self._silent_s = True, 0.0
        self.how: str | None = None
        self.on_unread: Callable[[], object] = lambda: None
        self._silence_s, self._beat_s = start.silence_s, beat_s
        self._why = ""  # it was killed
        self._on_end: Callable[[], object] = lambda: None
        self._process: subprocess.Popen[bytes] | None = None
        self._receiving = threading.Lock()
        self._taken: list[bytes] = []
        theirs = None
        if end is None:
            end, theirs = socket.socketpair()
            start.parent = os.getpid()
        self.channel = Channel(end)
        started: Future[None] = Future()
        arguments, name = (theirs, start, settings or {}, started), f"kvstore-child-{start.rank}"
        self._watcher = threading.Thread(target=self._live, args=arguments, name=name, daemon=True)
        self._watcher.start()
        try:
            started.result()
        except Exception:
            self.channel.close()
            raise
        self.send(encode(start))

    def _live(
        self, theirs: socket.socket | None, start: Start, settings: Mapping[str, str], started: Future[None]
    ) -> None:
        """Start it, and watch it until its end. It is to die with its parent, and Linux counts the thread that started
        a process as its parent.
        """
        poller, ended = select.poll(), self.channel.fileno()
        try:
            if theirs is not None:
                with theirs:
                    self._process = spawned(self.name, theirs, start.descriptors, settings)
                ended = os.pidfd_open(self._process.pid)
            poller.register(ended, select.POLLIN if self._process is not None else select.POLLRDHUP)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while not poller.poll(int(self._beat_s * 1000)):
            self._listen()
        self._take_in()
        if self._process is None:
            self.how = self._why or "its connection has ended"
        else:
            os.close(ended)
            code = self._process.wait()
            ended_by_itself = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.how = f"killed: {self._why}" if self._why else ended_by_itself
        self._on_end()

    def _listen(self) -> None:
        """Only time in which this thread itself ran counts, so a process does not seem hung after both were stopped or
        the machine slept.
        """
        if not self.channel.is_heard:
            self._take_in()
            if self._taken:
                self.on_unread()
        self._silent_s = 0.0 if self.channel.is_heard else self._silent_s + self._beat_s
        self.channel.is_heard = False
        if self.silent_s >= self._silence_s * (SLOW_FACTOR if self.is_loading else 1) and not self._why:
            self.show()
            time.sleep(SHOW_S)
            self.kill(f"no sign of life for {self.silent_s:g} s")

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life."""
        return 0.0 if self.channel.is_heard else self._silent_s

    @property
    def pid(self) -> int:
        assert self._process is not None, "on another machine"
        return self._process.pid

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, when it has ended, perhaps twice. One on another machine may be there still, with
        its connections to others.
        """
        self._on_end = call
        if self.how is not None:
            call()

    # -- what is said to it, and by it -------------------------------------------------------------------------------
    def send(self, message: bytes, waits: bool = False) -> None:
        """Send a message. Once it has ended, the message is dropped. waits: until there is room for all of it."""
        if self.how is None:
            self.channel.send(message)
        while waits and self.channel.num_unsent and self.how is None:
            self.channel.poll(ROOM_POLL_MS)
            self._take_in()  # it may itself wait for room

    def receive(self) -> list[bytes]:
        """The messages that have come since the last time; never waits."""
        with self._receiving:
            messages, self._taken = [*self._taken, *self.channel.receive()], []
        return messages

    def _take_in(self) -> None:
        """Take in what has come, for `receive`."""
        with self._receiving:
            self._taken += self.channel.receive()

    def first_messages(self, check: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Waits for its messages, while nobody else receives. check: called meanwhile; may raise.

        Raises EngineDiedError when it has ended.
        """
        while True:
            check()
            has_ended = self.how is not None  # asked first: its messages can still be received
            self._take_in()
            while self._taken:  # what comes behind the one that is waited for stays
                yield self._taken.pop(0)
            if has_ended:
                raise EngineDiedError(f"{self.name} ended while it was loading ({self.how})")
            self.channel.poll(READY_POLL_MS)

    # -- the end -----------------------------------------------------------------------------------------------------
    def show(self) -> None:
        """Let it show where its threads are, if a signal reaches it."""
        if self._process is not None:
            self._process.send_signal(SHOW)

    def kill(self, why: str = "") -> None:
        """Kill it without waiting, or end its connection; `how` is set a little later."""
        self._why = self._why or why
        if self._process is not None:
            self._process.kill()
        else:
            with suppress(OSError):  # it has ended already
                self.channel.socket.shutdown(socket.SHUT_RDWR)

    def wait(self) -> str:
        """Wait for its end, and return how it ended."""
        self._watcher.join()
        assert self.how is not None
        return self.how

    def end(self, leave: bytes, timeout_s: float) -> None:
        """Let it end in order, at this message. Kill it if that takes too long, or at once if it is still loading."""
        deadline = time.monotonic() + (0.0 if self.is_loading else timeout_s)
        self.send(leave)
        while self.how is None and time.monotonic() < deadline:
            self.channel.poll(END_POLL_MS)
            self._take_in()  # else it could wait for room
        self.kill()
        self.wait()
        self.channel.close()


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Limit how long a compute thread without work spins before it sleeps.

    Call it before torch is loaded. GCC's OpenMP spins for milliseconds. Where another process needs the same core, a
    step then waits for spinning threads: 50 times slower beside one busy process (bench/LOG.md, 2026-11-22). Spinning
    for microseconds costs 2 to 8 % alone. The user's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def spawned(
    name: str, channel: socket.socket, descriptors: Sequence[int], settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process, whose stdin is the channel: the list of processes shows nothing of its configuration.

    name: for that list. settings: environment variables.
    """
    home = str(Path(__file__).parents[2])  # the folder of the package kvstore
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **settings}
    spin_briefly(environment)
    for_front = {signal.SIGINT, signal.SIGHUP}  # of the terminal; what is blocked is inherited
    before = signal.pthread_sigmask(signal.SIG_BLOCK, for_front)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, name],
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- its own end -------------------------------------------------------------------------------------------------------
class Heart:
    """Beats in a thread of its own, unless one round of its loop takes longer than limit_s. Then it shows where the
    threads are, and calls `stuck` with what has happened.

    The thread needs the interpreter's lock, so code that holds the lock too long is noticed as well. Time in which the
    thread did not run does not count. beat: the sign of life; None: nobody listens, as in a program's own process.
    """

    def __init__(self, beat: Callable[[], object] | None, limit_s: float, beat_s: float = BEAT_S) -> None:
        if beat is not None:
            faulthandler.register(SHOW)
        self.stuck: Callable[[str], object] = lambda why: None
        self._closed = threading.Event()
        self._sign = beat
        self._limit_s, self._beat_s = limit_s, beat_s
        self._round = 0
        self._rests = True
        threading.Thread(target=self._beat, name="core-pulse", daemon=True).start()

    def begin(self) -> None:
        """A round begins: this, or `rest`, must be called again within the limit."""
        self._round += 1
        self._rests = False

    def rest(self) -> None:
        """The loop waits for others now, which may take any time."""
        self._rests = True

    def _beat(self) -> None:
        last, busy_s = 0, 0.0
        while busy_s < self._limit_s:
            if self._sign is not None:
                self._sign()
            if self._closed.wait(self._beat_s):
                return
            is_same = self._round == last and not self._rests
            last, busy_s = self._round, busy_s + self._beat_s if is_same else 0.0
        why = f"a step of the engine has taken {busy_s:g} s"
        remedy = "" if self._sign is None else "a longer --engine-timeout or "
        print(
            f"kvstore: {why}; if that is usual here, give {remedy}a smaller --max-num-batched-tokens",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        faulthandler.dump_traceback(2)  # not sys.stderr, which may be a notebook's
        self.stuck(why)

    def close(self) -> None:
        """Stop it, if nobody listens who could end."""
        self._closed.set()
