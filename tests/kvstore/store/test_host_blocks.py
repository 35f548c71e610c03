"""Tests of kvstore.store.host_blocks: when what a host writes is handed to the disk."""

import time

import pytest

from kvstore.blocks.keys import Namespace
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.records import label
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.host_blocks import HostBlocks
from kvstore.store.parts import Fence
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.support.store.host import chain, payload
from tests.support.waiting import TIMEOUT_S, wait_until


@pytest.fixture
def names_and_store(tmp_path):
    """Over a writer that never writes a small batch by itself."""
    directory = StoreDirectory.open(tmp_path / "store", name="test")
    names = Namespace(directory.secret, b"namespace", label("test"))
    steering = Steering("return", time.time, {"disk": 100})
    opening = OpeningDisk(directory, 8 << 20)
    disk = opening.join()
    io = TierWorker("disk", disk.tier, lambda: None, WorkerLimits(gather_s=3600.0))
    yield names, HostBlocks(disk, io, steering, Planner(1, 1), StoreStats(), time.time, {names.root})
    assert io.close(TIMEOUT_S)
    opening.close()


def test_when_the_last_request_ends_its_writes_wait_for_no_others(names_and_store):
    names, store = names_and_store
    keys = {name: chain(number, 1) for number, name in enumerate(("ada", "bob"))}
    for name, (key,) in keys.items():
        store.conversations.arrive(name, names.ids([key]))
        assert store.write(names.record(key, None, 0, time.time()), memoryview(payload(key)), name)
    for name in keys:
        store.poll()
        assert not store.collect()
        store.end_request(name, names.ids(keys[name]))
    ended = []

    def have_ended() -> bool:
        store.poll()
        ended.extend(store.collect())
        return len(ended) == 2

    wait_until(have_ended)
    assert all(one.ok for one in ended)


def test_what_comes_after_a_fence_is_not_waited_for(names_and_store):
    names, store = names_and_store
    keys = {name: chain(number, 1) for number, name in enumerate(("ada", "bob"))}

    def write(name: str) -> None:
        store.conversations.arrive(name, names.ids(keys[name]))
        assert store.write(names.record(*keys[name], None, 0, time.time()), memoryview(payload(*keys[name])), name)

    write("ada")
    fence = Fence(store.stages())
    assert not fence.has_ended()
    store.end_request("ada", names.ids(keys["ada"]))
    wait_until(lambda: store.poll() or fence.has_ended())
    write("bob")
    assert fence.has_ended() and not store.is_idle and not Fence(store.stages()).has_ended()
