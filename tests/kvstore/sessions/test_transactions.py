"""Groups of changes: one transaction each, a refusal that costs no other change, what a full disk leaves whole, and
that nobody waits for ever.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.errors import DegradedError, StoreError
from kvstore.sessions import storage as module
from kvstore.sessions.record import SessionKey
from kvstore.sessions.storage import DiskTables, Transactions
from kvstore.sessions.tables import COUNTERS, TABLES
from tests.children.session_child import TENANT, content, expected, open_file, talk
from tests.support.faults import constants, largest_file
from tests.support.waiting import TIMEOUT_S, wait_until

KEY = SessionKey(TENANT, "red")


@pytest.fixture
def outcomes():
    return []


@pytest.fixture
def transactions(tmp_path, outcomes):
    one = Transactions("it", DiskTables(lambda: open_file(tmp_path / "sessions"), TABLES), outcomes.append)
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
    found = counts(transactions, "commits", "committed", "refused", "failed", "largest_group", "queued")
    assert found == (2, 3, 1, 0, 3, 0)
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


def test_who_comes_during_a_commit_waits_for_the_next_group_and_a_full_queue_makes_wait(transactions, outcomes):
    with constants(module, MAX_QUEUE=2), one_group(transactions):
        thread = threading.Thread(target=lambda: [transactions.submit(put(name)) for name in (b"a", b"b", b"c")])
        thread.start()
        wait_until(lambda: transactions.stats()["queued"] == 2, "a full queue")
        assert thread.is_alive() and names(transactions) == []
    thread.join(TIMEOUT_S)
    transactions.close()
    transactions.close()
    assert [name for group in outcomes[1:] for name in group] == [b"a", b"b", b"c"]
    for call in (lambda: transactions.submit(put(b"d")), lambda: names(transactions)):
        with pytest.raises(StoreError, match="it is closed"):
            call()


def test_what_is_not_urgent_waits_for_what_is_or_for_the_end(transactions, outcomes):
    with constants(module, PAUSE_S=600.0):
        tickets = [transactions.submit(put(name), is_urgent=False) for name in (b"a", b"b")]
        with pytest.raises(StoreError, match="not durable after"):
            tickets[0].wait(0.1)
        assert transactions.submit(put(b"c")).wait(TIMEOUT_S) == b"c"
        assert [ticket.wait(TIMEOUT_S) for ticket in tickets] == [b"a", b"b"] and outcomes == [[b"a", b"b", b"c"]]
        transactions.submit(put(b"d"), is_urgent=False)
        transactions.close()
    assert outcomes[1:] == [[b"d"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_leaves_nobody_waiting(transactions):
    def fail(_) -> None:
        raise ZeroDivisionError("a bug")

    with one_group(transactions):
        tickets = [transactions.submit(change) for change in (put(b"a"), fail, put(b"b"))]
    for ticket in (*tickets, *tickets):
        with pytest.raises(StoreError, match="it stopped after an internal error: ZeroDivisionError"):
            ticket.wait(TIMEOUT_S)
    with pytest.raises(StoreError, match="internal error"):
        transactions.submit(put(b"c"))
    assert names(transactions) == []


def test_the_map_has_room_for_more_than_a_file_takes_at_first(on_disk):
    store = on_disk()
    turns = talk(store, KEY, 20, messages=[{"role": "user", "content": "long " * 800_000}])
    store = on_disk()
    assert content(store.load(KEY)) == expected(turns)
    assert 80_000_000 < store.stats()["bytes"] < 90_000_000


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
