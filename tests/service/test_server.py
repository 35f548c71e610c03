"""Start and end of the server: the port, loading, signals, running streams, exit codes."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from kvstore.engine.outputs import describe_tiers
from kvstore.engine.text.language import Language
from kvstore.errors import ConfigError, KVStoreError, ModelError
from kvstore.service.api.exchange import EventStream
from kvstore.service.http.errors import Route
from kvstore.service.server import Server, has_driver, run_serve
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.service.server_process import launched
from tests.support.service.serving import Plain, raw_request, read_answer, serving
from tests.support.service.talking import LONG, Stream, stopped
from tests.support.waiting import TIMEOUT_S, wait_in_loop, wait_until

ROOT = Path(__file__).parents[2]
begun, release = threading.Event(), threading.Event()


async def stream(request):
    """Two events; the second comes when the test says so."""
    async with EventStream(request, Plain()) as events:
        await events.send({"n": 1})
        begun.set()
        await wait_in_loop(release.is_set)
        await events.send({"n": 2})
    return events.response


async def silent(request):
    await asyncio.Event().wait()


ROUTES = (Route("GET", "/stream", stream, "user", ""), Route("GET", "/silent", silent, "user", ""))


@pytest.fixture(autouse=True)
def fresh():
    begun.clear()
    release.clear()


class FakeEngine:
    """What an AsyncEngine asks of an engine that does nothing."""

    facts = SimpleNamespace(model_name="fake", max_model_len=64, block_size=16)
    tokenizer, has_work = None, False
    client = SimpleNamespace(closed=False)
    core = SimpleNamespace(read_here=lambda: False, state="running", silent_s=0.0)
    chats = SimpleNamespace(client=None, language=Language(None, None, ""), answers=None)

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def check_integrity(self) -> None:
        pass

    def stats(self) -> dict:
        return {"hbm": {"blocks": 4, "block_bytes": 1024}}


# -- running streams -------------------------------------------------------------------------------------------------
def open_stream(server) -> socket.socket:
    """One that has sent its first event."""
    raw = server.connect()
    raw.sendall(raw_request("GET", "/stream", Connection="close"))
    assert begun.wait(TIMEOUT_S)
    return raw


def stopping(server) -> threading.Thread:
    """Begin to close the server, as a signal would."""
    thread = threading.Thread(target=lambda: server.run(server.server.close()))
    thread.start()
    server.wait_until(lambda: server.context.state == "stopping")
    return thread


def test_a_running_stream_may_finish_while_nothing_new_begins():
    with serving(engine_factory=FakeEngine, routes=ROUTES, shutdown_timeout_s=TIMEOUT_S) as server:
        with open_stream(server) as raw:
            thread = stopping(server)
            reply = server.get("/silent")
            assert (reply.status, reply.error["code"]) == (503, "stopping")
            release.set()
            assert read_answer(raw).events() == [{"n": 1}, {"n": 2}, "[DONE]"]
        thread.join(TIMEOUT_S)
        assert server.engine.is_closed


def test_a_stream_that_does_not_finish_gets_an_error():
    with serving(engine_factory=FakeEngine, routes=ROUTES, shutdown_timeout_s=0.05) as server:
        with open_stream(server) as raw, server.connect() as other:
            other.sendall(raw_request("GET", "/silent"))
            server.wait_until(lambda: server.context.limits.num_open == 2)
            thread = stopping(server)
            first, error, last = read_answer(raw).events()
            reply = read_answer(other)
        thread.join(TIMEOUT_S)
    assert (first, error["error"]["code"], last) == ({"n": 1}, "stopping", "[DONE]")
    assert (reply.status, reply.error["code"]) == (503, "stopping")


def test_a_reader_that_takes_nothing_does_not_keep_the_server():
    with serving(engine_factory=FakeEngine, routes=ROUTES, shutdown_timeout_s=0.05) as server:
        raw = open_stream(server)
        stopping(server).join(TIMEOUT_S)
        raw.close()
    assert server.engine.is_closed


# -- the port and the model ------------------------------------------------------------------------------------------
def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(KVStoreError, match=f"port {port} on 127.0.0.1 is in use"):
            asyncio.run(Server(ServeOptions(port=port)).listen())


def test_a_host_that_is_not_this_machine_is_named():
    options = ServeOptions(host="192.0.2.1", port=0, allow_no_key=True)
    with pytest.raises(KVStoreError, match=r"192\.0\.2\.1"):
        asyncio.run(Server(options).listen())


def test_the_port_answers_while_the_model_loads():
    loading = threading.Event()

    async def scenario():
        server = Server(ServeOptions(port=0), ROUTES)
        await server.listen()

        def slow():
            loading.wait(TIMEOUT_S)
            return FakeEngine()

        task = asyncio.create_task(server.load(slow))
        raw = await asyncio.to_thread(connected, server.port, "/silent")
        loading.set()
        await task
        assert server.context.state == "running"
        assert server.description()["tiers"] == "hbm 4.0 KiB"
        await server.close()
        return raw

    reply = asyncio.run(scenario())
    assert (reply.status, reply.error["code"]) == (503, "starting")


def connected(port: int, path: str):
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as raw:
        raw.sendall(raw_request("GET", path))
        return read_answer(raw)


def test_a_model_that_cannot_be_loaded_ends_it():
    def fails():
        raise ModelError("no weights there")

    with pytest.raises(ModelError, match="no weights"), serving(engine_factory=fails):
        pass


def test_options_are_checked_before_anything_is_opened(tmp_path):
    with pytest.raises(ConfigError, match="api-key-file"):
        run_serve(None, {}, ServeOptions(api_key_file=tmp_path / "none"))


@pytest.mark.skipif(has_driver(), reason="there may be such a device")
def test_a_device_that_is_not_there_is_told_before_anything_is_opened():
    with pytest.raises(ConfigError, match="device is cuda:1, but this machine has no driver for CUDA devices"):
        run_serve(None, {"device": "cuda:1"}, ServeOptions())


def test_tiers_in_words():
    stats = {
        "hbm": {"blocks": 2**10, "block_bytes": 2**20}, "cpu": {"blocks": 0, "block_bytes": 2**20},
        "disk": {"capacity_bytes": 3 * 2**30},
    }  # fmt: skip
    assert describe_tiers(stats) == "hbm 1.0 GiB, disk 3.0 GiB"
    stats["hbm"]["is_auto"] = True
    assert describe_tiers(stats) == "hbm 1.0 GiB (auto), disk 3.0 GiB"


# -- the process -----------------------------------------------------------------------------------------------------
SERVES = """
import sys
sys.path[:0] = ["tests", "."]
from tests.service.test_server import FakeEngine, ROUTES
from kvstore.service import server
from kvstore.service.settings.serve_options import ServeOptions
known = server.Server.__init__
server.Server.__init__ = lambda self, options, **more: known(self, options, ROUTES, **more)
server.open_engine = lambda *_: FakeEngine()
for log_format in ("text", "json", "text"):
    options = ServeOptions(port=0, shutdown_timeout_s=120.0, log_format=log_format)
    code = server.run_serve(None, {}, options)
    print("code", code, flush=True)
"""


@pytest.fixture(scope="module")
def process():
    """A process that serves three times, one after the other, and prints each exit code. SIGHUP is ignored in it."""
    command = ["nohup", sys.executable, "-c", SERVES]
    found = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield found
    found.kill()
    found.communicate()


def line_with(process, word: str) -> str:
    while word not in (line := process.stderr.readline()):
        assert line, f"it ended before it said {word}"
    return line


@contextmanager
def streaming(process):
    """While streams of the server that gets ready next run, the second since SIGHUP; that server's first line."""
    ready = line_with(process, "ready")
    url = f"http://127.0.0.1:{re.search(r'127[.]0[.]0[.]1:([0-9]+)', ready)[1]}/stream"
    with urlopen(url, timeout=TIMEOUT_S) as reply:
        assert reply.readline() == b'data: {"n":1}\n'
        process.send_signal(signal.SIGHUP)
        with urlopen(url, timeout=TIMEOUT_S) as other:
            assert other.readline() == b'data: {"n":1}\n'
            yield ready


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_order(process, number, code):
    with streaming(process) as ready:
        assert "fake" in ready and "hbm 4.0 KiB" in ready and "none" in ready
        process.send_signal(number)
        line_with(process, "stopping")
        assert process.poll() is None, "a stream runs"
    assert process.stdout.readline() == f"code {code}\n"


def test_a_second_signal_ends_it_at_once(process):
    with streaming(process):
        process.send_signal(signal.SIGINT)
        line_with(process, "stopping")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_keys_come_and_go_while_streams_run_and_systemd_hears_of_its_begin_and_its_end(tmp_path, started_anew):
    """As a user starts it; only its engines' processes load torch."""
    keys, manager = tmp_path / "keys", socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    keys.touch(0o600)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(TIMEOUT_S)

    def change(text: str, told: str) -> None:
        keys.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: told in server.log.read_text(), told)

    keys.write_text("anna:key-of-anna\nbert:key-of-bert\n")
    environment, flags = {"NOTIFY_SOCKET": str(tmp_path / "notify")}, ("--data-parallel-size", "2")
    with manager, launched(tmp_path / "store", "--api-key-file", str(keys), *flags, environment=environment) as server:
        assert manager.recv(100) == b"READY=1"
        assert server.with_torch == [False, True, True]
        of_anna, of_bert, of_clara = (replace(server, key=f"key-of-{name}") for name in ("anna", "bert", "clara"))
        answers = [Stream(one, "/chat", {"message": "Count.", **LONG}) for one in (of_anna, of_bert)]
        first = [answer.next() for answer in answers]
        assert of_clara.get("/sessions").status == 401
        change("bert:key-of-bert\nclara:key-of-clara\n", '"keys read again"')
        *_, error, done = answers[0].rest()
        assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")
        *events, done = stopped(of_bert, answers[1], first[1]["session_id"])
        assert done == "[DONE]" and not any("error" in event for event in events)
        assert [one.get("/sessions").status for one in (of_anna, of_bert, of_clara)] == [401, 200, 200]
        change("bert:short\n", "printable ASCII characters without spaces; the keys of before stay")
        keys.unlink()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "No such file or directory; the keys of before stay" in server.log.read_text())
        assert [one.get("/sessions").status for one in (server, of_anna, of_bert)] == [200, 401, 200]
        server.process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert server.process.wait(TIMEOUT_S) == 0


def test_what_its_process_cannot_serve_is_refused_with_2_in_one_line(run):
    code, _, said = run("serve", "--port", "0", "--disk", "0", "--hbm", "1KiB")
    told = [one for one in said.splitlines() if " INFO " not in one]
    assert code == 2 and len(told) == 1 and told[0].startswith("kvstore: --hbm is 1.0 KiB, but one block of"), said
