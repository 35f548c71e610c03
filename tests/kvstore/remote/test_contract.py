"""What every tier below the CPU does: a disk, one that another process owns, a Redis, objects in a folder or a server.

An exact tier is written to in transactions, so a batch of it names no chain.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs

from kvstore.blocks.records import ReadResult
from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.tier import DiskTier
from kvstore.owned_disk import OwnedDisk, owner_folder
from kvstore.remote.address import RedisAddress
from kvstore.remote.names import BlockNames, FleetSecret
from kvstore.remote.object_address import parse_object_url
from kvstore.remote.owned_blocks import OwnedBlocks
from kvstore.remote.redis_blocks import RedisBlocks
from kvstore.tiers.port import Keeps, ReadJob, WriteBatch
from tests.kvstore.remote.chains import FINGERPRINT, NAMES, SECRET, SIZE, Server, make_chain
from tests.kvstore.remote.conftest import BUCKETS

TTL_S = 1000.0


class Place:
    """Where servers share blocks; they are closed at the end."""

    def __init__(self, tier) -> None:
        self.tier, self.servers = tier, []

    def server(self, names: BlockNames = NAMES) -> Server:
        self.servers.append(Server(self.tier(names)))
        return self.servers[-1]

    def change(self, change) -> None:
        """What its one value is from now on."""
        (name,) = self.names()
        self.set(name, change(self.get(name)))


def in_redis(redis) -> Place:
    place = Place(lambda names: RedisBlocks(RedisAddress("127.0.0.1", redis.port), names, TTL_S))
    place.names = lambda: [name.decode() for name in redis.ask("KEYS", "*")]
    place.get, place.set = partial(redis.ask, "GET"), partial(redis.ask, "SET")
    return place


def in_objects(bucket) -> Place:
    from kvstore.remote.object_blocks import ObjectBlocks

    address = parse_object_url(bucket.url)
    place = Place(lambda names: ObjectBlocks(address, names, TTL_S, 16, SIZE, ask_s=120.0, transfer_s=120.0))
    place.names, place.get, place.set = bucket.names, bucket.get, bucket.set
    return place


@pytest.fixture
def place_of(request, tmp_path, bucket_named):
    with ExitStack() as ends:

        def make(kind: str) -> Place:
            if kind == "owned":
                directory = ends.enter_context(StoreDirectory.open(tmp_path / "store"))
                tiers = CacheTiers(disk=32 << 20, path=tmp_path / "store")
                disk = OwnedDisk(OpeningDisk(directory.share(), 32 << 20), owner_folder(), tiers, "lru")
                ends.callback(disk.close)
                place = Place(lambda names: OwnedBlocks(disk.path))
            elif kind == "disk":
                directory = ends.enter_context(StoreDirectory.open(tmp_path / "store"))
                tier = DiskTier(directory, 32 << 20)
                ends.callback(tier.close)
                place = Place(lambda names: tier)
            else:
                place = (
                    in_redis(request.getfixturevalue("redis")) if kind == "redis" else in_objects(bucket_named(kind))
                )
            ends.callback(lambda: [server.session.close() for server in place.servers])
            return place

        yield make


@pytest.fixture(params=["disk", "redis", "owned", *BUCKETS])
def place(request, place_of):
    return place_of(request.param)


@pytest.fixture(params=["redis", *BUCKETS])
def open_place(request, place_of):
    """One whose values can be looked into, and harmed."""
    return place_of(request.param)


def test_blocks_come_back_bit_by_bit(place):
    made, first = make_chain(50), place.server()
    assert first.count(made) == 0
    written = first.session.write(made.batch())
    assert written.error is None and {one.block_id for one in written.stored} == set(made.chain.ids)
    assert all(one.error is None and one.num_bytes > SIZE for one in written.stored)
    for server in (first, place.server()):
        server.session.ping()
        assert server.count(made) == 50
        assert server.read(made) == [ReadResult.OK] * 50


def test_what_a_believed_tier_has_is_not_sent_again(place):
    made, server = make_chain(10), place.server()
    server.put(made, 0, 4)
    is_believed = server.tier.keeps is Keeps.BELIEVED
    sizes = {one.block_id: one.num_bytes for one in server.session.write(made.batch()).stored}
    assert [sizes[one] > 0 for one in made.chain.ids] == [not is_believed] * 4 + [True] * 6
    assert server.put(made) == [None] * 10


def test_what_is_gone_when_it_is_fetched_is_not_reported_as_stored(place):
    made, server = make_chain(9), place.server()
    jobs = [replace(job, fetch=lambda: None) if job.index == 4 else job for job in made.jobs()]
    written = server.session.write(WriteBatch(tuple(jobs), chain=made.chain))
    errors = {one.block_id: one.error for one in written.stored}
    refused = "refused" if isinstance(server.tier, OwnedBlocks) else None
    assert [errors[one] for one in made.chain.ids] == [None] * 4 + ["gone before it was stored"] + [refused] * 4
    assert server.put(made) == [None] * 9
    assert server.count(made) == 9 and server.read(made) == [ReadResult.OK] * 9


def test_deleted_blocks_are_gone_for_everybody(place):
    made, other, server, second = make_chain(20), make_chain(20, seed=9), place.server(), place.server()
    server.put(made)
    server.put(other)
    second.delete(made.chain.ids)
    second.delete([])
    for one in (server, second):
        assert (one.count(made), one.count(other)) == (0, 20)
        assert one.read(made) == [ReadResult.MISSING] * 20


def test_another_block_s_content_is_a_mismatch_and_stays(place):
    """The record that a read expects is compared with the stored one, whatever its id says."""
    made, server = make_chain(2), place.server()
    server.put(made)
    (first, second), other = made.reads(), make_chain(2, seed=4)
    forged = ReadJob(0, structs.replace(other.records[0], block_id=made.chain.ids[0]), first.view)
    result, ok = server.session.read([forged, second])
    assert ok is ReadResult.OK
    assert result in (ReadResult.MISMATCH, ReadResult.MISSING), "a group of objects is looked for again under its name"
    assert server.count(made) == 2 and server.read(made) == [ReadResult.OK] * 2


def flipped(at: int, value: bytes) -> bytes:
    return value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]


def test_a_flipped_bit_anywhere_is_damage_and_the_block_goes(open_place):
    made, server = make_chain(1), open_place.server()
    for at in (0, 5, 40, 150, 212, 5000, SIZE):
        assert server.put(made) == [None]
        open_place.change(partial(flipped, at))
        assert server.read(made) == [ReadResult.CORRUPT], at
        assert open_place.names() == []


@pytest.mark.parametrize("keep", [0, 1, 100, SIZE - 1, SIZE])
def test_a_value_that_was_cut_off_is_damage_and_stored_anew(open_place, keep):
    made, server, other = make_chain(1), open_place.server(), open_place.server()
    server.put(made)
    open_place.change(lambda value: value[:keep])
    assert server.read(made) == [ReadResult.CORRUPT]
    assert server.put(made) == [None]
    assert other.count(made) == 1 and other.read(made) == [ReadResult.OK]


def test_a_value_under_another_blocks_name_is_never_served(open_place):
    made, other, server = make_chain(1), make_chain(1, seed=3), open_place.server()
    server.put(made)
    (name,) = open_place.names()
    server.put(other)
    (theirs,) = {*open_place.names()} - {name}
    open_place.set(name, open_place.get(theirs))
    assert server.read(made) == [ReadResult.MISMATCH]
    assert server.read(other) == [ReadResult.OK]


def test_another_secret_or_model_finds_nothing(open_place):
    made = make_chain(3)
    open_place.server().put(made)
    assert not any(one.hex() in name for one in made.chain.ids for name in open_place.names())
    for names in (BlockNames(FleetSecret("x" * 32), FINGERPRINT), BlockNames(SECRET, bytes(32))):
        other = open_place.server(names)
        assert other.count(made) == 0
        assert other.read(made) == [ReadResult.MISSING] * 3
