"""A proxy before a server that does to its answers what networks do: cuts, truncates, flips, slows down."""

import math
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from tests.support.waiting import wait_until


@dataclass
class Faults:
    """What happens to answers from now on. Counted in bytes of all answers of a connection.

    cut_after: the connection is closed there. lost_at: one byte of there is left out. flipped_at: a bit of the byte
    there. bytes_per_s: both ways. asks_held_after: no more goes to the server than so many of `num_asked_bytes` and
    what they came with.
    """

    cut_after: int | None = None
    lost_at: int | None = None
    flipped_at: int | None = None
    bytes_per_s: float | None = None
    asks_held_after: int | None = None


class Proxy:
    """Listens on a free port for as long as the context is open; `faults` may be changed at any time."""

    def __init__(self, port: int) -> None:
        self.faults = Faults()
        self.num_asked_bytes = 0
        self._to = port
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.faults = Faults()
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """All connections that there are."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, target, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                server = None
            self._open += [client] if server is None else [client, server]
            if server is None:
                client.shutdown(socket.SHUT_RDWR)
                continue
            self._start(self._carry, client, server, False)
            self._start(self._carry, server, client, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        position = 0
        with suppress(OSError):
            while piece := source.recv(64 << 10):
                if self.faults.bytes_per_s:
                    time.sleep(len(piece) / self.faults.bytes_per_s)
                if not is_answer:
                    wait_until(lambda: self.num_asked_bytes < (self.faults.asks_held_after or math.inf))
                end = position + len(piece)
                self.num_asked_bytes += 0 if is_answer else len(piece)
                target.sendall(self._spoiled(piece, position) if is_answer else piece)
                position = end
                cut = self.faults.cut_after
                if is_answer and cut is not None and position >= cut:
                    break
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _spoiled(self, piece: bytes, position: int) -> bytes:
        faults, found = self.faults, bytearray(piece)
        if faults.flipped_at is not None and position <= faults.flipped_at < position + len(piece):
            found[faults.flipped_at - position] ^= 1
        if faults.cut_after is not None:
            del found[max(0, faults.cut_after - position) :]
        if faults.lost_at is not None and position <= faults.lost_at < position + len(piece):
            del found[faults.lost_at - position]
        return bytes(found)
