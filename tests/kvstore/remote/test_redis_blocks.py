"""Tests of kvstore.remote.redis_blocks, against a Redis."""

from collections.abc import Iterator

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import BlockNames, FleetSecret
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.remote.shared import PutResult, Session
from tests.kvstore.remote.chains import FINGERPRINT, NAMES, SECRET, SIZE, are_right, make_chain
from tests.support.redis_server import RedisServer, no_answer_after
from tests.support.tcp_proxy import Faults, Proxy

TTL_S = 1000.0


def session_at(port: int, names: BlockNames = NAMES) -> Session:
    return RedisBlocks(RedisAddress("127.0.0.1", port), names, TTL_S).session()


@pytest.fixture
def session(redis) -> Iterator[Session]:
    found = session_at(redis.port)
    yield found
    found.close()


def test_blocks_come_back_bit_by_bit(session):
    made = make_chain(50)
    assert session.ask(made.chain) == [False] * 50
    results = session.put(made.chain, made.puts())
    assert [result.block_id for result in results] == list(made.chain.ids)
    assert all(result.error is None and result.num_bytes > SIZE for result in results)
    assert session.ask(made.chain) == [True] * 50
    reads = made.reads()
    assert set(session.read(reads)) == {ReadResult.OK}
    assert are_right(reads)


def test_large_blocks_in_several_pipelines(session):
    made = make_chain(5)
    session.put(made.chain, made.puts(size=2 << 20))
    reads = made.reads(size=2 << 20)
    assert set(session.read(reads)) == {ReadResult.OK}
    assert are_right(reads)


def test_what_is_there_is_not_sent_again(session):
    made = make_chain(10)
    session.put(made.chain, made.puts(0, 4))
    results = session.put(made.chain, made.puts())
    assert [result.num_bytes > 0 for result in results] == [False] * 4 + [True] * 6
    assert all(result.error is None for result in results)


def test_what_is_gone_when_it_is_fetched_is_not_reported_as_stored(session):
    made = make_chain(3)
    puts = made.puts()
    puts[1] = type(puts[1])(1, puts[1].record, lambda: None)
    errors = {result.block_id: result.error for result in session.put(made.chain, puts)}
    assert [errors[one] for one in made.chain.ids] == [None, "gone before it was stored", None]
    assert session.ask(made.chain) == [True, False, True]


def test_tails_end_before_their_heads_whatever_was_asked_last(redis, session):
    made, other = make_chain(300), make_chain(200)
    assert other.chain.ids == made.chain.ids[:200], "a shorter prompt of the same history"
    session.put(made.chain, made.puts(size=64))

    def lifetimes() -> list[int]:
        return [redis.ask("PEXPIRETIME", NAMES.of(one)) for one in made.chain.ids]

    for chain in (made.chain, other.chain, made.chain):
        session.ask(chain)
        assert lifetimes() == sorted(lifetimes(), reverse=True)
    left_ms = redis.ask("PTTL", NAMES.of(made.chain.ids[-1]))
    assert 1000 * TTL_S - 60_000 < left_ms < 1100 * TTL_S


def test_deleted_blocks_are_gone(session):
    made = make_chain(20)
    session.put(made.chain, made.puts())
    session.delete(made.chain.ids[5:])
    session.delete([])
    assert session.ask(made.chain) == [True] * 5 + [False] * 15
    assert session.read(made.reads(4, 6)) == [ReadResult.OK, ReadResult.MISSING]


def test_a_flipped_bit_anywhere_is_damage_and_the_block_goes(redis, session):
    made = make_chain(1)
    name = NAMES.of(made.chain.ids[0])
    for at in (0, 5, 40, 150, 250, 5000, SIZE):
        session.put(made.chain, made.puts())
        value = bytearray(redis.ask("GET", name))
        value[at] ^= 4
        redis.ask("SET", name, bytes(value))
        assert session.read(made.reads()) == [ReadResult.CORRUPT], at
        assert redis.ask("EXISTS", name) == 0


@pytest.mark.parametrize("keep", [0, 1, 100, SIZE - 1, SIZE, SIZE + 5])
def test_a_truncated_value_is_damage(redis, session, keep):
    made = make_chain(1)
    session.put(made.chain, made.puts())
    name = NAMES.of(made.chain.ids[0])
    redis.ask("SET", name, redis.ask("GET", name)[:keep])
    assert session.read(made.reads()) == [ReadResult.CORRUPT]


def test_a_value_under_another_blocks_name_is_never_served(redis, session):
    made = make_chain(2)
    session.put(made.chain, made.puts())
    first, second = map(NAMES.of, made.chain.ids)
    redis.ask("SET", first, redis.ask("GET", second))
    assert session.read(made.reads()) == [ReadResult.MISMATCH, ReadResult.OK]
    redis.ask("DEL", first)
    redis.ask("LPUSH", first, "a list")
    assert session.read(made.reads()) == [ReadResult.FAILED, ReadResult.OK]


def test_another_secret_or_model_finds_nothing(redis, session):
    made = make_chain(3)
    session.put(made.chain, made.puts())
    others = [BlockNames(FleetSecret("x" * 32), FINGERPRINT), BlockNames(SECRET, bytes(32))]
    for names in others:
        other = session_at(redis.port, names)
        assert other.ask(made.chain) == [False] * 3
        assert set(other.read(made.reads())) == {ReadResult.MISSING}
        other.close()
    shown = repr(redis.ask("KEYS", "*"))
    assert not any(one.hex() in shown for one in made.chain.ids)


def test_a_full_server_refuses_by_key_and_nothing_is_reported_that_is_not_there(tmp_path):
    server = RedisServer(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    try:
        session, made = session_at(server.port), make_chain(400)
        results = session.put(made.chain, made.puts())
        stored = [result.error is None for result in results]
        assert {result.error for result in results} == {None, "OOM"}
        assert session.ask(made.chain) == stored
        assert results[0] == PutResult(made.chain.ids[0], None, results[0].num_bytes)
        session.close()
    finally:
        server.kill()


def test_a_full_server_gives_up_tails_first(tmp_path):
    server = RedisServer(
        tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"
    )
    try:
        session = session_at(server.port)
        for seed in range(6):
            made = make_chain(100, seed)
            session.put(made.chain, made.puts())
        found = [pair for seed in range(6) for pair in enumerate(session.ask(make_chain(100, seed).chain))]
        kept, lost = ([index for index, there in found if there is wanted] for wanted in (True, False))
        assert lost
        assert sum(lost) / len(lost) > sum(kept) / len(kept)
        session.close()
    finally:
        server.kill()


@pytest.mark.parametrize("flipped", [2, 100, 3000, 20_000])
def test_what_a_network_flips_is_not_served(redis, session, flipped):
    made = make_chain(4)
    session.put(made.chain, made.puts())
    with Proxy(redis.port) as proxy:
        proxy.faults = Faults(flipped_at=flipped)
        through, reads = session_at(proxy.port), made.reads()
        try:
            with no_answer_after(4.0):  # a length may be another one
                results = through.read(reads)
        except RemoteError:
            results = []
        whole = [read for read, result in zip(reads, results, strict=False) if result is ReadResult.OK]
        assert len(whole) < 4
        assert are_right(whole)
        through.close()


def test_the_text_of_a_store_is_its_address():
    assert str(RedisBlocks(RedisAddress("h", password="s3cret"), NAMES, 1.0)) == "redis://h:6379/0"
