"""The engine's counters as they were last told, so that a long step keeps neither /health nor /metrics waiting."""

import asyncio
import time
from typing import Any

from kvstore.engine.async_engine import AsyncEngine

WAIT_S = 0.5
STUCK_S = 10.0  # longer than any step, unless the device is far too small for its model
FAILING_S = 60.0


class RecentStats:
    """Of one engine. Used in the server's event loop only."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[str, Any] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0  # when the last question was put, on the monotonic clock
        self._failing_until_s = 0.0  # monotonic

    async def get(self) -> dict[str, Any]:
        """The counters; those of an earlier question where a long step keeps the engine from answering now."""
        if self._asking is None or self._asking.done():
            self._asking, self._asked_s = asyncio.create_task(self._ask()), time.monotonic()
        await asyncio.wait({self._asking}, timeout=WAIT_S)
        return self._known

    @property
    def is_stuck(self) -> bool:
        """Whether a question has been open for longer than any step takes."""
        is_open = self._asking is not None and not self._asking.done()
        return is_open and time.monotonic() > self._asked_s + STUCK_S

    @property
    def sessions_fail(self) -> bool:
        """Whether turns could not be stored a moment ago."""
        return time.monotonic() < self._failing_until_s

    async def _ask(self) -> None:
        num_known = _num_failed(self._known)
        try:
            self._known = await self._engine.call(self._engine.engine.stats)
        except Exception as error:  # whatever it is, it must not be /health that fails
            self._known = {"error": type(error).__name__}
        if _num_failed(self._known) > num_known:
            self._failing_until_s = time.monotonic() + FAILING_S


def _num_failed(stats: dict[str, Any]) -> int:
    return (stats.get("sessions") or {}).get("failed", 0)
