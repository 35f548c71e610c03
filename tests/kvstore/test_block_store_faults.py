"""Tests of kvstore.block_store under kills, damage and a failing disk: a block is right or not there, always."""

import itertools
import random
import subprocess
import sys

import pytest

from kvstore.tiers import worker
from tests.children.block_store_child import BLOCK_BYTES
from tests.support.faults import constants, largest_file
from tests.support.programs import ROOT, python, python_on_a_tmpfs
from tests.support.store.host import BLOCK, Host, chain, key, payload
from tests.support.waiting import wait_for_work, wait_until

KILL_ROUNDS, LONG_KILL_ROUNDS = 4, 100


def test_a_kill_at_any_moment_loses_nothing_that_was_said_to_be_stored(tmp_path, request):
    rng = random.Random(1)
    log, store = tmp_path / "log", tmp_path / "store"
    for _ in range(LONG_KILL_ROUNDS if request.config.getoption("--long") else KILL_ROUNDS):
        size = log.stat().st_size if log.exists() else 0
        first = 1 + max((int(line.split()[0]) for line in log.read_text().splitlines()), default=0) if size else 0
        arguments = [sys.executable, "-m", "tests.children.block_store_child", str(store), str(first + 1000), str(log)]
        child = subprocess.Popen(arguments, cwd=ROOT)
        try:
            wait_for_work(child, log, size + rng.randrange(800))
            assert child.poll() is None, "it ended by itself"
        finally:
            child.kill()
            child.wait()
        lines = log.read_text().rpartition("\n")[0].splitlines()
        stored = [key(*map(int, line.split())) for line in lines[-200:]]
        host = Host(store, capacity="64MiB")
        try:
            assert all(host.store.lookup(stored))
            assert host.has(stored, BLOCK_BYTES)
        finally:
            host.close()


def test_a_block_that_is_damaged_while_the_store_is_open(hosts, tmp_path):
    host = hosts()
    keys = host.stored(chain(1, 6))
    with open(tmp_path / "store" / "blocks" / "data.mdb", "r+b") as file:
        place = file.read().index(payload(keys[3], BLOCK)[:64])
        file.seek(place + 20_000)
        byte = file.read(1)[0]
        file.seek(place + 20_000)
        file.write(bytes([byte ^ 1]))
    assert host.read(keys[2]).ok
    result = host.read(keys[3])
    assert (result.ok, result.reason, result.num_bytes) == (False, "damaged", 0)
    assert host.store.flush() and host.store.lookup(keys) == [True] * 3 + [False] * 3
    assert host.store.stats()["store"]["read_failures"] == {"corrupt": 1}
    host.stored(keys)
    assert host.has(keys)


@pytest.mark.filterwarnings("ignore:blocks of the store")
def test_the_data_file_is_removed(hosts, tmp_path):
    host = hosts()
    keys = host.stored(chain(1, 6))
    (tmp_path / "store" / "blocks" / "data.mdb").unlink()
    wait_until(lambda: not any(host.store.lookup(keys)))
    wait_until(lambda: not host.store.is_degraded)
    host.stored(keys)
    assert host.has(keys) and "removed" in host.store.stats()["disk"]["lost"]
    host.close()
    assert all(hosts().store.lookup(keys))


def test_the_directory_is_replaced(hosts, tmp_path):
    host = hosts()
    keys = host.stored(chain(1, 3))
    (tmp_path / "store").rename(tmp_path / "moved")
    wait_until(lambda: host.store.is_degraded)
    assert "was removed or replaced" in host.store.reason and not host.store.flush()
    reasons = {result.reason for result in host.wait([t for t in host.write(chain(2, 3)) if t is not None])}
    assert reasons <= {"io_error"}
    host.close()
    other = hosts()
    assert not any(other.store.lookup(keys))


def test_a_disk_that_is_full_and_has_room_again(hosts, tmp_path):
    host = hosts(capacity="64MiB")
    keys = host.stored(chain(1, 20))
    with largest_file(3 << 20):
        later = host.write(chain(2, 60))
        reasons = {result.reason for result in host.wait([ticket for ticket in later if ticket is not None])}
        assert reasons - {""} == {"io_error"}, "the file system itself has room"
        fresh = itertools.count()
        wait_until(lambda: host.write([key(3, next(fresh))]) == [None], "it waits before it tries again")
        assert host.store.is_degraded and host.store.reason == "i/o error" and not host.store.flush(10.0)
        assert host.has(keys), "reads go on"
        assert host.store.stats()["store"]["refused_writes"] > 0

    def is_written():
        ticket = host.write([key(9, 0)])[0]
        return ticket is not None and host.wait([ticket])[0].ok

    wait_until(is_written)
    assert not host.store.is_degraded and host.store.flush()
    host.stored(chain(2, 60))
    host.close()
    assert all(hosts(capacity="64MiB").store.lookup(keys + chain(2, 60)))


def test_what_was_being_written_when_others_failed_says_the_same_once_the_pause_is_over(hosts):
    """What they built on was given up meanwhile, so it is not written again."""
    host = hosts(capacity="64MiB")
    with largest_file(3 << 20), constants(worker, FIRST_S=0.0005, LAST_S=0.0005):
        tickets = [ticket for i in range(30) for ticket in host.write(chain(i, 20)) if ticket is not None]
        reasons = {result.reason for result in host.wait(tickets)}
    assert reasons == {"", "io_error"}


def test_a_small_file_system_is_shared_with_others(tmp_path):
    code = (
        "import sys; from tests.support.store.host import Host, chain\n"
        "host = Host(sys.argv[1] + '/store', capacity='1GiB')\n"
        "for number in range(60): host.stored(chain(number, 20))\n"
        "assert host.store.flush() and host.store.stats()['store']['disk_evictions'] > 400\n"
        "assert all(host.read(name).ok for name in chain(59, 20)); host.close()\n"
    )
    python_on_a_tmpfs("size=32m", code, tmp_path)


def test_a_read_only_directory_is_refused_by_name(tmp_path):
    code = (
        "import sys; from kvstore import BlockStore; from kvstore.errors import StoreError\n"
        "try: BlockStore(sys.argv[1], namespace=b'a', capacity='8MiB')\n"
        "except StoreError as error: assert f'{sys.argv[1]} cannot be used: Read-only' in str(error)\n"
        "else: raise AssertionError('it was opened')\n"
    )
    python_on_a_tmpfs("size=32m,ro", code, tmp_path)


def test_a_store_that_nobody_closes_keeps_what_was_written(hosts, tmp_path):
    code = "import sys; from tests.support.store.host import Host, chain\nHost(sys.argv[1]).write(chain(1, 5))"
    assert python(code, tmp_path / "store").returncode == 0
    assert all(hosts().store.lookup(chain(1, 5)))
