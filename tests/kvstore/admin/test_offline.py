"""The commands on a small real store that nobody owns."""

import shutil

import pytest

from kvstore.admin import offline
from kvstore.admin.offline import OfflineStore, stored_capacity
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.errors import ConfigError, DegradedError, StoreError, StoreLockedError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import open_sessions
from tests.support.faults import before_each, disk_that
from tests.support.store.small_store import (
    CAPACITY_BYTES,
    MODELS,
    NUM_LONE,
    NUM_OWN,
    NUM_SHARED,
    SmallStore,
    block_ids,
    damage,
    make_store,
)

ANNA = {"session": {"tenant": "", "session_id": "anna"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made, tmp_path):
    """A copy that the test may change."""
    shutil.copytree(made.path, tmp_path / "store")
    return SmallStore(tmp_path / "store", made.shared, made.anna, made.bert, made.lone)


def handle(store, command, arguments=None, on_progress=None):
    with OfflineStore(store.path) as opened:
        return opened.handle(command, arguments or {}, on_progress)


def stored(opened):
    return {entry.block_id for batch in opened.disk.scan() for entry in batch}


def evict(store, **arguments):
    found = handle(store, "evict", arguments)
    assert found["dry_run"] is arguments.get("dry_run", False)
    return found["tiers"]["disk"]


def test_stats(store):
    found = handle(store, "stats")
    disk, sessions = found["disk"], found["sessions"]
    assert (disk["blocks"], disk["capacity_bytes"]) == (store.num_blocks, CAPACITY_BYTES)
    assert {name: part["blocks"] for name, part in disk["models"].items()} == {
        MODELS[0]: NUM_SHARED + 2 * NUM_OWN,
        MODELS[1]: NUM_LONE,
    }
    assert (sessions["sessions"], sessions["turns"]) == (2, 2)
    assert [found[name] for name in ("model", "hbm", "cpu", "store", "requests", "tokens")] == [None] * 6


def test_a_store_is_opened_with_the_capacity_it_had(store):
    assert stored_capacity(store.path / "blocks" / "data.mdb") == CAPACITY_BYTES
    before = block_ids(store)
    handle(store, "stats")
    assert block_ids(store) == before


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ({"all": True}, "shared anna bert lone"),
        ({"unused_for_s": 9 * 86400.0}, "lone"),
        ({"unused_for_s": 11 * 86400.0}, ""),
        ({"unused_for_s": 0, "model": MODELS[0]}, "shared anna bert"),
        ({"model": MODELS[1]}, "lone"),
        ({"model": "green-model"}, ""),
        (ANNA, "anna"),
        ({**ANNA, "model": MODELS[1]}, ""),
        ({"to_bytes": 0}, "shared anna bert lone"),
        ({"to_bytes": 10**9}, ""),
    ],
)
def test_evict(store, arguments, gone):
    expected = {block_id for name in gone.split() for block_id in getattr(store, name)}
    with OfflineStore(store.path) as opened:
        before = stored(opened)
        would = opened.handle("evict", {**arguments, "dry_run": True})
        assert would["dry_run"] is True and stored(opened) == before
        done = opened.handle("evict", arguments)
        assert done == {"dry_run": False, "tiers": would["tiers"]}
        found = done["tiers"]["disk"]
        assert found["blocks"] == len(expected) and found["bytes"] >= 8192 * len(expected)
        assert before - stored(opened) == expected
        assert opened.handle("verify", {})["num_heads"] == len({"shared", "lone"} - set(gone.split()))  # no hole
        assert opened.handle("stats", {})["sessions"]["sessions"] == 2


def test_evict_to_a_size_takes_what_was_used_least(store):
    size = evict(store, all=True, dry_run=True)["bytes"]
    block = size // store.num_blocks
    assert evict(store, to_bytes=size - 2 * block)["blocks"] == 2
    assert set(store.lone[:2]) <= block_ids(store) and not set(store.lone[2:]) & block_ids(store)


def test_evict_of_an_unknown_session(store):
    with pytest.raises(StoreError, match="no session 'nobody'"):
        evict(store, session={"tenant": "", "session_id": "nobody"})
    with pytest.raises(StoreError, match="no session 'anna' of tenant 'other'"):
        evict(store, session={"tenant": "other", "session_id": "anna"})


def test_wrong_commands_and_arguments(store):
    with OfflineStore(store.path) as opened:
        with pytest.raises(ConfigError):
            opened.handle("quit", {})
        for command in ("stats", "compact", "verify", "evict", "sessions", "sessions.delete"):
            needed = ANNA if command == "sessions.delete" else {}
            with pytest.raises(ConfigError, match=f"{command}: .* unknown field `x`"):
                opened.handle(command, {"x": 1, **needed})
        with pytest.raises(ConfigError, match="compact: "):
            opened.handle("compact", {"codec": "gzip"})


def test_verify_finds_damage_and_takes_out_what_it_makes_useless(store):
    report = handle(store, "verify")
    assert (report["num_ok"], report["bad_ids"], report["set_aside"]) == (store.num_blocks, [], [])
    assert report["sessions"]["problems"] == ()
    damage(store, store.shared[1])
    fractions = []
    report = handle(store, "verify", {"delete": False}, fractions.append)
    assert report["bad_ids"] == [store.shared[1].hex()] and report["num_deleted"] == 0
    assert all(0 <= fraction <= 1 for fraction in fractions)
    assert len(block_ids(store)) == store.num_blocks
    report = handle(store, "verify", {"delete": True})
    assert report["num_deleted"] == NUM_SHARED - 1 + 2 * NUM_OWN
    assert block_ids(store) == {store.shared[0], *store.lone}
    assert handle(store, "verify")["bad_ids"] == []
    handle(store, "evict", {"all": True})
    report = handle(store, "verify", {}, fractions.append)
    assert (report["num_ok"], report["is_complete"]) == (0, True)


def test_deleting_a_session_takes_its_own_blocks(store):
    assert handle(store, "sessions.delete", ANNA) == {"deleted": True, "blocks": NUM_OWN}
    assert block_ids(store) == {*store.shared, *store.bert, *store.lone}
    assert [one["id"] for one in handle(store, "sessions")["sessions"]] == ["bert"]
    pending = handle(store, "stats")["sessions"]["pending_deletions"]
    assert pending == 1, "the next server takes it out of a shared tier, too"
    with pytest.raises(StoreError, match="no session 'anna'"):
        handle(store, "sessions.delete", ANNA)


def test_a_deletion_that_was_cut_off_is_carried_through(store):
    with StoreDirectory.open(store.path) as directory:
        sessions = open_sessions(directory)
        sessions.delete(SessionKey("", "bert")).wait()
        sessions.close()
    assert set(store.bert) <= block_ids(store)
    handle(store, "sessions.delete", ANNA)
    assert block_ids(store) == set(store.lone)


def test_all_pending_deletions_are_carried_out_in_one_reading_of_the_disk(store):
    """Each offline deletion stays pending until a server runs, so that the tenth would read it ten times."""
    readings = []
    with before_each(offline, "_index_of", lambda: readings.append(None)):
        handle(store, "sessions.delete", ANNA)
        handle(store, "sessions.delete", {"session": {"tenant": "", "session_id": "bert"}})
    assert len(readings) == 2 and block_ids(store) == set(store.lone)


def test_no_store_is_made(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("missing", "empty", "file"):
        with pytest.raises(StoreError, match="there is no store at"):
            OfflineStore(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


def test_an_empty_store_has_zeros_and_stays_as_it_is(tmp_path):
    StoreDirectory.open(tmp_path / "store").close()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with OfflineStore(tmp_path / "store") as store:
        assert store.handle("stats", {})["disk"]["blocks"] == 0
        assert store.handle("stats", {})["sessions"]["sessions"] == 0
        assert store.handle("evict", {"all": True})["tiers"]["disk"] == {"blocks": 0, "bytes": 0}
        assert store.handle("verify", {}) == {"set_aside": []}
        assert store.handle("compact", {})["after_bytes"] == 0
        assert store.handle("sessions", {}) == {"sessions": []}
        for command in ("sessions.show", "sessions.delete"):
            with pytest.raises(StoreError, match="no session"):
                store.handle(command, ANNA)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_owned_store_is_locked_and_a_closed_one_is_free(store):
    with StoreDirectory.open(store.path), pytest.raises(StoreLockedError):
        OfflineStore(store.path)
    opened = OfflineStore(store.path)
    assert read_lock_info(store.path) is not None
    opened.close()
    opened.close()
    assert read_lock_info(store.path) is None


def test_a_disk_that_cannot_be_written(store):
    def full(*_):
        return type("Outcome", (), {"error": "i/o error"})

    with disk_that(write=full), pytest.raises(DegradedError, match="i/o error"):
        evict(store, all=True)


def test_a_data_file_without_sense_has_a_small_capacity(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"no")
    assert stored_capacity(tmp_path / "data.mdb") == stored_capacity(tmp_path / "missing") == 64 << 20
