"""Two replicas on a Ray cluster of one node: where requests go, what is lost when one is killed, how they end."""

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.service.server import EXIT_ENGINE_FAILED
from tests.support.redis_server import free_port
from tests.support.service.certificates import make_certificate
from tests.support.service.replicas import FleetServer, RayFleet, Whose, end, needs_ray, ray_fleet, replicas_of
from tests.support.service.server_process import COMMAND, ENVIRONMENT, SIZES, run_command
from tests.support.service.serving import Reply
from tests.support.service.talking import LONG, SHORT, TALKING_ROUTES, Stream, chat, num_turns, talking_body
from tests.support.shared_sessions import answers_without_a_store
from tests.support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.ray, needs_ray]
TOLD = "I would like to tell you something about my garden, where there are apples, pears and a few old cherry trees."


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    with ray_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        server = fleet.launch("--replicas", "2")
        try:
            yield server
        finally:
            end(server)


def details(answer: dict) -> dict[str, int]:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def test_a_conversation_stays_with_its_replica_from_its_first_turn_on(fleet):
    seen = set()
    for number in range(8):
        whose = Whose(fleet)
        session_id = chat(fleet, f"Hello, number {number}.")["session_id"]
        first = whose.answered()
        again = chat(fleet, "Go on.", session_id)
        assert details(again)["hbm"] > 0
        assert whose.answered() == first and len(first) == 1
        seen |= set(first)
    assert seen == {"replica-0", "replica-1"}


@pytest.mark.parametrize("path", TALKING_ROUTES)
def test_routes_stream_to_their_end(fleet, path):
    stream = Stream(fleet, path, {**talking_body(path, "Hello."), **SHORT})
    events = stream.rest()
    assert stream.status == 200 and len(events) > 4
    assert events[-1] == "[DONE]" or events[-1]["type"] == "response.incomplete"  # by its max_tokens


def test_headers_mean_what_they_mean_to_one_server(fleet):
    """Those that come twice, and those that are no ASCII."""
    body = json.dumps({"message": "Once only.", **SHORT}).encode()

    def asked(*headers: bytes) -> Reply:
        with closing(fleet.connect()) as raw:
            head = [b"POST /chat HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body), b"Connection: close"]
            raw.sendall(b"\r\n".join((*head, b"Content-Type: application/json", *headers, b"", body)))
            reply = http.client.HTTPResponse(raw)
            reply.begin()
            return Reply(reply.status, dict(reply.getheaders()), reply.read())

    key, wrong = b"Authorization: Bearer " + fleet.key.encode(), b"Authorization: Bearer wrong"
    first, again, other = (
        asked(key, *(b"Idempotency-Key: " + one for one in names)).json()["session_id"]
        for names in ((b"first", b"second"), (b"first",), (b"second",))
    )
    assert first == again != other
    lower = asked(b"authorization: bearer   " + fleet.key.encode(), b"idempotency-key: first")
    assert lower.json()["session_id"] == first, "it is the tenant's, however its key is written"
    assert [asked(key, wrong).status, asked(wrong, key).status] == [200, 401]
    for letter in ("\u00e9".encode(), b"\xe9"):
        assert asked(key + letter).status == 401
        refused = asked(key, b"Idempotency-Key: " + letter)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value")


def test_errors_have_their_shape(fleet):
    found = [
        fleet.get("/nothing"), fleet.get("/sessions/unknown"), fleet.post("/chat", {"message": 3}),
        fleet.post("/chat", b"no JSON"), fleet.request("GET", "/sessions", headers={"Authorization": None}),
        fleet.request("GET", "/admin/stats"), fleet.request("PUT", "/chat", {}),
        fleet.post("/v1/chat/completions", b" " * (40 << 20)), fleet.get("/version", Host="evil.example.org"),
        fleet.get("/health", Host="evil.example.org"), fleet.post("/health", {}),
        fleet.post("/chat", {"message": "Hello.", "session_id": "a\r\nX-New-Session: b"}),
        fleet.get("/sessions/a%0D%0Ab"), fleet.post("/chat", {"message": "Hello.", "session_id": "a" * 20_000}),
        fleet.post("/chat", b'{"message": ' + b"[" * 20_000),
    ]  # fmt: skip
    codes = [(reply.status, reply.error["code"]) for reply in found]
    assert codes == [
        (404, "not_found"), (404, "session_not_found"), (400, "invalid_value"), (400, "invalid_json"),
        (401, "invalid_api_key"), (403, "admin_only"), (405, "method_not_allowed"), (413, "body_too_large"),
        (403, "host_not_allowed"), (403, "host_not_allowed"), (405, "method_not_allowed"), (400, "invalid_value"),
        (400, "invalid_value"), (400, "invalid_value"), (400, "invalid_value"),
    ]  # fmt: skip
    assert all("x-request-id" in reply.headers for reply in found)


def test_all_replicas_answer_what_concerns_all(fleet):
    assert fleet.get("/health").json()["replicas"].keys() == {"replica-0", "replica-1"}
    assert fleet.admin("POST", "/admin/flush").json()["replicas"].keys() == {"replica-0", "replica-1"}
    assert fleet.get("/").body.startswith(b"<!doctype html>")
    for path in ("/", "/health"):
        head = fleet.request("HEAD", path)
        assert (head.status, head.body) == (200, b"")


def test_a_client_that_goes_ends_its_answer(fleet):
    session_id = chat(fleet, "Hello.")["session_id"]
    stream = Stream(fleet, "/chat", {"message": "Go on.", "session_id": session_id, **LONG, "max_tokens": 900})
    stream.next()
    stream.leave()
    wait_until(lambda: b'finished_reason="abort"} 1' in fleet.get("/metrics").body, "its answer is aborted")
    assert chat(fleet, "And now?", session_id)["turn"] == 2


def are_both_there(server: FleetServer) -> bool:
    return set(replicas_of(server)) == {"replica-0", "replica-1"} and len(server.get("/health").json()["replicas"]) == 2


def test_the_other_replica_goes_on_from_the_shared_tier(fleet):
    said, whose = [f"Listen. {TOLD}", "What trees are there?", "And what else?"], Whose(fleet)
    first = chat(fleet, said[0])
    session_id, (name,) = first["session_id"], whose.answered()
    answers = [first, chat(fleet, said[1], session_id)]
    fleet.flush()
    assert whose.answered() == [name]
    replicas_of(fleet)[name].kill()
    answers.append(chat(fleet, said[2], session_id))
    assert whose.answered() == [{"replica-0": "replica-1", "replica-1": "replica-0"}[name]]
    assert details(answers[-1])["remote"] >= (answers[1]["usage"]["total_tokens"] - 1) // 16 * 16 > 0
    texts = [answer["message"]["content"] for answer in answers]
    assert texts == answers_without_a_store([said], SHORT["max_tokens"])[0]
    wait_until(lambda: are_both_there(fleet), "it is started again")
    assert fleet.admin("GET", "/admin/stats").json()["replicas"][name]["disk"]["blocks"] > 0  # what it had before


def test_a_replica_is_killed_in_the_middle_of_a_turn(fleet):
    whose = Whose(fleet)
    session_id = chat(fleet, "Hello.")["session_id"]
    (name,) = whose.answered()
    victim = replicas_of(fleet)[name]
    stream = Stream(fleet, "/chat", {"message": "This is not kept.", "session_id": session_id, **LONG})
    stream.next()
    victim.kill()
    assert stream.rest()[-1]["error"]["code"] == "replica_lost"
    replies = []

    def is_answered() -> bool:  # its turn held the session, until the lease ends or the replica is there again
        replies.append(fleet.post("/chat", {"message": "Go on.", "session_id": session_id, **SHORT}))
        assert replies[-1].status in (200, 409), replies[-1].body
        return replies[-1].status == 200

    wait_until(is_answered, "the session is free again")
    assert replies[-1].json()["turn"] == 2
    wait_until(lambda: are_both_there(fleet), "it is started again")
    assert num_turns(fleet, session_id) == 2


def test_at_the_end_answers_are_finished_and_all_is_kept(tmp_path):
    with ray_fleet(tmp_path) as fleet:
        server = fleet.launch("--replicas", "2", "--shutdown-timeout", "60")
        sessions = [chat(server, f"{TOLD} Number {number}.")["session_id"] for number in range(4)]
        streams = [Stream(server, "/chat", {"message": "Go on.", "session_id": one, **LONG}) for one in sessions]
        for stream in streams:
            stream.next()
        with ThreadPoolExecutor(len(streams)) as threads:
            rests = [threads.submit(stream.rest) for stream in streams]
            assert end(server) == 0
            for rest in rests:
                assert rest.result()[-2]["finish_reason"] == "length"
        for one in sessions:
            shown = json.loads(run_command("sessions", "show", one, *fleet.flags[:2], "--json").stdout)
            assert len(shown["messages"]) == 4
        num_blocks = 0
        for name in ("replica-0", "replica-1"):
            assert run_command("verify", "--store", fleet.store / name).returncode == 0
            stats = json.loads(run_command("stats", "--store", fleet.store / name, "--json").stdout)
            num_blocks += stats["disk"]["blocks"]
        assert num_blocks >= len(sessions) * LONG["max_tokens"] // 16
        assert len(fleet.redis.ask("KEYS", "*")) > 0


ON_CLUSTER = """
import sys
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    def __call__(self): ...

ray.init(address="auto", logging_level="warning")
if sys.argv[1] == "run":
    serve.run(Other.bind(), name="other", route_prefix="/other")
else:
    serve.delete(sys.argv[2])
"""


def test_a_killed_command_leaves_its_replicas_and_what_others_do_is_seen(tmp_path):
    with ray_fleet(tmp_path) as fleet:
        server = fleet.launch("--replicas", "1")
        session_id = chat(server, "Hello.")["session_id"]
        before = replicas_of(server)
        server.kill()
        assert chat(server, "Still there?", session_id)["turn"] == 2

        server = fleet.launch("--replicas", "1")  # takes its place, at another port
        assert chat(server, "And now?", session_id)["turn"] == 3
        assert not before["replica-0"].is_running() and set(replicas_of(server)) == {"replica-0"}

        def on_cluster(*what: str) -> None:
            command = [sys.executable, "-c", ON_CLUSTER, *what]
            subprocess.run(command, env=ENVIRONMENT | fleet.environment, check=True, timeout=300)

        on_cluster("run")
        on_cluster("delete", "kvstore")
        assert server.process.wait(120) == EXIT_ENGINE_FAILED
        assert "others have ended the application" in server.log.read_text()
        flags = (*fleet.flags, "--store", fleet.store, "--replicas", "1")
        refused = run_command("serve", *flags, **fleet.environment)
        assert (refused.returncode, refused.stderr.count("kvstore: ")) == (2, 1), refused
        assert "--replicas is given, but Ray Serve has other on this cluster; deploy beside it" in refused.stderr


CONFIG = """
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
- name: kvstore
  route_prefix: /
  import_path: kvstore.service.replicas.app:app
  args:
    replicas: 1-2
    store: {store}
    device: cpu
    hbm: 4MiB
    cpu: 8MiB
    disk: 64MiB
    load: always
    log-format: json
    session_store: {sessions}
    fleet-secret-file: {secret}
    remote: {remote}
    autoscaling_config: {{target_ongoing_requests: 2, upscale_delay_s: 0, downscale_delay_s: 1, metrics_interval_s: 1,
                          look_back_period_s: 2}}
    ray_actor_options: {{num_cpus: 0.5}}
"""


class Deployed:
    """The application as Ray's own `serve run` deploys it, until SIGINT."""

    def __init__(self, fleet: RayFleet, folder: Path) -> None:
        port, file, self.log = free_port(), folder / "kvstore.yaml", folder / "ray.log"
        _, sessions, _, remote, _, secret = fleet.flags
        file.write_text(CONFIG.format(port=port, store=fleet.store, sessions=sessions, remote=remote, secret=secret))
        environment = {**ENVIRONMENT, **fleet.environment, "RAY_DEDUP_LOGS": "0"}
        with self.log.open("wb") as log:
            command = (sys.executable, "-m", "ray.serve.scripts", "run", str(file))
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        self.server = FleetServer(process, self.log, ("127.0.0.1", port), key=None, node=fleet.node)

    def is_up(self) -> bool:
        assert self.server.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.server.get("/ready").status == 200
        except OSError:
            return False

    def said(self, words: str) -> int:
        return len(re.findall(words, self.log.read_text()))


def test_ray_deploys_it_from_a_file_and_scales_it_under_load(tmp_path):
    """Two are needed for six requests at a time, and one for two: then one of them ends while both have a turn."""
    with ray_fleet(tmp_path) as fleet:
        deployed = Deployed(fleet, tmp_path)
        try:
            check_that_it_scales(deployed)
        finally:
            end(deployed.server, signal.SIGINT)
    for name in ("replica-0", "replica-1"):
        assert run_command("verify", "--store", fleet.store / name).returncode == 0


def check_that_it_scales(deployed: Deployed) -> None:
    server, is_over, is_scaled = deployed.server, threading.Event(), threading.Event()

    def load() -> None:
        body = {"messages": [{"role": "user", "content": "Tell me more."}], **LONG}
        while not is_over.is_set():
            reply = server.post("/v1/chat/completions", body)
            assert reply.status == 200, reply.body

    def talk(session_id: str) -> list[dict]:
        """Until one has ended, and twice more."""
        turns, num_more = [], 2
        while num_more:
            num_more -= is_scaled.is_set()
            turns.append(chat(server, f"Go on, {len(turns)}.", session_id, **LONG))
        return turns

    wait_until(deployed.is_up, "the application is there", 300)
    assert set(replicas_of(server)) == {"replica-0"}
    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load) for _ in range(6)]
        try:
            wait_until(lambda: are_both_there(server) or any(one.done() for one in loads), "another one comes")
            kept, talking = one_on_each(server), one_on_each(server)
            talks = [threads.submit(talk, one) for one in talking.values()]
            is_over.set()
            wait_until(lambda: deployed.said('"replica has ended"') == 1, "one is not needed any more", 300)
            wait_until(lambda: len(replicas_of(server)) == 1, "its process has ended")
        finally:
            is_over.set()
            is_scaled.set()
        assert [one.result() for one in loads] == [None] * 6  # none has failed
        for session_id, turns in zip(talking.values(), (one.result() for one in talks), strict=True):
            assert [turn["turn"] for turn in turns] == list(range(2, len(turns) + 2))
            assert num_turns(server, session_id) == len(turns) + 1
    (left,) = replicas_of(server)
    (gone,) = kept.keys() - {left}
    assert details(chat(server, "And now?", kept[gone]))["remote"] > 0
    assert deployed.said("not all KV was kept") == 0


def one_on_each(server: FleetServer) -> dict[str, str]:
    """A session on each of two replicas, by their names."""
    found: dict[str, str] = {}
    while len(found) < 2:
        whose = Whose(server)
        session_id = chat(server, f"{TOLD} My number is {time.monotonic()}.")["session_id"]
        (name,) = whose.answered()
        found.setdefault(name, session_id)
    return found


def test_rays_proxy_answers_over_https(tmp_path):
    certificate, key = make_certificate(tmp_path)
    with ray_fleet(tmp_path) as fleet, (tmp_path / "log").open("wb") as log:
        flags = ("--replicas", "1", "--store", str(fleet.store), *SIZES, "--port", str(port := free_port()))
        tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
        environment = {**ENVIRONMENT, **fleet.environment}
        server = subprocess.Popen([*COMMAND, "serve", *fleet.flags, *flags, *tls], env=environment, stderr=log)
        try:
            wait_until(
                lambda: f"ready address=https://127.0.0.1:{port}" in (tmp_path / "log").read_text(), "it is ready"
            )
            connection = http.client.HTTPSConnection(
                "127.0.0.1", port, timeout=TIMEOUT_S, context=ssl.create_default_context(cafile=certificate)
            )
            with closing(connection):
                connection.request("GET", "/ready")
                assert connection.getresponse().read() == b'{"ready":true}'
            server.terminate()
            assert server.wait(TIMEOUT_S) == 0
        finally:
            server.kill()
