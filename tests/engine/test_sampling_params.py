"""Sampling parameters: bounds are part of the allowed range, and every wrong value names its field."""

import dataclasses
import math

import pytest

from kvstore.engine.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SCHEMA_DEPTH,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TAGS,
    SEED_LIMIT,
    SamplingParams,
    StructuralTag,
    StructuredOutputsParams,
)
from kvstore.errors import RequestError

ALLOWED = {
    "n": [1, MAX_CHOICES],
    "max_tokens": [None, 1, 2**31],
    "min_tokens": [0, 5],
    "temperature": [0, 0.0, 1, 1.5, 100],
    "top_k": [0, 1, 2**31],
    "top_p": [1e-9, 0.5, 1],
    "min_p": [0, 1],
    "repetition_penalty": [1e-9, 1, 100],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0.5, 2],
    "seed": [None, 0, -SEED_LIMIT, SEED_LIMIT - 1],
    "logit_bias": [{}, {0: -100, 5: 100.0}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1)],
    "stop": [(), [], "a", ["a", "b" * MAX_STOP_CHARACTERS], ["x"] * MAX_STOP_STRINGS],
    "stop_token_ids": [(), [0, 7], (2**31,)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "detokenize": [True, False],
    "structured_outputs": [None, StructuredOutputsParams(regex="[0-9]+")],
    "use_beam_search": [False],
    "beam_width": [None],
    "length_penalty": [-10, 0, 0.5, 10],
    "kv_exact": [True, False],
}
REFUSED = {
    "n": [0, MAX_CHOICES + 1, 1.0, True, "1", None],
    "max_tokens": [0, -1, 1.5, 2**31 + 1, "5", True],
    "min_tokens": [-1, 0.5, None],
    "temperature": [-0.1, 100.1, 10**400, math.nan, math.inf, "hot", None, True],
    "top_k": [-1, 1.5, 2**31 + 1],
    "top_p": [0, -0.5, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, 101, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "seed": [10**400, SEED_LIMIT, -SEED_LIMIT - 1, 0.5, "x", True],
    "logit_bias": [{-1: 0}, {0: 101}, {0: math.nan}, {0.5: 1}, {"0": 1}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1)],
    "stop": ["", [""], ["x" * (MAX_STOP_CHARACTERS + 1)], ["x"] * (MAX_STOP_STRINGS + 1), [5]],
    "stop_token_ids": [[-1], [0.5], ["7"], [True]],
    "ignore_eos": ["no", None, 2],
    "logprobs": [-1, MAX_LOGPROBS + 1, 0.5, True],
    "detokenize": ["yes", None],
    "use_beam_search": ["no"],
    "kv_exact": ["no", []],
    "structured_outputs": [{"regex": "a"}, "a", True],
    "beam_width": [0, MAX_BEAM_WIDTH + 1, 1.5, True, 4],
    "length_penalty": [-10.1, 10.1, math.nan, None],
}


def cases(table: dict) -> list:
    return [pytest.param(name, value, id=f"{name}={value!r:.30}") for name in table for value in table[name]]


def test_every_field_has_its_bounds_tested():
    assert set(ALLOWED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_allowed(name, value):
    params = SamplingParams(**{name: value})
    if not name.startswith("stop"):
        assert getattr(params, name) == value


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize") as error:
        SamplingParams(stop="end", detokenize=False)
    assert error.value.param == "stop"


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused_with_the_name_of_the_field(name, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert name in str(error.value) or name == "stop"


def test_more_tokens_at_least_than_at_most_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 6, more than max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5


def test_a_message_names_value_and_bounds():
    with pytest.raises(RequestError, match="temperature is 200; give a number from 0 to 100"):
        SamplingParams(temperature=200)
    with pytest.raises(RequestError, match="top_p is 0; give a number above 0 to 1"):
        SamplingParams(top_p=0)
    with pytest.raises(RequestError, match="max_tokens is 0; give a whole number from 1 to 2147483648"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match=r"n is 1\.5; give a whole number from 1"):
        SamplingParams(n=1.5)


@pytest.mark.parametrize(("name", "value"), [
    ("beam_width", 2), ("temperature", 0.7), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("repetition_penalty", 1.1),
    ("presence_penalty", 1), ("frequency_penalty", 1), ("min_tokens", 2), ("logit_bias", {5: 1.0}), ("stop", "x"),
    ("logprobs", 0), ("structured_outputs", StructuredOutputsParams(regex="a")),
])  # fmt: skip
def test_what_a_beam_search_cannot_keep_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(use_beam_search=True, n=3, **{name: value})
    assert error.value.param == name


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_beam_search_has_as_many_beams_as_answers_unless_it_is_told(temperature):
    params = SamplingParams(use_beam_search=True, n=3, temperature=temperature, max_tokens=5, stop_token_ids=[7])
    assert (params.num_sequences, params.temperature) == (3, 0)
    assert SamplingParams(use_beam_search=True, n=3, beam_width=MAX_BEAM_WIDTH).num_sequences == MAX_BEAM_WIDTH


def test_stops_become_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def optional(count: int, *required: str) -> dict:
    return {"items": {"properties": {f"p{i}": {} for i in range(count)}, "required": [*required]}}


TAG = StructuralTag("<a>", json={})
FITTING_GRAMMARS = [
    {"json": nested(MAX_SCHEMA_DEPTH)}, {"json": '{"type": "object"}'}, {"json_object": True},
    {"regex": "x" * MAX_GRAMMAR_BYTES}, {"choice": ["yes", "no"]}, {"grammar": "start: /a/"},
    {"tags": [TAG] * MAX_TAGS}, {"tags": [TAG], "required": True},
    {"json": {"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 25}]}}, {"json": optional(1002, "p7", "p8", "x")},
]  # fmt: skip
REFUSED_GRAMMARS = {
    "has nothing to match": {},
    "has regex and json_object": {"regex": "a", "json_object": True},
    "json: the schema is nested more than 32": {"json": nested(MAX_SCHEMA_DEPTH + 1)},
    "schema is nested": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "json: the schema has 65546 bytes; at most 65536": {"json": {"$id": "x" * MAX_GRAMMAR_BYTES}},
    "json: the schema is no JSON: Expecting value": {"json": "nothing"},
    "json: the schema is no JSON: Object of type": {"json": {"type": b"x"}},
    "json: the schema is '[]'; give an object": {"json": "[]"},
    "json: the schema is 'false'; give an object": {"json": "false"},
    "json: multipleOf: the values come together at 999983": {"json": {"multipleOf": 999983}},
    "multipleOf: the values come together at 9797": {"json": {"allOf": [{"multipleOf": 101}, {"multipleOf": 9700}]}},
    "json: the schema has 1001 optional properties; at most 1000": {"json": optional(1002, "p7")},
    "tags: they have 2100 optional properties": {"tags": [StructuralTag("<a>", json=optional(700))] * 3},
    "regex: it has 65537 bytes": {"regex": "x" * (MAX_GRAMMAR_BYTES + 1)},
    "regex: it is ''; give a text": {"regex": ""},
    "grammar: it is not valid Unicode": {"grammar": "\ud800"},
    "choice: give a list of texts": {"choice": "yes"},
    "choice: the list is empty": {"choice": []},
    "choice: it is ''": {"choice": [""]},
    "tags: there are 257; at most 256": {"tags": [TAG] * (MAX_TAGS + 1)},
    "tags: they have 1": {"tags": [StructuralTag("<a>", grammar="x" * MAX_GRAMMAR_BYTES)] * 17},
    "required: it is about tags": {"regex": "a", "required": True},
}


@pytest.mark.parametrize("given", FITTING_GRAMMARS, ids=lambda given: repr(given)[:40])
def test_a_grammar_within_bounds(given):
    assert StructuredOutputsParams(**given) == StructuredOutputsParams(**given)
    assert len({StructuredOutputsParams(**given), StructuredOutputsParams(**given)}) == 1


@pytest.mark.parametrize("said", REFUSED_GRAMMARS)
def test_a_grammar_beyond_bounds(said):
    with pytest.raises(RequestError) as raised:
        StructuredOutputsParams(**REFUSED_GRAMMARS[said])
    assert said in str(raised.value)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"begin": ""}, "begin is ''"),
        ({"begin": "<a>", "json": {}, "trigger": "<b>"}, "'<b>' is not how '<a>' begins"),
        ({"begin": "<a>"}, "needs json or grammar"),
        ({"begin": "<a>", "json": {}, "grammar": "start: /a/"}, "needs json or grammar"),
        ({"begin": "<a>", "json": "[]"}, "give an object"),
    ],
)
def test_a_tag_that_is_wrong(given, said):
    with pytest.raises(RequestError, match=f"structured_outputs.tags: .*{said}"):
        StructuralTag(**given)
