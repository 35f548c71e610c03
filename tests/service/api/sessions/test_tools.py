"""POST /chat with tools: calls, their results, streams, retries, and what a session shows of them."""

from contextlib import closing

import psutil

from kvstore.disk.directory import StoreDirectory
from kvstore.sessions.answers import open_answers
from tests.support.service.server_process import launched
from tests.support.service.serving import server_fixture
from tests.support.tools import TOOLS, WEATHER, is_weather, reordered

MUST = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 120}
FREE = {"tools": TOOLS, "max_tokens": 8}

server = server_fixture()


def cached(reply) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def result_of(call, content="Sunny."):
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def test_a_session_with_calls(server):
    first = server.post("/chat", {"message": "What is the weather?", **MUST})
    answer = first.json()
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and is_weather(call["function"]["arguments"])
    name, total = answer["session_id"], answer["usage"]["total_tokens"]
    second = server.post("/chat", {"session_id": name, "messages": [result_of(call)], **FREE})
    assert second.status == 200 and cached(second) == (total - 1) // 16 * 16
    shown = server.get(f"/sessions/{name}").json()["messages"]
    assert [message["role"] for message in shown] == ["user", "assistant", "tool", "assistant"]
    assert shown[1]["tool_calls"] == [call] and shown[2]["tool_call_id"] == call["id"]
    wrong = server.post("/chat", {"session_id": name, "messages": [result_of({"id": "call_x"})], **FREE})
    assert wrong.status == 400 and "call_x" in wrong.error["message"]


def test_a_streamed_call_and_its_retry(server):
    body = {"message": "What is the weather?", "stream": True, **MUST}
    events = server.post("/chat", body, **{"Idempotency-Key": "one"}).events()
    calls = [call for event in events[:-2] for call in event["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [call["function"] for call in events[-2]["message"]["tool_calls"]]
    again = server.post("/chat", body, **{"Idempotency-Key": "one"}).events()
    assert [call for event in again[:-2] for call in event["delta"].get("tool_calls", ())] == calls
    assert again[-2]["message"] == events[-2]["message"]


def test_formats(server):
    reply = server.post("/chat", {"message": "Hello", "guided_choice": ["yes", "no"]})
    assert reply.json()["message"]["content"] in ("yes", "no")


def test_a_history_with_calls_hits_after_kill_9(tmp_path):
    """Reordered keys, other white space; the whole history comes as text, from a client that has no session."""
    path, asked = "/v1/chat/completions", [{"role": "user", "content": "What is the weather in Rome? " * 4}]
    with launched(tmp_path / "store") as server:
        reply = server.post(path, {"messages": asked, **MUST, "tools": [WEATHER]}).json()
        server.flush()
        server.post(path, {"messages": [{"role": "user", "content": "And in Oslo?"}], **MUST})
        cores = server.cores
        server.kill()  # what was told is durable
    psutil.wait_procs(cores)  # they hold the store, too
    with StoreDirectory.open(tmp_path / "store") as directory, closing(open_answers(directory)) as answers:
        assert answers.stats()["answers"] == 2
    message = reply["choices"][0]["message"]
    (call,) = message["tool_calls"]
    function = {**call["function"], "arguments": reordered(call["function"]["arguments"])}
    said = {"role": "assistant", "tool_calls": [{**call, "function": function}]}
    with launched(tmp_path / "store") as server:
        after = server.post(path, {"messages": [*asked, said, result_of(call)], "tools": [WEATHER], "max_tokens": 4})
        assert cached(after) == (reply["usage"]["total_tokens"] - 1) // 16 * 16
