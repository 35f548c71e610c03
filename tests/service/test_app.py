"""Around every route: who is let in, request ids, errors as JSON, counts, and a state in which nothing is served."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvstore import errors as kv
from kvstore.service.api import page
from kvstore.service.api.exchange import EXCHANGE, context_of, tenant_of
from kvstore.service.app import ROUTES
from kvstore.service.http.access import EXPOSED
from kvstore.service.http.errors import ApiError, Route, api_error, json_response
from tests.support.service.serving import ADMIN_KEY, KEY, raw_request, read_to_end, server_fixture, serving
from tests.support.waiting import wait_until

HEALTHY = ("/health", "/healthz", "/livez", "/ping", "/ready")
OPEN_TO_ALL = {*HEALTHY, *(route.path for route in page.ROUTES)}


async def who(request):
    return json_response({"tenant": tenant_of(request), "request_id": request[EXCHANGE].request_id})


async def bug(request):
    raise RuntimeError("secret /a/path")


async def waits(request):
    with context_of(request).limits.admit(tenant_of(request)):
        await asyncio.Event().wait()


OWN = (
    Route("GET", "/who", who, "user", ""),
    Route("GET", "/bug", bug, "user", ""),
    Route("GET", "/waits", waits, "user", ""),
)


server = server_fixture(routes=(*ROUTES, *OWN), api_key=KEY, admin_key=ADMIN_KEY)


def samples(server, name: str) -> Counter[tuple[str, ...]]:
    """This counter on /metrics by its labels."""
    found = re.findall(rf"^kvstore:{name}_total{{(.*)}} (\S+)$", server.get("/metrics").body.decode(), re.MULTILINE)
    return Counter({tuple(re.findall('"([^"]*)"', labels)): int(float(count)) for labels, count in found})


@pytest.fixture
def counted(server):
    """Gives what a counter has counted since the beginning of this test, but for requests of /metrics."""
    before = {name: samples(server, name) for name in ("http_requests", "refused_requests")}

    def since(name: str) -> dict[tuple[str, ...], int]:
        return {key: count for key, count in (samples(server, name) - before[name]).items() if "/metrics" not in key}

    return since


def filled(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


def anonymous(server, route, **headers):
    return server.request(
        route.method, filled(route.path), b"{}" if route.method in ("POST", "PUT", "PATCH") else None,
        {"Authorization": None, **headers},
    )  # fmt: skip


def code_of(reply):
    """Of an error, or its type where it has Anthropic's shape, which has no code."""
    return reply.error.get("code", reply.error["type"])


# -- every route -----------------------------------------------------------------------------------------------------
def test_every_route_declares_what_it_is():
    places = [(route.method, route.path) for route in ROUTES]
    assert len(set(places)) == len(places)
    for route in ROUTES:
        assert route.access in ("public", "user", "admin"), route
        assert route.summary and route.method in ("GET", "POST", "DELETE", "PUT", "PATCH"), route
        assert (route.access == "admin") == route.path.startswith("/admin/"), route
    assert {route.path for route in ROUTES if route.access == "public"} == OPEN_TO_ALL


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_only_public_routes_answer_without_a_key(server, route):
    reply = anonymous(server, route)
    if route.access == "public":
        assert reply.status in (200, 404), "a page's file of that name need not be there"
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert (reply.error["type"], code_of(reply)) in (
        ("authentication_error", "invalid_api_key"), ("authentication_error", "authentication_error")
    )  # fmt: skip
    assert anonymous(server, route, Authorization="Bearer some-other-key").status == 401


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_route_answers_a_foreign_page(server, route):
    headers = {"Origin": "http://evil.example", "Authorization": f"Bearer {ADMIN_KEY}"}
    assert code_of(anonymous(server, route, **headers)) in ("origin_not_allowed", "permission_error")
    assert code_of(anonymous(server, route, Host="evil.example")) in ("host_not_allowed", "permission_error")


# -- pages of an allowed origin --------------------------------------------------------------------------------------
APP = "https://app.example"
ASKED = {"Access-Control-Request-Method": "POST", "Authorization": None}
SENT = "authorization, content-type, idempotency-key, x-stainless-retry-count, x-other, openai-beta"


@pytest.fixture(scope="module")
def shared():
    """A server that has allowed one origin."""
    with serving(api_key=KEY, admin_key=ADMIN_KEY, allowed_origins=(APP,)) as running:
        yield running


def cors(reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_a_browser_that_asks_first_is_told_what_an_allowed_page_may_send(shared, path):
    headers = {**ASKED, "Origin": APP, "Access-Control-Request-Headers": SENT}
    reply = shared.request("OPTIONS", filled(path), None, headers)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["vary"] == "Origin"
    assert cors(reply) == {
        "access-control-allow-origin": APP,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "Authorization, Content-Type, Idempotency-Key, X-Api-Key, X-Request-Id, "
        "x-stainless-retry-count, openai-beta",
        "access-control-expose-headers": "Retry-After, X-Request-Id, X-Should-Retry",
        "access-control-max-age": "600",
    }


@pytest.mark.parametrize("origin", ["http://app.example", "https://app.example.evil", "null", "*", None])
def test_nobody_else_is_told_anything(server, shared, origin):
    for one in (server, shared):
        asked = one.request("OPTIONS", "/chat", None, {**ASKED, "Origin": origin})
        assert (asked.status, cors(asked)) == (405, {})
        assert cors(one.request("GET", "/v1/models", None, {"Origin": origin})) == {}
    reply = shared.request("OPTIONS", "/chat", None, {**ASKED, "Origin": APP, "Host": "evil.example"})
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


def test_an_allowed_page_can_read_its_answers_and_its_errors(shared):
    for path, key, status in (("/v1/models", KEY, 200), ("/v1/models", "wrong-as-it-is", 401), ("/nowhere", KEY, 404)):
        reply = shared.request("GET", path, None, {"Origin": APP, "Authorization": f"Bearer {key}"})
        assert reply.status == status
        assert cors(reply) == {"access-control-allow-origin": APP, "access-control-expose-headers": EXPOSED}
        assert reply.headers["vary"] == "Origin"
    stream = shared.post("/chat", {"message": "Hi", "stream": True, "max_tokens": 2}, Origin=APP)
    assert stream.events()[-1] == "[DONE]" and stream.headers["access-control-allow-origin"] == APP
    assert shared.get("/v1/models").headers["vary"] == "Origin"


@pytest.mark.parametrize("route", [r for r in ROUTES if r.body is not None], ids=lambda r: f"{r.method} {r.path}")
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b'{"a":' + b"[" * 100_000])
def test_every_body_that_is_no_object_is_refused(server, route, body):
    key = ADMIN_KEY if route.access == "admin" else KEY
    reply = server.request(route.method, filled(route.path), body, {"Authorization": f"Bearer {key}"})
    assert reply.status == 400 or (reply.status, body) == (404, b""), "some need no body"
    assert reply.error["type"] == "invalid_request_error" and reply.error["message"]


def test_raw_bytes_in_a_key_are_no_key(server):
    with server.connect() as raw:
        raw.sendall(b"GET /who HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\xed\xa0\x80\r\n")
        raw.sendall(b"Connection: close\r\n\r\n")
        assert read_to_end(raw).startswith(b"HTTP/1.1 401")


def test_a_form_of_a_page_is_refused_and_a_plain_client_is_not(server):
    body = json.dumps({"prompt": "hello"}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.post("/tokenize", body, **form).status == 200
    own = f"http://127.0.0.1:{server.server.port}"
    reply = server.post("/tokenize", body, **form, Origin=own)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert server.post("/tokenize", body, Origin=own).status == 200


# -- errors ----------------------------------------------------------------------------------------------------------
def test_unknown_paths_and_methods(server):
    reply = server.get("/nothing/here")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    reply = server.post("/health")
    assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "GET, HEAD")
    assert server.get("/tokenize").headers["allow"] == "POST"
    for method, path, code in (
        ("DELETE", "/chat", "method_not_allowed"), ("PATCH", "/health", "method_not_allowed"),
        ("GET", "/../../etc/passwd", "not_found"), ("GET", "/web/../server.py", "not_found"),
    ):  # fmt: skip
        assert server.request(method, path).error["code"] == code


def test_nothing_of_a_bug_is_told(server, counted):
    reply = server.get("/bug")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    wait_until(lambda: counted("http_requests") == {("GET", "/bug", "500"): 1})


@pytest.mark.parametrize(("error", "status", "code"), [
    (ApiError(418, "x", code="c"), 418, "c"),
    (kv.RequestError("x", param="p"), 400, "invalid_value"),
    (kv.ContextLengthError("x", 2, 1), 400, "context_length_exceeded"),
    (kv.SessionBusyError("x"), 409, "session_busy"),
    (kv.SessionBusyError("x", retry_after_s=0), 409, "session_busy"),
    (kv.StoreLostError("/a/path"), 503, "store_lost"),
    (kv.SessionExistsError("x"), 409, "session_exists"),
    (kv.SessionNotFoundError("x"), 404, "session_not_found"),
    (kv.ConfigError("x"), 400, "invalid_value"),
    (kv.EngineClosedError("/a/path"), 503, "engine_closed"),
    (kv.DegradedError("/a/path"), 503, "store_degraded"),
    (kv.StoreError("/a/path"), 503, "store_error"),
    (kv.ModelError("/a/path"), 500, "internal_error"),
    (OSError("/a/path"), 500, "internal_error"),
    (TimeoutError("/a/path"), 500, "internal_error"),
])  # fmt: skip
def test_exceptions_and_what_clients_are_told(error, status, code):
    told = api_error(error)
    assert (told.status, told.code) == (status, code)
    assert "/a/path" not in told.message
    assert (told.type == "server_error") == (status >= 500)
    is_free_soon = getattr(error, "retry_after_s", None) is not None
    is_final = code == "store_lost" or (status == 409 and not is_free_soon)
    assert (told.headers.get("x-should-retry") == "false") == is_final
    assert int(told.headers.get("Retry-After", 0)) >= int(status == 503 or is_free_soon)


# -- request ids, the log, counts ------------------------------------------------------------------------------------
def test_a_request_id_is_taken_or_made(server):
    reply = server.get("/who", **{"X-Request-Id": "abc.DEF_1-2"})
    assert reply.headers["x-request-id"] == "abc.DEF_1-2" == reply.json()["request_id"]
    assert reply.json()["tenant"] == ""
    made = set()
    for sent in ("", "a" * 65, "a b", "é", "<script>"):
        reply = server.request("GET", "/nothing", headers={"X-Request-Id": sent.encode()})
        made.add(reply.headers["x-request-id"])
    assert len(made) == 5 and all(re.fullmatch("[0-9a-f]{24}", one) for one in made)


def logged(lines) -> list[dict]:
    return list(map(json.loads, lines["json"]))


def test_every_request_is_counted_and_logged_once_by_its_pattern(server, counted, lines):
    server.get("/who", **{"X-Request-Id": "r1"})
    server.get("/v1/models/some-name")
    server.get("/nothing/secret")
    server.request("GET", "/who", headers={"Authorization": "Bearer secret-secret"})
    server.wait_until(lambda: len(lines["json"]) == 4)
    assert [(line["status"], line.get("code")) for line in logged(lines)] == [
        (200, None), (404, "model_not_found"), (404, "not_found"), (401, "invalid_api_key")
    ]  # fmt: skip
    assert logged(lines)[0]["request_id"] == "r1" and logged(lines)[0]["seconds"] > 0
    assert "secret" not in str(lines) and "some-name" not in str(lines)
    assert counted("http_requests") == {
        ("GET", "/who", "200"): 1, ("GET", "/v1/models/{id}", "404"): 1, ("GET", "unknown", "404"): 1,
        ("GET", "/who", "401"): 1,
    }  # fmt: skip


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (TRACE, TRACE),
        ("01" + TRACE[2:], "01" + TRACE[2:]),
        ("cc" + TRACE[2:] + "-what-comes-later", "cc" + TRACE[2:]),
        (TRACE + "-x", None),
        ("ff" + TRACE[2:], None),
        (TRACE.upper(), None),
        (TRACE[:-1], None),
        (TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), None),
        (TRACE.replace("00f067aa0ba902b7", "0" * 16), None),
        ("<script>", None),
    ],
)
def test_a_trace_goes_on_in_the_log(server, lines, sent, told):
    server.get("/who", traceparent=sent)
    server.wait_until(lambda: lines["json"])
    assert logged(lines)[0].get("traceparent") == told


def test_a_client_that_goes_away_is_counted_and_leaves_nothing(server, counted):
    with server.connect() as raw:
        raw.sendall(raw_request("GET", "/waits", Authorization=f"Bearer {KEY}"))
        server.wait_until(lambda: server.context.limits.num_admitted == 1)
    wait_until(lambda: counted("http_requests") == {("GET", "/waits", "499"): 1})
    server.wait_until_idle()


def test_refusals_are_counted(server, counted):
    server.request("GET", "/who", headers={"Authorization": None})
    server.get("/admin/stats")
    server.get("/nothing")
    wait_until(lambda: counted("refused_requests") == {("invalid_api_key",): 1, ("admin_only",): 1})


# -- states ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["starting", "stopping"])
def test_only_public_routes_answer_while_nothing_can_be_served(server, monkeypatch, state):
    monkeypatch.setattr(server.context, "state", state)
    for route in ROUTES:
        key = ADMIN_KEY if route.access == "admin" else KEY
        reply = anonymous(server, route, Authorization=f"Bearer {key}")
        if route.path in HEALTHY:
            assert reply.status == (200 if route.path == "/livez" else 503)
        elif route.access != "public":
            assert reply.status == 503 and code_of(reply) in (state, "overloaded_error")
        assert reply.status != 503 or int(reply.headers["retry-after"]) > 0
    assert server.get("/health").json()["status"] == state
    assert server.get("/ready").json() == {"ready": False}
    assert server.get("/who", Authorization="Bearer wrong-wrong").status == 401


def test_an_engine_that_ends_by_itself_is_a_failure():
    with serving(routes=(*ROUTES, *OWN)) as server:
        assert server.get("/who").status == 200
        server.engine.close()
        assert server.get("/health").json() == {"status": "failed", "reasons": ["engine_failed"]}
        assert server.get("/ready").status == 503
        assert server.get("/who").error["code"] == "engine_failed"


def test_no_handler_reads_a_body_by_itself():
    """All of them are to go through the limits of `read_body`."""
    found = [
        path.name
        for path in sorted(Path(page.__file__).parents[1].rglob("*.py"), key=lambda path: path.name)
        if re.search(r"request\.(json|text|read|post|content)\b", path.read_text())
    ]
    assert found == ["exchange.py", "schema.py"]
