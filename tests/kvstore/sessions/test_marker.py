"""A store whose sessions are not there any more says so, until somebody gives them up or puts them back."""

import json
import shutil
import threading

import lmdb
import pytest

from kvstore.admin.offline import OfflineStore
from kvstore.disk import env as disk_env
from kvstore.disk.directory import StoreDirectory
from kvstore.service.command.cli import main
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import open_sessions
from kvstore.sessions.tables import COUNTERS
from tests.children.session_child import TENANT, make_turn, talk
from tests.support.faults import copying_that

ANNA = SessionKey(TENANT, "anna")


@pytest.fixture
def store(tmp_path):
    """One that is closed, with two turns."""
    with StoreDirectory.open(tmp_path / "store") as directory:
        sessions = open_sessions(directory)
        talk(sessions, ANNA, 2)
        sessions.close()
    return tmp_path / "store"


def look(store, work=lambda sessions: None) -> tuple[int, bool]:
    """How many sessions there are, and whether others are missing; `work` comes after."""
    with StoreDirectory.open(store) as directory:
        sessions = open_sessions(directory)
        found = sessions.stats()
        problems = sessions.check().problems
        assert bool(found["missing"]) == any("sessions that this store held are not there" in one for one in problems)
        work(sessions)
        sessions.close()
        return found["sessions"], bool(found["missing"])


@pytest.mark.parametrize("how", ["file", "directory"])
def test_a_missing_file_is_told_until_it_is_given_up(store, how, caplog):
    assert look(store) == (1, False)
    if how == "file":
        (store / "sessions" / "data.mdb").unlink()
    else:
        shutil.rmtree(store / "sessions")
    assert look(store, lambda sessions: talk(sessions, ANNA, 1)) == (0, True)
    assert "accept-loss" in caplog.text
    assert look(store, lambda sessions: sessions.accept_loss()) == (1, True), "what came since is kept"
    assert look(store, lambda sessions: sessions.accept_loss()) == (1, False)


def test_a_file_that_is_put_back_is_known_again(store, tmp_path):
    shutil.move(store / "sessions", tmp_path / "kept")
    assert look(store) == (0, True)
    shutil.rmtree(store / "sessions")
    shutil.move(tmp_path / "kept", store / "sessions")
    assert look(store) == (1, False)


def test_a_damaged_file_that_was_set_aside_is_missing(store):
    (store / "sessions" / "data.mdb").write_bytes(b"nonsense" * 1000)
    with pytest.warns(RuntimeWarning, match="moved to quarantine"):
        assert look(store) == (0, True)
    assert list(store.glob("quarantine-*/sessions/data.mdb"))


def test_a_store_from_before_there_were_marks(store):
    (store / "sessions.id").unlink()

    def unmark(sessions):
        return sessions.transactions.submit(lambda view: view.delete(COUNTERS, b"name")).wait()

    assert look(store, unmark) == (1, False)
    (store / "sessions.id").unlink()
    assert look(store) == (1, False)
    assert (store / "sessions.id").exists()


def test_a_damaged_name_is_no_loss(store):
    assert look(
        store, lambda sessions: sessions.transactions.submit(lambda view: view.put(COUNTERS, b"name", b"x")).wait()
    )
    assert look(store) == (1, False) and look(store) == (1, False)


def test_a_loss_that_is_accepted_beside_a_compaction_stays_accepted(store):
    (store / "sessions" / "data.mdb").unlink()
    copy = disk_env._copy_records

    def accept_meanwhile(sessions) -> None:
        thread = threading.Thread(target=sessions.accept_loss)

        def copy_and_wait(*arguments) -> None:
            copy(*arguments)
            thread.start()
            thread.join(0.5)

        with copying_that(copy_and_wait):
            sessions.compact()
        thread.join()

    assert look(store, accept_meanwhile) == (0, True)
    assert look(store) == (0, False)


def test_a_file_that_is_begun_anew_when_lmdb_gives_it_up_is_told(store):
    def give_up(view) -> None:
        if not given_up:
            given_up.append((store / "sessions" / "data.mdb").unlink())
            raise lmdb.PanicError("injected")

    given_up: list[None] = []
    with StoreDirectory.open(store) as directory:
        sessions = open_sessions(directory)
        sessions.transactions.submit(give_up).wait()
        assert "was begun anew" in sessions.check().problems[0]
        found = sessions.stats()
        assert (found["sessions"], found["missing"]) == (0, 1)
        sessions.close()
    assert look(store, lambda sessions: sessions.accept_loss()) == (0, True)
    assert look(store) == (0, False)


def test_the_commands_without_an_owner(store, capsys):
    (store / "sessions" / "data.mdb").unlink()
    where = ["--store", str(store)]
    assert main(["verify", *where, "--json"]) == 4
    assert "data.mdb is missing" in json.loads(capsys.readouterr().out)["sessions"]["problems"][0]
    assert not (store / "sessions" / "data.mdb").exists(), "looking makes nothing"
    assert main(["verify", *where]) == 4 and "damage was found" in capsys.readouterr().out
    assert main(["sessions", "accept-loss", *where]) == 0
    assert "are given up" in capsys.readouterr().out
    assert main(["verify", *where]) == 0
    assert main(["sessions", "accept-loss", *where]) == 0
    assert "no sessions are missing" in capsys.readouterr().out


def test_the_commands_on_another_file(store, tmp_path):
    (store / "sessions" / "data.mdb").unlink()
    look(store, lambda sessions: sessions.commit_turn(ANNA, make_turn("anna", 1)).wait())
    with OfflineStore(store) as opened:
        assert opened.verify(False)["sessions"]["problems"]
        assert opened.handle("sessions.accept_loss", {}) == {"accepted": True}
        assert not opened.verify(False)["sessions"]["problems"]
    assert look(store) == (1, False)
