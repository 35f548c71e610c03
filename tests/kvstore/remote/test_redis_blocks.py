"""Tests of kvstore.remote.redis_blocks, against a Redis."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.errors import RemoteError
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import BlockNames
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.tiers.port import Stored, TierSession
from tests.kvstore.remote.chains import NAMES, are_right, make_chain
from tests.support.redis_server import RedisServer, no_answer_after
from tests.support.tcp_proxy import Faults, Proxy

TTL_S = 1000.0


def session_at(port: int, names: BlockNames = NAMES) -> TierSession:
    return RedisBlocks(RedisAddress("127.0.0.1", port), names, TTL_S).session()


@pytest.fixture
def session(redis) -> Iterator[TierSession]:
    found = session_at(redis.port)
    yield found
    found.close()


def test_large_blocks_in_several_pipelines(session):
    made = make_chain(5)
    session.write(made.batch(size=2 << 20))
    reads = made.reads(size=2 << 20)
    assert set(session.read(reads)) == {ReadResult.OK}
    assert are_right(reads)


def test_tails_end_before_their_heads_whatever_was_asked_last(redis, session):
    made, other = make_chain(300), make_chain(200)
    assert other.chain.ids == made.chain.ids[:200], "a shorter prompt of the same history"
    session.write(made.batch(size=64))

    def lifetimes() -> list[int]:
        return [redis.ask("PEXPIRETIME", NAMES.of(one)) for one in made.chain.ids]

    for chain in (made.chain, other.chain, made.chain):
        session.ask(chain)
        assert lifetimes() == sorted(lifetimes(), reverse=True)
    left_ms = redis.ask("PTTL", NAMES.of(made.chain.ids[-1]))
    assert 1000 * TTL_S - 60_000 < left_ms < 1100 * TTL_S


def test_a_chain_that_is_stored_in_many_batches_is_asked_for_once(redis, session):
    def asked() -> int:
        return int(redis.ask("INFO", "commandstats").decode().partition("cmdstat_pexpire:calls=")[2].partition(",")[0])

    made = make_chain(60)
    session.ask(made.chain)
    before = asked()
    for first in range(0, 60, 2):
        session.write(made.batch(first, first + 2, size=64))
    assert asked() - before <= 2 * 60
    left_ms = [redis.ask("PTTL", NAMES.of(one)) for one in made.chain.ids]
    assert left_ms == sorted(left_ms, reverse=True)


def test_what_is_no_value_costs_no_other_block(redis, session):
    made = make_chain(2)
    session.write(made.batch())
    redis.ask("DEL", NAMES.of(made.chain.ids[0]))
    redis.ask("LPUSH", NAMES.of(made.chain.ids[0]), "a list")
    assert session.read(made.reads()) == [ReadResult.FAILED, ReadResult.OK]


def test_a_full_server_refuses_by_key_and_nothing_is_reported_that_is_not_there(tmp_path):
    with RedisServer(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server:
        session, made = session_at(server.port), make_chain(400)
        results = session.write(made.batch()).stored
        stored = [result.error is None for result in results]
        assert {result.error for result in results} == {None, "OOM"}
        assert session.ask(made.chain) == stored
        assert results[0] == Stored(made.chain.ids[0], None, results[0].num_bytes)
        session.close()


def test_a_state_expires_before_the_block_that_it_stands_behind(redis, session):
    made = make_chain(100)
    session.write(made.batch())
    state = make_chain(1, 1)
    session.write(replace(state.batch(), chain=replace(state.chain, behind=100)))
    left_ms = [redis.ask("PTTL", NAMES.of(chain.ids[-1])) for chain in (state.chain, made.chain)]
    assert left_ms[0] < 1.001 * left_ms[1]
    assert session.ask(replace(state.chain, behind=100)) == [True]


def test_a_full_server_gives_up_tails_first(tmp_path):
    options = (tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    with RedisServer(*options) as server:
        session = session_at(server.port)
        for seed in range(6):
            made = make_chain(100, seed)
            session.write(made.batch())
        found = [pair for seed in range(6) for pair in enumerate(session.ask(make_chain(100, seed).chain))]
        kept, lost = ([index for index, there in found if there is wanted] for wanted in (True, False))
        assert lost
        assert sum(lost) / len(lost) > sum(kept) / len(kept)
        session.close()


@pytest.mark.parametrize("flipped", [2, 100, 3000, 20_000])
def test_what_a_network_flips_is_not_served(redis, session, flipped):
    made = make_chain(4)
    session.write(made.batch())
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
