"""How one request speaks with the model: its tools, the variables of the chat template, the parser of its answers.

Pure: knows no session, no core and no thread.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, TypeAlias

from kvstore.engine.outputs import Choice
from kvstore.engine.sampling_params import MAX_TAGS, SamplingParams, StructuralTag, StructuredOutputsParams
from kvstore.engine.text.answer_parser import AnswerParser
from kvstore.engine.text.call_arguments import GemmaGrammar, parameters_grammar, python_grammar
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.detokenizer import MAX_UNFINISHED, Detokenizer
from kvstore.engine.text.response_template import CallSyntax, ResponseTemplate
from kvstore.errors import RequestError

TOOL_NAME = re.compile(r"[\w.-]{1,128}")
MAX_TOOLS = MAX_TAGS
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


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
    Raises RequestError, which names the field.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking: str = "keep"

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


@dataclass(frozen=True, slots=True)
class Language:
    """The tokenizer and the chat template of a model. template: None if there is none that works; why_no_chat is the
    reason. answers: how the model writes calls and reasoning; None if that is not known.
    """

    tokenizer: Any
    template: ChatTemplate | None
    why_no_chat: str
    answers: ResponseTemplate | None = None

    def chat_template(self, options: AnswerOptions = NO_OPTIONS, continues: bool = False) -> ChatTemplate:
        """continues: see `ChatTemplate.using`. Raises RequestError, also for tools that the model cannot be told of or
        whose calls nobody could read.
        """
        if self.template is None:
            raise RequestError(self.why_no_chat, param="messages")
        if not options.tools and not options.variables and not continues:
            return self.template
        if options.tools and not self.template.knows_tools:
            message = "this model's chat template knows no tools; give one that does as --chat-template (in Python, "
            raise RequestError(f"{message}chat_template=)", param="tools")
        if options.tools and (self.answers is None or "tool_calls" not in self.answers.spec["fields"]):
            message = "nothing is known of how this model writes calls; name its parser as --tool-call-parser (in "
            raise RequestError(f"{message}Python, tool_call_parser=)", param="tools")
        return self.template.using(options.shown_tools, options.variables, continues)

    def new_parser(self, options: AnswerOptions = NO_OPTIONS, begun: Message | None = None) -> AnswerParser | None:
        """For one answer; None if its text is its content. `chat_template` has passed the options. begun: the answer
        that it continues.
        """
        tools = [] if options.tool_choice == "none" else options.tools
        if self.answers is None or not (tools or self.answers.reasoning):
            return None
        template = self.chat_template(options, begun is not None)
        prefix = template.opening if begun is None else template.opening_with(begun)
        return AnswerParser(self.answers, prefix, tools)

    def parser(self, options: AnswerOptions, begun: Message | None = None) -> Callable[[], AnswerParser | None]:
        """What makes the parsers of a request's answers."""
        return partial(self.new_parser, options, begun)

    def thought_in(self, token_ids: Sequence[int], answer: Message, opening: str) -> tuple[int, int] | None:
        """Where in these ids, which end with the answer, its reasoning is, with the texts around it; (0, 0) if it is
        not there. None if that cannot be told in whole tokens. opening: the text before the answer.
        """
        opener, closer = (None if self.answers is None else self.answers.reasoning) or ("", "")

        def text_of(count: int) -> str:
            ids = list(token_ids[:count])
            (text,) = self.tokenizer.backend_tokenizer.decode_batch([ids], skip_special_tokens=False)
            return str(text)

        def end_of(beginning: str) -> int | None:
            count = bisect_left(range(len(token_ids)), len(beginning), key=lambda count: len(text_of(count)))
            tried = range(count, min(count + MAX_UNFINISHED, len(token_ids)) + 1)  # within a character
            return next((count for count in tried if text_of(count) == beginning), None)

        whole = text_of(len(token_ids))
        is_cut = not answer["content"] and "tool_calls" not in answer  # it may have ended within its reasoning
        reasoning, closed = re.escape(answer["reasoning_content"]), re.escape(closer) + (r"|\Z" if is_cut else "")
        thought = re.compile(rf"\s*(?:{re.escape(opener)})?\s*{reasoning}\s*(?:{closed})\s*")
        start = whole.rfind(opening) + len(opening)
        found = thought.match(whole, start) if opening in whole else None
        if found is None:
            return None if thought.search(whole) else (0, 0)
        first, end = end_of(whole[:start]), end_of(whole[: found.end()])
        return None if first is None or end is None else (first, end)

    def constrained(self, params: SamplingParams, options: AnswerOptions = NO_OPTIONS) -> SamplingParams:
        """The parameters with a grammar for what the tools' use demands. Raises RequestError."""
        asked = params.structured_outputs
        if options.tools and options.tool_choice != "none":
            asked = self._with_tools(options, asked)
        reasoning = None if self.answers is None or asked is None else self._reasoning(options)
        if asked is not None and reasoning is not None:
            asked = replace(asked, reasoning=reasoning)
        return params if asked is params.structured_outputs else replace(params, structured_outputs=asked)

    def _with_tools(
        self, options: AnswerOptions, asked: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        must_call = options.named is not None or options.tool_choice == "required"
        is_strict = any(tool["function"].get("strict") for tool in options.tools)
        if not (must_call or is_strict or asked is not None or not options.parallel_tool_calls):
            return None
        calls = None if self.answers is None else self.answers.calls
        json_schema = None if asked is None else dict(ANY_ARGUMENTS) if asked.json_object else asked.json
        if asked is not None and json_schema is None and not must_call:
            raise RequestError(f"{asked.param} and tools go together only for a JSON answer", param=asked.param)
        is_open = not (must_call or asked is not None)  # text may come before a call
        if calls is None or (is_open and not calls.trigger):
            if not must_call and asked is None and options.parallel_tool_calls:
                return None  # strict: nothing can hold this model to a schema in mid-text
            message = "nothing can hold this model to a form of its calls; leave tool_choice 'auto', and other formats"
            raise RequestError(f"{message} out", param="tool_choice")
        assert self.answers is not None
        marks = {text: token_id for token_id, text in self.answers.shown_tokens.items()}
        functions = [one for tool in options.tools if options.named in (None, (one := tool["function"])["name"])]
        tags = [_tag(calls, one, not is_open or bool(one.get("strict")), marks) for one in functions]
        single = options.named is not None or not options.parallel_tool_calls or calls.separator is None
        return StructuredOutputsParams(
            tags=tags, required=not is_open, single=single, json=None if must_call else json_schema, param="tools",
            listing=(calls.opener, calls.separator or "", calls.closer) if calls.opener else None,
        )  # fmt: skip

    def _reasoning(self, options: AnswerOptions) -> tuple[str, str] | None:
        """The texts around reasoning, which comes before what must match; the first is "" if the prompt has it."""
        assert self.answers is not None
        if self.answers.reasoning is None:
            return None
        opener, closer = self.answers.reasoning
        opening = self.chat_template(options).opening
        start, end = opening.rfind(opener), opening.rfind(closer)
        if end > start:
            return None  # the prompt has closed it
        return ("", closer) if start >= 0 else (opener, closer)


def _tag(calls: CallSyntax, function: Mapping[str, Any], is_strict: bool, marks: Mapping[str, int]) -> StructuralTag:
    """A call of this function. is_strict: its arguments match its schema. marks: special tokens that calls are written
    with. Raises RequestError.
    """
    schema = dict(function.get("parameters") or ANY_ARGUMENTS) if is_strict else dict(ANY_ARGUMENTS)
    begin, trigger = calls.begin.replace("{name}", function["name"]), "" if calls.opener else calls.trigger
    name = f"tools: {function['name']}"
    if schema.get("type", "object") != "object":
        raise RequestError(f"{name}: parameters are of the type {str(schema['type'])[:80]}; give object", "tools")
    try:
        if calls.arguments == "json":
            return StructuralTag(begin, calls.end, json={"type": "object", **schema}, trigger=trigger)
        if calls.arguments == "python":
            return StructuralTag(begin, calls.end, grammar=python_grammar(function["name"], schema))
        gemma = calls.arguments == "gemma"
        grammar = GemmaGrammar(schema, marks).text if gemma else parameters_grammar(calls.parameter, schema)
        return StructuralTag(begin, calls.end, grammar=grammar, trigger=trigger)
    except RequestError as error:
        raise RequestError(str(error).replace("structured_outputs.tags", name), "tools") from None
    except (AttributeError, LookupError, TypeError, RecursionError):
        raise RequestError(f"{name}: parameters are no JSON schema", "tools") from None


def answer_ids(
    tokenizer: Any, template: ChatTemplate, prompt_token_ids: Sequence[int], choice: Choice
) -> Sequence[int]:
    """Ids of an answer without its end token, which the template adds, and without its stop string."""
    if choice.finish_reason not in ("stop", "tool_calls"):
        return list(choice.token_ids)
    if not isinstance(choice.stop_reason, str):
        return choice.token_ids[:-1]
    said = Detokenizer(tokenizer.backend_tokenizer, prompt_token_ids=prompt_token_ids)
    count, known = 0, ""
    for number, token_id in enumerate(choice.token_ids, start=1):
        said.append([token_id])
        if not choice.text.startswith(said.text):
            break
        count, known = number, said.text
    return choice.token_ids[:count] + template.encode_answer(choice.text[len(known) :])
