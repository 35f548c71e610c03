"""Damaged sessions: what is said of them, what a repair keeps, and that the rest stays until the session is deleted."""

import pytest

from kvstore.admin.offline import OfflineStore
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.records import pack, seal
from kvstore.errors import SessionDamagedError
from kvstore.service.command.cli import main
from kvstore.sessions import tables as session_tables
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore, open_sessions
from kvstore.sessions.tables import HEADS, NAMES, ORDER, REFS, REQUESTS, TURNS, be64
from tests.children.session_child import TENANT, content, create, disk_store, expected, make_turn, talk
from tests.support.service.serving import serving
from tests.support.session_tables import tables_of

KEY = SessionKey(TENANT, "red")
SYSTEM = ({"role": "system", "content": "Be red."},)


@pytest.fixture
def store(tmp_path):
    """With five turns of one session, and another one that shares nothing with it."""
    found = disk_store(tmp_path)
    create(found, KEY, SYSTEM, b"f" * 32, "model", ttl_s=1e6).wait()
    talk(found, KEY, 5)
    talk(found, SessionKey(TENANT, "blue"), 2)
    yield found
    found.close()


def spoil(store: SessionStore, table: str, number: int | None = None, is_gone: bool = False) -> None:
    """A bit of the record of this turn, or of the first one in the table."""
    with tables_of(store) as view:
        place, value = next(
            (place, value) for place, value in view.scan(table)
            if number is None or place == be64(1) + number.to_bytes(4, "big")
        )  # fmt: skip
        view.delete(table, place) if is_gone else view.put(table, place, value[:-1] + bytes([value[-1] ^ 4]))


def turns(count: int):
    return [make_turn("red", number) for number in range(1, count + 1)]


def is_whole(store: SessionStore, num_turns: int) -> None:
    state = store.load(KEY)
    assert content(state) == expected(turns(num_turns), SYSTEM)
    assert store.upkeep.check().problems == () and store.stats()["damaged"] == 0
    assert store.head(KEY) == state.head and state.head.num_turns == num_turns


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("number", "whole"),
    [(4, "of its 5 turns, 1 to 3, 5 are whole; a fork at turn 3"), (2, "1, 3 to 5 are whole; a fork at turn 1"),
     (5, "1 to 4 are whole"), (1, "2 to 5 are whole; `kvstore sessions repair red --tenant tenant` begins it anew")],
)  # fmt: skip
def test_a_damaged_turn(store, number, whole, is_gone):
    spoil(store, TURNS, number, is_gone)
    with pytest.raises(SessionDamagedError, match="red is damaged") as caught:
        store.load(KEY)
    assert whole in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SessionDamagedError, match="are whole"):
        store.fork(KEY, None, SessionKey(TENANT, "green")).wait()
    assert store.stats()["damaged"] == 1
    before = store.head(KEY)
    found = store.upkeep.repair(KEY).wait()
    is_whole(store, number - 1)
    assert found.num_aside == 5 - number + (not is_gone)
    head = store.head(KEY)
    assert (head.created_s, head.ttl_s, head.model, head.fingerprint) == (
        before.created_s, before.ttl_s, before.model, before.fingerprint,
    )  # fmt: skip
    assert [(one.number, one.messages and [*one.messages]) for one in store.upkeep.aside(KEY)] == [
        (n, None if n == number else [*make_turn("red", n).messages])
        for n in range(number, 6) if n != number or not is_gone
    ]  # fmt: skip
    gone = set(found.tombstone.block_ids)
    assert gone == {block for n in range(number, 6) for block in make_turn("red", n).chain}
    assert store.upkeep.pending_deletions() == [found.tombstone]


def test_it_goes_on_after_a_repair_and_a_second_one(store):
    spoil(store, TURNS, 4)
    assert store.upkeep.repair(KEY).wait().num_aside == 2
    for number in (4, 5):
        store.commit_turn(KEY, make_turn("red", number)).wait()
    is_whole(store, 5)
    assert store.turn_of_request(KEY, "request 2").number == 2
    assert store.upkeep.repair(KEY).wait().tombstone is None, "nothing is damaged"
    number = store.head(KEY).number
    with tables_of(store) as view:
        view.put(TURNS, be64(number) + b"\0\0\0\5", b"nonsense")
    assert store.upkeep.repair(KEY).wait().num_aside == 1
    is_whole(store, 4)
    assert [one.number for one in store.upkeep.aside(KEY)] == [4, 5, 5]
    store.upkeep.compact()
    assert len(store.upkeep.aside(KEY)) == 3
    store.delete(KEY).wait()
    with tables_of(store) as view:
        assert view.count(session_tables.ASIDE) == 0, "their text goes with the session"


def test_a_stale_turn_is_refused_after_a_repair(store):
    number = store.head(KEY).number
    spoil(store, TURNS, 5)
    store.upkeep.repair(KEY).wait()
    with pytest.raises(Exception, match="deleted meanwhile"):
        store.commit_turn(KEY, make_turn("red", 6), session_number=number).wait()


@pytest.mark.parametrize("table", [HEADS, NAMES, REQUESTS])
def test_what_leads_to_the_turns(store, table):
    if table == NAMES:
        store.delete(SessionKey(TENANT, "blue")).wait()  # the order of names is another one
    spoil(store, table)
    with pytest.raises(SessionDamagedError, match="of its 5 turns, 1 to 5 are whole"):
        store.turn_of_request(KEY, "request 1")
        for number in range(2, 6):
            store.turn_of_request(KEY, f"request {number}")
    assert store.upkeep.repair(KEY).wait().num_aside == 0
    state = store.load(KEY)
    assert content(state)[1:] == expected(turns(5))[1:] and state.messages[-10:] == expected(turns(5))[0]
    assert store.upkeep.check().problems == ()


@pytest.mark.parametrize("table", [NAMES, ORDER, REFS, REQUESTS])
def test_an_entry_that_is_gone_is_made_again(store, table):
    if table == NAMES:
        store.delete(SessionKey(TENANT, "blue")).wait()
    spoil(store, table, is_gone=True)
    assert any("red" in problem for problem in store.upkeep.check().problems)
    found = store.upkeep.repair(KEY).wait()
    assert (found.head.num_turns, found.num_aside) == (5, 0)
    is_whole(store, 5)
    assert store.turn_of_request(KEY, "request 1").number == 1
    assert found.head.key in [head.key for head in store.list(TENANT)]


@pytest.mark.parametrize("change", [create, SessionStore.delete])
def test_a_change_that_damage_refuses_says_what_to_do(store, change):
    store.delete(SessionKey(TENANT, "blue")).wait()
    spoil(store, NAMES)
    with pytest.raises(SessionDamagedError, match="`kvstore sessions repair red --tenant tenant` keeps turns 1 to 5"):
        change(store, KEY).wait()
    store.upkeep.repair(KEY).wait()
    assert store.delete(KEY).wait() is not None and not store.exists(KEY)


def test_an_id_that_leads_to_anothers_session_takes_nothing_of_it(store):
    blue = SessionKey(TENANT, "blue")

    with tables_of(store) as view:
        (theirs, mine) = (tables_place(view, name) for name in ("blue", "red"))
        number = pack(session_tables.number_of(view, blue))
        assert theirs != mine
        view.put(NAMES, mine, seal(NAMES, mine, number))
    with pytest.raises(SessionDamagedError, match="of its 5 turns, 1 to 5 are whole"):
        store.load(KEY)
    assert store.upkeep.repair(KEY).wait().head.num_turns == 5
    is_whole(store, 5)
    assert content(store.load(blue)) == expected([make_turn("blue", n) for n in (1, 2)])


def tables_place(view, name: str) -> bytes:
    return next(place for place, _ in view.scan(NAMES) if place.endswith(name.encode()))


def test_there_is_no_such_session(store):
    assert store.upkeep.repair(SessionKey(TENANT, "none")).wait() is None
    assert store.upkeep.repair(SessionKey("", "red")).wait() is None


def test_offline(tmp_path, capsys):
    with StoreDirectory.open(tmp_path) as directory:
        sessions = open_sessions(directory)
        talk(sessions, KEY, 3)
        spoil(sessions, TURNS, 2)
        sessions.close()
    flags = ["--tenant", TENANT, "--store", str(tmp_path)]
    assert main(["sessions", "show", "red", *flags]) == 1
    assert "of its 3 turns, 1, 3 are whole" in capsys.readouterr().err
    assert main(["verify", *flags[2:]]) == 4
    assert main(["sessions", "repair", "red", *flags]) == 0
    assert "its first 1 turn; 2 more are set aside" in capsys.readouterr().out
    assert main(["sessions", "show", "red", *flags]) == 0
    shown = capsys.readouterr().out
    assert "turn 2 (it cannot be read)" in shown and "question 3 of red" in shown
    assert main(["verify", *flags[2:]]) == 0
    assert main(["sessions", "repair", "red", *flags]) == 0 and "is whole" in capsys.readouterr().out
    assert main(["sessions", "repair", "none", *flags]) == 1
    with OfflineStore(tmp_path) as opened:
        assert opened.sessions.upkeep.pending_deletions() == []


def test_over_http_with_the_owner_repairing(tmp_path, capsys):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path / "store"}
    with serving(engine={"cache_tiers": tiers}) as server:
        name = None
        for text in ("One", "Two", "Three"):
            named = {} if name is None else {"session_id": name}
            name = server.post("/chat", {"message": text, "max_tokens": 3, **named}).json()["session_id"]
        spoil(server.engine.sessions, TURNS, 3)
        key = SessionKey("", name)
        server.engine.chats.drop(key)  # as after a restart
        for reply in (server.get(f"/sessions/{name}"), server.post("/chat", {"message": "Four", "session_id": name})):
            assert (reply.status, reply.error["code"]) == (409, "session_damaged")
            assert reply.headers["x-should-retry"] == "false"
            assert "1 to 2 are whole" in reply.error["message"] and str(tmp_path) not in reply.error["message"]
        assert server.get("/health").json() == {"status": "degraded", "reasons": ["sessions_damaged"]}
        assert server.post(f"/sessions/{name}/fork", {"turn": 2}).json()["turns"] == 2
        assert main(["sessions", "repair", name, "--store", str(tmp_path / "store")]) == 0
        assert "its first 2 turns; 1 more is set aside" in capsys.readouterr().out
        assert server.get("/health").json()["status"] == "ok"
        assert server.get(f"/sessions/{name}").json()["turns"] == 2
        again = server.post("/chat", {"message": "Three", "max_tokens": 3, "session_id": name}).json()
        assert again["turn"] == 3 and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
