"""How long a Redis of sessions that was silent is not asked again."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.sessions.shared import server as server_module
from kvstore.sessions.shared.server import Durability, SessionServer
from tests.support.faults import constants
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

PING = ("PING",)


def test_an_answer_to_somebody_else_ends_the_pause_after_silence(tmp_path):
    redis = RedisServer(tmp_path)
    server = SessionServer(RedisAddress("127.0.0.1", redis.port), Durability("unchecked"))
    with ThreadPoolExecutor() as threads, constants(server_module, PAUSE_S=3600.0), ExitStack() as ends:
        ends.callback(redis.kill)  # before the threads are awaited
        ends.callback(server.close)
        patient = threads.submit(server.ask, ("BLPOP", "something", 0))
        wait_until(lambda: b"blocked_clients:1" in redis.ask("INFO", "clients"), "it waits for its answer")
        with constants(server_module, ANSWER_S=0.2), pytest.raises(RemoteError, match="no answer in time"):
            server.ask(("BLPOP", "nothing", 0))
        with pytest.raises(RemoteError, match="a moment ago"):
            server.ask(PING)
        redis.ask("RPUSH", "something", "said")
        assert patient.result() == [[b"something", b"said"]]
        assert server.ask(PING) == [b"PONG"]
        wait_until(lambda: not server.is_failing)
