"""Files of a store that are removed or replaced while it is open: the owner notices, and promises nothing any more."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.admin.control import ask as ask_owner
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.errors import DegradedError, StoreError, StoreLockedError, StoreLostError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import open_sessions
from tests.children.session_child import TENANT, make_turn, talk
from tests.support.engines import ask, greedy, open_engine
from tests.support.faults import disk_with
from tests.support.service.serving import serving
from tests.support.waiting import TIMEOUT_S, wait_until

MODEL = {"tokenizer": True}
ROOT = Path(__file__).parents[3]
ANNA = SessionKey(TENANT, "anna")
OWNER = """
import sys
from kvstore.admin.control import ControlServer
from kvstore.disk.directory import StoreDirectory
directory = StoreDirectory.open(sys.argv[1])
server = ControlServer(directory, lambda command, arguments: {"said": command})
if sys.argv[2] == "without locks":
    directory.let_go()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def owned_by_another_process(store: Path, how: str = ""):
    """Its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, store, how], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


# -- the lock --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lock", ["removed", "replaced"])
def test_a_store_without_its_lock_file_still_has_its_owner(tmp_path, lock):
    with owned_by_another_process(tmp_path / "store") as pid:
        (tmp_path / "store" / "lock").unlink()
        if lock == "replaced":
            (tmp_path / "store" / "lock").write_bytes(b"")
        with pytest.raises(StoreLockedError, match=f"in use by process {pid}") as caught:
            StoreDirectory.open(tmp_path / "store")
        assert caught.value.pid == pid
        assert read_lock_info(tmp_path / "store").pid == pid
        assert ask_owner(tmp_path / "store", "stats", {}, TIMEOUT_S) == {"said": "stats"}
    StoreDirectory.open(tmp_path / "store").close()


def test_who_answers_at_the_socket_owns_the_store_without_any_lock(tmp_path):
    with owned_by_another_process(tmp_path / "store", "without locks") as pid:
        message = f"in use by process {pid}"
        with pytest.raises(StoreLockedError, match=message):
            StoreDirectory.open(tmp_path / "store")
    StoreDirectory.open(tmp_path / "store").close()  # its socket is there, and nobody behind it


def test_a_lock_that_comes_back_is_not_ours(tmp_path):
    with StoreDirectory.open(tmp_path) as directory:
        assert directory.loss() is None
        (tmp_path / "lock").rename(tmp_path / "away")
        assert "lock was removed or replaced" in str(directory.loss())
        (tmp_path / "away").rename(tmp_path / "lock")
        assert directory.loss() is not None, "meanwhile it may have been somebody else's"


def test_a_store_that_was_moved_away_is_lost(tmp_path):
    with StoreDirectory.open(tmp_path / "store") as directory:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert directory.loss() is not None
        (tmp_path / "store").mkdir()
        StoreDirectory.open(tmp_path / "store").close()


# -- sessions --------------------------------------------------------------------------------------------------------
@pytest.fixture
def opened(tmp_path):
    """A store directory and its sessions, with three turns of one."""
    with StoreDirectory.open(tmp_path) as directory:
        sessions = open_sessions(directory)
        talk(sessions, ANNA, 3)
        yield directory, sessions
        sessions.close()


def commit(sessions, number: int):
    return sessions.commit_turn(ANNA, make_turn("anna", number)).wait()


@pytest.mark.parametrize("name", ["lock", "sessions/data.mdb", "sessions"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_no_turn_is_acknowledged_that_will_not_be_there(opened, tmp_path, name, how):
    _, sessions = opened
    shutil.copytree(tmp_path, tmp_path / "copy")
    (tmp_path / name).rename(tmp_path / "away")
    if how == "replaced":
        (tmp_path / "copy" / name).rename(tmp_path / name)
    with pytest.raises(StoreLostError, match="was removed or replaced"):
        commit(sessions, 4)
    with pytest.raises(StoreLostError):
        sessions.delete(ANNA).wait()
    assert sessions.stats()["lost"] == 1


def test_a_file_that_goes_during_a_commit(opened, tmp_path):
    _, sessions = opened
    with pytest.raises(StoreLostError):
        sessions.transactions.submit(lambda view: (tmp_path / "sessions" / "data.mdb").unlink()).wait()


def test_a_removed_file_is_written_again_from_what_is_open(opened, tmp_path):
    directory, sessions = opened
    shutil.rmtree(tmp_path / "sessions")
    sessions.compact()
    assert sessions.stats()["lost"] == 0
    commit(sessions, 4)
    sessions.close()
    again = open_sessions(directory)
    assert again.head(ANNA).num_turns == 4 and not again.check().problems
    again.close()


def test_a_file_in_its_place_is_left_alone(opened, tmp_path):
    _, sessions = opened
    data = tmp_path / "sessions" / "data.mdb"
    data.rename(tmp_path / "away")
    data.write_bytes(b"another one")
    with pytest.raises(StoreLostError):
        sessions.compact()
    assert data.read_bytes() == b"another one"


def test_a_lost_store_is_not_compacted(opened, tmp_path):
    _, sessions = opened
    (tmp_path / "sessions" / "data.mdb").unlink()
    (tmp_path / "lock").unlink()
    with pytest.raises(StoreLostError, match="lock"):
        sessions.compact()
    assert not (tmp_path / "sessions" / "data.mdb").exists()


# -- the engine ------------------------------------------------------------------------------------------------------
def test_a_removed_file_of_blocks_is_noticed_and_begun_anew(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        ask(engine, list(range(1, 60)), 4)
        engine.flush()
        data = tmp_path / "store" / "blocks" / "data.mdb"
        data.unlink()
        wait_until(lambda: data.exists() and not engine.stats()["disk"]["broken"], "it is noticed, and goes on")
        engine.flush()
        num_blocks = engine.stats()["disk"]["blocks"]
        assert num_blocks >= 3, "what the CPU tier held is written again"
    with open_engine(model, tmp_path / "store") as engine:
        assert ask(engine, list(range(1, 60)), 4).usage.cached_tokens_details.disk == 48


def test_a_removed_lock_is_noticed_while_nobody_asks_for_anything(model, tmp_path, caplog):
    with open_engine(model, tmp_path / "store") as engine:
        chat = engine.chat("anna")
        chat.send("One", greedy(3))
        (tmp_path / "store" / "lock").unlink()

        def told() -> int:
            return sum("nothing more is kept" in one.getMessage() for one in list(caplog.records))

        wait_until(lambda: engine.stats()["disk"]["degraded"] and told(), "it is noticed")
        time.sleep(0.1)
        assert told() == 1, "it is told once"
        assert "lock" in engine.stats()["lost"]
        with pytest.raises(StoreLostError):
            chat.send("Two", greedy(3))
        with pytest.raises(DegradedError):
            engine.flush()
        assert chat.num_turns == 1 and len(ask(engine, [1, 2, 3], 2).token_ids) == 2, "it goes on without"
    with open_engine(model, tmp_path / "store") as engine:
        assert engine.chat("anna").num_turns == 1


def test_sessions_are_written_again_where_blocks_have_no_room_to_be(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        chat = engine.chat("anna")
        chat.send("One", greedy(3))
        engine.flush()
        (tmp_path / "store" / "sessions" / "data.mdb").unlink()
        with disk_with(1 << 20, 1 << 20), pytest.raises(StoreError, match="free some"):
            engine.admin.compact()
        chat.send("Two", greedy(3))
    with open_engine(model, tmp_path / "store") as engine:
        assert engine.chat("anna").num_turns == 2


# -- the service -----------------------------------------------------------------------------------------------------
def test_over_http(tmp_path):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path / "store"}
    with serving(engine={"cache_tiers": tiers}) as server:
        session = server.post("/chat", {"message": "Hi", "max_tokens": 3}).json()["session_id"]
        os.unlink(tmp_path / "store" / "sessions" / "data.mdb")
        wait_until(lambda: server.get("/health").json()["status"] != "ok", "it is noticed")
        assert server.get("/health").json() == {"status": "degraded", "reasons": ["sessions_file_lost"]}
        for body in ({"message": "Hi"}, {"message": "Hi", "session_id": session}):
            reply = server.post("/chat", {**body, "max_tokens": 3})
            assert (reply.status, reply.error["code"]) == (503, "store_lost")
            assert reply.headers["x-should-retry"] == "false" and "/" not in reply.error["message"]
        events = server.post("/chat", {"message": "Hi", "max_tokens": 3, "stream": True}).events()
        assert [one["error"]["code"] for one in events if "error" in one and one != "[DONE]"] == ["store_lost"]
