"""Tests of kvstore.disk.live: order, groups, bounds, and that nobody waits for ever."""

import threading

import pytest

from kvstore.disk.live import Committer
from kvstore.errors import StoreError
from tests.support.waiting import wait_until


class Slow:
    """Commits when it is let; remembers the groups."""

    def __init__(self) -> None:
        self.groups: list[list[object]] = []
        self.go = threading.Event()

    def __call__(self, group) -> None:
        self.groups.append([ticket.change for ticket in group])
        self.go.wait()
        for ticket in group:
            ticket.finish(StoreError("refused") if ticket.change == "bad" else ticket.change)


def test_what_comes_during_a_commit_is_the_next_group():
    slow = Slow()
    committer = Committer("it", slow, max_queue=10)
    tickets = [committer.submit(1)]
    wait_until(lambda: bool(slow.groups), "a group")
    tickets += [committer.submit(change) for change in (2, "bad", 3)]
    assert committer.num_queued == 3 and not any(ticket.done for ticket in tickets)
    with pytest.raises(StoreError, match="not durable after 0"):
        tickets[0].wait(0)
    slow.go.set()
    committer.flush()
    assert slow.groups == [[1], [2, "bad", 3]]
    assert [ticket.wait() for ticket in tickets if ticket.change != "bad"] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(StoreError, match="refused"):
            tickets[2].wait()
    committer.close()
    with pytest.raises(StoreError, match="it is closed"):
        committer.submit(4)


def test_closing_carries_out_what_waits_and_a_full_queue_makes_wait():
    slow = Slow()
    committer = Committer("it", slow, max_queue=2)
    committer.submit(0)
    wait_until(lambda: bool(slow.groups), "a group")
    thread = threading.Thread(target=lambda: [committer.submit(change) for change in (1, 2, 3)])
    thread.start()
    wait_until(lambda: committer.num_queued == 2, "a full queue")
    assert thread.is_alive()
    slow.go.set()
    thread.join()
    committer.close()
    committer.close()
    assert [change for group in slow.groups for change in group] == [0, 1, 2, 3]


def test_a_pause_collects_and_a_flush_ends_it():
    slow = Slow()
    slow.go.set()
    committer = Committer("it", slow, max_queue=10, pause_s=600.0)
    tickets = [committer.submit(change) for change in range(5)]
    assert not any(ticket.done for ticket in tickets)
    committer.flush()
    assert slow.groups == [[0, 1, 2, 3, 4]]
    committer.submit(5)
    committer.close()
    assert slow.groups[1:] == [[5]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_leaves_nobody_waiting():
    entered, go = threading.Event(), threading.Event()

    def commit(group) -> None:
        entered.set()
        go.wait()
        group[0].finish("done")
        raise ZeroDivisionError("a bug")

    committer = Committer("it", commit, max_queue=10)
    first = committer.submit(1)
    entered.wait()
    later = committer.submit(2)
    go.set()
    committer.flush()
    assert first.wait() == "done"
    with pytest.raises(StoreError, match="it stopped after an internal error: ZeroDivisionError"):
        later.wait()
    with pytest.raises(StoreError, match="internal error"):
        committer.submit(3)
    committer.close()
