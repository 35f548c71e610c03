"""Tests of kvstore.disk.directory, disk_env and disk_check: owners, permissions, and files that LMDB must not see."""

import json
import os
import random
import shutil
import stat
import struct
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import lmdb
import pytest

from kvstore.disk import check as disk_check
from kvstore.disk import directory as disk_open
from kvstore.disk import env as disk_env
from kvstore.disk import walk as disk_walk
from kvstore.disk.directory import StoreDirectory, file_system_type, read_lock_info
from kvstore.disk.env import open_environment
from kvstore.errors import StoreError, StoreLockedError
from tests.support.programs import python

MAP_BYTES = 8 << 20


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- the directory ---------------------------------------------------------------------------------------------------
def test_a_new_directory_is_ours_alone(tmp_path):
    with StoreDirectory.open(tmp_path / "deep" / "store") as directory:
        assert mode(directory.path) == 0o700
        found = {name: mode(directory.path / name) for name in os.listdir(directory.path)}
        assert found == dict.fromkeys(("format", "lock", "secret"), 0o600)
        assert len(directory.secret) == 32


def test_the_secret_is_made_once(tmp_path):
    with StoreDirectory.open(tmp_path / "a") as directory:
        secret = directory.secret
    with StoreDirectory.open(tmp_path / "a") as directory, StoreDirectory.open(tmp_path / "b") as other:
        assert directory.secret == secret != other.secret


def test_a_store_of_another_format_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "sessions").mkdir()  # format 1 had no file that says so
    with pytest.raises(StoreError, match=r"has format 1, and this program reads format 2; give another directory, or"):
        StoreDirectory.open(tmp_path)
    assert os.listdir(tmp_path) == ["sessions"]
    (tmp_path / "format").write_text("3\n")
    with pytest.raises(StoreError, match="has format 3"):
        StoreDirectory.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33, bytes(32)])
def test_a_damaged_secret_is_set_aside(tmp_path, content):
    StoreDirectory.open(tmp_path).close()
    (tmp_path / "secret").write_bytes(content)
    with pytest.warns(RuntimeWarning, match="secret of the store is damaged"):
        directory = StoreDirectory.open(tmp_path)
    (kept,) = tmp_path.glob("quarantine-*/secret")
    assert kept.read_bytes() == content
    assert (tmp_path / "secret").read_bytes() == directory.secret != content
    directory.close()


def test_home_is_expanded_and_permissions_are_tightened(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    StoreDirectory.open("~/store").close()
    store = tmp_path / "store"
    store.chmod(0o755)
    (store / "secret").chmod(0o644)
    (store / "lock").chmod(0o666)
    with StoreDirectory.open(store):
        assert (mode(store), mode(store / "secret"), mode(store / "lock")) == (0o700, 0o600, 0o600)


def test_a_link_to_our_own_directory_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with StoreDirectory.open(tmp_path / "link"), pytest.raises(StoreLockedError):
        StoreDirectory.open(tmp_path / "real")


@pytest.mark.parametrize("make", ["file", "dangling", "zero byte"])
def test_what_is_no_directory_is_refused_in_one_line(tmp_path, make):
    path = str(tmp_path / "store")
    if make == "file":
        Path(path).write_text("hello")
    elif make == "dangling":
        os.symlink(tmp_path / "nowhere", path)
    else:
        path += "\0"
    with pytest.raises(StoreError) as caught:
        StoreDirectory.open(path)
    assert "\n" not in str(caught.value) and "store" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("through_link", [False, True])
def test_another_owner_is_refused(tmp_path, through_link):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(StoreError, match="belongs to user 12345"):
        StoreDirectory.open(tmp_path / ("link" if through_link else "theirs"))
    assert os.listdir(tmp_path / "theirs") == []


def test_a_lock_or_secret_that_is_a_link_is_refused(tmp_path):
    for name in ("lock", "secret"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError):
            StoreDirectory.open(tmp_path)
        assert not (tmp_path / "elsewhere").exists()
        (tmp_path / name).unlink()


def test_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *arguments, **options: False)
    with pytest.raises(StoreError, match="not writable"):
        StoreDirectory.open(tmp_path)


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_open, "file_system_type", lambda path: "nfs4")
    with pytest.raises(StoreError, match="nfs4"):
        StoreDirectory.open(tmp_path)


def test_file_system_type_takes_the_longest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} nfs rw 0 0\nc {tmp_path}/x\\040y cifs rw 0 0\nbroken\n")
    assert file_system_type(tmp_path / "deep", mounts) == "nfs"
    assert file_system_type(tmp_path / "x y" / "z", mounts) == "cifs"
    assert file_system_type(Path("/"), mounts) == "ext4"
    assert file_system_type(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    "name", ["lock", "secret", "weights.json", "policy.json", "sessions/data.mdb", "blocks/lock.mdb", "answers/clean"]
)
@pytest.mark.parametrize("kind", ["a named pipe", "a directory"])
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path, name, kind):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if kind == "a named pipe" else path.mkdir()
    if kind == "a directory" and name.endswith(".json"):
        StoreDirectory.open(tmp_path).close()  # a cache, which does without
        return
    with pytest.raises(StoreError, match=f"{name} is {kind} where a file of the store has to be") as caught:
        StoreDirectory.open(tmp_path)
    assert "\n" not in str(caught.value)
    assert read_lock_info(tmp_path) is None


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "sessions").write_text("hello")
    with pytest.raises(StoreError, match="sessions is a file where a directory"):
        StoreDirectory.open(tmp_path)


def test_data_that_cannot_be_written_is_told_at_once(tmp_path, monkeypatch):
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "data.mdb").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "data.mdb")  # root may write everything
    with pytest.raises(StoreError, match=r"sessions/data.mdb is not writable"):
        StoreDirectory.open(tmp_path)


# -- the lock --------------------------------------------------------------------------------------------------------
def test_one_owner_in_this_process(tmp_path):
    directory = StoreDirectory.open(tmp_path)
    with pytest.raises(StoreLockedError, match="this process") as caught:
        StoreDirectory.open(tmp_path)
    assert caught.value.pid == os.getpid()
    directory.close()
    directory.close()
    StoreDirectory.open(tmp_path).close()


def test_another_process_is_refused_with_our_pid(tmp_path):
    code = """
import sys
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.errors import StoreLockedError
try:
    StoreDirectory.open(sys.argv[1])
except StoreLockedError as error:
    print(error.pid, read_lock_info(sys.argv[1]).socket_path)
"""
    with StoreDirectory.open(tmp_path) as directory:
        directory.announce(directory.path / "socket")
        assert python(code, tmp_path).stdout.split() == [str(os.getpid()), str(tmp_path / "socket")]


def test_the_lock_ends_with_its_owner(tmp_path):
    code = "import os, sys; from kvstore.disk.directory import StoreDirectory; d = StoreDirectory.open(sys.argv[1]); "
    killed = python(code + "os.kill(os.getpid(), 9)", tmp_path)
    assert killed.returncode == -9
    assert json.loads((tmp_path / "lock").read_bytes())["pid"] > 0  # it is still named, but owns nothing
    assert read_lock_info(tmp_path) is None
    StoreDirectory.open(tmp_path).close()


def test_lock_info(tmp_path):
    assert read_lock_info(tmp_path) is None
    assert read_lock_info(tmp_path / "missing") is None
    with StoreDirectory.open(tmp_path) as directory:
        assert read_lock_info(tmp_path) == disk_open.LockInfo(os.getpid(), None)
        directory.announce("/run/socket")
        assert read_lock_info(tmp_path) == disk_open.LockInfo(os.getpid(), "/run/socket")
        for content in ("", "[]", "{", '{"pid": "x", "socket": 3}', '{"pid": -1}', "[" * 8000):
            (tmp_path / "lock").write_text(content)
            assert read_lock_info(tmp_path) == disk_open.LockInfo(None, None)
    assert read_lock_info(tmp_path) is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_lives_on_does_not_hold_the_lock(tmp_path):
    directory = StoreDirectory.open(tmp_path)
    waiting, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done)
        os.read(waiting, 1)
        os._exit(0)
    directory.close()
    StoreDirectory.open(tmp_path).close()
    os.close(done)
    os.close(waiting)
    os.waitpid(pid, 0)


# -- environments ----------------------------------------------------------------------------------------------------
def fill(path: Path, count: int = 200) -> dict[bytes, bytes]:
    """An environment with small and large values and free pages in it."""
    rng = random.Random(count)
    values = {b"%08d" % i: rng.randbytes(rng.choice((20, 3000, 9000))) for i in range(count)}
    environment = open_environment(path, MAP_BYTES)
    db = environment.open_db(b"values")
    with environment.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value, db=db)
    gone = [key for i, key in enumerate(values) if i % 5 == 0]
    with environment.begin(write=True) as txn:
        for key in gone:
            txn.delete(key, db=db)
    environment.close()
    return {key: value for key, value in values.items() if key not in gone}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "env"


@pytest.fixture
def values(path) -> dict[bytes, bytes]:
    """What is stored there."""
    return fill(path)


def has_all(path: Path, values: dict[bytes, bytes]) -> bool:
    with closing(open_environment(path, MAP_BYTES)) as environment:
        return content(environment) == values


def content(environment: disk_env.StoreEnvironment) -> dict[bytes, bytes]:
    db = environment.open_db(b"values")
    with environment.begin() as txn:
        return dict(txn.cursor(db))


def test_files_are_ours_alone_and_a_clean_stop_is_marked(path, values):
    assert {p.name: mode(p) for p in path.iterdir()} == {"data.mdb": 0o600, "lock.mdb": 0o600, "clean": 0o600}
    assert mode(path) == 0o700
    assert disk_check.was_closed_cleanly(path, disk_check.read_meta(path / "data.mdb"))
    (path / "data.mdb").chmod(0o644)
    environment = open_environment(path, MAP_BYTES)
    assert not (path / "clean").exists() and mode(path / "data.mdb") == 0o600
    assert content(environment) == values and environment.quarantined is None
    environment.close(clean=False)
    assert not (path / "clean").exists()


def verifier_that(folder, does):
    """In here the structure of a file is verified by this program."""
    (folder / "walker.py").write_text(does)
    return mock.patch.object(disk_check, "WALKER", str(folder / "walker.py"))


def test_the_structure_is_checked_where_it_may_be_bad(tmp_path, path):
    log = tmp_path / "checked"
    log.touch()

    def num_checked() -> int:
        return len(log.read_text())

    with verifier_that(tmp_path, f"open({str(log)!r}, 'a').write('1')"):
        open_environment(path, MAP_BYTES).close()
        assert num_checked() == 0  # there was nothing yet
        open_environment(path, MAP_BYTES, verify_below_bytes=0).close(clean=False)
        assert num_checked() == 0  # large, and closed cleanly
        open_environment(path, MAP_BYTES, verify_below_bytes=0).close()
        assert num_checked() == 1  # not closed cleanly
        open_environment(path, MAP_BYTES).close()
        assert num_checked() == 2  # small: it costs nothing
        (path / "clean").write_text('{"file_bytes": 1, "txn_id": 1}')
        open_environment(path, MAP_BYTES, verify_below_bytes=0).close()
        assert num_checked() == 3  # the mark is of another state
        with open(path / "data.mdb", "r+b") as file:
            file.truncate(os.fstat(file.fileno()).st_size - 1)
        disk_check.mark_clean(path)
        open_environment(path, MAP_BYTES, verify_below_bytes=0).close(clean=False)
        assert num_checked() == 4  # shorter than it says


def test_an_environment_is_opened_once(tmp_path):
    environment = open_environment(tmp_path / "env", MAP_BYTES)
    with pytest.raises(StoreError, match="already open"):
        open_environment(tmp_path / "env", MAP_BYTES)
    environment.close()
    environment.close()
    open_environment(tmp_path / "env", MAP_BYTES).close()


def test_a_map_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"1\.0 MiB"):
        open_environment(tmp_path / "env", 1000)


def other_version(path: Path) -> None:
    shutil.rmtree(path)
    env = lmdb.open(str(path), lib_version=1)
    with env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    env.close()


def truncate(path: Path, share: float) -> None:
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", int(size * share))


BAD_FILES = {
    "empty": lambda path: truncate(path, 0),
    "in the metas": lambda path: os.truncate(path / "data.mdb", 4100),
    "half": lambda path: truncate(path, 0.5),
    "40 pages": lambda path: os.truncate(path / "data.mdb", 40 * 4096),
    "text": lambda path: (path / "data.mdb").write_text("this is not a database\n" * 1000),
    "zeros": lambda path: (path / "data.mdb").write_bytes(bytes(1 << 20)),
    "another version": other_version,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_set_aside(tmp_path, path, values, name):
    BAD_FILES[name](path)
    before = (path / "data.mdb").read_bytes()
    with pytest.warns(RuntimeWarning, match="env of the store is damaged"):
        environment = open_environment(path, MAP_BYTES)
    assert environment.quarantined.parent.parent == tmp_path and mode(environment.quarantined.parent) == 0o700
    assert (environment.quarantined / "data.mdb").read_bytes() == before
    assert values and content(environment) == {}
    environment.close()
    open_environment(path, MAP_BYTES).close()


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_file_passes_the_check(path, seed):
    """However its pages were split, merged and filled: a false alarm costs the whole store."""
    rng = random.Random(seed)
    environment = open_environment(path, MAP_BYTES)
    dbs = [environment.open_db(name) for name in (b"a", b"b", b"c")]
    live: list[set[bytes]] = [set(), set(), set()]
    for _ in range(25):
        with environment.begin(write=True) as txn:
            for _ in range(rng.randrange(1, 120)):
                which = rng.randrange(3)
                if live[which] and rng.random() < rng.choice((0.3, 0.7)):
                    key = rng.choice(sorted(live[which]))
                    live[which].discard(key)
                    txn.delete(key, db=dbs[which])
                else:
                    key = rng.randbytes(rng.randrange(1, 60))
                    live[which].add(key)
                    txn.put(key, rng.randbytes(rng.choice((0, 1, 90, 700, 1500, 5000))), db=dbs[which])
        assert list(disk_walk.problems(str(path / "data.mdb"))) == []
    environment.close()
    assert disk_check.verify_structure(path / "data.mdb") is None


def test_what_the_packages_own_check_lets_pass_is_found(path):
    """A node that claims a few bytes of its neighbour, and a branch key that hides what is below it."""
    environment = open_environment(path, MAP_BYTES)
    db = environment.open_db(b"values")
    with environment.begin(write=True) as txn:
        for i in range(300):
            txn.put(b"%08d" % i, b"v" * 60, db=db)
    environment.close()
    good = (path / "data.mdb").read_bytes()
    found = set()
    for page in range(2, len(good) // 4096):
        flags, lower = struct.unpack_from("<HH", good, 4096 * page + 10)
        if flags not in (1, 2) or lower < 24:
            continue
        node = 4096 * page + struct.unpack_from("<H", good, 4096 * page + 18)[0]  # the second one
        data = bytearray(good)
        data[node + 15 if flags == 1 else node] ^= 4  # the key's last byte, or the size
        (path / "data.mdb").write_bytes(data)
        found |= {(flags, why.split(": ")[1][:9]) for why in disk_walk.problems(str(path / "data.mdb"))}
    assert {(1, "a key is "), (2, "its nodes")} <= found


@pytest.mark.filterwarnings("ignore:env of the store is damaged")
@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_never_crash_us(path, seed):
    """What passes the check can be walked to its end; what does not is in quarantine, untouched."""
    rng = random.Random(seed)
    fill(path, 120)
    data = bytearray((path / "data.mdb").read_bytes())
    for _ in range(6):
        page = rng.choice((0, 1, rng.randrange(len(data) // 4096)))
        data[4096 * page + rng.choice((rng.randrange(200), rng.randrange(4096)))] ^= 1 << rng.randrange(8)
    (path / "data.mdb").write_bytes(data)
    environment = open_environment(path, MAP_BYTES)
    content(environment)
    db = environment.open_db(b"values")
    with environment.begin(write=True) as txn:
        for i in range(150):
            txn.delete(b"%08d" % i, db=db)
            txn.put(b"new %d" % i, bytes(5000), db=db)
    if environment.quarantined is not None:
        assert (environment.quarantined / "data.mdb").read_bytes() == data
    environment.close()


def test_quarantines_do_not_collide(tmp_path):
    for i in range(3):
        (tmp_path / "thing").write_text(str(i))
        with pytest.warns(RuntimeWarning):
            disk_check.quarantine(tmp_path / "thing", "why", lambda: datetime(2026, 1, 2, tzinfo=UTC))
    places = [tmp_path / f"quarantine-20260102T000000Z-{i}" / "thing" for i in (1, 2, 3)]
    assert [place.read_text() for place in places] == ["0", "1", "2"]


def test_a_verifier_that_is_missing_is_not_damage(tmp_path, path, values):
    with verifier_that(tmp_path, "import sys; sys.exit(70)"), pytest.raises(StoreError, match="install lmdb"):
        open_environment(path, MAP_BYTES)
    assert has_all(path, values)


@pytest.mark.usefixtures("values")
def test_a_verifier_that_dies_means_damage(tmp_path, path):
    dies = verifier_that(tmp_path, "import os; os.kill(os.getpid(), 11)")
    with dies, pytest.warns(RuntimeWarning, match="status -11"):
        open_environment(path, MAP_BYTES).close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_verifier_that_is_ended_from_outside_says_nothing_about_the_file(tmp_path, path, values, name):
    # A background job ignores SIGINT.
    reset = "" if name == "SIGKILL" else f"signal.signal(signal.{name}, signal.SIG_DFL); "
    ended = verifier_that(tmp_path, f"import os, signal; {reset}os.kill(os.getpid(), signal.{name})")
    with ended, pytest.raises(StoreError, match=f"was ended by {name} from outside; nothing was changed"):
        open_environment(path, MAP_BYTES)
    assert has_all(path, values)


def test_a_check_that_gets_no_time_is_no_damage(tmp_path, path, monkeypatch):
    open_environment(path, MAP_BYTES).close()
    monkeypatch.setattr(disk_check, "VERIFY_BASE_S", 0.0)
    with pytest.raises(StoreError, match="try again"):
        open_environment(path, MAP_BYTES)
    assert os.listdir(tmp_path) == ["env"]
