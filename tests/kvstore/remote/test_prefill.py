"""The server that is asked for prompts, against a small HTTP server that answers, refuses, is silent or goes away."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvstore.blocks.ids import token_bytes
from kvstore.remote.address import PrefillAddress
from kvstore.remote.prefill import PrefillJob, PrefillServer
from tests.support.waiting import TIMEOUT_S, wait_until

KEY, FINGERPRINT, ROOT = bytes(range(32)), "ab" * 32, b"r" * 32
TOKENS = list(range(1, 33))


class Other(ThreadingHTTPServer):
    """said: prompts that came. answers: what the next ones get, (status, body); else the number of blocks.

    speaks: cleared, prompts are not answered. is_up: what it answers to probes.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.said, self.answers, self.speaks = [], [], threading.Event()
        self.num_probes, self.is_up = 0, True
        self.speaks.set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        """Who asked may be gone."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Authorization"]) == ("/base/prefill", f"Bearer {KEY.hex()}")
        if body["token_ids"]:
            self.server.said.append(body)
            self.server.speaks.wait()
        else:
            self.server.num_probes += 1
        if not body["token_ids"] and not self.server.is_up:
            status, text = error(503, "starting")
        elif self.server.answers:
            status, text = self.server.answers.pop(0)
        else:
            status, text = 200, json.dumps({"num_blocks": len(body["token_ids"]) // 16})
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def other():
    with Other() as found:
        yield found
        found.speaks.set()
        found.shutdown()


@pytest.fixture
def asked(other):
    address = PrefillAddress("127.0.0.1", other.server_port, base="/base")
    found = PrefillServer(address, KEY, FINGERPRINT, lambda: None)
    wait_until(lambda: other.num_probes, "the first probe")
    yield found
    found.close(TIMEOUT_S)


def ask(server, name=b"one", seconds=TIMEOUT_S):
    return server.ask(name, PrefillJob(token_bytes(TOKENS), ROOT, "ada", seconds, [5]))


def answer(server):
    done = []
    wait_until(lambda: done.extend(server.completed()) or done, "an answer")
    return done


def failures(server):
    return server.as_dict()["failures"]


def error(status, code):
    return status, json.dumps({"error": {"message": "no", "code": code}})


def test_a_prompt_is_computed_there(other, asked):
    assert ask(asked) and answer(asked) == [(b"one", 2)]
    said = {"token_ids": TOKENS, "root": ROOT.hex(), "fingerprint": FINGERPRINT, "tenant": "ada", "turn_starts": [5]}
    assert other.said == [said]
    assert {key: asked.as_dict()[key] for key in ("computed", "blocks", "failures")} == {
        "computed": 1, "blocks": 2, "failures": {},
    }  # fmt: skip
    assert asked.as_dict()["seconds"]["sum"] > 0


def test_a_prompt_that_is_refused_says_nothing_about_others(other, asked):
    other.answers.append(error(400, "context_length_exceeded"))
    assert ask(asked) and answer(asked) == [(b"one", 0)]
    assert ask(asked) and answer(asked) == [(b"one", 2)]
    assert failures(asked) == {"context_length_exceeded": 1}


@pytest.mark.parametrize("said", [error(503, "starting"), error(409, "another_model"), (200, "nonsense"), (502, "")])
def test_after_a_failure_nobody_asks_until_a_probe_has_succeeded(other, asked, said):
    other.is_up = False
    other.answers.append(said)
    assert ask(asked) and answer(asked) == [(b"one", 0)]
    assert not ask(asked) and failures(asked)["down"] == 1 and asked.as_dict()["degraded"]
    other.is_up = True
    wait_until(lambda: asked.completed() or not asked.health.error, "a probe succeeds")
    assert ask(asked) and answer(asked) == [(b"one", 2)]


def test_a_server_that_is_late_is_not_waited_for(other, asked):
    other.speaks.clear()
    other.is_up = False
    assert ask(asked, seconds=0.2) and answer(asked) == [(b"one", 0)]
    assert failures(asked)["late"] == 1 and not ask(asked)


def test_what_waits_is_bounded(other, asked):
    other.speaks.clear()
    num_taken = 0
    while ask(asked):
        num_taken += 1
    assert num_taken == 256 and failures(asked) == {"busy": 1}


def test_closing_waits_for_nothing_that_is_computed(other, asked):
    other.speaks.clear()
    assert all(ask(asked, bytes([i])) for i in range(40))  # some wait for a thread
    wait_until(lambda: len(other.said) == 16)
    asked.close(TIMEOUT_S)
    assert len(other.said) == 16


def test_a_server_that_is_not_there_is_found_at_the_start():
    address = PrefillAddress("127.0.0.1", 1)
    server = PrefillServer(address, KEY, FINGERPRINT, lambda: None)
    wait_until(lambda: server.health.error, "the first probe")
    assert "refused" in str(server.as_dict()["degraded"]) and not ask(server)
    server.close(TIMEOUT_S)
