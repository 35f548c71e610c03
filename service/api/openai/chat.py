"""POST /v1/chat/completions: each request brings its whole history, whose KV is found again."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from kvstore.engine.outputs import TokenLogprob
from kvstore.service.api.context import Context, context_of, tenant_of
from kvstore.service.api.edge import check_model, json_response
from kvstore.service.api.openai import schema
from kvstore.service.api.openai.generation import chat_logprobs, fingerprint
from kvstore.service.api.openai.stateless import StatelessRequest, open_stateless
from kvstore.service.api.schema import messages_of, read_body, sampling_params
from kvstore.service.api.sse import EventStream
from kvstore.service.api.usage import UsageObject, usage_object
from kvstore.service.http.routes import Route

PATH = "/v1/chat/completions"


@dataclass(slots=True)
class ChatExchange:
    """One request, with the fields that every event of its answer repeats."""

    context: Context
    body: schema.ChatCompletionBody
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def history(self, tenant: str) -> StatelessRequest:
        """The body's messages. Raises ApiError 400 and RequestError for what cannot be answered."""
        body = self.body
        body.check()
        params = sampling_params(
            body, self.context.engine.engine.facts.sampling_defaults,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip
        return StatelessRequest(
            tenant, messages_of(body.messages), params, PATH, body.cache_salt or "", body.priority or 0
        )

    def chunk(self, choice: schema.ChunkChoice | None, usage: UsageObject | None = None) -> schema.ChatCompletionChunk:
        return schema.ChatCompletionChunk(
            id=self.id, created=self.created, model=self.context.model_name, choices=[] if choice is None else [choice],
            usage=usage, system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    def logprobs(self, found: Sequence[TokenLogprob] | None) -> schema.ChatLogprobs | None:
        if found is None:
            return None
        return chat_logprobs(self.context.engine.engine.tokenizer, found, self.body.top_logprobs or 0)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context, body = context_of(request), await read_body(request, schema.ChatCompletionBody)
    check_model(context, body.model)
    one = ChatExchange(context, body)
    history = one.history(tenant_of(request))
    return await (_stream(request, one, history) if body.stream else _whole(one, history))


async def _whole(one: ChatExchange, history: StatelessRequest) -> web.Response:
    async with open_stateless(one.context, history) as turn:
        async for _ in turn:
            pass
    choices = []
    for index, choice in enumerate(turn.output.choices):
        message, logprobs = schema.AssistantMessage(choice.text), one.logprobs(choice.logprobs)
        choices.append(schema.ChatChoice(index, message, choice.finish_reason, logprobs, choice.stop_reason))
    return json_response(
        schema.ChatCompletion(
            id=one.id, created=one.created, model=one.context.model_name, choices=choices,
            usage=usage_object(turn.output.usage), system_fingerprint=fingerprint(one.context),
        )
    )  # fmt: skip


async def _stream(request: web.Request, one: ChatExchange, history: StatelessRequest) -> web.StreamResponse:
    """Send the headers with the first token, so that an error before it still has its status."""
    async with EventStream(request) as events, open_stateless(one.context, history) as turn:
        begun: set[int] = set()
        async for piece in turn:
            if piece.index not in begun:
                begun.add(piece.index)
                await events.send(one.chunk(schema.ChunkChoice(piece.index, schema.ChunkDelta("assistant", ""))))
            if piece.text or piece.logprobs:
                delta, logprobs = schema.ChunkDelta(content=piece.text), one.logprobs(piece.logprobs or None)
                await events.send(one.chunk(schema.ChunkChoice(piece.index, delta, logprobs=logprobs)))
            if piece.finish_reason is not None:
                reason = turn.output.choices[piece.index].stop_reason
                end = schema.ChunkChoice(piece.index, schema.ChunkDelta(), piece.finish_reason, stop_reason=reason)
                await events.send(one.chunk(end))
        options = one.body.stream_options
        if options is not None and options.include_usage:
            await events.send(one.chunk(None, usage_object(turn.output.usage)))
    return events.response


ROUTES = (
    Route(
        "POST", PATH, chat_completions, "user", "The answer to a conversation.", schema.ChatCompletionBody,
        schema.ChatCompletion, "openai",
    ),
)  # fmt: skip
