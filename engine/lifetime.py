"""How an engine ends: when it is closed, when nobody refers to it any more, and when the interpreter exits.

And how the next one begins, when the one before has not quite ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvstore.connector import KVConnector
from kvstore.errors import StoreLockedError

T = TypeVar("T")
LOCK_WAIT_S = 5.0
LOCK_RETRY_S = 0.1
OWN_THREADS = "kvstore-"  # how the names of our threads begin


class Store(Protocol):
    """Something of the engine's with a thread of its own, to be closed before the connector."""

    def close(self) -> None: ...


class Stepping(Protocol):
    """What steps the engine; it is stopped before anything is closed."""

    def stop(self) -> None: ...


@dataclass(slots=True)
class Gate:
    """Whether an engine still takes requests, and the process that it belongs to."""

    closed: bool = False
    pid: int = field(default_factory=os.getpid)
    closing: threading.Lock = field(default_factory=threading.Lock)  # held by who closes

    @property
    def is_inherited(self) -> bool:
        """In a forked child: the engine's threads and files are the parent's."""
        return os.getpid() != self.pid


def shut(gate: Gate, loop: Stepping, connector: KVConnector, *stores: Store) -> None:
    """Let a running step end, refuse further ones, and drain the store. Does nothing in a forked child."""
    if gate.is_inherited:
        return
    with gate.closing:
        if gate.closed:
            return
        loop.stop()
        gate.closed = True
        with ExitStack() as closing:  # each of them, whatever the others raise; the connector last
            closing.callback(connector.close)
            for store in stores:
                closing.callback(store.close)


def shut_dropped(gate: Gate, loop: Stepping, connector: KVConnector, *stores: Store) -> None:
    """`shut` for an engine that was dropped: the collector may have found it in any thread.

    One of our own threads may be the one that `shut` waits for, so there a fresh thread does it.
    """
    if gate.is_inherited:
        return
    if threading.current_thread().name.startswith(OWN_THREADS):
        threading.Thread(target=shut, args=(gate, loop, connector, *stores), name="engine-shut").start()
    else:
        shut(gate, loop, connector, *stores)


def open_waiting_for_lock(opened: Callable[[], T], timeout_s: float = LOCK_WAIT_S) -> T:
    """What `opened` returns, tried again while another process holds the store's lock: it may be about to end.

    Raises StoreLockedError when it still does so long after it was first refused.
    """
    deadline: float | None = None
    while True:
        try:
            return opened()
        except StoreLockedError:
            now = time.monotonic()
            deadline = now + timeout_s if deadline is None else deadline
            if now >= deadline:
                raise
            time.sleep(min(LOCK_RETRY_S, max(0.0, deadline - now)))
