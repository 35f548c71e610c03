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
from kvstore.sessions.answers import AnswerStore, AnswerTables, open_answers, owner_tag
from tests.support.faults import largest_file
from tests.support.waiting import TIMEOUT_S, together

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
    expected = [ids_of(1), ids_of(1), None, None]
    groups = [[key(1)], [key(9), key(2)], [key(3)], []]
    assert store.find_ids(groups) == expected
    store.flush()
    assert store.find_ids(groups) == expected and store.stats()["answers"] == 1


def test_the_newest_answer_has_a_key(store):
    for number in range(5):
        store.put([key(number), key(99)], ids_of(number))
        if number % 2:
            store.flush()
        assert store.find_ids([[key(99)], [key(number)]]) == [ids_of(number)] * 2
    store.put([key(50)], ())
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
            store.flush()
        if random_.random() < 0.02:
            gone = random_.choice(["a", "b"])
            assert store.forget_owner(owner_tag("t", gone))
            whose.update({n: "gone" for n, name in whose.items() if name == gone})
        probe = [key(random_.randrange(60)) for _ in range(4)]
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
    assert second.find_ids([[key(1)], [key(2)], [key(3)]]) == [ids_of(1), ids_of(2), ids_of(3)]
    assert second.forget_owner(owner_tag("t", "s"))
    second.close()
    third = open_answers(directory)
    assert third.find_ids([[key(1)], [key(2)], [key(3)]]) == [ids_of(1), None, ids_of(3)]
    third.close()


def test_a_full_file_drops_the_oldest(directory):
    small = AnswerStore(lambda: open_environment(directory.path / "answers", 1 << 20, max_dbs=3))
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
    found = [ids is not None for ids in store.find_ids([[key(n)] for n in range(60)])]
    assert found == [False] * (60 - sum(found)) + [True] * sum(found)
    assert sum(found) == answer_store.MEMORY_TOKENS // num_tokens and store.stats()["evicted"] == 60 - sum(found)
    store.put([key(1)], range(answer_store.MAX_ANSWER_TOKENS + 1))
    assert store.find_ids([[key(1)]]) == [None] and store.stats()["dropped"] == 1
    store.close()


def test_a_damaged_record_is_a_miss(directory):
    store = open_answers(directory)
    for number in range(3):
        store.put([key(number)], ids_of(number), owner_tag("t", "s"))
    store.flush()
    with store._live as tables, tables.env.begin(write=True) as txn:
        value = bytearray(txn.get(key(1)[-8:], db=tables._answers))
        value[-1] ^= 1
        txn.put(key(1)[-8:], bytes(value), db=tables._answers)
    assert store.find_ids([[key(0)], [key(1)], [key(2)]]) == [ids_of(0), None, ids_of(2)]
    assert store.stats()["damaged"] == 1 and store.stats()["failed"] == 0
    store.put([key(5)], ids_of(5), b"")
    assert store.forget_owner(owner_tag("t", "s")) and store.stats()["answers"] == 1
    with store._live as tables, tables.env.begin() as txn:  # nothing is left of whose they were
        assert txn.stat(tables._owned)["entries"] == 0
    store.close()


def tables_that(**operations):
    """In here these operations of the tables are others."""
    return mock.patch.multiple(AnswerTables, **operations)


def test_a_disk_that_fails_costs_no_request_anything(directory):
    store = open_answers(directory)
    store.put([key(1)], ids_of(1), owner_tag("t", "s"))
    store.flush()

    def failing(*_, **__):
        raise lmdb.DiskError("injected")

    with tables_that(write=failing):
        store.put([key(2)], ids_of(2))
        store.flush()
        assert store.find_ids([[key(1)], [key(2)]]) == [ids_of(1), ids_of(2)]
        assert not store.forget_owner(owner_tag("t", "s"))
        assert store.find_ids([[key(1)], [key(2)]]) == [None, ids_of(2)]  # not on disk's word
        with tables_that(answer_of=failing):
            assert store.find_ids([[key(1)], [key(3)]]) == [None, None]
        assert store.stats()["failed"] == 3 and store.stats()["failing"] == "injected"
    store.put([key(3)], ids_of(3))
    store.flush()
    assert store.find_ids([[key(1)], [key(2)], [key(3)]]) == [None, ids_of(2), ids_of(3)]
    assert store._forgotten == []  # the deletion was made up for
    store.close()


def test_what_a_full_disk_refused_is_stored_when_there_is_room_again(directory):
    store = open_answers(directory)
    with largest_file(1 << 16):
        for number in range(4):
            store.put([key(number)], ids_of(number, 20_000))
            store.flush()
        assert store.stats()["failing"] is not None and store.stats()["committed"] == 0
    store.put([key(4)], ids_of(4))
    store.flush()
    stats = store.stats()
    assert (stats["failing"], stats["committed"], stats["dropped"]) == (None, 5, 0)
    store.close()
    again = open_answers(directory)
    assert again.find_ids([[key(number)] for number in range(4)]) == [ids_of(number, 20_000) for number in range(4)]
    again.close()


def test_who_waits_at_once_shares_a_commit(directory):
    store, groups, write = open_answers(directory), [], AnswerTables.write
    begun, go_on = threading.Event(), threading.Event()

    def slow(tables, answers, forgotten):
        groups.append(len(answers))
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return write(tables, answers, forgotten)

    def commit(number: int) -> None:
        store.put([key(number)], ids_of(number))
        store.flush()
        assert store.stats()["committed"] >= 1

    def put_others() -> None:
        assert begun.wait(TIMEOUT_S)
        together(*(partial(store.put, [key(number)], ids_of(number)) for number in range(1, 9)))
        go_on.set()
        together(*(store.flush for _ in range(8)))

    with tables_that(write=slow):
        together(partial(commit, 0), put_others)
    assert groups == [1, 8] and store.stats()["committed"] == 9
    store.close()


def test_nobody_waits_for_ever_for_answers_that_cannot_be_written(directory):
    def failing(*_):
        raise ValueError("injected: no error of the disk")

    store = open_answers(directory)
    with tables_that(write=failing):
        store.put([key(1)], ids_of(1))
        waiting = threading.Thread(target=store.flush, daemon=True)
        waiting.start()
        waiting.join(TIMEOUT_S)
        assert not waiting.is_alive() and store.find_ids([[key(1)]]) == [ids_of(1)]
    store.close()


def test_a_file_that_cannot_be_opened_leaves_memory():
    def refused():
        raise StoreError("injected")

    store = AnswerStore(refused)
    store.put([key(1)], ids_of(1))
    store.flush()
    assert store.find_ids([[key(1)]]) == [ids_of(1)]
    assert (store.stats()["failed"], store.stats()["failing"]) == (1, "injected")
    store.close()


def test_many_threads(store):
    def work(name: int) -> None:
        for number in range(name * 1000, name * 1000 + 60):
            store.put([key(number)], ids_of(number), owner_tag("t", str(name)))
            assert store.find_ids([[key(number)]]) == [ids_of(number)]
        assert name != 3 or store.forget_owner(owner_tag("t", "3"))

    together(*(partial(work, name) for name in range(4)))
    store.flush()
    assert store.stats()["answers"] == 180
    assert store.find_ids([[key(3001)], [key(2059)]]) == [None, ids_of(2059)]
