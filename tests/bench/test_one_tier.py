"""One tier with our own policies: against a naive cache, an exact oracle and results made by hand."""

import itertools
from collections import OrderedDict

import pytest

from bench.one_tier import OneTier, replay_one_tier
from bench.references import References, prompt_blocks
from kvstore.errors import ConfigError
from tests.support.small_traces import chained_trace, request, trace


def naive_lru(trace, capacity):
    """Blocks one by one: a request's are touched or inserted from tail to head. Returns blocks and tokens hit."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_blocks = num_tokens = 0
    for one in trace.requests:
        names = list(prompt_blocks(one, trace.block_size))
        num_hit = len(list(itertools.takewhile(cache.__contains__, names)))
        num_blocks += num_hit
        num_tokens += min(num_hit * trace.block_size, one.num_tokens)
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return num_blocks, num_tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [1, 7, 40, 200, 5000])
def test_one_tier_with_lru_is_block_lru(seed, capacity):
    made = chained_trace(seed)
    one = OneTier(made, capacity, "lru")
    result = one.run()
    one.check_integrity()
    assert (result.num_hit_blocks, result.num_hit_tokens) == naive_lru(made, capacity)


def test_one_tier_counts_the_longest_prefix_before_its_own_blocks():
    result = replay_one_tier(
        trace(
            request([1, 2], 25, partial=3),
            request([1, 2], 25, partial=3),  # 2 full blocks and the partial one: all 25 tokens
            request([1, 2, 4], 30),  # 2 of 3
            request([5, 2], 20),  # nothing: a gap ends the prefix
        ),
        100,
        "lru",
    )
    assert (result.num_blocks, result.num_hit_blocks) == (3 + 3 + 3 + 2, 3 + 2)
    assert (result.num_prompt_tokens, result.num_hit_tokens) == (100, 25 + 20)
    assert result.block_hit_rate == 5 / 11
    assert result.token_hit_rate == 0.45


def test_one_tier_keeps_the_head_of_what_does_not_fit():
    result = replay_one_tier(trace(request([1, 2, 3, 4]), request([1, 2, 3, 4])), 3, "lru")
    assert result.num_hit_blocks == 3


@pytest.mark.parametrize("policy", ["fifo", "lru", "return", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_hits_most(policy, seed):
    made = chained_trace(seed, has_partial=False)
    for capacity in (20, 60, 150):
        best = References(made).replay("belady", capacity).num_hit_blocks
        assert replay_one_tier(made, capacity, policy).num_hit_blocks <= best


def test_a_tier_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="a tier of 0 blocks"):
        replay_one_tier(trace(request([1])), 0, "lru")
