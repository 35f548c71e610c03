"""What a selection by hand evicts: the same on CPU and on disk, whole tails, the least recently used first."""

import pytest

from kvstore.blocks.forest import Candidate, EvictionTree, select
from kvstore.blocks.records import BlockRecord, Evict
from kvstore.disk.index import DiskIndex, IndexEntry
from kvstore.memory.tier import CpuTier

CHAINS = [("a0", "root", 0.0, "m1"), ("a1", "a0", 1.0, "m1"), ("a2", "a1", 2.0, "m1"), ("b0", "root", 50.0, "m2"),
          ("b1", "b0", 50.0, "m2")]  # fmt: skip
NOW_S = 100.0


def block(name: str) -> bytes:
    return name.encode().ljust(32)


def names(ids) -> list[str]:
    return [one.decode().strip() for one in ids]


def on_cpu(what: Evict) -> list[bytes]:
    now_s = [0.0]
    tier = CpuTier(8, clock=lambda: now_s[0])
    for name, parent, now_s[0], model in CHAINS:
        arena_block = tier.reserve()
        assert tier.announce(arena_block, BlockRecord(block(name), block(parent), b"", b"", model=model))
        tier.publish(arena_block)
        tier.release(arena_block)
    now_s[0] = NOW_S
    return tier.select(what, 10)


def on_disk(what: Evict) -> list[bytes]:
    index = DiskIndex(clock=lambda: NOW_S)
    for name, parent, used_s, model in CHAINS:
        index.add(IndexEntry(block(name), block(parent), 10, used_s, model))
    return index.select(what)


@pytest.mark.parametrize("tier", [on_cpu, on_disk])
@pytest.mark.parametrize(("what", "expected"), [
    (Evict(), []),
    (Evict(everything=True), ["a2", "a1", "a0", "b1", "b0"]),
    (Evict(model="m2"), ["b1", "b0"]),
    (Evict(unused_for_s=90.0), ["a2", "a1", "a0"]),
    (Evict(unused_for_s=90.0, model="m2"), []),
    (Evict(everything=True, model="m2"), ["b1", "b0"]),
    (Evict(to_bytes=31), ["a2", "a1"]),
    (Evict(to_bytes=30), ["a2", "a1"]),
    (Evict(to_bytes=1000), []),
    (Evict(to_bytes=0), ["a2", "a1", "a0", "b1", "b0"]),
    (Evict(block_ids=frozenset({block("b1"), block("a2"), block("a0"), block("zz")})), ["a2", "b1"]),
    (Evict(block_ids=frozenset()), []),
])  # fmt: skip
def test_both_tiers_give_up_the_same(tier, what, expected):
    assert names(tier(what)) == expected


@pytest.fixture
def fork() -> EvictionTree[str]:
    """A head of two blocks, with two tails."""
    forest: EvictionTree[str] = EvictionTree(None)
    for key, parent in (("s0", None), ("s1", "s0"), ("a0", "s1"), ("a1", "a0"), ("b0", "s1")):
        forest.add(key, parent, None)
    return forest


def chosen(forest: EvictionTree[str], what: Evict, is_pinned=None) -> list[str]:
    def candidate(key: str) -> Candidate:
        return Candidate(block(key), "", ord(key[0]), 1)

    return select(what, forest.links, candidate, lambda one: one.decode().strip(), 5, NOW_S, is_pinned)


def test_a_shared_head_goes_when_no_tail_is_left(fork):
    assert chosen(fork, Evict(everything=True)) == ["a1", "a0", "b0", "s1", "s0"]
    without_b = frozenset(map(block, ("s0", "s1", "a0", "a1")))
    assert chosen(fork, Evict(block_ids=without_b)) == ["a1", "a0"]


def test_a_block_that_is_pinned_keeps_what_is_above_it(fork):
    assert chosen(fork, Evict(everything=True), {"a0"}.__contains__) == ["a1", "b0"]
