"""Where a miss is told: in the usage of every route, the log, the metrics, GET /requests/ID/why and `kvstore why`.

What causes are named, and how, is tested in tests/engine/sessions/test_misses.py.
"""

import json

import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.engine.outputs import MISSES
from kvstore.service.api import exchange
from tests.support.engines import evict_cpu, evict_hbm
from tests.support.faults import constants
from tests.support.service.talking import tenants
from tests.support.tools import CLOCK, WEATHER

SECRET = "My password is swordfish, and this is a long story about the sea, its ships, and whoever lives by it."
SHORT = {"max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("why") / "store"


@pytest.fixture(scope="module")
def both(store, tmp_path_factory):
    tiers = {"hbm": "8MiB", "cpu": "16MiB", "disk": "64MiB", "path": store}
    with tenants(tmp_path_factory.mktemp("keys"), engine={"cache_tiers": tiers, "load": "always"}) as servers:
        yield servers


def edited(server, name: str, stream: bool = False):
    """A conversation whose first message was edited: the last reply, and its id."""
    said = [{"role": "user", "content": f"{name}: {SECRET}"}]
    for text in ("Go on.", "And then?"):
        answer = server.post("/v1/chat/completions", {"messages": said, **SHORT}).json()
        assert "miss" not in answer["usage"]["prompt_tokens_details"]
        said += [answer["choices"][0]["message"], {"role": "user", "content": text}]
    said[0] = {"role": "user", "content": f"{name}, again: {SECRET}"}
    body = {"messages": said, **SHORT, "stream": stream, "stream_options": {"include_usage": True}}
    reply = server.post("/v1/chat/completions", body)
    return reply, reply.headers["x-request-id"]


def counted(server, cause: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return float(
        next(line for line in lines if line.startswith(f'kvstore:miss_tokens_total{{cause="{cause}"')).split()[1]
    )


def test_an_edit_is_told_everywhere_but_its_text_and_not_to_another_tenant(both, server, lines, run, store):
    before = counted(server, "edit")
    reply, request_id = edited(server, "told")
    miss = reply.json()["usage"]["prompt_tokens_details"]["miss"]
    assert {name: miss[name] for name in ("cause", "message", "role")} == {
        "cause": "edit",
        "message": 0,
        "role": "user",
    }
    assert miss["tokens"] % 16 == 0 < miss["tokens"] and 0 < miss["token"] < miss["tokens"]
    assert counted(server, "edit") - before == miss["tokens"]
    told = [json.loads(line) for line in lines["json"] if request_id in line]
    assert [(line["miss"], line["miss_tokens"]) for line in told] == [("edit", miss["tokens"])]

    why = server.get(f"/requests/{request_id}/why")
    assert why.json() == {"request_id": request_id, "answers": [reply.json()["usage"]]}
    foreign, unknown = (both[1].get(f"/requests/{name}/why") for name in (request_id, "0" * len(request_id)))
    assert (foreign.status, unknown.status) == (404, 404)
    assert foreign.body == unknown.body.replace(b"0" * len(request_id), request_id.encode())
    code, out, _ = run("why", request_id, "--store", store, "--tenant", "alice")
    assert code == 0 and out.splitlines()[1].endswith("in message 0 (user): the message was edited")
    code, printed, _ = run("why", request_id, "--store", store, "--tenant", "alice", "--json")
    assert json.loads(printed)["answers"][0]["miss"]["tokens"] == miss["tokens"]
    assert not any("swordfish" in text for text in (why.body.decode(), out, printed, *lines["text"]))
    code, _, error = run("why", request_id, "--store", store, "--tenant", "bob")
    assert code == 1 and "there is no request" in error and len(error.splitlines()) == 1


def test_a_stream_ends_with_the_same(server):
    reply, request_id = edited(server, "streamed", stream=True)
    usage = reply.events()[-2]["usage"]
    assert usage["prompt_tokens_details"]["miss"]["cause"] == "edit"
    assert server.get(f"/requests/{request_id}/why").json()["answers"] == [usage]


def test_a_session_and_a_response_name_their_misses(server):
    first = server.post("/chat", {"message": SECRET, "tools": [WEATHER], **SHORT}).json()
    more = {"session_id": first["session_id"], "message": "Go on."}
    second = server.post("/chat", {**more, "tools": [CLOCK], **SHORT}).json()
    assert second["usage"]["prompt_tokens_details"]["miss"]["cause"] == "tools"
    response = server.post("/v1/responses", {"input": SECRET * 2, "max_output_tokens": 6}).json()
    evict_cpu(server.engine)
    evict_hbm(server.engine)
    with server.engine.connector.parts.lock:
        server.engine.connector.parts.store.disk.evict(1 << 30)
    body = {"input": "Go on.", "previous_response_id": response["id"], "max_output_tokens": 6}
    reply = server.post("/v1/responses", body)
    miss = reply.json()["usage"]["input_tokens_details"]["miss"]
    assert (miss["cause"], miss["tier"], miss["token"]) == ("evicted", "disk", 0) and miss["at"] > 0
    why = server.get(f"/requests/{reply.headers['x-request-id']}/why").json()
    assert why["answers"][0]["prompt_tokens_details"]["miss"] == miss


def test_what_is_not_known(server, run, store, tmp_path):
    assert server.get("/requests/nobody/why").error["code"] == "request_not_found"
    polled = server.get("/version").headers["x-request-id"]
    assert server.get(f"/requests/{polled}/why").status == 404
    assert run("why", "--store", store)[0] == 2
    assert run("why", "nobody", "--store", store)[0] == 1


def test_a_store_without_a_server_knows_no_request(run, tmp_path):
    StoreDirectory.open(tmp_path / "store").close()
    code, _, error = run("why", "somebody", "--store", tmp_path / "store")
    assert code == 1 and "no server has this store open" in error


def test_only_the_last_requests_are_known(server):
    server.engine.admin.usages.clear()
    with constants(exchange, MOST_ASKED=2):
        replies = [server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}) for _ in range(3)]
    asked = [server.get(f"/requests/{reply.headers['x-request-id']}/why") for reply in replies]
    assert [reply.status for reply in asked] == [404, 200, 200]


def test_every_cause_is_counted_from_the_start(server):
    page = server.get("/metrics").body.decode()
    assert page.count("kvstore:miss_tokens_total{") == len(MISSES)
