"""Calls in Gemma 4's notation: the grammar takes what matches a schema and nothing else, and the parser reads it."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvstore import AnswerOptions, RequestError, SamplingParams
from kvstore.engine.text.answer_parser import AnswerParser
from kvstore.engine.text.compiler import GrammarCompiler
from kvstore.engine.text.language import Language
from kvstore.engine.text.response_template import choose_template
from tests.support.grammars import compiled, tokenizer_of

MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["name"], "additionalProperties": False,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {
            "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 99}},
            "required": ["name"], "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "b c", 7, None, {"x": ["y"]}]}, "minItems": 1, "maxItems": 2},
        "tree": {"$ref": "#/$defs/tree"},
        "free": {"description": "anything"},
        "ratio": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}], "default": None},
        "notes": {"type": "object", "additionalProperties": {"type": ["string", "boolean"]}},
    },
    "required": ["tags", "who"], "additionalProperties": False, "$defs": {"tree": TREE},
}  # fmt: skip
ADA = {"who": {"name": "Ada, {x:1}"}, "tags": ["b c"]}
RIGHT = (
    ADA,
    {"who": {"name": "a\n\"b\"", "age": -4}, "tags": [7, {"x": ["y"]}]},
    ADA | {"tree": {"name": "", "kids": [{"name": "b", "kids": []}, {"name": "c"}]}, "ratio": None},
    ADA | {"free": [1.5, {"k": "t", "l": {}}, []], "ratio": 2.5, "notes": {"z": "é", "y": True}},
)  # fmt: skip
WRONG = (
    {}, {"tags": [7]}, ADA | {"tags": []}, ADA | {"tags": [7, 7, 7]}, ADA | {"tags": ["c"]}, ADA | {"more": 1},
    ADA | {"who": {"name": 1}}, ADA | {"who": {"name": "a", "age": 100}}, ADA | {"who": {"age": 1}},
    ADA | {"ratio": -1}, ADA | {"tree": {"name": "a", "kids": [{"kids": []}]}},
    ADA | {"notes": {"z": 1}}, ADA | {"ratio": "1"},
)  # fmt: skip


class Gemma:
    """A tokenizer with these special tokens, and what its model may write."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer_of()
        backend = self.tokenizer.backend_tokenizer
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
        self.tokenizer.added_tokens_decoder = backend.get_added_tokens_decoder()
        known = SimpleNamespace(chat_template="", added_tokens_decoder=self.tokenizer.added_tokens_decoder)
        template = SimpleNamespace(opening="", knows_tools=True)
        self.language = Language(self.tokenizer, template, "", choose_template(known, "gemma4"))
        self.compiler = GrammarCompiler(self.tokenizer, [self.tokenizer.eos], 400)

    def matcher(self, parameters, choice="required", **more):
        tool = {"type": "function", "function": {"name": "note", "parameters": parameters, **more}}
        params = self.language.constrained(SamplingParams(), AnswerOptions([tool], choice))
        return compiled(self.compiler, params.structured_outputs).matcher

    def is_allowed(self, matcher, text):
        matcher.reset()
        ids = self.tokenizer.backend_tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def read(self, text):
        parser = AnswerParser(self.language.answers, "", [{"type": "function", "function": {"name": "note"}}])
        events = [*parser.feed(text), *parser.finish("stop")]
        return [json.loads(event.arguments) for event in events if getattr(event, "state", "") == "whole"]


@pytest.fixture(scope="module", params=[MARKS, ()], ids=["special", "text"])
def gemma(request):
    made = Gemma(request.param)
    yield made
    made.compiler.close()


def written(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def call(arguments):
    return f"<|tool_call>call:note{written(arguments)}<tool_call|>"


def test_arguments_match_their_schema(gemma):
    matcher = gemma.matcher(SCHEMA)
    for right in RIGHT:
        assert gemma.is_allowed(matcher, call(right)), right
        assert gemma.read(call(right)) == [right]
    for wrong in WRONG:
        assert not gemma.is_allowed(matcher, call(wrong)), wrong
    assert gemma.is_allowed(matcher, call(ADA) * 2) and gemma.read(call(ADA) * 2) == [ADA, ADA]
    assert not gemma.is_allowed(matcher, "Hm" + call(ADA))


def test_a_strict_function_may_be_called(gemma):
    matcher = gemma.matcher(SCHEMA, "auto", strict=True)
    assert gemma.is_allowed(matcher, "Hm" + call(ADA)) and gemma.is_allowed(matcher, "Hm")
    assert not gemma.is_allowed(matcher, "Hm" + call(WRONG[0]))


def test_a_property_that_is_named_cannot_be_another_one_too(gemma):
    matcher = gemma.matcher({"properties": {"a": {"type": "integer"}}, "required": ["b"]})
    assert gemma.is_allowed(matcher, call({"a": 1, "b": "x", "aa": []}))
    assert not gemma.is_allowed(matcher, call({"b": "x", "a": "x"}))
    assert not gemma.is_allowed(matcher, call({"a": 1}))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab {}[]:,\"é\n", max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("abcd"), part, max_size=3),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(st.sampled_from("abcd"), values, max_size=4))
def test_any_arguments_without_a_schema(gemma, arguments):
    assert gemma.is_allowed(gemma.matcher(None), call(arguments))
    assert gemma.read(call(arguments)) == [arguments]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a-b": {}}}, "keys bare, where 'a-b' cannot be one"),
        ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "to 'allOf'; leave it out"),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, "to anyOf beside what it says otherwise"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "parameters are no JSON schema"),
    ],
)
def test_what_cannot_be_held_is_refused(gemma, schema, why):
    with pytest.raises(RequestError, match=why) as refused:
        gemma.matcher(schema)
    assert refused.value.param == "tools"


def test_a_schema_that_is_nested_too_deep_is_refused(gemma):
    schema = {}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="parameters are no JSON schema"):
        gemma.matcher(schema)
