"""Looking after a store of sessions: what has expired, deletions to be finished, what is lost, and counts."""

import shutil

import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.errors import SessionNotFoundError, StoreError
from kvstore.sessions.marker import MARKER_NAME
from kvstore.sessions.record import MessageEdit, SessionKey, TurnRecord
from kvstore.sessions.store import SessionStore, open_sessions
from kvstore.sessions.tables import HEADS, REQUESTS, TURNS
from tests.children.session_child import TENANT, Clock, block_id, content, create, expected, make_turn, talk
from tests.support.redis_server import RedisServer
from tests.support.session_tables import tables_of
from tests.support.shared_sessions import DURABLE, shared_store

KEY = SessionKey(TENANT, "red")


def counts(store, *names):
    found = store.stats()
    return tuple(found[name] for name in names)


def test_deletion_names_the_blocks_that_nobody_else_has(store):
    new = SessionKey(TENANT, "fork")
    turns = talk(store, KEY, 6)
    store.fork(KEY, 2, new).wait()
    mine = {b for turn in turns[2:] for b in turn.chain}  # also those before the rebase of turn 5
    assert (store.unshared_blocks_of(KEY), store.unshared_blocks_of(new)) == (mine, set())
    first = store.delete(KEY).wait()
    assert store.unshared_blocks_of(KEY) == set()
    assert (set(first.block_ids), first.key) == (mine, KEY)
    assert content(store.load(new)) == expected(turns[:2])
    second = store.delete(new).wait()
    assert set(second.block_ids) == {b for turn in turns[:2] for b in turn.chain}
    assert store.pending_deletions() == [first, second]
    store.finish_deletion(first.number).wait()
    assert store.pending_deletions() == [second]
    assert [store.stats()[name] for name in ("sessions", "turns", "refs")] == [0, 0, 0]
    assert (store.list(TENANT), store.expired(1e12)) == ([], [])


@pytest.mark.parametrize("is_shared", [False, True])
def test_forgetting_rewrites_turns_and_names_the_blocks_that_nobody_else_has(store, is_shared):
    key, new = SessionKey(TENANT, "red"), SessionKey(TENANT, "fork")
    first, *later = talk(store, key, 4)
    if is_shared:
        store.fork(key, 3, new).wait()
    number, kept = store.head(key).number, [first.chain[0], block_id("computed anew")]
    after = TurnRecord(5, (), (7, 8), (*first.chain, kept[1]), "rebase")
    edits = [MessageEdit(2, 0), MessageEdit(3, 1, {"role": "assistant", "content": "no"})]
    head = store.commit_turn(key, after, session_number=number, forgotten=edits).wait()
    (tombstone,) = store.pending_deletions()
    doomed = {block for turn in (later[2:] if is_shared else later) for block in turn.chain}
    assert (tombstone.key, set(tombstone.block_ids)) == (key, doomed)
    state = store.load(key)
    said = [*first.messages, later[0].messages[1], later[1].messages[0], edits[1].message, *later[2].messages]
    assert (state.messages, state.token_ids, state.chain) == (said, [7, 8], list(after.chain))
    assert (head.num_turns, head.num_tokens, head.title) == (5, 2, store.head(key).title)
    assert store.load(key, 3).token_ids == [] and store.load(key, 1).token_ids == list(first.token_ids)
    if is_shared:
        assert store.load(new).messages == [message for turn in (first, *later[:2]) for message in turn.messages]
    store.finish_deletion(tombstone.number).wait()
    assert store.delete(key).wait() is not None


def test_forgetting_for_a_session_that_went_on_changes_nothing(store):
    key = SessionKey(TENANT, "red")
    talk(store, key, 2)
    number = store.head(key).number
    for turn, given in ((4, number), (2, number), (3, number + 1)):
        after = TurnRecord(turn, (), (), (), "rebase")
        with pytest.raises(StoreError):
            store.commit_turn(key, after, session_number=given, forgotten=[MessageEdit(1, 0)]).wait()
    assert content(store.load(key)) == expected([make_turn("red", n) for n in (1, 2)])
    assert list(store.pending_deletions()) == []


def test_sessions_expire_after_their_last_turn(store):
    short, long = SessionKey(TENANT, "short"), SessionKey(TENANT, "long")
    for key, ttl_s in ((KEY, None), (long, 1000), (short, 10)):
        create(store, key, ttl_s=ttl_s).wait()
    at = {key: store.head(key).expires_s for key in (short, long)}
    assert store.expired(at[short] - 0.5) == []
    assert store.expired(at[short]) == [short]
    assert store.expired(1e9) == [short, long]
    assert store.expired(1e9, limit=1) == [short]
    talk(store, short, 1)
    assert store.expired(at[short]) == []
    assert store.set_ttl(long, None).wait().expires_s is None
    store.delete(short).wait()
    assert store.expired(1e9) == []


def test_who_reads_finds_no_session_that_has_expired(store):
    """Nor does anybody go on with it, but for a turn that began before. Its id is free, and its blocks are pending."""
    old, new = talk(store, KEY, 2), SessionKey(TENANT, "new")
    store.fork(KEY, 2, new).wait()
    number = store.set_ttl(KEY, 1e-6).wait().number
    assert store.head(new) in store.list(TENANT) and len(store.list(TENANT)) == 1
    reads = (store.head, store.load, lambda key: store.turn(key, 1), lambda key: store.turns(key, 0, 9))
    assert [read(KEY) for read in (*reads, lambda key: store.turn_of_request(key, "request 1"))] == [None] * 5
    for change in (
        lambda: store.set_ttl(KEY, None), lambda: store.label(KEY, "a", None), lambda: store.fork(KEY, 1, KEY),
    ):  # fmt: skip
        with pytest.raises(SessionNotFoundError):
            change().wait()
    assert store.commit_turn(KEY, make_turn("red", 3), session_number=number).wait().num_turns == 3
    store.delete(new).wait()
    store.finish_deletion(store.pending_deletions()[0].number).wait()
    assert store.commit_turn(KEY, make_turn("red", 1)).wait().number != number
    assert content(store.load(KEY)) == expected([make_turn("red", 1)])
    (tombstone,) = store.pending_deletions()
    assert {*tombstone.block_ids} == {b for turn in (*old[1:], make_turn("red", 3)) for b in turn.chain} - {
        *make_turn("red", 1).chain
    } | {*old[0].chain}
    with pytest.raises(StoreError, match="deleted meanwhile"):
        store.commit_turn(KEY, make_turn("red", 2), session_number=number).wait()


def test_counts_are_of_what_is_stored(store):
    new = SessionKey(TENANT, "fork")
    turns = talk(store, KEY, 4)
    store.fork(KEY, 2, new).wait()
    num_blocks = sum(len(turn.chain) for turn in turns[:2])
    num_refs = num_blocks + sum(len(turn.chain) for turn in turns)
    assert counts(store, "sessions", "turns", "pending_deletions", "damaged", "missing") == (2, 6, 0, 0, 0)
    assert store.stats()["refs"] in (num_refs, num_refs - num_blocks)
    store.delete(KEY).wait()
    assert counts(store, "sessions", "turns", "pending_deletions") == (1, 2, 1)
    assert store.stats()["bytes"] >= 0


def test_a_damaged_session_whose_records_come_back_is_not_counted_any_more(store):
    talk(store, KEY, 2)
    for table in (HEADS, TURNS, REQUESTS):
        with tables_of(store) as view:
            [(key, value), *_] = view.scan(table)
            view.put(table, key, b"nonsense")
        with pytest.raises(StoreError):
            store.turn_of_request(KEY, "request 1")
        assert counts(store, "damaged") == counts(store, "damaged") == (1,), table
        with tables_of(store) as view:
            view.put(table, key, value)
        assert counts(store, "damaged") == (0,), table


def test_a_server_that_shares_nothing_renews_nothing():
    store = SessionStore(None, Clock())
    store.renew()
    assert counts(store, "commits", "queued") == (0, 0)
    store.close()


def test_counts_stay_as_they_were_while_redis_is_away(tmp_path):
    redis = RedisServer(tmp_path, *DURABLE)
    store = shared_store(redis)
    store.renew()
    talk(store, KEY, 2)
    before = store.stats()
    assert (before["sessions"], before["turns"]) == (1, 2)
    redis.kill()
    found = store.stats()
    assert {name: found[name] for name in ("sessions", "turns", "refs", "bytes")} == {
        name: before[name] for name in ("sessions", "turns", "refs", "bytes")
    }
    with pytest.raises(StoreError):
        store.check()
    store.close()


@pytest.fixture
def lost(tmp_path):
    """A store of sessions whose file is gone since it was closed, and the path of its marker."""
    with StoreDirectory.open(tmp_path / "store") as directory:
        sessions = open_sessions(directory)
        talk(sessions, KEY, 1)
        assert sessions.accept_loss() is False, "there is nothing to give up"
        sessions.close()
    shutil.rmtree(tmp_path / "store" / "sessions")
    with StoreDirectory.open(tmp_path / "store") as directory:
        sessions = open_sessions(directory)
        yield sessions, tmp_path / "store" / MARKER_NAME
        sessions.close()


def test_what_is_missing_is_told_beside_other_problems_until_it_is_given_up(lost):
    sessions, marker = lost
    talk(sessions, KEY, 1)
    with tables_of(sessions) as view:
        [(key, _)] = view.scan(TURNS)
        view.put(TURNS, key, b"nonsense")
    missing, *others = sessions.check().problems
    assert "are not there" in missing and others and counts(sessions, "missing", "sessions") == (1, 1)
    name = marker.read_text()
    assert sessions.accept_loss() is True
    assert sessions.check().problems == tuple(others) and counts(sessions, "missing") == (0,)
    assert marker.read_text() != name
    assert sessions.accept_loss() is False


def test_a_loss_that_cannot_be_given_up_stays_one(lost):
    sessions, marker = lost
    marker.unlink()
    marker.mkdir()
    with pytest.raises(StoreError, match="marker of the sessions cannot be removed"):
        sessions.accept_loss()
    assert counts(sessions, "missing") == (1,)
    marker.rmdir()
    assert sessions.accept_loss() is True and marker.is_file()


def test_a_store_without_a_marker_has_lost_nothing():
    store = SessionStore(None, Clock())
    assert (store.accept_loss(), counts(store, "missing"), store.check().problems) == (False, (0,), ())
    store.close()
