"""What a request may want of the form of its answer: tools, formats, variables of the chat template. Their fields.

Knows no route. A request without any of these does not come here.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.engine.sampling_params import StructuredOutputsParams
from kvstore.engine.text.prompts import MAX_TOOLS, AnswerOptions
from kvstore.errors import RequestError
from kvstore.service.http.errors import bad_request

LOGGER = logging.getLogger("kvstore.service")


class FunctionIn(msgspec.Struct, omit_defaults=True):
    """parameters: a JSON schema. strict: the arguments of every call match it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(msgspec.Struct):
    """A tool. Types other than `function`, which this server does not run, are passed over."""

    type: str = "function"
    function: FunctionIn | None = None


class JsonSchema(msgspec.Struct):
    """schema: none for any object. Its answers match it, also without `strict`."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """type: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredIn(msgspec.Struct, omit_defaults=True):
    """What an answer must match, in vLLM's words: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


Tools = Annotated[list[ToolIn], Meta(max_length=MAX_TOOLS)]
ToolChoice = str | dict[str, Any]


def functions_of(tools: Sequence[ToolIn]) -> list[dict[str, Any]]:
    """The functions among them, as the engine takes them. Raises ApiError 400 that names the path."""
    functions, others = list[dict[str, Any]](), set[str]()
    for index, tool in enumerate(tools):
        if tool.type != "function":
            others.add(repr(tool.type[:40]))
        elif tool.function is None:
            raise bad_request(f"tools[{index}].function", f"tools[{index}].function is missing", "missing")
        else:
            functions.append({"type": "function", "function": msgspec.to_builtins(tool.function)})
    if others:
        LOGGER.info("tools of the types %s are passed over: this server runs none", ", ".join(sorted(others)))
    return functions


def options_of(
    tools: Sequence[ToolIn], choice: ToolChoice | None, parallel: bool | None, variables: Mapping[str, Any],
    effort: str | None,
) -> AnswerOptions:  # fmt: skip
    """Raises RequestError, which names the field."""
    functions = functions_of(tools)
    if not functions and choice in (None, "auto", "none"):
        return AnswerOptions(chat_template_kwargs=variables, reasoning_effort=effort)
    return AnswerOptions(functions, "auto" if choice is None else choice, parallel is not False, variables, effort)


def flat_options_of(*given: Any) -> AnswerOptions:
    """`options_of` for clients whose tools are the functions themselves, which errors name so."""
    try:
        return options_of(*given)
    except RequestError as error:
        message, param = (text.replace("].function.", "].") for text in (str(error), error.param or ""))
        raise RequestError(message, param or None) from None


def format_of(wanted: ResponseFormat, param: str) -> StructuredOutputsParams:
    """Raises ApiError 400, and RequestError."""
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True, param=param)
    if wanted.type != "json_schema":
        shown = wanted.type[:40]
        raise bad_request(f"{param}.type", f"{param}.type is {shown!r}; give text, json_object or json_schema")
    if wanted.json_schema is None:
        raise bad_request(f"{param}.json_schema", f"{param}.json_schema is missing", "missing")
    schema = {"type": "object"} if wanted.json_schema.schema is None else wanted.json_schema.schema
    inside = ".json_schema" if param == "response_format" else ""  # of chat completions
    return structured(f"{param}{inside}.schema", json=schema)


def structured(param: str, **given: Any) -> StructuredOutputsParams:
    """given: one kind, which the field `param` is of. Raises RequestError, which names the field."""
    try:
        return StructuredOutputsParams(**given, param=param)
    except RequestError as error:
        raise RequestError(re.sub(r"^structured_outputs\.\w+", param, str(error)), param) from None


def _one_of(given: Mapping[str, Any], param: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given, param=param)
    except RequestError as error:  # tags are not taken over HTTP
        raise RequestError(str(error).removesuffix(", tags"), param) from None


def constraint_of(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What the answer must match, by the fields that vLLM has for it. Raises ApiError 400, and RequestError."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) > 1:
        raise bad_request(max(given), f"{' and '.join(given)} are given; one answer matches one of them")
    for name, value in given.items():
        if isinstance(value, ResponseFormat):
            return format_of(value, name)
        if isinstance(value, StructuredIn):
            return _one_of(msgspec.to_builtins(value), name)
        kind = name.removeprefix("guided_")
        if kind == "json" and not isinstance(value, str | dict):
            raise bad_request(name, f"{name} is no JSON schema")
        return structured(name, **{kind: value})
    return None
