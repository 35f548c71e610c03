"""/v1/responses with OpenAI's own client: conversations by previous_response_id, events, forks, what is stored."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.by_hand import crawling
from tests.support.service.talking import LONG, Stream

MORE = {"temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}


def ask(client, text, previous=None, **more):
    named = {} if previous is None else {"previous_response_id": previous.id}
    return client.responses.create(model="kvstore-builtin", input=text, **{**MORE, **named, **more})


def sessions_of(server):
    return [one["id"] for one in server.get("/sessions?limit=1000").json()["data"]]


def test_a_conversation_goes_on_in_its_session(server, client):
    said = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u"}
    first = ask(client, "Hello, my name is Anna and I like walks.", **said)
    assert first.object == "response" and first.model == "kvstore-builtin" and first.error is None
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.instructions, first.metadata, first.user, first.temperature) == ("Be brief.", {"a": "b"}, "u", 0)
    (item,) = first.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert first.output_text == item.content[0].text and item.content[0].annotations == []
    usage = first.usage
    assert usage.output_tokens == 8 and usage.total_tokens == usage.input_tokens + 8
    assert usage.input_tokens_details.cached_tokens == 0 and usage.output_tokens_details.reasoning_tokens == 0

    second = ask(client, "What is my name?", first)
    details = second.usage.input_tokens_details
    assert details.cached_tokens == (usage.total_tokens - 1) // 16 * 16 > 0
    by_tier = {"hbm": details.cached_tokens, "cpu": 0, "disk": 0, "remote": 0, "reencoded": 0, "quantised": 0}
    assert details.cached_tokens_details == by_tier
    assert second.previous_response_id == first.id
    session_id = first.id.split("_")[1]
    assert (first.id, second.id) == (f"resp_{session_id}_1", f"resp_{session_id}_2")
    shown = server.get(f"/sessions/{session_id}").json()
    assert shown["turns"] == 2 and shown["messages"][1]["content"] == first.output_text
    assert shown["system"]["content"] == "Be brief."


def test_a_conversation_is_the_session_of_its_id(server, client):
    """It begins with its first response, and each continues the last one, on whichever route that was."""
    first = ask(client, "Hello, my name is Anna.", conversation="conv_anna", instructions="Be brief.")
    assert (first.id, first.conversation.id) == ("resp_conv_anna_1", "conv_anna")
    server.post("/chat", {"session_id": "conv_anna", "message": "I like walks.", "max_tokens": 8, "temperature": 0})
    third = ask(client, "What is my name?", conversation={"id": "conv_anna"})
    assert third.id == "resp_conv_anna_3" and third.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
    assert (third.instructions, third.previous_response_id) == ("Be brief.", None)
    beside = ask(client, "What is my name?", conversation="conv_anna", store=False)
    assert beside.usage.input_tokens > third.usage.total_tokens, "it has the history"
    unknown = ask(client, "What is my name?", conversation="conv_eve", store=False)
    assert unknown.usage.input_tokens < first.usage.input_tokens
    assert server.get("/sessions/conv_anna").json()["turns"] == 3 and "conv_eve" not in sessions_of(server)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Hello", conversation="conv_anna", instructions="Be long.")
    assert (refused.value.param, refused.value.code) == ("instructions", "system_mismatch")
    assert ask(client, "Hello", conversation="conv_anna", instructions="Be long.", store=False).output_text


def test_a_conversation_takes_one_response_at_a_time(server, client):
    with crawling(server.engine):
        running = Stream(server, "/v1/responses", {"input": "Count.", "conversation": "conv_busy", **LONG})
        assert running.next()["response"]["conversation"] == {"id": "conv_busy"}
        with pytest.raises(openai.ConflictError) as refused:
            ask(client, "Quickly", conversation="conv_busy")
        assert refused.value.code == "session_busy"
        server.post("/sessions/conv_busy/stop")
    running.rest()


def test_histories_need_not_take_turns(server, client):
    """Neither the user nor the assistant, which may greet first; the next turn hits, whatever it brings."""
    user, assistant = ({"role": role, "content": "This is a message of mine."} for role in ("user", "assistant"))
    first = ask(client, [assistant, user, user, assistant, assistant, user, user])
    second = ask(client, [user, user], first)
    assert second.usage.input_tokens_details.cached_tokens == (first.usage.total_tokens - 1) // 16 * 16
    roles = [message["role"] for message in server.get(f"/sessions/{first.id.split('_')[1]}").json()["messages"]]
    assert "".join(role[0] for role in roles) == "auuaauuauua"


def test_an_answer_that_ends_by_itself_is_completed(client):
    response = client.responses.create(model="kvstore-builtin", input="Who are you?", temperature=0)
    assert response.status == "completed" and response.incomplete_details is None
    assert response.output[0].status == "completed" and response.output_text


def test_an_earlier_turn_and_a_busy_session_are_forked(server, client):
    first = ask(client, "Hello")
    second = ask(client, "More", first)
    third = ask(client, "Something else", first)
    assert third.id.split("_")[1] != first.id.split("_")[1] and third.id.endswith("_2")
    fork = server.get(f"/sessions/{third.id.split('_')[1]}").json()
    assert fork["parent"] == {"session_id": first.id.split("_")[1], "turn": 1, "version": False}
    assert [message["content"] for message in fork["messages"]] == [
        "Hello", first.output_text, "Something else", third.output_text,
    ]  # fmt: skip
    assert client.responses.retrieve(third.id).previous_response_id == first.id

    with crawling(server.engine):
        running = Stream(server, "/v1/responses", {"input": "Count.", "previous_response_id": second.id, **LONG})
        assert running.next()["response"]["id"] == f"resp_{first.id.split('_')[1]}_3"
        beside = ask(client, "Quickly", second)
        assert beside.id.split("_")[1] != first.id.split("_")[1] and beside.id.endswith("_3")
        server.post(f"/sessions/{first.id.split('_')[1]}/stop")
    *_, last = running.rest()
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "stopped"}


def test_a_fork_that_fails_is_not_left_behind(server, client):
    first = ask(client, "Hello")
    ask(client, "More", first)
    before = sessions_of(server)
    with crawling(server.engine):
        left = Stream(server, "/v1/responses", {"input": "Count.", "previous_response_id": first.id, **LONG})
        left.next(), left.next()
        assert sessions_of(server) == before
        left.leave()
    server.wait_until_idle()
    assert sessions_of(server) == before


def test_other_instructions_are_followed_in_a_session_of_their_own(server, client):
    first = ask(client, "Hello", instructions="Be brief.")
    same = ask(client, "More", first, instructions="Be brief.")
    assert same.id.split("_")[1] == first.id.split("_")[1] and same.instructions == "Be brief."
    unnamed = ask(client, "Still more", same)
    assert unnamed.instructions == "Be brief."
    other = ask(client, "Go on", same, instructions="Be long.")
    shown = server.get(f"/sessions/{other.id.split('_')[1]}").json()
    assert shown["system"]["content"] == "Be long."
    said = [message["content"] for message in shown["messages"]]
    assert said[:5] == ["Hello", first.output_text, "More", same.output_text, "Go on"]


def test_input_as_items_with_earlier_output(server, client):
    first = ask(client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    items = [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "More"},
    ]  # fmt: skip
    second = ask(client, items)
    shown = server.get(f"/sessions/{second.id.split('_')[1]}").json()
    assert [m["content"] for m in shown["messages"]] == ["Hello", first.output_text, "More", second.output_text]
    assert shown["system"]["content"] == "Be brief."


EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.incomplete",
]  # fmt: skip


def test_events_are_openai_s(server, client):
    whole = ask(client, "Hello")
    events = list(ask(client, "Hello", stream=True))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == last.output_text == whole.output_text and last.usage.output_tokens == 8
    assert events[0].response.id == last.id and events[0].response.status == "in_progress"
    assert events[0].response.output == [] and events[0].response.usage is None
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    reply = server.post("/v1/responses", {"input": "Who are you?", "stream": True, "temperature": 0})
    named = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert [event["type"] for event in reply.events()] == named and named[-1] == "response.completed"
    assert b"[DONE]" not in reply.body


def test_the_client_s_own_stream_helper(client):
    with client.responses.stream(model="kvstore-builtin", input="Who are you?", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) != ""


def test_an_error_in_a_stream_reaches_the_client(server, client):
    with crawling(server.engine):
        events = iter(ask(client, "Count.", stream=True, max_output_tokens=400))
        session_id = next(events).response.id.split("_")[1]
        assert next(events).type == "response.in_progress"
        server.request("DELETE", f"/sessions/{session_id}")
    with pytest.raises(openai.APIError) as error:
        list(events)
    assert error.value.code == "session_not_found"


def test_a_response_is_there_until_it_is_deleted(server, client):
    first = ask(client, "Hello", instructions="Be brief.")
    second = ask(client, "More", first)
    for made in (first, second):
        found = client.responses.retrieve(made.id)
        for name in ("id", "status", "output", "usage", "previous_response_id", "instructions", "incomplete_details"):
            assert getattr(found, name) == getattr(made, name), name
    reply = server.request("DELETE", f"/v1/responses/{first.id}")
    assert reply.json() == {"id": first.id, "object": "response", "deleted": True}
    for made in (first, second):  # the whole conversation
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
    assert first.id.split("_")[1] not in sessions_of(server)
    other = ask(client, "Hello")
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, "More", other)
    assert error.value.code == "response_not_found" and error.value.param == "previous_response_id"


def test_without_store_nothing_is_kept(server, client):
    before = sessions_of(server)
    first = ask(client, "Hello, my name is Anna.", store=False)
    assert first.store is False and first.output_text and first.status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    said = [{"role": "user", "content": text} for text in ("Hello, my name is Anna.", "Who?")]
    history = [said[0], *first.output, said[1]]
    second = ask(client, history, store=False)
    assert second.usage.input_tokens_details.cached_tokens == (first.usage.total_tokens - 1) // 16 * 16
    assert sessions_of(server) == before
    events = list(ask(client, "Hello, my name is Anna.", store=False, stream=True))
    assert list(dict.fromkeys(event.type for event in events)) == EVENTS
    assert events[-1].response.output_text == first.output_text
    stored = ask(client, "Hello")
    beside = ask(client, "More", stored, store=False)
    assert beside.usage.input_tokens > stored.usage.total_tokens
    assert server.get(f"/sessions/{stored.id.split('_')[1]}").json()["turns"] == 1


def test_a_retry_finds_its_response(server, client):
    def again(previous=None, key="a"):
        return ask(client, "Hello", previous, extra_headers={"Idempotency-Key": key})

    first, retried = again(), again()
    assert first.id == retried.id and first.output == retried.output
    second, second_retried = again(first, "b"), again(first, "b")
    assert second.id == second_retried.id == first.id[:-1] + "2"
    third, third_retried = again(first, "c"), again(first, "c")  # a fork
    assert third.id == third_retried.id != second.id


def test_a_retry_of_one_that_went_to_a_fork_is_found_there(server, client):
    first = ask(client, "Hello")
    with crawling(server.engine):
        running = Stream(server, "/v1/responses", {"input": "Count.", "previous_response_id": first.id, **LONG})
        running.next()
        answer = ask(client, "And this", first, extra_headers={"Idempotency-Key": "to a fork"})
        running.leave()
    server.wait_until_idle()
    retried = ask(client, "And this", first, extra_headers={"Idempotency-Key": "to a fork"})
    assert answer.id == retried.id and retried.id.split("_")[1] != first.id.split("_")[1]


def test_parallel_continuations_all_see_the_same_past(server, client):
    first = ask(client, "Hello")
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda number: ask(client, f"Branch {number}", first), range(5)))
    assert len({one.id for one in found}) == 5
    for one in found:
        session_id = one.id.split("_")[1]
        assert server.get(f"/sessions/{session_id}").json()["turns"] == 2
        assert one.id.endswith("_2")


@pytest.mark.parametrize("name", ["resp_x", "x", "", "resp_" + "a" * 200 + "_1", "resp_a_0", "resp_a_1x", "chatcmpl-1"])
def test_an_id_that_names_nothing_is_404(server, name):
    reply = server.post("/v1/responses", {"input": "a", "previous_response_id": name})
    assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    assert reply.error["param"] == "previous_response_id"
    if name:
        assert server.get(f"/v1/responses/{name}").status == 404
        assert server.request("DELETE", f"/v1/responses/{name}").status == 404


def test_chat_goes_on_where_responses_began(server, client):
    first = ask(client, "Hello")
    reply = server.post("/chat", {"session_id": first.id.split("_")[1], "message": "More", "max_tokens": 4})
    assert reply.json()["turn"] == 2
    assert client.responses.retrieve(first.id[:-1] + "2").output_text == reply.json()["message"]["content"]
