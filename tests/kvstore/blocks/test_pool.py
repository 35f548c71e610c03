"""The block pool: counts, eviction order, ids; planted faults; and a random machine against a simple model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.blocks.pool import BlockPool


def name(i: int) -> bytes:
    return b"id%d" % i


def test_a_block_has_one_id_and_somebody_who_holds_it():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.insert(block, name(1))
    with pytest.raises(AssertionError, match="another id already"):
        pool.insert(block, name(2))
    pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([block])
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.insert(0, name(1))


def half_used() -> BlockPool:
    """Blocks 0, 1 in use with ids 0, 1; blocks 2, 3 free with ids 2, 3; 4 and 5 free."""
    pool = BlockPool(6)
    chain = pool.allocate(4)
    assert chain == [0, 1, 2, 3]
    for block in chain:
        assert pool.insert(block, name(block))
    pool.release(chain[2:])
    pool.check_integrity(idle=False)
    return pool


FAULTS = {
    "a lost reference": lambda pool: pool._ref_counts.__setitem__(0, 0),
    "a reference to a free block": lambda pool: pool._ref_counts.__setitem__(4, 1),
    "a negative count": lambda pool: pool._ref_counts.__setitem__(4, -1),
    "a free block that is not in the free list": lambda pool: pool._blank.pop(5),
    "a cached block that is not to be next": lambda pool: pool.tree._unowned.pop(2),
    "a block that the order does not know": lambda pool: pool.tree.links.parents.pop(0),
    "a used block in the free list": lambda pool: pool._blank.__setitem__(1, None),
    "an id that leads to another block": lambda pool: pool._by_id.__setitem__(name(0), 1),
    "an id that leads nowhere": lambda pool: pool._by_id.pop(name(2)),
    "an id of no block": lambda pool: pool._by_id.__setitem__(name(9), 4),
    "a block that forgot its id": lambda pool: pool._block_ids.__setitem__(3, None),
    "two blocks with one id": lambda pool: pool._block_ids.__setitem__(4, name(0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_integrity_finds(fault):
    pool = half_used()
    FAULTS[fault](pool)
    with pytest.raises(AssertionError):
        pool.check_integrity(idle=False)


def test_check_integrity_finds_a_leak_when_nothing_runs():
    with pytest.raises(AssertionError, match="2 blocks still held"):
        half_used().check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Chains come, are shared and go, in any order; the model keeps plain lists and searches them."""

    SIZE = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.held: list[list[int]] = []  # each holds a reference to its blocks
        self.content: dict[int, bytes] = {}  # block -> id
        self.free: list[int] = list(range(self.SIZE))  # eviction order
        self.next_id = 0

    def count(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.held)

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count):
        if count > len(self.free):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        for block in expected:
            self.content.pop(block, None)
        assert self.pool.allocate(count) == expected
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fresh=st.booleans())
    def cache(self, data, fresh):
        """A block was filled, with new content or with what another block holds."""
        blocks = [b for held in self.held for b in held if b not in self.content]
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        if fresh or not self.content:
            self.next_id += 1
            block_id = name(self.next_id)
        else:
            block_id = data.draw(st.sampled_from(sorted(self.content.values())))
        is_new = block_id not in self.content.values()
        assert self.pool.insert(block, block_id) == is_new
        if is_new:
            self.content[block] = block_id

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hit(self, data):
        found = data.draw(st.lists(st.sampled_from(sorted(self.content)), unique=True, max_size=4))
        assert [self.pool.lookup(self.content[block]) for block in found] == found
        self.pool.acquire(found)
        self.held.append(found)
        self.free = [block for block in self.free if block not in found]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.count(block) == 0:
                self.free.insert(len(self.free) if block in self.content else 0, block)

    @rule()
    def evict_all(self):
        cached = [block for block in self.free if block in self.content]
        assert self.pool.evict_all() == len(cached)
        for block in cached:
            del self.content[block]

    @invariant()
    def agrees(self):
        pool = self.pool
        assert [pool.ref_count(b) for b in range(self.SIZE)] == [self.count(b) for b in range(self.SIZE)]
        assert [*pool._blank, *pool.tree._unowned] == self.free
        assert (pool.num_free, pool.num_cached) == (len(self.free), len(self.content))
        assert [pool.block_id(b) for b in range(self.SIZE)] == [self.content.get(b) for b in range(self.SIZE)]
        uncached = [block not in self.content for block in self.free]
        assert uncached == sorted(uncached, reverse=True), "uncached blocks go first"
        pool.check_integrity(idle=not any(self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)
