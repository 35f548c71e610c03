"""Messages through a stream socket, each after its length; and what processes of ours say to each other at first.

That is what each is told, what it says when it fails, and exceptions as plain data. The bytes are msgpack and never
name code. Knows no engine.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import struct
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec

import kvstore.errors as errors
from kvstore.errors import ConfigError, ContextLengthError, KVStoreError, ModelError, RequestError, StoreLockedError

_LENGTH = struct.Struct("=Q")  # a step may carry gigabytes of KV to a rank of another machine
READ_BYTES = 2**16
GONE = (ConnectionError, TimeoutError)  # a machine that has vanished times out
MAX_MESSAGE_CHARS = 2000


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


class Readiness:
    """What a reader waits for: channels that are registered with `selector`, or a call of `wake` in any thread."""

    def __init__(self) -> None:
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._alarm, selectors.EVENT_READ)
        weakref.finalize(self, _close, self.selector, self._alarm)

    def fileno(self) -> int:
        """A descriptor, always the same, that is readable when there is something to read."""
        return self.selector.fileno()

    def wait(self, timeout_s: float) -> None:
        self.selector.select(timeout_s)

    def wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def drain(self) -> None:
        """Forget the calls of `wake` so far. Call it before reading what they announced."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)


def _close(selector: selectors.BaseSelector, alarm: int) -> None:
    selector.close()
    os.close(alarm)


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


class Failure(msgspec.Struct, array_like=True):
    """An exception."""

    kind: str  # name of its class
    message: str
    more: tuple[str | int | dict[str, str | int] | None, ...] = ()  # its arguments after the message


def failure_of(error: BaseException) -> Failure:
    """An exception as data, without its trace. An error that is no KVStoreError becomes one that names its class."""
    message = str(error)[:MAX_MESSAGE_CHARS]
    if not isinstance(error, KVStoreError):
        return Failure("KVStoreError", f"the engine failed: {type(error).__name__}: {message}")
    kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, ConfigError | ModelError):
        first, *more = (part[:MAX_MESSAGE_CHARS] if isinstance(part, str) else part for part in error.args)
        return Failure(kind, first, tuple(more))
    if isinstance(error, ContextLengthError):
        return Failure(kind, message, (error.requested_tokens, error.limit_tokens))
    if isinstance(error, StoreLockedError):
        return Failure(kind, message, (error.pid,))
    return Failure(kind, message, (error.param,) if isinstance(error, RequestError) else ())


def error_of(failure: Failure, name: str | None = None) -> KVStoreError:
    """The exception again, of the same class. name: of the process that it comes from, for the message."""
    message = failure.message if name is None else f"{name}: {failure.message}"
    error: KVStoreError = getattr(errors, failure.kind)(message, *failure.more)
    return error


def _as_data(error: object) -> Failure:
    if not isinstance(error, Exception):
        raise NotImplementedError(f"{type(error).__name__} is no part of a message")
    return failure_of(error)


def as_error(_: type, data: Any) -> Exception:
    """The hook of decoders of messages that have exceptions in them."""
    return error_of(Failure(*data))


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_data)


def encode(message: object) -> bytes:
    """Raises RequestError for a text that is not valid Unicode."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        raise RequestError("a text is not valid Unicode: it holds half a surrogate pair") from None


decode_start = msgspec.msgpack.Decoder(Start).decode
