"""A session in the store as one server knows it beside others, who holds it, and what nobody needs after its turn."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvstore.blocks.ids import Lineage, SpliceRun, extend_chain, quantised_id
from kvstore.engine.client.messages import Pin
from kvstore.engine.client.requests import Handle
from kvstore.engine.outputs import CachedTokensDetails, Choice, RequestOutput, Usage
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.window import NextTurn, OneTurn, Window, lineage_of, spliced_blocks
from kvstore.engine.turns import Claims, Hold
from kvstore.errors import (
    EngineOverloadedError,
    RemoteError,
    RequestError,
    SessionBusyError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
)
from kvstore.sessions.record import SessionKey
from kvstore.sessions.store import SessionStore
from tests.children.session_child import Clock, make_turn

KEY, NEW = SessionKey("tenant", "red"), SessionKey("tenant", "new")
FINGERPRINT = b"f" * 32
SIZE = 4
ROOT = Lineage(b"r" * 32)
SPLICED = Lineage(b"r" * 32, (SpliceRun(1, b"p" * 32, 2),))
SYSTEM = [{"role": "system", "content": "be brief"}]
SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


class CoreOfNothing:
    """Knows a model's name and a root, and what it was told about expiry."""

    def __init__(self, fingerprint=FINGERPRINT):
        self.facts = SimpleNamespace(
            fingerprint=fingerprint, model_name="a model", root=lambda tenant: tenant.encode().ljust(32)
        )
        self.told, self.is_overloaded, self.life = [], False, 0

    def call(self, verb):
        if self.is_overloaded:
            raise EngineOverloadedError("full")
        assert isinstance(verb, Pin) and verb.seconds is None
        self.told.append((verb.chain, verb.expires_s))


@pytest.fixture
def sessions():
    store = SessionStore(None, Clock())
    yield store
    store.close()


@pytest.fixture
def core():
    return CoreOfNothing()


def session_of(sessions, core, state=None):
    chats = SimpleNamespace(sessions=sessions, client=core, drop=lambda key: None, open=lambda key, *_: key)
    return ChatSession(chats, KEY, None, state)


@pytest.fixture
def one(sessions, core):
    return session_of(sessions, core)


def commit(session, *numbers, **changes):
    for number in numbers:
        record = make_turn("red", number, **changes)
        session.store([record], Window([], [], 0, [], record.chain, ROOT), Hold(KEY, None, None))


def set_ttl(session, ttl_s, chain):
    session.window.chain = chain
    session.set_ttl(ttl_s)


def test_turns_are_counted_and_stored_with_the_model(one, sessions):
    assert (one.number, one.num_turns, one.truncated_tokens, one.is_deleted) == (None, 0, 0, False)
    commit(one, 1, 2, 3, 4, 5, 6)
    head = sessions.head(KEY)
    assert (one.number, one.num_turns, one.truncated_tokens) == (head.number, 6, 7)  # the fifth truncates
    assert (head.fingerprint, head.model) == (FINGERPRINT, "a model")
    again = session_of(sessions, CoreOfNothing(), sessions.load(KEY))
    assert (again.number, again.num_turns, again.truncated_tokens) == (one.number, 6, 7)
    assert again.is_at(head) and one.is_at(head)


def test_a_turn_of_a_session_that_was_deleted_meanwhile_is_refused(one, sessions):
    commit(one, 1)
    sessions.delete(KEY).wait()
    with pytest.raises(StoreError, match="deleted meanwhile"):
        commit(one, 2)
    assert (one.num_turns, sessions.exists(KEY)) == (1, False)


def test_what_another_server_has_stored_is_read(one, sessions, core):
    one.catch_up(None)
    assert (one.num_turns, one.is_deleted) == (0, False), "there is nothing yet, and nothing was deleted"
    other = session_of(sessions, core)
    commit(other, 1, 2)
    one.catch_up("another request")
    assert (one.num_turns, one.number, one.token_ids) == (2, other.number, sessions.load(KEY).token_ids)
    one.catch_up("request 2")  # nothing has come since
    commit(other, 3)
    assert not one.is_at(sessions.head(KEY))
    with pytest.raises(SessionBusyError, match="session red has just answered this request"):
        one.catch_up("request 3")
    assert one.num_turns == 2
    one.catch_up(None)
    assert one.num_turns == 3


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_deletion_by_another_server_is_seen(one, sessions, core, comes_back):
    assert one.check_deleted() is False, "it was never stored"
    commit(one, 1)
    assert one.check_deleted() is False
    sessions.delete(KEY).wait()
    if comes_back:
        commit(session_of(sessions, core), 1)
    assert one.check_deleted() is True and one.is_deleted
    if comes_back:
        assert not one.is_at(sessions.head(KEY))


def test_catching_up_with_a_deletion(one, sessions):
    commit(one, 1)
    sessions.delete(KEY).wait()
    one.catch_up(None)
    assert one.is_deleted and one.check_deleted()


def test_a_store_that_cannot_be_read_says_nothing_about_a_deletion(one, sessions):
    commit(one, 1)
    sessions.close()
    assert one.check_deleted() is False


def test_the_core_is_told_when_a_session_expires(one, sessions, core):
    commit(one, 1)
    assert core.told == [], "it does not"
    set_ttl(one, 50, ["chain"])
    assert core.told == [(["chain"], sessions.head(KEY).expires_s)]
    core.told.clear()
    commit(one, 2)
    [(chain, at_s)] = core.told
    assert (chain, at_s) == (make_turn("red", 2).chain, sessions.head(KEY).updated_s + 50)
    set_ttl(one, 50, [])
    assert len(core.told) == 1, "it knows that"
    set_ttl(one, None, [])
    assert core.told[1:] == [([], math.inf)]


def test_a_core_that_takes_nothing_now_is_told_after_the_next_turn(one, sessions, core):
    commit(one, 1)
    core.is_overloaded = True
    set_ttl(one, 50, [])
    assert core.told == [] and sessions.head(KEY).ttl_s == 50
    core.is_overloaded = False
    set_ttl(one, 50, ["now"])
    assert core.told == [(["now"], sessions.head(KEY).expires_s)]


def test_a_session_without_a_turn_cannot_expire(one):
    with pytest.raises(RequestError, match="has no turn yet") as caught:
        set_ttl(one, 50, [])
    assert caught.value.param == "ttl_s"


@pytest.mark.parametrize(("turn", "num_turns"), [(None, 3), (1, 1), (3, 3)])
def test_a_fork_has_so_many_turns(one, sessions, turn, num_turns):
    commit(one, 1, 2, 3)
    assert one.fork("new", turn) == NEW
    assert sessions.head(NEW).num_turns == num_turns


def test_forks_that_cannot_be(one, sessions):
    with pytest.raises(RequestError, match="has 0 turns"):
        one.fork("new", None)
    commit(one, 1, 2)
    for turn in (0, 3):
        with pytest.raises(RequestError, match=f"turn is {turn}; this session has 2 turns"):
            one.fork("new", turn)
    with pytest.raises(SessionExistsError, match="a session 'red' already"):
        one.fork("red", 1)
    one.num_turns = 9  # more than are there
    with pytest.raises(RequestError, match="turn is 9; session red has 2 turns"):
        one.fork("new", 9)
    sessions.delete(KEY).wait()
    with pytest.raises(SessionNotFoundError, match="no session 'red'"):
        one.fork("new", 1)
    assert not sessions.exists(NEW)


def test_the_window_of_a_stored_session_is_of_its_model_alone(one, sessions, core):
    system = {"role": "system", "content": "be brief"}
    first = make_turn("red", 1)
    commit(one, 1, messages=[system, *first.messages])
    commit(one, 2, 3, 4)
    commit(
        one, 5, first_reencoded=1, splice_parent=b"p" * 32, splice_end=2, splices=[(3, b"q" * 32, 5)],
        turn_starts=[2, 5],
    )  # fmt: skip
    state, root = sessions.load(KEY), core.facts.root("tenant")
    lineage = Lineage(root, (SpliceRun(1, b"p" * 32, 2), SpliceRun(3, b"q" * 32, 5)))
    assert lineage_of(state, root) == lineage
    window = Window.of(state, core)
    assert (window.token_ids, window.chain, window.lineage) == (state.token_ids, state.chain, lineage)
    assert (window.turn_starts, window.num_dropped, window.system) == ([2, 5], 2, [system])
    other = Window.of(state, CoreOfNothing(b"g" * 32))
    assert (other.token_ids, other.chain, other.lineage, other.turn_starts) == ([], [], Lineage(root), [])
    assert (other.messages, other.num_dropped, other.system) == (state.messages, 2, [system])


def test_a_session_that_was_never_spliced_has_a_plain_lineage(one, sessions):
    commit(one, 1)
    assert lineage_of(sessions.load(KEY), b"r" * 32) == Lineage(b"r" * 32)


class NumberedLeases:
    """Leases are numbers; `fault` is raised instead of the next one."""

    def __init__(self):
        self.given, self.ended, self.fault = 0, [], None

    def acquire(self, key):
        assert key == KEY
        if self.fault is not None:
            raise self.fault
        self.given += 1
        return self.given

    def release(self, lease):
        self.ended.append(lease)


def test_who_waits_for_a_hold_cannot_cancel_it():
    claims = Claims(None)
    hold = claims.hold(KEY)
    assert not hold.released.cancel()
    claims.release(hold)
    assert hold.released.result() is None


def test_a_deleted_session_is_free_before_its_turn_has_noticed():
    claims = Claims(None)
    old = claims.hold(KEY)
    claims.drop(old)
    new = claims.hold(KEY)
    claims.release(old)
    assert claims.on(KEY) is new


def test_the_lease_is_given_back_once():
    leases = NumberedLeases()
    claims = Claims(leases)
    hold = claims.hold(KEY)
    claims.lease(hold)
    assert hold.lease == 1
    claims.give_back(hold)
    assert (hold.lease, leases.ended) == (None, [1])
    leases.fault = RemoteError("away")
    with pytest.raises(RemoteError):
        claims.lease(hold)
    assert hold.lease is None


def chain_of(token_ids, lineage=ROOT):
    chain = []
    extend_chain(chain, lineage.root, token_ids, SIZE)
    return chain


def window(token_ids, lineage=ROOT, turn_starts=(2,)):
    messages = [*SYSTEM, *SAID] if token_ids else list(SYSTEM)
    return Window(SYSTEM, messages, 0, list(token_ids), chain_of(token_ids), lineage, list(turn_starts))


def handle(prompt, answer, lineage=None, num_cached=0):
    usage = Usage(len(prompt), len(answer), CachedTokensDetails(num_cached))
    output = RequestOutput("r", list(prompt), [Choice("yes", list(answer))], usage, None)
    return Handle("r", output, listener=lambda handles: None, lineage=lineage)


def turn(before, next_turn, handle):
    return OneTurn(before, [{"role": "user", "content": "and now?"}], next_turn, handle, "a key")


BEFORE = window(range(10))


NEXT = NextTurn(list(range(13)), BEFORE.chain, ROOT, 0, [2, 10])


def unneeded(one: OneTurn, is_stored: bool, is_deleted: bool):
    return one.unneeded_blocks(is_stored, is_deleted, SIZE, one.before.lineage)


def test_spliced_blocks_are_needed_while_the_session_is_built_on_them():
    chain = [b"h" * 32, b"s" * 32, b"t" * 32]
    one = turn(BEFORE, NextTurn(list(range(13)), chain, SPLICED, 2, [2]), handle(range(13), [90], SPLICED))
    assert unneeded(one, is_stored=True, is_deleted=False) == ()
    assert unneeded(one, is_stored=False, is_deleted=False) == chain[1:]
    given_up = replace(one, handle=handle(range(13), [90], ROOT))
    assert unneeded(given_up, is_stored=True, is_deleted=False) == chain[1:]
    known = replace(one, before=replace(BEFORE, lineage=SPLICED))
    assert unneeded(known, is_stored=False, is_deleted=False) == []
    cleared = known.unneeded_blocks(is_stored=False, is_deleted=False, block_size=SIZE, known=ROOT)
    assert set(cleared) == {*chain[1:], *BEFORE.chain[1:]}, "of the window too, which clearing has made of another"


def test_blocks_are_needed_while_the_session_is_built_on_copies_of_them():
    copies = Lineage(ROOT.root, (SpliceRun(1, quantised_id(b"p" * 32), 2),), (b"h" * 32, b"s" * 32))
    chain, run = [b"h" * 32, b"s" * 32, b"t" * 32], SpliceRun(1, b"p" * 32, 3)
    exact = Lineage(ROOT.root, (run,))
    assert spliced_blocks(chain, exact, copies) == spliced_blocks(chain, copies, exact) == ()
    assert spliced_blocks(chain, exact, ROOT) == spliced_blocks(chain, copies, ROOT) == chain[1:]
    assert spliced_blocks(chain, exact.spliced(SpliceRun(2, b"q" * 32, 3)), copies) == chain[2:]
    begun = Lineage(ROOT.root, (SpliceRun(0, quantised_id(ROOT.root), 2),), (b"h" * 32, b"s" * 32))
    assert spliced_blocks(chain, begun, ROOT) == (), "other sessions have these copies, too"
    assert spliced_blocks(chain, begun.spliced(run), ROOT) == chain[1:]


@pytest.mark.parametrize(("starts", "known", "own"), [
    ([2, 10], 2, 2),  # the system prompt and the turn before are others'
    ([9], 0, 2),  # a first turn: what begins before it is the system prompt's
    ([], 1, 1),
    ([2], 3, 3),
])  # fmt: skip
def test_a_deleted_session_takes_the_blocks_of_its_running_turn(starts, known, own):
    ids = list(range(17))
    before = replace(BEFORE, chain=chain_of(ids)[:known])
    one = turn(before, NextTurn(ids, before.chain, ROOT, 0, starts), handle(ids, [], num_cached=known * SIZE))
    one.handle.chain = chain_of(ids)
    assert unneeded(one, is_stored=False, is_deleted=True) == chain_of(ids)[own:]
    assert unneeded(one, is_stored=False, is_deleted=False) == []
