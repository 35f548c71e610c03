"""Conversations whose KV is in a shared tier alone: read ahead, truncated, deleted while it is away."""

import pytest

from kvstore import CacheTiers, Engine
from tests.support.engines import evict_cpu, greedy
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

PARAMS = greedy(12)


@pytest.fixture
def redis(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
    server = RedisServer(tmp_path)
    yield server
    server.resume()
    server.kill()


def opened(remote: str | None, **options) -> Engine:
    return Engine(cache_tiers=CacheTiers("16MiB", "16MiB", remote=remote), device="cpu", load="always", **options)


def forget_here(engine: Engine) -> None:
    """What was said is in the shared tier alone."""
    engine.flush()
    engine.loop.call(engine.loop.pool.evict_all)
    evict_cpu(engine)


def test_who_types_has_the_history_read_ahead(redis):
    with opened(redis.url) as engine:
        chat = engine.chat("typing", system="You are a patient guide to old cities. " * 4)
        chat.send("Tell me of Lisbon.", PARAMS)
        forget_here(engine)
        assert engine.stats()["remote"]["reads"] == 0
        engine.prefetch("typing")
        num_read = len(chat.window.chain)
        wait_until(lambda: engine.stats()["remote"]["reads"] == num_read >= 3, "all is read ahead")
        engine.check_integrity()
        assert chat.send("And of Porto.", PARAMS).usage.cached_tokens >= 16 * num_read
        assert engine.stats()["remote"]["reads"] == num_read, "it was there already"


def test_a_truncation_of_what_only_the_shared_tier_has_computes_what_it_keeps(redis):
    """Splices are made of what CPU or disk have; the turns that follow are hit in the shared tier again."""
    said = [f"Tell me more of day {day} of the journey, of the ships and of the sea." for day in range(12)]

    def talk(remote: str | None, reuse: str) -> tuple[list[str], int]:
        with opened(remote, max_model_len=256) as engine:
            chat, texts, num_hit = engine.chat("long", system="Be kind.", truncation_reuse=reuse), [], 0
            for text in said:
                output = chat.send(text, PARAMS)
                texts.append(output.text)
                num_hit += output.usage.cached_tokens_details.remote
                if remote is not None:
                    forget_here(engine)
            engine.check_integrity()
            return texts, num_hit

    computed, shared = talk(None, "exact"), talk(redis.url, "reencode")
    assert shared[0] == computed[0]
    assert shared[1] > 0


def test_a_session_deleted_while_it_is_away_is_said_to_be_pending_and_goes_when_it_is_back(redis):
    with opened(redis.url) as engine:
        engine.chat("secret", system="Never tell. " * 20).send("My name is Ada.", PARAMS)
        forget_here(engine)
        assert redis.ask("DBSIZE") > 3
        redis.pause()
        assert engine.admin.delete_session("secret") > 3, "nobody waits for the tier"
        wait_until(lambda: engine.stats()["remote"]["degraded"] is not None)
        assert engine.stats()["sessions"]["pending_deletions"] == 1
        redis.resume()
        wait_until(lambda: engine.stats()["remote"]["degraded"] is None)
        engine.flush()
        engine.admin.resume()  # as the engine does each half minute
        wait_until(lambda: redis.ask("DBSIZE") == 0, "it is deleted by itself")
        wait_until(lambda: engine.admin.resume() or engine.stats()["sessions"]["pending_deletions"] == 0)
