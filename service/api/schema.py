"""Reads JSON bodies: limits, types with bounds, and error messages that name the field and the remedy.

Unknown fields that would change the answer, and near misses of known names, are refused; all others are ignored, as
clients of other servers expect. Knows the shapes that several routes share; those of one route stand beside it.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from msgspec import UNSET, Meta, UnsetType

from kvstore.engine.outputs import AppliedEdit, CachedTokensDetails, Miss, Usage
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.prompts import NO_OPTIONS, AnswerOptions, CallIn, check_chars, in_order_of_calls, joined
from kvstore.service.api.asking import ResponseFormat, StructuredIn, ToolChoice, Tools, constraint_of, options_of
from kvstore.service.api.exchange import Context, context_of
from kvstore.service.api.field_errors import field_error, syntax_error
from kvstore.service.api.naming import Naming
from kvstore.service.http.errors import NO_RETRY, ApiError, ReaderGone, bad_request
from kvstore.service.http.limits import LARGE_BODY_BYTES
from kvstore.service.settings.options import nearest
from kvstore.service.settings.serve_options import ServeOptions

LOGGER = logging.getLogger("kvstore.service")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# Fields that would change the answer, with the values that leave it as it is. A body that has one reads it itself.
CONSTRAINTS = dict.fromkeys((
    "allowed_token_ids", "audio", "bad_words", "chat_template", "chat_template_kwargs", "context_management",
    "continue_final_message", "documents", "functions", "include_stop_str_in_output", "logits_processors", "logprobs",
    "lora_request", "prompt_embeds", "structural_tag", "structured_outputs", "tools", "top_logprobs",
    "truncate_prompt_tokens",
), _NOTHING) | {
    "add_generation_prompt": (None, True),
    "modalities": (None, [], ["text"]),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
}  # fmt: skip
GUIDED = "guided_"  # and what follows it: what a body does not read itself
# Fields of other servers that are close to a name of ours but mean something else.
NO_MISSES = {"conversation_id", "message_id", "mode", "models", "reasoning_format", "speed", "top_a", "top_n"}
TTLS: Mapping[str, float] = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}
DEFAULT_TTL = "30m"  # OpenAI's
MAX_EXAMINED = 64  # of unknown fields
_named: set[str] = set()  # unknown fields that the log has named
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
T = TypeVar("T")
Count = Annotated[int, Meta(ge=1, le=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=16)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


def check_fields(raw: bytes | bytearray, type_: type[Any]) -> None:
    """Raises ApiError 400 that names the field. raw: an object that could be read as a `type_`.

    REFUSED of the type: further fields that are refused, with what to do. NAMES_UNKNOWN: the log names the others.
    """
    known = getattr(type_, "__struct_encode_fields__", ())
    refused = getattr(type_, "REFUSED", {})
    found = {name: value for name, value in _FIELDS.decode(raw).items() if name not in known}
    for name, value in found.items():
        if name in refused and _says_something(value):
            raise bad_request(name, f"{name}: {refused[name]}", "unsupported_parameter")
        if (name in CONSTRAINTS or name.startswith(GUIDED)) and _says_something(value, CONSTRAINTS.get(name, _NOTHING)):
            raise bad_request(name[:64], f"{name[:64]} is not supported here", "unsupported_parameter")
    for name in islice((name for name in found if name not in CONSTRAINTS), MAX_EXAMINED):
        for meant in near_misses(name, (*known, *CONSTRAINTS)):
            raise bad_request(name[:64], f"{name[:64]}: did you mean {meant}?", "unknown_field")
    if getattr(type_, "NAMES_UNKNOWN", False):
        for name in islice((name[:64] for name in found if name[:64] not in _named), MAX_EXAMINED - len(_named)):
            _named.add(name)
            LOGGER.info("the field %r is not known here and is passed over; this is said once", name)


def _says_something(value: msgspec.Raw, nothing: tuple[Any, ...] = _NOTHING) -> bool:
    return msgspec.json.decode(value) not in nothing


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """The known name that was probably meant, if any: one typing error in a short name, two in a long one."""
    if name in NO_MISSES:
        return []
    return nearest(name[:64], (one for one in known if len(one) > 3), 0.75 if len(name) < 6 else 0.86)


class Breakpoint(msgspec.Struct):
    """Of a content block, or of the whole request (`prompt_cache_options`), whose ttl the others have that say none.

    mode: "implicit", so that the prompt's end is a breakpoint, or "explicit"; of a request alone. ttl: of TTLS.
    """

    mode: str | None = None
    ttl: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message. Only {"type": "text", "text": ...} is supported. reuse: with "reencode" its KV may be
    that of the same text elsewhere.
    """

    type: str
    text: str | None = None
    prompt_cache_breakpoint: Breakpoint | None = None
    reuse: str | None = None


def breakpoints_in(contents: Iterable[object]) -> list[Breakpoint]:
    """Of the contents of messages: texts, or lists of parts."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.prompt_cache_breakpoint for part in parts if part.prompt_cache_breakpoint is not None]


def seconds_of(ttl: str, param: str) -> float:
    """Raises ApiError 400 for a text that is none of TTLS."""
    if ttl not in TTLS:
        raise bad_request(param, f"{param} is {ttl[:40]!r}; give {', '.join(TTLS)}")
    return TTLS[ttl]


def pin_s_of(options: Breakpoint | None, breakpoints: Iterable[Breakpoint]) -> float | None:
    """For how many seconds the conversation is pinned: the longest of its breakpoints; None where there is none.

    Raises ApiError 400.
    """
    options = options or Breakpoint()
    if options.mode not in (None, "implicit", "explicit"):
        shown = options.mode[:40]
        raise bad_request("prompt_cache_options.mode", f"the mode {shown!r} is not known; give implicit or explicit")
    default_s = seconds_of(options.ttl or DEFAULT_TTL, "prompt_cache_options.ttl")
    wanted = [default_s] if options.ttl is not None and options.mode != "explicit" else []
    wanted += [
        default_s if one.ttl is None else seconds_of(one.ttl, "prompt_cache_breakpoint.ttl") for one in breakpoints
    ]
    return max(wanted, default=None)


class MessageIn(msgspec.Struct):
    """One message of a request. role: system, developer (the same), user, assistant or tool. content: null beside
    tool_calls alone.
    """

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None
    tool_calls: Annotated[list[CallIn], Meta(max_length=256)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[MessageIn], Meta(min_length=1, max_length=4096)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Sampling(Naming, kw_only=True):
    """What every route that generates accepts; null is the same as not given."""

    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    kv_exact: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    structured_outputs: StructuredIn | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def most_tokens(self) -> int | None:
        """How many tokens the answer may have, by whichever name it was given."""
        return self.max_completion_tokens or self.max_output_tokens or self.max_tokens

    @property
    def constraints(self) -> dict[str, Any]:
        """The fields that say what the answer must match."""
        names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        return {name: given for name in names if (given := getattr(self, name)) is not None}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Talking(Sampling, kw_only=True):
    """What the routes that chat accept beside that, in OpenAI's and vLLM's words."""

    prompt_cache_options: Breakpoint | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def options(self) -> AnswerOptions:
        """Raises ApiError 400, and RequestError which names the field."""
        choice, variables, effort = self.tool_choice, self.chat_template_kwargs, self.reasoning_effort
        if not self.tools and choice in (None, "auto", "none") and not variables and effort is None:
            return NO_OPTIONS
        return options_of(self.tools or (), choice, self.parallel_tool_calls, variables or {}, effort)

    @property
    def constraints(self) -> dict[str, Any]:
        wanted = self.response_format
        return super().constraints | ({} if wanted is None or wanted.type == "text" else {"response_format": wanted})


_SAMPLED = [one.name for one in fields(SamplingParams) if one.name in Sampling.__struct_fields__]


def sampling_params(body: Sampling, defaults: Mapping[str, float], **more: Any) -> SamplingParams:
    """defaults: the model's values for what the request does not give; a beam search has no use for them. more: fields
    of SamplingParams that the route sets, such as logprobs; None means not given.

    Raises RequestError, which names the field.
    """
    given = {name: getattr(body, name) for name in _SAMPLED} | {"max_tokens": body.most_tokens} | more
    if constraints := body.constraints:
        given["structured_outputs"] = constraint_of(constraints)
    if given["top_k"] == -1:  # how vLLM's clients say "off"
        given["top_k"] = 0
    if body.use_beam_search:
        defaults = {}
    return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


# -- messages --------------------------------------------------------------------------------------------------------
def messages_of(messages: Sequence[MessageIn], param: str = "messages") -> list[Message]:
    """Messages in the engine's form. Raises ApiError 400 for roles and parts that are not supported."""
    return in_order_of_calls([message_of(message, f"{param}[{index}]") for index, message in enumerate(messages)])


def check_chars_of(context: Context, texts: Sequence[str]) -> None:
    """Raises ContextLengthError for what no window holds, before the request waits and takes memory."""
    engine = context.engine.engine
    if engine.tokenizer is not None:
        check_chars(texts, engine.tokenizer, engine.facts.max_request_tokens)


def message_of(message: MessageIn, param: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    if role == "function":
        raise bad_request(f"{param}.role", f"messages of the role {role!r} are not supported", "unsupported_role")
    if role not in ("system", "user", "assistant", "tool"):
        shown = message.role[:40]
        raise bad_request(
            f"{param}.role", f"{param}.role is {shown!r}; give system, developer, user, assistant or tool"
        )
    calls = message.tool_calls if role == "assistant" else None
    if message.content is None and not calls:
        raise bad_request(f"{param}.content", f"{param}.content is missing", "missing")
    said: Message = {"role": role, **said_content(message.content or "", f"{param}.content")}
    if calls:
        said["tool_calls"] = [_call_of(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "assistant" and message.reasoning_content:
        said["reasoning_content"] = message.reasoning_content
    if role == "tool":
        if message.tool_call_id is None:
            raise bad_request(f"{param}.tool_call_id", f"{param}.tool_call_id is missing", "missing")
        said["tool_call_id"] = message.tool_call_id
    return said


def _call_of(call: CallIn, param: str) -> dict[str, Any]:
    """Its arguments as text, whatever numbers they have."""
    said: dict[str, Any] = msgspec.to_builtins(call)
    if not isinstance(given := call.function.arguments, str):
        try:
            said["function"]["arguments"] = json.dumps(given, ensure_ascii=False)
        except RecursionError:
            raise bad_request(f"{param}.function.arguments", f"{param}.function.arguments is nested too deep") from None
    return said


def said_content(content: str | Sequence[ContentPart], param: str) -> Message:
    """The content of a message; see `joined`. Raises ApiError 400 that names the path."""
    if isinstance(content, str):
        return {"content": content}
    for index, part in enumerate(content):
        check_part(part, f"{param}[{index}]")
    return joined((part.text or "", part.reuse) for part in content)


def check_part(part: ContentPart, where: str) -> None:
    """Raises ApiError 400 unless it is a text."""
    if part.type not in ("text", "input_text", "output_text"):
        kind = part.type[:40]
        raise bad_request(where, f"{where} is of the type {kind!r}; only text is supported", "unsupported_content")
    if part.text is None:
        raise bad_request(f"{where}.text", f"{where}.text is missing", "missing")
    if part.reuse not in (None, "reencode"):
        raise bad_request(f"{where}.reuse", f"{where}.reuse is {part.reuse[:40]!r}; give reencode, or leave it out")


# -- bodies ----------------------------------------------------------------------------------------------------------
def must_be_given(type_: Any) -> bool:
    """Whether a body of this type has fields that have to be there."""
    return any(field.required for field in msgspec.structs.fields(type_))


async def accept(request: web.Request, type_: type[T]) -> tuple[Context, T]:
    """The body of a request for this server's model, which it may name. Raises as `read_body` and `check_model`."""
    context, body = context_of(request), await read_body(request, type_)
    check_model(context, getattr(body, "model", None))
    return context, body


def check_model(context: Context, name: str | None) -> None:
    """Raises ApiError 404 unless it is this server's model, or none is named."""
    if name is not None and name not in (context.model_name, context.engine.engine.facts.model_name):
        message = f"there is no model {name[:80]!r}; this server has {context.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def read_body(request: web.Request, type_: type[T]) -> T:
    """The request's JSON as a `type_`; no body counts as an empty one where it may be. Raises ApiError 400, 408, 413 or
    415, and ReaderGone.
    """
    if not request.body_exists and not must_be_given(type_):
        return type_()
    _check_headers(request)
    options, limits = context_of(request).options, context_of(request).limits
    try:
        async with asyncio.timeout(options.body_timeout_s) as arriving:
            await _ask_for_body(request)
            raw = await _content(request, options, limits.large_bodies, arriving)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="body_timeout", headers=NO_RETRY) from None
    except web.RequestPayloadError:
        raise ApiError(400, "the body is not valid HTTP", code="bad_request") from None
    except ConnectionError as error:
        raise ReaderGone("the client went away") from error
    return parse(raw, type_)


def read_query(request: web.Request, type_: type[T]) -> T:
    """Raises ApiError 400 that names the parameter."""
    try:
        return msgspec.convert(dict(request.query), type_, strict=False)
    except msgspec.ValidationError as error:
        raise field_error(str(error)) from None


def _check_headers(request: web.Request) -> None:
    """Another origin's page can make a browser send a plain form, so a request with an Origin must be JSON."""
    kind, limit = request.content_type, context_of(request).options.max_body_bytes
    if "Origin" in request.headers and kind != "application/json" and request.can_read_body:
        raise ApiError(415, f"the body is {kind[:80]}; send application/json", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not supported", code="unsupported_media_type")
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)


async def _ask_for_body(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not part of the answer


async def _content(
    request: web.Request, options: ServeOptions, large: asyncio.Semaphore, arriving: asyncio.Timeout
) -> bytearray:
    """Unlike aiohttp's `read`, it does not keep the body in the request, which lives as long as its answer.

    What has become large waits for room in `large`. It is given `arriving`'s time again then.
    """
    content = bytearray()
    async with AsyncExitStack() as room:
        async for chunk in request.content.iter_any():
            is_first_large = len(content) <= LARGE_BODY_BYTES < len(content) + len(chunk)
            content += chunk
            if len(content) > options.max_body_bytes:
                raise _too_large(options.max_body_bytes)
            if is_first_large:
                arriving.reschedule(None)
                await room.enter_async_context(large)
                arriving.reschedule(asyncio.get_running_loop().time() + options.body_timeout_s)
    return content


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")


# Each becomes a Python object many times as large as its bytes, and nobody else is served meanwhile. Commas within
# texts count too, but no window holds so many.
MAX_BRACKETS, MAX_QUOTES = 2**18, 2**21


def parse(raw: bytes | bytearray, type_: type[T]) -> T:
    """Raises ApiError 400 that names the field where there is one."""
    if not raw or raw.isspace():
        raise ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS or raw.count(b'"') > MAX_QUOTES:
        raise ApiError(400, "the body has too many lists, objects or texts", code="too_many_values")
    try:
        raw.decode()  # msgspec does not look into fields that it skips
        body = msgspec.json.decode(raw, type=type_)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise field_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise syntax_error(raw, str(error)) from None
    check_fields(raw, type_)
    return body


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: a subset of prompt_tokens, and the sum of its details. cache_write_tokens: see `Usage`. miss: only
    where tokens were computed that an earlier request of the conversation had. thinking: "kept" or "dropped", only
    where earlier answers had any.
    """

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    cache_write_tokens: int
    miss: Miss | UnsetType = UNSET
    thinking: str | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """reasoning_tokens: see `Usage`."""

    reasoning_tokens: int


class UsageObject(msgspec.Struct, omit_defaults=True):
    """completion_tokens_details: only where the model reasoned. capped_max_tokens: only where the request's max_tokens
    was more than the window had left, which is this; of several prompts that of the longest.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    capped_max_tokens: int | None = None


class AppliedEdits(msgspec.Struct):
    """What was done of the request's context_management."""

    applied_edits: list[AppliedEdit] = []


def edits_in(options: AnswerOptions, applied: Sequence[AppliedEdit]) -> AppliedEdits | UnsetType:
    """As an answer tells them; unset where the request has no context_management."""
    return UNSET if options.context_management is None else AppliedEdits(list(applied))


def usage_object(usage: Usage) -> UsageObject:
    details, total = usage.cached_tokens_details, usage.prompt_tokens + usage.completion_tokens
    of_prompt = PromptTokensDetails(
        details.total, details, usage.cache_write_tokens, usage.miss or UNSET, usage.thinking or UNSET
    )
    of_answer = CompletionTokensDetails(usage.reasoning_tokens) if usage.reasoning_tokens else None
    return UsageObject(
        usage.prompt_tokens, usage.completion_tokens, total, of_prompt, of_answer, usage.capped_max_tokens
    )
