"""POST /v1/chat/completions: each request brings its whole history, whose KV is found again."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from kvstore.engine.outputs import Piece, TokenLogprob
from kvstore.engine.turns import Turn
from kvstore.service.api import schema
from kvstore.service.api.answering import Event, answer
from kvstore.service.api.context import EXCHANGE, Context, tenant_of
from kvstore.service.api.openai.stateless import (
    StatelessRequest,
    check_exact,
    fingerprint,
    open_stateless,
    token_text,
)
from kvstore.service.api.sessions.turns import TurnResult
from kvstore.service.http.errors import bad_request
from kvstore.service.http.routes import Route

PATH = "/v1/chat/completions"
Turns = Sequence[Turn[TurnResult]]


class ChatCompletionBody(schema.Sampling, kw_only=True):
    """truncation_reuse: "exact", as every history that comes as text is; sessions have another."""

    model: str | None = None
    messages: schema.Messages
    max_completion_tokens: schema.Count | None = None
    logprobs: bool | None = None
    top_logprobs: schema.TopLogprobs | None = None
    truncation_reuse: str | None = None

    def check(self) -> None:
        """Raises ApiError 400 for fields that do not go together."""
        check_exact(self.truncation_reuse)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobObject(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobObject]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """stop_reason: the stop string or token id that ended it."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: schema.UsageObject
    system_fingerprint: str


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChunkDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: schema.UsageObject | None = None
    system_fingerprint: str


# -- in words ----------------------------------------------------------------------------------------------------------
def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
    content = []
    for one in logprobs:
        text = token_text(tokenizer, one.token_id)
        top = [
            TopLogprob(shown, logprob, list(shown.encode()))
            for shown, logprob in ((token_text(tokenizer, i), logprob) for i, logprob in one.top.items())
        ]
        content.append(TokenLogprobObject(text, one.logprob, list(text.encode()), top[:num_top]))
    return ChatLogprobs(content)


@dataclass(slots=True)
class ChatCompletionsDialect:
    """An answer as OpenAI's chat completions, with the fields that every event repeats."""

    context: Context
    body: ChatCompletionBody
    has_done: ClassVar[bool] = True
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    begun: set[int] = field(default_factory=set)  # choices whose first event was sent

    def first(self, turns: Turns) -> Iterable[Event]:
        return ()  # so that an error before the first token still has its status

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            yield self._chunk(ChunkChoice(piece.index, ChunkDelta("assistant", "")))
        if piece.text or piece.logprobs:
            delta, logprobs = ChunkDelta(content=piece.text), self._logprobs(piece.logprobs or None)
            yield self._chunk(ChunkChoice(piece.index, delta, logprobs=logprobs))
        if piece.finish_reason is not None:
            reason = turns[number].output.choices[piece.index].stop_reason
            delta = ChunkDelta()
            yield self._chunk(ChunkChoice(piece.index, delta, piece.finish_reason, stop_reason=reason))

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield self._chunk(None, schema.usage_object(results[0].usage))

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> ChatCompletion:
        choices = []
        for index, choice in enumerate(turns[0].output.choices):
            message, logprobs = AssistantMessage(choice.text), self._logprobs(choice.logprobs)
            choices.append(ChatChoice(index, message, choice.finish_reason, logprobs, choice.stop_reason))
        return ChatCompletion(
            id=self.id, created=self.created, model=self.context.model_name, choices=choices,
            usage=schema.usage_object(results[0].usage), system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    def _chunk(self, choice: ChunkChoice | None, usage: schema.UsageObject | None = None) -> Event:
        return None, ChatCompletionChunk(
            id=self.id, created=self.created, model=self.context.model_name, choices=[] if choice is None else [choice],
            usage=usage, system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    def _logprobs(self, found: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        if found is None:
            return None
        return chat_logprobs(self.context.engine.engine.tokenizer, found, self.body.top_logprobs or 0)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context, body = await schema.accept(request, ChatCompletionBody)
    body.check()
    params = schema.sampling_params(
        body, context.engine.engine.facts.sampling_defaults, max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    messages, tenant = schema.messages_of(body.messages), tenant_of(request)
    history = StatelessRequest(tenant, messages, params, body.cache_salt or "", body.priority or 0)
    opened = open_stateless(context, request[EXCHANGE], history)
    return await answer(request, opened, ChatCompletionsDialect(context, body), body.stream)


ROUTES = (
    Route(
        "POST", PATH, chat_completions, "user", "The answer to a conversation.", ChatCompletionBody,
        ChatCompletion, "openai",
    ),
)  # fmt: skip
