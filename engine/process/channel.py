"""Messages through a stream socket, each after its length. Knows neither their meaning nor the other end."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque

_LENGTH = struct.Struct("=Q")  # a step may carry gigabytes of KV to a rank of another machine
READ_BYTES = 2**16


class Channel:
    """One end of a stream. One thread at a time sends, and one receives; these may be two, and any may `flush`.

    ended: the other end is gone, and all that it sent was received. What is sent after that is dropped. It has no
    thread of its own, so a message costs no change of threads. Hence bytes that the kernel does not accept at once stay
    here until `flush`.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._flushing = threading.Lock()  # also the thread that waits in `poll` flushes
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """The number of messages that wait for `flush`, whole or in part."""
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message; never waits."""
        self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        self.flush()

    def flush(self) -> None:
        """Send as much as the kernel accepts now."""
        with self._flushing:
            try:
                while self._unsent:
                    view = self._unsent[0]
                    num_bytes = self._socket.send(view)
                    if num_bytes < len(view):
                        self._unsent[0] = view[num_bytes:]
                    else:
                        self._unsent.popleft()
            except BlockingIOError:
                pass
            except ConnectionError:  # messages from before the end can still be received
                self._unsent.clear()

    def send_all(self, message: bytes) -> None:
        """Send everything that is unsent, waiting for the other end as long as needed."""
        self.send(message)
        if self._unsent:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            while self._unsent:
                poller.poll()
                self.flush()

    def poll(self, timeout_ms: int) -> bool:
        """Wait until something can be received, or unsent bytes can go out, and send these."""
        poller = select.poll()
        if not self.ended:
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        found = poller.poll(timeout_ms)
        self.flush()
        return bool(found)

    def receive(self) -> list[bytes]:
        """The messages that have come since the last time; never waits."""
        try:
            while not self.ended:
                data = self._socket.recv(READ_BYTES)
                self._received += data
                self.ended = not data
                if len(data) < READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except ConnectionError:
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
            messages.append(bytes(self._received[begin:end]))
            start = end
        if start:
            del self._received[:start]
        return messages

    def close(self) -> None:
        self._socket.close()
