"""Engines that share a directory or a bucket: hits on another replica, whatever happens to what they share.

Tokens are compared with an engine that has no store.
"""

import pytest

from kvstore import CacheTiers, Engine
from kvstore.blocks.records import Evict
from kvstore.errors import ConfigError
from tests.support.buckets import Directory, s3_server
from tests.support.engines import ask, greedy, tokens
from tests.support.waiting import wait_until

pytest.importorskip("obstore")
MODEL = {"tokenizer": True}
PROMPT = tokens(1, 200)
SYSTEM = "You know all that can be known of the sea, of ships, and of those who live by it. " * 3


@pytest.fixture(autouse=True)
def fleet(monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")


@pytest.fixture
def bucket(tmp_path):
    return Directory(tmp_path / "objects")


def replica(model, url, path=None, cpu="2MiB", **options):
    disk = {"disk": "32MiB", "path": path} if path is not None else {}
    return Engine(model, CacheTiers("2MiB", cpu, remote=url, **disk), device="cpu", load="always", **options)


def share(engine) -> None:
    """All that was finished is in the remote tier."""
    engine.flush()
    engine.check_integrity()


def hit(output) -> int:
    return output.usage.cached_tokens_details.remote


@pytest.mark.parametrize("tiers", ["cpu and disk", "cpu alone", "disk alone"])
def test_another_replica_hits_what_one_has_computed(model, plain, bucket, tmp_path, tiers):
    options = {"cpu": "0" if tiers == "disk alone" else "2MiB"}
    paths = [None, None] if tiers == "cpu alone" else [tmp_path / "a", tmp_path / "b"]
    with replica(model, bucket.url, paths[0], **options) as first:
        answer = ask(first, PROMPT[:120], 20)
        share(first)
        history = [*PROMPT[:120], *answer.token_ids]
        with replica(model, bucket.url, paths[1], **options) as second:
            output = ask(second, history, 8)
            assert output.token_ids == plain(history, 8)
            assert hit(output) == 128
            share(second)
            longer = [*history, *output.token_ids, *tokens(3, 60)]
            ask(second, longer)
            share(second)
        output = ask(first, longer, 8)
        assert output.token_ids == plain(longer, 8)
        assert hit(output) > 40, "what the other one has stored behind it"


def test_another_replica_hits_in_a_bucket_of_a_server(model, plain, monkeypatch):
    with s3_server(monkeypatch) as server:

        def is_stored() -> bool:
            with replica(model, server.url) as first:
                assert ask(first, PROMPT).token_ids == plain(PROMPT, 4)
                share(first)
            return bool(server.names())

        def is_hit() -> bool:
            with replica(model, server.url) as second:
                output = ask(second, PROMPT)
            assert output.token_ids == plain(PROMPT, 4)
            return hit(output) == 192

        wait_until(is_stored)  # a server on a busy machine answers later than a request waits
        wait_until(is_hit)


@pytest.mark.parametrize("process", ["here", "own"])
def test_a_conversation_hits_the_system_prompt_that_another_one_has_stored(model, bucket, process):
    with replica(model, bucket.url, process=process) as first, replica(model, bucket.url) as second:
        chat = first.chat("a", system=SYSTEM)
        for text in ("My dog is called Biscuit.", "What is my dog called?"):
            chat.send(text, greedy(30))
        first.flush()
        head = second.chats.language.chat_template().head_ids([{"role": "system", "content": SYSTEM}])
        assert len(head) >= 48
        assert hit(second.chat("b", system=SYSTEM).send("What is a ship?", greedy(4))) == len(head) // 16 * 16


def test_another_tenant_salt_or_secret_never_hits(model, bucket, monkeypatch):
    with replica(model, bucket.url) as first, replica(model, bucket.url) as second:
        ask(first, PROMPT, tenant="a")
        share(first)
        for options in ({}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "x"}):
            assert hit(ask(second, PROMPT, **options)) == 0
        assert hit(ask(second, PROMPT, tenant="a")) == 192
        share(second)
        assert hit(ask(first, PROMPT, tenant="b")) == 192, "and back"
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", "another secret, of other people, 32 characters")
    with replica(model, bucket.url) as stranger:
        assert hit(ask(stranger, PROMPT, tenant="a")) == 0


def test_deleted_and_evicted_blocks_go_from_there_too(model, bucket, tmp_path):
    with replica(model, bucket.url, tmp_path / "a") as engine:
        ask(engine, PROMPT)
        share(engine)
        assert len(bucket.names()) == 1
        engine.admin.evict(Evict(everything=True))
        share(engine)
        assert bucket.names() == []


def test_a_damaged_group_is_computed_and_stored_anew(model, plain, bucket):
    with replica(model, bucket.url) as first:
        ask(first, PROMPT)
        share(first)
    (name,) = bucket.names()
    value = bytearray(bucket.get(name))
    for at in range(1000, len(value), 5000):
        value[at] ^= 1
    bucket.set(name, bytes(value))
    with replica(model, bucket.url) as second:
        output = ask(second, PROMPT)
        assert output.token_ids == plain(PROMPT, 4)
        assert hit(output) == 0
        assert set(second.stats()["store"]["remote_read_failures"]) <= {"corrupt", "missing"}
        share(second)
        ask(second, PROMPT)
        share(second)
    with replica(model, bucket.url) as third:
        assert hit(ask(third, PROMPT)) == 192


def test_no_request_fails_when_the_server_dies_stops_or_loses_its_bucket(model, plain, monkeypatch, tmp_path):
    with s3_server(monkeypatch) as server, replica(model, server.url, tmp_path / "a") as engine:
        for round_, harm in enumerate(
            (lambda: None, server.pause, server.resume, server.delete_bucket, server.kill, server.start)
        ):
            harm()
            prompt = tokens(100 + round_, 100)
            assert ask(engine, prompt).token_ids == plain(prompt, 4)
            assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
        wait_until(lambda: engine.stats()["remote"]["degraded"] is None)
        ask(engine, PROMPT)
        share(engine)
        assert server.names(), "what it had lost was stored again"


def test_wrong_credentials_are_said_and_cost_no_request(model, plain, monkeypatch):
    with s3_server(monkeypatch, keys=True) as server:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ngwr0ng")
        with replica(model, server.url) as engine:
            assert ask(engine, PROMPT).token_ids == plain(PROMPT, 4)
            wait_until(lambda: engine.stats()["remote"]["degraded"])
            assert "403" in engine.stats()["remote"]["degraded"]
            assert "wr0ng" not in str(engine.stats())


def test_what_cannot_be_opened_is_refused_at_once(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be opened"):
        replica(model, f"file://{tmp_path / 'none'}")
