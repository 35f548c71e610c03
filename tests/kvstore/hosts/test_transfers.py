"""Jobs between a host's memory and a store: whole, in part, refused, forgotten."""

import pytest

from kvstore import BlockStore
from kvstore.hosts.transfers import RowTransfers, RowWrite
from tests.support.waiting import wait_until

ROW = 4096


@pytest.fixture
def store(tmp_path):
    with BlockStore(tmp_path / "store", namespace=b"a", capacity="8MiB") as store:
        yield store


def rows(*texts):
    return bytearray(b"".join(text.ljust(ROW, b".") for text in texts))


def done(transfers):
    """What has ended, once nothing is on its way."""
    ended = []

    def is_idle():
        ended.extend(transfers.collect())
        return transfers.is_idle

    wait_until(is_idle)
    return ended + transfers.collect()


def writes(*keys):
    return [RowWrite(key, keys[i - 1] if i else None, 16 * i, i) for i, key in enumerate(keys)]


def test_what_is_written_is_read_into_other_rows(store):
    memory = rows(b"one", b"two", b"", b"")
    transfers = RowTransfers(store, memoryview(memory), ROW)
    transfers.write(7, writes(b"k1", b"k2"), "talk")
    assert [(job.job_id, job.ok, job.num_bytes) for job in done(transfers)] == [(7, True, 2 * ROW)]
    transfers.read(8, [b"k2", b"k1"], [2, 3])
    assert [(job.job_id, job.ok, sorted(job.loaded)) for job in done(transfers)] == [(8, True, [b"k1", b"k2"])]
    assert memory == rows(b"one", b"two", b"two", b"one")


def test_what_is_stored_already_is_passed_over(store):
    transfers = RowTransfers(store, memoryview(rows(b"one", b"two")), ROW)
    for _ in range(2):
        transfers.write(1, writes(b"k1", b"k2"), None)
        ended = done(transfers)
    assert [(job.ok, job.num_bytes) for job in ended] == [(True, 0)]


def test_a_block_that_is_missing_fails_alone_and_is_remembered(store):
    transfers = RowTransfers(store, memoryview(rows(b"one", b"", b"")), ROW)
    transfers.write(1, writes(b"k1"), None)
    done(transfers)
    transfers.read(2, [b"k1", b"k2"], [1, 2])
    assert [(job.ok, job.loaded) for job in done(transfers)] == [(False, (b"k1",))]
    assert list(transfers.failed) == [b"k2"]
    transfers.write(3, [RowWrite(b"k2", b"k1", 16, 0)], None)
    assert [job.ok for job in done(transfers)] == [True]
    assert not transfers.failed


def test_more_than_the_store_takes_at_once_waits_for_its_turn(store):
    memory = rows(*(b"%d" % i for i in range(600)))
    transfers = RowTransfers(store, memoryview(memory), ROW)
    transfers.write(1, writes(*(b"k%d" % i for i in range(600))), None)
    assert [(job.ok, job.num_bytes) for job in done(transfers)] == [(True, 600 * ROW)]


def test_what_is_forgotten_while_it_waits_is_not_written(store):
    transfers = RowTransfers(store, memoryview(rows(*(b"%d" % i for i in range(600)))), ROW)
    transfers.write(1, writes(*(b"k%d" % i for i in range(600))), None)
    transfers.forget([b"k599"])
    assert [job.ok for job in done(transfers)] == [False]
    assert store.lookup([b"k598", b"k599"]) == [True, False]
