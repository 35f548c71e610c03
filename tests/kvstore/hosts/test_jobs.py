"""Jobs between a host's memory and a store: whole, in part, refused, forgotten."""

import threading

import pytest

from kvstore import BlockStore
from kvstore.disk.tier import DiskTier
from kvstore.hosts.jobs import HostBlock, HostJobs
from tests.support.faults import before_each
from tests.support.waiting import TIMEOUT_S, wait_until

SIZE = 4096


@pytest.fixture
def jobs(tmp_path):
    with BlockStore(tmp_path / "store", namespace=b"a", capacity="8MiB") as store:
        yield HostJobs(store)


def blocks(*keys, before=None, size=SIZE):
    """A chain whose bytes are derived from its keys."""
    parents = [before, *keys]
    return [HostBlock(key, parents[i], 16 * i, memoryview(key.ljust(size, b"."))) for i, key in enumerate(keys)]


def empty(*keys):
    return [HostBlock(key, None, 0, memoryview(bytearray(SIZE))) for key in keys]


def done(jobs):
    """What has ended, once nothing is on its way."""
    ended = []

    def is_idle():
        ended.extend(jobs.collect())
        return jobs.is_idle

    wait_until(is_idle)
    return ended + jobs.collect()


def test_what_is_written_is_read_into_other_memory(jobs):
    jobs.write(7, blocks(b"k1", b"k2"))
    assert [(job.job_id, job.is_load, job.ok, job.num_bytes) for job in done(jobs)] == [
        (7, False, [True] * 2, 2 * SIZE)
    ]
    into = empty(b"k2", b"k1")
    jobs.read(8, into)
    assert jobs.num_reading == 2
    (job,) = done(jobs)
    assert (job.job_id, job.is_load, job.ok, job.num_bytes) == (8, True, [True] * 2, 2 * SIZE) and job.seconds > 0
    assert not jobs.num_reading and [bytes(one.memory).rstrip(b".") for one in into] == [b"k2", b"k1"]


def test_what_is_stored_already_is_passed_over(jobs):
    for _ in range(2):
        jobs.write(1, blocks(b"k1", b"k2"))
        ended = done(jobs)
    assert [(job.ok, job.num_bytes) for job in ended] == [([True, True], 0)]


def test_a_block_that_is_missing_fails_alone(jobs):
    jobs.write(1, blocks(b"k1"))
    done(jobs)
    jobs.read(2, empty(b"k0", b"k1", b"k2"))
    assert [(job.ok, job.num_bytes) for job in done(jobs)] == [([False, True, False], SIZE)]


def test_a_job_without_blocks_ends(jobs):
    jobs.write(1, [])
    jobs.read(2, [])
    assert [job.job_id for job in done(jobs)] == [1, 2]


def test_more_than_the_store_takes_at_once_waits_for_its_turn(jobs):
    jobs.write(1, blocks(*(b"k%d" % i for i in range(600))))
    assert [(job.ok, job.num_bytes) for job in done(jobs)] == [([True] * 600, 600 * SIZE)]


def test_what_is_given_up_while_it_waits_is_not_written(jobs):
    keys, go = [b"k%d" % i for i in range(600)], threading.Event()
    with before_each(DiskTier, "write", lambda: go.wait(TIMEOUT_S)):  # else all may be written by then
        jobs.write(1, blocks(*keys))
        other = jobs.write(2, blocks(b"other"))
        jobs.give_up(lambda job, key: job is other or key == b"k599")
        go.set()
    assert [(job.job_id, job.ok) for job in done(jobs)] == [(2, [False]), (1, [True] * 599 + [False])]
    jobs.read(3, empty(b"k598", b"k599", b"other"))
    assert [job.ok for job in done(jobs)] == [[True, False, False]]


def test_what_builds_on_a_refused_block_is_not_written(jobs, caplog):
    refused = blocks(b"large", size=2 << 20) + blocks(b"next", b"last", before=b"large")
    jobs.write(1, blocks(b"k1", b"k2") + refused + blocks(b"k3", before=b"k2"))
    assert [job.ok for job in done(jobs)] == [[True, True, False, False, False, True]]
    assert caplog.text.count("too large for a capacity") == 1
