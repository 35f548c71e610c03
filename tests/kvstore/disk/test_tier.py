"""Tests of kvstore.disk.tier: blocks come back as they were, in the space they may take."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from kvstore.blocks.records import ReadResult
from kvstore.config import CODEC_NAMES
from kvstore.disk import format as disk_format
from kvstore.disk.format import WriteError
from kvstore.disk.index import DiskIndex
from kvstore.disk.tier import VerifyReport
from kvstore.errors import DegradedError, StoreError
from tests.support.faults import copying_that, disk_with
from tests.support.store.disk_store import (
    CAPACITY,
    CHAIN,
    MIB,
    PAYLOAD_BYTES,
    payload,
    present,
    put,
    read,
    record,
    write,
)
from tests.support.waiting import TIMEOUT_S, together


def entries(tier):
    return {entry.block_id: entry for batch in tier.scan() for entry in batch}


# -- blocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_blocks_come_back_also_after_a_restart(store, codec):
    tier = store.open(codec=codec)
    write(tier, range(100))
    assert present(tier, range(110)) == list(range(100))
    assert tier.stats()["blocks"] == 100
    store.close()
    tier = store.open(codec="raw")
    assert present(tier, range(110)) == list(range(100)) and not tier.file.was_reset
    assert tier.verify() == VerifyReport(num_ok=100, num_heads=13)


def test_deletes_replacements_and_times_of_use(store):
    tier = store.open()
    write(tier, range(20))
    write(tier, [3, 30], deletes=[5, 6, 99])
    assert present(tier, range(40)) == [*range(5), *range(7, 20), 30]
    tier.write((), (), {record(7).block_id: 77.5, record(5).block_id: 1.0})
    assert entries(tier)[record(7).block_id].last_access_s == 77.5
    assert entries(tier)[record(8).block_id].last_access_s == 5.0
    assert not tier.contains(record(5).block_id) and record(5).block_id not in entries(tier)
    assert entries(tier)[record(8).block_id].stored_bytes > PAYLOAD_BYTES


def test_a_block_of_another_model_or_history_is_not_served(store):
    tier = store.open()
    write(tier, [1])
    into = memoryview(bytearray(PAYLOAD_BYTES))
    assert tier.read(record(1, b"g" * 32), into) is ReadResult.MISMATCH
    assert tier.read(record(1), into[:-1]) is ReadResult.MISMATCH
    assert tier.read(record(2), into) is ReadResult.MISSING
    assert tier.stats()["failures"] == {"read: mismatch": 2}


def test_scan_gives_what_the_index_needs(store, monkeypatch):
    monkeypatch.setattr(disk_format, "SCAN_BATCH", 7)
    tier = store.open()
    write(tier, range(40))
    batches = list(tier.scan())
    assert [len(batch) for batch in batches] == [7] * 5 + [5]
    index = DiskIndex.build(batches)
    index.check_integrity()
    assert len(index) == 40
    assert index.bytes.total == sum(entry.stored_bytes for entry in entries(tier).values())
    entry = index.get(record(9).block_id)
    assert (entry.parent_id, entry.model, entry.tenant) == (record(8).block_id, "model 0", "tenant")
    assert entry.last_access_s == 5.0
    (victim,) = index.take_victims(1)
    assert victim.block_id not in index and victim.block_id not in index.links.children_of


def test_many_readers_and_a_writer(store):
    tier = store.open(codec="split-zstd")
    write(tier, range(64))
    stop = threading.Event()

    def read_until_the_end(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            assert read(tier, rng.randrange(128)) in (ReadResult.OK, ReadResult.MISSING)

    def change() -> None:
        try:
            for i in range(25):
                write(tier, range(64 + i, 66 + i), deletes=[i])
                if i % 10 == 5:
                    tier.compact()
        finally:
            stop.set()

    together(change, *(partial(read_until_the_end, seed) for seed in range(3)))
    assert present(tier, range(128)) == list(range(25, 90))


def test_after_close_nothing_raises(store):
    tier = store.open()
    write(tier, [1])
    store.close()
    assert read(tier, 1) is ReadResult.FAILED and not tier.contains(record(1).block_id)
    assert tier.write([put(2)]).error is WriteError.CLOSED
    assert list(tier.scan()) == [] and tier.stats()["blocks"] == 0
    with pytest.raises(DegradedError):
        tier.sync()
    with pytest.raises(StoreError):
        tier.compact()


# -- space -----------------------------------------------------------------------------------------------------------
def test_used_bytes_follow_what_is_stored(store):
    tier = store.open()
    empty = tier.file.used_bytes
    write(tier, range(200))
    full = tier.file.used_bytes
    assert 200 * PAYLOAD_BYTES < full - empty < 2 * 200 * PAYLOAD_BYTES
    assert tier.file.excess_bytes() == full - int(0.85 * CAPACITY)
    assert tier.file.excess_bytes(CAPACITY) == full + CAPACITY - int(0.85 * CAPACITY)
    write(tier, [], deletes=range(200))
    assert tier.file.used_bytes < empty + full // 10
    assert tier.stats()["file_bytes"] > full // 2


def test_eviction_at_the_watermark_never_fills_the_map(store):
    """Several times the capacity, in batches, as the owner does it; what stays is closed under parents."""
    tier = store.open(capacity=4 * MIB)
    index = DiskIndex.build(tier.scan())
    for first in range(0, 2400, 16):
        numbers = range(first, first + 16)
        gone = [entry.block_id for entry in index.take_victims(tier.file.excess_bytes(16 * (PAYLOAD_BYTES + 4096)))]
        outcome = tier.write([put(i) for i in numbers], gone)
        assert outcome.error is None
        stored = entries(tier)
        for i in numbers:
            index.add(stored[record(i).block_id])
    assert tier.stats()["failures"] == {}
    assert (store.path / "blocks" / "data.mdb").stat().st_size <= 4 * MIB
    there = set(present(tier, range(2400)))
    assert {index.get(record(i).block_id) is not None for i in there} == {True} and len(there) == len(index)
    assert len(there) > 200 and all(i - 1 in there for i in there if i % CHAIN)


def test_a_full_map_is_an_error_once_and_not_for_ever(store):
    tier = store.open(capacity=2 * MIB)
    number, outcome = 0, None
    while outcome is None or outcome.error is None:
        outcome = tier.write([put(i) for i in range(number, number + 8)])
        number += 8
        assert number < 2000
    assert outcome.error is WriteError.MAP_FULL and not outcome.stored
    assert present(tier, range(number)) == list(range(number - 8))
    write(tier, [], deletes=range(number // 2))
    write(tier, [5000])
    write(tier, range(6000, 6020))
    assert present(tier, [*range(number), 5000, *range(6000, 6020)]) == [
        *range(number // 2, number - 8), 5000, *range(6000, 6020),
    ]  # fmt: skip
    store.close()
    assert read(store.open(capacity=2 * MIB), 5000) is ReadResult.OK


def test_deletes_make_room_for_the_puts_of_the_same_call(store):
    tier = store.open(capacity=2 * MIB)
    number = 0
    while tier.write([put(i) for i in range(number, number + 8)]).error is None:
        number += 8
    write(tier, range(10_000, 10_008), deletes=range(number // 2))
    assert present(tier, [*range(number), 10_000]) == [*range(number // 2, number), 10_000]


def test_a_reserve_of_the_file_system_is_kept(store):
    tier = store.open()
    write(tier, range(100))
    with disk_with(10 * MIB, 1000 * MIB):
        assert tier.write([put(i) for i in range(200, 400)]).error is WriteError.NO_SPACE
        assert present(tier, range(200, 400)) == []
        write(tier, [], deletes=range(50))  # this is not kept from anybody
        write(tier, [])
        write(tier, range(500, 510))  # fits into the file as it is
        assert tier.file.excess_bytes() < CAPACITY - tier.file.used_bytes, "there is less to use than the capacity"
    write(tier, range(200, 400))


def test_compact_takes_deleted_bytes_out_of_the_file(store):
    tier = store.open()
    write(tier, range(200))
    write(tier, [], deletes=range(152))  # whole conversations: no record names them as its parent
    data_file = store.path / "blocks" / "data.mdb"
    assert payload(7)[:64] in data_file.read_bytes()
    report = tier.compact()
    data = data_file.read_bytes()
    assert report.before_bytes > 2 * report.after_bytes == 2 * len(data) and report.seconds > 0
    for number in range(152):
        assert payload(number)[:64] not in data and record(number).block_id not in data
    assert present(tier, range(200)) == list(range(152, 200))
    assert data_file.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in store.path.iterdir()) == ["blocks", "format", "lock", "secret"]
    write(tier, range(300, 320))
    assert set(report.as_dict()) == {"before_bytes", "after_bytes", "seconds"}


def test_compact_that_fails_changes_nothing(store):
    tier = store.open()
    write(tier, range(50))
    with disk_with(1000, 10**12), pytest.raises(StoreError, match="beside it to be compacted"):
        tier.compact()

    def fail(*arguments):
        raise OSError(errno.EIO, "no")

    for copies in (fail, lambda *arguments: None):  # of the second there is nothing to swap in
        with copying_that(copies), pytest.raises(StoreError, match="it is as it was"):
            tier.compact()
    assert present(tier, range(50)) == list(range(50))


def test_a_lower_capacity_evicts_the_oldest_and_shrinks_the_file(store):
    now = [0.0]
    tier = store.open(clock=lambda: now[0])
    for first in range(0, 1600, 80):
        now[0] += 1
        write(tier, range(first, first + 80))
    store.close()
    tier = store.open(capacity=4 * MIB)
    data_file = store.path / "blocks" / "data.mdb"
    assert data_file.stat().st_size <= 4 * MIB and tier.file.excess_bytes() <= 0
    there = present(tier, range(1600))
    assert there[0] >= 1600 - 5 * 80 and set(range(1600 - 4 * 80, 1600)) <= set(there), "the oldest went"
    assert all(i - 1 in there for i in there if i % CHAIN)
    write(tier, range(2000, 2010))
    store.close()
    assert present(store.open(capacity=4 * MIB), range(2000, 2010)) == list(range(2000, 2010))


def test_a_lower_capacity_without_room_to_compact_warns_and_serves(store):
    tier = store.open()
    write(tier, range(1000))
    store.close()
    with disk_with(1 * MIB, 1000 * MIB), pytest.warns(RuntimeWarning, match="takes more than its 4.0 MiB"):
        tier = store.open(capacity=4 * MIB)
    assert tier.file.excess_bytes() <= 0 and len(present(tier, range(1000))) > 100


@pytest.mark.parametrize("when", [float("nan"), float("inf")])
def test_an_index_record_of_no_time_is_none(when):
    packed = disk_format.pack_index(record(1), 4096, 5.0)
    assert disk_format.unpack_index(record(1).block_id, packed, {}, {}).last_access_s == 5.0
    assert disk_format.unpack_index(record(1).block_id, disk_format.changed(packed, last_access_s=when), {}, {}) is None
    assert disk_format.changed(b"no record", last_access_s=5.0) == b"no record"


def test_how_long_reads_and_transactions_took_is_counted(store):
    tier = store.open()
    write(tier, range(3))
    read(tier, 1)
    read(tier, 99)
    found = tier.stats()
    for name, count in (("read_seconds", 1), ("write_seconds", 1)):
        histogram = found[name]
        assert sum(histogram["counts"]) == count and histogram["sum"] > 0, name
        assert len(histogram["counts"]) == len(histogram["bounds"]) + 1


# -- codecs ----------------------------------------------------------------------------------------------------------
def codecs_of(tier, numbers) -> set[str]:
    return {tier.header(record(i).block_id).codec.name.lower().replace("_", "-") for i in numbers}


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_compact_rewrites_blocks_of_all_codecs_in_one(store, codec):
    """In int8 copies alone: what is exact stays exact."""
    exact = [name for name in CODEC_NAMES if name != "int8"]
    for number, name in enumerate(exact):
        tier = store.open(codec=name)
        write(tier, range(20 * number, 20 * number + 20))
        store.close()
    tier = store.open(codec="raw")
    assert codecs_of(tier, range(80)) == set(exact)
    report = tier.compact(codec)
    codec = "exact12" if codec == "int8" else codec
    assert codecs_of(tier, range(80)) == {codec} and present(tier, range(80)) == list(range(80))
    assert tier.verify() == VerifyReport(num_ok=80, num_heads=10), "sizes in the index agree with what is stored"
    assert (report.after_bytes < report.before_bytes) == ("zstd" in codec)
    write(tier, [100])
    assert codecs_of(tier, [100]) == {"raw"}, "the tier goes on in its own"
    tier.compact()
    assert codecs_of(tier, range(80)) == {codec}, "without a codec they stay as they are"


def test_a_damaged_block_is_still_damaged_in_another_codec(store):
    tier = store.open()
    write(tier, range(10))
    with tier.file as tables, tables.env.begin(write=True) as txn:
        value = bytearray(txn.get(record(3).block_id, db=tables.values))
        value[-1] ^= 1
        txn.put(record(3).block_id, bytes(value), db=tables.values)
        txn.put(record(4).block_id, b"short", db=tables.index)
    tier.compact("exact12")
    assert read(tier, 3) is ReadResult.CORRUPT
    assert set(tier.verify().bad_ids) == {record(3).block_id, record(4).block_id}


KILLED = """
import os, signal, sys
from pathlib import Path
from unittest import mock
from tests.support.store.disk_store import Store
from kvstore.disk import codec, env
owner, name, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
place, own, calls = {"block": codec, "swap": env.os}[owner], None, 0

def dies(*arguments):
    global calls
    calls += 1
    if calls > at:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(*arguments)

tier = Store(Path.cwd()).open()
own = getattr(place, name)
with mock.patch.object(place, name, dies):
    tier.compact("int8")
"""


@pytest.mark.parametrize(
    ("owner", "name", "at"), [("block", "recoded", n) for n in (0, 25, 59)] + [("swap", "replace", 0)]
)
def test_killed_while_blocks_are_rewritten(store, owner, name, at):
    tier = store.open()
    write(tier, range(60))
    store.close()
    root = str(Path(__file__).parents[3])
    arguments = [sys.executable, "-c", KILLED, owner, name, str(at)]
    done = subprocess.run(arguments, cwd=store.path, env={**os.environ, "PYTHONPATH": root}, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL
    assert (store.path / "blocks.compact").is_dir(), "it was killed in the middle"
    tier = store.open()
    assert present(tier, range(60)) == list(range(60)) and codecs_of(tier, range(60)) == {"raw"}
    assert tier.verify().bad_ids == [] and not tier.file.was_reset and not (store.path / "blocks.compact").exists()
    tier.compact("exact12")
    assert codecs_of(tier, range(60)) == {"exact12"} and present(tier, range(60)) == list(range(60))
