"""The tables of sessions: records that were damaged or moved are told of and shown to nobody, and cost no others."""

import pytest

from kvstore.disk.records import pack, seal
from kvstore.errors import StoreError
from kvstore.sessions import record as session_record
from kvstore.sessions import tables
from kvstore.sessions.record import SessionHead, SessionKey, TurnRecord
from kvstore.sessions.store import SessionStore
from tests.children.session_child import TENANT, Clock, content, create, disk_store, expected, make_turn, talk
from tests.support.session_tables import tables_of

KEY = SessionKey(TENANT, "red")


def test_a_flipped_bit_in_a_record_is_reported(store):
    talk(store, KEY, 3)
    talk(store, SessionKey(TENANT, "green"), 2)
    with tables_of(store) as view:
        place, value = list(view.scan(tables.TURNS))[1]
        view.put(tables.TURNS, place, value[:50] + bytes([value[50] ^ 4]) + value[51:])
    reads = [
        lambda: store.load(KEY), lambda: store.turn(KEY, 2),
        lambda: store.turn_of_request(KEY, "request 2"), lambda: store.fork(KEY, 2, SessionKey(TENANT, "new")).wait(),
    ]  # fmt: skip
    assert store.stats()["damaged"] == 0, "nobody has read it yet"
    for read in reads:
        with pytest.raises(StoreError, match=r"session red is damaged .*checksum"):
            read()
    assert store.damage.numbers == {store.head(KEY).number} and store.stats()["damaged"] == 1
    assert content(store.load(KEY, 1)) == expected([make_turn("red", 1)])
    assert store.load(SessionKey(TENANT, "green")) is not None
    assert any("session red is damaged" in problem for problem in store.check().problems)
    blocks = {b for n in (1, 2, 3) for b in make_turn("red", n).chain}
    assert set(store.delete(KEY).wait().block_ids) == blocks, "a damaged session can be deleted"
    assert store.stats()["damaged"] == 0


def test_damaged_counters_and_tombstones_stop_nobody(store):
    first = create(store, KEY).wait()
    lost, kept = (store.delete(create(store, SessionKey(TENANT, name)).wait().key).wait() for name in ("lost", "kept"))
    with tables_of(store) as view:
        for place in (b"session", b"deletion"):
            view.put(tables.COUNTERS, place, (view.get(tables.COUNTERS, place) or b"")[:-1])
        view.put(tables.TOMBSTONES, tables.be64(lost.number), b"")
    assert create(store, SessionKey(TENANT, "green")).wait().number > first.number + 2
    assert store.delete(SessionKey(TENANT, "green")).wait().number > kept.number
    assert store.pending_deletions()[0] == kept
    assert [problem.partition(" (")[0] for problem in store.check().problems] == [f"deletion {lost.number} is damaged"]
    store.finish_deletion(lost.number).wait()


@pytest.mark.parametrize("table", [tables.NAMES, tables.HEADS, tables.TURNS])
@pytest.mark.parametrize("sealed", [False, True], ids=["moved", "sealed again"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_record_in_anothers_place_is_damaged(tmp_path, kind, table, sealed):
    """Also by somebody who can compute the checksum: a session never shows another's text."""
    store = disk_store(tmp_path) if kind == "disk" else SessionStore(None, Clock())
    foreign = SessionKey("foreign", "green")
    talk(store, foreign, 2)
    talk(store, KEY, 2)
    with tables_of(store) as view:
        places = sorted(view.scan(table))
        if table == tables.NAMES:
            number = tables.number_of(view, foreign)
            theirs = next(value for place, value in places if place.endswith(b"green"))
            mine, payload = next(place for place, _ in places if place.endswith(b"red")), pack(number)
        else:
            theirs, mine = places[0][1], places[-1][0]
            payload = theirs[:-16]
        view.put(table, mine, seal(table, mine, payload) if sealed else theirs)
    with pytest.raises(StoreError, match=r"session red is damaged"):
        store.load(KEY)
    with pytest.raises(StoreError, match=r"session red is damaged"):
        store.commit_turn(KEY, make_turn("red", 3)).wait() if table != tables.TURNS else store.turn(KEY, 2)
    assert all(head.key.tenant == TENANT for head in store.list(TENANT))
    assert content(store.load(foreign)) == expected([make_turn("green", n) for n in (1, 2)])
    assert store.check().problems != ()
    store.close()


def test_a_false_place_in_the_list_shows_nothing(store):
    """Or one flipped bit in a key would show a session to another tenant."""
    talk(store, KEY, 1)
    store.set_ttl(KEY, 10).wait()
    number = tables.be64(store.head(KEY).number)
    false = [
        (tables.ORDER, session_record.digest("other") + b"\1" * 8 + number),
        (tables.ORDER, session_record.digest("other") + b"\1" * 8 + b"\7" * 8),
        (tables.EXPIRY, bytes(8) + number),
    ]
    with tables_of(store) as view:
        for table, place in false:
            view.put(table, place, b"")
    assert (store.list("other"), store.expired(0), store.stats()["damaged"]) == ([], [], 0), "it is whole itself"
    assert [problem[:20] for problem in store.check().problems] == [
        "2 entries in 'order'",
        "1 entries in 'expiry",
    ]
    with tables_of(store) as view:
        for table, place in false:
            view.delete(table, place)


def test_a_seal_holds_for_one_place():
    turn = make_turn("a", 1)
    value = seal("turns", b"key", pack(turn))
    assert session_record.unseal(TurnRecord, "turns", b"key", value, "it") == turn
    wrong = [("heads", b"key", value), ("turns", b"kez", value), ("turns", b"key", b""), ("turn", b"skey", value)]
    for table, key, sealed in wrong:
        with pytest.raises(StoreError, match="it is damaged"):
            session_record.unseal(TurnRecord, table, key, sealed, "it")
    with pytest.raises(StoreError, match="it is damaged"):
        session_record.unseal(SessionHead, "turns", b"key", value, "it")
