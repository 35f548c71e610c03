"""One writer a session: of two turns one is refused, and a server that was stopped for too long stores nothing."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvstore.errors import RemoteError, SessionBusyError, SessionTakenError
from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared.leases import ACQUIRE, RELEASE, Leases
from kvstore.sessions.shared.names import Names
from kvstore.sessions.shared.server import RefusedError
from tests.children.session_child import TENANT, make_turn, talk
from tests.support.redis_server import no_answer_after
from tests.support.waiting import wait_until

KEY = SessionKey(TENANT, "red")
SHORT_S = 1.0  # of a lease whose end is waited for
RENEWED_S = (1.0, 6.0, 30.0)  # of one that is to be renewed meanwhile; a machine may pause, but not for so long
# Takes the session, says so, waits for a word, and stores its turn.
HOLDER = """
import sys
from kvstore.errors import StoreError
from tests.children.session_child import TENANT, make_turn
from tests.kvstore.sessions.shared.test_leases import KEY
from tests.support.shared_sessions import shared_store
store = shared_store(int(sys.argv[1]), lease_s=float(sys.argv[2]))
claim = store.sharing.leases.acquire(KEY)
print("taken", flush=True)
sys.stdin.readline()
try:
    store.commit_turn(KEY, make_turn("red", 2), lease=claim).wait()
    print("stored", flush=True)
except StoreError as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def holding(redis, lease_s):
    """A process that has taken the session, with a lease of this length."""
    command = [sys.executable, "-c", HOLDER, str(redis.port), str(lease_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "taken\n"
            yield child
        finally:
            child.kill()


@pytest.fixture
def holder(redis):
    with holding(redis, SHORT_S) as child:
        yield child


def said(child) -> str:
    child.stdin.write("go\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def is_free(store, key: SessionKey = KEY) -> bool:
    try:
        store.sharing.leases.release(store.sharing.leases.acquire(key))
    except SessionBusyError:
        return False
    return True


def test_a_session_has_one_writer_until_it_is_given_back(redis, share):
    one, other = (share(redis, lease_s=3600.0) for _ in range(2))
    claim = one.sharing.leases.acquire(KEY)
    for store in (one, other):
        with pytest.raises(SessionBusyError, match="busy with another turn") as busy:
            store.sharing.leases.acquire(KEY)
        assert 0 < busy.value.retry_after_s <= 3600, "what is left of the lease"
    assert is_free(other, SessionKey("another tenant", "red"))
    one.commit_turn(KEY, make_turn("red", 1), lease=claim).wait()
    one.sharing.leases.release(claim)
    with pytest.raises(SessionTakenError):
        one.commit_turn(KEY, make_turn("red", 2), lease=claim).wait()
    assert is_free(other)


def test_a_lease_lives_as_long_as_its_turn(redis, share):
    store = share(redis)
    talk(store, KEY, 1)

    def outlives(lease_s: float) -> bool:
        with holding(redis, lease_s) as holder:
            end = time.monotonic() + 1.5 * lease_s
            wait_until(lambda: is_free(store) or time.monotonic() > end, "neither free nor over")
            return said(holder) == "stored"

    assert any(map(outlives, RENEWED_S))


def test_a_turn_outlives_a_restart_of_redis_in_which_its_lease_is_to_be_renewed_twice(own_redis, share):
    def outlives(lease_s: float) -> bool:
        store, key = share(own_redis, lease_s=lease_s), SessionKey(TENANT, f"of-{lease_s:.0f}")
        claim, begun_s = store.sharing.leases.acquire(key), time.monotonic()
        own_redis.kill()
        wait_until(lambda: time.monotonic() > begun_s + 0.7 * lease_s, "the second time has come")
        own_redis.start()
        wait_until(own_redis.answers, "it has read its file")
        wait_until(lambda: time.monotonic() > begun_s + 1.2 * lease_s, "the first lease is over")
        try:
            return store.commit_turn(key, make_turn("red", 1), lease=claim).wait().num_turns == 1
        except SessionTakenError:
            return False

    assert any(map(outlives, (3.0, *RENEWED_S[1:])))


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_server_that_was_stopped_longer_than_its_lease_stores_nothing(redis, holder, is_taken, share):
    store = share(redis, lease_s=3600.0)
    talk(store, KEY, 1)
    os.kill(holder.pid, signal.SIGSTOP)
    wait_until(lambda: is_free(store), "the lease has no end")
    if is_taken:
        claim = store.sharing.leases.acquire(KEY)
    os.kill(holder.pid, signal.SIGCONT)
    assert said(holder) == "SessionTakenError"
    assert store.head(KEY).num_turns == 1
    if is_taken:
        assert store.commit_turn(KEY, make_turn("red", 2), lease=claim).wait().num_turns == 2


def test_a_killed_server_blocks_its_sessions_no_longer_than_the_lease(redis, holder, share):
    store = share(redis)
    holder.kill()
    wait_until(lambda: is_free(store), "the lease has no end")


def test_a_server_that_begins_again_takes_over_what_it_had_left(redis, tmp_path, share):
    store, other = share(redis, tmp_path, lease_s=3600.0), share(redis, lease_s=3600.0)
    store.sharing.leases.acquire(KEY)
    again = share(redis, tmp_path, lease_s=3600.0)  # as after a kill: nothing was given back
    assert not is_free(other)
    assert is_free(again)
    assert is_free(other)


def test_a_turn_that_ends_while_redis_is_away_frees_its_session_once_it_is_back(own_redis, share):
    one, other = (share(own_redis, lease_s=3600.0) for _ in range(2))
    claim, held = one.sharing.leases.acquire(KEY), one.sharing.leases.acquire(SessionKey(TENANT, "blue"))
    own_redis.kill()
    one.sharing.leases.release(claim)
    own_redis.start()
    wait_until(own_redis.answers, "it has read its file")
    wait_until(lambda: is_free(other), "the session is free again")
    with pytest.raises(SessionBusyError):
        other.sharing.leases.acquire(SessionKey(TENANT, "blue"))
    one.sharing.leases.release(held)


def test_a_turn_that_began_while_redis_was_silent_frees_its_session_once_it_answers(own_redis, share):
    one, other = (share(own_redis, lease_s=3600.0) for _ in range(2))
    own_redis.pause()
    with no_answer_after(1.0), pytest.raises(RemoteError):
        one.sharing.leases.acquire(KEY)  # Redis gets it, and carries it out when it goes on
    own_redis.resume()
    wait_until(own_redis.answers, "it goes on")
    wait_until(lambda: is_free(other), "the session is free again")


def test_what_is_given_back_late_is_what_may_have_been_taken_and_never_what_was_taken_since():
    """Redis refuses one turn that begins, does not answer another one, and does not hear of the end of a third."""
    refused, silent = SessionKey(TENANT, "refused"), SessionKey(TENANT, "silent")
    errors = {(ACQUIRE, refused): RefusedError, (ACQUIRE, silent): RemoteError, (RELEASE, KEY): RemoteError}
    names = {Names.of(False).lease(key): key for key in (refused, silent, KEY)}
    taken, given_back = {}, set()

    def ask(*commands):
        for _, script, _, name, token, *_ in commands:
            if script == ACQUIRE:
                taken.setdefault(names[name], []).append(token)
            if (error := errors.pop((script, names[name]), None)) is not None:
                raise error("as it is told to")
            if script == RELEASE:
                given_back.add(token)
        return [-1] * len(commands)

    leases = Leases(SimpleNamespace(ask=ask, names=Names.of(False)), "member")
    for key, error in ((refused, RefusedError), (silent, RemoteError)):
        with pytest.raises(error):
            leases.acquire(key)
    leases.release(leases.acquire(KEY))
    leases.acquire(KEY)
    wait_until(lambda: {*taken[silent], taken[KEY][0]} <= given_back, "it gives back")
    leases.close()
    assert given_back == {*taken[silent], taken[KEY][0]} and len(set(taken[KEY])) == 2


def test_a_deletion_elsewhere_ends_a_turn_that_runs(redis, share):
    one, other = share(redis), share(redis)
    talk(one, KEY, 1)
    claim = one.sharing.leases.acquire(KEY)
    other.delete(KEY).wait()
    with pytest.raises(SessionTakenError):
        one.commit_turn(KEY, make_turn("red", 2), lease=claim).wait()
    assert one.head(KEY) is None
