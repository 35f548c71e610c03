"""The page and OpenAI's routes behind a real nginx on the same host, and pages of other origins that were allowed."""

import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.service.api.metrics import metrics_page
from tests.support.by_hand import crawling
from tests.support.faults import before_each_step
from tests.support.redis_server import free_port
from tests.support.service.browser import Tabs
from tests.support.service.serving import ADMIN, ADMIN_KEY, Serving, serving
from tests.support.service.talking import LONG, SHORT, Stream
from tests.support.waiting import TIMEOUT_S, wait_until

NAME = "chat.localhost"  # a browser takes every such name for this machine
KEY = "key-of-the-proxy-test"
CONFIGURATION = """
daemon off; pid {folder}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {servers}
}}
"""
SERVERS = """
    upstream kvstore {{ server 127.0.0.1:{target}; }}
    server {{ listen 127.0.0.1:{plain}; location / {{ {common} proxy_pass http://127.0.0.1:{target}; }} }}
    server {{ listen 127.0.0.1:{other}; location / {{ default_type text/html; return 200 "<title>other</title>"; }} }}
    server {{ listen 127.0.0.1:{named}; location / {{ {common} proxy_pass http://kvstore; }} }}
    server {{
        listen 127.0.0.1:{same};
        location / {{ {common} proxy_pass http://127.0.0.1:{target}; proxy_set_header Host $host; }}
    }}
"""
BALANCED = """
    upstream balanced {{ server 127.0.0.1:{first}; server 127.0.0.1:{second}; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            {common} proxy_pass http://balanced; proxy_set_header Host localhost;
            proxy_next_upstream http_503 non_idempotent;
        }}
    }}
"""
COMMON = "proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 600s; client_max_body_size 32m;"
# Whose Host is sent: nginx's own, its upstream's name, the browser's without port; and a page that is not the server's.
KINDS = ("plain", "named", "same", "other")


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def nginx(folder: Path, servers: str, *ports: int) -> Iterator[None]:
    """A proxy with these parts of its configuration, which listen on these ports. Skips where there is none."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("needs nginx")
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, servers=servers))
    command = [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or all(map(is_open, ports)), "nginx listens")
        assert process.poll() is None, (folder / "log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {kind: free_port() for kind in KINDS}


@pytest.fixture(scope="module")
def server(ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With what docs/security.md says to give for the two usual configurations; the upstream's name is not allowed."""
    origins = tuple(f"http://{NAME}:{ports[kind]}" for kind in ("plain", "same", "other"))
    folder = tmp_path_factory.mktemp("nginx")
    with serving(api_key=KEY, allowed_origins=origins) as running:
        servers = SERVERS.format(target=running.server.port, common=COMMON, **ports)
        with nginx(folder, servers, *ports.values()):
            yield running


def through(server: Serving, port: int) -> Serving:
    """The same server, asked through the proxy."""
    proxied = Serving(server.server, server.loop, server.key)
    proxied.hosts = ("127.0.0.1", port)
    return proxied


@pytest.mark.parametrize("kind", ["plain", "same"])
def test_the_page_works_behind_a_proxy(server: Serving, ports: dict[str, int], tabs: Tabs, kind: str) -> None:
    page = tabs.open(f"http://{NAME}:{ports[kind]}")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.locator("#key-dialog").wait_for(state="hidden")
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    page.locator(".turn .meter").wait_for()
    page.locator("#sessions li:first-child .pin").click()
    page.locator('.pin[aria-pressed="true"]').first.wait_for()
    assert [error for error in tabs.errors if "401" not in error] == []
    tabs.errors.clear()


def test_names_that_were_not_allowed_stay_refused_behind_it(server: Serving, ports: dict[str, int]) -> None:
    """A visitor's browser may be led here by a name that somebody else owns, whoever stands between."""
    reply = through(server, ports["named"]).get("/v1/models")
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert "'kvstore'" in reply.error["message"] and "--allowed-host" in reply.error["message"]
    assert through(server, ports["same"]).get("/v1/models", Host="evil.example").error["code"] == "host_not_allowed"
    origin = {"Origin": "http://evil.example"}
    assert through(server, ports["plain"]).post("/chat", {}, **origin).error["code"] == "origin_not_allowed"


def test_an_answer_comes_through_while_it_is_made(server: Serving, ports: dict[str, int]) -> None:
    seen = threading.Event()
    held_from = server.engine.stats()["step"]["num_steps"] + 4

    def until_seen() -> None:
        """A few steps, and then none until the client has the first of them."""
        if server.engine.loop.runner.times.num_steps >= held_from:
            seen.wait(TIMEOUT_S)

    with before_each_step(server.engine, until_seen):
        connection = http.client.HTTPConnection("127.0.0.1", ports["plain"], timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = {"message": "Hello", "stream": True, "ignore_eos": True, "max_tokens": 20}
        connection.request("POST", "/chat", json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        seen.set()
        assert reply.read().endswith(b"data: [DONE]\n\n")
        connection.close()


# -- pages of other origins ------------------------------------------------------------------------------------------
CALL = """async ([url, key]) => {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json", "Idempotency-Key": url };
  try {
    const sent = await fetch(url, { method: "POST", headers, body: JSON.stringify({ message: "Hi", max_tokens: 2 }) });
    return [sent.status, sent.headers.get("x-request-id") !== null];
  } catch (error) {
    return error.name;
  }
}"""


def test_a_page_of_an_allowed_origin_may_call_and_no_other(server: Serving, ports: dict[str, int], tabs: Tabs) -> None:
    page = tabs.open(f"http://{NAME}:{ports['other']}")
    assert page.evaluate(CALL, [f"{server.url}/chat", KEY]) == [200, True]
    assert page.evaluate(CALL, [f"{server.url}/chat", "another-key"]) == [401, True]  # it can read why
    page.goto(f"http://evil.localhost:{ports['other']}")
    before = server.get("/sessions").json()["data"]
    assert page.evaluate(CALL, [f"{server.url}/chat", KEY]) == "TypeError"
    assert server.get("/sessions").json()["data"] == before
    tabs.errors.clear()


def test_requests_go_to_the_other_server_while_one_is_drained(server: Serving, tmp_path: Path) -> None:
    port, other = free_port(), server.server.port
    with serving(api_key=KEY, admin_key=ADMIN_KEY) as drained:
        servers = BALANCED.format(first=drained.server.port, second=other, port=port, common=COMMON)
        with nginx(tmp_path, servers, port):
            proxied = through(server, port)
            with crawling(drained.engine):
                running = Stream(drained, "/chat", {"message": "Count.", **LONG, "max_tokens": 60})
                assert isinstance(running.next(), dict)
                assert drained.request("POST", "/admin/drain", {}, ADMIN).json() == {"draining": True, "running": 1}
                for _ in range(4):
                    assert proxied.post("/chat", {"message": "Hello", **SHORT}).status == 200
            assert running.rest()[-1] == "[DONE]"
        assert metrics_page(drained.context.metrics, {}).count(b'status="503"') >= 1
