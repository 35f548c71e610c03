"""Tools in the library: calls that a grammar forces, their results, sessions that go on after them, and refusals."""

import json

import pytest

from kvstore import AnswerOptions, Engine, RequestError, SamplingParams, StructuredOutputsParams
from kvstore.engine.builtin import MODEL_DIR
from tests.support.engines import bare_copy
from tests.support.thinking import as_asked
from tests.support.tools import CLOCK, TOOLS, WEATHER, is_weather

PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=80)
MUST = AnswerOptions(TOOLS, "required", parallel_tool_calls=False)
FREE = AnswerOptions(TOOLS)


def result(call, content="It is sunny."):
    return {"role": "tool", "tool_call_id": call.id, "content": content}


@pytest.fixture(scope="module")
def engine():
    with Engine(device="cpu") as engine:
        yield engine
        engine.check_integrity()


def test_a_session_goes_on_after_calls_with_the_ids_that_were_sampled(tmp_path):
    tiers = {"cpu": "64MiB", "disk": "64MiB", "path": tmp_path}
    with Engine(cache_tiers=tiers, device="cpu", load="always") as engine:
        chat = engine.chat("ada")
        first = chat.send("What is the weather in Rome?", PARAMS, MUST)
        (call,) = first.tool_calls
        assert call.name in ("weather", "clock") and call.id.startswith("call_")
        assert (first.finish_reason, first.content, first.reasoning) == ("tool_calls", "", "")
        second = chat.send([result(call)], PARAMS, FREE)
        known = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(known)] == known
        assert second.usage.cached_tokens == (len(known) - 1) // 16 * 16
        assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
        assert chat.messages[1]["tool_calls"][0]["function"] == {"name": call.name, "arguments": call.arguments}
    with Engine(cache_tiers=tiers, device="cpu", load="always") as engine:
        again = engine.chat("ada")
        assert again.messages == chat.messages
        third = again.send("Thanks", PARAMS, FREE)
        known = second.prompt_token_ids + second.token_ids[: None if second.finish_reason == "length" else -1]
        assert third.prompt_token_ids[: len(known)] == known
        assert third.usage.cached_tokens >= (len(known) - 1) // 16 * 16


def test_a_named_function_is_called_and_its_arguments_match(engine):
    wanted = AnswerOptions(TOOLS, {"type": "function", "function": {"name": "weather"}})
    for seed in range(4):
        output = engine.chat(f"named-{seed}").send("Hello", SamplingParams(seed=seed, max_tokens=80), wanted)
        (call,) = output.tool_calls
        assert call.name == "weather" and is_weather(call.arguments)
        assert output.text.startswith('<tool_call>\n{"name": "weather", "arguments": {')


def test_conversations_as_lists_of_messages(engine):
    asked = [{"role": "user", "content": "Hello"}]
    outputs = engine.generate([asked, asked], [PARAMS, SamplingParams(seed=9, max_tokens=80)], tools=MUST)
    ids = [call.id for output in outputs for call in output.tool_calls]
    assert len(set(ids)) == 2 and all(output.finish_reason == "tool_calls" for output in outputs)
    plain = engine.generate([asked], SamplingParams(temperature=0, max_tokens=8))[0]
    assert plain.content == plain.text == engine.chat("plain").send("Hello", plain_params()).text
    history = [*asked, outputs[0].choices[0].message, result(outputs[0].tool_calls[0]), asked[0]]
    (after,) = engine.generate([history], PARAMS, tools=FREE)
    shown = engine.tokenizer.decode(after.prompt_token_ids)
    assert "<tool_response>It is sunny.</tool_response>" in shown and '"arguments": {"' in shown


def plain_params():
    return SamplingParams(temperature=0, max_tokens=8)


def test_a_call_that_is_cut_off_is_not_handed_out_whole(engine):
    output = engine.chat("cut").send("Hello", SamplingParams(seed=1, max_tokens=12), MUST)
    choice = output.choices[0]
    assert output.finish_reason == "length" and output.tool_calls == [] and choice.cut_call is not None
    assert "tool_calls" not in engine.chat("cut").messages[-1]


def test_stop_strings_do_not_cut_inside_arguments(engine):
    params = SamplingParams(seed=2, max_tokens=80, stop=['"city"', "zone", "days"])
    output = engine.chat("stop").send("Hello", params, MUST)
    assert output.finish_reason == "tool_calls" and json.loads(output.tool_calls[0].arguments)


def test_other_tools_in_a_session_render_it_anew(engine):
    chat = engine.chat("other")
    first = chat.send("Hello", plain_params(), [WEATHER])
    second = chat.send("And now?", plain_params(), [CLOCK])
    shown = engine.tokenizer.decode(second.prompt_token_ids)
    assert '"clock"' in shown and '"weather"' not in shown
    third = chat.send("And now?", plain_params(), [CLOCK])
    known = second.prompt_token_ids + second.token_ids[:-1]
    assert third.prompt_token_ids[: len(known)] == known
    assert first.prompt_token_ids != second.prompt_token_ids[: len(first.prompt_token_ids)]


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]", "is no function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "has weather twice"),
        ({"tools": [WEATHER] * 257}, "tools", "at most 256"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "give auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "is none of tools"),
    ],
)
def test_what_options_refuse(given, param, message):
    with pytest.raises(RequestError, match=message) as raised:
        AnswerOptions(**given)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, r"role - at \[1\]"),
        ({"role": "user", "content": 5}, r"int - at \[1\].content"),
        ({"role": "user", "content": "Hi", "name": 5}, r"\[1\].name is '5'; give a text or a list"),
        ({"role": "assistant", "tool_calls": 5}, r"\[1\].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"function - at \[1\].tool_calls\[0\]"),
    ],
)
def test_messages_that_are_none_say_where(engine, message, reason):
    messages = [{"role": "user", "content": "Hello"}, message]
    for ask in (engine.chat("odd").send, lambda given: engine.generate([given], plain_params())):
        with pytest.raises(RequestError, match=reason) as raised:
            ask(messages)
        assert raised.value.param == "messages"


@pytest.mark.parametrize("function", [{"name": "clock", "arguments": "{}"}, {"name": "clock"}])
def test_a_history_may_have_nulls_and_calls_without_arguments(engine, function):
    history = [
        {"role": "user", "content": "Hello", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    chat = engine.chat(f"nulls-{len(function)}")
    answer = chat.send(history, plain_params(), FREE)
    assert engine.generate([history], plain_params(), tools=FREE)[0].prompt_token_ids == answer.prompt_token_ids
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    assert chat.messages[:2] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    chat.send("Go on", plain_params(), FREE)
    assert engine.sessions.load(chat.key).turn == 2


def test_results_of_calls_that_nobody_made(engine):
    chat = engine.chat("nobody")
    chat.send("Hello", plain_params())
    with pytest.raises(RequestError, match="no call of the last answer"):
        chat.send([{"role": "tool", "tool_call_id": "call_x", "content": "4"}], plain_params(), FREE)


def test_a_model_whose_template_knows_no_tools_says_so(tmp_path):
    path = bare_copy(tmp_path / "bare", "chat_template.jinja")
    text = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    with Engine(path, device="cpu", chat_template=text) as engine, pytest.raises(RequestError) as raised:
        engine.chat("x").send("Hello", plain_params(), TOOLS)
    assert raised.value.param == "tools" and "--chat-template" in str(raised.value)


def test_a_parser_can_be_named(tmp_path):
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    with Engine(device="cpu", tool_call_parser="qwen3_coder") as engine:
        wanted = AnswerOptions([WEATHER], "required", parallel_tool_calls=False)
        output = engine.chat("x").send("Hello", PARAMS, wanted)
        assert output.text.startswith("<tool_call>\n<function=weather>\n<parameter=city>\n")
        assert is_weather(output.tool_calls[0].arguments)
    with pytest.raises(Exception, match="tool_call_parser"):
        Engine(device="cpu", chat_template=template, tool_call_parser="no-such")


# -- reasoning ---------------------------------------------------------------------------------------------------------
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if open is defined %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker():
    with Engine(device="cpu", chat_template=THINKING) as engine:
        yield engine


def forced(regex: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=regex))


def test_a_session_keeps_the_reasoning_that_its_template_drops(thinker):
    chat = thinker.chat("ada")
    with as_asked():
        first = chat.send("Hello", forced("<think>[a-d]{3}</think>yes"))
    assert (len(first.reasoning), first.content) == (3, "yes") and "<think>" in first.text
    assert chat.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": first.reasoning}
    second = chat.send("And now?", SamplingParams(temperature=0, max_tokens=4))
    known = first.prompt_token_ids + first.token_ids[:-1]
    assert second.prompt_token_ids[: len(known)] == known
