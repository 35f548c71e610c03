"""What routers hear of a server whose engine has a process of its own: of a turn, and after that process was killed."""

import re
import socket

import pytest

from tests.support.service.server_process import launched
from tests.support.service.talking import chat
from tests.support.waiting import wait_until

pytest.importorskip("zmq")
from tests.support.kv_reader import Reader, free_endpoint

TOPIC = f"kv@{socket.gethostname()}@our/model"


def metric(server, name: str) -> float:
    found = re.search(rf"^kvstore:{re.escape(name)} (\S+)$", server.get("/metrics").body.decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def is_ready(server) -> bool:
    return server.get("/ready").status == 200


def test_routers_know_what_a_server_holds_and_again_when_its_engine_was_killed(tmp_path):
    endpoint = free_endpoint()
    flags = ("--kv-events", endpoint, "--served-model-name", "our/model")
    with Reader(endpoint) as reader, launched(tmp_path / "store", *flags) as server:
        session_id = chat(server, "My name is Ada, and I have much to say about my dog Biscuit.")["session_id"]
        server.flush()
        picture, num_blocks = reader.pictures[TOPIC], server.admin("GET", "/admin/stats").json()["disk"]["blocks"]
        reader.read_until(
            lambda: len(picture.held("STORAGE")) == num_blocks and picture.held("GPU"), "the turn is told of"
        )
        on_disk, num_cleared = picture.held("STORAGE"), picture.num_cleared
        assert metric(server, 'kv_event_blocks_total{event="stored"}') >= 2 * len(on_disk)
        server.core.kill()
        wait_until(lambda: metric(server, "engine_restarts_total") == 1 and is_ready(server), "the engine is back", 120)
        reader.read_until(lambda: picture.num_cleared > num_cleared, "the new process speaks")
        reader.read_until(lambda: picture.held("STORAGE") == on_disk, "the disk is told of")
        assert not picture.held("GPU")
        chat(server, "What is my name?", session_id)
        reader.read_until(lambda: picture.held("GPU"), "the next turn is told of")
        assert not picture.unplaced and set(reader.pictures) == {TOPIC}
