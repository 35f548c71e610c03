"""What is in flight at one moment, and whether that has ended while other things come after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

Stage = Callable[[], Iterable[Hashable]]


class Fence:
    """stages: each names what is in flight there now. What leaves a stage may go on in the next one, so a stage is
    looked at when all before it have ended.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = deque(stages)
        self._left: set[Hashable] | None = None  # of the first stage

    def has_ended(self) -> bool:
        """Called with the store's lock, as often as something may have ended."""
        while self._stages:
            now = set(self._stages[0]())
            self._left = now if self._left is None else self._left & now
            if self._left:
                return False
            self._stages.popleft()
            self._left = None
        return True
