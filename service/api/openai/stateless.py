"""Answers a whole history that belongs to no session, in the shape of a turn. Knows no route.

Answers that this server gave are recognised in the history, and the prompt holds their original ids
(`engine/sessions/recall.py`).
"""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.engine.async_engine import StreamedAnswer
from kvstore.engine.outputs import Piece, RequestOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.chat_template import Message
from kvstore.service.api.context import Context
from kvstore.service.api.openai.generation import check_ended
from kvstore.service.api.schema import check_chars_of, num_chars_of
from kvstore.service.api.sessions.turns import ID_BYTES, TurnResult


@dataclass(frozen=True, slots=True)
class StatelessRequest:
    """What to answer. route: the label in the metrics."""

    tenant: str
    messages: list[Message]
    params: SamplingParams
    route: str
    salt: str = ""
    priority: int = 0


class StatelessTurn:
    """Like `LiveTurn`, but nothing is stored: it has no number, and its session id names nothing.

    output: complete once `finish` has returned.
    """

    number = None

    def __init__(self, context: Context, history: StatelessRequest, answer: StreamedAnswer) -> None:
        self.session_id = secrets.token_hex(ID_BYTES)
        self._context = context
        self._history = history
        self._answer = answer

    @property
    def output(self) -> RequestOutput:
        return self._answer.output

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in self._answer:
            yield piece

    async def finish(self) -> TurnResult:
        """Call this before the client learns that its answer has ended: its next request may follow at once."""
        output, history = self.output, self._history
        check_ended(output)
        await self._context.engine.call(
            self._context.recall.note, history.tenant, history.salt, history.messages, output
        )
        return TurnResult(
            self.session_id, None, output.text, output.finish_reason or "", output.usage, output.timings, 0, time.time()
        )


@asynccontextmanager
async def open_stateless(context: Context, history: StatelessRequest) -> AsyncIterator[StatelessTurn]:
    """Begin an answer. Raises ApiError 429 or 503 where there is no room, and RequestError."""
    engine, params = context.engine, history.params
    check_chars_of(context, [message["content"] for message in history.messages])
    with context.limits.admit(history.tenant, params.n):
        prompt, turn_starts = await engine.call_with_text(
            num_chars_of(history.messages), context.recall.prompt, history.tenant, history.salt, history.messages
        )
        starting = engine.start(
            prompt, params, history.tenant, history.salt, history.priority, turn_starts=turn_starts
        )
        async with context.counted(await starting, history.route) as answer:
            yield StatelessTurn(context, history, answer)
