"""What is asked of the thread that steps an engine: functions that it calls between two steps, in the order of asking.

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
    """Any thread puts in, one takes out. closed: nothing comes in any more."""

    def __init__(self) -> None:
        self.closed = False
        self._changed = threading.Condition()
        self._asked: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Never waits; the future has what the function returns or raises.

        Raises EngineClosedError, and StoreError in a forked child, which has not got the thread that would call it.
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
        """Returns when something is asked or when it is closed, which is True, or after so long."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._asked or self.closed, timeout_s))

    def answer(self) -> None:
        """Call what is asked."""
        while self._asked:
            future, function = self._asked.popleft()
            try:
                result = function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self) -> None:
        """What is in it is still to be answered."""
        with self._changed:
            self.closed = True
            self._changed.notify()
