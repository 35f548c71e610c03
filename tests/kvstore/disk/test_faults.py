"""Tests of kvstore.disk.tier under damage, faults and kills: every block is right or missing, whatever happens."""

import errno
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lmdb
import pytest

from kvstore.blocks.records import ReadResult
from kvstore.disk import format as disk_format
from kvstore.disk.format import WriteError
from kvstore.disk.index import DiskIndex
from kvstore.disk.tier import DiskTier
from tests.support.programs import ROOT, python_on_a_tmpfs
from tests.support.store.disk_store import MIB, Store, faults, lmdb_error, present, put, read, record, write
from tests.support.waiting import TIMEOUT_S, wait_for_work

NUM_KILLS = 10  # run thousands by hand after a change of what is written in which order


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
    assert (again.num_ok, again.bad_ids, again.is_complete) == (35, (), True)


@pytest.mark.filterwarnings("ignore:blocks of the store is damaged")
@pytest.mark.parametrize("seed", range(20))
def test_flipped_bits_in_the_file(store, seed):
    rng = random.Random(seed)
    tier = store.open(codec=rng.choice(("raw", "zstd", "split-zstd")))
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
    assert tier.verify().bad_ids == ()
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
        assert outcome.error is expected and outcome.stored_bytes == ()
        now = set(present(tier, range(30)))
        assert now in (there, there - set(deletes)) and not now & {20, 21}
        assert name == "map full" or now == there
    assert nth > 8 and set(present(tier, range(30))) == (there | {20, 21}) - set(deletes)
    store.close()
    tier = store.open()
    assert set(present(tier, range(30))) == (there | {20, 21}) - set(deletes) and tier.verify().bad_ids == ()


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


def test_a_full_disk_shows_as_eio():
    assert disk_format.write_error(lmdb_error(errno.EIO), 4096) is WriteError.NO_SPACE
    assert disk_format.write_error(lmdb_error(errno.EIO), 1 << 40) is WriteError.IO
    assert disk_format.write_error(lmdb_error(12345), 1 << 40) is WriteError.IO


FULL_DISK = """
import sys
from kvstore.blocks.records import ReadResult
from kvstore.disk.index import DiskIndex
from tests.support.store.disk_store import *

def right(tier, number):
    into = bytearray(PAYLOAD_BYTES)
    result = tier.read(record(number), memoryview(into))
    assert result is ReadResult.MISSING or (result is ReadResult.OK and into == payload(number)), result
    return result is ReadResult.OK

directory = StoreDirectory.open(sys.argv[1] + "/store")
tier, index = DiskTier(directory, 64 * MIB, codec="raw"), DiskIndex()
for first in range(0, 6400, 32):  # twice what fits, with eviction as the owner does it
    gone = [entry.block_id for entry in index.take_victims(tier.file.excess_bytes(32 * 8192))]
    assert tier.write([put(i) for i in range(first, first + 32)], gone).error is None, first
    for i in range(first, first + 32):
        index.add(tier.entry(record(i).block_id))
assert 1500 < sum(right(tier, i) for i in range(6400)) == len(index)
tier.file.has_space = lambda tables, incoming_bytes: True  # somebody else was faster
number, errors = 10_000, set()
while number < 14_000:
    errors.add(str(tier.write([put(i) for i in range(number, number + 32)]).error))
    number += 32
assert errors == {"None", "no space"}, errors
# Deleting takes new pages too, before it gives any back: on a disk without a byte left it may have to wait.
outcomes = {str(tier.write((), [block_id]).error) for block_id in list(index._entries)[:200]}
assert outcomes <= {"None", "no space"}, outcomes
there = [i for i in range(number) if right(tier, i)]
tier.close()
tier = DiskTier(directory, 64 * MIB)
assert not tier.file.was_reset and tier.verify().bad_ids == ()
assert [i for i in range(number) if right(tier, i)] == there and len(there) > 1500
print("survived")
"""


def test_a_file_system_that_is_full(tmp_path):
    assert python_on_a_tmpfs("size=32m", FULL_DISK, tmp_path).strip() == "survived"


# -- kill ------------------------------------------------------------------------------------------------------------
class Expected:
    """What the child's log says about each block: there, gone, or either."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.read_bytes = 0
        self.there: set[int] = set()
        self.either: set[int] = set()
        self.highest = 0

    def update(self) -> None:
        lines = self.log.read_text()[self.read_bytes :].splitlines() if self.log.exists() else []
        self.read_bytes = self.log.stat().st_size if self.log.exists() else 0
        for line in lines:
            state, _, rest = line.partition(" ")
            added, gone = ({int(i) for i in part.split()} for part in rest.split("-"))
            self.highest = max(self.highest, *added)
            if state == "begin":
                self.either |= added | gone
            else:
                self.either -= added | gone
                self.there = (self.there | added) - gone

    def check(self, tier: DiskTier) -> None:
        there = set(present(tier, range(self.highest + 30)))
        assert self.there - self.either <= there <= self.there | self.either
        self.there, self.either = there, set()


def test_kill_at_any_moment(tmp_path):
    rng, log, store = random.Random(1), tmp_path / "log", Store(tmp_path / "store")
    expected = Expected(log)
    for round_number in range(NUM_KILLS):
        arguments = [str(store.path), str(log), str(32 * MIB), str(rng.randrange(10**6)), str(expected.highest + 1)]
        size = log.stat().st_size if log.exists() else 0
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.children.disk_child", *arguments], cwd=ROOT, stderr=subprocess.PIPE
        )
        wait_for_work(child, log, size)
        time.sleep(rng.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        _, errors = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == -signal.SIGKILL, errors.decode()
        expected.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tier = store.open(capacity=32 * MIB)
        expected.check(tier)
        assert tier.verify().bad_ids == (), f"round {round_number}"
        # What the next child does not know of is taken out, so that the store does not fill.
        tier.write((), [record(i).block_id for i in expected.there])
        expected.there = set()
        store.close()
    assert expected.highest >= NUM_KILLS
