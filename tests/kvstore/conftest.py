"""Fixtures of the tests of kvstore's own modules."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.remote import owned_blocks, redis_blocks, resp
from kvstore.sessions.shared import server as session_server
from tests.support.clocks import Clock
from tests.support.faults import constants
from tests.support.redis_server import RedisServer
from tests.support.store.host import Host
from tests.support.waiting import TIMEOUT_S

DEADLINES = {
    owned_blocks: ("ASK_S", "PUT_S"), redis_blocks: ("ASK_S", "TRANSFER_S"), resp: ("CONNECT_S",),
    session_server: ("ANSWER_S", "OUTAGE_S"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def patience():
    """A server may be as late as a busy machine makes it: a test in which it is silent says after what time it is."""
    with ExitStack() as stack:
        for module, names in DEADLINES.items():
            stack.enter_context(constants(module, **dict.fromkeys(names, TIMEOUT_S)))
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """Empty. A test that does something to the server starts one of its own."""
    shared_redis.ask("FLUSHALL")
    return shared_redis
