"""How an engine ends: it is closed or dropped, or the interpreter exits. And how the next one waits for that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from kvstore.errors import StoreLockedError

T = TypeVar("T")
LOCK_WAIT_S = 5.0
LOCK_RETRY_S = 0.1
OWN_THREADS = "kvstore-"  # with which the names of our threads begin


class Closing:
    """Closes everything that an engine has opened: once, the last first, and each even if others raise.

    closed: whether closing has begun. Does nothing in a forked child: threads and files are the parent's.
    """

    def __init__(self, opened: ExitStack) -> None:
        self.closed = False
        self._opened = opened
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held while closing

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self.closed:
                self.closed = True
                self._opened.close()

    def close_dropped(self) -> None:
        """Close a dropped engine.

        The collector may run in any thread, even in one for which `close` waits. In that case a new thread closes it.
        """
        if threading.current_thread().name.startswith(OWN_THREADS) and os.getpid() == self._pid:
            threading.Thread(target=self.close, name="engine-shut").start()
        else:
            self.close()


def open_waiting_for_lock(opened: Callable[[], T], timeout_s: float = LOCK_WAIT_S) -> T:
    """Retry `opened` while another process, which may be about to end, holds the store's lock.

    Raises StoreLockedError if the lock is still held at the end.
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
