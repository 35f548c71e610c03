"""Tests of kvstore.owned_disk and its two ends: engines' sessions over the real socket, on a real disk."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvstore.blocks.records import Evict, ReadResult
from kvstore.config import CacheTiers
from kvstore.disk.codec import encode_head
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.disk.tier import DiskTier
from kvstore.errors import RemoteError
from kvstore.owned_disk import OwnedDisk, owner_folder
from kvstore.remote.address import RedisAddress
from kvstore.remote.owned_blocks import OwnedBlocks
from kvstore.remote.resp import RespClient, encode
from kvstore.tiers.port import WriteBatch
from tests.kvstore.remote.chains import SIZE, Made, are_right, make_chain
from tests.support.programs import writer_held_up
from tests.support.waiting import TIMEOUT_S, wait_until

CAPACITY = 32 << 20


@contextmanager
def opened(folder: Path, capacity: int = CAPACITY, **tiers) -> Iterator[OwnedDisk]:
    with StoreDirectory.open(folder) as directory:
        tiers = CacheTiers(disk=capacity, path=folder, **tiers)
        disk = OwnedDisk(OpeningDisk(directory.share(), capacity), owner_folder(), tiers, "lru")
        try:
            yield disk
        finally:
            disk.close()


@pytest.fixture
def disk(tmp_path):
    with opened(tmp_path / "store") as disk:
        yield disk


@contextmanager
def session_of(disk: OwnedDisk):
    found = OwnedBlocks(disk.path).session()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def session(disk):
    with session_of(disk) as session:
        yield session


def test_blocks_come_back_after_a_restart(tmp_path):
    made, large = make_chain(50), make_chain(6, seed=900)
    with opened(tmp_path / "store") as disk, session_of(disk) as session:
        session.write(made.batch())
        assert all(result.error is None for result in session.write(large.batch(size=1 << 20)).stored)
    with opened(tmp_path / "store") as disk, session_of(disk) as session:
        assert session.ask(made.chain) == [True] * 50
        for reads in (made.reads(), large.reads(size=1 << 20)):
            assert set(session.read(reads)) == {ReadResult.OK} and are_right(reads)
        assert disk.upkeep.stats()["store"]["read"] == 56
    with StoreDirectory.open(tmp_path / "store") as directory:
        tier = DiskTier(directory, CAPACITY)  # as an engine with a disk of its own sees it
        into = memoryview(bytearray(SIZE))
        assert tier.read(made.records[7], into) is ReadResult.OK and are_right([replace(made.reads()[7], view=into)])
        tier.close()


def test_several_engines_at_once(disk):
    chains = [make_chain(30, seed=1000 * number) for number in range(6)]

    def one(made: Made) -> bool:
        with session_of(disk) as session:
            for end in (10, 20, 30):
                assert all(result.error is None for result in session.write(made.batch(end - 10, end)).stored)
            reads = made.reads()
            return set(session.read(reads)) == {ReadResult.OK} and are_right(reads)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(one, chains))
    assert disk.upkeep.stats()["disk"]["blocks"] == 180


def test_a_block_without_the_one_before_it_is_refused(session):
    made = make_chain(6)
    assert [result.error for result in session.write(made.batch(2)).stored] == ["refused"] * 4
    assert session.ask(made.chain) == [False] * 6
    assert [result.error for result in session.write(made.batch()).stored] == [None] * 6


@pytest.mark.parametrize("restarted", [False, True])
def test_a_splice_begins_where_another_parent_is_named(tmp_path, restarted):
    """Its first block names no block of the chain as its parent; it goes with the block before it all the same."""
    head, tail = make_chain(4), make_chain(3, seed=70)
    chain = replace(head.chain, ids=(*head.chain.ids, *tail.chain.ids))
    jobs = (*head.jobs(), *[replace(job, index=4 + job.index) for job in tail.jobs()])
    with ExitStack() as ends:
        for _ in range(1 + restarted):
            ends.close()
            disk = ends.enter_context(opened(tmp_path / "store"))
            session = ends.enter_context(session_of(disk))
            assert all(result.error is None for result in session.write(WriteBatch(jobs, chain=chain)).stored)
        assert session.ask(chain) == [True] * 7
        assert disk.forget(head.chain.ids[3:], TIMEOUT_S)
        assert session.ask(chain) == [True] * 3 + [False] * 4


def test_what_a_killed_engine_has_sent_does_not_outlive_a_deletion(disk):
    """The owner may get to it only after the deletion."""
    for number in range(8):
        made = make_chain(64, seed=1000 * number)
        command: list[str | bytes] = ["PUT"]
        for put in made.jobs(size=60_000):
            before = made.chain.ids[put.index - 1] if put.index else b""
            value = put.fetch()
            command += (before, encode_head(put.record, value) + bytes(value))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as engine:
            engine.connect(disk.path)
            engine.sendall(b"".join(encode([command])))
        assert disk.forget(made.chain.ids, TIMEOUT_S)
        serving = "kvstore-owner-serve"
        wait_until(lambda: all(one.name != serving for one in threading.enumerate()), "the end of its connection")  # noqa: B023
        assert not any(disk.has(made.chain.ids, is_use=False))


def test_deleted_blocks_are_gone_with_all_that_builds_on_them(disk, session):
    made = make_chain(20)
    session.write(made.batch())
    session.write(WriteBatch(deletes=tuple(made.chain.ids[5:6])))
    assert session.ask(made.chain) == [True] * 5 + [False] * 15
    assert session.read(made.reads(4, 6)) == [ReadResult.OK, ReadResult.MISSING]
    assert disk.upkeep.evict(Evict(everything=True))[0]["disk"].num_blocks == 5
    assert session.ask(made.chain) == [False] * 20


def flip(folder: Path, block_id: bytes) -> None:
    """One bit of a stored block is another one."""
    with StoreDirectory.open(folder) as directory:
        tier = DiskTier(directory, CAPACITY)
        with tier.file as tables, tables.env.begin(write=True) as txn:
            value = bytearray(txn.get(block_id, db=tables.values))
            value[-100] ^= 4
            txn.put(block_id, bytes(value), db=tables.values)
        tier.close()


def test_a_damaged_block_is_never_served_and_is_stored_again(tmp_path):
    made = make_chain(8)
    with opened(tmp_path / "store") as disk, session_of(disk) as session:
        session.write(made.batch())
    flip(tmp_path / "store", made.chain.ids[3])
    with opened(tmp_path / "store") as disk, session_of(disk) as session:
        assert session.read(made.reads(2, 5)) == [ReadResult.OK, ReadResult.MISSING, ReadResult.MISSING]
        assert session.ask(made.chain) == [True] * 3 + [False] * 5, "what builds on it went, too"
        assert disk.upkeep.stats()["store"]["read_failures"] == {"corrupt": 1}
        assert all(result.error is None for result in session.write(made.batch()).stored)
        assert set(session.read(made.reads())) == {ReadResult.OK}


def test_a_value_that_was_damaged_on_its_way_is_refused(disk, session):
    made = make_chain(1)
    value = bytearray(SIZE + 400)
    assert disk.put([(b"", bytes(value))], lambda: True) == [False]
    assert session.ask(made.chain) == [False]


def test_tails_go_first_and_pinned_chains_last(tmp_path):
    made = [make_chain(20, seed=100 * number) for number in range(60)]
    with opened(tmp_path / "store", capacity=8 << 20) as disk, session_of(disk) as session:
        for number, one in enumerate(made):
            assert all(result.error is None for result in session.write(one.batch()).stored)
            if number == 3:
                disk.pin(one.chain.ids, 3600.0)
        assert session.ask(made[3].chain) == [True] * 20
        there = [session.ask(one.chain) for one in made]
        assert there[0] == [False] * 20 and there[-1] == [True] * 20
        assert all(flags == sorted(flags, reverse=True) for flags in there)


def test_a_tenant_has_no_more_than_its_part(tmp_path):
    with opened(tmp_path / "store", disk_per_tenant=10 * 16384) as disk, session_of(disk) as session:
        made = make_chain(40)
        owned = [msgspec.structs.replace(record, tenant="anna") for record in made.records]
        jobs = tuple(replace(job, record=record) for job, record in zip(made.jobs(), owned, strict=True))
        stored = sum(result.error is None for result in session.write(WriteBatch(jobs, chain=made.chain)).stored)
        assert 0 < stored <= 10 and disk.upkeep.stats()["store"]["refused_writes"] > 0
        other = make_chain(8, seed=500)  # of another tenant
        assert [result.error for result in session.write(other.batch()).stored] == [None] * 8


def test_nothing_is_stored_behind_a_block_that_has_no_place(tmp_path):
    with opened(tmp_path / "store", disk_per_tenant=10 * 16384) as disk, session_of(disk) as session:
        made = make_chain(12)
        jobs = [*made.jobs(end=6), *made.jobs(6, 7, size=100_000), *made.jobs(7)]
        jobs = [replace(job, record=msgspec.structs.replace(job.record, tenant="anna")) for job in jobs]
        session.write(WriteBatch(tuple(jobs), chain=made.chain))
        assert session.ask(made.chain) == [True] * 6 + [False] * 6


def test_whoever_speaks_something_else_is_left_and_others_go_on(disk, session):
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"*1\r\n:5\r\n", b"*2\r\n$3\r\nGET\r\n$-1\r\n", b"\0" * 5000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(disk.path)
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    with RespClient(RedisAddress(disk.path), TIMEOUT_S) as client, pytest.raises(RemoteError, match="unknown command"):
        client.call("FLUSHALL")
    session.ping()


def test_ids_of_another_length_are_refused_and_harm_nobody(disk, session):
    made = make_chain(4)
    for length in (0, 5, 600):
        for command in ("GET", "HAS", "ASK", "DEL"):
            with RespClient(RedisAddress(disk.path), TIMEOUT_S) as client, pytest.raises(RemoteError, match="32 bytes"):
                client.call(command, b"x" * length)
    assert all(result.error is None for result in session.write(made.batch()).stored)
    assert disk.upkeep.stats()["disk"]["failures"] == {}


def test_a_thread_that_cannot_be_started_costs_one_connection(disk, session):
    session.ping()
    before = threading.stack_size()
    client = RespClient(RedisAddress(disk.path), TIMEOUT_S)
    try:
        threading.stack_size(1 << 46)  # more than can be addressed
        with pytest.raises(RemoteError):
            client.call("PING")
    finally:
        threading.stack_size(before)
    assert client.call("PING") == b"PONG"
    client.close()
    session.ping()


def test_a_flush_waits_for_what_was_taken(disk, tmp_path):
    (blocks,) = (tmp_path / "store").glob("**/blocks")
    made = make_chain(2)

    def store() -> bool:
        with session_of(disk) as session:
            return all(one.error is None for one in session.write(made.batch()).stored)

    with ThreadPoolExecutor(2) as threads, writer_held_up(blocks) as let_go:
        stored = threads.submit(store)
        wait_until(lambda: disk.upkeep.stats()["disk"]["queued_write_bytes"] > 0, "the write")
        flushed = threads.submit(disk.upkeep.flush)
        assert not wait([flushed], 0.2).done, "it cannot be durable yet"
        let_go()
        flushed.result(TIMEOUT_S)
        assert stored.result(TIMEOUT_S)


OPEN = """
import sys
from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.opening import OpeningDisk
from kvstore.owned_disk import OwnedDisk, owner_folder
disk = OpeningDisk(StoreDirectory.open(sys.argv[1]), 32 << 20)
OwnedDisk(disk, owner_folder(), CacheTiers(disk="32MiB", path=sys.argv[1]), "lru")
"""


def test_a_place_for_sockets_that_is_too_deep_is_a_store_error(tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    settings = {**os.environ, "TMPDIR": str(deep)}
    found = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "store"], env=settings, capture_output=True, text=True
    )
    assert found.returncode == 1 and "StoreError: the engines' socket cannot be made" in found.stderr, found
    assert not list(deep.iterdir())


def test_an_owner_that_has_gone_is_an_error_and_comes_back(tmp_path):
    made = make_chain(3)
    with opened(tmp_path / "store") as disk:
        session = OwnedBlocks(disk.path).session()
        session.write(made.batch())
    with pytest.raises(RemoteError):
        session.ask(made.chain)
    session.close()
    assert not Path(disk.path).exists()
