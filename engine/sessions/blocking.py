"""The library's blocking verbs over a core, which another thread steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvstore.engine.core.output_processor import Handle
from kvstore.engine.outputs import Piece
from kvstore.engine.sessions.core import Core


class Bell:
    """A listener that wakes one thread. only_ends: not for every piece, but when a request has ended."""

    def __init__(self, only_ends: bool = False) -> None:
        self._only_ends = only_ends
        self._rung = threading.Event()

    def __call__(self, handles: Sequence[Handle]) -> None:
        if not self._only_ends or any(handle.done for handle in handles):
            self._rung.set()

    def wait(self, is_so: Callable[[], object]) -> None:
        """Returns once it is so, which is asked whenever the bell has rung."""
        while not is_so():
            self._rung.wait()
            self._rung.clear()


def stream(core: Core, handle: Handle) -> Iterator[Piece]:
    """See `Engine.stream`."""
    bell = handle.listener
    assert isinstance(bell, Bell), "somebody else listens to this request"
    try:
        while not handle.done or handle.pieces:
            if handle.pieces:
                yield handle.pieces.popleft()
            else:
                bell.wait(lambda: handle.done or handle.pieces)
        handle.raise_error()
    finally:
        core.abort(handle)
