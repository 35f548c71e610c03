"""The lock that is handed over in the order of asking."""

import threading

import pytest

from engine.fair_lock import FairLock


def start(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def wait_for_waiters(lock, count):
    while len(lock._waiting) < count:
        threading.Event().wait(0.001)


def test_it_is_re_entrant_and_free_after_the_last_release():
    lock, others = FairLock(), []
    with lock, lock:
        thread = start(lambda: others.append(lock.acquire()) or lock.release())
        wait_for_waiters(lock, 1)
        assert others == []
    thread.join()
    assert others == [True] and lock._owner is None


def test_whoever_asks_first_gets_it_first_and_its_last_owner_comes_behind_them():
    lock, order = FairLock(), []

    def take(name):
        with lock:
            order.append(name)

    with lock:
        threads = []
        for name in "abc":
            threads.append(start(lambda name=name: take(name)))
            wait_for_waiters(lock, len(threads))
    take("last")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "last"]


def test_a_condition_over_it_gives_it_back_while_it_waits():
    lock = FairLock()
    condition, news = threading.Condition(lock), []

    def reader():
        with condition, condition:
            condition.wait_for(lambda: news)
            news.append(lock._count)

    thread = start(reader)
    while True:
        with condition:
            if condition._waiters:
                news.append("news")
                condition.notify_all()
                break
    thread.join()
    assert news == ["news", 2] and lock._owner is None


def test_only_its_owner_releases_it():
    lock = FairLock()
    with pytest.raises(AssertionError, match="another thread"):
        lock.release()


@pytest.mark.parametrize("handed_over", [False, True])
def test_giving_up_while_waiting_lets_the_next_one_have_it(handed_over):
    lock = FairLock()
    turn = threading.Lock()
    if handed_over:
        lock._owner, lock._count = threading.get_ident(), 1
    else:
        lock._waiting.append((threading.get_ident(), turn))
    lock._give_up(threading.get_ident(), turn)
    assert not lock._waiting and lock._owner is None


def test_many_threads_count_together():
    lock, total = FairLock(), [0]

    def work():
        for _ in range(300):
            with lock:
                before = total[0]
                total[0] = before + 1

    threads = [start(work) for _ in range(8)]
    for thread in threads:
        thread.join()
    assert total == [2400]
