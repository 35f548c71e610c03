"""Bodies that are wrong in every way, and what is said of them; common fields, messages and their contents."""

import json
import random

import pytest

from kvstore.engine.sampling_params import SamplingParams
from kvstore.service.api.schema import (
    MAX_BRACKETS,
    MAX_QUOTES,
    ContentPart,
    MessageIn,
    Messages,
    Sampling,
    messages_of,
    parse,
    sampling_params,
)
from kvstore.service.http.errors import ApiError


class Body(Sampling, kw_only=True):
    messages: Messages


HELLO = [{"role": "user", "content": "hello"}]


def told(raw: bytes | None = None, **fields):
    """The error of a body: (param, code, message)."""
    if raw is None:
        raw = json.dumps({"messages": HELLO, **fields}).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, Body)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code, caught.value.message


def with_raw(name: str, value: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "hello"}], "%s": %s}' % (name.encode(), value.encode())


# -- not JSON --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("raw", "said"), [
    (b"", "empty"),
    (b" \n", "empty"),
    (b"{", "not valid JSON"),
    (b'{"messages": [}', "not valid JSON (byte 14)"),
    (b"[]", "the body is a list; give an object"),
    (b'"text"', "the body is a text; give an object"),
    (b"null", "the body is null; give an object"),
    (b"\xff\xfe", "not valid UTF-8"),
    (b'{"unknown": "\xff"}', "not valid UTF-8"),
    (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not valid UTF-8"),
    (b"\xef\xbb\xbf{}", "not valid JSON (byte 0)"),
    (b'{"messages": [{"role": "user", "content": "x"}]} {}', "not valid JSON (byte"),
    (b"{'a': 1}", "not valid JSON (byte 1)"),
    (b"[" * 100_000, "a list; give an object"),
    (b'{"messages": ' + b"[" * 100_000, "object"),
    (b'{"unknown": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"unknown": ' + b'{"a":' * 100_000, "nested too deeply"),
    (b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
])  # fmt: skip
def test_a_body_that_is_no_json_object(raw, said):
    _, code, message = told(raw)
    assert said in message
    assert code in ("invalid_json", "invalid_value")
    assert len(message) < 200


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00", r"\ud800\ud800", r"\udfffx", r"x\ud83d", r"\ud83d\u0041"])
def test_half_a_surrogate_pair_is_refused_in_every_text(text):
    for raw in (
        b'{"messages": [{"role": "user", "content": "%s"}]}',
        b'{"messages": [{"role": "%s", "content": "hello"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "%s"}]}]}',
        b'{"messages": [{"role": "user", "content": "hello"}], "stop": ["%s"]}',
        b'{"messages": [{"role": "user", "content": "hello"}], "cache_salt": "%s"}',
        b'{"messages": [{"role": "user", "content": "hello"}], "unknown": "%s"}',
    ):
        assert told(raw % text.encode())[1] == "invalid_json"
    assert parse(b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}', Body).messages[0].content == "😀"


@pytest.mark.parametrize("unit", ["[]", "{}", '"a"'])
def test_a_body_of_very_many_values_is_refused_before_they_are_made(unit):
    count = MAX_BRACKETS + 1 if unit[0] != '"' else MAX_QUOTES // 2 + 1
    for name in ("stop", "unknown"):
        assert told(with_raw(name, f"[{','.join([unit] * count)}]"))[1] == "too_many_values"
    text = "[a, b]" * 20_000  # many brackets, and no such body
    assert parse(with_raw("unknown", json.dumps(text)), Body).messages[0].content == "hello"


# -- wrong fields ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
def test_a_number_that_is_none_names_its_field(name, number):
    param, code, message = told(with_raw(name, number))
    assert (param, code) == (name, "invalid_value")
    assert message.startswith(name)


def test_a_number_that_is_none_within_a_field():
    assert told(with_raw("logit_bias", '{"5": NaN}'))[0] == "logit_bias.5"
    assert told(with_raw("unknown", '[1, {"a": [NaN]}]'))[0] == "unknown[1].a[0]"


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"temperature": -0.1}, "temperature", "temperature must be a number of at least 0"),
    ({"temperature": 2.1}, "temperature", "temperature must be a number of at most 2"),
    ({"temperature": "1"}, "temperature", "temperature is a text; give a number or null"),
    ({"temperature": True}, "temperature", "temperature is true or false; give a number or null"),
    ({"top_p": 0}, "top_p", "top_p must be a number of more than 0"),
    ({"min_p": 2}, "min_p", "min_p must be a number of at most 1"),
    ({"stream": "yes"}, "stream", "stream is a text; give true or false or null"),
    ({"top_k": -5}, "top_k", "top_k must be a whole number of at least -1"),
    ({"n": 10**9}, "n", "n must be a whole number of at most 16"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be a whole number of at least 1"),
    ({"max_tokens": 10**400}, "max_tokens", "max_tokens must be a whole number of at most 2147483648"),
    ({"max_tokens": "10"}, "max_tokens", "max_tokens is a text; give a whole number or null"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens is a number; give a whole number or null"),
    ({"stop": ["a"] * 17}, "stop", "stop must be a list of at most 16 entries"),
    ({"stop": "a" * 257}, "stop", "stop must be a text of at most 256 characters"),
    ({"stop": ["a", "a" * 257]}, "stop[1]", "stop[1] must be a text of at most 256 characters"),
    ({"stop": [""]}, "stop[0]", "stop[0] must be a text of at least 1 character"),
    ({"stop": [1]}, "stop[0]", "stop[0] is a whole number; give a text"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "logit_bias must be an object of at"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "a key of logit_bias is a text; give a whole number"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias must be a number of at most 100"),
    ({"seed": 2**63}, "seed", "seed must be a whole number of at most"),
    ({"messages": []}, "messages", "messages must be a list of at least 1 entry"),
    ({"messages": HELLO * 4097}, "messages", "messages must be a list of at most 4096 entries"),
    ({"messages": "hello"}, "messages", "messages is a text; give a list"),
    ({"messages": ["hello"]}, "messages[0]", "messages[0] is a text; give an object"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role", "messages[0].role is missing"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "stream_options.include_usage is a"),
])  # fmt: skip
def test_a_field_that_is_wrong_is_named_with_its_bound(fields, param, message):
    found_param, code, found = told(**fields)
    assert (found_param, code) == (param, "missing" if "missing" in message else "invalid_value")
    assert found.startswith(message)


def test_a_missing_field_is_named():
    assert told(b"{}") == ("messages", "missing", "messages is missing")


def test_bodies_are_accepted_at_their_bounds():
    body = {
        "messages": HELLO * 4096, "n": 16, "max_tokens": 2**31, "temperature": 2, "top_p": 1, "top_k": -1, "min_p": 1,
        "stop": ["a" * 256] * 16, "logit_bias": {str(i): -100 for i in range(1024)}, "seed": -(2**63),
        "unknown": {"a": [None, {}]}, "stop_token_ids": [0] * 64,
    }  # fmt: skip
    found = parse(json.dumps(body).encode(), Body)
    assert found.temperature == 2.0 and len(found.messages) == 4096


def test_null_is_the_same_as_not_given():
    names = list(Sampling.__struct_fields__)
    found = parse(json.dumps({"messages": HELLO, **dict.fromkeys(names)}).encode(), Body)
    assert sampling_params(found, {}) == SamplingParams()
    assert sampling_params(found, {"temperature": 0.6}) == SamplingParams(temperature=0.6)


def test_random_bytes_never_do_anything_but_400():
    chance = random.Random(5)
    whole = json.dumps({"messages": HELLO, "stop": ["a"], "logit_bias": {"1": 2.5}, "n": 1}).encode()
    for _ in range(2000):
        raw = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(raw))
            raw[place : place + chance.randrange(3)] = bytes(chance.randrange(256) for _ in range(chance.randrange(3)))
        try:
            parse(bytes(raw), Body)
        except ApiError as error:
            assert error.status == 400 and error.message


# -- sampling --------------------------------------------------------------------------------------------------------
def test_the_common_fields_become_sampling_params():
    fields = {
        "n": 2, "max_tokens": 7, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1, "seed": 3,
        "logit_bias": {5: 2.0}, "stop": ("a", "b"), "stop_token_ids": (4,), "ignore_eos": True,
    }  # fmt: skip
    body = parse(json.dumps({"messages": HELLO, **fields, "stream": True, "priority": 3}).encode(), Body)
    assert sampling_params(body, {"temperature": 0.6, "top_k": 20}) == SamplingParams(**fields)
    more = {"max_tokens": 9, "logprobs": 2}
    assert sampling_params(body, {}, **more) == SamplingParams(**fields | more)


def test_vllms_word_for_no_top_k():
    assert sampling_params(Sampling(top_k=-1), {"top_k": 20}).top_k == 0


# -- messages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("message", "param", "code"), [
    (MessageIn("tool", "x"), "messages[0].tool_call_id", "missing"),
    (MessageIn("user"), "messages[0].content", "missing"),
    (MessageIn("function", "x"), "messages[0].role", "unsupported_role"),
    (MessageIn("", "x"), "messages[0].role", "invalid_value"),
    (MessageIn("User", "x"), "messages[0].role", "invalid_value"),
    (MessageIn("r" * 10_000, "x"), "messages[0].role", "invalid_value"),
    (MessageIn("user", [ContentPart("text", "a"), ContentPart("image_url")]), "messages[0].content[1]", None),
    (MessageIn("user", [ContentPart("text")]), "messages[0].content[0].text", "missing"),
])  # fmt: skip
def test_messages_that_are_not_supported(message, param, code):
    with pytest.raises(ApiError) as caught:
        messages_of([message])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == (code or "unsupported_content")
    assert len(caught.value.message) < 200


def test_an_empty_list_of_parts_is_an_empty_text():
    assert messages_of([MessageIn("user", [])]) == [{"role": "user", "content": ""}]
