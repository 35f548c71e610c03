"""Sessions: what is stored comes back, on disk and in memory alike; and a random machine against plain dicts."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import RequestError, SessionBusyError, SessionNotFoundError, StoreError
from kvstore.sessions.record import MessageEdit, Parent, SessionKey, TurnRecord
from kvstore.sessions.store import SessionStore
from tests.children.session_child import TENANT, Clock, block_id, content, create, disk_store, expected, make_turn, talk

SYSTEM = [{"role": "system", "content": "be brief"}]
KEY = SessionKey(TENANT, "red")


def test_every_turn_comes_back_and_so_does_the_state_after_it(store):
    create(store, KEY, SYSTEM, b"f" * 32, "a model", ttl_s=50).wait()
    assert content(store.load(KEY)) == (SYSTEM, [], [], None, 0, 0)
    turns = talk(store, KEY, 12)  # turns 5 and 10 rebase
    for number, turn in enumerate(turns, start=1):
        assert store.turn(KEY, number) == turn
        assert content(store.load(KEY, number)) == expected(turns[:number], SYSTEM)
        assert store.turn_of_request(KEY, f"request {number}") == turn
    assert content(store.load(KEY)) == content(store.load(KEY, 12))
    head = store.load(KEY).head
    assert (head.num_turns, head.title[:18], head.system) == (12, "question 1 of red ", tuple(SYSTEM))
    assert (head.fingerprint, head.model, head.parent) == (b"f" * 32, "a model", None)
    assert head.num_tokens == len(store.load(KEY).token_ids)
    assert head.expires_s == head.updated_s + 50
    assert [store.load(KEY, turn) for turn in (-1, 13)] == [None, None]
    assert [store.turn(KEY, 0), store.turn(KEY, 13), store.turn_of_request(KEY, "other")] == [None, None, None]


def test_what_is_not_there_is_none(store):
    assert (store.load(KEY), store.head(KEY), store.exists(KEY), store.turn(KEY, 1)) == (None, None, False, None)
    assert (store.turn_of_request(KEY, "x"), store.delete(KEY).wait()) == (None, None)
    assert store.list(TENANT) == []
    with pytest.raises(SessionNotFoundError, match="no session 'red'"):
        store.set_ttl(KEY, 1).wait()
    with pytest.raises(StoreError, match="has 0 turns, so turn 2"):
        store.commit_turn(KEY, make_turn("red", 2)).wait()
    for bad in ("", "../x", "a" * 129, "ü", "a\n"):
        with pytest.raises(RequestError, match="session id"):
            SessionKey("", bad)


def test_any_text_is_a_tenant_or_a_message(store):
    odd = ["a\0b", "é𝄞", "x" * 100_000, ""]
    for i, text in enumerate(odd):
        turn = TurnRecord(1, [{"role": "user", "content": text, text: "n"}], [2**32 - 1], [], idempotency_key=text)
        store.commit_turn(SessionKey(text, "s"), turn).wait()
        assert store.turn(SessionKey(text, "s"), 1) == turn, i
        assert store.turn_of_request(SessionKey(text, "s"), text) == turn
        assert [head.key.tenant for head in store.list(text)] == [text]


def test_a_first_turn_may_bring_the_system_prompt(store):
    first = make_turn("red", 1, messages=[*SYSTEM, *make_turn("red", 1).messages])
    store.commit_turn(KEY, first).wait()
    assert store.head(KEY).system == tuple(SYSTEM)
    assert store.load(KEY).messages == list(first.messages)
    assert store.load(KEY, 0).messages == SYSTEM
    other = SessionKey(TENANT, "other")
    create(store, other, [{"role": "system", "content": "be long"}]).wait()
    with pytest.raises(StoreError, match="another system prompt"):
        store.commit_turn(other, first).wait()


@pytest.mark.parametrize("change", [
    {"chain": [b"short"]}, {"token_ids": [-1]}, {"token_ids": [2**32]}, {"messages": [{"role": None}]}, {"base": "no"},
    {"usage": {"n": 2**63}}, {"idempotency_key": "\ud800"}, {"created_s": float("nan")}, {"first_reencoded": "1"},
])  # fmt: skip
def test_what_cannot_be_stored_is_refused_at_once(store, change):
    with pytest.raises(StoreError, match=r"turn .* of session red cannot be stored"):
        store.commit_turn(KEY, make_turn("red", 1, **change))
    with pytest.raises(StoreError, match=r"session red cannot be stored: .*surrogates"):
        create(store, KEY, [{"role": "\ud800"}]).wait()
    assert not store.exists(KEY)


@pytest.mark.parametrize("last", [0, 3, 5, 7, None])
def test_a_fork_shares_the_past_and_goes_on_alone(store, last):
    new = SessionKey(TENANT, "fork")
    create(store, KEY, SYSTEM, b"", "m").wait()
    turns = talk(store, KEY, 7)
    head = store.fork(KEY, last, new).wait()
    shared = turns[: 7 if last is None else last]
    assert content(store.load(new)) == expected(shared, SYSTEM)
    assert (head.parent, head.model) == (Parent("red", len(shared)), "m")
    assert store.turn_of_request(new, "request 1") is None
    more = talk(store, new, len(shared) + 2)[len(shared) :]
    assert content(store.load(new)) == expected(shared + more, SYSTEM)
    assert content(store.load(KEY)) == expected(turns, SYSTEM)


def test_turns_are_stored_together_with_what_the_session_is_called_or_not_at_all(store):
    turns, changes = [make_turn("red", number) for number in (1, 2, 3)], {"ttl_s": 1e6, "title": "Red"}
    with pytest.raises(StoreError, match="has 0 turns, so turn 3"):
        store.commit_turn(KEY, turns[0], turns[2], **changes).wait()
    assert not store.exists(KEY)
    before = store.stats()["committed"]
    head = store.commit_turn(KEY, *turns, **changes).wait()
    assert (head.num_turns, head.ttl_s, head.title, store.stats()["committed"] - before) == (3, 1e6, "Red", 1)
    assert content(store.load(KEY)) == expected(turns)


def test_a_version_is_stored_with_its_next_turn(store):
    create(store, KEY, SYSTEM, b"f" * 32, "m", ttl_s=1e6).wait()
    turns, new = talk(store, KEY, 6), SessionKey(TENANT, "fork")
    parent = Parent("red", 3, is_version=True)
    version = store.version(parent, new)
    assert not store.exists(new) and content(version.state) == expected(turns[:3], SYSTEM)
    talk(store, KEY, 7)
    head = store.commit_turn(new, make_turn("fork", 4), fork=version, model="n").wait()
    assert content(store.load(new)) == expected([*turns[:3], make_turn("fork", 4)], SYSTEM)
    assert (head.parent, head.fingerprint, head.model, head.ttl_s) == (parent, b"f" * 32, "n", 1e6)
    other = SessionKey(TENANT, "other")
    with pytest.raises(StoreError, match="has 4 turns, so turn 1"):
        store.commit_turn(new, make_turn("fork", 4), fork=version).wait()
    forgotten = TurnRecord(8, (), (), (), "rebase")
    number = store.head(KEY).number
    store.commit_turn(KEY, forgotten, session_number=number, forgotten=[MessageEdit(2, 0)]).wait()
    with pytest.raises(SessionBusyError, match="session red has just been changed"):
        store.commit_turn(other, make_turn("other", 4), fork=version).wait()
    store.delete(KEY).wait()
    with pytest.raises(SessionNotFoundError, match="no session 'red'"):
        store.commit_turn(other, make_turn("other", 4), fork=version).wait()
    assert not store.exists(other)
    for tombstone in store.pending_deletions():
        store.finish_deletion(tombstone.number).wait()


def test_forks_that_cannot_be(store):
    talk(store, KEY, 2)
    new = SessionKey(TENANT, "new")
    cases = [
        (KEY, 3, new, "turn is 3; session red has 2 turns"),
        (KEY, -1, new, "turn is -1; session red has 2 turns"),
        (KEY, 1, KEY, "exists already"),
    ]
    for source, turn, target, words in cases:
        with pytest.raises((StoreError, RequestError), match=words):
            store.fork(source, turn, target).wait()
    with pytest.raises(SessionNotFoundError, match="no session 'none'") as unknown:
        store.fork(SessionKey(TENANT, "none"), None, new).wait()
    assert unknown.value.param == "session_id"
    assert store.stats()["sessions"] == 1


def test_a_session_created_again_is_another_one(store):
    old = create(store, KEY).wait()
    store.delete(KEY).wait()
    with pytest.raises(StoreError, match="deleted meanwhile"):
        store.commit_turn(KEY, make_turn("red", 1), session_number=old.number).wait()
    assert not store.exists(KEY)
    new = create(store, KEY).wait()
    assert new.number != old.number
    with pytest.raises(StoreError, match="deleted meanwhile"):
        store.commit_turn(KEY, make_turn("red", 1), session_number=old.number).wait()
    assert store.commit_turn(KEY, make_turn("red", 1), session_number=new.number).wait().num_turns == 1


def test_the_list_is_by_last_update_and_comes_in_pages(store):
    keys = [SessionKey(TENANT, f"s{i}") for i in range(7)]
    for key in keys:
        create(store, key).wait()
    create(store, SessionKey("other", "s1")).wait()
    talk(store, keys[2], 1)
    order = [keys[i] for i in (2, 6, 5, 4, 3, 1, 0)]
    assert [head.key for head in store.list(TENANT)] == order
    pages, after = [], None
    while page := store.list(TENANT, 3, after):
        pages.append([head.key for head in page])
        after = page[-1].cursor
        store.delete(page[-1].key).wait()  # a cursor outlives its session
    assert pages == [order[:3], order[3:6], order[6:]]
    assert [head.key for head in store.list("other")] == [SessionKey("other", "s1")]
    for cursor in ("", "zz", "00" * 15, "00" * 17):
        with pytest.raises(RequestError, match="cursor"):
            store.list(TENANT, 3, cursor)


def test_of_two_writers_one_wins(store):
    talk(store, KEY, 1)
    mine, theirs = make_turn("red", 2, finish_reason="mine"), make_turn("red", 2, finish_reason="theirs")
    tickets = [store.commit_turn(KEY, mine), store.commit_turn(KEY, theirs)]
    assert tickets[0].wait().num_turns == 2
    with pytest.raises(StoreError, match="another writer came first"):
        tickets[1].wait()
    assert store.turn(KEY, 2) == mine
    with pytest.raises(StoreError, match="idempotency key"):
        store.commit_turn(KEY, make_turn("red", 3, idempotency_key="request 1")).wait()


def test_a_closed_store_says_so(tmp_path):
    for store in (disk_store(tmp_path), SessionStore(None)):
        tickets = [store.commit_turn(KEY, make_turn("red", n)) for n in range(1, 30)]
        store.close()
        assert [ticket.wait(0).num_turns for ticket in tickets] == list(range(1, 30)), "close drains"
        store.close()
        for call in (lambda s=store: s.load(KEY), lambda s=store: s.delete(KEY)):
            with pytest.raises(StoreError, match="is closed"):
                call()


# -- what stays in memory --------------------------------------------------------------------------------------------
def there(store, names: str) -> str:
    return "".join(name for name in names if store.exists(SessionKey(TENANT, name)))


@pytest.fixture
def recent():
    """In memory, which holds three."""
    store = SessionStore(None, max_sessions=3)
    yield store
    assert store.check().problems == ()
    store.close()


def test_memory_drops_what_was_used_longest_ago(recent):
    for name in "abc":
        talk(recent, SessionKey(TENANT, name), 2)
    recent.load(SessionKey(TENANT, "a"))
    talk(recent, SessionKey(TENANT, "d"), 1)
    assert there(recent, "abcd") == "acd"
    recent.delete(SessionKey(TENANT, "c")).wait()
    talk(recent, SessionKey(TENANT, "e"), 1)
    assert there(recent, "abcde") == "ade"
    assert recent.stats()["dropped"] == 1


def test_a_turn_is_a_use(recent):
    for name in "abc":
        talk(recent, SessionKey(TENANT, name), 1)
    talk(recent, SessionKey(TENANT, "a"), 2)
    recent.set_ttl(SessionKey(TENANT, "b"), 5).wait()
    talk(recent, SessionKey(TENANT, "d"), 1)
    assert there(recent, "abcd") == "abd"


class Machine(RuleBasedStateMachine):
    """A store against dicts: what each session's turns are, and which deletions are pending."""

    ids = st.sampled_from(["a", "b", "c"])

    @initialize(memory=st.booleans())
    def start(self, memory):
        self.memory = memory
        self.env_dir = Path(tempfile.mkdtemp())
        self.store = SessionStore(None, Clock()) if memory else disk_store(self.env_dir)
        self.turns: dict[str, list[TurnRecord]] = {}
        self.pending: dict[int, set[bytes]] = {}

    @rule(name=ids, rebase=st.booleans(), share=st.integers(0, 3))
    def commit(self, name, rebase, share):
        number = len(self.turns.get(name, ())) + 1
        base, chain = "rebase" if rebase else "append", [block_id(f"{i}") for i in range(share)]
        turn = make_turn(name, number, base=base, chain=chain)
        self.store.commit_turn(SessionKey(TENANT, name), turn).wait()
        self.turns.setdefault(name, []).append(turn)

    @rule(name=ids, new=ids, turn=st.integers(0, 4))
    def fork(self, name, new, turn):
        ticket = self.store.fork(SessionKey(TENANT, name), turn, SessionKey(TENANT, new))
        if name in self.turns and new not in self.turns and turn <= len(self.turns[name]):
            ticket.wait()
            self.turns[new] = list(self.turns[name][:turn])
        else:
            with pytest.raises((StoreError, RequestError)):
                ticket.wait()

    @rule(name=ids)
    def delete(self, name):
        tombstone = self.store.delete(SessionKey(TENANT, name)).wait()
        turns = self.turns.pop(name, None)
        assert (tombstone is None) == (turns is None)
        if tombstone:
            others = {b for rest in self.turns.values() for turn in rest for b in turn.chain}
            self.pending[tombstone.number] = {b for turn in turns for b in turn.chain} - others
            assert set(tombstone.block_ids) == self.pending[tombstone.number]

    @rule(data=st.data())
    def finish(self, data):
        if self.pending:
            number = data.draw(st.sampled_from(sorted(self.pending)))
            self.store.finish_deletion(number).wait()
            del self.pending[number]

    @rule(compact=st.booleans())
    def reopen(self, compact):
        if compact:
            self.store.compact()
        elif not self.memory:
            self.store.close()
            self.store = disk_store(self.env_dir)

    @invariant()
    def same(self):
        if not hasattr(self, "store"):
            return
        for name in ("a", "b", "c"):
            state = self.store.load(SessionKey(TENANT, name))
            assert (state is None) == (name not in self.turns)
            if state is not None:
                assert content(state) == expected(self.turns[name])
        assert {head.key.session_id for head in self.store.list(TENANT)} == set(self.turns)
        assert {t.number: set(t.block_ids) for t in self.store.pending_deletions()} == self.pending
        assert self.store.check().problems == ()

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.env_dir)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=20, suppress_health_check=list(HealthCheck))
