"""Tests of kvstore.disk.index: leaves first, closed under parents, in the order of last use."""

import hashlib
import random

import pytest
from msgspec.structs import replace

from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.policy.conversation import Conversation
from tests.support.orders import ByValue


def block(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def entry(name: str, parent: str, size: int = 10, used_s: float = 0.0, model: str = "m") -> IndexEntry:
    return IndexEntry(block(name), block(parent), size, used_s, model, "tenant")


def conversation(index: DiskIndex, name: str, length: int, parent: str = "root") -> None:
    for i in range(length):
        index.add(entry(f"{name}{i}", parent if i == 0 else f"{name}{i - 1}"))


def victims(index: DiskIndex, num_bytes: int, *pinned) -> list[bytes]:
    return [entry.block_id for entry in index.take_victims(num_bytes, *pinned)]


def oldest() -> ByValue:
    """An order by last use."""
    order = ByValue()
    order.value = lambda conversation: (conversation.use, 0)
    return order


def names(block_ids: list[bytes]) -> list[str]:
    known = {block(f"{c}{i}"): f"{c}{i}" for c in "abcdes" for i in range(20)}
    return [known[block_id] for block_id in block_ids]


def test_a_conversation_is_eaten_from_its_tail():
    index = DiskIndex()
    conversation(index, "a", 3)
    conversation(index, "b", 2)
    assert victims(index, 0) == [] and victims(index, -5) == []
    assert names(victims(index, 1)) == ["a2"]
    assert names(victims(index, 15)) == ["a1", "a0"]
    assert len(index) == 2 and index.bytes.total == 20
    assert names(victims(index, 10**9)) == ["b1", "b0"]
    assert len(index) == 0 and index.bytes.total == 0


def test_touched_leaves_go_last_and_times_are_handed_out_once():
    index = DiskIndex()
    conversation(index, "a", 2)
    conversation(index, "b", 2)
    index.touch(block("a1"), 7.0)
    assert names(victims(index, 1)) == ["b1"]
    assert index.get(block("a1")).last_access_s == 7.0  # of the last of them, which keeps the others
    assert index.take_touched() == {block("a1"): 7.0}
    assert index.take_touched() == {}


def test_adding_again_replaces():
    index = DiskIndex()
    index.add(entry("a0", "root", 10))
    index.add(entry("b0", "root", 10))
    index.add(entry("a0", "root", 30))
    assert index.bytes.total == 40 and names(victims(index, 1)) == ["b0"]
    index.add(entry("a0", "elsewhere", 5))
    index.check_integrity()
    assert index.bytes.total == 5 and block("elsewhere") in index.links.children_of


def test_build_orders_by_last_access():
    entries = [entry("a0", "root", used_s=5), entry("b0", "root", used_s=1), entry("c0", "root", used_s=3),
               entry("c1", "c0", used_s=9)]  # fmt: skip
    for order in (entries, entries[::-1]):
        index = DiskIndex.build([order[:2], order[2:]])
        index.check_integrity()
        assert names(victims(index, 1000)) == ["b0", "a0", "c1", "c0"]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_changes_sums_and_order_agree_and_what_goes_was_a_leaf(seed):
    rng, index, known, now = random.Random(seed), DiskIndex(), [], 0.0
    for _ in range(300):
        action, now = rng.random(), now + 1
        if action < 0.6:
            parent = rng.choice(known) if known and rng.random() < 0.8 else rng.randbytes(32)
            known.append(rng.randbytes(32))
            index.add(IndexEntry(known[-1], parent, rng.randrange(1, 50), now, tenant=rng.choice("ab")))
        elif action < 0.75 and known:
            index.touch(rng.choice(known), now)
        elif action < 0.85 and known:
            for block_id in reversed(index.links.descendants(rng.choice(known))):
                index.remove(block_id)
        elif known:
            pinned = set(rng.sample(known, rng.randrange(len(known)) // 8))
            before, wanted = index.bytes.total, rng.randrange(200)
            gone = victims(index, wanted, pinned.__contains__)
            assert not pinned & set(gone)
            assert before - index.bytes.total >= wanted or set(index.links.leaves()) <= pinned
        known = [block_id for block_id in known if block_id in index]
        index.check_integrity()
    assert len(index) == len(known)


def test_leaves_found_at_a_start_become_conversations_in_the_order_of_last_use():
    entries = [entry("s0", "root", used_s=1), entry("a0", "s0", used_s=9), entry("b0", "s0", used_s=4)]
    index = DiskIndex.build([entries])
    found = index.name_conversations(oldest())
    index.check_integrity()
    assert [(names([leaf])[0], one.used_s) for leaf, one in found] == [("b0", 4), ("a0", 9)]
    assert all(one.number < 0 and one.use < 0 for _, one in found), "older than what comes"
    assert names(victims(index, 1000)) == ["b0", "a0", "s0"]


def test_a_written_block_belongs_to_its_conversation():
    index = DiskIndex()
    assert index.name_conversations(oldest()) == []
    old, young = (Conversation(number, 0, 0.0, 0.0, use=number) for number in (1, 2))
    for name, parent, who in (("a0", "root", young), ("a1", "a0", young), ("b0", "root", old)):
        index.add(entry(name, parent), who)
    index.check_integrity()
    assert names(victims(index, 1000)) == ["b0", "a1", "a0"]


def of_tenant(name: str, parent: str, tenant: str, size: int = 10) -> IndexEntry:
    return replace(entry(name, parent, size), tenant=tenant)


def test_bytes_are_counted_by_tenant():
    index = DiskIndex()
    for name, tenant, size in (("a0", "anna", 10), ("b0", "bert", 7), ("c0", "anna", 5)):
        index.add(of_tenant(name, "root", tenant, size))
    index.check_integrity()
    assert [index.bytes.of(name) for name in ("anna", "bert", "nobody")] == [15, 7, 0]
    index.add(of_tenant("a0", "root", "anna", 30))
    assert index.bytes.of("anna") == 35
    index.add(of_tenant("c0", "root", "bert", 1))  # a forged file
    index.check_integrity()
    assert (index.bytes.of("anna"), index.bytes.of("bert")) == (30, 8)
    index.remove(block("a0"))
    assert (index.bytes.of("anna"), index.bytes.of("bert")) == (0, 8)
    index.take_victims(1000)
    index.check_integrity()
    assert index.bytes.of("bert") == index.bytes.total == 0 and index.bytes.of_tenants == {}
