"""A store of sessions: on disk, in memory, and in a Redis that servers share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.sessions.check import check
from kvstore.sessions.store import SessionStore
from tests.children.session_child import Clock, disk_store
from tests.support.redis_server import RedisServer
from tests.support.session_tables import tables_of
from tests.support.shared_sessions import DURABLE, shared_store


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that keeps what it has, for the fixture `redis`."""
    with RedisServer(tmp_path_factory.mktemp("redis"), *DURABLE) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may do something to; it keeps what it has."""
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis", *DURABLE) as server:
        yield server


@pytest.fixture
def share() -> Iterator[Callable[..., SessionStore]]:
    """Opens stores of servers that share a Redis, as `shared_store`; they are closed at the end."""
    opened: list[SessionStore] = []

    def make(*args, **options) -> SessionStore:
        opened.append(shared_store(*args, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Callable[[], SessionStore]]:
    """Opens the store of a folder, again and again; the last one is closed at the end."""
    opened: list[SessionStore] = []

    def make() -> SessionStore:
        for store in opened:
            store.close()
        opened.append(disk_store(tmp_path))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture(params=["disk", "memory", "shared"])
def store(request, tmp_path):
    if request.param == "shared":
        store = shared_store(request.getfixturevalue("redis"))
        store.renew()
    else:
        store = disk_store(tmp_path) if request.param == "disk" else SessionStore(None, Clock())
    yield store
    assert store.check().problems == ()
    with tables_of(store) as view:
        assert check(view)[0].problems == ()
    store.close()
