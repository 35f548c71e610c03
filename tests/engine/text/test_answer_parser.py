"""Answers of every family, however their text is cut: reasoning, content, calls; and what only looks like these."""

import json
import random
import tracemalloc
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.outputs import TextDelta, ToolCallEvent
from kvstore.engine.text.answer_parser import MAX_PARSED, AnswerParser
from kvstore.engine.text.response_template import ResponseTemplate
from tests.engine.text.test_response_template import FAMILIES, family, written

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("time", {"zone": {"type": ["string", "null"]}}),
    )
]
CALLS = [("weather", {"city": 'Köln "x"', "days": 3}), ("time", {"zone": "a</b>\n  c"})]
OPENING = "<|im_start|>assistant\n"
HERMES = family("hermes")
HOSTILE = [*"<>/{}[]()\"'=:, \n\\", "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>",
           "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]",
           "[THINK]", '{"name": "f"', '"arguments": {}}', "<|channel|>", "analysis", "final", "<|message|>", "<|end|>",
           "<|call|>", "<|tool_call>", "call:f", "<tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
           "<｜tool▁sep｜>", "```json\n", "<|tool_call|>", "<|python_tag|>", "[f(a=1)]", "word"]  # fmt: skip


def parsed(template, text, cuts=(), prefix="", tools=TOOLS, reason="stop"):
    """The events of a text cut at these places, with deltas of a kind that follow one another as one."""
    parser = AnswerParser(template, prefix, tools)
    events = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.feed(text[start:end])
    return joined(events + parser.finish(reason))


def joined(events):
    result = []
    for event in events:
        if isinstance(event, TextDelta) and result and getattr(result[-1], "kind", None) == event.kind:
            result[-1] = TextDelta(event.kind, result[-1].text + event.text)
        else:
            result.append(event)
    return result


def everywhere(template, text, **given):
    """The events of a text in one piece, which are the same in single characters and however it is cut in two."""
    whole = parsed(template, text, **given)
    assert parsed(template, text, range(1, len(text)), **given) == whole
    for cut in range(1, len(text)):
        assert parsed(template, text, [cut], **given) == whole, text[:cut]
    return whole


def done(events):
    """Without what only announces a call."""
    return joined(event for event in events if getattr(event, "state", "") != "begun")


def whole_calls(calls=CALLS):
    return [
        ToolCallEvent("whole", index, name, json.dumps(arguments, ensure_ascii=False))
        for index, (name, arguments) in enumerate(calls)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_and_two_calls_of_every_family_are_told_apart(name):
    template = family(name)
    calls = CALLS if template.calls.separator is not None else CALLS[:1]
    reasoning = "{}\nHm: {{}}\n{}".format(*template.reasoning) if template.reasoning else ""
    events = everywhere(template, reasoning + written(template.calls, calls))
    assert done(events) == [TextDelta("reasoning", "Hm: {}")] * bool(reasoning) + whole_calls(calls)
    begun = [event for event in events if event not in done(events)]
    assert [event.index for event in begun] == list(range(len(begun)))
    assert {event.name for event in begun} in ({""}, {name for name, _ in calls})


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).calls.trigger])
def test_content_before_calls_ends_where_they_begin(name):
    template = family(name)
    content = template.content + "Let me look: 1 < 2.\n" + ("<|end|>" if template.content else "")
    events = everywhere(template, content + written(template.calls, CALLS))
    assert done(events) == [TextDelta("content", "Let me look: 1 < 2."), *whole_calls()]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_off_is_never_handed_out_as_whole(name):
    template = family(name)
    text = written(template.calls, CALLS[:1])
    begin = template.calls.opener + template.calls.begin.replace("{name}", "weather")
    for end in range(len(begin) + 1, len(text) - len(template.calls.end + template.calls.closer)):
        *_, last = parsed(template, text[:end], reason="length")
        assert (last.state, last.index) == ("cut", 0), text[:end]
    if template.calls.separator is not None:
        text = written(template.calls, CALLS).removesuffix(template.calls.end + template.calls.closer)
        states = [event.state for event in done(parsed(template, text, reason="length"))]
        assert states in (["whole", "cut"], ["cut"])  # some write all calls in one region


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_model_leaves_unfinished_of_its_own_is_content(name):
    template = family(name)
    text = written(template.calls, CALLS[:1])
    text = text[: len(template.calls.opener + template.calls.begin) + 10]
    assert done(everywhere(template, text)) == [TextDelta("content", text)]


def test_a_closer_that_is_the_end_token_is_not_missed():
    text = written(HERMES.calls, CALLS[:1]).removesuffix("</tool_call>")
    assert done(everywhere(HERMES, text)) == whole_calls(CALLS[:1])


@pytest.mark.parametrize("bad", [
    "{not json}", '{"name": "weather"',
    '{"name": 3, "arguments": {}}', '{"arguments": {}}', '{"name": "f", "arguments": 3}',
    "[" * 5000, '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}",
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
])  # fmt: skip
def test_what_is_no_call_is_content_as_the_model_wrote_it_and_later_calls_are_calls(bad):
    text = f"So:\n<tool_call>{bad}</tool_call>\n" + written(HERMES.calls, CALLS)
    whole = parsed(HERMES, text)
    assert done(whole) == [TextDelta("content", f"So:\n<tool_call>{bad}</tool_call>"), *whole_calls()]
    assert parsed(HERMES, text, range(1, len(text))) == whole


@pytest.mark.parametrize("bad", ["[f(1)]", "[f(a=g())]", "[f(a=b)]", "[f(]", "[f(a=1), 3]", "[f(a={1})]", "[f(" * 300])
def test_python_that_is_no_call_with_literals_is_content(bad):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Python's own, for `[f(a=1) 3]` and the like
        assert done(everywhere(family("pythonic"), bad)) == [TextDelta("content", bad)]


@pytest.mark.parametrize(
    "text", ["Hello", " Hello\n", "\n", "a\n\nb  ", "<tool", "<tool_call", "1 < 2", "{", "</think>"]
)
def test_a_plain_answer_keeps_every_character(text):
    for name in FAMILIES:
        if not family(name).content:
            assert everywhere(family(name), text) == [TextDelta("content", text)]


def test_white_space_around_reasoning_and_calls_is_left_out():
    call = written(HERMES.calls, CALLS[:1])
    text = f"\n<think>\nHm.\n\n</think>\n\nText.\n\n{call}\n\nMore.  "
    events = done(everywhere(HERMES, text))
    assert events == [
        TextDelta("reasoning", "Hm."), TextDelta("content", "Text."), *whole_calls(CALLS[:1]),
        TextDelta("content", "\nMore.  "),
    ]  # fmt: skip
    assert done(everywhere(HERMES, f"Text.\n{call}\n")) == [TextDelta("content", "Text."), *whole_calls(CALLS[:1])]


@pytest.mark.parametrize(("prefix", "kind"), [
    (OPENING, "content"), (OPENING + "<think>\n", "reasoning"), (OPENING + "<think>\n\n</think>\n\n", "content"),
    ("", "content"), ("<|other|>assistant", "content"), ("<|other|>assistant<think>\n", "reasoning"),
])  # fmt: skip
def test_a_prefix_that_opens_reasoning_is_seen(prefix, kind):
    assert everywhere(HERMES, "So it is.", prefix=prefix) == [TextDelta(kind, "So it is.")]


def test_users_words_before_the_answer_open_nothing():
    prompt = f"<|im_start|>user\nWhat is <think> or <tool_call>?<|im_end|>\n{OPENING}"
    assert parsed(HERMES, "Tags.", prefix=prompt) == [TextDelta("content", "Tags.")]


def test_reasoning_that_never_closes_is_reasoning_to_the_end():
    text = "Hm. <tool_call> or </tool_call>? <think>"
    assert everywhere(HERMES, text, prefix=OPENING + "<think>\n", reason="length") == [TextDelta("reasoning", text)]


def test_without_tools_a_call_is_content():
    text = "<think>Hm.</think>" + written(HERMES.calls, CALLS[:1])
    assert everywhere(HERMES, text, tools=[]) == [
        TextDelta("reasoning", "Hm."), TextDelta("content", written(HERMES.calls, CALLS[:1])),
    ]  # fmt: skip


PLACES = {
    "type": "object", "$defs": {"Place": {"type": "object"}, "Many": {"anyOf": [{"$ref": "#/$defs/Many"}] * 9}},
    "properties": {
        "place": {"$ref": "#/$defs/Place"}, "or": {"oneOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "code": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "many": {"$ref": "#/$defs/Many"},
        "odd": {"anyOf": 7, "$ref": 7}, "nowhere": {"$ref": "#/$defs/none"},
    },
}  # fmt: skip
GO = [{"type": "function", "function": {"name": "go", "parameters": PLACES}}]


def test_arguments_in_xml_are_cast_by_what_their_schema_refers_to():
    given = {"place": '{"a": 1}', "or": "null", "many": "x", "odd": "1", "nowhere": "2"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    text = f"<tool_call>\n<function=go>\n{text}</function>\n</tool_call>"
    (_, call) = parsed(family("qwen3_coder"), text, tools=GO)
    assert json.loads(call.arguments) == given | {"place": {"a": 1}, "or": None}


def test_a_text_in_json_stays_one_where_the_schema_allows_it():
    text = '<tool_call>{"name": "go", "arguments": {"code": "007", "place": "{}"}}</tool_call>'
    (_, call) = parsed(HERMES, text, tools=GO)
    assert json.loads(call.arguments) == {"code": "007", "place": {}}


def test_arguments_in_xml_are_cast_by_the_schema_and_keep_their_indentation():
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n  a\n  <b>\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=other>\n4\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = done(everywhere(family("qwen3_coder"), text))
    assert json.loads(call.arguments) == {"city": "  a\n  <b>", "days": 3, "other": "4"}


def test_inside_call_tells_where_stop_strings_do_not_count():
    parser = AnswerParser(HERMES, "", TOOLS)
    states = []
    for piece in ("Text", "<tool_", "call>", "{", "</tool_call", ">", "Text"):
        parser.feed(piece)
        states.append(parser.inside_call)
    assert states == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_long_answers_are_the_same_in_pieces(name):
    """Beyond the length at which the parser is renewed, in every region."""
    template, long = family(name), "wörd " * (MAX_PARSED // 4)
    calls = [("weather", {"city": long.strip(), "days": 3}), CALLS[1]][: 1 if template.calls.separator is None else 2]
    reasoning = f"{template.reasoning[0]}{long}{template.reasoning[1]}" if template.reasoning else ""
    content = f"{template.content}{long}{'<|end|>' if template.content else ''}" if template.calls.trigger else ""
    text = reasoning + content + written(template.calls, calls)
    whole = parsed(template, text)
    assert done(whole)[-len(calls) :] == whole_calls(calls)
    assert parsed(template, text, range(1000, len(text), 1000)) == whole


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(HOSTILE), max_size=40),
    st.randoms(),
    st.sampled_from(["stop", "length"]),
)
def test_hostile_tags_give_the_same_events_however_they_are_cut(name, words, chance, reason):
    text = "".join(words)
    whole = parsed(family(name), text, reason=reason)
    cuts = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, 9))) if len(text) > 1 else []
    assert parsed(family(name), text, cuts, reason=reason) == whole
    assert parsed(family(name), text, range(1, len(text)), reason=reason) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_10_000_hostile_characters_are_parsed_to_the_end(name):
    """That they end within a moment is measured by hand; here they end at all, and no text is lost."""
    template = family(name)
    syntax = template.calls
    begin = (syntax.opener + syntax.begin).replace("{name}", "f")
    chance = random.Random(0)
    for text in (
        (begin * 10000)[:10000],
        begin + " " * 10000,
        (syntax.opener + syntax.begin).partition("{name}")[0] + "x" * 10000,
        begin + (syntax.parameter.partition("{value}")[0] or "[") * 1000 + syntax.end,
        "".join(chance.choices(HOSTILE, k=2000)),
    ):
        assert parsed(template, text, range(1, len(text))) == parsed(template, text)


OWN = ResponseTemplate(
    {  # as models have it in tokenizer_config.json: white space in the opener, an end of content, a required region
        "defaults": {"role": "assistant"},
        "start_anchor": OPENING,
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
            },
            "content": {"close_pattern": r"\s*<\|im_end\|>", "optional": False},
        },
    },
    reasoning=("<think>", "</think>"),
)
CHANNELS = ResponseTemplate(
    {  # text outside its regions belongs to none
        "start_anchor": "<start>",
        "fields": {"reasoning": {"open": "<a>", "close": "<end>"}, "content": {"open": "<f>", "close": "<end>"}},
    },
    reasoning=("<a>", "<end>"),
)


def test_a_models_own_template_is_followed():
    text = "<think>Hm.</think>\n\nSo:\n\n<tool_call>{}</tool_call>\n" + written(HERMES.calls, CALLS)
    events = done(everywhere(OWN, text, prefix=OPENING))
    content = TextDelta("content", "So:\n\n<tool_call>{}</tool_call>")
    assert events == [TextDelta("reasoning", "Hm."), content, *whole_calls()]
    assert everywhere(CHANNELS, "<a>Hm.<end>lost<f>So<end>lost<f>it is. <end>") == [
        TextDelta("reasoning", "Hm."), TextDelta("content", "So\nit is."),
    ]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_was_parsed_is_not_held_in_any_region(name):
    """Else each piece would cost as much as all the text before it. A call's text is held once."""
    template, num_chars = family(name), 16 * MAX_PARSED
    begin = written(template.calls, CALLS[:1]).partition("Köln")[0].partition("K\\u00f6ln")[0]
    for opener in [begin, template.content, *(template.reasoning or ())[:1]]:
        parser = AnswerParser(template, "", TOOLS)
        parser.feed(opener)
        tracemalloc.start()
        for start in range(0, num_chars, 1024):
            parser.feed(f"{start:1024}")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert parser.inside_call == (opener == begin)
        assert held < num_chars * (1.5 if opener == begin else 0.5), opener
