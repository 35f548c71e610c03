"""A re-entrant lock that is handed over in the order of asking.

The thread that steps the engine gives its lock back for a moment only; an ordinary lock would let it have it again
before anybody who waits has woken up.
"""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """`threading.RLock`, first come first served. Can be the lock of a `threading.Condition`."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._count = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def acquire(self) -> bool:
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me:
                self._count += 1
                return True
            if self._owner is None:
                self._owner, self._count = me, 1
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: it may have been handed over in this very moment
            self._give_up(me, turn)
            raise
        return True

    def release(self) -> None:
        with self._mutex:
            assert self._owner == threading.get_ident(), "released by another thread than its owner"
            self._count -= 1
            if not self._count:
                self._hand_over()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _give_up(self, me: int, turn: threading.Lock) -> None:
        with self._mutex:
            if self._owner == me:
                self._count = 0
                self._hand_over()
            else:
                self._waiting.remove((me, turn))

    def _hand_over(self) -> None:
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._count = 1
            turn.release()
        else:
            self._owner = None

    # -- what threading.Condition asks of a lock ---------------------------------------------------------------------
    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        with self._mutex:
            count, self._count = self._count, 0
            self._hand_over()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count
