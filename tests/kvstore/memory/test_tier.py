"""The CPU tier: states of arena blocks, linked blocks, and that what stays is usable from its beginning."""

import random

import pytest

from kvstore.blocks.records import BlockRecord
from kvstore.memory.tier import ArenaBlockState, CpuTier


def record(name: str, parent: str = "root") -> BlockRecord:
    return BlockRecord(name.encode().ljust(32), parent.encode().ljust(32), b"tokens", b"f" * 32)


def put(tier: CpuTier, name: str, parent: str = "root") -> int:
    arena_block = tier.reserve()
    assert arena_block is not None and tier.announce(arena_block, record(name, parent))
    tier.publish(arena_block)
    return arena_block


def names(tier: CpuTier) -> set[str]:
    return {tier.record(arena_block).block_id.decode().strip() for arena_block in tier.pool.cached_blocks()}


def test_an_arena_block_is_found_while_its_bytes_are_on_their_way():
    tier = CpuTier(4)
    arena_block = tier.reserve()
    assert tier.state(arena_block) is ArenaBlockState.EMPTY and tier.arena_block_of(record("a").block_id) is None
    assert tier.announce(arena_block, record("a"))
    assert tier.arena_block_of(record("a").block_id) == arena_block
    assert tier.state(arena_block) is ArenaBlockState.PENDING
    tier.publish(arena_block)
    assert tier.state(arena_block) is ArenaBlockState.READY
    other = tier.reserve()
    assert not tier.announce(other, record("a")), "another arena block has that block"
    tier.release(arena_block)
    tier.release(other)
    tier.check_integrity()


def test_the_chain_that_was_used_last_goes_last():
    tier = CpuTier(4)
    for name in ("a", "c"):
        head, tail = put(tier, name), put(tier, name + "2", name)
        tier.release(head)
        tier.release(tail)
    tier.touch([record("a").block_id, record("a2").block_id])
    tier.reserve()
    tier.reserve()
    assert names(tier) == {"a", "a2"}


def test_a_failed_block_takes_with_it_what_hangs_below():
    tier = CpuTier(4)
    arena_blocks = [put(tier, "a"), put(tier, "b", "a"), put(tier, "c", "b"), put(tier, "d", "a")]
    assert sorted(tier.fail(arena_blocks[1])) == sorted(arena_blocks[1:3])
    assert names(tier) == {"a", "d"}
    for arena_block in arena_blocks:
        tier.release(arena_block)
    tier.check_integrity()


def test_a_staging_area_forgets_what_nobody_holds():
    tier = CpuTier(2, keep=False)
    parent, child = put(tier, "a"), put(tier, "b", "a")
    tier.acquire(child)
    tier.release(parent)
    tier.release(child)
    assert names(tier) == {"b"}, "its parent is on disk"
    tier.release(child)
    assert names(tier) == set() and tier.pool.num_free == 2


def test_what_was_held_and_has_no_name_is_erased_once():
    erased: list[list[int]] = []
    tier = CpuTier(3, erase=lambda arena_blocks: erased.append(list(arena_blocks)))
    named, partial = put(tier, "a"), tier.reserve()
    tier.release(named)
    tier.release(partial)
    tier.forget(record("a").block_id)
    tier.erase_stale()
    tier.erase_stale()
    assert sorted(erased[0]) == sorted([named, partial]) and not any(erased[1:])
    assert tier.record(named) is None, "a record holds the tokens"


@pytest.mark.parametrize("seed", range(20))
def test_at_random_what_stays_is_closed_under_parents(seed):
    rng = random.Random(seed)
    tier, held, count = CpuTier(12), [], 0
    for _ in range(300):
        action = rng.random()
        if action < 0.55:
            arena_block = tier.reserve()
            if arena_block is not None:
                parent = rng.choice([*sorted(names(tier)), "root"])
                count += 1
                if parent != "root" and rng.random() < 0.3:
                    tier.acquire(tier.arena_block_of(record(parent).block_id))
                    held.append(tier.arena_block_of(record(parent).block_id))
                assert tier.announce(arena_block, record(f"n{count}", parent))
                tier.publish(arena_block)
                held.append(arena_block)
        elif action < 0.9 and held:
            tier.release(held.pop(rng.randrange(len(held))))
        elif names(tier):
            tier.forget(record(rng.choice(sorted(names(tier)))).block_id)
        there = {tier.record(arena_block).block_id for arena_block in tier.pool.cached_blocks()}
        missing = {tier.record(s).parent_id for s in tier.pool.cached_blocks()} - there - {record("x").parent_id}
        assert not missing
        tier.check_integrity(idle=False)
    for arena_block in held:
        tier.release(arena_block)
    tier.check_integrity()


def test_what_is_given_up_for_another_reason_than_room_is_counted_once():
    tier = CpuTier(4)
    arena_blocks = [put(tier, "a"), put(tier, "b", "a")]
    pending = tier.reserve()
    tier.announce(pending, record("c", "b"))
    tier.fail(arena_blocks[0])
    tier.fail(arena_blocks[1])
    tier.forget(record("b").block_id)
    assert tier.num_removed == 2, "what had not landed was never there"
    for arena_block in (*arena_blocks, pending):
        tier.release(arena_block)
    assert tier.as_dict(10) == {
        "blocks": 4, "staging_blocks": 0, "cached_blocks": 0, "free_blocks": 4, "evicted_blocks": 0,
        "removed_blocks": 2, "block_bytes": 10,
    }  # fmt: skip


def test_parents_are_named_before_their_children_whatever_arena_blocks_they_have():
    tier = CpuTier(6)
    for name, parent in (("c", "b"), ("b", "a"), ("x", "gone"), ("d", "c"), ("a", "root")):
        put(tier, name, parent)
    found = [one.decode().strip() for one in tier.with_descendants(tier.absent_parents())]
    assert set(found) == {"root", "gone", "x", *"abcd"}
    assert found.index("gone") < found.index("x") and [one for one in found if one in "abcd"] == [*"abcd"]
