"""The routes of sessions: lists and pages, forks, truncation, pins, deletion; and that nobody sees another's."""

import time
from functools import partial

import msgspec
import pytest

from kvstore.admin.shared import ask_shared
from kvstore.sessions.record import SessionKey
from tests.support.by_hand import crawling, held
from tests.support.faults import before_each
from tests.support.service.serving import raw_request, serving
from tests.support.service.talking import LONG, Stream, chat, num_turns, without_ids

TALK = ["Hello there, my name is Anna.", "I like long walks by the sea.", "What is my name?", "And what do I like?"]

REMOVE = [{"type": "remove", "index": 2}, {"type": "remove", "index": 3}]


def talk(server, *texts, **body):
    """A session with these turns."""
    session_id = None
    for text in texts or TALK:
        session_id = chat(server, text, session_id, **body)["session_id"]
    return session_id


def test_the_list_has_pages_the_last_used_first(both):
    _, server = both
    made = [talk(server, f"Session {number}") for number in range(5)]
    chat(server, "Again", made[1])
    expected = [made[1], made[4], made[3], made[2], made[0]]
    page = server.get("/sessions?limit=2").json()
    assert page["object"] == "list" and page["has_more"] is True
    listed = [one["id"] for one in page["data"]]
    while page["has_more"]:
        page = server.get(f"/sessions?limit=2&after={page['last_id']}").json()
        listed += [one["id"] for one in page["data"]]
    assert listed == expected
    first = server.get("/sessions").json()["data"][0]
    assert first == {
        "id": made[1], "title": "Session 1", "turns": 2, "created_at": first["created_at"],
        "updated_at": first["updated_at"], "tokens": first["tokens"], "model": "kvstore-builtin", "expires_at": None,
        "parent": None, "running": False, "pinned_until": None, "personal": False,
    }  # fmt: skip
    assert first["created_at"] <= first["updated_at"] and first["tokens"] > 10
    assert server.get(f"/sessions?after={page['last_id']}").json() == {
        "object": "list", "data": [], "has_more": False, "last_id": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("after=x", "after"),
        ("after=%00", "after"),
        ("personal=yes", "personal"),
    ],
)
def test_bad_pages_are_named(server, query, param):
    reply = server.get(f"/sessions?{query}")
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "invalid_value")


def test_a_session_is_shown_in_pages_of_turns(server):
    session_id = talk(server, system="Be brief.")
    whole = server.get(f"/sessions/{session_id}").json()
    assert whole["system"] == {"role": "system", "content": "Be brief."} and whole["has_more"] is False
    assert [message["content"] for message in whole["messages"][::2]] == TALK
    assert [turn["turn"] for turn in whole["turns_data"]] == [1, 2, 3, 4]
    assert [message for turn in whole["turns_data"] for message in turn["messages"]] == whole["messages"]
    page = server.get(f"/sessions/{session_id}?turns_after=1&limit=2").json()
    assert page["turns_data"] == whole["turns_data"][1:3] and page["messages"] == whole["messages"][2:6]
    assert page["has_more"] is True
    assert server.get(f"/sessions/{session_id}?turns_after=2&limit=2").json()["has_more"] is False
    assert server.get(f"/sessions/{session_id}?turns_after=9").json()["turns_data"] == []
    for query in ("turns_after=-1", "limit=0", "limit=1.5"):
        assert server.get(f"/sessions/{session_id}?{query}").error["param"] == query.split("=")[0]


def test_a_stored_turn_says_what_its_answer_said(server):
    answer = chat(server, "Hello")
    (stored,) = server.get(f"/sessions/{answer['session_id']}").json()["turns_data"]
    assert {name: stored[name] for name in ("turn", "finish_reason", "usage", "timings", "truncated_tokens")} == {
        name: answer[name] for name in ("turn", "finish_reason", "usage", "timings", "truncated_tokens")
    }
    assert stored["messages"] == [{"role": "user", "content": "Hello", "id": "1.0"}, {**answer["message"], "id": "1.1"}]


# -- whose -----------------------------------------------------------------------------------------------------------
ROUTES_OF_ONE = [
    ("GET", "", None), ("DELETE", "", None), ("POST", "/fork", {"turn": 1}), ("POST", "/fork", {}),
    ("POST", "/prefetch", {}), ("POST", "/pin", {"ttl": 60}), ("POST", "/truncate", {"turns": 1}),
    ("POST", "/stop", {}), ("POST", "/label", {"title": "a"}), ("POST", "/edit", {"edits": REMOVE}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), ROUTES_OF_ONE)
@pytest.mark.parametrize("session_id", ["..%2F..%2Fetc%2Fpasswd", "%C3%A9", "a" * 129, "a.b", "%20", "a%00"])
def test_what_is_no_id_is_400(server, method, path, body, session_id):
    reply = server.request(method, f"/sessions/{session_id}{path}", body)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "session_id", "invalid_value")


def test_a_running_first_turn_is_its_owner_s_only(both):
    alice, bob = both
    with crawling(alice.engine):
        running = Stream(alice, "/chat", {"message": "Count.", **LONG})
        session_id = running.next()["session_id"]
        running.next()
        with held(alice.engine):
            assert bob.post(f"/sessions/{session_id}/stop").status == 404
            assert bob.get(f"/sessions/{session_id}").status == 404
            assert bob.post("/chat", {"session_id": session_id, "message": "a"}).status == 404
            assert alice.get(f"/sessions/{session_id}").json()["running"] is True
            refused = alice.post("/chat", {"session_id": session_id, "message": "And I?"})
            assert (refused.status, refused.error["code"]) == (409, "session_busy")
            assert refused.headers["x-should-retry"] == "false"
        deleted = alice.request("DELETE", f"/sessions/{session_id}")
    assert deleted.json()["blocks"] == 0
    assert running.rest()[-2]["error"]["code"] == "session_not_found"
    alice.wait_until_idle()


@pytest.mark.parametrize(("path", "body", "param"), [
    ("fork", {"turn": 0}, "turn"), ("fork", {"turn": 9}, "turn"), ("fork", {"turn": "1"}, "turn"),
    ("pin", {}, "ttl"), ("pin", {"ttl": -1}, "ttl"), ("pin", {"ttl": 1e9}, "ttl"),
    ("label", {"title": ""}, "title"), ("label", {"title": "a" * 201}, "title"), ("label", {"personal": 1}, "personal"),
    ("truncate", {}, "turns"), ("truncate", {"turns": -1}, "turns"), ("truncate", {"turns": 1.5}, "turns"),
    ("edit", {}, "edits"), ("edit", {"edits": []}, "edits"), ("edit", {"edits": [{"type": "move"}]}, "edits[0].type"),
    ("edit", {"edits": REMOVE}, "edits[0].index"), ("edit", {"edits": [{"type": "remove", "index": 1}]}, "edits"),
    ("edit", {"edits": REMOVE, "reuse": "all"}, "reuse"),
    ("edit", {"edits": REMOVE, "expected_turn": 0}, "expected_turn"),
    ("edit", {"edits": [{"type": "replace", "index": 0, "content": "a" * 3_000_000}]}, "edits[0].content"),
])  # fmt: skip
def test_bad_bodies_are_named(server, path, body, param):
    session_id = talk(server, "Hello")
    reply = server.post(f"/sessions/{session_id}/{path}", body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.request("POST", f"/sessions/{session_id}/{path}", b"{").status == 400
    assert server.request("GET", f"/sessions/{session_id}/{path}").status == 405


# -- what they do ----------------------------------------------------------------------------------------------------
def test_deleting_takes_everything(server):
    session_id = talk(server)
    key = SessionKey("alice", session_id)
    block_ids = server.engine.sessions.unshared_blocks_of(key)
    deleted = server.request("DELETE", f"/sessions/{session_id}").json()
    assert deleted == {"id": session_id, "deleted": True, "blocks": len(block_ids)} and block_ids
    assert all(server.engine.loop.pool.lookup(block_id) is None for block_id in block_ids)
    assert server.get(f"/sessions/{session_id}").status == 404
    assert server.request("DELETE", f"/sessions/{session_id}").status == 404
    assert server.post("/chat", {"session_id": session_id, "message": "a"}).status == 404


def test_a_fork_goes_its_own_way(server):
    session_id = talk(server)
    fork = server.post(f"/sessions/{session_id}/fork", {"turn": 2}).json()
    assert fork["turns"] == 2 and fork["id"] != session_id
    assert fork["parent"] == {"session_id": session_id, "turn": 2, "version": False}
    shown = server.get(f"/sessions/{fork['id']}").json()
    original = server.get(f"/sessions/{session_id}").json()
    assert shown["messages"] == original["messages"][:4]
    turn = chat(server, "Something else", fork["id"])
    assert turn["turn"] == 3 and turn["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.get(f"/sessions/{session_id}").json() == original
    bare = server.request("POST", f"/sessions/{session_id}/fork")  # without a body: all turns
    assert bare.status == 200 and bare.json()["turns"] == 4
    server.request("DELETE", f"/sessions/{session_id}")
    assert num_turns(server, fork["id"]) == 3
    assert chat(server, "More", fork["id"])["turn"] == 4


def shown_pins(server, session_id) -> list[int | None]:
    """Of the list, and of the session itself."""
    listed = next(one for one in server.get("/sessions").json()["data"] if one["id"] == session_id)
    return [listed["pinned_until"], server.get(f"/sessions/{session_id}").json()["pinned_until"]]


def test_prefetch_and_pin(server):
    session_id = talk(server)
    reply = server.request("POST", f"/sessions/{session_id}/prefetch")
    assert (reply.status, reply.json()) == (202, {"id": session_id, "prefetching": True})
    before_s = time.time()
    pinned = server.post(f"/sessions/{session_id}/pin", {"ttl": 60}).json()
    assert pinned == {"id": session_id, "pinned": True, "pinned_until": pinned["pinned_until"]}
    assert before_s + 59 <= pinned["pinned_until"] <= time.time() + 61
    assert shown_pins(server, session_id) == [pinned["pinned_until"]] * 2
    fork = server.post(f"/sessions/{session_id}/fork").json()
    assert fork["pinned_until"] is None and shown_pins(server, fork["id"]) == [None] * 2
    ended = server.post(f"/sessions/{session_id}/pin", {"ttl": 0}).json()
    assert ended == {"id": session_id, "pinned": False, "pinned_until": None}
    assert shown_pins(server, session_id) == [None] * 2


def test_stop_where_nothing_runs(server):
    session_id = talk(server, "Hello")
    assert server.request("POST", f"/sessions/{session_id}/stop").json() == {"id": session_id, "stopped": False}


@pytest.mark.parametrize(("path", "body"), [("edit", {"edits": REMOVE}), ("truncate", {"turns": 1})])
def test_a_stop_ends_no_change_of_a_session_and_says_so(server, path, body):
    session_id, told = talk(server), []

    def stop():
        assert server.context.claims.on(SessionKey("alice", session_id)) is not None
        told.append(server.post(f"/sessions/{session_id}/stop").json())

    with before_each(server.engine.sessions, "commit_turn", stop):
        assert server.post(f"/sessions/{session_id}/{path}", body).json()["turn"] == 5
    assert told == [{"id": session_id, "stopped": False}]


# -- edits -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiered():
    with serving(engine={"cache_tiers": {"hbm": "8MiB", "cpu": "32MiB"}}) as server:
        yield server


@pytest.mark.parametrize("reuse", ["exact", "reencode", "forget"])
def test_a_turn_is_taken_back(tiered, reuse):
    server = tiered
    session_id = talk(server)
    before = server.get(f"/sessions/{session_id}").json()
    for number in (3, 99):
        busy = server.post(f"/sessions/{session_id}/edit", {"edits": REMOVE, "expected_turn": number})
        assert (busy.status, busy.error["code"]) == (409, "session_busy")
        assert f"has 4 turns, not {number}" in busy.error["message"]
    wrong = server.post(f"/sessions/{session_id}/edit", {"edits": REMOVE, "reuse": "all"})
    assert (wrong.status, wrong.error["message"]) == (400, "reuse is 'all'; give one of exact, reencode, forget")
    assert server.get(f"/sessions/{session_id}").json() == before
    answer = server.post(f"/sessions/{session_id}/edit", {"edits": REMOVE, "reuse": reuse, "expected_turn": 4}).json()
    after = server.get(f"/sessions/{session_id}").json()
    assert answer == {
        "id": session_id, "turn": 5, "reuse": reuse, "tokens": after["tokens"],
        "reencoded_tokens": answer["reencoded_tokens"],
    }  # fmt: skip
    assert after["tokens"] < before["tokens"] and (answer["reencoded_tokens"] > 0) == (reuse == "reencode")
    entry = after["turns_data"][-1]
    assert (entry["messages"], entry["finish_reason"]) == ([], "edited")
    assert after["messages"] == before["messages"][:2] + before["messages"][4:]
    if reuse == "forget":
        assert (after["turns_data"][1]["messages"], entry["edits"]) == ([], [])
    else:
        assert after["turns_data"][:4] == before["turns_data"]
        assert entry["edits"] == [{"id": "2.0", "message": None}, {"id": "2.1", "message": None}]
    turn = chat(server, "Go on", session_id)
    assert turn["turn"] == 6 and turn["usage"]["prompt_tokens"] > after["tokens"]
    details = turn["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    assert details["reencoded"] == answer["reencoded_tokens"]


def test_a_fork_does_not_end_with_a_question_whose_answer_was_forgotten(server):
    session_id = talk(server)
    edits = [{"type": "remove", "id": "2.1"}, {"type": "remove", "id": "3.0"}]
    assert server.post(f"/sessions/{session_id}/edit", {"edits": edits, "reuse": "forget"}).status == 200
    before = server.get("/sessions").body
    reply = server.post(f"/sessions/{session_id}/fork", {"turn": 2})
    assert (reply.status, reply.error["param"]) == (400, "turn") and "turn 2 was forgotten" in reply.error["message"]
    version = server.post("/chat", {"fork_of": {"session_id": session_id, "turn": 2}, "message": "Hi"})
    assert version.status == 400 and server.get("/sessions").body == before
    for turn in (1, 3, 5):
        fork = server.post(f"/sessions/{session_id}/fork", {"turn": turn}).json()["id"]
        assert chat(server, "Go on", fork)["turn"] == turn + 1


def test_without_a_tier_below_hbm_all_is_computed_and_the_answer_says_so(server):
    session_id = talk(server)
    answer = server.post(f"/sessions/{session_id}/edit", {"edits": REMOVE, "reuse": "reencode"}).json()
    assert (answer["reuse"], answer["reencoded_tokens"]) == ("exact", 0)
    miss = chat(server, "Go on", session_id)["usage"]["prompt_tokens_details"]["miss"]
    assert (miss["cause"], miss["message"], miss["role"]) == ("edit", 2, "user")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_messages_of_a_session_are_what_edits_name(server, system):
    """By their ids, and by their places behind the system prompt, after earlier edits, in pages of any length."""
    session_id = talk(server, **({} if system is None else {"system": system}))
    num_before = int(system is not None)
    for number in range(3):
        shown = server.get(f"/sessions/{session_id}").json()["messages"]
        last = shown[-1 - 2 * number]
        name = {"index": len(shown) - 1 - 2 * number + num_before} if number else {"id": last["id"]}
        edits = [{"type": "replace", "content": f"New {number}.", **name}]
        edits += [{"type": "remove", "id": one["id"]} for one in shown[:2]] if number == 1 else []
        assert server.post(f"/sessions/{session_id}/edit", {"edits": edits}).status == 200
        left = server.get(f"/sessions/{session_id}").json()["messages"]
        assert left == [
            {**one, "content": f"New {number}."} if one == last else one for one in shown[2 * (number == 1) :]
        ]
    pages = [server.get(f"/sessions/{session_id}?turns_after={after}&limit=2").json() for after in (0, 2, 4, 6)]
    assert [message for page in pages for message in page["messages"]] == left
    assert server.engine.chat(session_id, "alice").messages[num_before:] == without_ids(left)


def test_another_text_for_a_message(server):
    session_id = talk(server, system="Be brief.")
    edits = [{"type": "replace", "id": "1.1", "content": "Hello there, my name is Bob."}]
    assert server.post(f"/sessions/{session_id}/edit", {"edits": edits}).json()["turn"] == 5
    (edit,) = server.get(f"/sessions/{session_id}?turns_after=4").json()["turns_data"][0]["edits"]
    assert edit == {"id": "1.1", "message": {"role": "user", "content": "Hello there, my name is Bob."}}
    said = chat(server, "What is my name?", session_id, temperature=0, max_tokens=12)
    assert said["message"]["content"] and said["turn"] == 6


@pytest.mark.parametrize(("path", "body"), [("edit", {"edits": REMOVE}), ("truncate", {"turns": 1})])
def test_a_change_whose_client_has_gone_holds_its_session_to_the_end(server, path, body):
    session_id = talk(server)
    key, limits, told = SessionKey("alice", session_id), server.context.limits, []
    connection = server.connect()

    def gone():
        connection.close()
        server.wait_until(lambda: limits.num_open == 0, "the server has noticed")
        told.append(server.context.claims.on(key))

    with before_each(server.engine.sessions, "commit_turn", gone):
        sent = msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {server.key}", "Content_Type": "application/json"}
        connection.sendall(raw_request("POST", f"/sessions/{session_id}/{path}", sent, **headers))
        server.wait_until(lambda: told, "it was stored")
    assert told != [None]
    server.wait_until(lambda: server.context.claims.on(key) is None, "the session is free")
    assert chat(server, "Go on", session_id)["turn"] == 6


# -- truncation ------------------------------------------------------------------------------------------------------
def test_truncation_takes_the_oldest_turns_out_of_the_window(server):
    session_id = talk(server)
    before = server.get(f"/sessions/{session_id}").json()
    answer = server.post(f"/sessions/{session_id}/truncate", {"turns": 2}).json()
    assert answer["id"] == session_id and answer["turn"] == 5 and answer["truncated_tokens"] > 10
    after = server.get(f"/sessions/{session_id}").json()
    assert after["messages"] == before["messages"] and after["turns"] == 5
    assert after["tokens"] == before["tokens"] - answer["truncated_tokens"]
    entry = after["turns_data"][-1]
    assert entry["messages"] == [] and entry["finish_reason"] == "truncated"
    assert entry["truncated_tokens"] == answer["truncated_tokens"]
    turn = chat(server, "Go on", session_id)
    assert turn["turn"] == 6 and turn["truncated_tokens"] == 0
    assert turn["usage"]["prompt_tokens"] < before["tokens"]
    again = server.post(f"/sessions/{session_id}/truncate", {"turns": 3}).json()
    assert again == {"id": session_id, "turn": None, "truncated_tokens": 0}


def test_everything_can_be_taken_out(server):
    session_id = talk(server, *TALK[:2], system="Be brief.")
    answer = server.post(f"/sessions/{session_id}/truncate", {"turns": 0}).json()
    assert answer["turn"] == 3 and answer["truncated_tokens"] > 10
    turn = chat(server, TALK[2], session_id)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TALK[2]}]
    assert turn["usage"]["prompt_tokens"] == chat_tokens(server, messages)
    assert chat(server, TALK[3], session_id)["turn"] == 5


def chat_tokens(server, messages):
    """Tokens of a prompt; those of the session's answers, which were cut off, are as many by the way they are made."""
    return server.post("/tokenize", {"messages": messages}).json()["count"]


def test_a_full_server_takes_nothing_more_not_even_to_tokenize_and_still_knows_no_unknown_session():
    with serving(max_queue=1) as full:
        with crawling(full.engine):
            stream = Stream(full, "/chat", {"message": "Hello", **LONG})
            session_id = stream.next()["session_id"]
            with held(full.engine):
                for path, body in (
                    ("/chat", {"message": "Hi"}), ("/chat", {"message": "Hi", "session_id": session_id}),
                    ("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [300]}),
                ):  # fmt: skip
                    assert full.post(path, body).error["code"] == "server_overloaded", path
                reply = full.post("/chat", {"message": "Hi", "session_id": "nobody"})
                assert (reply.status, reply.error["code"]) == (404, "session_not_found")
        stream.leave()


def test_a_fork_of_what_another_server_deletes_meanwhile_is_unknown(redis):
    """Seen while it is looked up, gone when it is copied."""
    responded = {"previous_response_id": "resp_{}_1", "input": "x"}
    with serving(engine={"session_store": redis.url, "session_durability": "unchecked"}) as server:
        for path, verb, body in (("/sessions/{}/fork", "fork", {}), ("/v1/responses", "commit_turn", responded)):
            session_id = talk(server, "One.", "Two.")
            delete = partial(ask_shared, redis.url, "sessions.delete", {"session": {"session_id": session_id}})
            body = {name: str(value).format(session_id) for name, value in body.items()}
            with before_each(server.engine.sessions, verb, delete):
                reply = server.post(path.format(session_id), body)
            assert (reply.status, reply.error["code"]) == (404, "session_not_found"), path


# -- people's --------------------------------------------------------------------------------------------------------
def test_a_label_says_what_it_is_called_and_whose_it_is(both):
    _, server = both
    session_id, programs = talk(server, "Hello"), talk(server, "I am a program")
    before = server.get(f"/sessions/{session_id}").json()
    labelled = server.post(f"/sessions/{session_id}/label", {"title": "Greetings", "personal": True}).json()
    assert (labelled["title"], labelled["personal"], labelled["updated_at"]) == (
        "Greetings",
        True,
        before["updated_at"],
    )
    assert server.post(f"/sessions/{session_id}/label", {}).json() == labelled
    chat(server, "Hello again", session_id)
    fork = server.post(f"/sessions/{session_id}/fork").json()
    assert (fork["title"], fork["personal"]) == ("Greetings", True)
    personal, other = (
        [one["id"] for one in server.get(f"/sessions?personal={value}").json()["data"]] for value in ("true", "false")
    )
    assert personal == [fork["id"], session_id] and programs in other and not {*personal} & {*other}
    page = server.get("/sessions?personal=true&limit=1").json()
    assert page["has_more"] is True
    rest = server.get(f"/sessions?personal=true&limit=1&after={page['last_id']}").json()
    assert [one["id"] for one in rest["data"]] == [session_id] and rest["has_more"] is False


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My name is Anna."}, {"role": "assistant", "content": "Hello Anna."},
    {"role": "user", "content": "I like tea."}, {"role": "assistant", "content": "So do I."},
]  # fmt: skip


def test_a_conversation_from_elsewhere_is_taken_in_and_goes_on(server):
    made = server.post("/sessions", {"messages": HISTORY, "title": "Anna", "personal": True}).json()
    assert (made["title"], made["turns"], made["personal"], made["tokens"]) == ("Anna", 2, True, 0)
    shown = server.get(f"/sessions/{made['id']}").json()
    assert [shown["system"], *without_ids(shown["messages"])] == HISTORY
    assert [turn["usage"]["prompt_tokens"] for turn in shown["turns_data"]] == [0, 0]
    turn = chat(server, "What is my name?", made["id"])
    whole = server.post("/v1/chat/completions", {
        "messages": [*HISTORY, {"role": "user", "content": "What is my name?"}], "max_tokens": 1,
    }).json()  # fmt: skip
    assert turn["turn"] == 3 and turn["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    fork = chat(server, "I like milk.", fork_of={"session_id": made["id"], "turn": 1})
    assert fork["turn"] == 2
    assert server.engine.sessions.check().problems == ()


def test_an_import_is_made_once_under_a_key(server):
    made = [server.post("/sessions", {"messages": HISTORY}, **{"Idempotency-Key": "import"}).json() for _ in range(2)]
    assert made[0] == made[1] and made[0]["title"] == "My name is Anna."
    chat(server, "What is my name?", made[0]["id"])
    again = server.post("/sessions", {"messages": HISTORY}, **{"Idempotency-Key": "import"}).json()
    assert (again["id"], again["turns"]) == (made[0]["id"], 3)
    other_end = {"role": "assistant", "content": "I do not."}
    for other in (HISTORY[:3], HISTORY[1:], HISTORY + HISTORY[1:], [*HISTORY[:4], other_end]):
        reply = server.post("/sessions", {"messages": other}, **{"Idempotency-Key": "import"})
        assert (reply.status, reply.error["code"]) == (400, "idempotency_mismatch"), other


def test_an_import_is_one_change():
    """So that what is there after a kill is all of it, and a retry finds nothing else."""
    with serving(ttl_s=3600.0) as server:
        before = server.engine.sessions.stats()["committed"]
        made = server.post("/sessions", {"messages": HISTORY, "title": "Anna", "personal": True}).json()
        assert (made["turns"], made["title"], made["personal"], made["expires_at"] is None) == (2, "Anna", True, False)
        assert server.engine.sessions.stats()["committed"] == before + 1


def test_an_import_that_another_try_was_faster_with_answers_with_that(server):
    """It has looked, and found nothing; then both store it."""
    key, made = {"Idempotency-Key": "at once"}, []

    def first():
        if not made:
            made.append(None)
            made[0] = server.post("/sessions", {"messages": HISTORY}, **key).json()

    with before_each(server.engine.sessions, "commit_turn", first):
        assert server.post("/sessions", {"messages": HISTORY}, **key).json() == made[0]


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), (HISTORY[:2], "messages"), (HISTORY[1:] + HISTORY, "messages[4].role"),
    ([{"role": "king", "content": "a"}], "messages[0].role"),
])  # fmt: skip
def test_what_is_no_conversation_is_not_taken_in(server, messages, param):
    before = server.get("/sessions").body
    reply = server.post("/sessions", {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert server.get("/sessions").body == before
