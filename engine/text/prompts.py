"""What callers say to a model, checked: prompts, messages, tools, lengths; results in order. Bounds first, work later.

Knows no model and loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import msgspec

from kvstore.engine.sampling_params import MAX_TAGS, SamplingParams
from kvstore.engine.text.chat_template import Message, parts_of
from kvstore.engine.text.clearing import ContextManagement
from kvstore.errors import ContextLengthError, RequestError

USUAL_CHARS = 8  # of a token; texts that fit with so many are tokenized without further checks
PART_CHARS = 2**17
MAX_HISTORY_CHARS = 2**21  # in a first turn, however much of it is then kept
SEAM_TOKENS = 64  # by which the tokens of parts may exceed those of the uncut text
TOOL_NAME = re.compile(r"[\w.-]{1,128}")
MAX_TOOLS = MAX_TAGS
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair


class CalledFunction(msgspec.Struct):
    """arguments: the text of a JSON object, or the object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class CallIn(msgspec.Struct):
    """A call in an answer of a history."""

    id: str
    function: CalledFunction
    type: str = "function"


class _SaidPart(msgspec.Struct):
    """reuse: its KV may be that of the same text elsewhere; see `kvstore.engine.sessions.spans`."""

    type: Literal["text"]
    text: str
    reuse: Literal["reencode"] | None = None


class _SaidMessage(msgspec.Struct, omit_defaults=True):
    """What must be so of a message; a template may know other fields."""

    role: str
    content: str | list[_SaidPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallIn] | None = None
    tool_call_id: str = ""


_said_messages = msgspec.json.Decoder(list[_SaidMessage])  # so that msgspec has looked into the type


def checked_prompts(
    prompts: Sequence[str | Sequence[int] | Sequence[Message]] | str,
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> tuple[list[str | Sequence[int] | Sequence[Message]], list[SamplingParams]]:
    """Prompts as a list, with one SamplingParams each."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, dict | bytes):
        raise RequestError(f"prompts is {prompts!r}; give a list of prompts", param="prompt")
    listed: list[str | Sequence[int] | Sequence[Message]] = [prompts] if isinstance(prompts, str) else list(prompts)
    if listed and _is_integer(listed[0]):
        raise RequestError("prompts is a list of numbers; give a list of prompts, such as [[1, 2, 3]]", param="prompt")
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or SamplingParams()] * len(listed)
    each: list[SamplingParams] = list(params) if isinstance(params, list | tuple) else [params]  # type: ignore[list-item]
    for one in each:
        check_params(one)
    if len(each) != len(listed):
        raise RequestError(f"{len(listed)} prompts, but {len(each)} sampling parameters; give one for all or one each")
    return listed, each


def is_conversation(prompt: object) -> bool:
    """Whether it is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with their contents as texts, see `joined`, and without what is null. Raises RequestError unless all
    have the fields that they need, of the right types; what else they have must be texts or lists.
    """
    try:
        said = msgspec.convert(messages, list[_SaidMessage])
    except msgspec.ValidationError as error:
        raise RequestError(f"messages: {str(error).replace('`', '').replace('$', '')}", param="messages") from None
    checked = list[Message]()
    for index, (message, one) in enumerate(zip(without_spans(messages), said, strict=True)):
        others = {name: part for name, part in message.items() if name not in _SaidMessage.__struct_fields__}
        for name, part in others.items():
            if not isinstance(part, str | list | None):
                wrong = f"messages: [{index}].{name} is {str(part)[:80]!r}; give a text or a list"
                raise RequestError(wrong, param="messages")
        parts = [(part.text, part.reuse) for part in one.content] if isinstance(one.content, list) else None
        content = {"content": one.content or ""} if parts is None else joined(parts)
        given = {name: part for name, part in others.items() if part is not None}
        checked.append({**msgspec.to_builtins(one), **content, **given})
    return checked


def joined(parts: Iterable[tuple[str, str | None]]) -> dict[str, Any]:
    """The content of a message as one text; with "reuse", if some parts have that: where these are, in characters."""
    texts, spans, length = list[str](), list[tuple[int, int]](), 0
    for text, reuse in parts:
        texts.append(text)
        spans += [(length, length + len(text))] if reuse else []
        length += len(text)
    return {"content": "".join(texts), **({"reuse": spans} if spans else {})}


def without_spans(messages: Sequence[Message]) -> list[Message]:
    """The messages as a transcript has them."""
    return [{name: part for name, part in message.items() if name != "reuse"} for message in messages]


def check_params(params: object) -> None:
    """Raises RequestError unless it is a SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params is {params!r}; give SamplingParams(...)")


def check_text(text: object, param: str) -> None:
    """Raises RequestError unless it is a text that can be encoded."""
    if not isinstance(text, str):
        raise RequestError(f"{param} is {text!r}; give a text", param=param)
    if _SURROGATE.search(text):
        raise RequestError(f"{param} is not valid Unicode: it holds half a surrogate pair", param=param)


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    """The length of the longest token, in characters."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def check_chars(texts: Sequence[str], tokenizer: Any, limit: int) -> None:
    """Raises ContextLengthError for texts that have more than `limit` tokens even if all were the longest token."""
    num_chars = sum(map(len, texts))
    if num_chars > USUAL_CHARS * limit:
        _check_least(num_chars, num_chars // max(1, _longest_token(tokenizer)), limit)


def check_length(texts: Sequence[str], tokenizer: Any, limit: int) -> None:
    """Raises ContextLengthError for texts with far more than `limit` tokens, without tokenizing all.

    Unclear cases pass.
    """
    check_chars(texts, tokenizer, limit)
    num_chars = sum(map(len, texts))
    if num_chars <= USUAL_CHARS * limit:
        return
    least = 0
    for part in (text[start : start + PART_CHARS] for text in texts for start in range(0, len(text), PART_CHARS)):
        ids = tokenizer.backend_tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids
        least += max(0, len(ids) - SEAM_TOKENS)
        _check_least(num_chars, least, limit)


def _check_least(num_chars: int, least: int, limit: int) -> None:
    if least > limit:
        raise ContextLengthError(
            f"the text has {num_chars} characters, at least {least} tokens, but the context window has {limit}",
            least,
            limit,
        )


def texts_of(messages: Sequence[Message]) -> list[str]:
    return [text for message in messages for text in parts_of(message)]


def num_chars_of(messages: Sequence[Message]) -> int:
    return sum(map(len, texts_of(messages)))


def checked_turn(messages: Sequence[Message], params: SamplingParams, tokenizer: Any, limit: int) -> list[Message]:
    """The messages of a turn: a user's or results of tools, or a history that ends so. Raises RequestError, and as
    `check_length`.

    A history has the system prompt first, if there is one, and results after their calls.
    """
    check_params(params)
    if params.n != 1:
        raise RequestError(f"n is {params.n}; a turn has one answer", param="n")
    if not params.detokenize:
        raise RequestError("detokenize is False; a turn is kept as text", param="detokenize")
    texts = texts_of(messages)
    for text in texts:
        check_text(text, "message")
        check_length([text], tokenizer, limit)
    if sum(map(len, texts)) > MAX_HISTORY_CHARS:
        raise RequestError(f"messages have more than {MAX_HISTORY_CHARS} characters", param="messages")
    said = [dict(message) for message in messages]
    roles = [message["role"] for message in said]
    is_misplaced = any(
        role == "system" or (role == "tool" and before not in ("assistant", "tool")) for before, role in pairwise(roles)
    )
    if is_misplaced or roles[-1:] not in (["user"], ["tool"]):
        message = "messages must end with the user or with results of calls; results follow their calls, and a system "
        raise RequestError(f"{message}prompt comes first", param="messages")
    return said


def in_order_of_calls(messages: list[Message]) -> list[Message]:
    """The same messages, with results of parallel calls in the order of the calls: clients answer in any."""
    ordered, order = list[Message](), dict[str, int]()
    for message in messages:
        if message["role"] == "assistant":
            order = {call["id"]: index for index, call in enumerate(message.get("tool_calls") or ())}
        ordered.append(message)
        place = len(ordered) - 1
        while message["role"] == "tool" and place and _comes_before(message, ordered[place - 1], order):
            ordered[place - 1], ordered[place] = message, ordered[place - 1]
            place -= 1
    return ordered


def _comes_before(message: Message, other: Message, order: Mapping[str, int]) -> bool:
    if other["role"] != "tool":
        return False
    places = [order.get(one.get("tool_call_id", ""), len(order)) for one in (message, other)]
    return places[0] < places[1]


def messages_of(said: str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if not is_conversation(said):
        raise RequestError(f"the message is {said!r}; give a text, or a list of messages", param="messages")
    return checked_messages(said)


def check_results(said: Sequence[Message], before: Sequence[Message]) -> None:
    """Raises RequestError for results of calls that the last answer has not made."""
    called = [call["id"] for call in (before[-1].get("tool_calls") or () if before else ())]
    for message in said:
        if message["role"] == "tool" and message.get("tool_call_id") not in called:
            wrong = f"tool_call_id is {str(message.get('tool_call_id'))[:80]!r}, which is no call of the last answer"
            raise RequestError(wrong, param="messages")


def check_owner(tenant: object, cache_salt: object, priority: object) -> None:
    """Raises RequestError unless tenant and salt are texts and the priority is a whole number of 32 bits."""
    for name, value in (("tenant", tenant), ("cache_salt", cache_salt)):
        if not isinstance(value, str):
            raise RequestError(f"{name} is {value!r}; give a text", param=name)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority is {priority!r}; give a whole number, lower is earlier", param="priority")
    if abs(priority) > 2**31:
        raise RequestError(f"priority is {priority}; give one from {-(2**31)} to {2**31}", param="priority")


def prompt_ids(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int, limit: int | None = None) -> list[int]:
    """Token ids of a prompt: tokenized with the tokenizer's own special tokens, or checked against the vocabulary.

    vocab_size: the model's, which may be larger than the tokenizer's. limit: a text that must have more tokens is
    refused without tokenizing it.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids, or tokenizer=", param="prompt")
        check_text(prompt, "prompt")
        if limit is not None:
            check_length([prompt], tokenizer, limit)
        token_ids = list(tokenizer(prompt)["input_ids"])
    elif not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", param="prompt")
    else:
        token_ids = [int(token_id) if _is_integer(token_id) else -1 for token_id in prompt]
    check_ids(token_ids, vocab_size)
    return token_ids


def check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for an empty prompt, or ids that the model does not have."""
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(f"a prompt's token ids must be whole numbers from 0 to {vocab_size - 1}", param="prompt")


def check_ids_of(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if the parameters name token ids that the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and max(ids) >= vocab_size:
            raise RequestError(f"{name} names token {max(ids)}; token ids go from 0 to {vocab_size - 1}", param=name)


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def check_width(params: SamplingParams, max_num_seqs: int) -> None:
    """Raises RequestError for a beam search that cannot run in one step."""
    if params.use_beam_search and params.num_sequences > max_num_seqs:
        name = "n" if params.beam_width in (None, params.n) else "beam_width"
        said = f"{name} is {params.num_sequences}, but {max_num_seqs} sequences run at once (max_num_seqs)"
        raise RequestError(said, param=name)


def check_fits(num_prompt_tokens: int, params: SamplingParams, max_model_len: int, pool_tokens: int) -> int:
    """The number of tokens that the answer may have: `max_tokens`, or what the prompt leaves if that is less.

    Raises ContextLengthError, with both numbers, if the prompt leaves nothing.
    """
    limit = min(max_model_len, pool_tokens)
    where = f"the context window has {limit}" if limit == max_model_len else f"the HBM pool holds {limit}"
    if num_prompt_tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, but {where}, and an answer needs at least one",
            num_prompt_tokens,
            limit,
        )
    left = limit - num_prompt_tokens
    return left if params.max_tokens is None else min(left, params.max_tokens)


def check_truncation(truncation: str, truncation_reuse: str) -> None:
    """Raises RequestError for anything but the known ways to truncate."""
    for name, value, known in (
        ("truncation", truncation, ("auto", "disabled")),
        ("truncation_reuse", truncation_reuse, ("reencode", "exact")),
    ):
        if value not in known:
            raise RequestError(f"{name} is {value!r}; give one of {', '.join(known)}", param=name)


# -- beside messages ---------------------------------------------------------------------------------------------------
def check_effort(effort: object, param: str) -> None:
    """Raises RequestError unless it is one of EFFORTS, or None."""
    if effort is not None and effort not in EFFORTS:
        raise RequestError(f"{param} is {str(effort)[:80]!r}; give one of {', '.join(EFFORTS)}", param=param)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request says beside messages and sampling; names and meanings are those of chat completions.

    tools: `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`. tool_choice: "auto",
    "required" (the answer is calls), "none", or `{"type": "function", "function": {"name": ...}}`.
    parallel_tool_calls: False allows one call at most. chat_template_kwargs: variables of the model's own template.
    reasoning_effort: one of EFFORTS, for templates that know it; where they know only on and off, "none" is off.
    thinking: "drop" takes from a session's context the reasoning that the template does not show, "keep" leaves it.
    context_management: what is cleared from the history; it was checked. Raises RequestError, which names the field.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking: str = "keep"
    context_management: ContextManagement | None = None

    def __post_init__(self) -> None:
        if self.thinking not in ("keep", "drop"):
            raise RequestError(f"thinking is {str(self.thinking)[:80]!r}; give keep or drop", param="thinking")
        check_effort(self.reasoning_effort, "reasoning_effort")
        tools = self.tools
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"tools is {tools!r}; give a list of functions", param="tools")
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS}", param="tools")
        for index, tool in enumerate(tools):
            _check_tool(tool, f"tools[{index}]")
        names = [tool["function"]["name"] for tool in tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise RequestError(f"tools has {', '.join(sorted(twice))} twice", param="tools")
        if self.named is not None and self.named not in names:
            raise RequestError(f"tool_choice names {self.named!r}, which is none of tools", param="tool_choice")
        if self.tool_choice == "required" and not tools:
            raise RequestError("tool_choice is 'required', and there are no tools", param="tool_choice")

    def with_clearing(self, wanted: ContextManagement | None, is_session: bool) -> AnswerOptions:
        """Raises RequestError, which names the field."""
        if wanted is None:
            return self
        wanted.check(is_session)
        return replace(self, context_management=wanted)

    @property
    def named(self) -> str | None:
        """The function that must be called."""
        if self.tool_choice in ("auto", "required", "none"):
            return None
        function = self.tool_choice.get("function") if isinstance(self.tool_choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            message = f"tool_choice is {str(self.tool_choice)[:80]!r}; give auto, none, required, or a function by name"
            raise RequestError(message, param="tool_choice")
        return name

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template, in the names of all families. What chat_template_kwargs says comes first."""
        effort = self.reasoning_effort
        if effort is None:
            return dict(self.chat_template_kwargs)
        switches = dict.fromkeys(("enable_thinking", "thinking"), effort != "none")
        return {"reasoning_effort": effort, **switches, **self.chat_template_kwargs}

    @property
    def shown_tools(self) -> list[Mapping[str, Any]]:
        """The tools as the template shows them. `strict` is about the answer."""
        return [
            {**tool, "function": {name: part for name, part in tool["function"].items() if name != "strict"}}
            for tool in self.tools
        ]

    @property
    def digest(self) -> bytes:
        """Of what the prompt depends on beside messages, empty for nothing: 16 bytes each of the tools in order, of the
        tools in any order, and of the template's variables; zeros for none of these.
        """
        if not self.tools and not self.variables:
            return b""
        tools = [json.dumps(tool) for tool in self.shown_tools]
        given = (tools, sorted(tools), self.variables)
        return b"".join(sha256(json.dumps(part).encode()).digest()[:16] if part else bytes(16) for part in given)


NO_OPTIONS = AnswerOptions()
ToolsGiven: TypeAlias = Sequence[Mapping[str, Any]] | AnswerOptions  # tools, or with how they may be used


def options_of(tools: ToolsGiven, thinking: str | None = None) -> AnswerOptions:
    """thinking: None leaves what the options say."""
    options = tools if isinstance(tools, AnswerOptions) else AnswerOptions(tools) if tools else NO_OPTIONS
    return options if thinking is None else replace(options, thinking=thinking)


def _check_tool(tool: Mapping[str, Any], path: str) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{path} is no function", param=path)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        message = f"{path}.function.name is {str(name)[:80]!r}; give 1 to 128 letters, digits, '_', '.' or '-'"
        raise RequestError(message, param=f"{path}.function.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{path}.function.parameters is no JSON schema", param=f"{path}.function.parameters")
