"""Deletions stay until every server that shares has carried them through, and no longer."""

import time
from functools import partial

import pytest
from msgspec.structs import replace

from kvstore.sessions.record import SessionKey
from kvstore.sessions.shared import view
from kvstore.sessions.shared.fleet import AWAY_IN_MEMORY_S, AWAY_S
from kvstore.sessions.shared.names import Names
from kvstore.sessions.shared.server import facts_of
from kvstore.sessions.shared.storage import MemberIdentity
from kvstore.sessions.tables import COUNTERS, TOMBSTONES
from tests.children.session_child import TENANT, make_turn, talk
from tests.support.faults import constants


def key(number: int) -> SessionKey:
    return SessionKey(TENANT, f"s{number}")


@pytest.fixture
def pair(redis, share, tmp_path):
    stores = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        stores.append(share(redis, tmp_path / name))
        stores[-1].renew()
    return stores


def test_each_server_carries_a_deletion_through_for_itself(pair):
    one, other = pair
    talk(one, key(1), 2)
    tombstone = one.delete(key(1)).wait()
    assert one.pending_deletions() == other.pending_deletions() == [tombstone]
    one.finish_deletion(tombstone.number).wait()
    assert (one.pending_deletions(), other.pending_deletions()) == ([], [tombstone])
    assert one.stats()["pending_deletions"] == 1
    other.finish_deletion(tombstone.number).wait()
    assert other.pending_deletions() == []
    assert one.stats()["pending_deletions"] == 0
    assert one.stats()["servers"] == 2


def test_deletions_may_be_carried_through_in_any_order(pair, redis, tmp_path, share):
    one, other = pair
    for number in (1, 2, 3):
        talk(one, key(number), 1)
    first, second, third = (one.delete(key(number)).wait() for number in (1, 2, 3))
    other.finish_deletion(third.number).wait()
    other.finish_deletion(first.number).wait()
    assert other.pending_deletions() == [second]
    other.close()
    again = share(redis, tmp_path / "other")  # what it had not finished in order it does again
    again.renew()
    assert again.pending_deletions() == [second, third]
    for tombstone in (first, second, third):
        one.finish_deletion(tombstone.number).wait()
    for tombstone in (second, third):
        again.finish_deletion(tombstone.number).wait()
    assert one.stats()["pending_deletions"] == 0


def test_deletions_that_wait_for_another_server_are_not_read_again_by_those_that_have_carried_them_out(pair, redis):
    """Each round asks for them, for as long as a server may be away."""
    one, other = pair
    chain, tombstones = [number.to_bytes(32, "big") for number in range(100)], []
    for number in range(6):
        one.commit_turn(key(number), replace(make_turn("red", 1), chain=chain)).wait()
        tombstones.append(one.delete(key(number)).wait())

    def num_read(store) -> int:
        """How many of them, by what Redis has sent."""
        before = facts_of(redis.ask("INFO", "stats"))["total_net_output_bytes"]
        store.pending_deletions()
        after = facts_of(redis.ask("INFO", "stats"))["total_net_output_bytes"]
        return round((int(after) - int(before)) / (32 * len(chain)) - 0.5)

    with constants(view, VALUES_AT_ONCE=1):
        assert num_read(one) >= 6
        for tombstone in tombstones[:4]:
            one.finish_deletion(tombstone.number).wait()
        assert one.pending_deletions() == tombstones[4:]
        assert num_read(one) < num_read(other) - 2


def test_a_new_server_owes_nothing_of_the_past(pair, redis, share):
    one, _ = pair
    talk(one, key(1), 1)
    one.delete(key(1)).wait()
    new = share(redis)
    assert not new.sharing.has_missed_deletions()
    new.renew()
    assert not new.sharing.has_missed_deletions()
    assert new.pending_deletions() == []


def test_a_server_that_was_away_for_too_long_is_not_waited_for_and_has_to_give_up_its_kv(pair, redis, tmp_path, share):
    one, other = pair
    member = MemberIdentity.of(tmp_path / "other").member
    other.close()
    redis.ask("HSET", Names.of(False).members, member, f"0 {time.time() - AWAY_S - 10:.0f}")
    talk(one, key(1), 1)
    tombstone = one.delete(key(1)).wait()
    one.finish_deletion(tombstone.number).wait()
    assert (one.stats()["pending_deletions"], one.stats()["servers"]) == (0, 1)
    again = share(redis, tmp_path / "other")
    assert again.sharing.has_missed_deletions()
    again.renew()
    assert not again.sharing.has_missed_deletions()
    assert again.pending_deletions() == []
    assert not one.sharing.has_missed_deletions()


def test_a_server_without_a_store_is_waited_for_while_it_runs(pair, redis, share):
    one = pair[0]
    ended, killed = (share(redis) for _ in range(2))
    for store in (ended, killed):
        store.renew()
    talk(one, key(1), 1)
    tombstone = one.delete(key(1)).wait()
    for store in (*pair, ended):
        store.finish_deletion(tombstone.number).wait()
    assert (one.stats()["pending_deletions"], one.stats()["servers"]) == (1, 4)
    ended.close()
    assert one.stats()["servers"] == 3
    redis.ask("HSET", Names.of(False).members, killed.sharing._member, f"0 {time.time() - AWAY_IN_MEMORY_S - 10:.0f}")
    one.finish_deletion(tombstone.number).wait()
    assert (one.stats()["pending_deletions"], one.stats()["servers"]) == (0, 2)
    assert killed.sharing.has_missed_deletions(), "it was cut off, and gives up what it has in memory"


def test_a_deletion_that_a_failover_loses_does_not_hide_the_next_one(pair, redis):
    """What Redis had before is there again, but not what the servers know."""
    one, other = pair
    for number in (1, 2):
        talk(one, key(number), 1)
    names = Names.of(False)
    counters, dead = names.values(COUNTERS), names.values(TOMBSTONES)
    before = redis.ask("HGET", counters, "deletion"), redis.ask("HGETALL", names.members)
    lost = one.delete(key(1)).wait()
    other.finish_deletion(lost.number).wait()
    redis.ask("HDEL", counters, "deletion")
    if before[0] is not None:
        redis.ask("HSET", counters, "deletion", before[0])
    redis.ask("HSET", names.members, *before[1])
    redis.ask("DEL", dead, names.keys(TOMBSTONES))
    tombstone = one.delete(key(2)).wait()
    assert other.pending_deletions() == one.pending_deletions() == [tombstone]


def test_a_server_whose_clock_is_wrong_ends_no_session_of_others(redis, share, tmp_path):
    clocks = []
    for ahead_s in (0.0, 3600.0, -3600.0):
        with constants(time, time=partial(lambda real, ahead_s: real() + ahead_s, time.time, ahead_s)):
            store = share(redis)
            store.clock = store.sharing.now
            store.renew()
            if not clocks:
                store.commit_turn(key(1), make_turn("s1", 1), ttl_s=600.0).wait()
            assert store.head(key(1)) is not None
            assert store.expired(store.clock()) == []
            assert len(store.expired(store.clock() + 601)) == 1
            clocks.append(store.clock())
    assert max(clocks) - min(clocks) < 600


def test_a_server_whose_clock_is_set_right_while_it_runs_ends_no_session(redis, share):
    """As at a start before it has asked a time server: it does not open another connection for that."""
    behind = partial(lambda real: real() - 3600.0, time.time)
    with constants(time, time=behind):
        store = share(redis)
        store.clock = store.sharing.now
        store.renew()
        store.commit_turn(key(1), make_turn("s1", 1), ttl_s=600.0).wait()
    store.renew()
    assert store.head(key(1)) is not None and store.expired(store.clock()) == []
