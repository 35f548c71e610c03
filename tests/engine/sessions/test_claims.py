"""Who holds a session: one turn here, one lease among servers."""

import pytest

from kvstore.engine.sessions.stored import Claims
from kvstore.errors import RemoteError, SessionBusyError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.sharing import Alone

KEY, OTHER = SessionKey("", "one"), SessionKey("", "two")


class Shared(Alone):
    """Leases are numbers; `fault` is raised instead of the next one."""

    def __init__(self):
        self.given, self.ended, self.fault = 0, [], None

    def begin_turn(self, key):
        assert key == KEY
        if self.fault is not None:
            raise self.fault
        self.given += 1
        return self.given

    def end_turn(self, lease):
        self.ended.append(lease)


class Reader:
    is_abandoned = False


def test_one_turn_at_a_time_holds_a_session():
    claims = Claims(Alone())
    hold = claims.hold(KEY, "a key")
    assert claims.on(KEY) is hold and claims.on(OTHER) is None
    with pytest.raises(SessionBusyError, match="session one is busy"):
        claims.hold(KEY)
    claims.release(claims.hold(OTHER))
    claims.release(hold)
    assert claims.on(KEY) is None and hold.released.done()
    claims.release(claims.hold(KEY))


def test_who_waits_for_a_hold_cannot_cancel_it():
    claims = Claims(Alone())
    hold = claims.hold(KEY)
    assert not hold.released.cancel()
    claims.release(hold)
    assert hold.released.result() is None


def test_a_deleted_session_is_free_before_its_turn_has_noticed():
    claims = Claims(Alone())
    old = claims.hold(KEY)
    claims.drop(old)
    new = claims.hold(KEY)
    claims.release(old)
    assert claims.on(KEY) is new


def test_it_is_worth_waiting_for_the_same_request_and_for_who_has_no_reader():
    claims, reader = Claims(Alone()), Reader()
    hold = claims.hold(KEY, "a key", reader)
    assert [hold.is_worth_waiting(key) for key in (None, "a key", "another")] == [False, True, False]
    reader.is_abandoned = True
    assert hold.is_worth_waiting(None)


def test_the_lease_is_given_back_once():
    sharing = Shared()
    claims = Claims(sharing)
    hold = claims.hold(KEY)
    claims.lease(hold)
    assert hold.lease == 1
    claims.give_back(hold)
    assert (hold.lease, sharing.ended) == (None, [1])
    sharing.fault = RemoteError("away")
    with pytest.raises(RemoteError):
        claims.lease(hold)
    assert hold.lease is None
