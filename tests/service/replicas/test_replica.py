"""One server of a fleet without Ray: requests come to `answer` as Ray passes them; its store; what is refused."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from kvstore import CacheTiers
from kvstore.errors import ConfigError, KVStoreError, StoreError
from kvstore.service.replicas.app import app, resources
from kvstore.service.replicas.places import ReplicaPlace
from kvstore.service.replicas.replica import PassedRequest, Replica, arguments_at
from kvstore.service.settings.config_file import effective
from kvstore.service.settings.engine_options import arguments_of, engine_command, with_tiers
from kvstore.service.settings.serve_options import REPLICAS, ServeOptions
from tests.support.service.server_process import ENVIRONMENT, ROOT, run_command
from tests.support.service.serving import serving
from tests.support.service.talking import talking_body
from tests.support.waiting import wait_in_loop

LONG = {"message": "Go on.", "max_tokens": 800, "ignore_eos": True, "stream": True}
SHORT = {"message": "Hello, who are you?", "max_tokens": 24, "ignore_eos": True}
HOLD = """
import sys, time
from pathlib import Path
from kvstore.service.replicas.places import ReplicaPlace
place = ReplicaPlace.below(Path(sys.argv[1]))
print(place.name, flush=True)
time.sleep(600)
"""


class Alone(Replica):
    def __del__(self):
        """Nobody awaits this here."""


@asynccontextmanager
async def replica_at(store, **options):
    replica = object.__new__(Alone)
    tiers = CacheTiers(hbm="16MiB", cpu="8MiB", disk="64MiB", path=store)
    await replica.__init__(None, {"cache_tiers": tiers, "device": "cpu"}, ServeOptions(**options))
    try:
        yield replica
    finally:
        await replica.close()


def passed(method, target, body=None, **headers):
    data = b"" if body is None else json.dumps(body).encode()
    given = {"host": "localhost", "content-type": "application/json", **headers}
    return PassedRequest(method, target, tuple(given.items()), data)


async def answered(replica, *request, **headers):
    head, *pieces = [piece async for piece in replica.answer(passed(*request, **headers))]
    return head, b"".join(pieces)


async def is_aborted(replica):
    _, page = await answered(replica, "GET", "/metrics")
    return b'finished_reason="abort"} 1' in page


async def has_failed(replica):
    try:
        await replica.check_health()
    except KVStoreError as error:
        return str(error).startswith("replica-0 has failed: ")


async def story(store):
    async with replica_at(store, shutdown_timeout_s=120, max_connections=1) as replica:
        head, body = await answered(replica, "POST", "/chat", SHORT, **{"x-new-session": "chosen"})
        assert (head.status, json.loads(body)["session_id"]) == (200, "chosen")
        head, body = await answered(replica, "GET", "/sessions/chosen?limit=1")
        assert json.loads(body)["turns"] == 1
        head, body = await answered(replica, "GET", "/sessions/%2e")
        assert (head.status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        whole = await replica.whole(passed("GET", "/health"))
        assert (whole.name, whole.head.status, json.loads(whole.body)["status"]) == ("replica-0", 200, "ok")
        await replica.check_health()

        stream = replica.answer(passed("POST", "/chat", {**LONG, "session_id": "chosen"}))
        head = await anext(stream)
        assert head.is_stream and await anext(stream)
        await replica.check_health()  # with as many requests as it takes
        await stream.aclose()  # the client has gone
        await wait_in_loop(lambda: is_aborted(replica), "the request is aborted")
        head, body = await answered(replica, "GET", "/sessions/chosen")
        assert json.loads(body)["turns"] == 1

        stream = replica.answer(passed("POST", "/chat", {**LONG, "max_tokens": 300, "session_id": "chosen"}))
        await anext(stream)
        ending = asyncio.ensure_future(replica.close())
        rest = b"".join([piece async for piece in stream])
        assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
        await ending
        head, body = await answered(replica, "GET", "/health")
        assert (head.status, json.loads(body)["error"]["code"]) == (503, "stopping")
        await replica.check_health()  # it ends as it was asked to, and Ray must not take it for dead


def test_a_replica_answers_aborts_ends_in_order_and_keeps_all(tmp_path):
    asyncio.run(story(tmp_path))
    shown = run_command("stats", "--store", tmp_path / "replica-0", "--json")
    assert json.loads(shown.stdout)["disk"]["blocks"] >= 20  # what the last answer had computed, too
    listed = run_command("sessions", "show", "chosen", "--store", tmp_path / "replica-0", "--json")
    assert len(json.loads(listed.stdout)["messages"]) == 4
    assert ReplicaPlace.below(tmp_path).name == "replica-0"


def test_an_engine_that_has_failed_for_good_is_told_to_ray(tmp_path):
    others = set(psutil.Process().children())  # of other tests

    async def fail():
        async with replica_at(tmp_path, engine_restarts=0) as replica:
            await replica.check_health()
            (core,) = set(psutil.Process().children()) - others
            core.kill()
            await wait_in_loop(lambda: has_failed(replica), "it is found to have failed")

    asyncio.run(fail())


def test_a_replica_has_a_store_and_ports_of_its_own(tmp_path):
    places = [ReplicaPlace.below(tmp_path) for _ in range(2)]
    given = {"cache_tiers": CacheTiers(cpu="8MiB", disk="64MiB", path=tmp_path), "kv_events": "tcp://*:5557"}
    found = [arguments_at(given, place) for place in places]
    assert [one["cache_tiers"].path for one in found] == [tmp_path / "replica-0", tmp_path / "replica-1"]
    assert [one["kv_events"] for one in found] == ["tcp://*:5557", "tcp://*:5559"]
    assert "kv_events" not in arguments_at({"cache_tiers": CacheTiers()}, places[1])


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 1)), ("16", (16, 16)), ("1-4", (1, 4)), ("3-3", (3, 3))])
def test_a_number_of_replicas_or_the_least_and_the_most(text, counts):
    assert REPLICAS.read("--replicas", text) == counts


@pytest.mark.parametrize("text", ["0", "-1", "two", "2-1", "1-", "1-2-3", "99999", " 2", ""])
def test_other_numbers_of_replicas_are_refused(text):
    with pytest.raises(ConfigError, match=r"--replicas is .*; give a number such as 2"):
        REPLICAS.read("--replicas", text)


def test_without_ray_replicas_are_refused_in_one_line(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError\n")  # stands before an installed one
    flags = (
        "--port",
        "0",
        "--store",
        tmp_path / "store",
        "--replicas",
        "2",
        "--session-store",
        "redis://127.0.0.1:1/0",
    )
    found = run_command("serve", *flags, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1) and "pip install 'ray[serve]'" in found.stderr, found
    assert not (tmp_path / "store").exists()


def test_an_application_s_arguments_are_flags():
    with pytest.raises(ConfigError, match=r"'sessions' is no flag of kvstore serve; did you mean"):
        app({"sessions": "redis://127.0.0.1/0"})
    with pytest.raises(ConfigError, match="--max-num-seqs is '-3'"):
        app({"max-num-seqs": -3})
    with pytest.raises(ConfigError, match="--replicas 4 without --session-store"):
        app({"replicas": 1, "disk": 0, "autoscaling_config": {"max_replicas": 4}})


def test_a_replica_has_a_gpu_for_each_process_that_computes():
    given = {"tensor_parallel_size": "2", "pipeline_parallel_size": "3"}
    settings = with_tiers(effective("serve", engine_command("serve").options, given, {}), keeps=True)
    assert resources(1, True, arguments_of("serve", settings)[0]) == {"num_cpus": 1, "num_gpus": 6}


@pytest.mark.parametrize("is_behind", [True, False])
def test_only_behind_a_front_does_a_header_name_a_new_session(is_behind):
    with serving(takes_session_names=is_behind) as server:
        for path in ("/chat", "/v1/responses"):
            body = {**talking_body(path, "Hi."), "max_output_tokens": 3, "max_tokens": 3}
            assert server.post(path, body, **{"X-New-Session": path[-4:]}).status == 200
            assert (server.get(f"/sessions/{path[-4:]}").status == 200) is is_behind


def test_a_replica_that_was_killed_leaves_its_place_to_the_next_one(tmp_path):
    store = tmp_path / "not there yet" / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "replica-0\n"
        second = ReplicaPlace.below(store)
        assert (second.name, second.number, second.path) == ("replica-1", 1, store / "replica-1")
        process.kill()
        process.wait()
    again = ReplicaPlace.below(store)
    assert (again.name, again.path) == ("replica-0", store / "replica-0")
    assert ReplicaPlace.below(store).name == "replica-2"
    second.close()
    assert ReplicaPlace.below(store).name == "replica-1"


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"--store .*file cannot be used"):
        ReplicaPlace.below(tmp_path / "file")


def test_a_place_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = ReplicaPlace.below(Path("~/store"))
    assert place.path == tmp_path / "store" / "replica-0"
    place.close()
