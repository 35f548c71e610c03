"""Health, version, models, tokens, the page's files and the administrator's routes, on a running server."""

import threading
from unittest import mock

import pytest

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.errors import DegradedError
from kvstore.service.api.health import health_reasons
from kvstore.service.api.metrics import RecentStats
from kvstore.service.api.page import FILES
from tests.support.by_hand import crawling, held
from tests.support.service.serving import ADMIN, ADMIN_KEY, KEY, server_fixture, serving
from tests.support.service.talking import LONG, SHORT, TALKING_ROUTES, Stream, talking_body
from tests.support.waiting import TIMEOUT_S, wait_until

TIERS = {"hbm": "4MiB", "cpu": "4MiB", "disk": "64MiB"}
server = server_fixture(
    TIERS, api_key=KEY, admin_key=ADMIN_KEY, served_model_name="our/model", vllm_metrics=True
)  # fmt: skip


# -- health ----------------------------------------------------------------------------------------------------------
def test_a_server_that_works_is_healthy_and_ready(server):
    assert server.get("/health").json() == {"status": "ok", "reasons": []}
    assert server.get("/ready").json() == {"ready": True}
    for path in ("/healthz", "/livez", "/ping"):
        assert server.request("GET", path, None, {"Authorization": None}).json() == {"status": "ok", "reasons": []}
    assert server.request("HEAD", "/health").status == 200


@pytest.mark.parametrize(("stats", "reasons"), [
    ({}, []),
    ({"disk": None, "sessions": None}, []),
    ({"disk": {"degraded": None, "broken": False}}, []),
    ({"disk": {"degraded": "full", "broken": False}}, ["disk_degraded"]),
    ({"disk": {"degraded": None, "broken": True}}, ["disk_broken"]),
    ({"disk": {"was_reset": True}, "remote": {"degraded": "silent"}}, ["remote_degraded", "disk_was_reset"]),
    ({"answers": {"failing": "no space"}}, ["answers_failing"]), ({"answers": {"failing": None}}, []),
    ({"error": "OSError"}, ["stats_unavailable"]),
])  # fmt: skip
def test_what_does_not_work_is_named(stats, reasons):
    assert list(health_reasons(stats, False)) == reasons
    assert list(health_reasons(stats, True)) == [*reasons, "sessions_failing"]


def test_vllm_s_names_stand_on_metrics_where_they_are_asked_for(server):
    page = server.get("/metrics").body.decode()
    for line in (
        'vllm:num_requests_running{model_name="our/model"} 0.0',
        'vllm:request_success_total{finished_reason="stop",model_name="our/model"} ',
        "# TYPE vllm:time_to_first_token_seconds histogram",
    ):
        assert f"\n{line}" in page


def engine_that(server, **methods):
    """In here these methods of the engine are others."""
    return mock.patch.multiple(server.engine, **methods)


def test_sessions_that_cannot_be_stored_are_told_for_a_while_or_until_they_can(server):
    known = server.engine.stats

    def tells(reasons: list[str], **sessions: int) -> None:
        """Once it has these counters: while the engine is busy, it has older ones."""
        with engine_that(server, stats=lambda: {**known(), "sessions": sessions}):
            wait_until(lambda: server.get("/health").json()["reasons"] == reasons)
            assert server.get("/health").json()["reasons"] == reasons

    for seconds, reasons in ((0.0, []), (3600.0, ["sessions_failing"])):
        server.context.stats = RecentStats(server.context.engine, failing_s=seconds)
        tells([], failed=0, committed=5)
        tells(reasons, failed=3, committed=6)
    tells(reasons, failed=4, committed=9)  # some were stored, and then none
    tells([], failed=4, committed=10)
    with engine_that(server, stats=mock.Mock(side_effect=OSError)):
        wait_until(lambda: server.get("/health").json()["reasons"] == ["stats_unavailable"])
    tells([], failed=4, committed=10)  # those are known
    server.context.stats = RecentStats(server.context.engine)


def test_health_does_not_wait_for_a_long_step(server):
    server.get("/health")
    release = threading.Event()

    def hold():
        with held(server.engine):
            release.wait(TIMEOUT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        for _ in range(2):
            assert server.get("/health").json() == {"status": "ok", "reasons": []}
        assert server.get("/ready").status == 200
    finally:
        release.set()
        thread.join()


# -- what is served --------------------------------------------------------------------------------------------------
def test_version(server):
    found = server.get("/version").json()
    assert found["model"] == "our/model" and found["block_size"] == 16 and found["version"]


def test_models(server):
    found = server.get("/v1/models").json()
    (model,) = found["data"]
    assert found["object"] == "list"
    assert (model["id"], model["object"], model["max_model_len"]) == ("our/model", "model", 1024)
    assert model["root"] == "kvstore-builtin"
    assert server.get("/v1/models/our/model").json() == model
    assert server.get("/v1/models/our%2Fmodel").json() == model
    reply = server.get("/v1/models/gpt-4o")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


# -- tokens ----------------------------------------------------------------------------------------------------------
def test_tokens_there_and_back(server):
    found = server.post("/tokenize", {"model": "our/model", "prompt": "Hello, world"}).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 1024
    assert found["tokens"] == server.engine.tokenizer("Hello, world")["input_ids"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Hello, world"}


def test_tokens_of_messages_are_those_of_the_prompt(server):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello <|end|>"}]
    found = server.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
    assert found["tokens"] == ChatTemplate.of(server.engine.tokenizer).prompt_ids(messages)
    assert found["token_strs"] == server.engine.tokenizer.convert_ids_to_tokens(found["tokens"])
    assert found["token_strs"].count("<|end|>") == 2  # those of the template: what a person wrote stays text


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "b"}]}, "messages[0].tool_call_id"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a" * (2**20 + 1)}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
])  # fmt: skip
def test_what_cannot_be_tokenized_is_named(server, path, body, param):
    reply = server.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("template, why", [
    (None, "has no chat template"),
    ("{% for m in messages %}", "is broken (Unexpected end of template."),
    ("{{ 1 // 0 }}", "is broken (integer division or modulo by zero)"),
])  # fmt: skip
def test_a_model_without_a_sound_template_completes_and_does_not_chat(tmp_path, lines, template, why):
    for file in MODEL_DIR.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with serving(str(tmp_path)) as server:
        done = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
        assert done.status == 200 and done.json()["usage"]["completion_tokens"] == 2
        (warned,) = (one for one in lines["text"] if "routes that chat answer 400" in one)
        assert why in warned
        messages = [{"role": "user", "content": "Hello"}]
        for path, body in (
            ("/chat", {"message": "Hello"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "Hello"}),
            ("/tokenize", {"messages": messages}),
        ):
            refused = server.post(path, body)
            assert refused.status == 400, path
            assert why in refused.error["message"] and tmp_path.name in refused.error["message"]
            assert "; give a file with one as --chat-template" in refused.error["message"]
    if template is None:
        given = {"chat_template": (MODEL_DIR / "chat_template.jinja").read_text()}
        with serving(str(tmp_path), engine=given) as server:
            assert server.post("/chat", {"message": "Hello", "max_tokens": 2}).status == 200


# -- the page --------------------------------------------------------------------------------------------------------
def test_the_pages_files_are_served_with_a_strict_policy(server):
    assert "index.html" in FILES
    for path in ("/", *(f"/web/{name}" for name in FILES)):
        reply = server.request("GET", path, headers={"Authorization": None})
        assert reply.status == 200 and reply.body
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert server.get("/").headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("name", ["..%2fapp.py", "..%2F..%2Fetc%2Fpasswd", "app.py", "%00", "index.html%00", "x.js"])
def test_nothing_else_is(server, name):
    assert server.get(f"/web/{name}").status in (400, 404)


# -- the administrator -----------------------------------------------------------------------------------------------
def admin(server, method, path, body=None):
    return server.request(method, path, body, ADMIN)


def test_counters(server):
    found = admin(server, "GET", "/admin/stats").json()
    assert {"hbm", "cpu", "disk", "requests", "sessions"} <= set(found)


def test_tenants(server):
    assert admin(server, "GET", "/admin/tenants").json() == {"tenants": [{"tenant": "", "running": 0}]}


def test_eviction_takes_the_fields_of_the_command(server):
    found = admin(server, "POST", "/admin/evict", {"all": True, "dry_run": True}).json()
    assert found["dry_run"] is True and set(found["tiers"]) == {"hbm", "cpu", "disk"}
    for body, said in (
        ({}, "no condition"),
        ({"session": {"session_id": "../x"}}, "session_id"),
    ):
        reply = admin(server, "POST", "/admin/evict", body)
        assert reply.status == 400 and said in reply.error["message"]
    reply = admin(server, "POST", "/admin/evict", {"session": {"session_id": "unknown"}})
    assert (reply.status, reply.error["code"]) == (404, "session_not_found")


def test_flush_waits_for_the_disk_or_says_that_it_cannot(server):
    assert admin(server, "POST", "/admin/flush").json() == {"flushed": True}
    with engine_that(server, flush=mock.Mock(side_effect=DegradedError("/a/path/of/ours cannot be written"))):
        assert admin(server, "POST", "/admin/flush").error["code"] == "store_degraded"


def test_a_drained_server_ends_what_runs_and_takes_nothing_new_until_that_is_undone(server):
    session_id = server.post("/chat", {"message": "Hello", **SHORT}).json()["session_id"]
    with crawling(server.engine):
        running = Stream(server, "/chat", {"message": "Count.", **LONG, "max_tokens": 60})
        assert isinstance(running.next(), dict)
        assert admin(server, "POST", "/admin/drain").json() == {"draining": True, "running": 1}
        edit = {"edits": [{"type": "remove", "index": 1}], "reuse": "reencode"}
        assert server.post(f"/sessions/{session_id}/edit", edit).error["code"] == "draining"
        for path in TALKING_ROUTES:
            reply = server.post(path, talking_body(path, "Hello"))
            assert (reply.status, reply.error["code"]) == (503, "draining")
            assert reply.headers["retry-after"] == "1" and reply.headers["connection"] == "close"
        states = {path: server.get(path) for path in ("/health", "/ready", "/livez", "/metrics", "/sessions")}
    assert {path for path, reply in states.items() if reply.status == 503} == {"/health", "/ready"}
    assert states["/health"].json() == {"status": "draining", "reasons": ["draining"]}
    events = running.rest()
    assert events[-1] == "[DONE]" and events[-2]["finish_reason"] == "length"
    server.wait_until(lambda: not server.context.limits.num_admitted)
    assert admin(server, "POST", "/admin/drain").json() == {"draining": True, "running": 0}
    assert admin(server, "DELETE", "/admin/drain").json() == {"draining": False, "running": 0}
    assert server.post("/chat", {"message": "Hello", **SHORT}).status == 200
    assert server.get("/ready").status == 200


def test_only_the_administrator_drains(server):
    assert server.post("/admin/drain").error["code"] == "admin_only"
    assert server.get("/ready").status == 200
