"""Copies that the disk's lossy codec has left: a server says how many tokens came from them; a request refuses them.

With the built-in model.
"""

from contextlib import contextmanager

import pytest

from tests.support.service.serving import serving
from tests.support.service.talking import TALKING_ROUTES, talking_body

MESSAGES = "/v1/messages"
ROUTES = [*TALKING_ROUTES, MESSAGES]
TEXT = "Tell me about the sea and the mountains, and what people do there all day long. " * 2
SHORT = {"max_tokens": 8, "max_output_tokens": 8, "temperature": 0}


@contextmanager
def server_on(folder):
    tiers = {"hbm": "32MiB", "cpu": "16MiB", "disk": "64MiB", "path": folder, "codec": "int8"}
    with serving(engine={"cache_tiers": tiers, "dtype": "bfloat16", "load": "always"}) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with copies of all that `asked` asks. Its session "s" has one turn."""
    folder = tmp_path_factory.mktemp("kv") / "store"
    with server_on(folder) as server:
        for path in ROUTES:
            assert asked(server, path)["cached_tokens"] < 48, "only what the routes have in common"
        reply = server.post("/chat", {"message": TEXT, "session_id": "s", "create": True, **SHORT})
        assert reply.status == 200, reply.body
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with server_on(folder) as server:
        yield server


def asked(server, path, **more):
    """The cached tokens of a prompt, as the route's usage says."""
    reply = server.post(path, {**talking_body(path, f"{path}: {TEXT}"), **SHORT, **more})
    assert reply.status == 200, reply.body
    return of_usage(path, reply.json()["usage"])


def of_usage(path, usage):
    if path == MESSAGES:
        return {"cached_tokens": usage["cache_read_input_tokens"], **usage["cached_tokens_details"]}
    details = usage["input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"]
    return {"cached_tokens": details["cached_tokens"], **details["cached_tokens_details"]}


def test_every_route_counts_copies_and_refuses_them(server):
    for path in ROUTES:
        found = asked(server, path)
        assert found["quantised"] == found["cached_tokens"] == found["hbm"] + found["cpu"] + found["disk"] > 32, path
        exact = asked(server, path, kv_exact=True)
        assert exact["quantised"] == 0 and exact["cached_tokens"] < 48, path
        assert server.post(path, {**talking_body(path, TEXT), "kv_exact": "yes"}).status == 400
    metrics = server.get("/metrics").body.decode()
    total = next(line for line in metrics.splitlines() if line.startswith("kvstore:quantised_tokens_total"))
    assert float(total.split()[-1]) > 32 * len(ROUTES)


def test_a_turn_of_a_session_goes_on_with_copies_and_an_exact_one_computes(server):
    turns = [
        server.post("/chat", {"message": "And then?", "session_id": "s", **SHORT, **more}).json()
        for more in ({}, {}, {"kv_exact": True})
    ]
    first, second, exact = (of_usage("/chat", turn["usage"]) for turn in turns)
    assert first["quantised"] == first["disk"] == first["cached_tokens"] > 32
    assert second["quantised"] == second["hbm"] > first["quantised"]
    assert exact["cached_tokens"] == exact["quantised"] == 0
    stored = server.get("/sessions/s?turns_after=0").json()["turns_data"]
    assert [turn["usage"]["prompt_tokens_details"]["cached_tokens_details"]["quantised"] for turn in stored] == [
        0, first["quantised"], second["quantised"], 0,
    ]  # fmt: skip
