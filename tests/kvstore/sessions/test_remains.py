"""Damaged sessions: what is said of them, forks that go on from there, and entries that are made again."""

import json

import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.disk.records import pack, seal
from kvstore.errors import RequestError, SessionDamagedError
from kvstore.service.command.cli import main
from kvstore.sessions import tables as session_tables
from kvstore.sessions.record import Parent, SessionKey
from kvstore.sessions.store import SessionStore, open_sessions
from kvstore.sessions.tables import ASIDE, EXPIRY, HEADS, NAMES, ORDER, REFS, REQUESTS, TURNS, be64
from tests.children.session_child import TENANT, content, create, disk_store, expected, make_turn, talk
from tests.support.faults import largest_file
from tests.support.service.serving import serving
from tests.support.session_tables import tables_of

KEY, BLUE, NEW = (SessionKey(TENANT, name) for name in ("red", "blue", "new"))
SYSTEM = ({"role": "system", "content": "Be red."},)


def fill(store: SessionStore) -> SessionStore:
    """Five turns of one session, and another one that shares nothing with it."""
    create(store, KEY, SYSTEM, b"f" * 32, "model", ttl_s=1e6).wait()
    talk(store, KEY, 5)
    talk(store, BLUE, 2)
    return store


@pytest.fixture
def filled(tmp_path):
    store = fill(disk_store(tmp_path))
    yield store
    store.close()


def spoil(store: SessionStore, table: str, number: int | None = None, is_gone: bool = False) -> None:
    """A bit of the record of this turn of the first session, or of its first one in the table."""
    mine = be64(store.head(KEY).number)
    with tables_of(store) as view:
        key = mine if number is None else mine + number.to_bytes(4, "big")
        place, value = next(
            (place, value) for place, value in view.scan(table)
            if place.endswith((mine, b"red")) or (table in (HEADS, TURNS, REQUESTS) and place.startswith(key))
        )  # fmt: skip
        view.delete(table, place) if is_gone else view.put(table, place, value[:-1] + bytes([value[-1] ^ 4]))


def turns(count: int):
    return [make_turn("red", number) for number in range(1, count + 1)]


def is_whole(store: SessionStore) -> None:
    state = store.load(KEY)
    assert content(state) == expected(turns(5), SYSTEM)
    assert store.head(KEY) == state.head == store.list(TENANT)[1] and state.head.num_turns == 5
    assert [store.turn_of_request(KEY, f"request {number}").number for number in range(1, 6)] == [1, 2, 3, 4, 5]
    assert store.check().problems == () and store.stats()["damaged"] == 0


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("number", "whole"),
    [(4, "of its 5 turns, 1 to 3, 5 are whole; a fork at turn 3 goes on from there"),
     (2, "1, 3 to 5 are whole; a fork at turn 1"), (5, "1 to 4 are whole; a fork at turn 4")],
)  # fmt: skip
def test_a_fork_goes_on_before_a_damaged_turn(filled, number, whole, is_gone):
    spoil(filled, TURNS, number, is_gone)
    with pytest.raises(SessionDamagedError, match="red is damaged") as caught:
        filled.load(KEY)
    assert whole in str(caught.value) and "\n" not in str(caught.value)
    for turn in (None, number):
        with pytest.raises(SessionDamagedError, match="are whole"):
            filled.fork(KEY, turn, NEW).wait()
    assert filled.stats()["damaged"] == 1
    head = filled.fork(KEY, number - 1, NEW).wait()
    assert content(filled.load(NEW)) == expected(turns(number - 1), SYSTEM)
    assert (head.parent, head.model, head.fingerprint) == (Parent("red", number - 1), "model", b"f" * 32)
    assert talk(filled, NEW, number) and filled.stats()["damaged"] == 1, "nothing of it is gone"
    assert set(filled.delete(KEY).wait().block_ids) >= {b for n in range(number + 1, 6) for b in turns(n)[-1].chain}
    assert filled.check().problems == () and filled.stats()["damaged"] == 0


def test_without_its_first_turn_a_session_goes_on_nowhere(filled):
    spoil(filled, TURNS, 1)
    with pytest.raises(SessionDamagedError, match="2 to 5 are whole; no fork goes on without turn 1"):
        filled.load(KEY)
    with pytest.raises(SessionDamagedError):
        filled.fork(KEY, 5, NEW).wait()
    assert filled.turn(KEY, 2) == turns(2)[1] and filled.delete(KEY).wait() is not None


def test_a_fork_goes_on_from_a_session_without_its_head(filled):
    spoil(filled, HEADS)
    with pytest.raises(SessionDamagedError, match="of its 5 turns, 1 to 5 are whole; a fork at turn 5"):
        filled.load(KEY)
    assert filled.fork(KEY, 5, NEW).wait().title.startswith("question 1 of red")
    assert content(filled.load(NEW))[1:] == expected(turns(5))[1:]
    assert filled.load(NEW).messages == expected(turns(5))[0], "its system prompt is gone with the head"
    with pytest.raises(SessionDamagedError):
        filled.fork(KEY, 6, SessionKey(TENANT, "newer")).wait()


def test_there_is_no_such_turn_or_session(filled):
    for turn in (-1, 6):
        with pytest.raises(RequestError, match=f"turn is {turn}; session red has 5 turns") as caught:
            filled.fork(KEY, turn, NEW).wait()
        assert caught.value.param == "turn"


@pytest.mark.parametrize(
    ("table", "is_gone"),
    [(NAMES, False), (REQUESTS, False), *((table, True) for table in (NAMES, ORDER, EXPIRY, REFS, REQUESTS))],
)
def test_what_leads_to_a_whole_session_is_made_again(store, table, is_gone):
    fill(store)
    spoil(store, table, is_gone=is_gone)
    if not is_gone:
        with pytest.raises(
            SessionDamagedError, match="all its turns are whole; `kvstore verify` makes again what leads"
        ):
            [store.turn_of_request(KEY, f"request {number}") for number in range(1, 6)]
        assert store.stats()["damaged"] == 1
    problems = store.check().problems
    assert f"session red lacks 1 of its entries in '{table}'" in problems
    assert problems[-1] == "the entries that whole sessions lacked are made again"
    is_whole(store)


def test_what_the_disk_refuses_is_not_said_to_be_made_again(filled):
    spoil(filled, ORDER, is_gone=True)
    with largest_file(1 << 13):
        assert "lack cannot be made again: not stored, the disk failed" in filled.check().problems[-1]
    assert len(filled.check().problems) == 2
    is_whole(filled)


@pytest.mark.parametrize("change", [create, SessionStore.delete])
def test_a_change_that_damage_refuses_says_what_to_do(filled, change):
    spoil(filled, NAMES)
    with pytest.raises(SessionDamagedError, match="`kvstore verify`"):
        change(filled, KEY).wait()
    filled.check()
    assert filled.delete(KEY).wait() is not None and not filled.exists(KEY)


def test_an_id_that_leads_to_anothers_session_takes_nothing_of_it(filled):
    with tables_of(filled) as view:
        mine = session_tables.name_key(KEY)
        view.put(NAMES, mine, seal(NAMES, mine, pack(session_tables.number_of(view, BLUE))))
    with pytest.raises(SessionDamagedError, match="all its turns are whole"):
        filled.load(KEY)
    filled.fork(KEY, 5, NEW).wait()
    assert content(filled.load(NEW)) == expected(turns(5), SYSTEM)
    filled.delete(NEW).wait()
    filled.check()
    assert content(filled.load(KEY)) == expected(turns(5), SYSTEM)
    assert content(filled.load(BLUE)) == expected([make_turn("blue", n) for n in (1, 2)])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_session_that_was_begun_under_a_lost_id_keeps_it(filled, is_damaged):
    """Until it is deleted; the one that had the id before is told of meanwhile."""
    spoil(filled, NAMES, is_gone=True)
    assert filled.load(KEY) is None
    talk(filled, KEY, 1)
    if is_damaged:
        with tables_of(filled) as view:
            view.put(HEADS, be64(session_tables.number_of(view, KEY)), b"nonsense")
    for _ in range(2):
        assert "session red is damaged (its id leads to another session)" in filled.check().problems
    filled.delete(KEY).wait()
    filled.check()
    assert content(filled.load(KEY)) == expected(turns(5), SYSTEM)


def test_what_an_earlier_version_set_aside_goes_with_its_session(filled, on_disk, tmp_path):
    """Its `repair` kept turns there, each with its place before it."""
    number, value = be64(filled.head(KEY).number), b"\x0c" + be64(9) + b"\0\0\0\4" + b"what was said"
    with tables_of(filled) as view:
        view.put(ASIDE, number + bytes(4), value)
    filled.close()
    store = on_disk()
    store.compact()
    assert store.check().problems == () and content(store.load(KEY)) == expected(turns(5), SYSTEM)
    with tables_of(store) as view:
        assert list(view.scan(ASIDE)) == [(number + bytes(4), value)]
    store.delete(KEY).wait()
    store.compact()
    assert b"what was said" not in (tmp_path / "sessions" / "data.mdb").read_bytes()


def test_offline(tmp_path, capsys):
    with StoreDirectory.open(tmp_path) as directory:
        sessions = open_sessions(directory)
        talk(sessions, KEY, 3)
        number = sessions.head(KEY).number
        spoil(sessions, ORDER, is_gone=True)
        talk(sessions, BLUE, 2)
        with tables_of(sessions) as view:
            view.put(TURNS, be64(number + 1) + b"\0\0\0\2", b"nonsense")
        sessions.close()
    flags = ["--store", str(tmp_path)]
    assert main(["sessions", "show", "blue", "--tenant", TENANT, *flags]) == 1
    assert "of its 2 turns, 1 are whole; a fork at turn 1 goes on from there" in capsys.readouterr().err
    assert main(["sessions", "--tenant", TENANT, *flags]) == 0 and "red" not in capsys.readouterr().out
    for is_made_again in (True, False):
        assert main(["verify", "--json", *flags]) == 4
        problems = json.loads(capsys.readouterr().out)["sessions"]["problems"]
        assert ("the entries that whole sessions lacked are made again" in problems) == is_made_again
    assert main(["sessions", "--tenant", TENANT, *flags]) == 0 and "red" in capsys.readouterr().out
    assert main(["sessions", "delete", "blue", "--tenant", TENANT, *flags]) == 0
    assert main(["verify", *flags]) == 0
    assert main(["sessions", "repair", "red", "--tenant", TENANT, *flags]) == 2


def test_over_http_a_fork_goes_on(tmp_path):
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "disk": "64MiB", "path": tmp_path / "store"}
    with serving(engine={"cache_tiers": tiers}) as server:
        name = None
        for text in ("One", "Two", "Three"):
            named = {} if name is None else {"session_id": name}
            name = server.post("/chat", {"message": text, "max_tokens": 3, **named}).json()["session_id"]
        sessions, key = server.engine.sessions, SessionKey("", name)
        with tables_of(sessions) as view:
            place, _ = list(view.scan(TURNS))[2]
            view.put(TURNS, place, b"nonsense")
        server.engine.chats.drop(key)  # as after a restart
        for reply in (
            server.get(f"/sessions/{name}"),
            server.post("/chat", {"message": "Four", "session_id": name}),
            server.post(f"/sessions/{name}/fork"),
        ):
            assert (reply.status, reply.error["code"]) == (409, "session_damaged")
            assert reply.headers["x-should-retry"] == "false"
            assert "1 to 2 are whole; a fork at turn 2" in reply.error["message"]
            assert str(tmp_path) not in reply.error["message"]
        assert server.get("/health").json() == {"status": "degraded", "reasons": ["sessions_damaged"]}
        with tables_of(sessions) as view:
            view.put(HEADS, place[:8], b"nonsense")
        fork = server.post(f"/sessions/{name}/fork", {"turn": 2}).json()
        assert fork["turns"] == 2
        again = server.post("/chat", {"message": "Three", "max_tokens": 3, "session_id": fork["id"]}).json()
        assert again["turn"] == 3 and again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
        assert server.engine.admin.fork_session(name, 1, "by-library").num_turns == 1
        assert server.request("DELETE", f"/sessions/{name}").status == 200
        assert server.get("/health").json()["status"] == "ok"
