"""Bodies, answers and events of /v1/responses, in OpenAI's shapes. Knows no handler."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvstore.config import SESSION_ID
from kvstore.engine.text.chat_template import Message
from kvstore.engine.text.clearing import ContextManagement
from kvstore.engine.text.prompts import MAX_TOOLS, NO_OPTIONS, AnswerOptions, check_effort, in_order_of_calls
from kvstore.service.api.asking import (
    FunctionIn,
    JsonSchema,
    ResponseFormat,
    ToolChoice,
    ToolIn,
    flat_options_of,
)
from kvstore.service.api.naming import Naming, name_of
from kvstore.service.api.schema import (
    AppliedEdits,
    Breakpoint,
    CompletionTokensDetails,
    ContentPart,
    MessageIn,
    PromptTokensDetails,
    Sampling,
    breakpoints_in,
    message_of,
    pin_s_of,
    said_content,
    usage_object,
)
from kvstore.service.api.sessions.turns import TurnResult
from kvstore.service.http.errors import bad_request

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
COMPACTED = "kvstore:"  # the mark of this server's summaries
Parts = Annotated[list[ContentPart], Meta(max_length=4096)]


class InputItem(msgspec.Struct):
    """A message, a call of a function, a call's output, or a compaction, as it is sent or as it came in an output.
    Reasoning is passed over.
    """

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    encrypted_content: str | None = None


class Format(msgspec.Struct, omit_defaults=True):
    """type: text, json_object, or json_schema with its schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseTool(msgspec.Struct):
    """A function. Other types, which this server does not run, are passed over."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: Format | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None


class ResponseBody(Sampling, kw_only=True):
    """input: a text, or messages. previous_response_id: the conversation goes on there; without `instructions` with
    the same system prompt. conversation: an id, or an object with an `id`; that session goes on, or begins. store:
    false keeps no conversation.
    """

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    truncation: str | None = None
    truncation_reuse: str | None = None
    user: str | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    prompt_cache_options: Breakpoint | None = None
    context_management: ContextManagement | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None

    REFUSED: ClassVar[dict[str, str]] = {
        "background": "answers come on this connection; leave it out",
        "prompt": "no prompts are kept here; give instructions and input",
    }

    @property
    def pin_s(self) -> float | None:
        """See `pin_s_of`. Raises ApiError 400."""
        items = () if isinstance(self.input, str) else self.input
        contents = [content for item in items for content in (item.content, item.output)]
        return pin_s_of(self.prompt_cache_options, breakpoints_in(contents))

    @property
    def options(self) -> AnswerOptions:
        """Raises ApiError 400, and RequestError which names the field."""
        return self._asked().with_clearing(self.context_management, is_session=self.store is not False)

    def _asked(self) -> AnswerOptions:
        choice, variables = self.tool_choice, self.chat_template_kwargs
        effort = None if self.reasoning is None else self.reasoning.effort
        if not self.tools and choice in (None, "auto", "none") and not variables and effort is None:
            return NO_OPTIONS
        check_effort(effort, "reasoning.effort")
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        tools = [
            ToolIn(one.type, FunctionIn(one.name or "", one.description, one.parameters, one.strict))
            for one in self.tools or ()
        ]
        return flat_options_of(tools, choice, self.parallel_tool_calls, variables or {}, effort)

    @property
    def constraints(self) -> dict[str, Any]:
        given = None if self.text is None else self.text.format
        if given is None or given.type == "text":
            return super().constraints
        schema = JsonSchema(given.name, given.schema, given.strict) if given.type == "json_schema" else None
        return super().constraints | {"text.format": ResponseFormat(given.type, schema)}


# The last message of a compaction, behind a history that the cache has.
_COMPACT = (
    "Sum up this conversation, so that somebody can go on with it who has only your summary: what is asked, what was "
    "done and decided, what was found out, and what is left to do. Answer with the summary alone."
)


class CompactBody(ResponseBody, kw_only=True):
    """What the summary is made of: `input`, after what previous_response_id or conversation names. `tools`, as in the
    request before, keep its prompt, and so its KV.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)] = msgspec.field(default_factory=list)

    def asking(self) -> ResponseBody:
        """The request for the summary. Raises ApiError 400 where there is nothing to sum up."""
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise bad_request("input", "input is missing; give it, or say what goes on", "missing")
        said = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        asked = [*said, InputItem(role="user", content=_COMPACT)]
        return msgspec.structs.replace(self, input=asked, store=False, tool_choice="none" if self.tools else None)


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[str] = []
    logprobs: list[str] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """status: completed, in_progress or incomplete."""

    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[str] = []
    status: str
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call, whole. arguments: the text of a JSON object."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


TextItem = OutputMessage | OutputReasoning
OutputItem = TextItem | OutputCall


class ResponseUsage(msgspec.Struct, omit_defaults=True):
    """capped_max_tokens: see `UsageObject`."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
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
    conversation: dict[str, str] | None = None
    context_management: AppliedEdits | UnsetType = UNSET
    status: str
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: float | None = None
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(Format("text")))
    tool_choice: ToolChoice = "auto"
    tools: list[ResponseTool] = []
    top_p: float | None = None
    truncation: str | None = None
    usage: ResponseUsage | None = None
    user: str | None = None


class InputText(msgspec.Struct, kw_only=True):
    type: str = "input_text"
    text: str


class InputMessage(msgspec.Struct, kw_only=True):
    type: str = "message"
    id: str
    role: str
    status: str = "completed"
    content: list[InputText]


class CallOutput(msgspec.Struct, kw_only=True):
    type: str = "function_call_output"
    id: str
    call_id: str
    output: str
    status: str = "completed"


class ItemsQuery(msgspec.Struct):
    """after: an item's id, as `last_id` of the page before."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20  # OpenAI's
    order: str = "desc"
    after: str | None = None


class ItemList(msgspec.Struct, kw_only=True):
    """A page of what a response answers: `InputMessage`, `CallOutput` and `OutputItem`. last_id: pass it as `after` to
    get the next one.
    """

    object: str = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Compaction(msgspec.Struct, kw_only=True):
    """encrypted_content: the summary itself, behind a mark. Whoever sends it back brings it into the prompt."""

    type: str = "compaction"
    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct, kw_only=True):
    """output: the messages of the user, and then a `Compaction`: the input of the next request."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[Any]
    usage: ResponseUsage


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


def usage_of(result: TurnResult) -> ResponseUsage:
    usage, of_answer = usage_object(result.usage), CompletionTokensDetails(result.usage.reasoning_tokens)
    return ResponseUsage(
        usage.prompt_tokens, usage.prompt_tokens_details, usage.completion_tokens, of_answer,
        usage.total_tokens, usage.capped_max_tokens,
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
        output=items_of(response.id, result.message, status),
        usage=usage_of(result),
    )


def items_of(response_id: str, message: Message, status: str) -> list[OutputItem]:
    """An answer as items: its reasoning, its text, and its calls, which are whole. One that ended within its reasoning
    has no text.
    """
    calls, reasoning = message.get("tool_calls") or (), message.get("reasoning_content")
    items: list[OutputItem] = []
    if reasoning:
        items.append(reasoning_item(response_id, reasoning, "completed" if message["content"] or calls else status))
    if message["content"] or not (calls or reasoning):
        items.append(message_item(response_id, message["content"], status))
    return items + [
        call_item(call["id"], call["function"]["name"], call["function"]["arguments"], "completed") for call in calls
    ]


def message_item(response_id: str, text: str | None, status: str) -> OutputMessage:
    """text: None where none has come yet."""
    content = [] if text is None else [OutputText(text=text)]
    return OutputMessage(id="msg_" + response_id.removeprefix("resp_"), status=status, content=content)


def reasoning_item(response_id: str, text: str | None, status: str) -> OutputReasoning:
    """text: None where none has come yet."""
    content = [] if text is None else [ReasoningText(text=text)]
    return OutputReasoning(id="rs_" + response_id.removeprefix("resp_"), status=status, content=content)


def input_items(name: str, messages: Sequence[Message]) -> list[Any]:
    """A history as items; name: of its session, for their ids."""
    items = list[Any]()
    for index, message in enumerate(messages):
        item_id = f"{name}_i{index}"  # other than those of answers, which have the number of a turn
        if message["role"] == "assistant":
            items += items_of(f"resp_{item_id}", message, "completed")
        elif message["role"] == "tool":
            items.append(CallOutput(id=f"fco_{item_id}", call_id=message["tool_call_id"], output=message["content"]))
        else:
            text = InputText(text=message["content"])
            items.append(InputMessage(id=f"msg_{item_id}", role=message["role"], content=[text]))
    return items


def compacted(response_id: str, history: Sequence[Message], result: TurnResult) -> CompactedResponse:
    """history: what was summed up."""
    name = response_id.removeprefix("resp_")
    summary = Compaction(id=f"cmp_{name}", encrypted_content=COMPACTED + result.message["content"])
    users = input_items(name, [message for message in history if message["role"] == "user"])
    return CompactedResponse(
        id=response_id, created_at=int(result.created_s), output=[*users, summary], usage=usage_of(result)
    )


def call_item(call_id: str, name: str, arguments: str, status: str) -> OutputCall:
    item_id = "fc_" + call_id.removeprefix("call_")
    return OutputCall(id=item_id, call_id=call_id, name=name, arguments=arguments, status=status)


# -- from the client's words -----------------------------------------------------------------------------------------
def said_of(body: ResponseBody) -> tuple[str | None, list[Message]]:
    """System prompt, if one is named, and the messages after it. Raises ApiError 400."""
    if isinstance(body.input, str):
        return body.instructions, [{"role": "user", "content": body.input}]
    said = list[Message]()
    for index, item in enumerate(body.input):
        _take_in(item, f"input[{index}]", said)
    said = in_order_of_calls(said)
    num_system = next((i for i, message in enumerate(said) if message["role"] != "system"), len(said))
    system = [] if body.instructions is None else [body.instructions]
    system += [message["content"] for message in said[:num_system]]
    return "\n\n".join(system) if system else None, said[num_system:]


_NEEDED = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"), "reasoning": (), "compaction": ("encrypted_content",),
}  # fmt: skip


def _take_in(item: InputItem, param: str, said: list[Message]) -> None:
    """Add an item to the messages before it. Calls belong to the answer that they follow, and so does more of its text
    behind them.
    """
    kind = item.type or "message"
    if kind not in _NEEDED:
        message = f"{param} is of the type {kind[:40]!r}; give {', '.join(_NEEDED)}"
        raise bad_request(f"{param}.type", message, "unsupported_content")
    for name in _NEEDED[kind]:
        if getattr(item, name) is None:
            raise bad_request(f"{param}.{name}", f"{param}.{name} is missing", "missing")
    if item.role == "tool":
        raise bad_request(f"{param}.role", f"{param}.role is 'tool'; give a function_call_output", "unsupported_role")
    if kind == "message":
        one = message_of(MessageIn(item.role or "", item.content), param)
        if one["role"] == "assistant" and "reuse" not in one and said and "tool_calls" in said[-1]:
            said[-1]["content"] += one["content"]
        else:
            said.append(one)
    elif kind == "function_call_output":
        output = said_content(item.output or "", f"{param}.output")
        said.append({"role": "tool", **output, "tool_call_id": item.call_id})
    elif kind == "compaction":
        if not (item.encrypted_content or "").startswith(COMPACTED):
            raise bad_request(f"{param}.encrypted_content", f"{param} is no compaction of this server; leave it out")
        said.append({"role": "assistant", "content": (item.encrypted_content or "").removeprefix(COMPACTED)})
    elif kind == "function_call":
        if not said or said[-1]["role"] != "assistant":
            said.append({"role": "assistant", "content": ""})
        function = {"name": item.name, "arguments": item.arguments}
        said[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function, "type": "function"})


def conversation_of(body: ResponseBody) -> str | None:
    """The id of the conversation that goes on, or begins. Raises ApiError 400."""
    if body.conversation is None:
        return None
    if body.previous_response_id is not None:
        raise bad_request("conversation", "conversation and previous_response_id both say what goes on; give one")
    name = name_of({}, Naming(conversation=body.conversation))
    if not SESSION_ID.fullmatch(name):
        message = f"conversation is {str(body.conversation)[:80]!r}; give an id of 1 to 128 letters, digits, '_' or '-'"
        raise bad_request("conversation", message)
    return name


def check_supported(body: ResponseBody) -> None:
    """Raises ApiError 400 for fields that must not be ignored, as the answer would be wrong, or lack something."""
    has_logprobs = "message.output_text.logprobs" in (body.include or ())
    refused = ("cache_salt", body.cache_salt is not None), ("priority", body.priority), ("include", has_logprobs)
    for name, is_asked in refused:
        if is_asked:
            raise bad_request(name, f"{name} is not supported here", "unsupported")
