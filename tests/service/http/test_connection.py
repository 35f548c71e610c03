"""Connections from clients that are slow, many, silent or speak no HTTP; on raw sockets, with short limits. And few
descriptors: the kernel's limit is raised where that is possible, and refused in one line where it is not.
"""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.service.server_process import COMMAND, ENVIRONMENT
from tests.support.service.serving import KEY, raw_request, read_answer, read_to_end, server_fixture, serving
from tests.support.waiting import wait_until

HASTY_S, PAUSE_S = 0.5, 0.8
BODY = b'{"prompt": "hello"}'
server = server_fixture(api_key=KEY, max_body_bytes=100_000, max_connections=8)
NEEDED = 1024 + 192
LISTENING = """
import asyncio, asyncio.constants
from kvstore.service.http.telling import set_up_logging
from kvstore.service.settings.serve_options import ServeOptions
from kvstore.service.server import Server

asyncio.constants.ACCEPT_RETRY_DELAY = 0.2

async def listen():
    server = Server(ServeOptions(port=0))
    set_up_logging("text")
    await server.listen()
    print(server.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(listen())
"""


@pytest.fixture(scope="module")
def hasty():
    """It does not wait for heads and bodies for long."""
    with serving(api_key=KEY, header_timeout_s=HASTY_S, body_timeout_s=HASTY_S) as found:
        yield found


def head(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode()


POST = head(f"POST /tokenize HTTP/1.1\nHost: localhost\nAuthorization: Bearer {KEY}\n")


def test_a_head_that_does_not_end_or_comes_in_drops_is_not_waited_for(hasty):
    stop = threading.Event()

    def drop(raw: socket.socket) -> None:
        with suppress(OSError):
            while not stop.wait(0.02):
                raw.sendall(b"x")

    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(1))
        opened.callback(stop.set)
        connections = [opened.enter_context(hasty.connect()) for _ in range(5)]
        heads = (b"GET /", b"", b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: local")
        for raw, sent in zip(connections, heads, strict=True):
            raw.sendall(sent)
        pool.submit(drop, connections[0])
        assert [read_to_end(raw) for raw in connections] == [b""] * 5


@contextmanager
def connected(hasty):
    """A connection whose first request came in time, whatever this thread was kept from."""
    with ExitStack() as opened:
        with hasty.held():
            raw = opened.enter_context(hasty.connect())
            raw.sendall(raw_request("GET", "/health"))
        assert read_answer(raw).status == 200
        yield raw


def test_the_second_head_of_a_connection_has_a_deadline_too(hasty):
    with connected(hasty) as raw:
        raw.sendall(b"GET /ready HT")
        assert read_to_end(raw) == b""


def test_a_connection_may_rest_between_requests(hasty):
    with connected(hasty) as raw:
        threading.Event().wait(PAUSE_S)
        raw.sendall(raw_request("GET", "/ready", Connection="close"))
        assert read_to_end(raw).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed_in_the_end():
    with serving(keep_alive_s=0.7) as server, server.connect() as raw:
        raw.sendall(raw_request("GET", "/ready"))
        assert read_to_end(raw).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_end_is_not_waited_for(hasty):
    with hasty.connect() as raw:
        raw.sendall(POST + head("Content-Length: 100\n\n") + BODY)
        reply = read_answer(raw)
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")
    hasty.wait_until_idle()


def test_a_body_of_just_the_limit_is_read(server):
    body = BODY[:-1] + b" " * (100_000 - len(BODY)) + b"}"
    assert len(body) == 100_000
    assert server.post("/tokenize", body).status == 200


def test_a_body_that_ends_too_early_leaves_nothing(server):
    for text in ("Content-Length: 100\n\n{", "Transfer-Encoding: chunked\n\n5\n{"):
        with server.connect() as raw:
            raw.sendall(POST + head(text))
    server.wait_until(lambda: not server.server.connections)
    server.wait_until_idle()


def test_a_body_nobody_read_is_not_taken_for_a_request(server):
    with server.connect() as raw:
        raw.sendall(head("POST /tokenize HTTP/1.1\nHost: localhost\nContent-Length: 999\n\n"))
        raw.sendall(raw_request("GET", "/health"))
        reply = read_answer(raw)
        assert (reply.status, reply.headers["connection"]) == (401, "close")
        assert read_to_end(raw) == b""


@pytest.mark.parametrize(("sent", "status", "code"), [
    (POST + head("Content-Length: 100001\n\n"), 413, "body_too_large"),
    (POST + head(f"Content-Length: {10**12}\n\n"), 413, "body_too_large"),
    (POST + head("Transfer-Encoding: chunked\n\n") + b"1ADB0\r\n" + b" " * 0x1ADB0 + b"\r\n", 413, "body_too_large"),
    (POST + head("Transfer-Encoding: chunked\n\nxyz\n"), 400, "bad_request"),
    (POST + head("Content-Encoding: gzip\nContent-Length: 2\n\n") + b"\x1f\x8b", 415, "unsupported_media_type"),
])  # fmt: skip
def test_bodies_that_are_not_taken(server, sent, status, code):
    with server.connect() as raw:
        raw.sendall(sent)
        reply = read_answer(raw)
    assert (reply.status, reply.error["code"]) == (status, code)
    server.wait_until_idle()


@pytest.mark.parametrize("sent", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    b"hello\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA" + b"a" * 100_000 + b": b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(1000)) + b"\r\n",
])  # fmt: skip
def test_what_is_no_http_gets_an_error_in_our_shape(server, sent):
    with server.connect() as raw:
        raw.sendall(sent)
        reply = read_answer(raw)
        assert read_to_end(raw) == b""
    assert (reply.status, reply.error["code"]) == (400, "bad_request")
    assert reply.headers["server"] == "kvstore" and reply.headers["x-request-id"]


def test_the_number_of_connections_is_capped(server):
    server.wait_until(lambda: not server.server.connections)
    kept = [server.connect() for _ in range(8)]
    try:
        for raw in kept:
            raw.sendall(raw_request("GET", "/ready"))
            assert read_answer(raw).status == 200
        with server.connect() as raw:
            reply = read_answer(raw)
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        kept.pop().close()
        server.wait_until(lambda: len(server.server.connections) == 7)
        assert server.get("/ready").status == 200
    finally:
        for raw in kept:
            raw.close()


def test_who_waits_to_be_asked_for_the_body_is_asked_when_let_in(server):
    asks = f"POST /tokenize HTTP/1.1\nHost: localhost\nExpect: 100-continue\nContent-Length: {len(BODY)}\n"
    with server.connect() as raw:
        raw.sendall(head(f"{asks}Authorization: Bearer {KEY}\n\n"))
        assert raw.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(BODY)
        assert read_answer(raw).status == 200
    with server.connect() as raw:
        raw.sendall(head(f"{asks}\n"))
        assert raw.recv(4096).startswith(b"HTTP/1.1 401")
    with server.connect() as raw:
        raw.sendall(raw_request("GET", "/health", Expect="a-pony"))
        assert read_answer(raw).status == 200


def test_few_large_bodies_arrive_at_once_and_small_ones_do_not_wait():
    with serving(body_timeout_s=2.0) as server, server.connect() as raw:
        large = server.context.limits.large_bodies = asyncio.Semaphore(1)
        raw.sendall(head(f"POST /tokenize HTTP/1.1\nHost: localhost\nContent-Length: {2**20 + 2}\n\n"))
        assert not large.locked()  # nothing of it has arrived
        raw.sendall(b" " * (2**20 + 1))
        server.wait_until(large.locked)
        assert server.post("/tokenize", BODY).status == 200
        with server.connect() as other:  # of which nobody knows how large it is
            other.sendall(head("POST /tokenize HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n"))
            other.sendall(head(f"Authorization: Bearer {KEY}\n\n{len(BODY):x}\n") + BODY + b"\r\n0\r\n\r\n")
            assert read_answer(other).status == 200
        reply = read_answer(raw)
        assert (reply.status, reply.error["code"]) == (408, "body_timeout")
        server.wait_until(lambda: not large.locked())
        assert server.post("/tokenize", b" " * 2**20 + BODY).status == 200


@pytest.mark.parametrize("line", ["GET /health HTTP/0.9", "GET /health", "GET /no HTTP/0.9", "GET /health HTTP/2.0"])
def test_other_versions_of_http_are_refused(server, line):
    with server.connect() as raw:
        raw.sendall(f"{line}\r\nHost: localhost\r\n\r\n".encode())
        answer = read_to_end(raw)
        assert b" 400 " in answer.partition(b"\r\n")[0] and b'"bad_request"' in answer, answer
    for version in ("1.0", "1.1"):
        with server.connect() as raw:
            raw.sendall(f"GET /health HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
            assert read_answer(raw).status == 200


def serve(tmp_path: Path, soft: int, hard: int, *flags: str) -> subprocess.Popen:
    limits = (sys.executable, "-m", "tests.children.within", "files", f"{soft},{hard}")
    serves = (*COMMAND, "serve", "--port", "0", "--store", str(tmp_path / "store"), "--device", "cpu", *flags)
    return subprocess.Popen([*limits, *serves], env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, text=True)


def test_the_soft_limit_is_raised_to_what_is_needed(tmp_path):
    with serve(tmp_path, 64, 4096) as server:
        assert "loading the model" in server.stderr.readline()
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (NEEDED, 4096)
        server.kill()


@pytest.mark.parametrize(("hard", "flags", "remedy"), [
    (128, (), "Docker)"),
    (1024, (), "or give --max-connections 832 or fewer"),
    (1024, ("--max-connections", "900"), "or give --max-connections 832 or fewer"),
])  # fmt: skip
def test_a_hard_limit_that_is_too_low_is_told_before_anything_is_opened(tmp_path, hard, flags, remedy):
    with serve(tmp_path, 64, hard, *flags) as server:
        _, said = server.communicate(timeout=400)
    assert server.returncode == 1 and said.count("\n") == 1 and said.rstrip().endswith(remedy), said
    assert f"open files, but this process may have {hard}" in said and not (tmp_path / "store").exists()


def test_connections_that_cannot_be_accepted_are_told_in_a_line_and_served_later(tmp_path):
    log = tmp_path / "log"
    with ExitStack() as opened:
        said = opened.enter_context(log.open("w"))
        server = opened.enter_context(subprocess.Popen(
            [sys.executable, "-c", LISTENING], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=said, text=True
        ))  # fmt: skip
        opened.callback(server.send_signal, signal.SIGKILL)
        port = int(server.stdout.readline())
        held = len(os.listdir(f"/proc/{server.pid}/fd"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (held + 3, 4096))
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        wait_until(lambda: "cannot be accepted" in log.read_text(), "it says so")
        time.sleep(0.6)  # two more rounds of trying
        assert log.read_text().count("\n") == 1 and "Too many open files" in log.read_text()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (held + 100, 4096))
        for connection in connections:
            connection.settimeout(60)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 503")
