"""Tests of kvstore.remote.lanes."""

import threading

from kvstore.disk.io_queue import AS_HINT, AT_ONCE, Read, rank_of_request
from kvstore.remote.lanes import Lane, ReadLanes
from tests.kvstore.remote.chains import make_chain
from tests.support.waiting import TIMEOUT_S, wait_until


def test_jobs_in_their_order_and_no_more_than_may_wait():
    gate, done = threading.Event(), []

    def run(job: int) -> None:
        gate.wait()
        done.append(job)

    lane = Lane("lane", run, most=3)
    assert lane.submit(0)
    wait_until(lambda: len(lane) == 1)
    while lane.submit(len(lane)):
        assert len(lane) < 5
    assert len(lane) in (3, 4)
    gate.set()
    wait_until(lambda: not len(lane))
    assert done == sorted(done)
    assert lane.close(TIMEOUT_S)
    assert not lane.submit(9)


def test_a_lane_rests_when_it_has_no_job():
    rested = threading.Event()

    def rest() -> float | None:
        rested.set()
        return 0.001

    lane = Lane("lane", lambda job: None, 1, rest)
    assert rested.wait(TIMEOUT_S)
    rested.clear()
    assert rested.wait(TIMEOUT_S), "and again"
    assert lane.close(TIMEOUT_S)


def test_reads_by_rank_in_batches_of_one_rank():
    gate, batches = threading.Event(), []

    def run(batch: list[Read]) -> None:
        gate.wait()
        batches.append([read.arena_block for read in batch])

    reads = make_chain(12).reads(size=100)
    lanes = ReadLanes("lane", run, 1, lambda: 250)
    lanes.submit(reads[0])
    wait_until(lambda: lanes.num_active)
    for read in reads[1:5]:
        lanes.submit(read, AS_HINT)
    for read in reads[5:9]:
        lanes.submit(read, rank_of_request((0, 1)))
    lanes.submit(reads[9], AT_ONCE)
    assert lanes.cancel(6)
    assert not lanes.cancel(0), "it runs"
    lanes.change_rank(4, AT_ONCE)
    assert lanes.stalled_s > 0
    gate.set()
    wait_until(lambda: lanes.is_idle)
    assert batches == [[0], [9, 4], [5, 7, 8], [1, 2, 3]]
    assert lanes.close(TIMEOUT_S)
