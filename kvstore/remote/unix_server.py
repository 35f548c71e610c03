"""Answers at a Unix socket of this machine, each connection in a thread of its own. Knows nothing of what is said."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.forks import leave_to_parent

CLOSE_S = 1.0
ACCEPT_AGAIN_S = 0.1  # after a failure, such as a lack of descriptors


class UnixServer:
    """Until `close`. listener: bound, and listening. serve: called with a connection, which is closed afterwards; it
    handles all errors. most: connections at a time; refuse: called with others, which must not take long.
    """

    def __init__(
        self, name: str, listener: socket.socket, serve: Callable[[socket.socket], None], most: int = 1 << 16,
        refuse: Callable[[socket.socket], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._name, self.listener, self._serve, self._most, self._refuse = name, listener, serve, most, refuse
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self.connections: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()
        leave_to_parent(self, "a socket of the store")

    def let_go(self) -> None:
        """In a forked child: close what the others' ends of connections hang on."""
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def close(self, grace_s: float = 0.0) -> None:
        """End all connections after so long, and wait a moment for what they do: CLOSE_S in all."""
        self._is_closing.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        begun_s = time.monotonic()
        self._thread.join(CLOSE_S)
        self._join(begun_s + grace_s)
        with self._lock:
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._join(begun_s + CLOSE_S)

    def _join(self, until_s: float) -> None:
        with self._lock:
            threads = list(self.connections.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed; or out of descriptors, which passes
                self._is_closing.wait(ACCEPT_AGAIN_S)
                continue
            if len(self.connections) >= self._most:
                self._refuse(connection)
                connection.close()
                continue
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True)
            with self._lock:
                self.connections[connection] = thread
                try:
                    thread.start()
                except RuntimeError:  # no more threads now
                    del self.connections[connection]
                    connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            with self._lock:
                self.connections.pop(connection, None)
            connection.close()
