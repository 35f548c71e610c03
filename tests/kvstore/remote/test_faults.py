"""The worker of a believed tier, with a Redis and an S3 server to which everything happens that does."""

import threading

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.remote.address import RedisAddress
from kvstore.remote.object_address import parse_object_url
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.tiers import worker
from kvstore.tiers.port import Asked, BlockTier, ReadDone, WriteDone
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.kvstore.remote.chains import NAMES, SIZE, are_right, make_chain
from tests.support.buckets import Directory, s3_server
from tests.support.faults import constants
from tests.support.redis_server import RedisServer, no_answer_after
from tests.support.tcp_proxy import Faults, Proxy
from tests.support.waiting import TIMEOUT_S, wait_until

LONG = make_chain(100)


class Store:
    """A tier, and what of it has ended."""

    def __init__(self, at: int | str, ask_s: float = 120.0, **more: object) -> None:
        """at: port of a Redis, or URL of objects. ask_s: deadline of questions about objects."""
        self.woken = threading.Event()
        if isinstance(at, int):
            tier: BlockTier = RedisBlocks(RedisAddress("127.0.0.1", at, **more), NAMES, 1000.0)  # type: ignore[arg-type]
        else:
            from kvstore.remote.object_blocks import ObjectBlocks

            address = parse_object_url(at)
            tier = ObjectBlocks(address, NAMES, 1000.0, 16, SIZE, ask_s=ask_s, transfer_s=120.0)
        self.tier = TierWorker("remote", tier, self.woken.set, WorkerLimits(gather_s=0.0))
        self.done: list[object] = []

    def wait(self, kind: type, num: int = 1) -> list:
        """So many of this kind have ended, and are not looked at again."""

        def have_come() -> bool:
            self.done += self.tier.completed()
            return sum(isinstance(one, kind) for one in self.done) >= num

        wait_until(have_come, f"{num} x {kind.__name__}")
        found = [one for one in self.done if isinstance(one, kind)]
        self.done = [one for one in self.done if not isinstance(one, kind)]
        return found

    def ask(self, made=LONG) -> list[bool] | None:
        if not self.tier.ask(7, made.chain):
            return None
        (asked,) = self.wait(Asked)
        assert (asked.number, asked.chain) == (7, made.chain)
        return asked.there

    def put(self, made=LONG) -> list[str | None]:
        assert not self.tier.is_refusing
        self.tier.submit_writes(made.jobs(), made.chain)
        (done,) = self.wait(WriteDone)
        return [done.error] * len(made.chain.ids) if done.error is not None else [one.error for one in done.stored]

    def delete(self, made=LONG) -> str | None:
        self.tier.submit_deletes(made.chain.ids)
        return self.wait(WriteDone)[0].error

    def read(self, made=LONG) -> set[ReadResult]:
        reads = made.reads()
        for read in reads:
            self.tier.submit_read(read)
        done = self.wait(ReadDone, len(reads))
        assert are_right([one.job for one in done if one.result is ReadResult.OK])
        return {one.result for one in done}

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.tier.close(TIMEOUT_S)


def test_what_was_put_is_asked_for_and_read(redis):
    with Store(redis.port) as store:
        assert store.ask() == [False] * 100
        assert store.put() == [None] * 100
        assert store.ask() == [True] * 100
        assert store.read() == {ReadResult.OK}
        assert store.delete() is None
        assert store.read() == {ReadResult.MISSING}
        assert store.woken.is_set()
        assert store.tier.is_idle
        found = store.tier.as_dict()
        assert (found["stored"], found["reads"], found["deleted"], found["degraded"]) == (100, 100, 100, None)
        assert found["stored_bytes"] > found["read_bytes"] == 100 * 12_288


def test_a_dead_server_ends_everything_at_once_until_it_is_back(own_redis):
    with Store(own_redis.port) as store:
        store.put()
        own_redis.kill()
        assert store.ask() is None
        assert store.read() == {ReadResult.FAILED}
        assert "refused" in store.tier.as_dict()["degraded"] or "closed" in store.tier.as_dict()["degraded"]
        assert not store.tier.ask(1, LONG.chain), "nobody waits for it any more"
        assert "refused" in store.delete() or "closed" in store.delete()
        assert store.tier.is_refusing
        own_redis.start()
        wait_until(lambda: not store.tier.is_away)
        assert store.ask() == [False] * 100, "it was empty"
        assert store.put() == [None] * 100
        assert store.read() == {ReadResult.OK}


def test_a_stopped_server_costs_a_deadline_once(own_redis):
    with Store(own_redis.port) as store:
        store.put()
        own_redis.pause()
        with no_answer_after(1.0):
            assert store.ask() is None
            assert store.read() == {ReadResult.FAILED}
            assert store.tier.health.num_failures == 1
            assert store.tier.health.error.endswith("no answer in time")
        own_redis.resume()
        wait_until(lambda: not store.tier.is_away)
        assert store.read() == {ReadResult.OK}


def test_a_put_into_a_dying_server_is_not_reported_as_stored(own_redis):
    with Store(own_redis.port) as store:
        own_redis.pause()
        store.tier.submit_writes(LONG.jobs(), LONG.chain)
        own_redis.kill()
        (done,) = store.wait(WriteDone)
        assert done.error is not None and not done.stored
        assert store.tier.as_dict()["failures"]["put"] == 1


def test_a_full_server_is_left_alone_for_a_while(tmp_path):
    server = RedisServer(tmp_path, "--maxmemory", "1500kb")
    with server, constants(worker, FULL_S=3600.0), Store(server.port) as store:
        errors = store.put()
        assert errors[-1] == "OOM"
        assert store.tier.as_dict()["full"]
        assert store.tier.is_refusing
        assert store.ask() == [error is None for error in errors]
        assert not store.tier.is_away, "it is still read from"
        store.tier.submit_writes(LONG.jobs(), LONG.chain)
        assert store.wait(WriteDone)[0].error == "OOM", "as a whole: it is sent nothing"


def test_a_wrong_password_is_said_and_never_shown(tmp_path):
    with RedisServer(tmp_path, "--requirepass", "right") as server:
        with Store(server.port, password="wr0ng") as store:
            assert store.ask() is None
            found = str(store.tier.as_dict())
            assert "WRONGPASS" in found
            assert "wr0ng" not in found
        with Store(server.port) as store:
            assert store.ask() is None
            assert "NOAUTH" in store.tier.as_dict()["degraded"]
        with Store(server.port, password="right") as store:
            assert store.ask() == [False] * 100


@pytest.mark.parametrize("faults", [Faults(cut_after=200_000), Faults(lost_at=150_000), Faults(flipped_at=100_000)])
def test_a_bad_network_serves_no_wrong_block(redis, faults):
    with Proxy(redis.port) as proxy, Store(redis.port) as direct, Store(proxy.port) as store:
        direct.put()
        proxy.faults = faults
        with no_answer_after(4.0):  # where a byte is lost, one more is waited for
            assert store.read() != {ReadResult.OK}
        proxy.faults = Faults()
        proxy.cut()
        wait_until(lambda: not store.tier.is_away)
        assert direct.put() == [None] * 100  # what was taken for damaged is gone
        wait_until(lambda: store.read() == {ReadResult.OK})


def test_batches_become_small_on_a_slow_network(redis):
    with Proxy(redis.port) as proxy, Store(redis.port) as direct, Store(proxy.port) as store:
        direct.put()
        proxy.faults = Faults(bytes_per_s=5e6)
        assert store.read() == {ReadResult.OK}
        assert 0 < store.tier.as_dict()["read_bytes_per_s"] < 6e6
        assert store.tier.as_dict()["read_seconds"]["sum"] > 0


def test_closing_does_not_wait_for_a_stopped_server_for_ever(own_redis):
    store = Store(own_redis.port)
    own_redis.pause()
    with no_answer_after(2.0):
        assert store.tier.ask(1, LONG.chain)
        for read in LONG.reads():
            store.tier.submit_read(read)
        assert store.tier.close(TIMEOUT_S)


# -- objects ---------------------------------------------------------------------------------------------------------
def test_an_object_store_that_dies_and_comes_back_without_its_bucket(monkeypatch):
    with s3_server(monkeypatch) as server, Store(server.url) as store:
        assert store.put() == [None] * 100
        assert store.ask() == [True] * 100
        assert store.read() == {ReadResult.OK}
        server.kill()
        assert store.ask() is None
        assert store.read() == {ReadResult.FAILED}
        assert store.tier.as_dict()["degraded"].startswith(server.url)
        server.start()
        wait_until(lambda: not store.tier.is_away)
        assert store.ask() == [False] * 100, "it was empty"
        assert store.put() == [None] * 100
        server.delete_bucket()
        assert set(store.put()) != {None}
        assert "404" in store.tier.as_dict()["degraded"], "that nothing is there would be no error"
        server.make_bucket()
        wait_until(lambda: not store.tier.is_away)
        assert store.put() == [None] * 100
        assert store.delete() is None
        assert server.names() == []


def test_a_directory_that_goes_and_comes_back(tmp_path):
    bucket = Directory(tmp_path / "objects")
    with Store(bucket.url) as store:
        store.put()
        bucket.folder.rename(tmp_path / "away")
        assert store.ask() is None
        assert store.tier.as_dict()["degraded"] == f"{bucket.url}: its directory is gone"
        (tmp_path / "away").rename(bucket.folder)
        wait_until(lambda: not store.tier.is_away)
        assert store.ask() == [True] * 100
        assert store.read() == {ReadResult.OK}
