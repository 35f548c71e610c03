"""How an engine ends: when it is closed, when nobody refers to it any more, and when the interpreter exits."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvstore.connector import KVConnector
from kvstore.session_store import SessionStore

OWN_THREADS = ("kvstore-", "session-store")  # how the names of our threads begin


@dataclass(slots=True)
class Gate:
    """Whether an engine still takes requests, and the process that it belongs to."""

    closed: bool = False
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """In a forked child: the engine's threads and files are the parent's."""
        return os.getpid() != self.pid


def shut(gate: Gate, lock: AbstractContextManager, connector: KVConnector, sessions: SessionStore) -> None:
    """Let a running step end, refuse further ones, and drain the store. Does nothing in a forked child."""
    if gate.is_inherited:
        return
    with lock:
        if gate.closed:
            return
        gate.closed = True
        try:
            sessions.close()
        finally:
            connector.close()


def shut_dropped(gate: Gate, lock: AbstractContextManager, connector: KVConnector, sessions: SessionStore) -> None:
    """`shut` for an engine that was dropped: the collector may have found it in any thread.

    One of our own threads may be the one that `shut` waits for, so there a fresh thread does it.
    """
    if gate.is_inherited:
        return
    if threading.current_thread().name.startswith(OWN_THREADS):
        threading.Thread(target=shut, args=(gate, lock, connector, sessions), name="engine-shut").start()
    else:
        shut(gate, lock, connector, sessions)
