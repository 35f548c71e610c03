"""Reasoning on all routes that talk: how much of it, where an answer has it, what becomes of it in later turns."""

import re

import pytest

from kvstore.engine.text.prompts import EFFORTS
from tests.support.service.serving import serving
from tests.support.service.talking import SHORT, talking_body
from tests.support.thinking import THINKING, THOUGHT, as_asked
from tests.support.tools import TOOLS

COMPLETIONS, RESPONSES, CHAT = ROUTES = ("/v1/chat/completions", "/v1/responses", "/chat")


@pytest.fixture(scope="module")
def server():
    with serving(engine={"chat_template": THINKING}) as found:
        yield found


def asked(path, text="Hello", effort=None, **more):
    told = {"reasoning": {"effort": effort}} if path == RESPONSES else {"reasoning_effort": effort}
    return {**talking_body(path, text), **SHORT, **({} if effort is None else told), **more}


def parts_of(path, answer):
    """Reasoning and content."""
    if path == RESPONSES:
        parts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
        return parts.get("reasoning"), parts.get("message")
    message = answer["choices"][0]["message"] if path == COMPLETIONS else answer["message"]
    return message.get("reasoning_content"), message["content"]


def said(content, role="user", **more):
    return {"role": role, "content": content, **more}


def num_prompt(path, answer) -> int:
    return answer["usage"]["input_tokens" if path == RESPONSES else "prompt_tokens"]


def token_counts(path, answer):
    """Of the reasoning and of the whole answer."""
    usage, name = answer["usage"], "output" if path == RESPONSES else "completion"
    return usage[f"{name}_tokens_details"]["reasoning_tokens"], usage[f"{name}_tokens"]


# -- where it is -------------------------------------------------------------------------------------------------------
def thought(path, **more):
    return asked(path, **{**THOUGHT, "max_output_tokens": THOUGHT["max_tokens"], "ignore_eos": False, **more})


def streamed_parts(path, events):
    """Reasoning and content, in the order of their kinds, and the last event that has the whole answer."""
    said, order = {"reasoning": "", "content": ""}, []

    def add(kind, text):
        said[kind] += text
        order.extend([kind] if text and kind not in order else [])

    for event in events:
        if path == RESPONSES:
            kind = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "content"}
            if event["type"] in kind:
                add(kind[event["type"]], event["delta"])
        else:
            delta = event["choices"][0]["delta"] if path == COMPLETIONS else event["delta"]
            add("reasoning", delta.get("reasoning_content") or "")
            add("content", delta.get("content") or "")
    return said["reasoning"], said["content"], order


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_has_its_reasoning_apart(server, path):
    with as_asked():
        whole = server.post(path, thought(path)).json()
        events = server.post(path, thought(path, stream=True)).events()
    reasoning, content = parts_of(path, whole)
    assert re.fullmatch("[a-d]{40}", reasoning) and content in ("yes", "no")
    said = [event for event in events if event != "[DONE]"]
    assert streamed_parts(path, said) == (reasoning, content, ["reasoning", "content"])
    num_reasoned, num_said = token_counts(path, whole)
    assert 10 <= num_reasoned < num_said
    if path == RESPONSES:
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        assert parts_of(path, said[-1]["response"]) == (reasoning, content)
        shown = server.get(f"{RESPONSES}/{whole['id']}").json()
        assert parts_of(path, shown) == (reasoning, content) and token_counts(path, shown) == (num_reasoned, num_said)
        items = [event for event in said if event["type"].startswith("response.output_item")]
        assert [event["output_index"] for event in items] == [0, 0, 1, 1]


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_that_is_cut_off_while_it_thinks_has_no_content(server, path):
    with as_asked():
        whole = server.post(path, thought(path, max_tokens=9, max_output_tokens=9)).json()
        events = server.post(path, thought(path, max_tokens=9, max_output_tokens=9, stream=True)).events()
    reasoning, content = parts_of(path, whole)
    assert re.fullmatch("[a-d]+", reasoning) and not content and token_counts(path, whole) == (9, 9)
    assert streamed_parts(path, [event for event in events if event != "[DONE]"]) == (reasoning, "", ["reasoning"])
    if path == RESPONSES:
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["status"]) for item in whole["output"]] == [("reasoning", "incomplete")]
    else:
        assert (whole["choices"][0] if path == COMPLETIONS else whole)["finish_reason"] == "length"


# -- in later turns ----------------------------------------------------------------------------------------------------
def of_prompt(path, reply):
    assert reply.status == 200, reply.body
    usage = reply.json()["usage"]
    return usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]


def test_a_session_keeps_or_drops_it(server):
    with as_asked():
        first = server.post(CHAT, thought(CHAT))
        named = {"session_id": first.json()["session_id"]}
        assert "thinking" not in of_prompt(CHAT, first)
        kept = of_prompt(CHAT, server.post(CHAT, thought(CHAT, **named)))
        assert (
            kept["thinking"] == "kept"
            and kept["cached_tokens"] >= (first.json()["usage"]["total_tokens"] - 1) // 16 * 16
        )
        body = thought(CHAT, thinking="drop", **named)
        dropped = server.post(CHAT, body, **{"Idempotency-Key": "drops"})
        assert of_prompt(CHAT, dropped)["thinking"] == "dropped"
        assert server.post(CHAT, body, **{"Idempotency-Key": "drops"}).json() == dropped.json()
        events = server.post(CHAT, {**body, "stream": True}).events()
    assert events[-2]["usage"]["prompt_tokens_details"]["thinking"] == "dropped"
    shown = server.get(f"/sessions/{named['session_id']}").json()["messages"]
    assert all(message["reasoning_content"] for message in shown if message["role"] == "assistant")
    reply = server.post(CHAT, thought(CHAT, thinking="forget", **named))
    assert (reply.status, reply.error["param"]) == (400, "thinking")


def test_responses_go_on_with_it_and_histories_follow_the_template(server):
    with as_asked():
        first = server.post(RESPONSES, thought(RESPONSES)).json()
        second = server.post(RESPONSES, thought(RESPONSES, previous_response_id=first["id"]))
        assert of_prompt(RESPONSES, second)["thinking"] == "kept"
        items = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "Hello"}]
        again = server.post(RESPONSES, thought(RESPONSES, input=items, store=False))
        assert again.status == 200 and "thinking" not in of_prompt(RESPONSES, again), "reasoning items are passed over"
        asked_first = server.post(COMPLETIONS, thought(COMPLETIONS)).json()["choices"][0]["message"]
        history = [said("Hello"), asked_first, said("Hello")]
        reply = server.post(COMPLETIONS, thought(COMPLETIONS, messages=history))
    assert of_prompt(COMPLETIONS, reply)["thinking"] == "dropped"


# -- how much ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ROUTES)
def test_the_effort_is_a_variable_of_the_template_and_none_turns_thinking_off(server, path):
    free, *others = [server.post(path, asked(path, effort=effort)) for effort in (None, *EFFORTS)]
    assert {reply.status for reply in (free, *others)} == {200}
    for effort, reply in zip(EFFORTS, others, strict=True):
        reasoning, content = parts_of(path, reply.json())
        assert bool(reasoning) is (effort != "none") and bool(content) is (effort == "none")
        assert num_prompt(path, reply.json()) > num_prompt(path, free.json()), "the template shows it"


@pytest.mark.parametrize("path", ROUTES)
def test_what_the_request_says_of_the_template_itself_comes_first(server, path):
    reply = server.post(path, asked(path, effort="none", chat_template_kwargs={"enable_thinking": True}))
    assert parts_of(path, reply.json())[0]


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_effort_is_named_with_those_there_are(server, path):
    reply = server.post(path, asked(path, effort="huge"))
    param = "reasoning.effort" if path == RESPONSES else "reasoning_effort"
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["message"] == f"{param} is 'huge'; give one of {', '.join(EFFORTS)}"


# -- going on with an answer -------------------------------------------------------------------------------------------
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


def ask(server, messages, **more):
    reply = server.post(COMPLETIONS, {"messages": messages, "temperature": 0, "ignore_eos": True, **more})
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.fixture(scope="module")
def builtin():
    with serving() as found:
        yield found


@pytest.mark.parametrize("cut", [3, 17])
def test_an_answer_that_was_cut_off_goes_on_from_its_ids(builtin, cut):
    """As if it had not been cut off; also once both parts have come back as one answer."""
    history = [said(f"Tell me about the sea, in {cut} words."), said("Blue.", "assistant"), said("And the sky?")]
    whole = ask(builtin, history, max_tokens=40)["choices"][0]["message"]["content"]
    first = ask(builtin, history, max_tokens=cut)
    part = first["choices"][0]["message"]["content"]
    rest = ask(builtin, [*history, said(part, "assistant")], max_tokens=40 - cut, **GOES_ON)
    assert rest["usage"]["prompt_tokens"] == first["usage"]["total_tokens"]
    assert part + rest["choices"][0]["message"]["content"] == whole
    after = ask(builtin, [*history, said(whole, "assistant"), said("Thanks")], max_tokens=2)
    known = rest["usage"]["total_tokens"] - 1
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= known // 16 * 16
    assert "miss" not in after["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("text", ["Sure, here", " two  spaces  ", "", "A control: <|end|>, as text"])
def test_any_beginning_goes_on_without_an_end_or_a_new_answer(builtin, text):
    tokenizer, ids = builtin.engine.tokenizer, []
    submit = builtin.engine.client.submit
    with_ids = lambda prompt, *rest, **more: (ids.append(prompt), submit(prompt, *rest, **more))[1]  # noqa: E731
    builtin.engine.submit = with_ids
    try:
        ask(builtin, [said("Hello"), said(text, "assistant")], max_tokens=2, **GOES_ON)
    finally:
        builtin.engine.submit = submit
    assert tokenizer.decode(ids[0]) == f"<|bos|><|user|> Hello<|end|><|assistant|>{text}"
    controls = [i for i in ids[0] if i in tokenizer.added_tokens_decoder]
    assert controls == tokenizer.convert_tokens_to_ids(["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>"])


def test_a_beginning_within_the_reasoning_goes_on_with_reasoning(server):
    begun = [said("Hello"), said("<think>Hm, a", "assistant")]
    message = ask(server, begun, max_tokens=6, **GOES_ON)["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"]
    done = [said("Hello"), said("Sure, a", "assistant")]
    message = ask(server, done, max_tokens=6, **GOES_ON)["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message
    events = server.post(COMPLETIONS, {"messages": done, "max_tokens": 6, "stream": True, "temperature": 0, **GOES_ON})
    deltas = [event["choices"][0]["delta"] for event in events.events()[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas).startswith(message["content"][:2])


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "more", "param", "message"),
    [
        (said("a", "assistant"), {"add_generation_prompt": True}, "add_generation_prompt", "make one of them false"),
        (said("a"), {}, "messages[1].role", "is 'user'"),
        (said("a", "assistant", tool_calls=[CALL]), {}, "messages[1].tool_calls", "has calls"),
        (said("a", "assistant"), {"response_format": {"type": "json_object"}}, "response_format", "a whole answer"),
        (said("a", "assistant"), {"guided_regex": "a+"}, "guided_regex", "leave one of them out"),
        (said("a", "assistant"), {"tools": TOOLS, "tool_choice": "required"}, "tools", "a whole answer"),
        (said("a"), {"continue_final_message": False}, "add_generation_prompt", "give both or neither"),
    ],
)
def test_what_cannot_go_on_is_a_400_that_names_it(builtin, last, more, param, message):
    reply = builtin.post(COMPLETIONS, {"messages": [said("Hello"), last], **GOES_ON, **more})
    assert (reply.status, reply.error["param"]) == (400, param) and message in reply.error["message"]


def test_tools_may_stay_in_the_prompt(builtin):
    begun = [said("Hello"), said("Sure, a", "assistant")]
    assert ask(builtin, begun, max_tokens=4, tools=TOOLS, **GOES_ON)["choices"][0]["message"]["content"]


def test_sessions_have_whole_turns(builtin):
    reply = builtin.post(CHAT, {"message": "Hello", "continue_final_message": True})
    assert (reply.status, reply.error["param"]) == (400, "continue_final_message")
    assert COMPLETIONS in reply.error["message"]
