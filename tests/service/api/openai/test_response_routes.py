"""/v1/responses as Codex uses it, and the routes beside it: input_items, cancel, compact."""

import pytest

from kvstore.service.api.openai.response_schema import COMPACTED
from tests.support.by_hand import crawling
from tests.support.service.serving import server_fixture
from tests.support.service.talking import Stream
from tests.support.tools import FLAT

server = server_fixture()
MODEL = {"model": "kvstore-builtin", "temperature": 0, "max_output_tokens": 8}
FUNCTIONS = [{**tool, "strict": False} for tool in FLAT]
OTHERS = [
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "namespace", "name": "agents", "description": "d", "tools": FUNCTIONS[:1]},
]


def message(role, *texts):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def body_of_codex(*items):
    first = [message("developer", "You are an agent. " * 4), message("developer", "Skills.", "Permissions.")]
    return {
        "model": "kvstore-builtin", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "input": [*first, message("user", "<environment/>"), message("user", "hi"), *items],
        "tools": [*FUNCTIONS, *OTHERS], "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199",
        "client_metadata": {"session_id": "0199"}, "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"}, "service_tier": "auto", "max_output_tokens": 24,
    }  # fmt: skip


def test_codex_is_answered_and_its_next_turn_hits_the_last_one(server, lines):
    events = server.post("/v1/responses", body_of_codex()).events()
    first = events[-1]["response"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete") and first["store"] is False
    (told,) = (line for line in lines["text"] if "passed over" in line)
    assert "'custom', 'local_shell', 'namespace', 'web_search'" in told
    answer = [{**item, "id": "kept"} for item in first["output"]]
    again = server.post("/v1/responses", body_of_codex(*answer, message("user", "more"))).events()[-1]["response"]
    details = again["usage"]["input_tokens_details"]
    assert details["cached_tokens"] >= (first["usage"]["total_tokens"] - 1) // 16 * 16 and "miss" not in details


def test_input_items_are_the_conversation_up_to_a_response(server, client):
    called = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Sunny"}
    given = [message("developer", "Be brief."), message("user", "One"), called, result]
    first = client.responses.create(input=given, tools=FUNCTIONS, **MODEL)
    second = client.responses.create(input="Two", previous_response_id=first.id, tools=FUNCTIONS, **MODEL)
    page = client.responses.input_items.list(second.id, order="asc")
    kinds = ["message", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in page] == kinds and not page.has_more
    assert [item.role for item in page if item.type == "message"] == ["user", "assistant", "user"]
    assert [page.data[place].content[0].text for place in (0, 3, 4)] == ["One", first.output_text, "Two"]
    assert (page.data[1].call_id, page.data[2].output) == ("call_1", "Sunny")
    third = client.responses.create(input="Three", previous_response_id=second.id, tools=FUNCTIONS, **MODEL)
    ids = {item.id for item in client.responses.input_items.list(third.id, order="asc")}
    assert len(ids) == 7 and ids.isdisjoint(item.id for item in third.output)
    small = client.responses.input_items.list(second.id, limit=2)
    assert small.has_more and [item.id for item in small] == [item.id for item in reversed(page.data)]
    assert [item.type for item in client.responses.input_items.list(first.id, order="asc")] == kinds[:3]
    for query in ("limit=0", "limit=x", "order=up", "after=nothing", "limit=101"):
        reply = server.get(f"/v1/responses/{first.id}/input_items?{query}")
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
    for name in ("resp_x_1", f"{first.id}9", "x"):
        assert server.get(f"/v1/responses/{name}/input_items").status == 404


def test_a_forgotten_answer_is_no_response_any_more(server, client):
    """Nor is what was asked, which stays, shown as one."""
    first = client.responses.create(input="My password is tulip.", **MODEL)
    second = client.responses.create(input="What is a boat?", previous_response_id=first.id, **MODEL)
    session_id = first.id.split("_")[1]
    edits = [{"type": "remove", "id": "1.1"}, {"type": "remove", "id": "2.0"}]
    assert server.post(f"/sessions/{session_id}/edit", {"edits": edits, "reuse": "forget"}).status == 200
    for path in (first.id, f"{first.id}/input_items"):
        assert server.get(f"/v1/responses/{path}").status == 404
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_a_running_response_is_cancelled_and_keeps_what_was_said(server, client):
    with crawling(server.engine):
        stream = Stream(server, "/v1/responses", {"input": "Hello", "max_output_tokens": 900, "ignore_eos": True})
        name = stream.next()["response"]["id"]
        while stream.next()["type"] != "response.output_text.delta":
            pass
        cancelled = client.responses.cancel(name)
    last = stream.rest()[-1]["response"]
    assert (cancelled.id, cancelled.status, cancelled.incomplete_details.reason) == (name, "incomplete", "stopped")
    assert cancelled.output_text and cancelled.output_text == last["output"][0]["content"][0]["text"]
    assert client.responses.cancel(name) == client.responses.retrieve(name), "a second time nothing changes"
    assert server.post("/v1/responses/resp_x_1/cancel").status == 404


@pytest.mark.parametrize("stored", [True, False])
def test_a_compaction_hits_the_conversation_and_the_next_request_goes_on_with_it(client, stored):
    said = [message("user", f"My name is Ada, {stored}. " * 8)]
    first = client.responses.create(input=said, store=stored, **MODEL)
    if stored:
        compact = client.responses.compact(model="kvstore-builtin", previous_response_id=first.id)
    else:
        history = [*said, *(item.to_dict() for item in first.output)]
        compact = client.responses.compact(model="kvstore-builtin", input=history)
    kinds = [item.type for item in compact.output]
    assert (compact.object, kinds) == ("response.compaction", ["message", "compaction"])
    cached = compact.usage.input_tokens_details.cached_tokens
    assert cached >= (first.usage.total_tokens - 1) // 16 * 16
    assert compact.output[0].content[0].text == said[0]["content"][0]["text"]
    kept = [item.to_dict(warnings=False) for item in compact.output]  # a user's message is no output to it
    after = client.responses.create(input=[*kept, message("user", "What is my name?")], **MODEL)
    summary = kept[1]["encrypted_content"].removeprefix(COMPACTED)
    shown = [item.content[0].text for item in client.responses.input_items.list(after.id, order="asc")]
    assert shown == [said[0]["content"][0]["text"], summary, "What is my name?"]


def test_a_compaction_with_the_tools_of_before_hits_too(server):
    body = body_of_codex()
    first = server.post("/v1/responses", body).events()[-1]["response"]
    asked = {**body, "input": [*body["input"], *first["output"]]}
    compact = server.post("/v1/responses/compact", asked).json()
    cached = compact["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= (first["usage"]["total_tokens"] - 1) // 16 * 16
    assert [item["type"] for item in compact["output"]] == ["message", "message", "compaction"]


WRONG = {
    "": [
        {"input": [{"type": "compaction", "encrypted_content": "gAAAAAB"}]}, {"input": [{"type": "compaction"}]},
        {"input": [{"type": "compaction", "encrypted_content": 5}]}, {"input": {"role": "user"}},
        {"input": [{"type": "function_call", "call_id": {}, "name": "x", "arguments": "{}"}]},
        {"input": [{"role": "user", "content": [5]}]}, {"input": [{"role": ["user"], "content": "x"}]},
        {"input": "x", "tools": {"type": "function"}}, {"input": "x", "tools": [5]},
        {"input": "x", "tools": [{"type": {}}]}, {"input": "x", "reasoning": "high"}, {"input": "x", "text": "low"},
        {"input": "x", "tools": [{"type": "function", "name": "x", "parameters": []}]},
        {"input": "x", "previous_response_id": []}, {"input": "x", "metadata": []},
    ],
    "/compact": [{}, {"input": []}, {"input": 5}, {"input": "x", "background": True}, []],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [(path, body) for path in WRONG for body in WRONG[path]])
def test_bodies_of_other_types_are_refused(server, path, body):
    reply = server.post(f"/v1/responses{path}", body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.body


def test_what_does_not_exist_says_what_does(server):
    reply = server.request("PUT", "/v1/responses/resp_x_1", {})
    assert (reply.status, reply.headers["allow"]) == (405, "DELETE, GET, HEAD") and "DELETE" in reply.error["message"]
    reply = server.request("GET", "/v1/chat/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    for path in ("/v1/embeddings", "/v1/responses/x/y", "/v1/"):
        reply = server.post(path, {"input": "x"})
        assert (reply.status, reply.error["code"], reply.error["type"]) == (404, "not_found", "invalid_request_error")
        assert "/v1/chat/completions, /v1/completions, /v1/messages," in reply.error["message"]
    assert "/v1" not in server.get("/nowhere").error["message"]
