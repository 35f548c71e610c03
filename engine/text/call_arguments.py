"""What holds a model to the form of its calls: a tag for each function, with a grammar for its arguments, in Lark, from
their JSON schema: one for each way to write them that is not JSON (`CallSyntax.arguments`).

Knows no tokenizer but the ids of marks. A grammar raises RequestError for what cannot be written in that way, and what
a schema that is none leads to: AttributeError, LookupError, TypeError, ValueError or RecursionError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from kvstore.engine.sampling_params import JSON_OPTIONS, StructuralTag, StructuredOutputsParams
from kvstore.engine.text.prompts import AnswerOptions
from kvstore.engine.text.response_template import CallSyntax, ResponseTemplate
from kvstore.errors import RequestError

_MAX_PARTS = 64  # of a schema, to tell the types of one argument
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def with_tools(
    options: AnswerOptions, asked: StructuredOutputsParams | None, answers: ResponseTemplate | None
) -> StructuredOutputsParams | None:
    """What an answer must match, with what the use of the tools demands. asked: without. Raises RequestError."""
    must_call = options.named is not None or options.tool_choice == "required"
    is_strict = any(tool["function"].get("strict") for tool in options.tools)
    if not (must_call or is_strict or asked is not None or not options.parallel_tool_calls):
        return None
    calls = None if answers is None else answers.calls
    json_schema = None if asked is None else dict(ANY_ARGUMENTS) if asked.json_object else asked.json
    if asked is not None and json_schema is None and not must_call:
        raise RequestError(f"{asked.param} and tools go together only for a JSON answer", param=asked.param)
    is_open = not (must_call or asked is not None)  # text may come before a call
    if calls is None or (is_open and not calls.trigger):
        if not must_call and asked is None and options.parallel_tool_calls:
            return None  # strict: nothing can hold this model to a schema in mid-text
        message = "nothing can hold this model to a form of its calls; leave tool_choice 'auto', and other formats"
        raise RequestError(f"{message} out", param="tool_choice")
    assert answers is not None
    marks = {text: token_id for token_id, text in answers.shown_tokens.items()}
    functions = [one for tool in options.tools if options.named in (None, (one := tool["function"])["name"])]
    tags = [_tag(calls, one, not is_open or bool(one.get("strict")), marks) for one in functions]
    single = options.named is not None or not options.parallel_tool_calls or calls.separator is None
    return StructuredOutputsParams(
        tags=tags, required=not is_open, single=single, json=None if must_call else json_schema, param="tools",
        listing=(calls.opener, calls.separator or "", calls.closer) if calls.opener else None,
    )  # fmt: skip


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
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise RequestError(f"{name}: parameters are no JSON schema", "tools") from None


def parameters_grammar(parameter: str, schema: Mapping[str, Any]) -> str:
    """Each argument is written by itself: a string as it is, anything else as JSON."""
    start, lines = list[str](), list[str]()
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        before, after = (part.replace("{key}", key) for part in parameter.split("{value}"))
        name = f"p{index}"
        start.append(name if key in schema.get("required", ()) else f"{name}?")
        target, kinds = _target_of(schema, value), types_of(schema, value)
        texts = target.get("enum") if isinstance(target, Mapping) else None
        if texts and all(isinstance(text, str) for text in texts):
            lines.append(f"{name}: {_literal(before)} {_any_of(map(_literal, texts))} {_literal(after)}")
        elif not kinds or "string" in kinds:
            lines += [f"{name}: {_literal(before)} {name}_text", f"{name}_text[lazy]: /(.|\\n)*/ {_literal(after)}"]
        else:
            lines.append(f"{name}: {_literal(before)} {_json(schema, value)} {_literal(after)}")
    return "\n".join([f"start: {' '.join(start) or _literal('')}", *lines])


def types_of(schema: Mapping[str, Any], part: Any) -> list[str]:
    """The types that a part of a schema names, itself or where it refers to; none if it names none."""
    parts, types = [part], list[str]()
    for one in parts:
        target = _target_of(schema, one)
        if isinstance(target, Mapping):
            named = target.get("type", [])
            types += named if isinstance(named, list) else [named]
            branches = (target.get(keyword) for keyword in ("anyOf", "oneOf", "allOf"))
            parts += [branch for some in branches if isinstance(some, list) for branch in some]
        if len(parts) > _MAX_PARTS:  # they may refer to themselves
            break
    return types


def _target_of(schema: Mapping[str, Any], part: Any) -> Any:
    """What a part of a schema refers to, or the part itself; None if that is nowhere."""
    for _ in range(_MAX_PARTS):
        if not isinstance(part, Mapping) or "$ref" not in part:
            return part
        target: Any = schema
        for key in str(part["$ref"]).split("/")[1:]:
            target = target.get(key) if isinstance(target, Mapping) else None
        part = target
    return None


def python_grammar(name: str, schema: Mapping[str, Any]) -> str:
    """Keyword arguments. Their values are JSON, whose names the parser knows."""
    properties = schema.get("properties") or {}
    if wrong := [part for part in (*name.split("."), *properties) if not part.isidentifier() or iskeyword(part)]:
        raise RequestError(f"this model writes calls as Python, where {wrong[0]!r} cannot be a name", param="tools")
    parts = {f'"{key}=" {_json(schema, value)}': key in schema.get("required", ()) for key, value in properties.items()}
    return "\n".join(["start: none_0", *_in_order("", parts, ", ")])


class GemmaGrammar:
    """An object with bare keys, strings between marks. Of a string's schema only `enum` and `const` count.

    marks: the ids of special tokens; the mark may be one of them. text: the grammar.
    """

    MARK = '<|"|>'
    UNKNOWN = (
        "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties",
        "dependentRequired", "dependentSchemas", "prefixItems", "contains", "uniqueItems",
    )  # fmt: skip

    def __init__(self, schema: Mapping[str, Any], marks: Mapping[str, int]) -> None:
        self._root = schema
        self._of_references: dict[str, str] = {}
        self._num_names = 0
        mark = _literal(self.MARK)
        self._lines = ["TEXT: /(.|\\n)*/", f"rest[lazy]: TEXT {mark}", f"mark: {mark}", "text: mark rest"]
        if self.MARK in marks:
            self._lines[1:] = [f"mark: <[{marks[self.MARK]}]>", "text: mark TEXT mark"]
        start = self._value({**schema, "type": "object"})
        scalar = _json({}, {"type": ["number", "boolean", "null"]})
        self._lines.append(f"any: text | {scalar} | {self._object({})} | {_list('any')}")
        self.text = "\n".join([f"start: {start}", *self._lines])

    def _new_name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"

    def _rule(self, terms: str) -> str:
        if terms.isidentifier():
            return terms
        name = self._new_name()
        self._lines.append(f"{name}: {terms}")
        return name

    def _value(self, schema: Any) -> str:
        """The rule for a value that matches."""
        if schema is True:
            return "any"
        if wrong := [key for key in self.UNKNOWN if key in schema]:
            raise _unwritable(f"to {wrong[0]!r}")
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "enum" in schema or "const" in schema:
            return self._rule(_any_of(map(self._written, schema.get("enum") or [schema["const"]])))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: part for key, part in schema.items() if key not in (keyword, *_ANNOTATIONS)}
                if any(branch.get(key, part) != part for branch in schema[keyword] for key, part in rest.items()):
                    raise _unwritable(f"to {keyword} beside what it says otherwise")
                return self._rule(_any_of(self._value({**rest, **branch}) for branch in schema[keyword]))
        implied = ["object"] if "properties" in schema else ["array"] if "items" in schema else []
        kinds = schema.get("type", implied)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return self._rule(_any_of(self._of(kind, schema) for kind in kinds)) if kinds else "any"

    def _referred(self, reference: str) -> str:
        if reference not in self._of_references:
            name = self._of_references[reference] = self._new_name()  # it may refer to itself
            target: Any = self._root
            for part in reference.split("/")[1:]:
                target = target[part]
            self._lines.append(f"{name}: {self._value(target)}")
        return self._of_references[reference]

    def _of(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return _list(self._value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems"))
        return "text" if kind == "string" else _json({}, {**schema, "type": kind})

    def _object(self, schema: Mapping[str, Any]) -> str:
        required, others = schema.get("required", ()), schema.get("additionalProperties", True)
        properties = schema.get("properties") or {}
        properties = {**properties, **{key: True for key in required if key not in properties}}
        parts = {f"{_bare(key)} {self._value(value)}": key in required for key, value in properties.items()}
        if others is not False:
            key = f"KEY_{self._new_name().upper()}"
            self._lines.append(f"{key}: /\\w+/" + (f" & ~/{'|'.join(properties)}/" if properties else ""))
            pair = self._rule(f'{key} ":" {self._value(others)}')
            parts[f'{pair} ("," {pair})*'] = False
        prefix = self._new_name() + "_"
        self._lines += _in_order(prefix, parts, ",")
        return f'"{{" {prefix}none_0 "}}"'

    def _written(self, value: Any) -> str:
        """Terms for this value."""
        if isinstance(value, str):
            return f"mark {_literal(value)} mark"
        if isinstance(value, Mapping):
            pairs = [f"{_bare(key)} {self._written(part)}" for key, part in value.items()]
            return f'"{{" {_SEPARATOR.join(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {_SEPARATOR.join(map(self._written, value))} "]"'
        return _literal(json.dumps(value))


_SEPARATOR = ' "," '
_ANNOTATIONS = ("title", "description", "default", "examples")


def _unwritable(what: str) -> RequestError:
    return RequestError(f"nothing can hold this model's calls {what}; leave it out", param="tools")


def _bare(key: str) -> str:
    if not re.fullmatch(r"\w+", key):
        raise RequestError(f"this model writes keys bare, where {key!r} cannot be one", param="tools")
    return _literal(f"{key}:")


def _list(item: str, least: int = 0, most: int | None = None) -> str:
    if most == 0:
        return '"[" "]"'
    items = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
    return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _any_of(choices: Iterable[str]) -> str:
    first, *others = choices
    return f"({' | '.join([first, *others])})" if others else first


def _json(schema: Mapping[str, Any], value: object) -> str:
    """JSON that matches the part `value` of a schema."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    part = value if isinstance(value, Mapping) else {}
    return f"%json {json.dumps({**shared, **part, 'x-guidance': JSON_OPTIONS})}"


def _in_order(prefix: str, parts: Mapping[str, bool], separator: str) -> Sequence[str]:
    """Rules for parts in this order with a separator between them. parts: whether each must be there. The first rule is
    `none_0`, after the prefix.
    """
    lines = [f'{prefix}{before}_{len(parts)}: ""' for before in ("none", "some")]
    for index, (terms, is_required) in enumerate(parts.items()):
        lines.append(f"{prefix}p{index}: {terms}")
        for before, between in (("none", ""), ("some", f"{_literal(separator)} ")):  # what is written before this one
            skipped = "" if is_required else f" | {prefix}{before}_{index + 1}"
            lines.append(f"{prefix}{before}_{index}: {between}{prefix}p{index} {prefix}some_{index + 1}{skipped}")
    return lines
