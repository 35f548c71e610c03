"""Two servers that share KV through a Redis, over HTTP: a tenant's is hit on the other one, and by nobody else."""

import pytest

from tests.service.test_isolation import TIERS, ask, text_of
from tests.support.redis_server import RedisServer, wait_for_answers
from tests.support.service.talking import tenants


@pytest.fixture
def redis(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    wait_for_answers(monkeypatch)
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def options(folder, redis):
    folder.mkdir()
    tiers = {**TIERS, "path": folder / "store", "remote": redis.url}
    return folder, {"engine": {"cache_tiers": tiers, "load": "always", "max_model_len": 768}}


def test_tenants_stay_apart_on_another_server_both_ways(redis, tmp_path):
    one, other = options(tmp_path / "one", redis), options(tmp_path / "other", redis)
    route, said = "/v1/chat/completions", text_of("said by alice")
    with tenants(one[0], **one[1]) as (alice, bob), tenants(other[0], **other[1]) as (alice_there, bob_there):
        assert ask(alice, route, said)["all"] == 0
        alice.engine.flush()
        assert ask(bob_there, route, said)["all"] == 0, "another tenant on another server"
        found = ask(alice_there, route, said)
        assert found["remote"] == found["all"] == found["whole"] >= 32, found
        mine = text_of("said by bob")
        assert ask(bob_there, route, mine)["all"] == 0
        bob_there.engine.flush()
        assert ask(alice, route, mine)["all"] == 0, "and back"
        found = ask(bob, route, mine)
        assert found["remote"] == found["all"] == found["whole"] >= 32, found
        for server in (alice, alice_there):
            server.wait_until_idle()
