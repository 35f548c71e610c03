"""Functions for the thread that steps an engine to call between two steps, in the order in which they came.

Knows neither engine nor request.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvstore.errors import EngineClosedError, StoreError

P = ParamSpec("P")
T = TypeVar("T")


class Inbox:
    """Any thread puts functions in, and one thread calls them. closed: no more are accepted."""

    def __init__(self) -> None:
        self.closed = False
        self._changed = threading.Condition()
        self._asked: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Add a function; never waits.

        The future gets what it returns or raises. Raises EngineClosedError, and StoreError in a forked child, which
        lacks the thread that would call it.
        """
        if os.getpid() != self._pid:
            raise StoreError("the engine was opened before this process was forked; open it again here")
        future: Future[T] = Future()
        with self._changed:
            if self.closed:
                raise EngineClosedError("the engine is closed")
            self._asked.append((future, partial(function, *args, **kwargs)))
            self._changed.notify()
        return future

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something is in it, it is closed, or this time is over. Returns True unless the time is over."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._asked or self.closed, timeout_s))

    def answer(self) -> None:
        """Call all functions that are in it."""
        while self._asked:
            future, function = self._asked.popleft()
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self) -> None:
        """Accept no more; what is in it must still be called."""
        with self._changed:
            self.closed = True
            self._changed.notify()
