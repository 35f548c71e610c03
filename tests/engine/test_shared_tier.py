"""Engines that share a Redis, a directory or a bucket: hits on another replica, whatever happens to what they share.

Tokens are compared with an engine that has no store.
"""

import pytest

from kvstore import CacheTiers, Engine
from kvstore.blocks.records import Evict
from tests.support.buckets import Directory, s3_server
from tests.support.engines import ask, evict_memory, greedy, tokens
from tests.support.redis_server import RedisServer, wait_for_answers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fleet")
MODEL = {"tokenizer": True}
PROMPT = tokens(1, 200)
SYSTEM = "You know all that can be known of the sea, of ships, and of those who live by it. " * 3


def replica(model, url, path=None, cpu="2MiB", **options):
    disk = {"disk": "32MiB", "path": path} if path is not None else {}
    return Engine(model, CacheTiers("2MiB", cpu, remote=url, **disk), device="cpu", load="always", **options)


def degraded(engine) -> str | None:
    return engine.stats()["remote"]["degraded"]


def share(engine) -> None:
    """All that was finished is in the remote tier."""
    engine.flush()
    engine.check_integrity()


def hit(output) -> int:
    """Tokens of the remote tier; the sum is of all tiers."""
    details = output.usage.cached_tokens_details
    assert output.usage.cached_tokens == details.total
    return details.remote


@pytest.mark.parametrize(
    ("shared", "tiers"),
    [("redis", "cpu and disk"), ("objects", "cpu alone"), ("redis", "disk alone"), ("objects", "disk alone")],
    indirect=["shared"],
)
def test_another_replica_hits_what_one_has_computed(model, plain, shared, tmp_path, tiers):
    options = {"cpu": "0" if tiers == "disk alone" else "2MiB"}
    paths = [None, None] if tiers == "cpu alone" else [tmp_path / "a", tmp_path / "b"]
    with replica(model, shared.url, paths[0], **options) as first:
        answer = ask(first, PROMPT[:120], 20)
        assert answer.token_ids == plain(PROMPT[:120], 20)
        share(first)
        history = [*PROMPT[:120], *answer.token_ids]
        with replica(model, shared.url, paths[1], **options) as second:
            output = ask(second, history, 8)
            assert output.token_ids == plain(history, 8) and hit(output) == 128
            share(second)
            assert ask(second, history, 8).usage.cached_tokens_details.hbm == 128
            longer = [*history, *output.token_ids, *tokens(3, 60)]
            ask(second, longer)
            share(second)
        output = ask(first, longer, 8)
        assert output.token_ids == plain(longer, 8)
        assert hit(output) > 40, "what the other one has stored behind it"
    if paths[1] is not None:  # what was read went on to disk
        with replica(model, shared.url, paths[1], **options) as third:
            output = ask(third, history, 8)
            assert output.token_ids == plain(history, 8) and output.usage.cached_tokens_details.disk == 128


def test_a_conversation_hits_the_system_prompt_that_another_one_has_stored(model, tmp_path):
    url = Directory(tmp_path / "objects").url
    with replica(model, url, process="own") as first, replica(model, url) as second:
        chat = first.chat("a", system=SYSTEM)
        for text in ("My dog is called Biscuit.", "What is my dog called?"):
            chat.send(text, greedy(30))
        first.flush()
        head = second.chats.language.chat_template().head_ids([{"role": "system", "content": SYSTEM}])
        assert len(head) >= 48
        assert hit(second.chat("b", system=SYSTEM).send("What is a ship?", greedy(4))) == len(head) // 16 * 16


def test_another_model_tenant_salt_or_secret_never_hits(model, saved_model, shared, monkeypatch):
    with replica(model, shared.url) as first, replica(model, shared.url) as second:
        ask(first, PROMPT, tenant="a")
        share(first)
        for options in ({}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "x"}):
            assert hit(ask(second, PROMPT, **options)) == 0
        assert hit(ask(second, PROMPT, tenant="a")) == 192
        share(second)
        assert hit(ask(first, PROMPT, tenant="b")) == 192, "and back"
        assert first.facts.root("t", "s") == second.facts.root("t", "s")
        assert first.connector.parts.secret == second.connector.parts.secret, "the parents of splices are made with it"
    with replica(saved_model(seed=5), shared.url) as other:
        assert hit(ask(other, PROMPT, tenant="a")) == 0
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "another secret, of other people, 32 characters")
    with replica(model, shared.url) as stranger:
        assert hit(ask(stranger, PROMPT, tenant="a")) == 0


def test_deleted_and_evicted_blocks_go_from_there_too(model, shared, tmp_path):
    with replica(model, shared.url, tmp_path / "a") as engine:
        ask(engine, PROMPT)
        share(engine)
        assert len(shared.names()) == (1 if isinstance(shared, Directory) else 12)
        engine.admin.evict(Evict(everything=True))
        share(engine)
        assert shared.names() == []
        assert ask(engine, PROMPT).usage.cached_tokens_details.disk == 0
        share(engine)


def test_what_is_damaged_is_computed_and_stored_anew(model, plain, shared):
    with replica(model, shared.url) as first:
        ask(first, PROMPT)
        share(first)
    for name in shared.names():
        value = bytearray(shared.get(name))
        for at in range(1000, len(value), 5000):  # in each block, also of a group
            value[at] ^= 1
        shared.set(name, bytes(value))
    with replica(model, shared.url) as second:
        output = ask(second, PROMPT)
        assert output.token_ids == plain(PROMPT, 4)
        assert hit(output) == 0
        failures = second.stats()["store"]["remote_read_failures"]
        assert failures["corrupt"] > 0 and failures.keys() <= {"corrupt", "missing"}
        share(second)
        ask(second, PROMPT)
        share(second)
    with replica(model, shared.url) as third:
        assert hit(ask(third, PROMPT)) == 192


HARMS = {
    "redis": ["kill", "start", "pause", "resume", "restart"],
    "s3": ["pause", "resume", "delete_bucket", "kill", "start"],
}


@pytest.mark.parametrize("kind", HARMS)
def test_no_request_fails_when_the_server_dies_stops_or_comes_back_empty(model, plain, monkeypatch, tmp_path, kind):
    harmed = s3_server(monkeypatch) if kind == "s3" else RedisServer(tmp_path)
    with harmed as server, replica(model, server.url, tmp_path / "a") as engine:
        for number, harm in enumerate([None, *HARMS[kind]]):
            if harm is not None:
                getattr(server, harm)()
            prompt = tokens(100 + number, 100)
            assert ask(engine, prompt).token_ids == plain(prompt, 4)
            assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
        wait_until(lambda: degraded(engine) is None)
        ask(engine, PROMPT)
        share(engine)
        assert len(server.names()) >= (12 if kind == "redis" else 1), "what it had lost was stored again"


def test_a_server_that_is_not_there_from_the_start(model, plain, tmp_path):
    with RedisServer(tmp_path) as server:
        server.kill()
        with replica(model, server.url) as engine:
            assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
            wait_until(lambda: "refused" in str(degraded(engine)))
            server.start()
            wait_until(lambda: degraded(engine) is None)
            ask(engine, PROMPT)
            share(engine)
            assert len(server.names()) == 12


# -- conversations whose KV is in the shared tier alone ----------------------------------------------------------------
def talking(remote: str | None, **options) -> Engine:
    """With the built-in model, and no disk."""
    return Engine(cache_tiers=CacheTiers("16MiB", "16MiB", remote=remote), device="cpu", load="always", **options)


def test_who_types_has_the_history_read_ahead(redis):
    with talking(redis.url) as engine:
        chat = engine.chat("typing", system="You are a patient guide to old cities. " * 4)
        chat.send("Tell me of Lisbon.", greedy(12))
        evict_memory(engine)
        assert engine.stats()["remote"]["reads"] == 0
        engine.loop.call(engine.connector.parts.store.remote.contents.lose, chat.window.chain)  # so it has to ask
        engine.prefetch("typing")
        num_read = len(chat.window.chain)
        wait_until(lambda: engine.stats()["remote"]["reads"] == num_read >= 3, "all is read ahead")
        engine.check_integrity()
        assert chat.send("And of Porto.", greedy(12)).usage.cached_tokens >= 16 * num_read
        assert engine.stats()["remote"]["reads"] == num_read, "it was there already"


def test_a_truncation_of_what_only_the_shared_tier_has_computes_what_it_keeps(redis):
    """Splices are made of what CPU or disk have; the turns that follow are hit in the shared tier again."""
    said = [f"Tell me more of day {day} of the journey, of the ships and of the sea." for day in range(12)]

    def talk(remote: str | None, reuse: str) -> tuple[list[str], int]:
        with talking(remote, max_model_len=256) as engine:
            chat, texts, num_hit = engine.chat("long", system="Be kind.", truncation_reuse=reuse), [], 0
            for text in said:
                output = chat.send(text, greedy(12))
                texts.append(output.text)
                num_hit += output.usage.cached_tokens_details.remote
                if remote is not None:
                    evict_memory(engine)
            engine.check_integrity()
            return texts, num_hit

    computed, shared = talk(None, "exact"), talk(redis.url, "reencode")
    assert shared[0] == computed[0]
    assert shared[1] > 0


def test_a_session_deleted_while_it_is_away_is_said_to_be_pending_and_goes_when_it_is_back(tmp_path):
    with RedisServer(tmp_path) as redis, talking(redis.url) as engine:
        engine.chat("secret", system="Never tell. " * 20).send("My name is Ada.", greedy(12))
        evict_memory(engine)
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


def test_of_two_redis_one_is_killed_and_what_it_had_is_computed(model, plain, redis, tmp_path, monkeypatch):
    """A server's port decides which blocks it has: of 56, each has one, but for one run in 2**55."""
    wait_for_answers(monkeypatch)
    prompts = [tokens(seed, 121) for seed in range(8)]
    with RedisServer(tmp_path) as other:
        with replica(model, f"{redis.url},{other.url}") as first, replica(model, f"{other.url},{redis.url}") as second:
            for prompt in prompts:
                ask(first, prompt[:120])
            share(first)
            assert redis.names() and other.names()
            assert [hit(ask(second, prompt)) for prompt in prompts] == [112] * 8
        other.kill()
        with replica(model, f"{redis.url},{other.url}") as third:
            outputs = [ask(third, prompt, 8) for prompt in prompts]
            assert [output.token_ids for output in outputs] == [plain(prompt, 8) for prompt in prompts]
            assert sum(map(hit, outputs)) < 8 * 112
            assert degraded(third).startswith("1 of 2: ")
