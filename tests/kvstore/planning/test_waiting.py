"""Which waiting request is looked at next: in order, past those that wait for reads or arena blocks, not for HBM."""

import pytest

from kvstore.planning.jobs import LINEAGE, Job
from kvstore.planning.waiting import WaitingLine
from kvstore.store.requests import Tracked
from tests.support.small_traces import request


def job(number: int, num_unread: int = 0) -> Job:
    stored = Tracked([], bytearray(), LINEAGE, "", str(number), (0, number), None)
    stored.wanted.front, stored.wanted.lowest = 3, 3 + num_unread
    return Job(number, number, request([1]), stored, 0.0, [])


@pytest.fixture
def line():
    return WaitingLine()


def candidates(line) -> list[int]:
    found = []
    while (one := line.pop_candidate()) is not None:
        found.append(one.number)
    return found


def test_they_come_in_order_of_arrival_and_each_once(line):
    jobs = [job(number) for number in (2, 0, 1)]
    for one in jobs:
        line.add(one)
    line.offer(1)
    assert len(line) == 3 and candidates(line) == [0, 1, 2]
    line.remove(jobs[1])
    line.offer_all()
    line.offer(0)
    assert len(line) == 2 and candidates(line) == [1, 2]


def test_who_waits_for_hbm_holds_up_all_behind_it_and_none_before(line):
    for number in range(3):
        line.add(job(number))
    assert line.pop_candidate().number == 0
    line.wait_for_hbm(line.pop_candidate())
    assert candidates(line) == []
    line.offer(0)
    assert candidates(line) == [0]
    line.unblock()
    assert candidates(line) == [1, 2]


def test_who_waits_for_arena_blocks_is_offered_when_there_are_enough_for_the_first(line):
    jobs = [job(0, num_unread=4), job(1, num_unread=1), job(2, num_unread=9)]
    for one in jobs:
        line.add(one)
    assert not line.has_short and candidates(line) == [0, 1, 2]
    for one in reversed(jobs):
        line.wait_for_arena_blocks(one)
    line.offer_short(3)
    assert line.has_short and candidates(line) == []
    line.offer_short(4)
    assert line.has_short and candidates(line) == [0, 1]
    line.offer_short(None)
    assert not line.has_short and candidates(line) == [2]


def test_who_runs_by_now_is_not_offered(line):
    short = job(0, num_unread=4)
    line.add(short)
    candidates(line)
    line.wait_for_arena_blocks(short)
    line.remove(short)
    line.offer_short(0)
    assert not line.has_short and candidates(line) == [] and len(line) == 0
