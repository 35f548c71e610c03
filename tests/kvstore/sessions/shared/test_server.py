"""How long a Redis of sessions that was silent is not asked again."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.sessions.shared.server import ANSWER_S, Durability, SessionServer
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

PING = ("PING",)


def test_an_answer_to_somebody_else_ends_the_pause_after_silence(tmp_path):
    redis = RedisServer(tmp_path)
    server = SessionServer(RedisAddress("127.0.0.1", redis.port), Durability("unchecked"))
    try:
        with ThreadPoolExecutor() as threads:
            both = [threads.submit(server.ask, ("DBSIZE",)) for _ in range(2)]  # a connection each
            assert [one.result() for one in both] == [[0], [0]]
            redis.pause()
            silent = threads.submit(server.ask, PING)
            time.sleep(ANSWER_S / 2)  # so that this one is still waiting when the first has given up
            patient = threads.submit(server.ask, PING)
            with pytest.raises(RemoteError, match="no answer in time"):
                silent.result()
            with pytest.raises(RemoteError, match="a moment ago"):
                server.ask(PING)
            redis.resume()
            assert patient.result() == server.ask(PING)
        wait_until(lambda: not server.is_failing)
    finally:
        server.close()
        redis.resume()
        redis.kill()
