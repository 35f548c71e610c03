"""POST /v1/completions: prompts are text or token ids and are used as they are, without a chat template."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from kvstore.engine.outputs import Piece, RequestOutput, TokenLogprob, sum_usage
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.language import token_bytes
from kvstore.engine.text.prompts import check_fits
from kvstore.engine.turns import Turn
from kvstore.service.api.exchange import EXCHANGE, Context, Dialect, Event, Exchange, answer
from kvstore.service.api.naming import name_of
from kvstore.service.api.openai.stateless import head_of, output_of, token_text
from kvstore.service.api.schema import (
    Sampling,
    TokenId,
    UsageObject,
    accept,
    check_chars_of,
    sampling_params,
    usage_object,
)
from kvstore.service.http.errors import Route, bad_request, renaming

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 256
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
Turns = Sequence[Turn[RequestOutput]]


class CompletionBody(Sampling, kw_only=True):
    """prompt: a text, token ids, or up to MAX_PROMPTS of either."""

    model: str | None = None
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Raises ApiError 400 for a list of several kinds, and for too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(one) for one in self.prompt}
        if len(kinds) > 1:
            raise bad_request("prompt", "prompt mixes texts, ids and lists; give one kind")
        if kinds == {int}:
            return [list(self.prompt)]  # type: ignore[arg-type]
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request("prompt", f"prompt has {len(self.prompt)} entries; at most {MAX_PROMPTS}")
        return list(self.prompt)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises ApiError 400 for what would change the answer and is not supported."""
        if self.suffix:
            raise bad_request("suffix", "suffix is not supported", "unsupported_parameter")
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of", "best_of other than n is not supported", "unsupported_parameter")
        if self.echo and self.logprobs is not None:
            raise bad_request("logprobs", "logprobs of an echoed prompt are not known; leave out one of them")


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject | None = None
    system_fingerprint: str


# -- in words ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class CompletionsDialect(Dialect[RequestOutput]):
    """Answers as OpenAI's completions, with the fields that every event repeats."""

    context: Context
    exchange: Exchange
    body: CompletionBody
    prompts: list[str | list[int]]
    params: SamplingParams
    conversation: str
    head: dict[str, Any]
    echoed: list[str] = field(default_factory=list)  # what `echo` puts in front of the answers, by prompt
    offsets: dict[int, int] = field(default_factory=dict)  # characters said so far, by choice

    def check(self) -> None:
        """Raises ContextLengthError where a prompt is too long for any window, before it waits for anything."""
        engine = self.context.engine.engine
        with renaming(messages="prompt"):
            for prompt in self.prompts:
                if isinstance(prompt, str):
                    check_chars_of(self.context, [prompt])
                else:
                    check_fits(len(prompt), self.params, engine.facts.max_model_len, engine.facts.max_request_tokens)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Turns]:
        """All prompts are queued, or none is."""
        turns: list[Turn[RequestOutput]] = []
        has_gaps = bool(self.body.stream) or len(self.prompts) == 1  # else one is read after the other
        async with AsyncExitStack() as stack:
            num_sequences = len(self.prompts) * self.params.num_sequences
            stack.enter_context(self.context.limits.admit(self.exchange.tenant, num_sequences))
            for prompt in self.prompts:
                answering = self.context.reading(partial(self._completed, prompt), self.exchange, has_gaps)
                with renaming(messages="prompt"):
                    turns += await stack.enter_async_context(answering)
            self.echoed = [await self._text_of(prompt) for prompt in self.prompts]
            yield turns

    async def _completed(self, prompt: str | list[int], turn: Turn[RequestOutput]) -> RequestOutput:
        salt, priority, tenant = self.body.cache_salt or "", self.body.priority or 0, self.exchange.tenant
        earlier = self.context.recall.named(tenant, salt, self.conversation)
        handle = await self.context.engine.submit(turn, prompt, self.params, tenant, salt, priority, earlier=earlier)
        return await output_of(turn, handle)

    async def _text_of(self, prompt: str | list[int]) -> str:
        engine, tokenizer = self.context.engine, self.context.engine.engine.tokenizer
        if not self.body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else await engine.call_with_text(len(prompt), tokenizer.decode, prompt)

    # -- in words ----------------------------------------------------------------------------------------------------
    def piece(self, turns: Turns, number: int, piece: Piece) -> Iterable[Event]:
        index = number * self.params.n + piece.index
        echoed = "" if index in self.offsets else self.echoed[number]
        text, offset = echoed + piece.text, self.offsets.get(index, 0)
        self.offsets[index] = offset + len(piece.text)
        logprobs = self._logprobs(piece.logprobs, offset) if piece.logprobs else None
        is_last = piece.finish_reason is not None
        stop_reason = turns[number].output.choices[piece.index].stop_reason if is_last else None
        yield None, self._completion([CompletionChoice(index, text, piece.finish_reason, logprobs, stop_reason)], None)

    def last(self, turns: Turns, results: Sequence[RequestOutput]) -> Iterable[Event]:
        if self.body.wants_usage:
            yield None, self._completion([], usage_object(sum_usage([output.usage for output in results])))

    def whole(self, turns: Turns, results: Sequence[RequestOutput]) -> Completion:
        choices: list[CompletionChoice] = []
        for output, before in zip(results, self.echoed, strict=True):
            for choice in output.choices:
                logprobs = None if choice.logprobs is None else self._logprobs(choice.logprobs, 0)
                text = before + choice.text
                choices.append(CompletionChoice(len(choices), text, choice.finish_reason, logprobs, choice.stop_reason))
        return self._completion(choices, usage_object(sum_usage([output.usage for output in results])))

    def _completion(self, choices: list[CompletionChoice], usage: UsageObject | None) -> Completion:
        return Completion(**self.head, choices=choices, usage=usage)

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
        """Log probabilities of the answer's tokens."""
        tokenizer = self.context.engine.engine.tokenizer
        tokens = [token_text(tokenizer, each.token_id) for each in logprobs]
        plain = tokenizer and tokenizer.backend_tokenizer
        parts = (token_bytes(plain, each.token_id, token) for each, token in zip(logprobs, tokens, strict=True))
        begun = (sum(byte & 0xC0 != 0x80 for byte in part) for part in parts)  # characters: a token may end one
        offsets = list(accumulate(begun, initial=offset))[:-1]
        top = [{token_text(tokenizer, i): logprob for i, logprob in each.top.items()} for each in logprobs]
        return CompletionLogprobs(tokens, [each.logprob for each in logprobs], [*top], offsets)


async def completions(request: web.Request) -> web.StreamResponse:
    context, body = await accept(request, CompletionBody)
    body.check()
    params = sampling_params(
        body, context.engine.engine.facts.sampling_defaults, max_tokens=body.most_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )  # fmt: skip
    named, head = name_of(request.headers, body), head_of(context, "cmpl-")
    dialect = CompletionsDialect(context, request[EXCHANGE], body, body.prompts(), params, named, head)
    dialect.check()
    return await answer(request, dialect.opened(), dialect, body.stream)


ROUTES = (
    Route("POST", PATH, completions, "user", "The continuation of prompts.", CompletionBody, Completion, "openai"),
)
