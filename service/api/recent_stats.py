"""The engine's last known counters, so that /health and /metrics never wait for a long step."""

import asyncio
import time
from typing import Any

from kvstore.engine.async_engine import AsyncEngine

WAIT_S = 0.5
STUCK_S = 10.0  # longer than any step, unless the device is far too small for its model
FAILING_S = 60.0


class RecentStats:
    """The counters of one engine. Used in the server's event loop only.

    stuck_s: longer than any step takes; failing_s: for so long a failure is told, unless something is stored sooner.
    """

    def __init__(self, engine: AsyncEngine, stuck_s: float = STUCK_S, failing_s: float = FAILING_S) -> None:
        self._engine, self._stuck_s, self._failing_s = engine, stuck_s, failing_s
        self._known: dict[str, Any] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0  # when the last question was put, on the monotonic clock
        self._outcomes = (0, 0)  # of changes to sessions: failed, stored
        self._failing_until_s = 0.0  # monotonic

    async def get(self) -> dict[str, Any]:
        """The counters; older ones while a long step keeps the engine from answering."""
        if self._asking is None or self._asking.done():
            self._asking, self._asked_s = asyncio.create_task(self._ask()), time.monotonic()
        await asyncio.wait({self._asking}, timeout=WAIT_S)
        return self._known

    @property
    def is_stuck(self) -> bool:
        """Whether a query has been open for longer than any step takes."""
        is_open = self._asking is not None and not self._asking.done()
        return is_open and time.monotonic() > self._asked_s + self._stuck_s

    @property
    def sessions_fail(self) -> bool:
        """Whether turns recently could not be stored."""
        return time.monotonic() < self._failing_until_s

    async def _ask(self) -> None:
        try:
            self._known = {**await self._engine.call(self._engine.engine.stats)}
        except Exception as error:  # whatever it is, it must not be /health that fails
            self._known = {"error": type(error).__name__}
            return
        sessions = self._known.get("sessions") or {}
        before, self._outcomes = self._outcomes, (sessions.get("failed", 0), sessions.get("committed", 0))
        if self._outcomes[0] > before[0]:
            self._failing_until_s = time.monotonic() + self._failing_s
        elif self._outcomes[1] > before[1]:
            self._failing_until_s = 0.0
