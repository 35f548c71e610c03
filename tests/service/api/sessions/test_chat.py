"""POST /chat: turns that are durable when they are answered, retries, refusals, answers that are left or stopped."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.config import CacheTiers
from kvstore.engine.sessions.window import Window
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import crawling, held
from tests.support.faults import before_each
from tests.support.service.serving import serving
from tests.support.service.talking import LONG, SHORT, Stream, chat, num_turns
from tests.support.waiting import TIMEOUT_S


def keys_of(value):
    """The shape of an answer: names of all fields, at every depth."""
    return {name: keys_of(one) for name, one in value.items()} if isinstance(value, dict) else None


TIERS_SHAPE = dict.fromkeys(("hbm", "cpu", "disk", "remote", "reencoded", "quantised"))
ANSWER_SHAPE = {
    "id": None, "session_id": None, "turn": None, "message": {"role": None, "content": None}, "finish_reason": None,
    "usage": {
        "prompt_tokens": None, "completion_tokens": None, "total_tokens": None,
        "prompt_tokens_details": {
            "cached_tokens": None, "cached_tokens_details": TIERS_SHAPE, "cache_write_tokens": None
        },
    },
    "timings": dict.fromkeys(("queue_s", "load_s", "prefill_s", "ttft_s", "decode_s")), "truncated_tokens": None,
}  # fmt: skip


def test_two_turns_of_a_session(server):
    first = chat(server, "Hello, my name is Anna and I like long walks by the sea.")
    assert keys_of(first) == ANSWER_SHAPE
    assert (first["turn"], first["finish_reason"], first["truncated_tokens"]) == (1, "length", 0)
    assert first["usage"]["completion_tokens"] == SHORT["max_tokens"]
    assert all(seconds is not None for seconds in first["timings"].values())
    second = chat(server, "What is my name?", first["session_id"])
    assert (second["session_id"], second["turn"]) == (first["session_id"], 2)
    known = first["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] == cached["cached_tokens_details"]["hbm"] == (known - 1) // 16 * 16 > 0


def test_a_stream_says_the_same_as_the_whole(server):
    whole = chat(server, "Who are you?", max_tokens=12)
    events = Stream(server, "/chat", {"message": "Who are you?", **SHORT, "max_tokens": 12}).rest()
    first, *middle, last, done = events
    assert done == "[DONE]" and first["delta"] == {"role": "assistant", "content": ""}
    named = {name: first[name] for name in ("id", "session_id", "turn")}
    assert named["turn"] == 1 and named["session_id"] != whole["session_id"]
    assert all({**event, "delta": None} == {**named, "delta": None, "finish_reason": None} for event in middle)
    assert len(middle) > 3
    assert "".join(event["delta"]["content"] for event in middle) == whole["message"]["content"]
    assert last.pop("delta") == {} and keys_of(last) == ANSWER_SHAPE
    assert last["message"] == whole["message"] and {name: last[name] for name in named} == named


def test_a_history_may_begin_a_session(server):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Hello Anna."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "my name?"}]},
    ]
    first = server.post("/chat", {"messages": messages, **SHORT}).json()
    shown = server.get(f"/sessions/{first['session_id']}").json()
    assert shown["system"] == messages[0]
    said = [message["content"] for message in shown["messages"]]
    assert said[:3] == ["My name is Anna.", "Hello Anna.", "What is my name?"]
    assert chat(server, "And now?", first["session_id"], system="Be brief.")["turn"] == 2


def test_a_history_of_a_first_turn_has_a_bound(server):
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a b c " * 1000} for i in range(401)]
    reply = server.post("/chat", {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages")


def test_a_history_that_is_much_too_long_is_cut_in_few_steps(server, monkeypatch):
    rendered, known = [], Window._without

    def counted(self, *arguments):
        rendered.append(None)
        return known(self, *arguments)

    monkeypatch.setattr(Window, "_without", counted)
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"the message number {i}"} for i in range(1001)]
    reply = server.post("/chat", {"messages": messages, "max_tokens": 2})
    assert reply.status == 200, reply.body
    assert 0 < len(rendered) <= 15
    assert reply.json()["truncated_tokens"] > 0


def test_what_a_later_turn_may_not_bring(server):
    session_id = chat(server, "Hello", system="Be brief.")["session_id"]
    history = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    for body, param, code in (
        ({"messages": history}, "messages", "invalid_value"),
        ({"message": "a", "system": "Be long."}, "system", "system_mismatch"),
        ({"message": "a", "system": ""}, "system", "system_mismatch"),
    ):
        reply = server.post("/chat", {"session_id": session_id, **SHORT, **body})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)
    assert server.post("/chat", {"session_id": session_id, "message": "a", "model": "other"}).status == 404
    assert num_turns(server, session_id) == 1


# -- versions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_another_version_of_a_turn_is_a_fork_that_shares_what_came_before(server, turn):
    session_id = chat(server, "My name is Ada, and I like tea.", system="Be brief.")["session_id"]
    chat(server, "What is my name?", session_id)
    before = server.get(f"/sessions/{session_id}").json()
    version = chat(server, "What do I like?", fork_of={"session_id": session_id, "turn": turn})
    shown = server.get(f"/sessions/{version['session_id']}").json()
    assert (version["turn"], shown["system"]) == (turn + 1, {"role": "system", "content": "Be brief."})
    assert shown["parent"] == {"session_id": session_id, "turn": turn, "version": True}
    assert shown["messages"][: 2 * turn] == before["messages"][: 2 * turn]
    assert (version["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (turn > 0)
    assert server.get(f"/sessions/{session_id}").json() == before
    chat(server, "And now?", version["session_id"])


def test_a_version_that_fails_makes_no_session(server):
    session_id = chat(server, "Hello")["session_id"]
    fork_of = {"session_id": session_id, "turn": 1}
    before = server.get("/sessions").body
    for body, param in (
        ({"fork_of": {**fork_of, "turn": 2}}, "turn"),
        ({"fork_of": {**fork_of, "turn": -1}}, "fork_of.turn"),
        ({"fork_of": {**fork_of, "session_id": "../x"}}, "session_id"),
        ({"fork_of": fork_of, "session_id": session_id}, "fork_of"),
        ({"fork_of": fork_of, "create": True}, "fork_of"),
        ({"fork_of": fork_of, "system": "Be brief."}, "system"),
        ({"fork_of": fork_of, "message": "long " * 3000, "truncation": "disabled"}, None),
    ):
        reply = server.post("/chat", {"message": "a", **SHORT, **body})
        assert (reply.status, reply.error["param"] if param else None) == (400, param), reply.body
    stopped = Stream(server, "/chat", {"message": "Count.", "fork_of": fork_of, **LONG})
    stopped.next()
    stopped.leave()
    server.wait_until_idle()
    assert server.get("/sessions").body == before


@pytest.mark.parametrize("path", ["/chat", "/v1/responses"])
def test_a_version_is_there_once_its_turn_is_stored(server, path):
    session_id = chat(server, "Hello")["session_id"]
    chat(server, "Hello again", session_id)
    before = server.get("/sessions").body
    fork = {"message": "Count.", "fork_of": {"session_id": session_id, "turn": 1}, **LONG, "max_tokens": 30}
    response = {"input": "Count.", "previous_response_id": f"resp_{session_id}_1", "max_output_tokens": 30}
    with crawling(server.engine):
        running = Stream(server, path, fork if path == "/chat" else response)
        running.next(), running.next()
        assert server.get("/sessions").body == before
    running.rest()
    version = server.get("/sessions").json()["data"][0]
    assert version["turns"] == 2 and version["parent"]["session_id"] == session_id and version["parent"]["turn"] == 1


@pytest.mark.parametrize(("deed", "code"), [("delete", "session_not_found"), ("forget", "session_busy")])
def test_a_version_of_what_is_gone_meanwhile_is_not_stored(server, deed, code):
    session_id = chat(server, "My secret.")["session_id"]
    chat(server, "Hello again", session_id)
    with crawling(server.engine):
        running = Stream(
            server, "/chat", {"message": "Count.", "fork_of": {"session_id": session_id, "turn": 1}, **LONG}
        )
        version = running.next()["session_id"]
        if deed == "delete":
            server.request("DELETE", f"/sessions/{session_id}")
        else:
            edits = [{"type": "replace", "id": "1.0", "content": "Nothing."}]
            assert server.post(f"/sessions/{session_id}/edit", {"edits": edits, "reuse": "forget"}).status == 200
        server.post(f"/sessions/{version}/stop")
    assert running.rest()[-2]["error"]["code"] == code
    assert server.get(f"/sessions/{version}").status == 404
    server.wait_until_idle()


# -- names of a client's own -------------------------------------------------------------------------------------------
def test_a_name_of_the_client_s_creates_its_session_or_goes_on_with_it(both):
    alice, bob = both
    unknown = alice.post("/chat", {"session_id": "ada", "message": "Hello", **SHORT})
    assert (unknown.status, unknown.error["code"]) == (404, "session_not_found")
    first = chat(alice, "My name is Ada.", "ada", create=True, system="Be brief.")
    assert (first["session_id"], first["turn"]) == ("ada", 1)
    second = chat(alice, "What is my name?", "ada", create=True, system="Be brief.")
    assert second["turn"] == 2 and second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert chat(alice, "And now?", "ada")["turn"] == 3
    other = alice.post("/chat", {"session_id": "ada", "create": True, "message": "a", "system": "Be long."})
    assert (other.status, other.error["code"]) == (400, "system_mismatch")
    assert bob.get("/sessions/ada").status == 404
    assert chat(bob, "Hello", "ada", create=True)["turn"] == 1, "another tenant's name is another session"
    assert [num_turns(server, "ada") for server in both] == [3, 1]


@pytest.mark.parametrize("name", ["", "../ada", "a b", "x" * 129])
def test_a_bad_name_creates_nothing(server, name):
    reply = server.post("/chat", {"session_id": name, "create": True, "message": "Hello", **SHORT})
    assert (reply.status, reply.error["param"]) == (400, "session_id")


def test_a_name_that_two_create_at_once_is_one_session(server):
    body = {"session_id": "two", "create": True, "message": "Count."}
    with crawling(server.engine):
        running = Stream(server, "/chat", {**body, **LONG, "max_tokens": 60})
        running.next(), running.next()
        second = server.post("/chat", {**body, **SHORT})
    assert (second.status, second.error["code"]) == (409, "session_busy")
    assert running.rest()[-2]["turn"] == 1
    assert chat(server, "Count.", "two", create=True)["turn"] == 2


def test_a_name_is_known_after_a_restart_and_free_after_its_session_s_end(tmp_path):
    tiers = CacheTiers(hbm="16MiB", cpu="32MiB", disk="64MiB", path=tmp_path)
    with serving(engine={"cache_tiers": tiers}) as server:
        chat(server, "My name is Ada.", "ada", create=True)
        chat(server, "Hello", "over", create=True, ttl=1e-6)
    with serving(engine={"cache_tiers": tiers}, ttl_s=3600.0) as server:
        assert chat(server, "What is my name?", "ada", create=True)["turn"] == 2
        assert server.get("/sessions/ada").json()["expires_at"] is None, "the server's is for new ones"
        assert not server.engine.sessions.exists(SessionKey("", "over")), "who comes back clears away what has expired"
        chat(server, "Hello", "ada", ttl=1e-6)
        assert server.get("/sessions/ada").status == 404
        assert chat(server, "Hello", "ada", create=True)["turn"] == 1
        assert server.get("/sessions/ada").json()["expires_at"] is not None


# -- retries ---------------------------------------------------------------------------------------------------------
def test_the_same_key_gives_the_stored_answer(server):
    body = {"message": "Hello there", **SHORT, "temperature": 1.0}
    key = {"Idempotency-Key": "one request"}
    first, again = (server.request("POST", "/chat", body, key).json() for _ in range(2))
    assert again == first
    *events, done = Stream(server, "/chat", body, **key).rest()
    assert done == "[DONE]" and {**events[-1], "delta": None} == {**first, "delta": None}
    assert "".join(event["delta"].get("content", "") for event in events) == first["message"]["content"]
    later = {**body, "session_id": first["session_id"], "message": "More"}
    second = server.request("POST", "/chat", later, key | {"Idempotency-Key": "two"}).json()
    assert second["turn"] == 2
    chat(server, "Even more", first["session_id"])
    assert server.request("POST", "/chat", later, {"Idempotency-Key": "two"}).json() == second
    assert server.request("POST", "/chat", body, key).json() == first
    assert num_turns(server, first["session_id"]) == 3


def test_a_retry_of_a_turn_whose_answer_was_forgotten_gets_that_turn_without_it(server):
    body, key = {"message": "Hello there", **SHORT}, {"Idempotency-Key": "to be forgotten"}
    session_id = server.request("POST", "/chat", body, key).json()["session_id"]
    chat(server, "And now?", session_id)
    edits = [{"type": "remove", "id": "1.1"}, {"type": "remove", "id": "2.0"}]
    assert server.post(f"/sessions/{session_id}/edit", {"edits": edits, "reuse": "forget"}).status == 200
    again = server.request("POST", "/chat", body, key)
    assert again.status == 200, again.body
    assert (again.json()["session_id"], again.json()["turn"]) == (session_id, 1)
    assert again.json()["message"]["content"] == ""
    assert server.request("POST", "/chat", {**body, "message": "Bye"}, key).status == 400


def test_another_message_under_the_same_key_is_refused(server):
    key = {"Idempotency-Key": "of one message"}
    first = server.request("POST", "/chat", {"message": "Hello", "system": "Be brief.", **SHORT}, key).json()
    wrong = ({"message": "Bye", "system": "Be brief."}, {"message": "Hello"}, {"message": "Hello", "system": "No."})
    for body in wrong:
        reply = server.request("POST", "/chat", {**body, **SHORT}, key)
        assert (reply.status, reply.error["code"]) == (400, "idempotency_mismatch")
    assert num_turns(server, first["session_id"]) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "café", "a\tb"])
def test_a_key_that_is_none_is_refused(server, key):
    reply = server.request("POST", "/chat", {"message": "a"}, {"Idempotency-Key": key})
    assert (reply.status, reply.error["param"]) == (400, "Idempotency-Key")


def test_a_retry_waits_for_the_first_one(server):
    body, key = {"message": "Count.", **LONG, "max_tokens": 60}, {"Idempotency-Key": "at once"}
    running = Stream(server, "/chat", body, **key)
    session_id = running.next()["session_id"]
    with ThreadPoolExecutor(3) as pool:
        with held(server.engine):
            retries = [pool.submit(server.request, "POST", "/chat", body, key) for _ in range(3)]
            server.wait_until(lambda: server.context.limits.num_open == 4, "all are there")
        last = running.rest()[-2]
        answers = [retry.result().json() for retry in retries]
    del last["delta"]
    assert answers == [last] * 3
    assert num_turns(server, session_id) == 1


def test_a_retry_of_one_that_failed_runs_itself(server):
    body, key = {"message": "Count.", **LONG, "max_tokens": 60}, {"Idempotency-Key": "left"}
    with ThreadPoolExecutor(1) as pool:
        with crawling(server.engine):
            running = Stream(server, "/chat", body, **key)
            session_id = running.next()["session_id"]
            retry = pool.submit(server.request, "POST", "/chat", body, key)
            server.wait_until(lambda: server.context.limits.num_open == 2, "both are there")
            running.leave()
            server.wait_until(lambda: server.context.limits.num_open == 1, "the first is gone")
        answer = retry.result().json()
    assert answer["session_id"] == session_id and answer["turn"] == 1
    assert answer["usage"]["completion_tokens"] == 60
    assert num_turns(server, session_id) == 1


# -- ends ------------------------------------------------------------------------------------------------------------
def test_stop_keeps_what_was_said(server):
    with crawling(server.engine):
        running = Stream(server, "/chat", {"message": "Count.", **LONG})
        session_id = running.next()["session_id"]
        said = [running.next()["delta"]["content"] for _ in range(3)]
        assert server.get(f"/sessions/{session_id}").json()["turns"] == 0  # its first turn is just making it
        assert server.post(f"/sessions/{session_id}/stop").json() == {"id": session_id, "stopped": True}
    *_, last, done = running.rest()
    assert done == "[DONE]" and last["finish_reason"] == "abort"
    assert last["message"]["content"].startswith("".join(said))
    assert last["usage"]["completion_tokens"] < LONG["max_tokens"]
    kept = server.get(f"/sessions/{session_id}").json()["messages"][-1]
    assert kept == {**last["message"], "id": "1.1"}
    assert chat(server, "Go on", session_id)["turn"] == 2


def test_a_stop_that_comes_before_the_turn_has_begun_counts(server):
    key = SessionKey("alice", chat(server, "Hello")["session_id"])
    claims, may = server.context.claims, threading.Event()
    with ThreadPoolExecutor(1) as pool, before_each(server.engine.client, "submit", lambda: may.wait(TIMEOUT_S)):
        answer = pool.submit(server.post, "/chat", {"session_id": key.session_id, "message": "Count.", **LONG})
        server.wait_until(lambda: claims.on(key) is not None, "it has its session")
        assert claims.on(key).turn is None
        server.run(claims.on(key).owner.stop())
        may.set()
        result = answer.result().json()
    assert result["finish_reason"] == "abort" and result["usage"]["completion_tokens"] < LONG["max_tokens"]
    assert num_turns(server, key.session_id) == (result["turn"] or 1)


def test_a_turn_that_ends_in_the_queue_leaves_nothing():
    with serving(engine={"max_num_seqs": 1}) as server, crawling(server.engine):
        running = Stream(server, "/chat", {"message": "Count.", **LONG})
        running.next(), running.next()
        waiting = Stream(server, "/chat", {"message": "Count.", **LONG})
        session_id = waiting.next()["session_id"]
        assert server.post(f"/sessions/{session_id}/stop").json()["stopped"]
        last, done = waiting.rest()
        assert done == "[DONE]" and last["finish_reason"] == "abort"
        assert (last["turn"], last["session_id"], last["message"]["content"]) == (None, None, "")
        assert server.get(f"/sessions/{session_id}").status == 404
        left = Stream(server, "/chat", {"message": "Count.", **LONG})
        left.next()
        left.leave()
        server.wait_until(lambda: server.context.limits.num_admitted == 1, "the one that left is gone")
        running.leave()
        server.wait_until_idle()
        assert server.get("/sessions").json()["data"] == []


# -- windows and times -----------------------------------------------------------------------------------------------


def test_ttl_is_the_session_s(server):
    now = time.time()
    kept = chat(server, "Hello", ttl=3600)["session_id"]
    expires = server.get(f"/sessions/{kept}").json()["expires_at"]
    assert now + 3590 < expires < time.time() + 3610
    chat(server, "Hello", kept)
    assert server.get(f"/sessions/{kept}").json()["expires_at"] >= expires
    chat(server, "Hello", kept, ttl=None)
    assert server.get(f"/sessions/{kept}").json()["expires_at"] is None
    short = chat(server, "Hello", ttl=1e-6)["session_id"]
    assert server.get(f"/sessions/{short}").status == 404
    assert server.post("/chat", {"session_id": short, "message": "a"}).status == 404


@pytest.mark.parametrize("create", [False, True])
def test_a_session_that_has_expired_does_not_go_on(server, create):
    """By POST /chat alone: nobody has looked at it before."""
    name, key, said = f"over-{create}", {"Idempotency-Key": "dead"}, {"message": "My secret.", **SHORT}
    first = server.request("POST", "/chat", {"session_id": name, "create": True, "ttl": 1e-6, **said}, key)
    assert first.json()["turn"] == 1
    for headers in ({}, key):
        gone = server.request("POST", "/chat", {"session_id": name, **said}, headers)
        assert (gone.status, gone.error["code"]) == (404, "session_not_found")
    if create:
        body = {"session_id": name, "create": True, "message": "What did I say?", **SHORT}
        anew = server.request("POST", "/chat", body, key).json()
        assert anew["turn"] == 1 and num_turns(server, name) == 1


def test_a_retry_of_a_turn_whose_session_has_expired_begins_another_one(server):
    key, times = {"Idempotency-Key": "expired"}, []
    for text in ("Hello", "Bye"):
        times.append(server.request("POST", "/chat", {"message": text, "ttl": 1e-6, **SHORT}, key).json())
    assert times[0]["session_id"] == times[1]["session_id"] and times[1]["turn"] == 1


def test_a_session_that_has_expired_is_not_in_the_list(server):
    before = server.get("/sessions").body
    chat(server, "Hello", ttl=1e-6)
    assert server.get("/sessions").body == before


def test_the_time_to_live_is_stored_with_the_turn_and_new_sessions_get_the_server_s():
    with serving(ttl_s=3600.0) as server:
        committed = server.engine.sessions.stats()["committed"]
        session_id = chat(server, "Hello")["session_id"]
        for ttl in (60, None):
            chat(server, "Hello", session_id, ttl=ttl)
        version = chat(server, "Hello", fork_of={"session_id": session_id, "turn": 1}, ttl=60)["session_id"]
        assert server.engine.sessions.stats()["committed"] == committed + 4
        assert [server.get(f"/sessions/{one}").json()["expires_at"] is None for one in (session_id, version)] == [
            True, False,
        ]  # fmt: skip
        assert server.get(f"/sessions/{chat(server, 'Hello')['session_id']}").json()["expires_at"] is not None
        assert server.get(f"/sessions/{chat(server, 'Hello', ttl=None)['session_id']}").json()["expires_at"] is None
