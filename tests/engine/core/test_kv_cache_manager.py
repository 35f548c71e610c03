"""Blocks of requests: prefix hits, allocation all or nothing, copy on write, what stays cached after a request."""

import pytest

from kvstore.blocks.ids import Lineage, lineage_root
from kvstore.blocks.pool import BlockPool
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
ROOTS = {tenant: lineage_root(b"secret", "model", tenant) for tenant in ("a", "b")}


def new_request(name: str, tokens: list[int], tenant: str = "a", index: int = 0) -> Request:
    params = SamplingParams(max_tokens=100)
    return Request(name, tokens, params, 100, Lineage(ROOTS[tenant]), BLOCK_SIZE, seed=0, index=index)


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    request.num_computed_tokens += num_tokens
    manager.cache_full_blocks(request, request.num_computed_tokens)


def run_prompt(manager: KVCacheManager, request: Request) -> list[int]:
    """Admit a request with its hits and compute the rest of its prompt at once; returns the hits."""
    hits = manager.match_prefix(request)
    num_new = request.num_tokens - len(hits) * BLOCK_SIZE
    assert manager.admit(request, hits, num_new)
    compute(manager, request, num_new)
    return hits


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(BlockPool(12), BLOCK_SIZE)


@pytest.mark.parametrize(
    ("tokens", "num_hits"),
    [
        (list(range(12)), 2),  # a full prompt hit still computes the last token, so its block
        (list(range(13)), 3),
        ([*range(11), 99], 2),
        ([*range(8), 99, 98, 97, 96, 95], 2),
        ([0, 1, 2, 99, *range(4, 12)], 0),
        (list(range(4)), 0),
        (list(range(5)), 1),
        ([7], 0),
    ],
)
def test_hits_are_the_longest_known_prefix_and_leave_a_token_to_compute(manager, tokens, num_hits):
    first = new_request("first", list(range(12)))
    run_prompt(manager, first)
    second = new_request("second", tokens)
    assert run_prompt(manager, second) == first.block_numbers[:num_hits]
    assert second.block_numbers[:num_hits] == first.block_numbers[:num_hits]
    assert set(second.block_numbers[num_hits:]).isdisjoint(first.block_numbers)


def test_a_forgotten_block_ends_the_hit(manager):
    first = new_request("first", list(range(13)))
    run_prompt(manager, first)
    manager.free(first)
    chain = first.chain
    blocks = [manager.pool.lookup(block_id) for block_id in chain]
    assert manager.pool.forget(blocks[1]) == blocks[1:]
    assert manager.match_prefix(new_request("second", list(range(13)))) == [blocks[0]]


def test_admission_is_all_or_nothing():
    manager = KVCacheManager(BlockPool(4), BLOCK_SIZE)
    first = new_request("first", list(range(8)))
    run_prompt(manager, first)
    big = new_request("big", [*range(8), *range(50, 58)])
    hits = manager.match_prefix(big)
    assert len(hits) == 2
    assert not manager.admit(big, hits, 9)
    assert (big.block_numbers, manager.pool.num_free) == ([], 2)
    assert [manager.pool.ref_count(block) for block in hits] == [1, 1]
    assert manager.admit(big, hits, 8)
    assert (len(big.block_numbers), manager.pool.num_free) == (4, 0)


def test_free_hits_are_not_counted_as_room():
    """The hit blocks are free, and so is exactly one more: three new blocks do not fit, though three are free."""
    manager = KVCacheManager(BlockPool(3), BLOCK_SIZE)
    first = new_request("first", list(range(9)))
    run_prompt(manager, first)
    manager.free(first)
    assert manager.pool.num_free == 3
    second = new_request("second", [*range(8), *range(60, 68)])
    hits = manager.match_prefix(second)
    assert not manager.admit(second, hits, 8)
    assert manager.pool.num_free == 3
    assert manager.admit(second, hits, 4)


def test_two_requests_that_compute_the_same_block_keep_one_id(manager):
    """Both were admitted before either had computed: the second copy is not findable and goes first."""
    one, two = new_request("one", list(range(8))), new_request("two", list(range(8)))
    for request in (one, two):
        assert manager.admit(request, manager.match_prefix(request), 8)
    for request in (one, two):
        compute(manager, request, 8)
    assert [manager.pool.lookup(block_id) for block_id in one.chain] == one.block_numbers
    assert [manager.pool.block_id(block) for block in two.block_numbers] == [None, None]
    manager.free(one)
    manager.free(two)
    manager.pool.check_integrity()
