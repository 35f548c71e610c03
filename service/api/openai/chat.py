"""POST /v1/chat/completions: each request brings its whole history, whose KV is found again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from kvstore.engine.outputs import Choice, Piece, TokenLogprob
from kvstore.engine.text.language import token_bytes
from kvstore.engine.turns import Turn
from kvstore.service.api import schema
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, answer, tenant_of
from kvstore.service.api.naming import name_of
from kvstore.service.api.openai.stateless import StatelessRequest, check_exact, head_of, open_stateless, token_text
from kvstore.service.api.sessions.turns import TurnResult, delta_of
from kvstore.service.http.errors import Route, bad_request

PATH = "/v1/chat/completions"
Turns = Sequence[Turn[TurnResult]]


class ChatCompletionBody(schema.Talking, kw_only=True):
    """truncation_reuse: "exact", as every history that comes as text is; sessions have another.

    continue_final_message: the answer goes on with the last message; add_generation_prompt is false then.
    """

    model: str | None = None
    messages: schema.Messages
    logprobs: bool | None = None
    top_logprobs: schema.TopLogprobs | None = None
    truncation_reuse: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def check(self) -> None:
        """Raises ApiError 400 for fields that do not go together."""
        check_exact(self.truncation_reuse)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.continue_final_message:
            self._check_continued(f"messages[{len(self.messages) - 1}]")
        elif self.add_generation_prompt is False:
            message = "add_generation_prompt is false, and continue_final_message is not true; give both or neither"
            raise bad_request("add_generation_prompt", message)

    def _check_continued(self, where: str) -> None:
        last = self.messages[-1]
        if self.add_generation_prompt:
            message = "add_generation_prompt opens a new answer, and continue_final_message goes on with the last one"
            raise bad_request("add_generation_prompt", f"{message}; make one of them false")
        if last.role != "assistant":
            message = f"{where}.role is {last.role[:40]!r}; continue_final_message goes on with an assistant's message"
            raise bad_request(f"{where}.role", message)
        if last.tool_calls:
            message = f"{where} has calls, after which no answer goes on; leave continue_final_message out"
            raise bad_request(f"{where}.tool_calls", message)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobObject(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobObject]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    """content: null where there are calls alone. tool_calls: as OpenAI has them, and each is whole."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


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
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


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
@dataclass(slots=True)
class ChatCompletionsDialect(Dialect[TurnResult]):
    """An answer as OpenAI's chat completions, with the fields that every event repeats."""

    context: Context
    body: ChatCompletionBody
    head: dict[str, Any]
    begun: set[int] = field(default_factory=set)  # choices whose first event was sent

    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            yield self._chunk(ChunkChoice(piece.index, ChunkDelta("assistant", "")))
        deltas = [ChunkDelta(**fields) for event in piece.parts if (fields := delta_of(event)) is not None]
        if piece.logprobs and not deltas:
            deltas = [ChunkDelta(content="")]
        logprobs = self._logprobs(piece.logprobs or None)
        for delta in deltas:
            yield self._chunk(ChunkChoice(piece.index, delta, logprobs=logprobs))
            logprobs = None
        if piece.finish_reason is not None:
            reason = turns[number].output.choices[piece.index].stop_reason
            delta = ChunkDelta()
            yield self._chunk(ChunkChoice(piece.index, delta, piece.finish_reason, stop_reason=reason))

    def last(self, turns: Turns, results: Sequence[TurnResult]) -> Iterable[Event]:
        if self.body.wants_usage:
            yield self._chunk(None, schema.usage_object(results[0].usage))

    def whole(self, turns: Turns, results: Sequence[TurnResult]) -> ChatCompletion:
        choices = []
        for index, choice in enumerate(turns[0].output.choices):
            logprobs = self._logprobs(choice.logprobs)
            choices.append(ChatChoice(index, message_of(choice), choice.finish_reason, logprobs, choice.stop_reason))
        return ChatCompletion(**self.head, choices=choices, usage=schema.usage_object(results[0].usage))

    def _chunk(self, choice: ChunkChoice | None, usage: schema.UsageObject | None = None) -> Event:
        return None, ChatCompletionChunk(**self.head, choices=[] if choice is None else [choice], usage=usage)

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if logprobs is None else ChatLogprobs([self._logprob(one) for one in logprobs])

    def _logprob(self, one: TokenLogprob) -> TokenLogprobObject:
        text, said = self._spelled(one.token_id)
        top = list(one.top.items())[: self.body.top_logprobs or 0]
        best = [TopLogprob(spelled, logprob, parts) for i, logprob in top for spelled, parts in [self._spelled(i)]]
        return TokenLogprobObject(text, one.logprob, said, best)

    def _spelled(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text and its bytes."""
        tokenizer = self.context.engine.engine.tokenizer
        text = token_text(tokenizer, token_id)
        return text, list(token_bytes(tokenizer.backend_tokenizer, token_id, text))


def message_of(choice: Choice) -> AssistantMessage:
    message = AssistantMessage(**choice.message)
    if choice.tool_calls:
        message.content = choice.content or None
    return message


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context, body = await schema.accept(request, ChatCompletionBody)
    body.check()
    params = schema.sampling_params(
        body, context.engine.engine.facts.sampling_defaults,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip
    messages, tenant = schema.messages_of(body.messages), tenant_of(request)
    history = StatelessRequest(
        tenant, messages, params, body.cache_salt or "", body.priority or 0, body.options,
        name_of(request.headers, body), bool(body.continue_final_message),
        schema.pin_s_of(body.prompt_cache_options, schema.breakpoints_in(message.content for message in body.messages)),
    )  # fmt: skip
    opened = open_stateless(context, request[EXCHANGE], history)
    return await answer(
        request, opened, ChatCompletionsDialect(context, body, head_of(context, "chatcmpl-")), body.stream
    )


ROUTES = (
    Route(
        "POST", PATH, chat_completions, "user", "The answer to a conversation.", ChatCompletionBody,
        ChatCompletion, "openai",
    ),
)  # fmt: skip
