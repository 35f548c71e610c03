"""Routes around the answers: metrics, version, models, tokens of a text and texts of tokens."""

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvstore import __version__
from kvstore.engine.model.files import why_no_chat
from kvstore.engine.outputs import MOST_ASKED
from kvstore.engine.text.chat_template import Message, without_marks
from kvstore.engine.text.language import Language
from kvstore.engine.text.prompts import num_chars_of
from kvstore.service.api.exchange import Context, context_of, tenant_of
from kvstore.service.api.metrics import metrics_page
from kvstore.service.api.schema import Messages, TokenId, UsageObject, accept, check_model, messages_of, usage_object
from kvstore.service.http.errors import ApiError, Route, bad_request, json_response

MAX_TOKENIZED_CHARS = 2**20


async def metrics(request: web.Request) -> web.Response:
    context = context_of(request)
    stats = await context.stats.get()
    vllm_model = context.model_name if context.options.vllm_metrics else None
    page = metrics_page(context.metrics, {} if "error" in stats or context.is_silent else stats, vllm_model)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


# -- what is served --------------------------------------------------------------------------------------------------
class Version(msgspec.Struct):
    version: str
    model: str
    block_size: int
    max_model_len: int


class Model(msgspec.Struct):
    """As OpenAI, vLLM and Anthropic describe one. root: the model itself, where `id` is the name that it is served
    under. created_at: as RFC 3339 has it.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    type: str
    display_name: str
    created_at: str
    max_input_tokens: int


class ModelList(msgspec.Struct):
    object: str
    data: list[Model]
    has_more: bool
    first_id: str
    last_id: str


async def version(request: web.Request) -> web.Response:
    context = context_of(request)
    engine = context.engine.engine
    return json_response(Version(__version__, context.model_name, engine.facts.block_size, engine.facts.max_model_len))


async def list_models(request: web.Request) -> web.Response:
    model = _model(context_of(request))
    return json_response(ModelList("list", [model], False, model.id, model.id))


async def show_model(request: web.Request) -> web.Response:
    context = context_of(request)
    check_model(context, request.match_info["id"])
    return json_response(_model(context))


def _model(context: Context) -> Model:
    name, facts = context.model_name, context.engine.engine.facts
    window, created_at = facts.max_model_len, datetime.fromtimestamp(context.started_s, UTC).isoformat()
    return Model(
        name, "model", context.started_s, "kvstore", facts.model_name, window, "model", name, created_at, window
    )


# -- what was asked ---------------------------------------------------------------------------------------------------
class Why(msgspec.Struct):
    """answers: the usage of each; a miss in it says what was computed again, and why."""

    request_id: str
    answers: list[UsageObject]


async def why(request: web.Request) -> web.Response:
    """Another tenant's request is as unknown as one that never was."""
    request_id = request.match_info["id"]
    usages = context_of(request).engine.engine.admin.usages.get((tenant_of(request), request_id))
    if not usages:
        told = f"there is no request {request_id[:64]!r} among the last {MOST_ASKED:,} of yours"
        raise ApiError(404, told, param="id", code="request_not_found")
    return json_response(Why(request_id, [usage_object(usage) for usage in usages]))


# -- tokens ----------------------------------------------------------------------------------------------------------
class TokenizeBody(msgspec.Struct, kw_only=True):
    """A prompt or messages; with messages, the prompt that the chat template makes of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]


class Prompt(msgspec.Struct):
    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    context, body = await accept(request, TokenizeBody)
    engine, tokenizer = context.engine.engine, _tokenizer(context)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "give either prompt or messages", "missing")
    if body.messages is not None:
        messages = messages_of(body.messages)
        num_chars = check_tokenized(num_chars_of(messages), "messages")
        to_ids = partial(_chat_ids, context.engine.engine.chats.language, messages)
    else:
        assert body.prompt is not None
        num_chars = check_tokenized(len(body.prompt), "prompt")
        to_ids = partial(_encode, tokenizer, body.prompt, body.add_special_tokens is not False)

    def tokenized() -> web.Response:
        ids = to_ids()
        shown = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return json_response(Tokenized(len(ids), engine.facts.max_model_len, ids, shown))

    with context.limits.admit(tenant_of(request)):
        return await context.engine.call_with_text(num_chars, tokenized)


def check_tokenized(num_chars: int, param: str) -> int:
    """The same number. Raises ApiError 400 for more than are tokenized at once."""
    if num_chars > MAX_TOKENIZED_CHARS:
        message = f"{param} has {num_chars} characters; at most {MAX_TOKENIZED_CHARS} are tokenized at once"
        raise bad_request(param, message)
    return num_chars


async def detokenize(request: web.Request) -> web.Response:
    context, body = await accept(request, DetokenizeBody)
    tokenizer, size = _tokenizer(context), context.engine.engine.facts.vocab_size
    if body.tokens and max(body.tokens) >= size:
        raise bad_request("tokens", f"token ids go from 0 to {size - 1}")
    with context.limits.admit(tenant_of(request)):
        return await context.engine.call_with_text(len(body.tokens), _detokenized, tokenizer, body.tokens)


def _detokenized(tokenizer: Any, ids: list[int]) -> web.Response:
    """Decode as a batch of one, which, unlike `decode`, lets other threads run meanwhile."""
    (text,) = tokenizer.backend_tokenizer.decode_batch([ids], skip_special_tokens=False)
    return json_response(Prompt(text))


def _tokenizer(context: Context) -> Any:
    tokenizer = context.engine.engine.tokenizer
    if tokenizer is None:
        raise bad_request("model", why_no_chat("the model", False), "no_tokenizer")
    return tokenizer


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def _chat_ids(language: Language, messages: list[Message]) -> list[int]:
    if language.template is None:
        raise bad_request("messages", language.why_no_chat, "no_chat_template")
    return without_marks(language.template.prompt_ids(language.template.marked(messages)))[0]


ROUTES = (
    Route(
        "GET", "/metrics", metrics, "user", "Metrics in Prometheus' text format.", None, str, "server", is_polled=True
    ),
    Route("GET", "/version", version, "user", "Version, model and sizes.", None, Version, "server"),
    Route("GET", "/requests/{id}/why", why, "user", "Why one of the last requests missed.", None, Why, "server"),
    Route("GET", "/v1/models", list_models, "user", "The models: one.", None, ModelList, "models"),
    Route("GET", "/v1/models/{id:.+}", show_model, "user", "One model.", None, Model, "models"),
    Route("POST", "/tokenize", tokenize, "user", "Token ids of text or messages.", TokenizeBody, Tokenized, "tokens"),
    Route("POST", "/detokenize", detokenize, "user", "Text of token ids.", DetokenizeBody, Prompt, "tokens"),
)
