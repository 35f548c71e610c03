"""The reference caches: answers worked out by hand, the plainest twins, and libcachesim where its rules agree. And one
tier with our own policies.
"""

import itertools
import random

import pytest

from bench.one_tier import OneTier, replay_one_tier
from bench.references import REFERENCES, Belady, Fifo, Lfu, Lru, References, S3Fifo, prompt_blocks
from bench.traffic import generate
from kvstore.errors import ConfigError
from kvstore.planning.traces import Trace, TraceRequest
from tests.support.small_traces import chained_trace, request, trace


def trace_of(requests, block_size=10):
    """Every name a full block."""
    return Trace("test", block_size, [TraceRequest(names, len(names) * block_size, 0, 0.0) for names in requests])


def hit_blocks(policy, capacity, requests):
    return References(trace_of(requests)).replay(policy, capacity).num_hit_blocks


def hits_one_by_one(policy, capacity, requests):
    """Hits of every request, from the hits of all beginnings of the trace, whose warm-up is all but the last."""
    references = [References(trace_of(requests), warm_up=number) for number in range(len(requests))]
    left = [found.replay(policy, capacity).num_hit_blocks for found in references] + [0]
    return [here - there for here, there in itertools.pairwise(left)]


# -- by hand ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", REFERENCES)
def test_the_head_of_a_request_that_is_too_long_stays(policy):
    # All three come again at the same time, and of these Belady gives up the one touched last: 2, for 1.
    assert hits_one_by_one(policy, 2, [[1, 2, 3], [1, 2, 3]])[1] == (1 if policy == "belady" else 2)


def test_tokens_of_a_partial_block_count_as_many_as_there_are():
    requests = [TraceRequest([1, 2], 25, 0, 0.0, partial=3), TraceRequest([1, 2], 25, 0, 0.0, partial=3)]
    hits = References(Trace("test", 10, requests)).replay("lru", 9)
    assert (hits.num_blocks, hits.num_hit_blocks, hits.num_prompt_tokens, hits.num_hit_tokens) == (6, 3, 50, 25)
    assert (hits.block_hit_rate, hits.token_hit_rate) == (0.5, 0.5)
    answered = TraceRequest([1, 2, 3], 25, 10, 0.0, has_answer=True)
    hits, num_distinct = References(Trace("test", 10, [answered, answered])).ideal()
    assert (hits.num_hit_blocks, hits.num_hit_tokens, num_distinct) == (2, 20, 2), "the answer is no prompt"


def test_the_warm_up_is_replayed_but_not_counted():
    hits = References(trace_of([[1], [1], [2]]), warm_up=1).replay("lru", 2)
    assert (hits.num_blocks, hits.num_hit_blocks) == (2, 1)


# -- beside the plainest twins ---------------------------------------------------------------------------------------
def random_requests(seed, num_requests=150, names_twice=False):
    """Conversations that grow, behind two shared heads, and a few chains that come once."""
    rng = random.Random(seed)
    talks = [[rng.randrange(2), 10 + number] for number in range(8)]
    requests = []
    for number in range(num_requests):
        if rng.random() < 0.15:
            requests.append([rng.randrange(2), *range(-10 * number - 9, -10 * number - rng.randrange(9))])
            continue
        talk = rng.choice(talks)
        talk.extend(rng.randrange(100, 100_000) for _ in range(rng.randrange(3)))
        if len(talk) > 12:
            del talk[2:]
        requests.append([*talk, *talk[:2]] if names_twice else list(talk))
    return requests


def plain_hits(policy, capacity, requests):
    """Lists and min() over all blocks."""
    present, counts, last_use, clock, total = set(), {}, {}, 0, 0

    def worth(name, number):
        if policy == "lfu":
            return counts[name], last_use[name]
        # A block that this request has not touched yet is requested now.
        since = number + 1 if last_use[name] >= began else number
        comes = [i for i in range(since, len(requests)) if name in requests[i]]
        return -(comes[0] if comes else len(requests)), -last_use[name]

    for number, names in enumerate(requests):
        for name in names:
            if name not in present:
                break
            total += 1
        began = clock
        for name in reversed(names):
            if name not in present:
                if len(present) >= capacity:
                    present.remove(min(present, key=lambda other: worth(other, number)))
                present.add(name)
            counts[name] = counts.get(name, 0) + 1
            last_use[name] = clock
            clock += 1
    return total


@pytest.mark.parametrize("policy", ["lfu", "belady"])  # the others: see below
@pytest.mark.parametrize("capacity", [1, 2, 7, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_hits_as_the_plainest_twin(policy, capacity, seed):
    requests = random_requests(seed, names_twice=seed == 2)
    assert hit_blocks(policy, capacity, requests) == plain_hits(policy, capacity, requests)


@pytest.mark.parametrize("capacity", [1, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_no_cache_is_larger_than_its_capacity_and_none_beats_the_ideal(capacity, seed):
    requests = random_requests(seed)
    caches = [kind(capacity) for kind in (Fifo, Lru, Lfu, S3Fifo)] + [Belady(capacity, requests)]
    for names in requests:
        for cache in caches:
            cache.use(names)
            assert len(cache.blocks) <= capacity and names[0] in cache.blocks
    references = References(trace_of(requests))
    ideal, num_distinct = references.ideal()
    for policy in REFERENCES:
        assert references.replay(policy, capacity).num_hit_blocks <= ideal.num_hit_blocks
        assert references.replay(policy, num_distinct) == ideal


# -- beside libcachesim ----------------------------------------------------------------------------------------------
def their_hits(cache, requests):
    """By the same rules: find without an update, then touch or insert from tail to head."""
    libcachesim = pytest.importorskip("libcachesim")
    asked, total = libcachesim.Request(), 0
    numbers: dict[int, int] = {}  # from 1 on: some of the names of made-up traffic are below zero, which it refuses
    for names in requests:
        for name in names:
            asked.obj_id = numbers.setdefault(name, len(numbers) + 1)
            if cache.find(asked, False) is None:
                break
            total += 1
        for name in reversed(names):
            asked.obj_id = numbers.setdefault(name, len(numbers) + 1)
            cache.get(asked)
    return total


@pytest.fixture(scope="module")
def traffic():
    """Made-up conversations, and random ones."""
    made_up = [list(prompt_blocks(request, 128)) for request in generate(1500, seed=1).requests]
    return made_up, [[abs(name) for name in names] for names in random_requests(5, 2000)]


@pytest.mark.parametrize(("policy", "kind"), [("fifo", "FIFO"), ("lru", "LRU"), ("s3fifo", "S3FIFO")])
@pytest.mark.parametrize("capacity", [20, 33, 100, 999])
def test_the_same_hits_as_libcachesim(policy, kind, capacity, traffic):
    libcachesim = pytest.importorskip("libcachesim")
    for requests in traffic:
        cache = getattr(libcachesim, kind)(capacity, hashpower=12)
        assert hit_blocks(policy, capacity, requests) == their_hits(cache, requests)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [1, 7, 40, 200, 5000])
def test_one_tier_with_lru_is_block_lru(seed, capacity):
    made = chained_trace(seed)
    one = OneTier(made, capacity, "lru")
    result = one.run()
    one.check_integrity()
    expected = References(made).replay("lru", capacity)
    assert (result.num_hit_blocks, result.num_hit_tokens) == (expected.num_hit_blocks, expected.num_hit_tokens)


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


@pytest.mark.parametrize("policy", ["fifo", "lru", "return"])
@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_hits_most(policy, seed):
    made = chained_trace(seed, has_partial=False)
    for capacity in (20, 60, 150):
        best = References(made).replay("belady", capacity).num_hit_blocks
        assert replay_one_tier(made, capacity, policy).num_hit_blocks <= best


def test_a_tier_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="a tier of 0 blocks"):
        replay_one_tier(trace(request([1])), 0, "lru")
