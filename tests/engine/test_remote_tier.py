"""Engines that share a Redis: hits on another replica, and whatever happens to the server and the network.

Tokens are compared with an engine that has no store.
"""

import pytest

from kvstore import CacheTiers, Engine
from kvstore.blocks.records import Evict
from kvstore.errors import ConfigError
from tests.support.engines import ask, tokens
from tests.support.redis_server import RedisServer, wait_for_answers
from tests.support.tcp_proxy import Faults, Proxy
from tests.support.waiting import wait_until

SECRET = "the secret of this fleet, 32 characters"
PROMPT = tokens(1, 200)


@pytest.fixture(autouse=True)
def fleet(monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET)


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def empty_redis(shared_redis):
    shared_redis.ask("FLUSHALL")
    return shared_redis


@pytest.fixture
def redis(empty_redis, monkeypatch):
    """One that is waited for."""
    wait_for_answers(monkeypatch)
    return empty_redis


@pytest.fixture
def own(tmp_path):
    """A server that a test may harm."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def replica(model, url, path=None, cpu="2MiB", load="always", kind=Engine, **options):
    disk = {"disk": "32MiB", "path": path} if path is not None else {}
    return kind(model, CacheTiers("2MiB", cpu, remote=url, **disk), device="cpu", load=load, **options)


def remote(engine) -> dict:
    return engine.stats()["remote"]


def share(engine) -> None:
    """All that was finished is in the remote tier."""
    engine.flush()
    engine.check_integrity()


def hit(output) -> int:
    """Tokens of the remote tier; the sum is of all tiers."""
    details = output.usage.cached_tokens_details
    assert output.usage.cached_tokens == details.total
    return details.remote


@pytest.mark.parametrize("tiers", ["cpu and disk", "cpu alone", "disk alone"])
def test_another_replica_hits_what_one_has_computed(model, plain, redis, tmp_path, tiers):
    options = {"cpu": "0" if tiers == "disk alone" else "2MiB"}
    paths = [None, None] if tiers == "cpu alone" else [tmp_path / "a", tmp_path / "b"]
    with replica(model, redis.url, paths[0], **options) as first:
        answer = ask(first, PROMPT, 20)
        assert answer.token_ids == plain(PROMPT, 20)
        share(first)
    history = [*PROMPT, *answer.token_ids]
    with replica(model, redis.url, paths[1], **options) as second:
        output = ask(second, history, 8)
        assert output.token_ids == plain(history, 8)
        assert hit(output) == 208
        assert remote(second)["reads"] == 13
        second.flush()
        again = ask(second, history, 8)
        assert again.usage.cached_tokens_details.hbm == 208
    if paths[1] is not None:  # what was read went on to disk
        with replica(model, redis.url, paths[1], **options) as third:
            output = ask(third, history, 8)
            assert output.usage.cached_tokens_details.disk == 208
            assert output.token_ids == plain(history, 8)


def in_memory(engine) -> dict[bytes, bytes]:
    """Bytes of each block of the CPU tier."""
    parts = engine.connector.parts
    with parts.lock:
        cpu, arena = parts.cpu, parts.arena
        return {cpu.record(one).block_id: bytes(arena.view(one)) for one in cpu.pool.cached_blocks()}


def test_a_block_that_comes_back_is_bit_identical(model, redis):
    with replica(model, redis.url) as first:
        ask(first, PROMPT)
        share(first)
        computed = in_memory(first)
    with replica(model, redis.url) as second:
        assert hit(ask(second, PROMPT)) == 192
        share(second)
        assert len(computed) == 12
        assert in_memory(second) == computed


def test_another_model_tenant_salt_or_secret_never_hits(model, saved_model, redis, monkeypatch):
    with replica(model, redis.url) as first:
        ask(first, PROMPT, tenant="a")
        share(first)
        with replica(model, redis.url) as second:
            for options in ({}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "x"}):
                assert hit(ask(second, PROMPT, **options)) == 0
            assert hit(ask(second, PROMPT, tenant="a")) == 192
            share(second)
        ask(first, PROMPT, tenant="c")
        share(first)
        assert hit(ask(first, PROMPT, tenant="b")) > 0, "and back"
    with replica(saved_model(seed=5), redis.url) as other:
        assert hit(ask(other, PROMPT, tenant="a")) == 0
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET[::-1])
    with replica(model, redis.url) as stranger:
        assert hit(ask(stranger, PROMPT, tenant="a")) == 0


def test_deleted_and_evicted_blocks_go_from_there_too(model, redis, tmp_path):
    with replica(model, redis.url, tmp_path / "a") as engine:
        ask(engine, PROMPT)
        share(engine)
        num_blocks = redis.ask("DBSIZE")
        assert num_blocks == 12
        engine.admin.evict(Evict(everything=True))
        share(engine)
        assert redis.ask("DBSIZE") == 0
        output = ask(engine, PROMPT)
        assert output.usage.cached_tokens_details.disk == 0
        share(engine)


def test_no_request_fails_when_the_server_dies_and_comes_back_empty(model, plain, own, tmp_path):
    with replica(model, own.url, tmp_path / "a") as engine:
        for round_, harm in enumerate((lambda: None, own.kill, own.start, own.pause, own.resume, own.restart)):
            harm()
            prompt = tokens(100 + round_, 100)
            assert ask(engine, prompt).token_ids == plain(prompt, 4)
            assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
        wait_until(lambda: remote(engine)["degraded"] is None)
        ask(engine, PROMPT)
        share(engine)
        assert own.ask("DBSIZE") >= 12, "what it had lost was stored again"


def test_a_server_that_is_not_there_from_the_start(model, plain, own):
    own.kill()
    with replica(model, own.url) as engine:
        assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
        wait_until(lambda: "refused" in str(remote(engine)["degraded"]))
        own.start()
        wait_until(lambda: remote(engine)["degraded"] is None)
        ask(engine, PROMPT)
        share(engine)
        assert own.ask("DBSIZE") == 12


@pytest.mark.parametrize("options", [("--requirepass", "other"), ("--maxmemory", "1mb")])
def test_a_server_that_refuses(model, plain, tmp_path, options):
    server = RedisServer(tmp_path, *options)
    try:
        with replica(model, server.url, tmp_path / "a") as engine:
            for seed in range(4):
                prompt = tokens(seed, 240)
                assert ask(engine, prompt).token_ids == plain(prompt, 4)
            share(engine)
            found = remote(engine)
            assert "NOAUTH" in str(found["degraded"]) or found["full"]
            assert found["stored"] < 4 * 15
    finally:
        server.kill()


@pytest.mark.parametrize("faults", [
    Faults(cut_after=5000), Faults(cut_after=50_000), Faults(lost_at=20_000), Faults(flipped_at=20_000),
    Faults(delay_s=0.05), Faults(bytes_per_s=1e6), Faults(refuses=True),
])  # fmt: skip
def test_no_wrong_answer_through_a_bad_network(model, plain, empty_redis, faults):
    with replica(model, empty_redis.url) as first:
        ask(first, PROMPT)
        share(first)
    with Proxy(empty_redis.port) as proxy:
        proxy.faults = faults
        with replica(model, proxy.url) as second:
            for prompt in (PROMPT, [*PROMPT, *tokens(7, 40)]):
                output = ask(second, prompt)
                assert output.token_ids == plain(prompt, 4)
                hit(output)
            second.check_integrity()


def test_a_damaged_block_is_computed_and_stored_anew(model, plain, redis):
    with replica(model, redis.url) as first:
        ask(first, PROMPT)
        share(first)
    for name in redis.ask("KEYS", "*"):
        value = bytearray(redis.ask("GET", name))
        value[-1000] ^= 1
        redis.ask("SET", name, bytes(value))
    with replica(model, redis.url) as second:
        output = ask(second, PROMPT)
        assert output.token_ids == plain(PROMPT, 4)
        assert hit(output) == 0
        assert second.stats()["store"]["remote_read_failures"] == {"corrupt": 12}
        share(second)
    with replica(model, redis.url) as third:
        assert hit(ask(third, PROMPT)) == 192


def test_a_chat_goes_on_elsewhere_after_a_truncation(model, redis, tmp_path):
    """Replicas agree on the ids of a splice, too: its parent is made with the fleet's secret."""
    with replica(model, redis.url, tmp_path / "a") as first, replica(model, redis.url, tmp_path / "b") as second:
        roots = [engine.facts.root("t", "s") for engine in (first, second)]
        assert roots[0] == roots[1]
        assert first.connector.parts.secret == second.connector.parts.secret


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    url = "redis://localhost"
    with pytest.raises(ConfigError, match="cpu and disk are 0"):
        CacheTiers(remote=url)
    with pytest.raises(ConfigError, match="remote is 'http://x'; give redis://"):
        CacheTiers(cpu="1GiB", remote="http://x")
    with pytest.raises(ConfigError, match="remote_ttl_s is 0"):
        CacheTiers(cpu="1GiB", remote=url, remote_ttl_s=0)
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        CacheTiers(cpu="1GiB", remote=url)
    monkeypatch.delenv("KVSTORE_FLEET_SECRET")
    with pytest.raises(ConfigError, match="no secret of the fleet"):
        CacheTiers(cpu="1GiB", remote=url)
