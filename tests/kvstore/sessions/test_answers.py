"""Answers on disk: found at once and after a restart, the oldest gone when full, and never an error for a request."""

import os
import random
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import lmdb
import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import open_environment
from kvstore.errors import StoreError
from kvstore.sessions import answers as answer_store
from kvstore.sessions.answers import ANSWERS, FULL_SHARE, OWNED, AnswerStore, open_answers, owner_tag
from kvstore.sessions.storage import DiskView
from kvstore.sessions.tables import be64
from tests.support.faults import constants, largest_file
from tests.support.session_tables import tables_of
from tests.support.waiting import TIMEOUT_S, together, wait_until

ROOT = Path(__file__).parents[3]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def ids_of(number: int, count: int = 20) -> tuple[int, ...]:
    """Values that only this answer has."""
    return tuple(number * 1000 + index for index in range(count))


@pytest.fixture
def directory(tmp_path):
    with StoreDirectory.open(tmp_path / "store") as directory:
        yield directory


@pytest.fixture(params=["memory", "disk"])
def store(request, directory):
    store = open_answers(None if request.param == "memory" else directory)
    yield store
    store.close()


def test_an_answer_is_found_at_once_and_when_it_is_on_disk(store):
    store.put([key(1), key(2)], ids_of(1))
    for _ in range(2):
        assert store.find_ids([[key(1)], [key(9), key(2)], [key(3)], []]) == [ids_of(1), ids_of(1), None, None]
        store.flush()
    assert store.stats()["answers"] == 1


def test_nobody_need_wait_for_an_answer_to_be_stored(store):
    store.put([key(1)], ids_of(1))
    wait_until(lambda: store.stats()["answers"] == 1, "it is not stored")


def test_the_newest_answer_has_a_key(store):
    for number in range(5):
        store.put([key(number), key(99)], ids_of(number))
        if number % 2:
            store.flush()
            assert store.find_ids([[key(99)], [key(number)]]) == [ids_of(number)] * 2
    store.put([key(50)], ())
    store.flush()
    assert store.find_ids([[key(50), key(99)]]) == [()]


def test_like_a_dict_whatever_the_order(store):
    random_ = random.Random(5)
    of_key: dict[bytes, list[int]] = {}  # numbers of the answers that had it, the newest last
    whose: dict[int, str] = {}
    for number in range(300):
        keys = [key(random_.randrange(60)) for _ in range(random_.randint(1, 2))]
        whose[number] = random_.choice(["", "", "a", "b"])
        owner = (owner_tag("t", whose[number]),) if whose[number] else ()
        store.put(keys, ids_of(number, random_.randint(1, 8)), *owner)
        for one in keys:
            of_key.setdefault(one, []).append(number)
        if random_.random() < 0.02:
            gone = random_.choice(["a", "b"])
            assert store.forget_owner(owner_tag("t", gone))
            whose.update({n: "gone" for n, name in whose.items() if name == gone})
        if random_.random() < 0.7:
            continue
        store.flush()
        probe = [key(random_.randrange(60)) for _ in range(12)]
        for one, ids in zip(probe, store.find_ids([[one] for one in probe]), strict=True):
            had = of_key.get(one, [])
            if had and whose[had[-1]] != "gone":
                assert ids is not None and ids[0] // 1000 == had[-1]
            elif ids is not None:  # an older one that had the key before
                assert ids[0] // 1000 in had and whose[ids[0] // 1000] != "gone"
    assert store.stats()["damaged"] == store.stats()["failed"] == store.stats()["dropped"] == 0


def test_answers_outlive_the_store(directory):
    first = open_answers(directory)
    first.put([key(1)], ids_of(1))
    first.put([key(2)], ids_of(2), owner_tag("t", "s"))
    first.close()
    first.close()
    assert first.find_ids([[key(1)]]) == [None]
    second = open_answers(directory)
    second.put([key(3)], ids_of(3))
    second.flush()
    assert second.find_ids([[key(1)], [key(2)], [key(3)]]) == [ids_of(1), ids_of(2), ids_of(3)]
    assert second.forget_owner(owner_tag("t", "s"))
    second.close()
    third = open_answers(directory)
    assert third.find_ids([[key(1)], [key(2)], [key(3)]]) == [ids_of(1), None, ids_of(3)]
    third.close()


def test_a_full_file_drops_the_oldest(directory):
    path, size = directory.path / "answers", 1 << 20
    small = AnswerStore(lambda: open_environment(path, size, max_dbs=3), int(FULL_SHARE * size))
    for number in range(400):
        small.put([key(number), key(10_000 + number % 7)], ids_of(number, 1000))
        if number % 20 == 0:
            small.flush()
    small.flush()
    found = [ids is not None for ids in small.find_ids([[key(n)] for n in range(400)])]
    assert found.index(True) > 0 and all(found[found.index(True) :]) and sum(found) > 50
    stats = small.stats()
    assert (stats["answers"], stats["evicted"]) == (sum(found), 400 - sum(found))
    assert stats["failed"] == stats["dropped"] == 0 and stats["committed"] == 400
    small.close()
    assert os.path.getsize(directory.path / "answers" / "data.mdb") <= 1 << 20


def test_memory_is_bounded():
    store, num_tokens = open_answers(None), 100_000
    for number in range(60):
        store.put([key(number)], ids_of(number, num_tokens))
    store.flush()
    found = [ids is not None for ids in store.find_ids([[key(n)] for n in range(60)])]
    assert found == [False] * (60 - sum(found)) + [True] * sum(found)
    kept_bytes = 4 * num_tokens * sum(found)
    assert kept_bytes <= answer_store.MEMORY_BYTES < kept_bytes + 8 * num_tokens
    assert store.stats()["evicted"] == 60 - sum(found)
    store.put([key(1)], range(answer_store.MAX_ANSWER_TOKENS + 1))
    store.flush()
    assert store.find_ids([[key(1)]]) == [None] and store.stats()["dropped"] == 1
    store.close()


def test_a_damaged_record_is_a_miss(directory):
    store = open_answers(directory)
    for number in range(3):
        store.put([key(number)], ids_of(number), owner_tag("t", "s"))
    store.flush()
    with tables_of(store) as view:
        value = view.get(ANSWERS, be64(2))
        view.put(ANSWERS, be64(2), value[:-1] + bytes([value[-1] ^ 1]))
    assert store.find_ids([[key(0)], [key(1)], [key(2)]]) == [ids_of(0), None, ids_of(2)]
    assert store.stats()["damaged"] == 1 and store.stats()["failed"] == 0
    store.put([key(5)], ids_of(5), b"")
    assert store.forget_owner(owner_tag("t", "s")) and store.stats()["answers"] == 1
    assert store.transactions.read(lambda view: view.count(OWNED)) == 0  # nothing is left of whose they were
    store.close()


def disk_that(**operations):
    """In here these operations on disk are others."""
    return mock.patch.multiple(DiskView, **operations)


def failing(*_, **__):
    raise lmdb.DiskError("injected")


def test_a_disk_that_fails_costs_no_request_anything(directory):
    store = open_answers(directory)
    store.put([key(1)], ids_of(1), owner_tag("t", "s"))
    store.flush()
    with disk_that(put=failing, delete=failing):
        store.put([key(2)], ids_of(2))
        store.flush()
        assert store.find_ids([[key(1)], [key(2)]]) == [ids_of(1), None]
        assert not store.forget_owner(owner_tag("t", "s"))
        with disk_that(get=failing):
            assert store.find_ids([[key(1)], [key(2)]]) == [None, None]
        assert store.stats()["failed"] == 3 and "injected" in store.stats()["failing"]
    assert store.forget_owner(owner_tag("t", "s")), "whoever asks again"
    store.put([key(3)], ids_of(3))
    store.flush()
    assert store.find_ids([[key(1)], [key(2)], [key(3)]]) == [None, None, ids_of(3)]
    assert store.stats()["failing"] is None and store.stats()["committed"] == 2
    store.close()


def test_a_full_disk_costs_the_answers_that_it_refuses_until_there_is_room(directory):
    store = open_answers(directory)
    with largest_file(1 << 16):
        for number in range(4):
            store.put([key(number)], ids_of(number, 20_000))
            store.flush()
        assert store.stats()["failing"] is not None and store.stats()["committed"] == 0
    store.put([key(4)], ids_of(4))
    store.flush()
    stats = store.stats()
    assert (stats["failing"], stats["failed"], stats["committed"], stats["answers"]) == (None, 4, 1, 1)
    store.close()


def test_who_waits_at_once_shares_a_commit_and_who_does_not_wait_is_never_kept(directory):
    store, begun, go_on, put = open_answers(directory), threading.Event(), threading.Event(), DiskView.put

    def slow(*arguments):
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        put(*arguments)

    def commit(number: int) -> None:
        store.put([key(number)], ids_of(number))
        store.flush()
        assert store.stats()["committed"] >= 1

    def put_others() -> None:
        assert begun.wait(TIMEOUT_S)
        together(*(partial(store.put, [key(number)], ids_of(number)) for number in range(1, 9)))
        with constants(answer_store, MAX_WAITING=8):
            store.put([key(9)], ids_of(9))
        go_on.set()
        together(*(store.flush for _ in range(8)))

    with disk_that(put=slow):
        together(partial(commit, 0), put_others)
    assert store.stats()["committed"] == 9 and store.stats()["dropped"] == 1
    assert store.transactions.stats()["largest_group"] >= 8
    store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_for_answers_that_cannot_be_written(directory):
    def fail(*_):
        raise ValueError("injected: no error of the disk")

    store = open_answers(directory)
    with disk_that(put=fail):
        store.put([key(1)], ids_of(1))
        waiting = threading.Thread(target=store.flush, daemon=True)
        waiting.start()
        waiting.join(TIMEOUT_S)
        assert not waiting.is_alive() and store.find_ids([[key(1)]]) == [None]
    store.put([key(2)], ids_of(2))
    assert store.stats()["dropped"] == 1 and not store.forget_owner(owner_tag("t", "s"))
    store.close()


def test_a_file_that_cannot_be_opened_leaves_memory():
    def refused():
        raise StoreError("injected")

    store = AnswerStore(refused)
    store.put([key(1)], ids_of(1))
    store.flush()
    assert store.find_ids([[key(1)]]) == [ids_of(1)]
    assert (store.stats()["failed"], store.stats()["failing"]) == (1, "injected")
    assert not store.forget_owner(owner_tag("t", "s")), "they are in the file"
    store.close()


def test_many_threads(store):
    def work(name: int) -> None:
        for number in range(name * 1000, name * 1000 + 60):
            store.put([key(number)], ids_of(number), owner_tag("t", str(name)))
            store.flush()
            assert store.find_ids([[key(number)]]) == [ids_of(number)]
        assert name != 3 or store.forget_owner(owner_tag("t", "3"))

    together(*(partial(work, name) for name in range(4)))
    store.flush()
    assert store.stats()["answers"] == 180
    assert store.find_ids([[key(3001)], [key(2059)]]) == [None, ids_of(2059)]
