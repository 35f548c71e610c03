"""Groups of changes: one transaction each, a refusal that costs no other change, and what a full disk leaves whole."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.errors import DegradedError, StoreError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.storage import DiskTables, SessionTransactions
from kvstore.sessions.tables import COUNTERS
from tests.children.session_child import TENANT, content, expected, make_turn, open_file, talk
from tests.support.faults import largest_file
from tests.support.waiting import TIMEOUT_S, wait_until

KEY = SessionKey(TENANT, "red")


@pytest.fixture
def outcomes():
    return []


@pytest.fixture
def transactions(tmp_path, outcomes):
    one = SessionTransactions(DiskTables(lambda: open_file(tmp_path / "sessions")), outcomes.append)
    yield one
    one.close()


def put(name: bytes, value: bytes = b"x"):
    def change(view) -> bytes:
        view.put(COUNTERS, name, value)
        return name

    return change


def refuse(view) -> None:
    raise StoreError("refused")


def names(transactions) -> list[bytes]:
    return transactions.read(lambda view: [name for name, _ in view.scan(COUNTERS)])


@contextmanager
def one_group(transactions) -> Iterator[None]:
    """What is submitted in here waits for the same commit."""
    entered, go = threading.Event(), threading.Event()
    first = transactions.submit(lambda _: (entered.set(), go.wait(TIMEOUT_S)))
    entered.wait(TIMEOUT_S)
    yield
    go.set()
    first.wait(TIMEOUT_S)


def counts(transactions, *which: str) -> tuple[int, ...]:
    found = transactions.stats()
    return tuple(found[name] for name in which)


def test_what_waits_together_is_one_transaction_and_a_refusal_costs_no_other_change(transactions, outcomes):
    with one_group(transactions):
        tickets = [transactions.submit(change) for change in (put(b"a"), refuse, put(b"b"))]
        assert transactions.stats()["queued"] == 3
    assert (tickets[0].wait(TIMEOUT_S), tickets[2].wait(TIMEOUT_S), names(transactions)) == (b"a", b"b", [b"a", b"b"])
    with pytest.raises(StoreError, match="refused"):
        tickets[1].wait(TIMEOUT_S)
    found = counts(transactions, "commits", "committed", "refused", "failed", "grown", "largest_group", "queued")
    assert found == (2, 3, 1, 0, 0, 3, 0)
    assert [len(group) for group in outcomes] == [1, 3] and outcomes[1][::2] == [b"a", b"b"]


def test_a_compaction_keeps_its_place_among_the_changes(transactions, tmp_path):
    with one_group(transactions):
        thread = threading.Thread(target=transactions.compact)
        transactions.submit(put(b"a"))
        thread.start()
        wait_until(lambda: transactions.stats()["queued"] == 2)
        last = transactions.submit(put(b"b"))
    thread.join(TIMEOUT_S)
    assert last.wait(TIMEOUT_S) == b"b" and names(transactions) == [b"a", b"b"]
    assert counts(transactions, "commits", "failed", "largest_group") == (4, 0, 1)


def test_the_map_grows_when_it_is_full(on_disk):
    store = on_disk()
    turns = []
    for number in range(1, 40):
        turns.append(make_turn("red", number, messages=[{"role": "user", "content": f"{number}" * 40_000}]))
        store.commit_turn(KEY, turns[-1]).wait()
    assert store.stats()["grown"] >= 2
    assert content(store.load(KEY)) == expected(turns)
    store = on_disk()
    assert content(store.load(KEY)) == expected(turns)
    talk(store, KEY, 41)


def test_of_a_group_only_what_is_too_large_for_the_disk_fails(transactions, outcomes):
    transactions.submit(put(b"before")).wait(TIMEOUT_S)
    with largest_file(1 << 18):
        with one_group(transactions):
            changes = (put(b"a"), put(b"large", b"v" * 500_000), put(b"b"))
            tickets = [transactions.submit(change) for change in changes]
        with pytest.raises(DegradedError, match="disk failed"):
            tickets[1].wait(TIMEOUT_S)
        assert (tickets[0].wait(TIMEOUT_S), tickets[2].wait(TIMEOUT_S)) == (b"a", b"b")
        assert names(transactions) == [b"a", b"b", b"before"]
        assert counts(transactions, "failed", "committed") == (1, 4)
    transactions.submit(put(b"large", b"v" * 500_000)).wait(TIMEOUT_S)
    assert names(transactions) == [b"a", b"b", b"before", b"large"]
