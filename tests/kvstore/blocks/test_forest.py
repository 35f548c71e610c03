"""The forest of cached blocks: tails first, shared blocks as their most valuable conversation, nothing that is held;
and its links, in whatever order blocks come and go.
"""

import random

import pytest

from kvstore.blocks.forest import EvictionTree, Links
from tests.support.orders import ByValue, talk


@pytest.fixture
def order():
    return ByValue()


@pytest.fixture
def held():
    return set()


@pytest.fixture
def tree(order, held):
    return EvictionTree(order, lambda key: key not in held)


def grow(tree, names, conversation, parent=None):
    for name in names.split():
        tree.add(name, parent, conversation)
        parent = name


def drained(tree) -> list[str]:
    found = []
    while (key := tree.next()) is not None:
        tree.remove(key)
        tree.check_integrity()
        found.append(key)
    return found


def test_what_is_nobodys_goes_before_all_conversations(tree):
    grow(tree, "a0 a1", talk(1))
    grow(tree, "n0 n1", None)
    grow(tree, "m0", None)
    assert drained(tree) == ["n1", "n0", "m0", "a1", "a0"]


def test_a_shared_block_goes_with_the_most_valuable_of_its_conversations(tree, order):
    a, b = talk(1), talk(2)
    grow(tree, "s0 s1 a0", a)
    grow(tree, "b0", b, parent="s1")
    tree.claim(b, "b0")
    grow(tree, "c0", talk(3))
    order.values = {1: 9.0}  # a is worth most
    assert drained(tree) == ["b0", "c0", "a0", "s1", "s0"]


def test_a_state_and_the_kv_that_only_it_made_usable_go_together(order, held):
    tree = EvictionTree(order, lambda key: key not in held, is_state=lambda key: key[0] == "s")
    a, b = talk(1), talk(2)
    grow(tree, "a0 a1 a2 s0 s1", a)
    grow(tree, "b0 s2", b, parent="a0")
    grow(tree, "c0", talk(3))
    order.values = {1: 1.0, 2: 5.0, 3: 2.0}
    assert [tree.next(), tree.remove("s1")] == ["s1", None]
    order.values[1] = 9.0  # it is worth most from now on, but a part of its state is gone
    assert drained(tree) == ["s0", "a2", "a1", "c0", "s2", "b0", "a0"]


def test_who_runs_keeps_the_kv_whose_state_is_gone(order, held):
    tree = EvictionTree(order, lambda key: key not in held, is_state=lambda key: key[0] == "s")
    a = talk(1)
    grow(tree, "a0 a1", a)
    grow(tree, "s0", a, parent="a1")
    a.num_open = a.num_running = 1  # its next turn leaves another state
    grow(tree, "c0", talk(2))
    order.values = {1: 9.0, 2: 5.0}
    tree.remove("s0")
    assert drained(tree) == ["c0", "a1", "a0"]


def test_an_answer_that_was_left_for_another_branch_keeps_its_place(tree):
    a = talk(2)
    grow(tree, "a0 a1 a2", a)
    grow(tree, "x2", a, parent="a1")  # the last message was edited
    a.use = 1
    grow(tree, "b0", talk(1))
    assert drained(tree) == ["b0", "a2", "x2", "a1", "a0"]


def test_a_remnant_keeps_neither_pin_nor_want(tree):
    a = talk(1)
    a.pinned_until_s, a.num_open, a.num_running, a.wanted = 100.0, 2, 1, (0, 0)
    grow(tree, "p l", a)
    grow(tree, "r", a, parent="p")
    remnant = tree.owner_of["l"]
    assert remnant is not a and remnant.number == 1
    assert (remnant.pinned_until_s, remnant.num_open, remnant.num_running, remnant.wanted) == (0.0, 0, 0, None)


def test_choices_that_grow_in_turn_have_an_owner_each(tree):
    a, left, right = talk(1), "p", "p"
    grow(tree, "p", a)
    for i in range(50):
        grow(tree, f"l{i}", a, parent=left)
        grow(tree, f"r{i}", a, parent=right)
        left, right = f"l{i}", f"r{i}"
    tree.check_integrity()
    assert tree.owner_of.keys() == {"l49", "r49"}


def test_pinned_blocks_are_passed_over_and_come_back(tree):
    grow(tree, "a0 a1 a2", talk(1))
    grow(tree, "b0 b1", talk(2))
    grow(tree, "n0", None)
    pinned = {"a1", "n0"}
    assert tree.evict(100, lambda _: 10, pinned.__contains__) == ["a2", "b1", "b0"]
    tree.check_integrity()
    assert tree.evict(11, lambda _: 10, lambda _: False) == ["n0", "a1"]
    tree.check_integrity()


def test_a_parent_may_come_after_its_children_and_go_before_them(tree):
    a = talk(1)
    tree.add("a1", "a0", a)
    tree.add("a0", "root", a)
    tree.check_integrity()
    tree.remove("a0")
    tree.check_integrity()
    assert "a0" in tree.links.children_of and tree.next() == "a1"
    tree.add("a0", "root", None)
    assert drained(tree) == ["a1", "a0"]


def test_a_forged_loop_is_never_next(tree):
    tree.add("a", "b", None)
    tree.add("b", "a", None)
    assert tree.next() is None
    tree.remove("a")
    tree.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_changes(seed):
    """What goes next is an unheld leaf, and no other unheld leaf is worth less."""
    rng, order, held = random.Random(seed), ByValue(), set()
    tree = EvictionTree(order, lambda key: key not in held)
    talks, num = [talk(n) for n in range(6)], 0

    def worth(key):
        return order.value(tree.owner_of[key]) if key in tree.owner_of else (-1.0, 0)

    for _ in range(400):
        keys, action = sorted(tree.links.parents), rng.random()
        if action < 0.45:
            num += 1
            parent = rng.choice(keys) if keys and rng.random() < 0.85 else None
            tree.add(num, parent, rng.choice([*talks, None]))
        elif action < 0.6 and keys:
            tree.claim(rng.choice(talks), rng.choice(keys))
        elif action < 0.7 and keys:
            key = rng.choice(keys)
            if key in held:
                held.discard(key)
                tree.rest(key)
            else:
                held.add(key)
                tree.hold(key)
        elif action < 0.75:
            order.values[rng.randrange(6)] = rng.random() * 10
        else:
            free = [key for key in keys if key not in held and key not in tree.links.children_of]
            expected = min((worth(key) for key in free), default=None)
            key = tree.next()
            assert (key is None) == (expected is None)
            if key is not None:
                assert key in free and worth(key) == expected
                tree.remove(key)
        tree.check_integrity()
    held.clear()
    for key in sorted(tree.links.parents):
        tree.rest(key)
    left = len(tree.links.parents)
    assert len(drained(tree)) == left
    assert not tree.links.parents and not tree.owner_of and not order.members


@pytest.mark.parametrize("first", [1, 2])
def test_a_head_goes_to_the_more_valuable_of_those_that_end_at_it_or_came_down_to_it(tree, first):
    grow(tree, "s", talk(3 - first))
    grow(tree, "a0", other := talk(first), parent="s")
    tree.remove("a0")
    tree.check_integrity()
    assert tree.owner_of["s"].number == 2 and list(tree.end_of) == [tree.owner_of["s"]]
    tree.claim(other, "s")
    assert tree.end_of == {other: "s"}, "who used it last has it"


def test_what_is_held_when_its_conversation_leaves_keeps_its_place_when_it_is_let_go(tree, held):
    a = talk(2)
    grow(tree, "p l0", a)
    held.add("l0")
    tree.hold("l0")
    grow(tree, "r0", a, parent="p")
    a.use = 1
    assert tree.next() == "r0"
    held.clear()
    tree.rest("l0")
    grow(tree, "b0", talk(1))
    assert drained(tree) == ["b0", "l0", "r0", "p"]


def test_an_owner_that_came_down_to_a_held_block_waits_for_it(tree, held):
    grow(tree, "a0 a1", talk(1))
    held.add("a0")
    tree.remove("a1")
    tree.check_integrity()
    assert tree.next() is None
    held.clear()
    tree.rest("a0")
    assert tree.next() == "a0"


def test_an_owner_of_nothing_here_is_taken_out_of_the_order(tree, order):
    order.add(talk(1))
    grow(tree, "a", mine := talk(2))
    assert tree.next() == "a" and order.members == {mine}
    tree.clear()
    assert not order.members and not tree.owner_of and not tree.end_of and tree.next() is None


def test_without_an_order_blocks_have_no_owners():
    tree: EvictionTree[str] = EvictionTree(None)
    grow(tree, "a0 a1", talk(1))
    tree.claim(talk(2), "a0")
    tree.check_integrity()
    assert drained(tree) == ["a1", "a0"]


def test_a_linked_head_goes_after_its_splice(tree):
    a = talk(1)
    grow(tree, "h0 h1 old", a)
    tree.add("x0", "made by a splice", a)
    tree.add("x1", "x0", a)
    tree.link("x0", "h1")
    tree.link("x0", "h1")
    tree.link("x0", "unknown")
    tree.check_integrity()
    found = drained(tree)
    assert found.index("x1") < found.index("x0") < found.index("h1") < found.index("h0")


# -- links -----------------------------------------------------------------------------------------------------------
def linked(**parents: str) -> Links[str]:
    links: Links[str] = Links()
    for key, parent in parents.items():
        links.add(key, parent)
    links.check_integrity()
    return links


def test_descendants_come_after_what_they_build_on_and_each_once():
    links = linked(a="root", b="a", c="a", d="b", other="elsewhere")
    found = links.descendants("a")
    assert found[0] == "a" and sorted(found) == ["a", "b", "c", "d"] and found.index("b") < found.index("d")
    assert links.descendants("d") == ["d"]


def test_descendants_end_in_a_forged_loop():
    assert sorted(linked(a="b", b="a").descendants("a")) == ["a", "b"]
    assert linked(a="c", b="a", c="b").descendants("b") == ["b", "c", "a"]


def test_cleared_it_knows_nothing():
    links = linked(a="root", b="a")
    links.clear()
    assert not links.parents and not links.children_of and links.descendants("a") == ["a"]
