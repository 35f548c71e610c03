"""`kvstore doctor`: against our own server, killed and started again, and against stand-ins for vLLM and SGLang."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvstore.service.command import doctor
from tests.support.faults import constants
from tests.support.redis_server import free_port
from tests.support.service.server_process import launched, run_command
from tests.support.service.serving import KEY
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"name": "Qwen3_5Text", "tokenizer": True, "max_position_embeddings": 1024}  # one that keeps states


@pytest.mark.parametrize("is_lost", [False, True])
def test_our_own_server_is_killed_and_the_conversation_comes_back_unless_its_store_is_lost(model, tmp_path, is_lost):
    store, killed, port = tmp_path / "store", tmp_path / "killed", free_port()
    flags = (model, "--port", str(port))
    with launched(store, *flags) as server, ThreadPoolExecutor(1) as pool:
        command = f"kill -9 {server.process.pid}; {f'rm -r {store};' if is_lost else ''} touch {killed}"
        asked = ("doctor", "--url", f"http://127.0.0.1:{port}", "--restart-command", command, "--json")
        running = pool.submit(run_command, *asked, KVSTORE_API_KEY=KEY)
        wait_until(lambda: killed.exists() or running.done(), "the command has run")
        assert killed.exists(), running.result()
        server.process.wait(TIMEOUT_S)  # it may be writing to a slow disk, and has its port until then
        with launched(store, *flags):
            done = running.result()
    found = json.loads(done.stdout)
    assert found["host"] == "kvstore" and "restarting" in done.stderr
    if is_lost:
        assert (done.returncode, found["cached_tokens"]) == (1, 0), done
        assert "prompt tokens came back: the server's store does not know the conversation" in done.stderr, done
    else:
        assert (done.returncode, found["cause"]) == (0, None), done
        assert found["by_tier"] == {"disk": found["cached_tokens"]} and found["share"] > 0.9


class Host(ThreadingHTTPServer):
    """Answers as vLLM or SGLang does, and is away when first asked whether it is up. cached: of each turn's prompt."""

    daemon_threads = True

    def __init__(self, name, cached, details, metrics):
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.cached, self.details, self.metrics = name, cached, details, metrics
        self.asked, self.was_away = [], False


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        host = self.server
        if self.path == "/health" and not host.was_away:
            host.was_away = True
            return self.answer(503, {})
        if self.path == "/metrics":
            return self.answer(200, host.metrics)
        models = [{"id": "m", "owned_by": host.name, "max_model_len": 4096}]
        return self.answer(200, {"data": models} if self.path == "/v1/models" else {})

    def do_POST(self):
        host, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in body:
            return self.answer(400, {"error": {"message": "no chat template"}})
        host.asked.append(body)
        cached = host.cached[len(host.asked) - 1]
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}
        return self.answer(200, {"choices": [{"text": "yes"}], "usage": usage, **host.details})

    def answer(self, status, body):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def host():
    """Starts a stand-in, and gives it with the flags for the doctor to find it."""
    made = []

    def start(name, cached, details=None, metrics=""):
        made.append(Host(name, cached, details or {}, metrics))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return made[-1], ["doctor", "--url", f"http://127.0.0.1:{made[-1].server_port}"]

    with constants(doctor, SETTLE_S=0.0):
        yield start
    for one in made:
        one.shutdown()
        one.server_close()


CHUNKS = 'vllm:kvstore_disk_blocks{{engine="0"}} {}.0\n'
SOURCES = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 0.0\n'


@pytest.mark.parametrize(
    ("name", "cached", "metrics", "cause"),
    [
        ("vllm", (0, 300, 0), SOURCES, "came back: vLLM runs without kvstore's tier"),
        ("vllm", (0, 300, 0), SOURCES + CHUNKS.format(0), "came back: vllm handed over nothing"),
        ("vllm", (0, 300, 0), SOURCES + CHUNKS.format(7), "came back: the tier has 7 chunks; vLLM took none"),
        ("sglang", (0, 0, 0), "", "sglang handed over nothing; nor did turn 2 find anything of turn 1"),
        ("sglang", (None, None, None), "", "is not known"),
    ],
)
def test_where_nothing_comes_back_the_cause_is_one_line(run, host, name, cached, metrics, cause):
    _, flags = host(name, cached, metrics=metrics)
    code, _, error = run(*flags)
    assert code == 1 and cause in error and error.count("\n") == 1


def test_sglang_says_which_tier_it_was(run, host):
    told = {"sglext": {"cached_tokens_details": {"device": 0, "host": 100, "storage": 1500}}}
    server, flags = host("sglang", [0, 350, 1600], told)
    code, out, error = run(*flags)
    assert (code, error) == (0, "") and "1,600 of them cached" in out and "cpu 100, disk 1,500" in out
    first, second, third = (one["prompt"] for one in server.asked)
    assert second.startswith(first + "yes") and third.startswith(second + "yes") and len(third) < 4096


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--url", "localhost:8000"), 2, "--url is 'localhost:8000'; give an address such as"),
        (("--url", "http://127.0.0.1:0"), 2, "--url is 'http://127.0.0.1:0'; give an address such as"),
        (("--url", "http://127.0.0.1:80000"), 2, "--url is 'http://127.0.0.1:80000'; give an address such as"),
        (("--url", "http://[::1"), 2, "--url is 'http://[::1'; give an address such as"),
        (("--url", "http://127.0.0.1:1"), 1, "http://127.0.0.1:1 does not answer: "),
        (("--tokens", "3"), 2, "--tokens"),
    ],
)
def test_bad_input_is_one_line(run, flags, code, words):
    found, out, error = run("doctor", *flags)
    assert (found, out, error.count("\n")) == (code, "", 1) and words in error


def test_a_model_that_is_not_there_and_a_command_that_fails_are_told(run, host):
    server, flags = host("vllm", [0, 0, 0, 0])
    code, _, error = run(*flags, "--model", "other")
    assert code == 2 and "--model is 'other', which is not served there; it serves m" in error
    server.was_away = True
    code, _, error = run(*flags, "--restart-command", "exit 7")
    assert code == 1 and "--restart-command ended with 7" in error
    code, _, error = run(*flags, "--restart-command", "true", "--wait", "1s")
    assert code == 1 and "has not gone away within 1 s" in error
