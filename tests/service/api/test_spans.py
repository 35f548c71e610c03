"""Parts with "reuse" on every route that has parts: what usage says of them, in any conversation of their tenant."""

import pytest

from tests.support.service.talking import tenants

DOCUMENT = " ".join(f"Box {number} holds seven red lamps and a letter." for number in range(20))
PATHS = ("/chat", "/v1/chat/completions", "/v1/messages", "/v1/responses")
PLAIN = {"temperature": 0}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    tiers = {"hbm": "8MiB", "cpu": "32MiB"}
    with tenants(tmp_path_factory.mktemp("spans"), engine={"cache_tiers": tiers}) as both:
        yield both


def body_of(path, before, reuse="reencode", role="user", **more):
    kind = "input_text" if path == "/v1/responses" else "text"
    field = {} if reuse is None else {"reuse": reuse}
    parts = [
        {"type": kind, "text": before},
        {"type": kind, "text": DOCUMENT, **field},
        {"type": kind, "text": " Well?"},
    ]
    message = {"role": role, "content": parts}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    said = {"/chat": {"message": message}, "/v1/responses": {"input": [message]}}.get(path, {"messages": [message]})
    return {**said, length: 4, **PLAIN, **more}


def reencoded(reply):
    """Of the prompt's tokens, those whose KV was reused, and all that had some."""
    assert reply.status == 200, reply.body
    usage = reply.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    tiers = details["cached_tokens_details"]
    assert details.get("cached_tokens", sum(tiers.values())) == sum(tiers.values())
    return tiers["reencoded"]


@pytest.mark.parametrize("path", PATHS)
def test_a_document_is_reused_wherever_it_stands(two, path):
    alice, bob = two
    tokens = alice.post("/tokenize", {"prompt": DOCUMENT}).json()["count"]
    for before in ("Read this: ", "From another place, at another time, read this, and what comes behind: "):
        assert reencoded(alice.post(path, body_of(path, before))) > tokens - 40
        assert reencoded(alice.post(path, body_of(path, before, reuse=None))) == 0
    assert reencoded(bob.post(path, body_of(path, "Read this: "))) > tokens - 40
    streamed = alice.post(path, body_of(path, "Streamed: ", stream=True))
    assert streamed.status == 200 and streamed.events()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reuse", ["exact", "", "REENCODE", 1, True, ["reencode"]], ids=str)
def test_another_value_is_a_400_that_names_the_field(two, path, reuse):
    reply = two[0].post(path, body_of(path, "Read this: ", reuse))
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
    assert "reuse" in (reply.error.get("param") or reply.error["message"])


@pytest.mark.parametrize("path", ["/chat", "/v1/responses"])
def test_a_retry_of_a_turn_with_a_document_gets_the_stored_answer(two, path):
    body, key = body_of(path, "Once more: "), {"Idempotency-Key": "with a document"}
    first, again = (two[0].request("POST", path, body, key) for _ in range(2))
    assert again.status == 200, again.body
    assert again.json()["id"] == first.json()["id"]


def test_results_of_tools_are_spans(two):
    function = {"name": "read", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    part = {"type": "text", "text": DOCUMENT, "reuse": "reencode"}
    asked = {"role": "user", "content": "Read it."}
    told = {"role": "tool", "tool_call_id": "call_1", "content": [part]}
    chat = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, told]
    use = {"type": "tool_use", "id": "call_1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [part]}
    messages = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    told = {"type": "function_call_output", "call_id": "call_1", "output": [{**part, "type": "input_text"}]}
    items = [asked, {"type": "function_call", "call_id": "call_1", **function}, told]
    for path, body in (
        ("/v1/chat/completions", {"messages": chat}), ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": items}), ("/chat", {"messages": chat}),
    ):  # fmt: skip
        assert reencoded(two[0].post(path, {**body, "max_tokens": 4, **PLAIN})) > 300, path


def test_a_session_and_a_history_go_on_behind_their_documents(two):
    alice, _ = two
    first = alice.post("/chat", body_of("/chat", "Read this: "))
    asked = {"message": "And?", "session_id": first.json()["session_id"], "max_tokens": 4, **PLAIN}
    assert reencoded(alice.post("/chat", asked)) >= reencoded(first) > 300
    path = "/v1/chat/completions"
    body = body_of(path, "Read that: ")
    first = alice.post(path, body)
    answer = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    body["messages"] += [answer, {"role": "user", "content": "And?"}]
    before = alice.engine.stats()["requests"]["finished"]
    assert reencoded(alice.post(path, body)) >= reencoded(first) > 300
    assert alice.engine.stats()["requests"]["finished"] == before + 1, "nothing was computed beside it"
    shown = alice.get(f"/sessions/{asked['session_id']}").json()["messages"][0]
    assert shown["content"] == f"Read this: {DOCUMENT} Well?" and "reuse" not in shown


def test_who_goes_on_without_the_kv_of_a_document_is_told_why(two):
    alice, _ = two
    path = "/v1/chat/completions"
    body = body_of(path, "Read this exactly: ")
    text = alice.post(path, body).json()["choices"][0]["message"]["content"]
    body["messages"] += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    first = alice.post("/chat", body_of("/chat", "Read this exactly, and in a session: "))
    asked = {"message": "And?", "session_id": first.json()["session_id"], "max_tokens": 4, **PLAIN}
    for reply in (alice.post(path, {**body, "kv_exact": True}), alice.post("/chat", {**asked, "kv_exact": True})):
        assert reencoded(reply) == 0
        miss = reply.json()["usage"]["prompt_tokens_details"]["miss"]
        assert (miss["cause"], miss["why"]) == ("not_loaded", "only re-encoded KV is there") and miss["tokens"] > 300


def test_counting_sees_the_same_prompt(two):
    alice, _ = two
    body = body_of("/v1/messages", "Count this: ")
    del body["temperature"], body["max_tokens"]
    counted = alice.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = alice.post("/v1/chat/completions", body_of("/v1/chat/completions", "Count this: ")).json()["usage"]
    assert counted == usage["prompt_tokens"]
    body = {"messages": body_of("/v1/chat/completions", "Count this: ")["messages"]}
    assert alice.post("/tokenize", body).json()["count"] == counted
