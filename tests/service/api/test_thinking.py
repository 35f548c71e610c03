"""Reasoning on all routes that talk: how much of it, where an answer has it, what becomes of it in later turns."""

import pytest

from kvstore.engine.text.language import EFFORTS
from tests.support.service.serving import serving
from tests.support.service.talking import SHORT, talking_body
from tests.support.thinking import THINKING

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


def num_prompt(path, answer) -> int:
    return answer["usage"]["input_tokens" if path == RESPONSES else "prompt_tokens"]


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
