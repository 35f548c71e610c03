"""One server of a fleet without Ray: requests come to `answer` as Ray passes them."""

import asyncio
import json
from contextlib import asynccontextmanager

import psutil

from kvstore import CacheTiers
from kvstore.errors import KVStoreError
from kvstore.service.replicas.replica import PassedRequest, Replica, ReplicaPlace, arguments_at
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.service.server_process import run_command
from tests.support.service.serving import ADMIN_KEY
from tests.support.waiting import wait_in_loop

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
LONG = {"message": "Go on.", "max_tokens": 800, "ignore_eos": True, "stream": True}
SHORT = {"message": "Hello, who are you?", "max_tokens": 24, "ignore_eos": True}


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
    async with replica_at(store, shutdown_timeout_s=120, max_connections=1, admin_key=ADMIN_KEY) as replica:
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
        await replica.check_health()  # though it takes no more requests now
        await stream.aclose()  # the client has gone
        await wait_in_loop(lambda: is_aborted(replica), "the request is aborted")
        head, body = await answered(replica, "GET", "/sessions/chosen")
        assert json.loads(body)["turns"] == 1

        assert (await answered(replica, "POST", "/admin/drain", **ADMIN))[1] == b'{"draining":true,"running":0}'
        await replica.check_health()  # it may wait so for long, and Ray must not take it for failed
        await answered(replica, "DELETE", "/admin/drain", **ADMIN)

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
