"""Bodies, answers and errors of /v1/messages, in Anthropic's shapes. Knows no handler."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvstore.engine.outputs import CachedTokensDetails, Choice, Miss, Usage
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.clearing import ContextManagement
from kvstore.engine.text.prompts import MAX_TOOLS, AnswerOptions, check_effort, in_order_of_calls, joined
from kvstore.errors import ContextLengthError
from kvstore.service.api.asking import (
    FunctionIn,
    JsonSchema,
    ResponseFormat,
    ToolIn,
    flat_options_of,
)
from kvstore.service.api.schema import (
    AppliedEdits,
    ContentPart,
    Sampling,
    Stop,
    check_part,
    said_content,
    seconds_of,
    usage_object,
)
from kvstore.service.http.errors import ApiError, bad_request

ATTRIBUTION = "x-anthropic-billing-header:"
DEFAULT_TTL = "5m"
MAX_BLOCKS = 4096


# -- bodies ------------------------------------------------------------------------------------------------------------
class CacheControl(msgspec.Struct):
    """type: ephemeral. ttl: "5m", which it is without one, or "1h"."""

    type: str = "ephemeral"
    ttl: str | None = None


class TextBlock(ContentPart):
    cache_control: CacheControl | None = None


class Block(TextBlock):
    """A part of a message, by type: `text`; `tool_result`, of a user; `tool_use`, `thinking` and `redacted_thinking`,
    which is passed over, of an assistant. content: of a result.
    """

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class MessageParam(msgspec.Struct):
    """role: user, assistant, or system, anywhere."""

    role: str
    content: str | Annotated[list[Block], Meta(max_length=MAX_BLOCKS)]


class ToolParam(msgspec.Struct):
    """A function. Types other than `custom`, which this server does not run, are passed over."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceParam(msgspec.Struct):
    """type: auto, any, tool (of this name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct):
    """type: enabled, adaptive or disabled."""

    type: str


class OutputFormat(msgspec.Struct):
    """type: json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(Sampling, kw_only=True):
    """max_tokens: may be left out. output_format: its older place."""

    NAMES_UNKNOWN: ClassVar[bool] = True
    REFUSED: ClassVar[dict[str, str]] = {"compaction": "ask for a summary in a message, which hits all before it"}
    model: str | None = None
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=4096)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    stop_sequences: Stop | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None

    @property
    def options(self) -> AnswerOptions:
        """Raises ApiError 400, and RequestError which names the field."""
        choice = self.tool_choice or ToolChoiceParam("auto")
        wanted = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}.get(choice.type)
        if wanted is None:
            shown = choice.type[:40]
            raise bad_request("tool_choice.type", f"tool_choice.type is {shown!r}; give auto, any, tool or none")
        if wanted == "required" and not self.tools:
            raise bad_request("tool_choice", "tool_choice is 'any', and there are no tools")
        tools = [
            ToolIn(
                "function" if tool.type in (None, "custom") else str(tool.type),
                FunctionIn(tool.name or "", tool.description, tool.input_schema, tool.strict),
            )
            for tool in self.tools or ()
        ]
        named = {"type": "function", "function": {"name": choice.name}}
        options = flat_options_of(
            tools, named if wanted == "tool" else wanted, not choice.disable_parallel_tool_use, *self._thought()
        )
        return options.with_clearing(self.context_management, is_session=False)

    def _thought(self) -> tuple[dict[str, Any], str | None]:
        """Variables of the chat template, and the effort."""
        kind = None if self.thinking is None else self.thinking.type
        if kind not in (None, "enabled", "adaptive", "disabled"):
            message = f"thinking.type is {str(kind)[:40]!r}; give enabled, adaptive or disabled"
            raise bad_request("thinking.type", message)
        effort = None if self.output_config is None else self.output_config.effort
        check_effort(effort, "output_config.effort")
        if kind == "disabled":
            return {}, "none"
        is_asked = kind is not None and effort is None
        return dict.fromkeys(("enable_thinking", "thinking"), True) if is_asked else {}, effort

    @property
    def constraints(self) -> dict[str, Any]:
        in_config = None if self.output_config is None else self.output_config.format
        given = {"output_config.format": in_config, "output_format": self.output_format}
        return super().constraints | {
            name: ResponseFormat(one.type, JsonSchema(schema=one.schema))
            for name, one in given.items()
            if one is not None
        }

    @property
    def pin_s(self) -> float | None:
        """For how many seconds the conversation is pinned: the longest of its `cache_control`s. Raises ApiError 400."""
        return max((seconds_of(one.ttl or DEFAULT_TTL, f"{path}.ttl") for path, one in self._controls()), default=None)

    def _controls(self) -> Iterator[tuple[str, CacheControl]]:
        """Each with its path."""
        parts = list[tuple[str, MessagesBody | TextBlock | ToolParam]]([("", self)])
        parts += [(f"tools[{index}].", tool) for index, tool in enumerate(self.tools or ())]
        parts += _blocks_of(self.system, "system")
        for index, message in enumerate(self.messages):
            parts += _blocks_of(message.content, f"messages[{index}].content")
            for place, block in enumerate(message.content if not isinstance(message.content, str) else ()):
                parts += _blocks_of(block.content, f"messages[{index}].content[{place}].content")
        return ((f"{path}cache_control", one.cache_control) for path, one in parts if one.cache_control is not None)


def _blocks_of(content: str | Sequence[TextBlock] | None, path: str) -> list[tuple[str, TextBlock]]:
    blocks = () if content is None or isinstance(content, str) else content
    return [(f"{path}[{index}].", block) for index, block in enumerate(blocks)]


# -- from the client's words -------------------------------------------------------------------------------------------
_NEEDED: dict[str, tuple[str, ...]] = {  # of blocks, beside texts
    "tool_result": ("tool_use_id",), "tool_use": ("id", "name", "input"), "thinking": ("thinking",),
    "redacted_thinking": (),
}  # fmt: skip
_TYPES = {  # of blocks, by the role that may say them
    "user": ("text", "tool_result"), "system": ("text",),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}  # fmt: skip


def messages_of(body: MessagesBody, shows_late_system: bool) -> list[Message]:
    """Messages in the engine's form. shows_late_system: the chat template shows a system message where it comes; else
    what comes late is the user's. Raises ApiError 400 that names the path.
    """
    system, attribution = _system_of(body.system)
    said: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        said += _said(message, f"messages[{index}]")
    if not shows_late_system and any(message["role"] == "system" for message in said[1:]):
        said = list(_as_users(said))
    if attribution:
        first = next((message for message in said if message["role"] == "user"), said[0])
        first["content"] = "\n\n".join(filter(None, [first["content"], attribution]))
    return in_order_of_calls(said)


def _system_of(system: str | list[TextBlock] | None) -> tuple[str, str]:
    """The system prompt, and the line with which Claude Code names itself to whoever bills: it is another one in each
    session, and stands before all that sessions share. `cch` in it is another one in each request, and is left out.
    """
    said_content(system or "", "system")  # refuses blocks that are no text
    texts = [system] if isinstance(system, str) else [block.text or "" for block in system or ()]
    lines = list[str]()
    for index, text in enumerate(texts):
        if text.startswith(ATTRIBUTION):
            line, _, texts[index] = text.partition("\n")
            lines.append(re.sub(r" cch=\w*;", "", line))
    return "\n\n".join(filter(None, texts)), "\n".join(lines)


def _as_users(said: Iterable[Message]) -> Iterator[Message]:
    """With later system messages as the user's, and the user's in a row as one: templates want roles to alternate."""
    known = [
        {**message, "role": "user"} if index and message["role"] == "system" else message
        for index, message in enumerate(said)
    ]
    for role, run in groupby(known, key=lambda message: message["role"]):
        if role == "user":
            yield {"role": "user", **_one_of(run)}
        else:
            yield from run


def _one_of(messages: Iterable[Message]) -> Message:
    """The content of messages as one, where parts that may be reused stay so."""
    parts = list[tuple[str, str | None]]()
    for message in messages:
        text, end = message["content"], 0
        parts += [("\n\n", None)] if parts else []
        for start, stop in message.get("reuse", ()):
            parts += [(text[end:start], None), (text[start:stop], "reencode")]
            end = stop
        parts.append((text[end:], None))
    return joined(parts)


def _said(message: MessageParam, param: str) -> Iterator[Message]:
    """A message; results of tools are messages of their own."""
    role, content = message.role, message.content
    if role not in _TYPES:
        raise bad_request(f"{param}.role", f"{param}.role is {role[:40]!r}; give user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    for index, block in enumerate(content):
        _check_block(block, role, f"{param}.content[{index}]")
    if role == "assistant":
        yield _answer_of(content, param)
        return
    texts = list[Block]()
    for index, block in enumerate(content):
        if block.type == "text":
            texts.append(block)
            continue
        if texts:
            yield {"role": role, **_joined(texts)}
            texts.clear()
        yield _result_of(block, f"{param}.content[{index}].content")
    if texts or not content:
        yield {"role": role, **_joined(texts)}


def _joined(blocks: Iterable[Block]) -> Message:
    return joined((block.text or "", block.reuse) for block in blocks if block.type == "text")


def _check_block(block: Block, role: str, param: str) -> None:
    if block.type not in _TYPES[role]:
        known = " and ".join(_TYPES[role])
        message = f"{param} is of the type {block.type[:40]!r}; of the role {role} only {known} are supported"
        raise bad_request(param, message, "unsupported_content")
    if block.type == "text":
        check_part(block, param)
        return
    if block.reuse is not None:
        raise bad_request(f"{param}.reuse", f"{param}.reuse is of texts alone; leave it out")
    for name in _NEEDED[block.type]:
        if getattr(block, name) is None:
            raise bad_request(f"{param}.{name}", f"{param}.{name} is missing", "missing")


def _result_of(block: Block, param: str) -> Message:
    """No chat template has a word for a call that failed, so its text says so."""
    said = said_content(block.content or "", param)
    if block.is_error:
        said = {"content": f"Error: {said['content']}"}
    return {"role": "tool", "tool_call_id": block.tool_use_id, **said}


def _answer_of(blocks: Sequence[Block], param: str) -> Message:
    said: Message = {"role": "assistant", **_joined(blocks)}
    if reasoning := "".join(block.thinking or "" for block in blocks):
        said["reasoning_content"] = reasoning
    calls = list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        if block.type != "tool_use":
            continue
        try:
            arguments = json.dumps(block.input, ensure_ascii=False)
        except RecursionError:
            where = f"{param}.content[{index}].input"
            raise bad_request(where, f"{where} is nested too deep") from None
        function = {"name": block.name, "arguments": arguments}
        calls.append({"id": block.id, "type": "function", "function": function})
    return said | ({"tool_calls": calls} if calls else {})


# -- answers -----------------------------------------------------------------------------------------------------------
class MessageText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class MessageThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: for clients that keep no thinking without one; nothing depends on it."""

    thinking: str
    signature: str


class MessageCall(msgspec.Struct, tag_field="type", tag="tool_use"):
    """input: an object, as the model wrote it."""

    id: str
    name: str
    input: msgspec.Raw


class MessagesUsage(msgspec.Struct, kw_only=True):
    """The first three add up to the prompt's tokens. cache_creation_input_tokens: see `Usage.cache_write_tokens`; the
    prompt's last token counts as input_tokens. What follows output_tokens is ours, as in chat completions, and comes
    with the answer's end.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    capped_max_tokens: int | UnsetType = UNSET
    miss: Miss | UnsetType = UNSET
    thinking: str | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> Self:
        known = usage_object(usage)
        prompt = known.prompt_tokens_details
        num_computed = known.prompt_tokens - prompt.cached_tokens
        # Claude Code takes no input_tokens at a stream's end for "as at its beginning", and counts the prompt twice.
        num_written = min(prompt.cache_write_tokens, num_computed - 1)
        return cls(
            input_tokens=num_computed - num_written,
            cache_creation_input_tokens=num_written,
            cache_read_input_tokens=prompt.cached_tokens,
            output_tokens=known.completion_tokens,
            cached_tokens_details=prompt.cached_tokens_details,
            capped_max_tokens=UNSET if known.capped_max_tokens is None else known.capped_max_tokens,
            miss=prompt.miss,
            thinking=prompt.thinking,
        )


class MessageObject(msgspec.Struct, kw_only=True):
    """stop_reason: end_turn, stop_sequence, tool_use, max_tokens or model_context_window_exceeded."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[MessageText | MessageThinking | MessageCall] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalCount(msgspec.Struct):
    """Before anything was cleared."""

    original_input_tokens: int


class TokenCount(msgspec.Struct):
    input_tokens: int
    context_management: OriginalCount | UnsetType = UNSET


def content_of(choice: Choice, signature: str) -> list[MessageText | MessageThinking | MessageCall]:
    content: list[MessageText | MessageThinking | MessageCall] = []
    if choice.reasoning:
        content.append(MessageThinking(choice.reasoning, signature))
    if choice.content:
        content.append(MessageText(choice.content))
    return content + [
        MessageCall(call.id, call.name, msgspec.Raw(call.arguments.encode())) for call in choice.tool_calls
    ]


def ended(choice: Choice, usage: Usage) -> tuple[str, str | None]:
    """stop_reason and stop_sequence."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    if choice.finish_reason == "length" and usage.capped_max_tokens is not None:
        return "model_context_window_exceeded", None
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish_reason or "", "end_turn"), None


# -- errors ------------------------------------------------------------------------------------------------------------
class MessagesErrorInfo(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success."""

    type: str = "error"
    error: MessagesErrorInfo
    request_id: str

    @classmethod
    def of(cls, error: ApiError, request_id: str) -> Self:
        message = error.message
        if isinstance(cause := error.__cause__, ContextLengthError):  # at these words clients compact
            message = f"prompt is too long: {cause.requested_tokens} tokens > {cause.limit_tokens} maximum; {message}"
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return cls(error=MessagesErrorInfo(kind, message), request_id=request_id)


_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
