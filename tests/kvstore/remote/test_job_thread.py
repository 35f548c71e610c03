"""Tests of kvstore.remote.job_thread."""

import threading

from kvstore.remote.job_thread import JobThread
from tests.support.waiting import TIMEOUT_S, wait_until


def test_jobs_in_their_order_and_no_more_than_may_wait():
    gate, done = threading.Event(), []

    def run(job: int) -> None:
        gate.wait()
        done.append(job)

    thread = JobThread("thread", run, most=3)
    assert thread.submit(0)
    wait_until(lambda: len(thread) == 1)
    while thread.submit(len(thread)):
        assert len(thread) < 5
    assert len(thread) in (3, 4)
    gate.set()
    wait_until(lambda: not len(thread))
    assert done == sorted(done)
    assert thread.close(TIMEOUT_S)
    assert not thread.submit(9)


def test_a_thread_rests_when_it_has_no_job():
    rested = threading.Event()

    def rest() -> float | None:
        rested.set()
        return 0.001

    thread = JobThread("thread", lambda job: None, 1, rest)
    assert rested.wait(TIMEOUT_S)
    rested.clear()
    assert rested.wait(TIMEOUT_S), "and again"
    assert thread.close(TIMEOUT_S)
