"""An answer to a whole history that belongs to no session, in the shape of a turn. Knows no route."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvstore.engine.text.chat_template import Message
from kvstore.service.api.context import Context
from kvstore.service.api.openai.generation import Stopwatch, check_ended
from kvstore.service.api.schema import check_chars_of, num_chars_of
from kvstore.service.api.sessions.turns import TurnRequest, TurnResult

if TYPE_CHECKING:
    from kvstore.engine.async_engine import Answer
    from kvstore.engine.sessions.window import NextTurn

ID_BYTES = 16


class StatelessTurn:
    """As `LiveTurn`, but nothing is stored: it has no number, and its session's id names nothing."""

    number = None

    def __init__(
        self, context: Context, wanted: TurnRequest, messages: list[Message], turn: NextTurn, answer: Answer
    ) -> None:
        self.session_id = secrets.token_hex(ID_BYTES)
        self.watch = Stopwatch()
        self._context = context
        self._wanted = wanted
        self._messages = messages
        self._turn = turn
        self._answer = answer

    def __aiter__(self) -> StatelessTurn:
        return self

    async def __anext__(self) -> str:
        piece = await anext(self._answer)
        self.watch.saw(piece)
        return piece.text

    async def finish(self) -> TurnResult:
        output = self._answer.output
        check_ended(output)
        await self._context.engine.call(
            self._context.recall.note, self._wanted.tenant, "", self._messages, output, self._turn.chain,
            self._answer.lineage, self._turn.turn_starts,
        )  # fmt: skip
        return TurnResult(
            self.session_id, None, output.text, output.finish_reason or "", output.usage, output.timings, 0, time.time()
        )


@asynccontextmanager
async def open_stateless(
    context: Context, wanted: TurnRequest, messages: list[Message]
) -> AsyncIterator[StatelessTurn]:
    """Begin it. Raises ApiError 429 or 503 where there is no room, and RequestError."""
    engine, params = context.engine, wanted.params
    check_chars_of(context, [message["content"] for message in messages])
    async with context.limits.admit(wanted.tenant):
        turn = await engine.call_with_text(
            num_chars_of(messages), context.recall.next_turn, wanted.tenant, "", messages, params, "exact"
        )
        async with await engine.start(turn.prompt, params, wanted.tenant) as answer:
            live = StatelessTurn(context, wanted, messages, turn, answer)
            try:
                yield live
            finally:
                context.answer_ended(answer.output, wanted.route, live.watch.gaps_s)
