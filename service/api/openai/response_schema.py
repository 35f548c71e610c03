"""Bodies, answers and events of /v1/responses, in OpenAI's shapes. Knows no handler."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.engine.text.chat_template import Message
from kvstore.service.api.schema import CachedTokens, ContentPart, Count, MessageIn, Sampling, message_of, usage_object
from kvstore.service.api.sessions.turns import TurnResult
from kvstore.service.http.errors import bad_request

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class InputItem(msgspec.Struct):
    """A message, as it is sent or as it came in an output. Other types are not supported."""

    type: str | None = None
    role: str | None = None
    content: str | Annotated[list[ContentPart], Meta(max_length=4096)] | None = None


class Format(msgspec.Struct):
    type: str = "text"


class TextConfig(msgspec.Struct):
    format: Format | None = None


class ResponseBody(Sampling, kw_only=True):
    """input: a text, or messages. previous_response_id: the conversation goes on there; without `instructions` with
    the same system prompt. store: false keeps no conversation."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    metadata: Metadata | None = None
    truncation: str | None = None
    truncation_reuse: str | None = None
    user: str | None = None
    text: TextConfig | None = None
    conversation: Any = None
    background: bool | None = None


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """status: completed, in_progress or incomplete."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct):
    """cache_write_tokens is not counted."""

    cached_tokens: int
    cached_tokens_details: CachedTokens
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, omit_defaults=True):
    """capped_max_tokens: see `UsageObject`."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    capped_max_tokens: int | None = None


class IncompleteDetails(msgspec.Struct):
    """reason: max_output_tokens, or stopped."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. Fields that only the request held (metadata, temperature, ...) are null when the response is read
    later.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = False
    previous_response_id: str | None = None
    store: bool = True
    temperature: float | None = None
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(Format()))
    tool_choice: str = "none"
    tools: list[str] = []
    top_p: float | None = None
    truncation: str | None = None
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


def usage_of(result: TurnResult) -> ResponseUsage:
    usage = usage_object(result.usage)
    cached = usage.prompt_tokens_details
    details = InputTokensDetails(cached.cached_tokens, cached.cached_tokens_details)
    return ResponseUsage(
        usage.prompt_tokens, details, usage.completion_tokens, OutputTokensDetails(), usage.total_tokens,
        usage.capped_max_tokens,
    )  # fmt: skip


_ENDS = {"length": "max_output_tokens", "abort": "stopped"}  # what makes a response incomplete


def completed(response: ResponseObject, result: TurnResult) -> ResponseObject:
    reason = _ENDS.get(result.finish_reason)
    status = "completed" if reason is None else "incomplete"
    return msgspec.structs.replace(
        response,
        status=status,
        completed_at=int(result.created_s),
        incomplete_details=None if reason is None else IncompleteDetails(reason),
        output=[message_item(response.id, result.text, status)],
        usage=usage_of(result),
    )


def message_item(response_id: str, text: str | None, status: str) -> OutputMessage:
    """text: None where none has come yet."""
    content = [] if text is None else [OutputText(text=text)]
    return OutputMessage(id="msg_" + response_id.removeprefix("resp_"), status=status, content=content)


# -- from the client's words -----------------------------------------------------------------------------------------
def said_of(body: ResponseBody) -> tuple[str | None, list[Message]]:
    """System prompt, if one is named, and the messages after it. Raises ApiError 400."""
    if isinstance(body.input, str):
        return body.instructions, [{"role": "user", "content": body.input}]
    said = [_message(item, f"input[{index}]") for index, item in enumerate(body.input)]
    num_system = next((i for i, message in enumerate(said) if message["role"] != "system"), len(said))
    system = [] if body.instructions is None else [body.instructions]
    system += [message["content"] for message in said[:num_system]]
    return "\n\n".join(system) if system else None, said[num_system:]


def _message(item: InputItem, param: str) -> Message:
    if item.type not in (None, "message"):
        message = f"{param} is of the type {item.type[:40]!r}; only messages are supported"
        raise bad_request(f"{param}.type", message, "unsupported_content")
    for name, value in (("role", item.role), ("content", item.content)):
        if value is None:
            raise bad_request(f"{param}.{name}", f"{param}.{name} is missing", "missing")
    assert item.role is not None and item.content is not None
    return message_of(MessageIn(item.role, item.content), param)


def check_supported(body: ResponseBody) -> None:
    """Raises ApiError 400 for fields that must not be ignored, as the answer would be wrong."""
    kind = "text" if body.text is None or body.text.format is None else body.text.format.type
    asked: dict[str, Any] = {
        "conversation": body.conversation is not None,
        "background": body.background,
        "text.format": kind != "text",
        "cache_salt": body.cache_salt is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise bad_request(name, f"{name} is not supported here", "unsupported")
