"""How an engine ends: when it is closed, when nobody refers to it any more, and when the interpreter exits.

And how the next one begins, when the one before has not quite ended.
"""

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
OWN_THREADS = "kvstore-"  # how the names of our threads begin


class Closing:
    """What an engine has opened, closed once, the last first, each whatever the others raise.

    closed: it has been asked for. In a forked child nothing is done: threads and files are the parent's.
    """

    def __init__(self, opened: ExitStack) -> None:
        self.closed = False
        self._opened = opened
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held by who closes

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self.closed:
                self.closed = True
                self._opened.close()

    def close_dropped(self) -> None:
        """For an engine that was dropped: the collector may have found it in any thread.

        One of our own threads may be the one that `close` waits for, so there a fresh thread does it.
        """
        if threading.current_thread().name.startswith(OWN_THREADS) and os.getpid() == self._pid:
            threading.Thread(target=self.close, name="engine-shut").start()
        else:
            self.close()


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
