"""Where conversations end: one block each, few at one block, a copy where a conversation has left a branch."""

import pytest

from kvstore.blocks.forest import MAX_ENDS, Ends
from tests.support.orders import ByValue, talk


@pytest.fixture
def order():
    return ByValue()


@pytest.fixture
def ends(order):
    ends: Ends[str] = Ends(order)
    yield ends
    ends.check_integrity()


def test_the_least_valuable_is_next_and_leaves_a_block_that_others_value(ends):
    low, high, other = talk(1), talk(3), talk(2)
    for conversation, key in ((low, "shared"), (high, "shared"), (other, "b")):
        ends.move(conversation, key)
        ends.admit(key)
    assert ends.next() == "b" and list(ends.conversations("shared")) == [high]
    ends.withdraw("b")
    assert ends.next() == "shared"
    ends.withdraw("shared")
    assert ends.next() is None


def test_a_conversation_of_which_nothing_is_here_is_taken_out_of_the_order(ends, order):
    order.add(talk(1))
    ends.move(mine := talk(2), "a")
    ends.admit("a")
    assert ends.next() == "a" and order.members == {mine}


def test_a_conversation_grows_without_a_copy_and_leaves_one_on_a_branch(ends):
    a = talk(1)
    assert ends.extend(a, "p", None) is None and ends.extend(a, "l", "p") is None
    assert ends.block_of == {a: "l"}
    assert ends.extend(a, "r", "p") == "l"
    (copy,) = ends.conversations("l")
    assert ends.block_of == {a: "r", copy: "l"} and copy is not a and copy.branch < 0
    assert ends.extend(a, "new", None) == "r", "a prompt without anything in common is a branch too"
    assert len(ends.block_of) == 3


def test_a_copy_keeps_no_pin(ends):
    a = talk(1)
    a.pinned_until_s, a.num_open, a.num_running, a.wanted = 100.0, 2, 1, (0, 0)
    ends.extend(a, "l", None)
    ends.extend(a, "r", "p")
    (copy,) = ends.conversations("l")
    assert (copy.pinned_until_s, copy.num_open, copy.num_running, copy.wanted) == (0.0, 0, 0, None)


def test_choices_that_grow_in_turn_do_not_multiply(ends):
    a, left, right = talk(1), "p", "p"
    ends.extend(a, "p", None)
    for i in range(50):
        ends.extend(a, f"l{i}", left)
        ends.extend(a, f"r{i}", right)
        left, right = f"l{i}", f"r{i}"
    assert sorted(ends.block_of.values()) == ["l49", "r49"]


def test_a_claim_on_its_own_path_leaves_no_copy(ends):
    a = talk(1)
    ends.claim(a, ["p"])
    ends.claim(a, ["p", "q", "r"])
    assert ends.block_of == {a: "r"}


def test_a_claim_on_another_branch_leaves_a_copy_and_changes_places_with_it_when_it_comes_back(ends):
    a = talk(1)
    ends.claim(a, ["p", "l"])
    ends.claim(a, ["p", "r"])
    (copy,) = ends.conversations("l")
    assert copy.number == 1 and ends.block_of == {a: "r", copy: "l"}
    ends.claim(a, ["p", "l"])
    assert ends.block_of == {a: "l", copy: "r"}


def test_of_too_many_claims_wanted_and_pinned_ones_stay(ends):
    for number in range(1, 100):
        person = talk(number, use=number)
        person.wanted = (0, 0) if number == 3 else None
        person.pinned_until_s = 9.0 if number == 5 else 0.0
        ends.claim(person, ["s"])
    assert {one.number for one in ends.conversations("s")} == {3, 5, *range(102 - MAX_ENDS, 100)}


def test_a_copy_takes_the_place_of_its_conversation_alone(ends):
    people = [talk(number, use=number) for number in range(1, MAX_ENDS + 1)]
    for person in people:
        ends.claim(person, ["s"])
    ends.claim(people[-1], ["t"])
    assert sorted(one.number for one in ends.conversations("s")) == [one.number for one in people]


def test_what_ends_at_an_evicted_block_ends_at_its_parent(ends, order):
    a, b, c = talk(1), talk(2), talk(3)
    ends.move(a, "child")
    ends.admit("child")
    ends.withdraw("child")
    assert ends.shorten("child", "parent") and ends.block_of == {a: "parent"} and order.members == {a}
    assert not ends.shorten("child", "parent"), "nobody ends there"
    ends.move(b, "child")
    assert not ends.shorten("child", "parent"), "the order has to hear of a block at which two end"
    ends.move(c, "child")
    assert not ends.shorten("child", "elsewhere")
    ends.move_all("child", "parent")
    assert set(ends.conversations("parent")) == {a, b, c}
    ends.move_all("parent", None)
    assert not ends.block_of and not order.members


def test_cleared_it_knows_nobody(ends, order):
    for number, key in ((1, "a"), (2, "a"), (3, "b")):
        ends.move(talk(number), key)
        ends.admit(key)
    ends.clear()
    assert not ends.block_of and not ends.at and not order.members


def test_without_an_order_conversations_are_ignored():
    ends: Ends[str] = Ends(None)
    ends.extend(talk(1), "a", None)
    ends.admit("a")
    ends.withdraw("a")
    assert not ends.block_of and not ends.shorten("a", "b") and ends.next() is None
