"""Sessions on a disk that fails, under kills and flipped bits: nothing acknowledged is lost, nothing wrong told."""

import errno
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import pytest

from kvstore.disk.records import seal
from kvstore.errors import DegradedError, StoreError
from kvstore.sessions import record as session_record
from kvstore.sessions import tables as session_tables
from kvstore.sessions.record import MessageEdit, SessionKey, TurnRecord
from kvstore.sessions.store import SessionStore
from tests.children.session_child import (
    SESSIONS,
    TENANT,
    Clock,
    content,
    disk_store,
    expected,
    make_turn,
    open_file,
    talk,
)
from tests.support.faults import largest_file
from tests.support.store.disk_store import FaultyTransaction
from tests.support.waiting import TIMEOUT_S, together, wait_for_work

CHILD = Path(__file__).parents[2] / "children/session_child.py"
SYSTEM = [{"role": "system", "content": "be brief"}]
KEY = SessionKey(TENANT, "red")


class Faulty:
    """An LMDB environment whose nth operation fails."""

    def __init__(self, env, plan) -> None:
        self._env, self._plan = env, plan

    def begin(self, write=False, buffers=False):
        self._plan.step(write)
        return FaultyTransaction(self._env.begin(write=write, buffers=buffers), lambda _: self._plan.step(write))

    def open_db(self, name, txn):
        return self._env.open_db(name, txn=txn._txn)

    def __getattr__(self, name):
        return getattr(self._env, name)


class Plan:
    """Raises `fault` at the nth write operation, and `times` - 1 times after it. Reads pass."""

    def __init__(self, fault=None, nth=0, times=1) -> None:
        self.fault, self.nth, self.times = fault, nth, times
        self.armed, self.count, self.num_fired = False, 0, 0

    def step(self, write: bool) -> None:
        if not self.armed or not write:
            return
        self.count += 1
        if self.fault is not None and self.nth <= self.count < self.nth + self.times:
            self.num_fired += 1
            raise self.fault()


def faulty_store(path: Path, plan: Plan) -> SessionStore:
    return SessionStore(lambda: Faulty(open_file(path / "sessions"), plan), Clock())


FAULTS = {
    "EIO": lambda: lmdb.DiskError("mdb_txn_commit: Input/output error"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "map full": lambda: lmdb.MapFullError("mdb_put"),
    "memory": MemoryError,
    "panic": lambda: lmdb.PanicError("mdb_txn_begin"),
}


@pytest.mark.parametrize("times", [1, 10**6])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_loses_nothing_acknowledged(tmp_path, fault, times, request):
    """Each n: a fresh store, a few changes that wait together, the nth operation fails. Until n is past the last.

    Without `--long` each operation meets one of the faults that come once, and every third one of those that stay.
    """
    key, new, gone, edited = (SessionKey(TENANT, name) for name in ("red", "new", "gone", "edited"))
    edit, after = MessageEdit(1, 0), TurnRecord(3, (), (), (), "rebase")
    step = 1 if request.config.getoption("--long") else len(FAULTS) * (3 if times > 1 else 1)
    nth, fired = list(FAULTS).index(fault) % step + 1 - step, True
    while fired:
        nth += step
        plan = Plan(FAULTS[fault], nth, times)
        path = tmp_path / str(nth)
        store = faulty_store(path, plan)
        talk(store, key, 1)
        talk(store, gone, 1)
        talk(store, edited, 2)
        plan.armed = True
        tickets = [
            store.commit_turn(key, make_turn("red", 2)), store.commit_turn(key, make_turn("red", 3)),
            store.fork(key, 1, new), store.delete(gone), store.set_ttl(key, 1e6),
            store.commit_turn(edited, after, session_number=store.head(edited).number, forgotten=[edit]),
        ]  # fmt: skip
        done = []
        for ticket in tickets:
            try:
                ticket.wait(TIMEOUT_S)
                done.append(True)
            except StoreError:
                done.append(False)
        fired, plan.armed = plan.num_fired > 0, False
        assert all(done) or fired
        assert all(done) or times > 1 or fault != "panic", "this is remedied, not reported"
        for reopened in (False, True):
            if reopened:
                store.close()
                store = disk_store(path)
            state = store.load(key)
            assert content(state) == expected([make_turn("red", n) for n in range(1, 2 + done[0] + done[1])])
            assert (store.exists(new), not store.exists(gone), state.head.ttl_s == 1e6) == tuple(done[2:5])
            assert len(store.pending_deletions()) == done[3] + done[5]
            left = [message["content"][:10] for message in store.load(edited).messages]
            assert left == ["question 1", "answer 1 o", "question 2", "answer 2 o"][done[5] :]
            assert store.check().problems == ()
        assert talk(store, key, 4), "and it goes on"
        store.close()


def test_a_file_that_may_not_grow_is_what_a_full_disk_is(on_disk):
    """The real thing: LMDB's own writes fail, in the middle of a commit."""
    store = on_disk()
    turns = talk(store, KEY, 2)
    with largest_file(1 << 18):
        with pytest.raises(DegradedError, match="disk failed"):
            for number in range(3, 1000):
                store.commit_turn(KEY, make_turn("red", number)).wait()
                turns.append(make_turn("red", number))
        assert content(store.load(KEY)) == expected(turns)
        with pytest.raises(DegradedError, match="disk failed"):
            store.commit_turn(KEY, make_turn("red", len(turns) + 1, token_ids=range(10**5))).wait()
        assert content(store.load(KEY)) == expected(turns)
    turns = talk(store, KEY, len(turns) + 1)
    assert content(store.load(KEY)) == expected(turns)
    assert store.check().problems == ()
    store.close()


@pytest.mark.parametrize("step", ["copy", "fsync", "replace", "open", "refused"])
def test_a_compaction_that_fails_changes_nothing(tmp_path, monkeypatch, step):
    plan = Plan()
    opened = []

    def open_it():
        opened.append(step)
        if step == "open" and len(opened) == 2:
            raise lmdb.DiskError("mdb_env_open")
        if step == "refused" and len(opened) == 2:
            raise StoreError("another process took it")
        return Faulty(open_file(tmp_path / "sessions"), plan)

    store = SessionStore(open_it, Clock())
    turns = talk(store, KEY, 3)

    def fail(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if step not in ("open", "refused"):
            patched.setattr("kvstore.disk.env." + ("lmdb.open" if step == "copy" else f"os.{step}"), fail)
        with pytest.raises(DegradedError):
            store.compact()
        assert content(store.load(KEY)) == expected(turns)
    talk(store, KEY, 4)
    store.compact()
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
    assert content(store.load(KEY)) == expected([*turns, make_turn("red", 4)])
    store.close()


def test_deletions_are_resumed_and_files_are_private(tmp_path, on_disk):
    store = on_disk()
    turns = talk(store, KEY, 3)
    tombstone = store.delete(KEY).wait()
    talk(store, SessionKey(TENANT, "green"), 1)
    (tmp_path / "sessions.compact").mkdir()  # left behind by a compaction that was cut off
    (tmp_path / "sessions.compact" / "data.mdb").write_text("deleted text")
    store = on_disk()
    assert store.pending_deletions() == [tombstone]
    assert set(tombstone.block_ids) == {b for turn in turns for b in turn.chain}
    assert not (tmp_path / "sessions.compact").exists()
    paths = [*tmp_path.iterdir(), *(tmp_path / "sessions").iterdir()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    assert modes == {"sessions": 0o700, "data.mdb": 0o600, "lock.mdb": 0o600}


def test_compaction_leaves_no_deleted_text_and_all_else(tmp_path, on_disk):
    store = on_disk()
    secret, other = SessionKey(TENANT, "secret"), SessionKey(TENANT, "green")
    said = [{"role": "user", "content": "my pin is 4711 " * 300}]
    store.commit_turn(secret, make_turn("secret", 1, messages=said)).wait()
    turns = talk(store, other, 30)
    tombstone = store.delete(secret).wait()
    file = tmp_path / "sessions" / "data.mdb"
    assert b"my pin" in file.read_bytes(), "LMDB leaves it in a free page"
    before = file.stat().st_size
    store.compact()
    assert b"my pin" not in file.read_bytes()
    assert file.stat().st_size < before
    assert file.stat().st_mode & 0o777 == 0o600
    assert content(store.load(other)) == expected(turns)
    assert store.pending_deletions() == [tombstone]
    assert talk(store, other, 31)
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]


def test_compaction_between_readers_and_writers(on_disk):
    store = on_disk()
    talk(store, KEY, 3)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            assert content(store.load(KEY, 3)) == expected([make_turn("red", n) for n in (1, 2, 3)])

    def change() -> None:
        try:
            for number in range(4, 12):
                store.commit_turn(KEY, make_turn("red", number))
                store.compact()
        finally:
            stop.set()

    together(change, read, read, read)
    assert store.head(KEY).num_turns == 11


@pytest.mark.parametrize("kind", ["turn", "head", "tombstone"])
def test_hostile_records_with_a_right_checksum_are_damaged(kind):
    """Cut, lengthened, or with any byte changed: another value or StoreError, and no other exception."""
    head = session_tables.draft_head(KEY, 5.0, SYSTEM, b"f" * 32, "model")
    tombstone = session_record.Tombstone(1, KEY, (b"b" * 32,))
    record = {"turn": make_turn("red", 5), "head": head, "tombstone": tombstone}[kind]
    packed, place = session_record.encode(record, "it"), b"key"

    def read(packed: bytes):
        return session_record.unseal(type(record), "table", place, seal("table", place, packed), "it")

    assert read(packed) == record
    for wrong in (*(packed[:end] for end in range(len(packed))), packed + b"\0"):
        with pytest.raises(StoreError, match="it is damaged"):
            read(wrong)
    for at in range(len(packed)):
        for byte in (0, 255, packed[at] ^ 1):
            try:
                read(packed[:at] + bytes([byte]) + packed[at + 1 :])
            except StoreError as error:
                assert "damaged" in str(error)


def child(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_at_any_moment_every_acknowledged_turn_is_there(tmp_path):
    """10 lives of a process that is killed at random; the log of its acknowledgements is what must be there."""
    rng = random.Random(11)
    log = tmp_path / "log"
    for _ in range(10):
        size = log.stat().st_size if log.exists() else 0
        process = child("commit", tmp_path / "sessions", log)
        wait_for_work(process, log, size)
        assert process.poll() is None, process.communicate()[1]
        time.sleep(rng.random() / 5)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        acknowledged = dict.fromkeys(SESSIONS, 0)
        for line in log.read_text().splitlines():
            session_id, number = line.split()
            assert int(number) >= acknowledged[session_id]
            acknowledged[session_id] = int(number)
        store = disk_store(tmp_path)
        for session_id, number in acknowledged.items():
            head = store.head(SessionKey(TENANT, session_id))
            stored = head.num_turns if head else 0
            assert number <= stored <= number + 1
            if head is not None:
                turns = [make_turn(session_id, n) for n in range(1, stored + 1)]
                assert content(store.load(head.key)) == expected(turns)
                assert store.turn(head.key, stored) == turns[-1]
                with log.open("a") as file:  # the child goes on from what is stored
                    file.write(f"{session_id} {stored}\n")
        assert store.check().problems == ()
        store.close()


def test_flipped_bits_in_the_file_give_no_wrong_answer(tmp_path):
    """In a process of its own: LMDB may crash on a broken page (whoever opens the file verifies its structure)."""
    rng = random.Random(5)
    store = disk_store(tmp_path)
    for session_id in SESSIONS:
        talk(store, SessionKey(TENANT, session_id), 12)
    store.close()
    file = tmp_path / "sessions" / "data.mdb"
    whole = file.read_bytes()
    (tmp_path / "turns").write_text("12")
    seen = ""
    for _ in range(8):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 20))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        process = child("read", tmp_path / "sessions", tmp_path / "turns")
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode != 3, "wrong data"
        if process.returncode == 1:
            assert err.strip().splitlines()[-1].startswith("kvstore.errors."), err
        seen += out
    assert "whole" in seen
    assert "reported" in seen
