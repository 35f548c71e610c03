"""What a forked child finds of its parent's owners: names, and errors from whatever it calls. The parent goes on."""

import os
import threading
from contextlib import closing, contextmanager

import pytest

from kvstore.blocks.records import Evict
from kvstore.disk.directory import StoreDirectory, read_lock_info
from kvstore.disk.env import open_environment
from kvstore.errors import StoreError
from kvstore.forks import leave_to_parent
from kvstore.sessions.record import SessionKey
from tests.children.session_child import disk_store, talk
from tests.support.engines import open_engine
from tests.support.forks import in_fork
from tests.support.store.disk_store import Store, present, put, read, write
from tests.support.store.host import Host, chain
from tests.support.waiting import TIMEOUT_S


class Owner:
    def __init__(self, end: int) -> None:
        self.name, self.lock, self.closed, self.end = "a name", threading.Lock(), False, end
        leave_to_parent(self, "the thing", closed=True)

    def let_go(self) -> None:
        os.close(self.end)

    def work(self) -> None:
        with self.lock:
            pass


def test_a_child_is_refused_though_the_parent_holds_the_lock():
    reading, writing = os.pipe()
    owner = Owner(writing)

    def work() -> str:
        with pytest.raises(StoreError) as refused:
            owner.work()
        return f"{owner.name}, {owner.closed}, {refused.value}"

    with owner.lock:
        said = in_fork(work)
    owner.let_go()  # the child has closed its own: there is no writer any more
    assert said == "a name, True, the thing was opened before this process was forked; open it again here"
    assert os.read(reading, 1) == b""
    os.close(reading)
    owner.work()
    assert not owner.closed


# -- each owner: what a child calls, and whether the parent has it all the same --------------------------------------
@contextmanager
def directory(path, _):
    with StoreDirectory.open(path) as found:
        yield [lambda: found.announce("/x")], lambda: read_lock_info(path).pid == os.getpid()


@contextmanager
def environment(path, _):
    with closing(open_environment(path, 8 << 20)) as found:
        yield [found.begin], found.begin


@contextmanager
def disk_tier(path, _):
    store = Store(path)
    tier = store.open()
    write(tier, range(3))
    calls = [
        lambda: read(tier, 1), lambda: tier.write([put(9)]), tier.stats, tier.close, tier.verify,
        lambda: list(tier.scan()), lambda: tier.contains(b"x" * 32),
    ]  # fmt: skip
    yield calls, lambda: present(tier, range(5)) == [0, 1, 2]
    store.close()


@contextmanager
def block_store(path, _):
    host = Host(path)
    keys = host.stored(chain(1, 3))
    yield [lambda: host.store.lookup(keys)], lambda: host.has(keys) and host.stored(chain(2, 3))
    host.close()


@contextmanager
def sessions(path, _):
    with closing(disk_store(path)) as store:
        key = SessionKey("", "red")
        talk(store, key, 1)
        yield [lambda: store.load(key)], lambda: store.exists(key)


@contextmanager
def connector(path, model):
    """Another thread has its lock: no verb may take it first."""
    with open_engine(model, path) as engine:
        found, held, go = engine.connector, threading.Event(), threading.Event()

        def hold():
            with found.parts.lock:
                held.set()
                go.wait(TIMEOUT_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        calls = [
            found.upkeep.stats, found.get_finished, found.upkeep.flush, lambda: found.wait_for_progress(0.0),
            lambda: found.get_num_new_matched_tokens("", 0, 0), lambda: found.update_state_after_alloc("", (), 0, 0),
            lambda: found.request_finished(""), found.step_failed, lambda: found.upkeep.check_integrity(False),
            found.upkeep.verify, lambda: found.upkeep.forget(()), lambda: found.upkeep.evict(Evict()),
            lambda: found.build_connector_meta(()), found.upkeep.compact, lambda: found.pin((), 1.0),
        ]  # fmt: skip
        yield calls, lambda: go.set() or found.upkeep.stats()
        thread.join()


@pytest.mark.parametrize("owner", [directory, environment, disk_tier, block_store, sessions, connector])
def test_a_child_is_refused_by_every_owner(owner, tmp_path, model):
    def call_all() -> str:
        said = set()
        for call in calls:
            with pytest.raises(StoreError) as refused:
                call()
            said.add(str(refused.value).partition("was ")[2])
        return "|".join(sorted(said))

    with owner(tmp_path / "store", model) as (calls, parent_has_it):
        assert in_fork(call_all) == "opened before this process was forked; open it again here"
        assert parent_has_it()
