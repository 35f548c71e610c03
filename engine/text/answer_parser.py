"""Parses an answer into reasoning, content and tool calls while its text arrives.

transformers' `ResponseParser` finds the regions, and parses the text of a whole call. The events are the same however
the text was cut. Knows no tokens.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from kvstore.engine.outputs import AnswerEvent, TextDelta, ToolCallEvent
from kvstore.engine.text.call_arguments import types_of
from kvstore.engine.text.response_template import CALLS, REASONING, UNSEEN, ResponseTemplate

# ResponseParser copies all text that it was given with every piece, so it is replaced after so many characters.
MAX_PARSED = 2**14
_CONSTANTS = {"true": True, "false": False, "null": None}
# What parsers raise for a text that is no call.
_NO_CALL = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)


class AnswerParser:
    """The events of one answer. White space around reasoning and calls is left out.

    prefix: what the rendered prompt has after the last message, such as "<|im_start|>assistant\\n<think>\\n" (or more:
    all up to the last start of an answer is passed over). tools: as in the request; arguments are cast by their
    schemas, and without any a call is content.
    """

    def __init__(self, template: ResponseTemplate, prefix: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.template = template
        is_text = template.spec["fields"].get(CALLS, {}).get("content") == "xml-inline"
        self._tools = [_as_cast(tool["function"], is_text) for tool in tools]
        self._spec = template.regions if tools else template.regions_without_calls
        self._region: str = self._spec.implicit
        self._reopening = ""  # text that brings a new parser into this region
        self._opener = ""  # of this region
        self._call: list[str] = []  # text of a call, its opener first
        self._name = ""  # of the function, if the opener holds it
        self._num_calls = 0
        self._said = {"reasoning": False, "content": False}
        self._space = {"reasoning": "", "content": ""}  # white space after what was said
        self._apart = {"reasoning"}  # of what comes after a delimiter next
        self._parser = self._new_parser(prefix)
        self._pending = self._spec.truncate_past_last_anchor(prefix)  # text that is in no event yet
        events = self._parser.initial_events
        if all(event["field"] == self._spec.implicit for event in events):  # the prefix opens nothing
            self._parser, self._pending, events = self._new_parser(""), "", []
        for event in events:
            list(self._follow(event))
        self._space = dict.fromkeys(self._space, "")

    @property
    def inside_call(self) -> bool:
        """Whether the text so far ends within a call: stop strings do not count there."""
        return self._region == CALLS

    def feed(self, text: str) -> list[AnswerEvent]:
        """The events that more text completes."""
        self._pending += text
        self._num_parsed += len(text)
        events = [new for event in self._parser.feed(text) for new in self._follow(event)]
        if self._num_parsed > MAX_PARSED:
            self._renew()
        return events

    def finish(self, finish_reason: str) -> list[AnswerEvent]:
        """The last events. A call that is open is whole if the model ended the answer itself ("stop"), else cut."""
        _, events = self._parser.finalize()
        return [new for event in events for new in self._follow(event, finish_reason)]

    def _new_parser(self, prefix: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        self._num_parsed = 0
        return ResponseParser(self._spec, prefix=prefix)

    def _renew(self) -> None:
        """Go on with a parser that is in the same region and holds no text."""
        outside = self._region == self._spec.implicit
        parser = self._new_parser("." if outside else self._reopening)  # "." because an answer begins only once
        opened = [event["field"] for event in parser.initial_events if event["type"] == "region_open"]
        if opened == [self._region]:
            parser.feed(self._pending)
            self._parser = parser

    def _follow(self, event: Mapping[str, Any], ending: str = "") -> Iterator[AnswerEvent]:
        """ending: the finish reason, for the events of the end."""
        field = self._spec.fields[event["field"]]
        kind: Literal["reasoning", "content"] = "reasoning" if field.name in REASONING else "content"
        if event["type"] == "region_open":
            yield from self._open(field)
        elif event["type"] == "region_chunk":
            self._pending = self._pending[len(event["text"]) :]
            # What an opener needs to be told from a longer one, and "." so that no closer is half there.
            self._reopening = self._reopening or self._opener + event["text"][:256] + "."
            if field.name == CALLS:
                self._call.append(event["text"])
            elif field.name != UNSEEN:
                yield from self._say(kind, event["text"])
        else:
            closer = field.close_re.match(self._pending) if field.open_re and field.close_re else None
            closed = closer.group() if closer else ""
            self._pending = self._pending[len(closed) :]
            self._region = self._spec.implicit
            if field.name == CALLS:
                self._call.append(closed)
                yield from self._end_call(bool(closed or not ending), ending)
            elif field.open_re and not ending:
                self._apart = {"reasoning", "content"}
            if ending and kind == "content" and field.name not in (CALLS, UNSEEN):
                yield from self._flush()

    def _open(self, field: Any) -> Iterator[AnswerEvent]:
        opener = field.open_re.match(self._pending) if field.open_re else None
        self._region, self._reopening = field.name, ""
        self._opener = opener.group() if opener else ""
        self._pending = self._pending[len(self._opener) :]
        if field.name == CALLS:
            self._call = [self._opener]
            self._name = opener.groupdict().get("name") or "" if opener else ""
            yield ToolCallEvent("begun", self._num_calls, self._name)

    def _say(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[AnswerEvent]:
        """Hold white space back until it is known what follows."""
        self._space[kind] += text
        if text.isspace():
            return
        text = self._space[kind]
        said = text.rstrip()
        self._space[kind] = text[len(said) :]
        if kind in self._apart:  # what was said before is on another line
            said = "\n" * self._said[kind] + said.lstrip()
        self._said[kind] = True
        self._apart.discard(kind)
        yield TextDelta(kind, said)

    def _flush(self) -> Iterator[AnswerEvent]:
        """The white space that ends an answer, if its content does."""
        if self._space["content"] and "content" not in self._apart:
            yield TextDelta("content", self._space["content"])

    def _end_call(self, is_closed: bool, ending: str) -> Iterator[AnswerEvent]:
        text = "".join(self._call)
        if not is_closed and ending != "stop":
            yield ToolCallEvent("cut", self._num_calls, self._name, text[len(self._opener) :])
            return
        # The last parameter would be taken as whole.
        is_lost = not is_closed and self.template.calls_alone.fields[CALLS].content == "xml-inline"
        calls = [] if is_lost else self._parse_calls(text)
        for name, arguments in calls:
            yield ToolCallEvent("whole", self._num_calls, name, arguments)
            self._num_calls += 1
        if calls:
            self._apart = {"reasoning", "content"}
        else:
            yield from self._say("content", text)
            if ending:
                yield from self._flush()

    def _parse_calls(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments; empty if the text is no call."""
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(text, self.template.calls_alone, prefix="", tools=self._tools)
            return [_checked(call) for call in _flat(message[CALLS])]
        except _NO_CALL:
            return []


def _as_cast(function: Mapping[str, Any], is_text: bool) -> dict[str, Any]:
    """What transformers casts arguments by: each argument's types in one place. is_text: all of them are texts; else
    those are not cast that may be one.
    """
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    types = {name: types_of(schema, part) for name, part in properties.items()} if isinstance(properties, dict) else {}
    cast = {name: {"type": found} for name, found in types.items() if is_text or "string" not in found}
    return {"name": function["name"], "parameters": {"properties": cast}}


def _flat(value: Any) -> Iterator[Mapping[str, Any]]:
    """The calls in what a template gives: one, a list, or the text of a list in Python."""
    if isinstance(value, list):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, str):
        yield from _python_calls(value)
    else:
        yield value.get("function", value)


class _JSONNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _python_calls(text: str) -> Iterator[Mapping[str, Any]]:
    """Calls such as `[f(a=1), g()]`. Nothing is run: arguments are literals, Python's or JSON's."""
    tree = ast.parse(text.strip(), mode="eval").body
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(f"{ast.unparse(call)} is no call with named arguments")
        arguments = {str(given.arg): ast.literal_eval(_JSONNames().visit(given.value)) for given in call.keywords}
        yield {"name": ast.unparse(call.func), "arguments": arguments}


def _checked(call: Mapping[str, Any]) -> tuple[str, str]:
    name, arguments = call["name"], call.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError(f"{call} has no name or no arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half a surrogate pair cannot be sent
    return name, text
