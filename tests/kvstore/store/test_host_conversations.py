"""Tests of kvstore.store.host_conversations: whose blocks a host writes, told of requests or not."""

import pytest

from kvstore.policy.policies import Steering
from kvstore.store.host_conversations import REST_S, HostConversations

ROOT = b"root"


class Contents:
    """What is on disk, for the little that is asked of it."""

    def __init__(self):
        self.stored = set()
        self.touched = []

    def contains(self, block_id):
        return block_id in self.stored

    def claim(self, chain, conversation):
        pass

    def touch(self, chain, conversation=None):
        self.touched.append((tuple(chain), conversation))


@pytest.fixture
def steering():
    steering = Steering("return", lambda: steering.now_s, {"disk": 100})
    steering.now_s = 1000.0
    return steering


@pytest.fixture
def known(steering):
    return HostConversations(steering, Contents(), lambda: steering.now_s)


def write(known, chain, name=None, parent=ROOT):
    """The conversations of the blocks of a chain that goes on behind `parent`."""
    return [known.owner(name, block_id, before) for block_id, before in zip(chain, (parent, *chain), strict=False)]


def test_a_chain_of_writes_is_one_conversation_and_another_chain_another(known):
    first, second = write(known, [b"a1", b"a2", b"a3"]), write(known, [b"b1", b"b2"])
    assert len({one.number for one in first}) == 1 and len({one.number for one in second}) == 1
    assert first[0] is not second[0] and first[0].num_open == 1


def test_a_write_behind_one_that_rested_is_its_return(known, steering):
    (one,) = set(write(known, [b"a1", b"a2"]))
    steering.now_s += REST_S + 1
    known.poll()
    assert one.num_open == 0 and steering.as_dict()["num_away"] == 1
    steering.now_s += 100
    assert write(known, [b"a3"], parent=b"a2") == [one]
    assert (one.num_open, one.turn, one.gap_s) == (1, 2, 100)
    steering.now_s += REST_S + 1
    known.poll()
    assert one.num_open == 0 and steering.conversation_of([b"a1", b"a2", b"a3"]) is one


def test_writes_of_one_answer_are_no_returns(known, steering):
    (one,) = set(write(known, [b"a1"]))
    for before, block_id in ((b"a1", b"a2"), (b"a2", b"a3")):
        steering.now_s += REST_S / 2
        known.poll()
        assert write(known, [block_id], parent=before) == [one]
    assert (one.num_open, one.turn) == (1, 0)


def test_requests_that_are_told_of(known, steering):
    known.arrive("ada", [b"a1", b"a2"])
    one = known.owner("ada", b"a1", ROOT)
    assert write(known, [b"a2", b"a3"], "ada", parent=b"a1") == [one] * 2
    assert one.wanted is not None and one.num_open == 1
    known.finish("ada", [b"a1", b"a2", b"a3"])
    assert one.wanted is None and one.num_open == 0 and steering.conversation_of([b"a3"]) is one
    steering.now_s += 50
    known.arrive("another name", [b"a1", b"a2", b"a3", b"a5"])
    assert (one.num_open, one.turn, one.gap_s) == (1, 2, 50)
    known.finish("another name")
    known.finish("another name")
    known.finish("nobody")
    assert one.num_open == 0


def test_a_named_conversation_goes_on_with_another_beginning(known, steering):
    known.arrive("ada", [b"a1", b"a2"])
    one = known.owner("ada", b"a1", ROOT)
    known.finish("ada")
    known.arrive("ada", [b"x1", b"x2"])
    assert known.owner("ada", b"x1", ROOT) is one and one.turn == 2


def test_an_arrival_goes_on_with_what_grew(known):
    (one,) = set(write(known, [b"a1", b"a2"]))
    known.arrive("request", [b"a1", b"a2", b"a3"])
    assert known.owner("request", b"a3", b"a2") is one and one.num_open == 1
    known.finish("request")
    known.poll()
    assert one.num_open == 0


def test_writes_without_a_request_do_not_keep_one_wanted(known, steering):
    (one,) = set(write(known, [b"a1"], "ada"))
    known.arrive("ada", [b"x1"])  # with another beginning, while the first writes are recent
    assert known.owner("ada", b"x1", ROOT) is one and one.num_open == 2
    known.finish("ada")
    assert one.wanted is None and one.num_open == 1
    steering.now_s += REST_S + 1
    known.poll()
    assert one.num_open == 0


def test_touching_a_chain_is_a_request_where_none_is_told_of(known, steering):
    (one,) = set(write(known, [b"a1", b"a2"]))
    known.touch([b"a1", b"a2"])
    assert one.num_open == 0 and steering.conversation_of([b"a2"]) is one
    steering.now_s += 10
    known.touch([b"a1", b"a2"])
    known.touch([])
    assert one.gap_s == 10 and one.num_open == 0
