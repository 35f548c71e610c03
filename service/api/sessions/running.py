"""Turns that run in this server, one per session, and the conversations used last. Knows no request and no engine.

Used in the server's event loop only.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstore.engine.async_engine import StreamedAnswer
from kvstore.engine.sessions.chat import ChatSession
from kvstore.errors import SessionBusyError
from kvstore.sessions.record import SessionKey

MAX_KEPT = 256
MAX_KEPT_TOKENS = 2_000_000  # about 40 bytes each


@dataclass(slots=True)
class Running:
    """A turn that holds its session.

    answer: set once it has begun. stopped: somebody asked for its end, perhaps before it began. leaving: it is over,
    but its session is not released yet.
    """

    key: SessionKey
    request_key: str | None
    answer: StreamedAnswer | None = None
    stopped: bool = False
    leaving: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        self.stopped = True
        if self.answer is not None:
            await self.answer.stop()


class Turns:
    """Which turn writes to which session."""

    def __init__(self) -> None:
        self._running: dict[SessionKey, Running] = {}
        self._kept: OrderedDict[SessionKey, tuple[ChatSession, int]] = OrderedDict()  # with its tokens then
        self._num_kept_tokens = 0

    def running_on(self, key: SessionKey) -> Running | None:
        return self._running.get(key)

    @asynccontextmanager
    async def claim(self, key: SessionKey, request_key: str | None = None) -> AsyncIterator[Running]:
        """Hold the session, so that no other turn writes to it.

        Waits for a turn that is leaving, and for an earlier attempt of the same request. request_key: the
        Idempotency-Key, which tells that two requests are the same. Raises SessionBusyError.
        """
        while (other := self._running.get(key)) is not None:
            is_same = request_key is not None and other.request_key == request_key
            if not is_same and not other.leaving:
                raise SessionBusyError(f"session {key.session_id} is busy with another turn", param="session_id")
            await other.ended.wait()
        running = self._running[key] = Running(key, request_key)
        try:
            yield running
        finally:
            del self._running[key]
            running.ended.set()

    # -- conversations in memory ---------------------------------------------------------------------------------------
    def keep(self, chat: ChatSession) -> None:
        """Keep the session in memory for its next turn; the engine returns the same object while it is held."""
        key = SessionKey(chat.tenant, chat.session_id)
        self.drop(key)
        num_tokens = len(chat.token_ids)
        self._kept[key] = (chat, num_tokens)
        self._num_kept_tokens += num_tokens
        while len(self._kept) > MAX_KEPT or (self._num_kept_tokens > MAX_KEPT_TOKENS and len(self._kept) > 1):
            self.drop(next(iter(self._kept)))

    def drop(self, key: SessionKey) -> None:
        _, num_tokens = self._kept.pop(key, (None, 0))
        self._num_kept_tokens -= num_tokens
