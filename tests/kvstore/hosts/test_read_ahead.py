"""Sessions whose histories are read ahead: also after a restart, bounded, and as far as they are stored."""

import pytest

from kvstore import BlockStore
from kvstore.hosts.read_ahead import ReadAhead
from tests.support.page_cache import ColdFile
from tests.support.store.host import Host, chain, payload
from tests.support.waiting import wait_until


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path / "store", capacity="32MiB")
    yield host
    host.close()


def prefetched(host):
    return host.store.stats()["store"]["prefetched"]


def test_a_session_is_read_ahead_after_a_restart(host, tmp_path):
    ahead = ReadAhead(host.store, tmp_path / "store")
    keys = chain(1, 40)
    host.stored(keys[:37])  # the last ones never came
    ahead.ended("anna", [keys])
    ahead.close()
    host.close()
    wanted = [payload(name) for name in keys[:33]]
    file = ColdFile(tmp_path / "store" / "blocks" / "data.mdb", wanted)
    host.store = BlockStore(tmp_path / "store", namespace=b"weights", capacity="32MiB")
    again = ReadAhead(host.store, tmp_path / "store")
    again.arrives("bert")
    assert not all(file.resident(wanted))
    again.arrives("anna")
    wait_until(lambda: all(file.resident(wanted)))
    again.close()


def test_each_group_of_layers_has_a_chain_and_what_is_forgotten_is_not_read(host, tmp_path):
    ahead = ReadAhead(host.store, tmp_path / "store")
    groups = [host.stored(chain(1, 5)), host.stored(chain(2, 1)), []]
    ahead.ended("anna", groups)
    ahead.arrives("anna")
    assert prefetched(host) == 6
    ahead.forget("anna")
    ahead.arrives("anna")
    assert prefetched(host) == 6
    ahead.close()
    again = ReadAhead(host.store, tmp_path / "store")
    again.arrives("anna")
    assert prefetched(host) == 6
    again.close()


def test_the_sessions_used_last_are_kept(host, tmp_path):
    ahead = ReadAhead(host.store, tmp_path / "store", most=3)
    for number in (1, 2, 3, 1, 4):
        ahead.ended(f"talk {number}", [host.stored(chain(number, 1))])
    ahead.close()
    again = ReadAhead(host.store, tmp_path / "store")
    found = []
    for number in range(1, 5):
        before = prefetched(host)
        again.arrives(f"talk {number}")
        found.append(prefetched(host) - before)
    assert found == [1, 0, 1, 1]
    again.close()
