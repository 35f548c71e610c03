"""Whether a process that has ended is started again, and when. Knows no process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 3600.0  # the limit counts the ends of this span
MAX_DELAY_S = 60.0
LOGGER = logging.getLogger("kvstore.engine")


@dataclass(slots=True)
class Restarts:
    """The first restart comes at once, the next after a second; then the delay doubles up to MAX_DELAY_S."""

    limit: int  # ends within WINDOW_S; after one more the process stays down
    clock: Callable[[], float] = time.monotonic
    num_restarts: int = 0  # counted by whoever starts the process, also when the start fails
    why: str = ""  # how the last process ended
    delay_s: float = 0.0  # to wait before the next start
    _ends_s: deque[float] = field(default_factory=deque)  # when processes, and attempts to start one, ended

    def note_end(self, how: str) -> bool:
        """Count an end. Returns whether the process is to be started again."""
        now = self.clock()
        self._ends_s.append(now)
        while now - self._ends_s[0] > WINDOW_S:
            self._ends_s.popleft()
        num_ends = len(self._ends_s)
        self.why, self.delay_s = how, min(2.0 ** (num_ends - 2), MAX_DELAY_S) if num_ends > 1 else 0.0
        if goes_on := num_ends <= self.limit:
            following = f"it is started again in {self.delay_s:g} s, {num_ends} of {self.limit} an hour"
        else:
            following = f"it is not started again: the limit of restarts an hour is {self.limit}"
        LOGGER.error("the engine's process ended (%s); %s", how, following)
        return goes_on
