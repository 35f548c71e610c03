"""POST /v1/completions: prompts are text or token ids and are used as they are, without a chat template."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from aiohttp import web

from kvstore.engine.core.output_processor import Handle
from kvstore.engine.outputs import Piece, TokenLogprob
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.prompts import check_fits
from kvstore.engine.turns import Turn
from kvstore.errors import ContextLengthError
from kvstore.service.api.context import Context, context_of, tenant_of
from kvstore.service.api.edge import check_model, json_response
from kvstore.service.api.openai.generation import check_ended, fingerprint, token_text
from kvstore.service.api.openai.schema import Completion, CompletionBody, CompletionChoice, CompletionLogprobs
from kvstore.service.api.schema import check_chars_of, read_body, sampling_params
from kvstore.service.api.sse import EventStream
from kvstore.service.api.usage import UsageObject, sum_usage
from kvstore.service.http.routes import Route

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class CompletionExchange:
    """One request, with the fields that every event of its answer repeats."""

    context: Context
    tenant: str
    body: CompletionBody
    prompts: list[str | list[int]]
    params: SamplingParams
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self) -> None:
        """Raises ContextLengthError where a prompt is too long for any window, before it waits for anything."""
        engine = self.context.engine.engine
        with _named():
            for prompt in self.prompts:
                if isinstance(prompt, str):
                    check_chars_of(self.context, [prompt])
                else:
                    check_fits(len(prompt), self.params, engine.facts.max_model_len, engine.facts.max_request_tokens)

    async def start(self, stack: AsyncExitStack) -> list[Turn[Handle]]:
        """Queue all prompts, or none: leaving the stack ends and counts them."""
        answers = []
        for prompt in self.prompts:
            with _named():
                answer = await self.context.engine.start(
                    prompt, self.params, self.tenant, self.body.cache_salt or "", self.body.priority or 0
                )
            has_gaps = bool(self.body.stream) or len(self.prompts) == 1  # else one is read after the other
            answers.append(await stack.enter_async_context(self.context.reading(answer, PATH, has_gaps)))
        return answers

    def completion(self, choices: list[CompletionChoice], usage: UsageObject | None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.context.model_name, choices=choices, usage=usage,
            system_fingerprint=fingerprint(self.context),
        )  # fmt: skip

    async def prompt_text(self, answer: Turn[Handle], prompt: str | list[int]) -> str:
        """What `echo` puts in front of the answer."""
        if not self.body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        engine, ids = self.context.engine, answer.output.prompt_token_ids
        tokenizer = engine.engine.tokenizer
        return "" if tokenizer is None else await engine.call_with_text(len(ids), tokenizer.decode, ids)


@contextmanager
def _named() -> Iterator[None]:
    """Errors of length name the prompt."""
    try:
        yield
    except ContextLengthError as error:
        error.param = "prompt"
        raise


async def completions(request: web.Request) -> web.StreamResponse:
    context, body = context_of(request), await read_body(request, CompletionBody)
    check_model(context, body.model)
    body.check()
    params = sampling_params(
        body, context.engine.engine.facts.sampling_defaults, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )  # fmt: skip
    one = CompletionExchange(context, tenant_of(request), body, body.prompts(), params)
    one.check()
    with context.limits.admit(one.tenant, len(one.prompts) * params.n):
        return await (_stream(request, one) if body.stream else _whole(one))


async def _whole(one: CompletionExchange) -> web.Response:
    async with AsyncExitStack() as stack:
        answers = await one.start(stack)
        for answer in answers:
            async for _ in _pieces(answer):
                pass
    choices: list[CompletionChoice] = []
    for answer, prompt in zip(answers, one.prompts, strict=True):
        before = await one.prompt_text(answer, prompt)
        for choice in answer.output.choices:
            logprobs = None if choice.logprobs is None else _logprobs(one, choice.logprobs, len(before))
            text = before + choice.text
            choices.append(CompletionChoice(len(choices), text, choice.finish_reason, logprobs, choice.stop_reason))
    return json_response(one.completion(choices, sum_usage([answer.output.usage for answer in answers])))


async def _stream(request: web.Request, one: CompletionExchange) -> web.StreamResponse:
    async with EventStream(request) as events, AsyncExitStack() as stack:
        answers = await one.start(stack)
        offsets: dict[int, int] = {}
        async with aclosing(_together(answers)) as pieces:
            async for number, piece in pieces:
                await events.send(await _chunk(one, answers[number], number, piece, offsets))
        options = one.body.stream_options
        if options is not None and options.include_usage:
            await events.send(one.completion([], sum_usage([answer.output.usage for answer in answers])))
    return events.response


Item = tuple[int, Piece | Exception | None]  # None: that answer has ended


async def _together(answers: Sequence[Turn[Handle]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of all answers as they come, each with its answer's number."""
    if len(answers) == 1:  # without a task and a queue in between
        async for piece in _pieces(answers[0]):
            yield 0, piece
        return
    items: asyncio.Queue[Item] = asyncio.Queue(len(answers) * 4)
    readers = [asyncio.create_task(_read(answer, number, items)) for number, answer in enumerate(answers)]
    try:
        num_open = len(answers)
        while num_open:
            number, item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(answer: Turn[Handle], number: int, items: asyncio.Queue[Item]) -> None:
    try:
        async for piece in _pieces(answer):
            await items.put((number, piece))
    except Exception as error:
        await items.put((number, error))
    else:
        await items.put((number, None))


async def _pieces(answer: Turn[Handle]) -> AsyncIterator[Piece]:
    """Raises ApiError 503 when the server broke it off."""
    async for piece in answer:
        if piece.finish_reason != "abort":  # which is told as an error
            yield piece
    check_ended(answer.output)


async def _chunk(
    one: CompletionExchange, answer: Turn[Handle], number: int, piece: Piece, offsets: dict[int, int]
) -> Completion:
    index = number * one.params.n + piece.index
    text = piece.text
    if index not in offsets:
        offsets[index] = 0
        text = await one.prompt_text(answer, one.prompts[number]) + text
    logprobs = None if not piece.logprobs else _logprobs(one, piece.logprobs, offsets[index])
    offsets[index] += len(text)
    is_last = piece.finish_reason is not None
    stop_reason = answer.output.choices[piece.index].stop_reason if is_last else None
    return one.completion([CompletionChoice(index, text, piece.finish_reason, logprobs, stop_reason)], None)


def _logprobs(one: CompletionExchange, logprobs: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Log probabilities of the answer's tokens; those of an echoed prompt are not known."""
    tokenizer = one.context.engine.engine.tokenizer
    tokens = [token_text(tokenizer, each.token_id) for each in logprobs]
    offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    top = [{token_text(tokenizer, i): logprob for i, logprob in each.top.items()} for each in logprobs]
    return CompletionLogprobs(tokens, [each.logprob for each in logprobs], [*top], offsets)


ROUTES = (
    Route("POST", PATH, completions, "user", "The continuation of prompts.", CompletionBody, Completion, "openai"),
)
