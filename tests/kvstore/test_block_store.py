"""Tests of kvstore.block_store: the disk tier by itself, as another engine uses it."""

import hashlib
import subprocess
import sys

import pytest

from kvstore import BlockStore
from kvstore.errors import ConfigError, StoreError, StoreLockedError
from tests.support.waiting import wait_until

BLOCK = 64 << 10


def key(conversation: int, index: int) -> bytes:
    return hashlib.sha256(b"%d/%d" % (conversation, index)).digest() + b"\0\0\0\0"


def chain(conversation: int, num_blocks: int) -> list[bytes]:
    return [key(conversation, index) for index in range(num_blocks)]


def payload(name: bytes, size: int = BLOCK) -> bytes:
    """Derived from the key, so that a mix-up is seen."""
    return hashlib.shake_128(name).digest(size)


class Host:
    """What an engine would do: it keeps the memory of what is in flight, and polls."""

    def __init__(self, path, **options):
        self.store = BlockStore(path, **{"namespace": b"weights", "capacity": "16MiB", **options})
        self.lent = {}
        self.results = {}

    def write(self, keys, size=BLOCK, **options):
        """Tickets of the chain's blocks; None for one that was refused."""
        tickets = []
        for index, name in enumerate(keys):
            data = memoryview(bytearray(payload(name, size)))
            parent = keys[index - 1] if index else None
            ticket = self.store.write(name, parent, 16 * index, data, **options)
            tickets.append(ticket)
            self.lent[ticket] = data
        return tickets

    def read(self, name, size=BLOCK):
        into = memoryview(bytearray(size))
        result = self.wait([self.store.read_into(name, into)])[0]
        assert not result.ok or into == payload(name, size), "another block's bytes"
        return result

    def poll(self):
        for result in self.store.poll():
            assert result.ticket not in self.results, "told twice"
            self.results[result.ticket] = result
            self.lent.pop(result.ticket, None)
        return self.results

    def wait(self, tickets):
        wait_until(lambda: self.poll().keys() >= set(tickets))
        return [self.results[ticket] for ticket in tickets]

    def stored(self, keys, **options):
        """Write them, and wait until they are."""
        results = self.wait(self.write(keys, **options))
        assert all(result.ok for result in results), results
        return keys

    def close(self):
        self.store.close()


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts on one directory, which are closed at the end."""
    opened = []

    def make(**options):
        opened.append(Host(tmp_path / "store", **options))
        return opened[-1]

    yield make
    for host in opened:
        host.close()


def test_blocks_come_back_after_a_restart(hosts):
    host = hosts()
    keys = host.stored(chain(1, 20))
    assert host.store.lookup([*keys, key(1, 20)]) == [True] * 20 + [False]
    assert all(host.read(name).ok for name in keys)
    assert host.store.flush() and not host.store.has_pending_work
    host.close()
    again = hosts()
    assert again.store.lookup(keys) == [True] * 20
    result = again.read(keys[7])
    assert (result.ok, result.reason, result.num_bytes) == (True, "", BLOCK) and result.seconds > 0


def test_a_block_is_stored_once_it_is_durable_and_not_before(hosts):
    host = hosts()
    tickets = host.write(chain(1, 1))
    twice = host.write(chain(1, 1))
    assert host.store.lookup(chain(1, 1)) == [False] and host.store.has_pending_work
    assert [result.ok for result in host.wait(tickets + twice)] == [True, True]
    assert host.store.lookup(chain(1, 1)) == [True]
    assert host.stored(chain(1, 1)) and host.store.stats()["store"]["written"] == 1


def test_what_cannot_be_read_says_why(hosts):
    host = hosts()
    host.stored(chain(1, 2))
    assert host.read(key(2, 0)).reason == "missing"
    assert host.read(key(1, 0), BLOCK // 2).reason == "mismatch"
    assert host.read(key(1, 0)).ok, "asking for another size cost a block"


def test_another_namespace_hits_nothing(hosts):
    host = hosts()
    keys = host.stored(chain(1, 5))
    host.close()
    other = hosts(namespace=b"other weights")
    assert other.store.lookup(keys) == [False] * 5
    assert [other.read(name).reason for name in keys] == ["missing"] * 5
    other.stored(keys)
    other.close()
    back = hosts()
    assert all(back.read(name).ok for name in keys)


def test_a_second_owner_is_refused_and_told_by_whom(hosts, tmp_path):
    hosts(owner="vLLM's tier")
    child = f"from kvstore import BlockStore; BlockStore({str(tmp_path / 'store')!r}, namespace=b'a', capacity='8MiB')"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=300)
    assert "StoreLockedError" in done.stderr and "(vLLM's tier); stop it, or give another directory" in done.stderr
    with pytest.raises(StoreLockedError, match="this process"):
        hosts()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"namespace": b""}, "namespace is b''"),
        ({"capacity": "much"}, "capacity is 'much'"),
        ({"capacity": 1000}, "give 1.0 MiB or more"),
        ({"policy": "best"}, "policy is 'best'"),
    ],
)
def test_wrong_arguments_are_refused(hosts, options, said):
    with pytest.raises(ConfigError, match=said):
        hosts(**options)
    hosts()  # and left nothing locked


def test_a_read_only_directory_is_refused(hosts, tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        hosts()


def test_it_needs_no_torch(tmp_path):
    code = (
        "import sys; from kvstore import BlockStore\n"
        f"with BlockStore({str(tmp_path)!r}, namespace=b'a', capacity='8MiB') as store: store.stats()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
