"""A store of sessions: on disk, in memory, and in a Redis that servers share."""

from collections.abc import Iterator

import pytest

from kvstore.sessions.check import check
from kvstore.sessions.store import SessionStore
from tests.children.session_child import Clock, disk_store
from tests.support.redis_server import RedisServer
from tests.support.session_tables import tables_of
from tests.support.shared_sessions import DURABLE, shared_store


@pytest.fixture(scope="session")
def any_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), *DURABLE)
    yield server
    server.kill()


@pytest.fixture
def redis(any_redis: RedisServer) -> RedisServer:
    """Empty. A test that does something to the server starts one of its own."""
    any_redis.ask("FLUSHALL")
    return any_redis


@pytest.fixture(params=["disk", "memory", "shared"])
def store(request, tmp_path):
    if request.param == "shared":
        store = shared_store(request.getfixturevalue("redis"))
        store.upkeep.renew()
    else:
        store = disk_store(tmp_path) if request.param == "disk" else SessionStore(None, Clock())
    yield store
    assert store.upkeep.check().problems == ()
    with tables_of(store) as view:
        assert check(view).problems == ()
    store.close()
