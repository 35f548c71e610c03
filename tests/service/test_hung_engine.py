"""An engine's process that is stopped: every route answers within its deadline.

That it is replaced: `test_data_parallel`; that the server gives up at last: `test_kill`.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from kvstore import Engine
from kvstore.service.app import ROUTES
from tests.support.service.serving import ADMIN, ADMIN_KEY, KEY, Reply, Serving, serving
from tests.support.service.talking import SHORT, Stream

MODEL = {"tokenizer": True, "max_position_embeddings": 2048}
REQUEST_S = 8.0
SAID = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
BODIES = {
    "/chat": {"message": "Hello", **SHORT},
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
    "/sessions/{id}/pin": {"ttl": 5},
    "/sessions/{id}/truncate": {"turns": 1},
    "/admin/evict": {"all": True},
}


def ask(server: Serving, route, session_id: str, deleted: str) -> tuple[str, Reply]:
    """What a client of this route gets. DELETE names a conversation of its own: an answer's deletion would be first."""
    path = route.path.replace("{id:.+}", "{id}")
    body = BODIES.get(path, {}) if route.method == "POST" else None
    named = f"resp_{session_id}_1" if "responses" in path else session_id
    named = deleted if (route.method, path) == ("DELETE", "/sessions/{id}") else named
    reply = server.request(route.method, path.replace("{id}", named), body, ADMIN if route.access == "admin" else None)
    return f"{route.method} {path}", reply


def chat_once(server: Serving, message: str) -> dict:
    """A turn that is answered in time, which on a busy machine may need some tries."""
    for _ in range(30):
        reply = server.post("/chat", {"message": message, **SHORT})
        if reply.status != 504:
            break
    assert reply.status == 200, reply.body
    return reply.json()


def test_every_route_answers_within_its_deadline_and_all_is_well_once_the_engine_goes_on(model, tmp_path):
    """Also what waits for the engine to say that it has let go: a stream, a turn and a call that began before."""

    def opened():
        tiers = {"hbm": "2MiB", "cpu": "2MiB", "disk": "32MiB", "path": tmp_path / "store"}
        return Engine(model, tiers, device="cpu", silence_s=600.0, process="own")

    with serving(engine_factory=opened, request_timeout_s=REQUEST_S, api_key=KEY, admin_key=ADMIN_KEY) as server:
        known, deleted = (chat_once(server, "Hello")["session_id"] for _ in range(2))
        long = {"message": "Hello", "max_tokens": 1900, "ignore_eos": True}
        stream = Stream(server, "/chat", long)
        assert "session_id" in stream.next()
        os.kill(server.engine.core.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(64) as clients:
                asked = [clients.submit(ask, server, route, known, deleted) for route in ROUTES]
                streamed = clients.submit(stream.rest)
                begun = Stream(server, "/v1/chat/completions", SAID)  # while all others ask
                found = dict(one.result() for one in asked)
                *_, error, done = streamed.result()
            assert (error["error"]["code"], done) == ("request_timeout", "[DONE]")
            begun.leave()
            assert begun.status == 504
            late = {name: reply for name, reply in found.items() if reply.status == 504}
            assert {reply.error["code"] for reply in late.values()} == {"request_timeout"}
            waits = {"POST /chat", "POST /v1/completions", "POST /v1/responses", "DELETE /sessions/{id}",
                     "POST /admin/flush", "GET /admin/stats"}  # fmt: skip
            assert waits <= late.keys()
            answered = {name for name, reply in found.items() if reply.status == 200}
            assert {"GET /metrics", "GET /v1/models", "GET /health", "POST /tokenize", "GET /"} <= answered
            assert all(reply.status in (200, 400, 404, 503, 504) for reply in found.values()), found
            server.wait_until(lambda: server.engine.core.silent_s > 5.0, "the silence is noticed")
            assert server.get("/health").json() == {"status": "degraded", "reasons": ["engine_not_answering"]}
            assert server.get("/ready").status == 503
            assert b"kvstore:engine_up 0.0" in server.get("/metrics").body
        finally:
            os.kill(server.engine.core.pid, signal.SIGCONT)
        server.wait_until_idle()
        assert server.get("/ready").status == 200 and server.engine.core.pid is not None
        assert chat_once(server, "Hello again")["turn"] == 1
