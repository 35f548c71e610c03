"""Tests of kvstore.remote.spread, with two Redis, one of which is killed or stopped."""

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.remote.address import RedisAddress
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.remote.spread import SpreadTier
from kvstore.store.stored import Deletions
from kvstore.tiers.port import Asked, ReadDone, WriteDone
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.kvstore.remote.chains import NAMES, are_right, make_chain
from tests.support.redis_server import RedisServer, no_answer_after
from tests.support.waiting import TIMEOUT_S, wait_until

CHAIN = make_chain(100)


class Spread:
    """A tier over these, and what of it has ended."""

    def __init__(self, *servers: RedisServer) -> None:
        blocks = [RedisBlocks(RedisAddress("127.0.0.1", server.port), NAMES, 1000.0) for server in servers]
        self.tier = SpreadTier([TierWorker("remote", one, lambda: None, WorkerLimits(gather_s=0.0)) for one in blocks])

    def wait(self, kind: type, num: int) -> list:
        done: list[object] = []

        def have_come() -> bool:
            done.extend(self.tier.completed())
            return len(done) >= num

        wait_until(have_come)
        assert all(isinstance(one, kind) for one in done)
        return done

    def ask(self) -> list[bool]:
        """Of all answers, each for a part."""
        there = dict.fromkeys(CHAIN.chain.ids, False)
        for asked in self.wait(Asked, self.tier.ask(7, CHAIN.chain)):
            assert (asked.number, asked.chain.root) == (7, CHAIN.chain.root)
            there.update(zip(asked.chain.ids, asked.there or (), strict=asked.there is not None))
        return list(there.values())

    def put(self) -> dict[bytes, bool]:
        """Whether each block was stored."""
        self.tier.submit_writes(CHAIN.jobs(), CHAIN.chain)
        num_parts = len({self.tier.home(one) for one in CHAIN.chain.ids})
        done = self.wait(WriteDone, num_parts)
        assert sorted(job.handle for one in done for job in one.batch.jobs) == list(range(100))
        stored = {one.block_id for part in done for one in part.stored if one.error is None}
        return {block_id: block_id in stored for block_id in CHAIN.chain.ids}

    def read(self) -> dict[bytes, ReadResult]:
        reads = CHAIN.reads()
        for read in reads:
            self.tier.home(read.record.block_id).submit_read(read)
        done = self.wait(ReadDone, len(reads))
        assert are_right([one.job for one in done if one.result is ReadResult.OK])
        return {one.job.record.block_id: one.result for one in done}

    def __enter__(self) -> "Spread":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.tier.close(TIMEOUT_S)


@pytest.fixture
def pair(tmp_path):
    with RedisServer(tmp_path) as one, RedisServer(tmp_path) as other:
        yield one, other


@pytest.mark.parametrize("harm", [RedisServer.kill, RedisServer.pause])
def test_of_two_servers_each_has_a_part_and_misses_it_alone(pair, harm):
    one, other = pair
    ids = CHAIN.chain.ids
    with Spread(one, other) as spread:
        assert spread.put() == dict.fromkeys(ids, True)
        assert spread.ask() == [True] * 100
        assert set(spread.read().values()) == {ReadResult.OK}
        assert len(one.names()) + len(other.names()) == 100
        stays = [NAMES.of(block_id).encode() in set(one.names()) for block_id in ids]
        assert 25 < sum(stays) < 75
        harm(other)
        with no_answer_after(1.0):
            assert spread.ask() == stays
        assert spread.tier.as_dict()["degraded"].startswith("1 of 2: ")
        assert str(other.port) in spread.tier.as_dict()["degraded"]
        assert not spread.tier.is_refusing
        assert [not spread.tier.home(block_id).is_away for block_id in ids] == stays
        assert spread.tier.ask(7, CHAIN.chain) == 1, "nobody waits for the other any more"
        spread.wait(Asked, 1)
        found = spread.read()
        assert [found[block_id] is ReadResult.OK for block_id in ids] == stays
        assert list(spread.put().values()) == stays
        gone = Deletions(spread.tier)
        for block_id in ids:
            gone.add(block_id)
        assert gone.pump() and not gone.pump()
        (done,) = spread.wait(WriteDone, 1)
        gone.ended(done.batch.deletes, done.error)
        assert gone.held() == {block_id for block_id, stay in zip(ids, stays, strict=True) if not stay}
        assert not gone.in_flight() and one.names() == []
        other.resume() if harm is RedisServer.pause else other.start()
        wait_until(lambda: spread.tier.as_dict()["degraded"] is None)
        assert gone.pump()
        spread.wait(WriteDone, 1)
        assert other.names() == []
        assert spread.put() == dict.fromkeys(ids, True)
        assert spread.ask() == [True] * 100


def test_with_one_more_only_its_part_moves(pair, tmp_path):
    with RedisServer(tmp_path) as third, Spread(*pair) as two:
        two.put()
        with Spread(*pair, third) as three:
            there = three.ask()
            assert 40 < sum(there) < 90
            three.put()
            assert len(third.names()) == there.count(False)
