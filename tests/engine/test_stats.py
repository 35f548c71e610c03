"""`Engine.stats()` has the shape that its type says."""

import msgspec
import pytest

from kvstore import CacheTiers, Engine, EngineStats
from tests.support.engines import greedy
from tests.support.redis_server import RedisServer, free_port


def entries(of: type) -> set[str]:
    return set(of.__annotations__)


@pytest.fixture
def redis(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.parametrize("process", ["here", "own"])
def test_an_engine_with_all_tiers_has_every_entry_and_no_other(redis, tmp_path, process):
    tiers = CacheTiers("4MiB", "16MiB", "16MiB", tmp_path / "store", remote=redis.url)
    shared = {"session_store": redis.url, "session_durability": "unchecked"}
    with Engine(cache_tiers=tiers, process=process, kv_events=f"tcp://127.0.0.1:{free_port()}", **shared) as engine:
        engine.chat("ada").send("Hello", greedy(4))
        engine.flush()
        stats = engine.stats()
    assert msgspec.convert(stats, EngineStats) == stats  # which drops what the type does not know
    assert entries(EngineStats) - stats.keys() == {"replicas"} | ({"process"} if process == "here" else set())
    assert entries(EngineStats.__annotations__["sessions"]) == stats["sessions"].keys()


def test_an_engine_with_hbm_alone_has_what_is_required():
    with Engine(cache_tiers={"hbm": "4MiB"}) as engine:
        stats = engine.stats()
    assert msgspec.convert(stats, EngineStats) == stats
