"""What can be compiled and what it allows; and everything that is refused says why, within bounded work."""

import json
import os
import sys
import threading
from concurrent.futures import Future

import pytest
import transformers

from kvstore import StructuralTag, StructuredOutputsParams
from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.text.compiler import NICENESS, GrammarCompiler
from kvstore.errors import RequestError
from tests.support.grammars import compiled, request_of, tokenizer_of
from tests.support.waiting import TIMEOUT_S

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = StructuralTag('<call>{"name": "add", "arguments": ', "}</call>", ADD, trigger="<call>")
MARKED = StructuralTag("<|user|>f(", ")<|user|>", {"type": "integer"}, trigger="<|user|>")
LISTED = StructuralTag("[", "]", grammar='start: /[0-9]+/ ("," /[0-9]+/)*')
ONE = '<call>{"name": "add", "arguments": {"a":1}}</call>'
OTHER = ONE.replace("add", "mul")
OVERLAPPING = [{"type": "string", "minLength": 2}, {"type": "string", "pattern": "a"}]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer) + 16)
    yield compiler
    compiler.close()


def accepts(compiler, tokenizer, wanted, text: str) -> bool:
    matcher = compiled(compiler, wanted).matcher
    return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "whole", "others"),
    [
        ({"json": ADD}, ['{"a":1}', '{"a":-20}'], ['{"a": 1}', "{}", '{"a":1.5}', '{"a":1,"b":2}', '{"a":1} ']),
        ({"json": {"oneOf": OVERLAPPING}}, ['"ba"', '"xy"', '"a"'], ["1", '"x"']),
        ({"json": {}}, ["1", "[null]"], ["nothing"]),
        ({"json_object": True}, ["{}", '{"x":[1,{"y":"é"}]}'], ["[]", "1"]),
        ({"regex": "[0-9]{2}/x?"}, ["12/", "12/x"], ["1/", "12/xx"]),
        ({"choice": ["yes", 'a "b"\n\\', "é\x01"]}, ["yes", 'a "b"\n\\', "é\x01"], ["no", "ye"]),
        ({"choice": ["a", "ab", "abba", ""]}, ["a", "ab", "abba", ""], ["abb", "b", "aa"]),
        ({"grammar": 'start: "a" b\nb: /[0-9]/ b | "."'}, ["a.", "a12."], ["a1"]),
        ({"grammar": 'root ::= "a" b\nb ::= [0-9] b | "."'}, ["a.", "a12."], ["a1"]),
        ({"tags": [CALL]}, ["text", f"a {ONE} b", f"<cal <call {ONE}{ONE}"], [f"a {ONE[:20]}", "<call>x", OTHER]),
        ({"tags": [CALL, LISTED]}, [f"a [1,2] {ONE}", "]"], ["[x]", "[1,", "<call>["]),
        ({"tags": [MARKED, CALL]}, ["text", f"a <|user|>f(12)<|user|> {ONE}"], ["<|user|>g", "<|user|>", "<|system|>"]),
        ({"tags": [CALL], "required": True}, [ONE, ONE + ONE], ["text", f"a{ONE}", f"{ONE} "]),
        ({"tags": [MARKED, LISTED], "required": True}, ["[3]<|user|>f(1)<|user|>"], [" [3]"]),
    ],
)  # fmt: skip
def test_what_is_allowed(compiler, tokenizer, given, whole, others):
    wanted = StructuredOutputsParams(**given)
    assert [text for text in whole if not accepts(compiler, tokenizer, wanted, text)] == []
    assert [text for text in others if accepts(compiler, tokenizer, wanted, text)] == []


FIELDS = {
    "ok": {"$ref": "#/$defs/name"},
    "a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "foo"}]}},
}
CHAIN = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1400)}
REFUSED = {
    "Invalid type: foo, at /properties/a/items/anyOf/1": {"json": {"properties": FIELDS, "$defs": {"name": {}}}},
    'Unimplemented keys: ["uniqueItems"], at /items': {"json": {"items": {"uniqueItems": True}}},
    "Pointer '/$defs/b' does not exist, at /properties/x/allOf/0": {
        "json": {"properties": {"x": {"allOf": [{"$ref": "#/$defs/b"}]}}}
    },
    "Unsatisfiable schema: incompatible types": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "look-around, including look-ahead and look-behind, is not supported, at /items": {
        "json": {"items": {"type": "string", "pattern": "(?=a)b"}}
    },
    "is not present in a registry": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "no answer can match it": {"regex": "[a&&b]"},
    'invalid regex "(a" (in regex): regex parse error': {"regex": "(a"},
    'at 1(8): unknown name: "foo"': {"grammar": "start: foo"},
    "Expected f64 for 'multipleOf', got true": {"json": {"type": "number", "multipleOf": True}},
    "nested": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "it is nested too deep": {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    "Expected name at line 2": {"grammar": 'root ::= "a"\n= b'},
    "unknown name": {"tags": [StructuralTag("<a>", grammar="start: foo")]},
    "compiled: Invalid type: foo, at /items, after '<b>'": {
        "tags": [StructuralTag("<a>", json={}), StructuralTag("<b>", json={"items": {"type": "foo"}})]
    },
    # hostile: each would take seconds, gigabytes or the stack of an ordinary thread
    "or it is too complex (NoExtensionBias)": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "schema too large": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(8)]} for i in range(12)]}
    },
    "fuel exhausted": {"grammar": "start: X\nX: /(.*a.{20})/ & /(.*b.{18})/ & ~/(.*c.{15})/"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_compiled_says_why_in_one_line(compiler, said):
    with pytest.raises(RequestError, match="structured_outputs cannot be compiled: ") as raised:
        compiled(compiler, StructuredOutputsParams(**REFUSED[said]))
    assert said in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert raised.value.param == "structured_outputs"


def test_a_chain_of_references_does_not_end_the_process(compiler, tokenizer):
    """The compiler follows it recursively; the stack of an ordinary thread is too small."""
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d1400": {"const": 1}}}, separators=(",", ":"))
    assert accepts(compiler, tokenizer, StructuredOutputsParams(json=schema), "[[[]]]")


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own niceness is Linux's")
def test_steps_come_before_grammars_where_processors_are_short(compiler):
    told = Future[int]()
    compiler.prepare(
        request_of(StructuredOutputsParams(regex="a")),
        lambda *_: told.set_result(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert told.result(TIMEOUT_S) == min(here + NICENESS, 19)


def test_each_choice_has_a_matcher_of_its_own(compiler, tokenizer):
    first = compiled(compiler, StructuredOutputsParams(choice=["ab", "cd"]), n=3)
    (a,), (c,) = (tokenizer.encode(letter, add_special_tokens=False) for letter in "ac")
    matchers = [choice.matcher for choice in (first, *first.children)]
    assert [matcher.consume_token(token) for matcher, token in zip(matchers, (a, c, a), strict=True)] == [True] * 3
    assert [bool(matcher.validate_tokens([a])) for matcher in matchers] == [False] * 3


def test_the_last_grammars_are_kept():
    tokenizer = tokenizer_of()
    compiler = GrammarCompiler(tokenizer, {tokenizer.eos}, 300, max_kept=2)
    first, second, third = (StructuredOutputsParams(regex=regex) for regex in ("x1", "x2", "x3"))
    for wanted in (first, second, first, third):
        compiled(compiler, wanted)
    kept = dict(compiler.kept)
    assert list(kept) == [first, third]
    compiled(compiler, first)
    assert list(compiler.kept.items()) == [(third, kept[third]), (first, kept[first])]
    compiler.close()


@pytest.mark.parametrize(
    ("tokenizer", "eos", "said"),
    [(None, {1}, "needs a tokenizer"), (tokenizer_of(), (), "needs an end token")],
)
def test_a_model_that_cannot_be_constrained_says_so_to_each_request(tokenizer, eos, said):
    compiler = GrammarCompiler(tokenizer, eos, 300)
    compiler.wait_for_table()
    for _ in range(2):
        with pytest.raises(RequestError, match=f"structured_outputs {said}"):
            compiled(compiler, StructuredOutputsParams(regex="a"))
    compiler.close()
