"""What all routes that generate have in common: clients that leave, lengths, steps that fail, what is refused."""

import itertools
import json
import socket

import pytest
from openai.types.responses import ResponseErrorEvent

from tests.support.by_hand import crawling
from tests.support.faults import before_each_step
from tests.support.service.serving import raw_request, server_fixture, serving
from tests.support.service.talking import TALKING_ROUTES as ROUTES
from tests.support.service.talking import Stream, talking_body

CHAT, COMPLETIONS, RESPONSES = ROUTES[1:]
MESSAGES = "/v1/messages"
LONG = {"max_tokens": 900, "max_output_tokens": 900, "ignore_eos": True, "temperature": 0}


server = server_fixture()


# -- clients that go away --------------------------------------------------------------------------------------------
def leave_after(server, path, sent, num_bytes):
    """Send a request and close the connection once so much of the answer has come."""
    with server.connect() as raw:
        raw.sendall(raw_request("POST", path, json.dumps(sent).encode(), Content_Type="application/json"))
        if num_bytes:
            assert raw.recv(num_bytes)
        else:
            server.wait_until(lambda: server.context.limits.num_admitted > 0, "the request has come")
        raw.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("path", [*ROUTES, MESSAGES, "/v1/responses, not stored", "/chat, a later turn"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_every_phase(server, path, stream):
    """Queued or in prefill (nothing of the answer has come), and in decode (its first bytes have)."""
    path, _, kind = path.partition(", ")
    body = {**talking_body(path, "Hello"), **LONG, "stream": stream}
    if kind == "a later turn":
        body["session_id"] = server.post("/chat", {"message": "Hello", "max_tokens": 2}).json()["session_id"]
    if kind == "not stored":
        body["store"] = False
    server.wait_until_idle()  # an answer has come before its blocks are given back
    sessions, free = server.get("/sessions?limit=1000").json(), server.engine.loop.pool.num_free
    with crawling(server.engine):
        for num_bytes in (0, 64) if stream else (0, 0):
            leave_after(server, path, body, num_bytes)
            server.wait_until_idle()
            assert server.engine.loop.pool.num_free == free
    assert server.get("/sessions?limit=1000").json() == sessions
    if kind == "a later turn":
        assert server.post(path, {**body, "max_tokens": 2, "max_output_tokens": 2, "stream": False}).json()["turn"] == 2


def text_of(event) -> str:
    """What this event of any route says."""
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    if event.get("type") == "content_block_delta":
        return event["delta"]["text"]
    [choice] = event.get("choices", [event])
    return choice.get("text") or choice.get("delta", {}).get("content", "")


@pytest.mark.parametrize("path", [*ROUTES, MESSAGES, "/v1/completions, of two prompts", "/v1/responses, not stored"])
def test_the_log_says_how_many_tokens_were_made_for_a_client_that_left(server, lines, path):
    path, _, kind = path.partition(", ")
    more = {"of two prompts": {"prompt": ["Hello", "Goodbye"]}, "not stored": {"store": False}}.get(kind, {})
    with crawling(server.engine):
        stream = Stream(server, path, {**talking_body(path, "Hello"), **LONG, **more})
        num_said = 0
        while num_said < 6:
            num_said += bool(text_of(stream.next()))
        stream.leave()
        server.wait_until(lambda: lines["json"], "the request has ended")
    line = json.loads(lines["json"][0])
    assert line["status"] == 499 and line["completion_tokens"] >= num_said and line["prompt_tokens"] > 0


def test_what_was_computed_for_a_client_that_left_stays(server):
    text = "A sentence that nobody has said so far, and that is long enough to fill several blocks of tokens. " * 3
    sent = {"messages": [{"role": "user", "content": text}], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with crawling(server.engine):
        leave_after(server, CHAT, sent, 64)
    server.wait_until_idle()
    again = server.post(CHAT, sent | {"max_tokens": 1, "stream": False}).json()["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == (again["prompt_tokens"] - 1) // 16 * 16


# -- lengths and steps -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("spare", "status"), [(0, 400), (1, 200)])
def test_a_prompt_as_long_as_the_window_and_one_token_less(server, spare, status):
    reply = server.post(COMPLETIONS, {"prompt": [7] * (1024 - spare), "max_tokens": 1})
    assert reply.status == status, reply.body
    if status == 400:
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "prompt")
    else:
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert reply.json()["usage"]["completion_tokens"] == 1


@pytest.fixture(scope="module")
def narrow():
    with serving(engine={"max_model_len": 64}) as found:
        yield found


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_max_tokens_is_capped_and_the_answer_says_so(narrow, path, stream):
    """Claude Code and opencode ask for 32,000; 2**31 is the most that is accepted."""
    max_tokens = 32_000 if stream else 2**31
    told = {"max_tokens": max_tokens, "max_output_tokens": max_tokens, "ignore_eos": True}
    streamed = {"stream": stream, "stream_options": {"include_usage": True}}
    reply = narrow.post(path, {**talking_body(path, "Hello"), **told, **streamed})
    assert reply.status == 200, reply.body
    last = [event for event in reply.events() if event != "[DONE]"][-1] if stream else reply.json()
    usage = last.get("response", last)["usage"]
    num_said = usage["output_tokens" if "output_tokens" in usage else "completion_tokens"]
    assert (usage["capped_max_tokens"], usage["total_tokens"]) == (num_said, 64)
    fits = narrow.post(path, {**talking_body(path, "Hello"), "max_tokens": 4}).json()["usage"]
    assert "capped_max_tokens" not in fits


def test_of_several_prompts_the_least_that_was_left_is_told(server):
    body = {"prompt": [[7] * 1000, [7] * 1010, [7]], "n": 2, "max_tokens": 20, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body).json()
    assert answer["usage"]["capped_max_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 2 * (20 + 14 + 20)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 6


@pytest.mark.parametrize("path", [*ROUTES[:2], "/v1/completions, of two prompts", *ROUTES[3:]])
def test_a_stream_whose_step_fails_ends_in_an_error(server, path):
    steps = itertools.count()

    def fail_later():
        if next(steps) == 3:
            raise RuntimeError("injected")

    path, _, several = path.partition(", ")
    body = {**talking_body(path, "Hello"), **LONG, "stream": True} | ({"prompt": ["a", "b"]} if several else {})
    with before_each_step(server.engine, fail_later):
        *before, error = [event for event in server.post(path, body).events() if event != "[DONE]"]
    assert error["error"]["code"] == "internal_error"
    if path == RESPONSES:
        assert (error["type"], error["sequence_number"]) == ("error", len(before))
        assert ResponseErrorEvent(**error).code == "internal_error"
    for event in before:
        ends = [choice["finish_reason"] for choice in event.get("choices", ())] + [event.get("finish_reason")]
        assert set(ends) == {None}
    server.wait_until_idle()


# -- what is not supported -------------------------------------------------------------------------------------------
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_that_cannot_begin_has_a_status(server, path):
    reply = server.post(path, {**talking_body(path, "word " * 5000), "stream": True})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("path", "more", "param"), [
    (CHAT, {"top_logprobs": 2}, "top_logprobs"), (CHAT, {"truncation_reuse": "reencode"}, "truncation_reuse"),
    ("/v1/responses", {"store": False, "truncation_reuse": "reencode"}, "truncation_reuse"),
    (CHAT, {"messages": IMAGE}, "messages[0].content[0]"), (CHAT, {"logit_bias": {"1000000": 1}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [1000000]}, "stop_token_ids"), (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 2}, "best_of"), (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"), (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
    (COMPLETIONS, {"stream": "yes"}, "stream"),
])  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(server, path, more, param):
    reply = server.post(path, {**talking_body(path, "Hello"), "max_tokens": 2, **more})
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    if "messages" in more:
        assert reply.error["code"] == "unsupported_content"


# -- what is wrong ----------------------------------------------------------------------------------------------------
PICTURE = [{"type": "image_url"}]
BAD = {
    "/chat": [
        ({}, "message", "missing"),
        ({"message": "a", "messages": [{"role": "user", "content": "b"}]}, "messages", "invalid_value"),
        ({"message": {"role": "user"}}, "message.content", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "missing"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"message": {"role": "user", "content": PICTURE}}, "message.content[0]", "unsupported_content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "invalid_value"),
        ({"message": "a", "session_id": "../../etc/passwd"}, "session_id", "invalid_value"),
        ({"message": "a", "system": "x", "messages": None, "truncation": "never"}, "truncation", "invalid_value"),
        ({"message": "a", "truncation_reuse": "splice"}, "truncation_reuse", "invalid_value"),
        ({"message": "a", "ttl": 0}, "ttl", "invalid_value"),
        ({"message": "a", "ttl": 1e12}, "ttl", "invalid_value"),
        ({"message": "a", "n": 2}, "n", "invalid_value"),
        ({"message": "a", "cache_salt": "x"}, "cache_salt", "unsupported"),
        ({"message": "a", "priority": -5}, "priority", "unsupported"),
        ({"message": "word " * 5000, "truncation": "disabled"}, "messages", "context_length_exceeded"),
        (
            {"system": "x", "messages": [{"role": "system", "content": "y"}, {"role": "user", "content": "a"}]},
            "system", "invalid_value",
        ),
    ],
    "/v1/responses": [
        ({}, "input", "missing"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "missing"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "unsupported_content"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"content": "a"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "user", "content": PICTURE}]}, "input[0].content[0]", "unsupported_content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "unsupported_role"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input", "invalid_value"),
        ({"input": "a", "n": 2}, "n", "invalid_value"),
        ({"input": "a", "truncation": "never"}, "truncation", "invalid_value"),
        ({"input": "a", "metadata": {"k": 5}}, None, "invalid_value"),
        ({"input": "a", "conversation": "conv 1"}, "conversation", "invalid_value"),
        ({"input": "a", "conversation": {"name": "conv_1"}}, "conversation", "invalid_value"),
        ({"input": "a", "conversation": "c", "previous_response_id": "resp_c_1"}, "conversation", "invalid_value"),
        ({"input": "a", "background": True}, "background", "unsupported_parameter"),
        ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"input": "a", "priority": -5}, "priority", "unsupported"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "unsupported"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"input": "word " * 5000}, "input", "context_length_exceeded"),
        ({"input": "word " * 5000, "store": False}, "input", "context_length_exceeded"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "code"), [(path, *row) for path in BAD for row in BAD[path]])
def test_what_is_wrong_is_named_and_makes_no_session(server, path, body, param, code):
    before = server.get("/sessions?limit=1000").json()["data"]
    reply = server.post(path, body)
    assert reply.status == 400, reply.body
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["code"] == code and error["param"] == (param or error["param"]), error
    assert server.get("/sessions?limit=1000").json()["data"] == before
