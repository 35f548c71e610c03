"""Tests of kvstore.remote.object_blocks, in a directory and on an S3 server."""

import time
from dataclasses import replace

import msgspec
import pytest

from kvstore.blocks.records import ReadResult
from kvstore.remote.names import BlockNames, FleetSecret
from kvstore.remote.object_address import parse_object_url
from kvstore.remote.shared import Put
from tests.kvstore.remote.chains import FINGERPRINT, NAMES, SECRET, SIZE, Made, are_right, make_chain
from tests.support.buckets import AzureServer, Directory, S3Server

pytest.importorskip("obstore")
from kvstore.remote.object_blocks import Deadlines, ObjectBlocks

TTL_S = 1000.0
GROUP = 64  # blocks of SIZE


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "objects")


class Server:
    """One that knows nothing of what others have stored. later_s: its clock is so far ahead."""

    def __init__(
        self,
        bucket: Directory | S3Server | AzureServer,
        size: int = SIZE,
        names: BlockNames = NAMES,
        later_s: float = 0.0,
    ) -> None:
        address = parse_object_url(bucket.url)
        clock, patient = lambda: time.time() + later_s, Deadlines(120.0, 120.0)
        self.shared = ObjectBlocks(address, names, TTL_S, 16, size, clock, patient)
        self.session = self.shared.session()
        self.size = size

    def put(self, made: Made, first: int = 0, end: int | None = None) -> list[str | None]:
        return [one.error for one in self.session.put(made.chain, made.puts(first, end, self.size))]

    def count(self, made: Made) -> int:
        """How many blocks are there, from the first one on."""
        there = self.session.ask(made.chain)
        assert there == sorted(there, reverse=True)
        return sum(there)

    def read(self, made: Made, first: int = 0, end: int | None = None) -> list[ReadResult]:
        reads = made.reads(first, end, self.size)
        results = self.session.read(reads)
        assert are_right([read for read, result in zip(reads, results, strict=True) if result is ReadResult.OK])
        return results

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


def test_blocks_come_back_bit_by_bit_in_groups(bucket):
    made = make_chain(200)
    with Server(bucket) as first, Server(bucket) as second:
        assert first.count(made) == 0
        assert first.put(made) == [None] * 200
        assert set(first.read(made)) == {ReadResult.OK}
        assert set(second.read(made)) == {ReadResult.MISSING}, "it has not asked for this chain"
        assert second.count(made) == 200
        assert set(second.read(made)) == {ReadResult.OK}
        value_bytes = first.shared.value_bytes
    sizes = sorted(len(bucket.get(name)) for name in bucket.names())
    assert sizes == [8 * value_bytes, *[GROUP * value_bytes] * 3]
    assert 0.5e6 < GROUP * value_bytes < 8e6


@pytest.mark.parametrize("size, num_groups", [(300, 5), (1 << 20, 75), (9 << 20, 3)])
def test_groups_have_some_megabytes(directory, size, num_groups):
    made = make_chain(3 if size > 1 << 22 else 300)
    with Server(directory, size) as first, Server(directory, size) as second:
        first.put(made)
        assert second.count(made) == len(made.records)
        assert set(second.read(made, 0, 10)) == {ReadResult.OK}
    assert len(directory.names()) == num_groups


def test_what_was_stored_turn_by_turn_is_found_by_its_chain_alone(bucket):
    ends = [5, 6, 12, 63, 64, 65, 70, 130, 191]
    for first, end in zip([0, *ends], ends, strict=False):
        with Server(bucket) as server:
            results = server.session.put(make_chain(end).chain, make_chain(end).puts())
            assert [one.num_bytes > 0 for one in results].count(True) == end - first, "the rest was there"
            assert not any(one.error for one in results)
    with Server(bucket) as other:
        for length in (200, 191, 100, 64, 12, 5):
            made = make_chain(length)
            expected = max(end for end in (*ends, 128) if end <= length)
            assert other.count(made) == expected
            assert set(other.read(made, 0, expected)) == {ReadResult.OK}


def test_a_long_chain_is_asked_for_as_far_as_it_is_there(directory):
    made = make_chain(40 * GROUP)
    with Server(directory, 64) as first, Server(directory, 64) as second:
        first.session.put(made.chain, made.puts(0, 30 * GROUP + 7, size=64))
        assert second.count(made) == 30 * GROUP + 7
        directory.delete(NAMES.of(made.chain.ids[20 * GROUP - 1]))
        assert second.count(made) == 19 * GROUP
        assert second.read(made, 20 * GROUP - 1, 20 * GROUP + 1) == [ReadResult.MISSING, ReadResult.OK]


def test_conversations_share_groups_as_far_as_they_are_one(bucket):
    """A prompt of 70 blocks, on which two conversations go on in different ways."""
    prompt = make_chain(70)

    def branch(seed: int) -> Made:
        own = make_chain(30, seed, root=prompt.chain.ids[-1])
        ids = (*prompt.chain.ids, *own.chain.ids)
        return Made(type(own.chain)(prompt.chain.root, ids), (*prompt.records, *own.records))

    one, two = branch(5), branch(6)
    with Server(bucket) as first, Server(bucket) as second:
        first.put(prompt)
        first.put(one)
        assert second.count(two) == 70
        second.put(two)
        first.session.delete(one.chain.ids[70:])
        assert (second.count(one), second.count(two)) == (70, 100)
        assert set(second.read(two)) == {ReadResult.OK}


def test_a_group_ends_where_another_conversation_may_go_on(bucket):
    """A system prompt of 70 blocks, and a turn of 5; the conversation that follows them has both in one prompt."""
    made, ends = make_chain(100), (0, 70, 75)
    chain = replace(made.chain, ends=ends)
    with Server(bucket) as first, Server(bucket) as second:
        first.session.put(chain, made.puts())
        for shared in (64, 70, 75, 100):
            assert second.count(make_chain(shared)) == shared
        assert second.count(make_chain(80)) == 75
        assert set(second.read(made, 0, 75)) == {ReadResult.OK}
    assert len(bucket.names()) == 4, "and nowhere else, but after 64"


def test_what_is_gone_when_it_is_fetched_is_not_reported_as_stored(bucket):
    made = make_chain(9)
    puts = made.puts()
    puts[4] = Put(4, made.records[4], lambda: None)
    with Server(bucket) as server, Server(bucket) as other:
        errors = {one.block_id: one.error for one in server.session.put(made.chain, puts)}
        assert [errors[one] for one in made.chain.ids] == [None] * 4 + ["gone before it was stored"] + [None] * 4
        assert other.session.ask(made.chain) == [False] * 5 + [True] * 4
        assert server.put(made) == [None] * 9
        assert other.count(made) == 9


def test_deleted_blocks_are_gone_also_for_a_server_that_knows_nothing_but_their_ids(bucket):
    with Server(bucket) as first, Server(bucket) as second:
        for end in (5, 80, 90):
            first.put(make_chain(end))
        made, other = make_chain(90), make_chain(20, seed=9)
        first.put(other)
        second.session.delete(made.chain.ids)
        second.session.delete([])
        assert first.count(made) == second.count(made) == 0
        assert set(first.read(made)) == {ReadResult.MISSING}
        assert second.count(other) == 20
        first.session.delete(other.chain.ids[7:8])
        assert first.count(other) == 0, "a group goes as a whole"
    assert bucket.names() == []


def test_a_flipped_bit_anywhere_is_damage_and_the_group_goes(bucket):
    made = make_chain(3)
    name = NAMES.of(made.chain.ids[-1])
    with Server(bucket) as server:
        size = server.shared.value_bytes
        for at in (0, 5, 40, 150, 212, 5000, SIZE):
            assert server.put(made) == [None] * 3
            value = bytearray(bucket.get(name))
            value[size + at] ^= 4
            bucket.set(name, bytes(value))
            assert server.read(made) == [ReadResult.OK, ReadResult.CORRUPT, ReadResult.OK], at
            assert bucket.names() == []


@pytest.mark.parametrize("keep", [0, 1, 6000, -1, -SIZE])
def test_a_group_that_was_cut_off_is_damage_and_stored_anew(bucket, keep):
    made = make_chain(3)
    name = NAMES.of(made.chain.ids[-1])
    with Server(bucket) as server, Server(bucket) as other:
        server.put(made)
        bucket.set(name, bucket.get(name)[:keep])
        assert other.count(made) == 0
        num_whole = 2 if keep < 0 else 0
        assert server.read(made) == [ReadResult.OK] * num_whole + [ReadResult.CORRUPT] * (3 - num_whole)
        assert server.put(made) == [None] * 3
        assert other.count(made) == 3
        assert set(other.read(made)) == {ReadResult.OK}


def test_one_that_was_cut_off_between_two_blocks_heals_too(bucket):
    made = make_chain(3)
    name = NAMES.of(made.chain.ids[-1])
    with Server(bucket) as server, Server(bucket) as other:
        server.put(made)
        bucket.set(name, bucket.get(name)[: server.shared.value_bytes])
        assert other.session.ask(made.chain) == [False, False, True], "its size says so"
        assert other.read(made) == [ReadResult.MISSING, ReadResult.MISSING, ReadResult.MISMATCH]
        assert other.put(made) == [None] * 3
        assert set(other.read(made)) == {ReadResult.OK}


@pytest.mark.parametrize("ends", [(3, 6), (6,)])
def test_a_place_that_is_out_of_date_is_a_miss_and_harms_no_group(bucket, ends):
    """A group was deleted, and stored anew with another beginning."""
    made = make_chain(6)
    with Server(bucket) as first, Server(bucket) as second:
        for begin, end in zip((0, *ends), ends, strict=False):
            first.put(made, begin, end)
        assert second.count(made) == 6
        first.session.delete(made.chain.ids)
        for begin, end in ((0, 6),) if len(ends) > 1 else ((0, 3), (3, 6)):
            first.put(made, begin, end)
        names = bucket.names()
        assert second.read(made, 3) == [ReadResult.MISSING] * 3
        assert bucket.names() == names
        assert set(first.read(made)) == {ReadResult.OK}
        assert second.count(made) == 6
        assert set(second.read(made)) == {ReadResult.OK}


def test_a_group_under_another_ones_name_is_never_served(bucket):
    made, other = make_chain(2), make_chain(2, seed=3)
    with Server(bucket) as server:
        server.put(made)
        server.put(other)
        bucket.set(NAMES.of(made.chain.ids[-1]), bucket.get(NAMES.of(other.chain.ids[-1])))
        assert server.read(made) == [ReadResult.MISMATCH] * 2
        assert server.read(other) == [ReadResult.OK] * 2


def test_another_secret_or_model_finds_nothing(bucket):
    made = make_chain(3)
    with Server(bucket) as server:
        server.put(made)
    for names in (BlockNames(FleetSecret("x" * 32), FINGERPRINT), BlockNames(SECRET, bytes(32))):
        with Server(bucket, names=names) as other:
            assert other.count(made) == 0
    assert not any(one.hex() in name for one in made.chain.ids for name in bucket.names())


def test_no_object_says_whose_it_is(bucket):
    made = make_chain(3)
    labelled = [msgspec.structs.replace(record, tenant="Ann's company", model="m" * 99) for record in made.records]
    puts = [Put(put.index, record, put.fetch) for put, record in zip(made.puts(), labelled, strict=True)]
    with Server(bucket) as server:
        server.session.put(made.chain, puts)
        assert set(server.read(made)) == {ReadResult.OK}
    assert not any(b"Ann" in bucket.get(name) or b"mmm" in bucket.get(name) for name in bucket.names())


def test_what_is_too_old_is_not_there(bucket):
    made = make_chain(70)
    with Server(bucket) as now, Server(bucket, later_s=TTL_S + 60) as later:
        now.put(made)
        assert (now.count(made), later.count(made)) == (70, 0)


def test_a_chain_lives_as_long_as_its_youngest_end(directory):
    made = make_chain(100)
    with Server(directory) as server:
        server.put(made, 0, 70)
        for name in directory.names():
            directory.age(name, 0.9 * TTL_S)
        server.put(made, 70)
        directory.age(NAMES.of(made.chain.ids[-1]), 0.4 * TTL_S)
        first, second = (NAMES.of(made.chain.ids[i]) for i in (63, 69))
        assert all((directory.folder / name).stat().st_mtime > time.time() - 100 for name in (first, second)), "renewed"
        for name in (first, second):
            directory.age(name, 1.3 * TTL_S)
        assert server.count(made) == 100
        directory.age(NAMES.of(made.chain.ids[-1]), 0.7 * TTL_S)
        assert server.count(made) == 0


def test_the_text_of_a_store_is_its_address(directory):
    with Server(directory) as server:
        assert str(server.shared) == directory.url
