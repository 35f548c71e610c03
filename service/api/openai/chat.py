"""POST /v1/chat/completions: the whole history in every request, and yet its KV is found again.

Answers that this server gave are recognised in the history and stand in the prompt as the ids they were
(`engine/sessions/recall.py`).
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from kvstore.engine.outputs import Choice, Piece
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.chat_template import Message
from kvstore.service.api.context import Context, context_of, tenant_of
from kvstore.service.api.edge import check_model, json_response
from kvstore.service.api.openai.generation import Stopwatch, chat_logprobs, check_ended, fingerprint
from kvstore.service.api.openai.schema import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionBody,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
)
from kvstore.service.api.schema import check_chars_of, messages_of, num_chars_of, read_body, sampling_params
from kvstore.service.api.sse import EventStream
from kvstore.service.api.usage import UsageObject, usage_object
from kvstore.service.http.routes import Route

if TYPE_CHECKING:
    from kvstore.engine.async_engine import Answer
    from kvstore.engine.sessions.window import NextTurn


PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Exchange:
    """One request and what every event of its answer repeats."""

    context: Context
    tenant: str
    body: ChatCompletionBody
    messages: list[Message]
    params: SamplingParams
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def salt(self) -> str:
        return self.body.cache_salt or ""

    async def start(self) -> tuple[NextTurn, Answer]:
        """The history as ids, queued."""
        engine, reuse = self.context.engine, self.body.truncation_reuse or "exact"
        turn = await engine.call_with_text(
            num_chars_of(self.messages), self.context.recall.next_turn, self.tenant, self.salt, self.messages,
            self.params, reuse,
        )  # fmt: skip
        spliced = (turn.chain, turn.lineage) if turn.lineage.splice_index is not None else None
        priority = self.body.priority or 0
        return turn, await engine.start(turn.prompt, self.params, self.tenant, self.salt, priority, spliced)

    async def note(self, turn: NextTurn, answer: Answer) -> None:
        """To be called before the client knows that its answer has ended: its next request may come right then."""
        await self.context.engine.call(
            self.context.recall.note, self.tenant, self.salt, self.messages, answer.output, turn.chain,
            answer.lineage, turn.turn_starts,
        )  # fmt: skip


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context, body = context_of(request), await read_body(request, ChatCompletionBody)
    check_model(context, body.model)
    body.check()
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(
        body, context.engine.engine.sampling_defaults, max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=logprobs,
    )  # fmt: skip
    one = Exchange(context, tenant_of(request), body, messages_of(body.messages), params)
    check_chars_of(context, [message["content"] for message in one.messages])
    async with context.limits.admit(one.tenant, params.n):
        return await (_stream(request, one) if body.stream else _whole(one))


async def _whole(one: Exchange) -> web.Response:
    watch = Stopwatch()
    turn, answer = await one.start()
    async with answer:
        async for _ in watch.over(answer):
            pass
    output = answer.output
    check_ended(output)
    await one.note(turn, answer)
    one.context.answer_ended(output, PATH, watch.gaps_s)
    choices = [_choice(one, index, choice) for index, choice in enumerate(output.choices)]
    return json_response(
        ChatCompletion(
            id=one.id, created=one.created, model=one.context.model_name, choices=choices,
            usage=usage_object(output.usage), system_fingerprint=fingerprint(one.context),
        )
    )  # fmt: skip


def _choice(one: Exchange, index: int, choice: Choice) -> ChatChoice:
    logprobs = None
    if choice.logprobs is not None:
        tokenizer = one.context.engine.engine.tokenizer
        logprobs = chat_logprobs(tokenizer, choice.logprobs, one.body.top_logprobs or 0)
    message = AssistantMessage(choice.text)
    return ChatChoice(index, message, choice.finish_reason, logprobs, choice.stop_reason)


async def _stream(request: web.Request, one: Exchange) -> web.StreamResponse:
    """Headers go out with the first token, so that whatever is wrong before it still has its status."""
    watch = Stopwatch()
    turn, answer = await one.start()
    async with answer, EventStream(request) as events:
        begun: set[int] = set()
        ends: dict[int, Piece] = {}
        async for piece in watch.over(answer):
            if piece.index not in begun:
                begun.add(piece.index)
                await events.send(_chunk(one, ChunkChoice(piece.index, Delta("assistant", ""))))
            if piece.text or piece.logprobs:
                await events.send(_chunk(one, _delta(one, piece)))
            if piece.finish_reason is not None:
                ends[piece.index] = piece
        output = answer.output
        check_ended(output)
        await one.note(turn, answer)
        one.context.answer_ended(output, PATH, watch.gaps_s)
        for index, piece in ends.items():
            reason = output.choices[index].stop_reason
            await events.send(_chunk(one, ChunkChoice(index, Delta(), piece.finish_reason, stop_reason=reason)))
        options = one.body.stream_options
        if options is not None and options.include_usage:
            await events.send(_chunk(one, None, usage_object(output.usage)))
    return events.response


def _delta(one: Exchange, piece: Piece) -> ChunkChoice:
    logprobs = None
    if piece.logprobs:
        tokenizer = one.context.engine.engine.tokenizer
        logprobs = chat_logprobs(tokenizer, piece.logprobs, one.body.top_logprobs or 0)
    return ChunkChoice(piece.index, Delta(content=piece.text), logprobs=logprobs)


def _chunk(one: Exchange, choice: ChunkChoice | None, usage: UsageObject | None = None) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=one.id, created=one.created, model=one.context.model_name, choices=[] if choice is None else [choice],
        usage=usage, system_fingerprint=fingerprint(one.context),
    )  # fmt: skip


ROUTES = (
    Route(
        "POST", PATH, chat_completions, "user", "The answer to a conversation.", ChatCompletionBody, ChatCompletion,
        "openai",
    ),
)  # fmt: skip
