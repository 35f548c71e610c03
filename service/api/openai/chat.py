"""POST /v1/chat/completions: each request brings its whole history, whose KV is found again."""

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from kvstore.engine.outputs import Piece, TokenLogprob
from kvstore.engine.turns import Turn
from kvstore.service.api.answering import Event, answer
from kvstore.service.api.context import Context, tenant_of
from kvstore.service.api.edge import accept
from kvstore.service.api.openai import schema
from kvstore.service.api.openai.generation import chat_logprobs, fingerprint
from kvstore.service.api.openai.stateless import StatelessRequest, open_stateless
from kvstore.service.api.schema import messages_of, sampling_params
from kvstore.service.api.sessions.turns import TurnResult
from kvstore.service.api.usage import UsageObject, usage_object
from kvstore.service.http.routes import Route

PATH = "/v1/chat/completions"
Turns = Sequence[Turn[TurnResult]]


@dataclass(slots=True)
class ChatCompletionsDialect:
    """An answer as OpenAI's chat completions, with the fields that every event repeats."""

    context: Context
    body: schema.ChatCompletionBody
    history: StatelessRequest
    has_done: bool = True
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    begun: set[int] = field(default_factory=set)  # choices whose first event was sent

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.stream)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Turns]:
        async with open_stateless(self.context, self.history) as turn:
            yield [turn]

    def first(self, turns: Turns) -> Iterable[Event]:
        return ()  # so that an error before the first token still has its status

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            yield self._chunk(schema.ChunkChoice(piece.index, schema.ChunkDelta("assistant", "")))
        if piece.text or piece.logprobs:
            delta, logprobs = schema.ChunkDelta(content=piece.text), self._logprobs(piece.logprobs or None)
            yield self._chunk(schema.ChunkChoice(piece.index, delta, logprobs=logprobs))
        if piece.finish_reason is not None:
            reason = turns[number].output.choices[piece.index].stop_reason
            delta = schema.ChunkDelta()
            yield self._chunk(schema.ChunkChoice(piece.index, delta, piece.finish_reason, stop_reason=reason))

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk(None, usage_object(results[0].usage))

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> schema.ChatCompletion:
        choices = []
        for index, choice in enumerate(turns[0].output.choices):
            message, logprobs = schema.AssistantMessage(choice.text), self._logprobs(choice.logprobs)
            choices.append(schema.ChatChoice(index, message, choice.finish_reason, logprobs, choice.stop_reason))
        return schema.ChatCompletion(
            id=self.id, created=self.created, model=self.context.model_name, choices=choices,
            usage=usage_object(results[0].usage), system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    def _chunk(self, choice: schema.ChunkChoice | None, usage: UsageObject | None = None) -> Event:
        return None, schema.ChatCompletionChunk(
            id=self.id, created=self.created, model=self.context.model_name, choices=[] if choice is None else [choice],
            usage=usage, system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    def _logprobs(self, found: Sequence[TokenLogprob] | None) -> schema.ChatLogprobs | None:
        if found is None:
            return None
        return chat_logprobs(self.context.engine.engine.tokenizer, found, self.body.top_logprobs or 0)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context, body = await accept(request, schema.ChatCompletionBody)
    body.check()
    params = sampling_params(
        body, context.engine.engine.facts.sampling_defaults, max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    messages, tenant = messages_of(body.messages), tenant_of(request)
    history = StatelessRequest(tenant, messages, params, PATH, body.cache_salt or "", body.priority or 0)
    return await answer(request, ChatCompletionsDialect(context, body, history))


ROUTES = (
    Route(
        "POST", PATH, chat_completions, "user", "The answer to a conversation.", schema.ChatCompletionBody,
        schema.ChatCompletion, "openai",
    ),
)  # fmt: skip
