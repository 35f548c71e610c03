"""Bodies, numbers, paths and clients that are wrong or hostile: each gets the right answer and harms nobody."""

import contextlib
import json
import socket

import psutil
import pytest

from tests.support.service.serving import KEY, raw_request, serving

CHAT, COMPLETIONS, TURN = "/v1/chat/completions", "/v1/completions", "/chat"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
    with serving(api_key=KEY, max_body_bytes=2**20) as one:
        yield one


def body(**changes):
    return {"messages": HELLO, "max_tokens": 2} | changes


def message(**changes):
    return body(messages=[{"role": "user", "content": "Hello"} | changes])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TURN])
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"   ", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"messages": "\xc3"}', b"[" * 100_000,
        b'{"a": ' * 50_000, b"{" + b'"a": 1,' * 10_000, b"{} {}",
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused_at_once(server, path, raw):
    reply = server.request("POST", path, raw, {"Content-Type": "application/json"})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert len(reply.error["message"]) < 300


NUMBERS = [
    ("temperature", "NaN"), ("temperature", "Infinity"), ("temperature", "-Infinity"), ("temperature", "1e999"),
    ("temperature", "-0.1"), ("temperature", '"1"'), ("temperature", "[]"), ("top_p", "0"), ("top_p", "1.5"),
    ("top_p", "NaN"), ("top_k", "-5"), ("top_k", "1.5"), ("n", "1000000000"), ("n", "0"), ("n", "-1"),
    ("max_tokens", "0"), ("max_tokens", "-1"), ("max_tokens", "9223372036854775808"), ("max_tokens", '"10"'),
    ("max_tokens", "1.5"), ("max_tokens", "1e400"), ("min_p", "2"), ("seed", "1e30"), ("presence_penalty", "3"),
    ("repetition_penalty", "0"), ("stop", '["", "a"]'), ("stop", "[" + '"a",' * 16 + '"a"]'),
    ("stop", '"' + "x" * 257 + '"'), ("logit_bias", json.dumps({str(i): 1 for i in range(1025)})),
    ("logit_bias", '{"a": 1}'), ("logit_bias", '{"1": 101}'), ("stop_token_ids", "[-1]"), ("stream", '"yes"'),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), NUMBERS, ids=lambda value: str(value)[:24])
def test_numbers_and_lists_out_of_bounds_name_their_field(server, path, field, value):
    before = psutil.Process().memory_info().rss
    first = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt": "x"'
    raw = "{" + first + f', "{field}": {value}' + "}"
    reply = server.request("POST", path, raw.encode(), {"Content-Type": "application/json"})
    assert reply.status == 400 and (reply.error["param"] or "").split("[")[0].split(".")[0] == field, reply.body
    assert field in reply.error["message"]
    assert psutil.Process().memory_info().rss - before < 64 << 20


MESSAGES = [
    ({}, "messages"), (body(messages=[]), "messages"), (body(messages=None), "messages"),
    (body(messages="Hello"), "messages"), (body(messages=[1]), "messages"), (message(role="king"), "messages[0].role"),
    (message(role=""), "messages[0].role"), (message(content=None), "messages"),
    (message(content=5), "messages"), (message(role="tool"), "messages[0].role"),
    (body(messages=HELLO * 4097), "messages"), (body(messages=[{"role": "user"}]), "messages"),
    (body(messages=[{"content": "x"}]), "messages"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"type": "input_audio", "text": "x"}]), "messages[0].content[0]"),
    (body(tools=[{"type": "function"}]), "tools"), (body(tool_choice="required"), "tool_choice"),
    (body(response_format={"type": "json_object"}), "response_format"), (body(chat_template="{{x}}"), "chat_template"),
    (body(chat_template_kwargs={"x": 1}), "chat_template_kwargs"), (body(top_logprobs=21), "top_logprobs"),
    (body(top_logprobs=2), "top_logprobs"), (body(truncation_reuse="maybe"), "truncation_reuse"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "param"), MESSAGES, ids=lambda value: str(value)[:40])
def test_messages_that_cannot_be_answered_name_the_place(server, sent, param):
    reply = server.post(CHAT, sent)
    assert reply.status == 400 and (reply.error["param"] or "").startswith(param), reply.body


def test_an_image_has_a_code_of_its_own(server):
    reply = server.post(CHAT, message(content=[{"type": "image_url", "image_url": {"url": "x"}}]))
    assert reply.error["code"] == "unsupported_content"


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"1000000": 1}), ("stop_token_ids", [1000000])])
def test_tokens_that_the_model_does_not_have_are_refused(server, field, value):
    reply = server.post(CHAT, body(**{field: value}))
    assert (reply.status, reply.error["param"]) == (400, field)


def test_half_a_surrogate_pair_is_no_text(server):
    raw = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    reply = server.request("POST", CHAT, raw, {"Content-Type": "application/json"})
    assert reply.status == 400


def test_text_that_spells_a_control_token_stays_text(server):
    reply = server.post(CHAT, message(content="<|im_end|><|end|></s><eos>"))
    assert reply.status == 200
    plain = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    spelled = [{"role": "user", "content": "Hello<|end|>"}]
    assert plain.count(5) == server.post("/tokenize", {"messages": spelled}).json()["tokens"].count(5)


def test_the_window_is_said_with_both_numbers(server):
    text = "tea " * 2000
    reply = server.post(CHAT, message(content=text))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "1024" in reply.error["message"]


@pytest.mark.parametrize(("spare", "status"), [(0, 400), (1, 200)])
def test_a_prompt_as_long_as_the_window_and_one_token_less(server, spare, status):
    ids = [7] * (1024 - spare)
    reply = server.post(COMPLETIONS, {"prompt": ids, "max_tokens": 1})
    assert reply.status == status, reply.body
    if status == 400:
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "prompt")
    else:
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert reply.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"), ("DELETE", CHAT, 405, "method_not_allowed"),
        ("GET", TURN, 405, "method_not_allowed"), ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/no/such/path", 404, "not_found"), ("GET", "/../../etc/passwd", 404, "not_found"),
        ("GET", "/web/../server.py", 404, "not_found"), ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("PATCH", "/health", 405, "method_not_allowed"),
    ],
)  # fmt: skip
def test_paths_and_methods(server, method, path, status, code):
    reply = server.request(method, path)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_an_unknown_model_and_an_unknown_field(server):
    reply = server.post(CHAT, body(model="gpt-9"))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert server.post(CHAT, body(no_such_field=[1, {"a": None}])).status == 200


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit(server, announced):
    data = b'{"messages": "' + b"x" * 2**21 + b'"}'
    if announced:
        assert server.request("POST", CHAT, data, {"Content-Type": "application/json"}).status == 413
        return
    head = raw_request("POST", CHAT, Authorization=f"Bearer {KEY}", Content_Type="application/json")
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with server.connect() as raw:
        raw.sendall(head)
        chunk = b"%x\r\n" % 65536 + b"x" * 65536 + b"\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not wait for what it refuses
            for _ in range(64):
                raw.sendall(chunk)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(65536).startswith(b"HTTP/1.1 413")
    server.wait_until_idle()


SESSION_IDS = ["../../etc/passwd", "", "x" * 10_240, "sesión", "a b", "a/b", "a\0b", "-" * 129, " "]


@pytest.mark.parametrize("session_id", SESSION_IDS, ids=lambda value: repr(value)[:20])
def test_bad_session_ids_are_refused_before_anything_is_looked_up(server, session_id):
    reply = server.post(TURN, {"session_id": session_id, "message": "Hello"})
    assert (reply.status, reply.error["param"]) == (400, "session_id")
    assert len(reply.body) < 500


def test_an_unknown_session_is_not_found(server):
    reply = server.post(TURN, {"session_id": "nobody", "message": "Hello"})
    assert (reply.status, reply.error["code"]) == (404, "session_not_found")


# -- clients that go away --------------------------------------------------------------------------------------------
def leave_after(server, path, sent, num_bytes):
    """Send a request and close the connection once so much of the answer has come."""
    data = json.dumps(sent).encode()
    with server.connect() as raw:
        raw.sendall(raw_request("POST", path, data, Authorization=f"Bearer {KEY}", Content_Type="application/json"))
        if num_bytes:
            assert raw.recv(num_bytes)
        else:
            server.wait_until(lambda: server.context.limits.num_admitted > 0, "the request has come")
        raw.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("path", [CHAT, TURN])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_every_phase(server, path, stream):
    """Queued or in prefill (nothing of the answer has come), and in decode (its first bytes have)."""
    long = {"max_tokens": 600, "ignore_eos": True, "stream": stream, "temperature": 0}
    long |= {"messages": HELLO} if path == CHAT else {"message": "Hello"}
    free = server.engine.loop.pool.num_free
    for num_bytes in (0, 64) if stream else (0, 0):
        leave_after(server, path, long, num_bytes)
        server.wait_until_idle()
        assert server.engine.loop.pool.num_free == free


def test_what_was_computed_for_a_client_that_left_stays(server):
    text = "A sentence that nobody has said so far, and that is long enough to fill several blocks of tokens. " * 3
    sent = {"messages": [{"role": "user", "content": text}], "max_tokens": 500, "ignore_eos": True, "stream": True}
    leave_after(server, CHAT, sent, 64)
    server.wait_until_idle()
    again = server.post(CHAT, sent | {"max_tokens": 1, "stream": False}).json()["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == (again["prompt_tokens"] - 1) // 16 * 16


def test_nothing_is_held_at_the_end_and_it_still_answers(server):
    server.wait_until_idle()
    assert server.get("/health").json() == {"status": "ok", "reasons": []}
    assert server.post(CHAT, body()).status == 200
