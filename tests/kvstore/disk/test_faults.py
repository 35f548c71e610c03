"""Tests of kvstore.disk.tier under damage, faults and kills: every block is right or missing, whatever happens."""

import errno
import random

import lmdb
import pytest

from kvstore.blocks.records import ReadResult
from kvstore.config import CODEC_NAMES
from kvstore.disk import format as disk_format
from kvstore.disk.format import WriteError
from kvstore.disk.index import DiskIndex
from tests.support.faults import disk_with
from tests.support.store.disk_store import faults, lmdb_error, present, put, read, record, write


# -- damage ----------------------------------------------------------------------------------------------------------
def test_verify_finds_and_deletes_what_is_bad(store):
    tier = store.open()
    write(tier, range(40))
    with tier.file as tables, tables.env.begin(write=True) as txn:
        value = bytearray(txn.get(record(3).block_id, db=tables.values))
        value[-1] ^= 1
        txn.put(record(3).block_id, bytes(value), db=tables.values)
        txn.put(record(4).block_id, txn.get(record(5).block_id, db=tables.values), db=tables.values)
        txn.delete(record(6).block_id, db=tables.values)
        txn.delete(record(7).block_id, db=tables.index)
        txn.put(record(8).block_id, b"short", db=tables.index)
    assert read(tier, 3) is ReadResult.CORRUPT and read(tier, 4) is ReadResult.MISMATCH
    seen: list[int] = []
    report = tier.verify(progress=seen.append)
    assert (report.num_ok, report.num_corrupt, report.num_orphans) == (35, 3, 2)
    assert set(report.bad_ids) == {record(i).block_id for i in (3, 4, 6, 7, 8)}
    assert seen and seen == sorted(seen) and report.as_dict()["bad_ids"][0] in {i.hex() for i in report.bad_ids}
    assert tier.write((), report.bad_ids).error is None
    again = tier.verify()
    assert (again.num_ok, again.bad_ids, again.is_complete) == (35, [], True)


@pytest.mark.filterwarnings("ignore:blocks of the store is damaged")
@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_in_the_file(store, seed):
    rng = random.Random(seed)
    tier = store.open(codec=rng.choice(CODEC_NAMES))
    write(tier, range(60))
    write(tier, range(60, 70), deletes=range(0, 60, 7))
    expected = set(present(tier, range(70)))
    store.close()
    data_file = store.path / "blocks" / "data.mdb"
    data = bytearray(data_file.read_bytes())
    for _ in range(rng.choice((1, 4, 30))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    data_file.write_bytes(data)
    tier = store.open()
    there = {i for i in range(70) if read(tier, i) is ReadResult.OK}
    assert there <= expected and (there or tier.file.was_reset)
    DiskIndex.build(tier.scan()).check_integrity()
    tier.write((), tier.verify().bad_ids)
    assert tier.verify().bad_ids == []
    write(tier, range(100, 140))
    assert {i for i in range(100, 140) if read(tier, i) is ReadResult.OK} == set(range(100, 140))


def test_another_format_is_set_aside(store):
    tier = store.open()
    write(tier, range(5))
    with tier.file as tables, tables.env.begin(write=True) as txn:
        txn.put(disk_format.FORMAT_KEY, b"kvstore blocks 99", db=tables.meta)
    store.close()
    with pytest.warns(RuntimeWarning, match="blocks 99"):
        tier = store.open()
    assert tier.file.was_reset and tier.stats()["was_reset"] and present(tier, range(5)) == []
    write(tier, range(5))


@pytest.mark.parametrize("error", [lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError])
def test_structural_damage_while_serving(store, error):
    tier = store.open()
    write(tier, range(5))
    with faults(tier, 1, error("x")):
        assert read(tier, 1) is ReadResult.FAILED
    assert tier.file.broken and read(tier, 1) is ReadResult.FAILED
    assert tier.write([put(9)]).error is WriteError.BROKEN and not tier.verify().is_complete
    with pytest.warns(RuntimeWarning, match="moved to quarantine"):
        tier.file.quarantine()
    assert not tier.file.broken and present(tier, range(10)) == []
    write(tier, range(5))
    assert (
        present(tier, range(10)) == list(range(5)) and len(list(store.path.glob("quarantine-*/blocks/data.mdb"))) == 1
    )


def test_panic_reopens_and_loses_nothing(store):
    tier = store.open()
    write(tier, range(5))
    with faults(tier, 1, lmdb.PanicError("x")):
        assert tier.write([put(9)]).error is WriteError.IO
    assert present(tier, range(10)) == list(range(5))
    with faults(tier, 1, lmdb.PanicError("x")):
        assert read(tier, 3) is ReadResult.FAILED
    assert present(tier, range(10)) == list(range(5)) and not tier.file.broken


@pytest.mark.filterwarnings("ignore:blocks of the store is damaged")
def test_a_panic_that_turns_out_to_be_damage(store):
    tier = store.open()
    write(tier, range(5))
    with faults(tier, 1, lmdb.PanicError("x")):
        (store.path / "blocks" / "data.mdb").write_bytes(b"rubbish" * 10_000)
        assert tier.write([put(9)]).error is WriteError.IO
    assert tier.file.broken and tier.file.was_reset  # the owner has to forget what it knew
    tier.file.quarantine()
    assert not tier.file.broken and present(tier, range(10)) == []
    write(tier, range(5))
    assert len(list(store.path.glob("quarantine-*"))) == 1


# -- faults ----------------------------------------------------------------------------------------------------------
FAULTS = {
    "EIO": (lambda: lmdb_error(errno.EIO), WriteError.IO),
    "ENOSPC": (lambda: lmdb_error(errno.ENOSPC), WriteError.NO_SPACE),
    "EFBIG": (lambda: lmdb_error(errno.EFBIG), WriteError.NO_SPACE),
    "EROFS": (lambda: lmdb_error(errno.EROFS), WriteError.READ_ONLY),
    "OSError": (lambda: OSError(errno.ENOSPC, "x"), WriteError.NO_SPACE),
    "map full": (lambda: lmdb.MapFullError("x"), WriteError.MAP_FULL),
    "memory": (MemoryError, WriteError.MEMORY),
    "lmdb memory": (lambda: lmdb.MemoryError("x"), WriteError.MEMORY),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_nth_operation_of_a_write_fails(store, name):
    make, expected = FAULTS[name]
    tier = store.open()
    write(tier, range(10))
    there, deletes, nth = set(range(10)), [2, 5], 0
    while True:
        nth += 1
        assert nth < 200
        with faults(tier, nth, make()) as fault:
            outcome = tier.write([put(20), put(21)], [record(i).block_id for i in deletes], {record(1).block_id: 9.0})
        if not fault.fired:
            break
        if outcome.error is None:  # it was tried again, in parts
            assert name == "map full"
            write(tier, deletes, deletes=[20, 21])
            continue
        assert outcome.error is expected and not outcome.stored
        now = set(present(tier, range(30)))
        assert now in (there, there - set(deletes)) and not now & {20, 21}
        assert name == "map full" or now == there
    assert nth > 8 and set(present(tier, range(30))) == (there | {20, 21}) - set(deletes)
    store.close()
    tier = store.open()
    assert set(present(tier, range(30))) == (there | {20, 21}) - set(deletes) and tier.verify().bad_ids == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_nth_operation_of_everything_else_fails(store, name):
    tier = store.open()
    write(tier, range(10))
    for call in (lambda: read(tier, 1), lambda: tier.contains(record(1).block_id), lambda: list(tier.scan()),
                 tier.stats, tier.verify):  # fmt: skip
        nth, fired = 0, True
        while fired:
            nth += 1
            with faults(tier, nth, FAULTS[name][0]()) as fault:
                call()
            fired = fault.fired
            assert nth < 300 and not tier.file.broken
    assert present(tier, range(12)) == list(range(10))


def test_a_full_disk_shows_as_eio(store):
    tier = store.open()
    write(tier, range(3))
    with disk_with(4096, 1 << 40), faults(tier, 1, lmdb_error(errno.EIO)):
        assert tier.write((), [record(1).block_id]).error is WriteError.NO_SPACE
    assert disk_format.write_error(lmdb_error(errno.EIO), 4096) is WriteError.NO_SPACE
    assert disk_format.write_error(lmdb_error(errno.EIO), 1 << 40) is WriteError.IO
    assert disk_format.write_error(lmdb_error(12345), 1 << 40) is WriteError.IO
