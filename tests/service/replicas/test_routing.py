"""Which replica a request should go to."""

import json

import pytest

from kvstore.service.replicas.routing import affinity_of

KEY = b"k" * 32
SYSTEM, HELLO = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}
ANSWER, MORE = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}
CHAT = "/v1/chat/completions"


def key_of(path, body=None, tenant="", **headers):
    method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
    return affinity_of(method, path, headers, data, tenant, KEY).key


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions/abc", None),
        ("/sessions/abc/stop", {}),
        ("/v1/responses/resp_abc_3", None),
        ("/v1/responses/resp_abc_3/input_items", None),
        ("/v1/responses/resp_abc_3/cancel", {}),
        ("/v1/responses/compact", {"previous_response_id": "resp_abc_7"}),
        ("/chat", {"message": "Hello.", "session_id": "abc", "user": "somebody"}),
        ("/v1/responses", {"input": "Hello.", "previous_response_id": "resp_abc_7", "prompt_cache_key": "other"}),
        ("/v1/responses", {"input": "Hello.", "conversation": {"id": "abc"}}),
        ("/v1/responses/compact", {"input": "Hello.", "conversation": {"id": "abc"}}),
    ],
)
def test_all_that_names_a_session_goes_where_it_goes(path, body):
    assert key_of(path, body) == "abc"
    assert affinity_of("POST", path, {}, json.dumps(body).encode(), "", KEY).new_session is None


@pytest.mark.parametrize("path", ["/chat", "/v1/responses"])
def test_a_new_session_has_its_id_from_here_and_so_goes_where_its_next_turn_will_go(path):
    found = [affinity_of("POST", path, {}, b"{}", "", KEY) for _ in range(2)]
    assert all(one.key == one.new_session and len(one.key) == 32 for one in found)
    assert found[0] != found[1]
    assert affinity_of("POST", path, {}, b"{}", "", None).new_session is None  # servers choose it


def test_a_retry_of_a_first_turn_has_the_same_session_in_every_front_but_not_for_another_tenant():
    def named(key=KEY, path="/chat", tenant="", **headers):
        return affinity_of("POST", path, {"idempotency-key": "1", **headers}, b"{}", tenant, key).new_session

    assert named() == named() == named(authorization="bearer  another of its keys")
    others = [named(b"x" * 32), named(path="/v1/responses"), named(tenant="other")]
    assert len({named(), *others}) == 4


def test_histories_of_one_conversation_go_to_one_replica():
    first, later = [SYSTEM, HELLO], [SYSTEM, HELLO, ANSWER, MORE]
    assert key_of(CHAT, {"messages": first}) == key_of(CHAT, {"messages": later}) != ""
    assert key_of(CHAT, {"messages": first}) != key_of(CHAT, {"messages": [SYSTEM, MORE]})
    assert key_of(CHAT, {"messages": first}) != key_of(CHAT, {"messages": first}, tenant="other")
    unstored = {"input": later, "store": False}
    assert key_of("/v1/responses", unstored) == key_of(CHAT, {"messages": first})
    assert key_of("/v1/responses/compact", {"input": later}) == key_of(CHAT, {"messages": first})


def test_what_a_client_names_goes_before_the_history():
    body, header = {"messages": [HELLO], "prompt_cache_key": "mine", "user": "ada"}, {"x-session-id": "header"}
    mine = key_of(CHAT, body)
    assert mine == key_of(CHAT, {**body, "messages": [MORE], "user": "other"})
    assert mine != key_of(CHAT, body, tenant="other"), "a name is its tenant's"
    of_user, of_header = key_of(CHAT, {**body, "prompt_cache_key": None}), key_of(CHAT, body, **header)
    assert of_user == key_of(CHAT, {"user": "ada", "messages": [MORE]})
    assert of_header == key_of("/v1/models", **header) == key_of(CHAT, {"session_id": "header"})
    assert len({mine, of_user, of_header, key_of(CHAT, {"messages": [HELLO]})}) == 4


@pytest.mark.parametrize(
    "body",
    [b"", b"no JSON", b"[]", b'{"messages": "text"}', b'{"messages": [1]}', b'{"session_id": 7, "messages": []}',
     b'{"messages": [{"role": "assistant"}]}', b'{"previous_response_id": "other"}', b"\xff",
     pytest.param(b'{"messages": [' + b"[" * 20_000 + b"]" * 20_000 + b"]}", id="deep")],
)  # fmt: skip
def test_what_cannot_be_read_goes_anywhere(body):
    assert affinity_of("POST", CHAT, {}, body, "", KEY).key == ""
