"""Deletions in the remote tier: repeated until it confirms them."""

import pytest

from kvstore.remote.tier import DeleteDone, RemoteTier
from kvstore.store.remote import MOST_DELETES, RemoteDeletes
from tests.support.store.memory_shared import MemoryShared, ended
from tests.support.waiting import TIMEOUT_S, wait_until

IDS = [bytes([i]) * 32 for i in range(5)]


@pytest.fixture
def shared():
    return MemoryShared()


@pytest.fixture
def tier(shared):
    found = RemoteTier(shared, lambda: None)
    yield found
    shared.may_answer.set()
    assert found.close(TIMEOUT_S)


def test_what_is_confirmed_is_gone(shared, tier):
    shared.blocks = dict.fromkeys(IDS, b"")
    deletes = RemoteDeletes(tier)
    deletes.add(IDS[:3])
    assert deletes.in_flight() and IDS[0] in deletes and IDS[3] not in deletes
    shared.may_answer.clear()
    deletes.pump()
    deletes.add(IDS[3:4])
    assert deletes.has_some({IDS[0]}) and deletes.has_some({IDS[3]}) and not deletes.has_some({IDS[4]})
    shared.may_answer.set()
    deletes.done(*ended(tier, DeleteDone))
    assert not deletes.has_some(set(IDS[:3])) and deletes.has_some(set(IDS))
    deletes.pump()
    deletes.done(*ended(tier, DeleteDone))
    assert not deletes.in_flight() and set(shared.blocks) == {IDS[4]}


def test_what_fails_is_tried_again_when_it_answers(shared, tier):
    shared.blocks = dict.fromkeys(IDS, b"")
    shared.fails = "away"
    deletes = RemoteDeletes(tier)
    deletes.add(IDS)
    deletes.pump()
    deletes.done(*ended(tier, DeleteDone))
    assert deletes.has_some({IDS[0]}), "it is not forgotten"
    assert not deletes.in_flight(), "but nothing can be done about it now"
    deletes.pump()
    assert tier.completed() == []
    shared.fails = None
    wait_until(lambda: not tier.breaker.is_open)
    assert deletes.in_flight()
    deletes.pump()
    deletes.done(*ended(tier, DeleteDone))
    assert not deletes.in_flight() and not shared.blocks and not deletes.has_some(set(IDS))


def test_what_waits_is_bounded_and_the_oldest_is_left_to_its_time_to_live(shared, tier):
    shared.fails = "away"
    deletes = RemoteDeletes(tier)
    deletes.add(IDS[:1])
    deletes.add(number.to_bytes(32, "big") for number in range(1, MOST_DELETES))
    assert IDS[0] in deletes
    deletes.add(IDS[1:2])
    assert IDS[0] not in deletes and IDS[1] in deletes
