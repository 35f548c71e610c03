"""Window slots: which block has one, in which order they go to others, and what is overwritten."""

import random

import pytest

from kvstore.blocks.ids import Lineage, lineage_root
from kvstore.blocks.pool import BlockPool
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request
from kvstore.engine.core.window_slots import WindowSlots
from kvstore.engine.sampling_params import SamplingParams

SIZE, SPAN = 4, 2  # of a block; blocks that a token sees before its own


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(BlockPool(80), SIZE, windows=WindowSlots(10, 80, SPAN))


def new_request(name: str, tokens: list[int], **own: object) -> Request:
    return Request(name, tokens, SamplingParams(), 100, Lineage(lineage_root(b"", "", "")), SIZE, seed=0, **own)


def begin(manager: KVCacheManager, request: Request, *others: Request) -> int:
    """Admit it and compute its prompt, a block in a step; returns how many of its blocks were hits."""
    hits = manager.match_prefix(request)
    assert manager.admit(request, hits, 0)
    while (left := request.num_tokens - request.num_computed_tokens) > 0:
        assert manager.allocate(request, min(left, SIZE)) is not None
        request.num_computed_tokens += min(left, SIZE)
        manager.cache_full_blocks(request, request.num_computed_tokens)
        check(manager, request, *others)
    return len(hits)


def run(manager: KVCacheManager, request: Request) -> int:
    num_hits = begin(manager, request)
    manager.free(request)
    check(manager)
    return num_hits


def check(manager: KVCacheManager, *running: Request) -> None:
    manager.windows.check_integrity(request.block_numbers[request.first_window :] for request in running)


def test_a_long_prompt_needs_its_window_and_its_step_and_leaves_a_window_at_its_end(manager):
    request = new_request("long", list(range(100)))
    begin(manager, request)
    held = len(request.block_numbers) - request.first_window
    assert held == SPAN + 2 and manager.windows.num_free == 10 - held
    manager.free(request)
    assert manager.windows.num_free == 10
    assert len(manager.known_prefix(new_request("next", list(range(101))))) == 25
    assert run(manager, new_request("next", list(range(101)))) == 25


def test_slots_in_the_middle_go_first_then_the_checkpoint_that_was_not_used_for_longest(manager):
    first, second = list(range(37)), list(range(100, 137))
    run(manager, new_request("first", first))
    run(manager, new_request("second", second))
    assert run(manager, new_request("first again", first)) == 9
    assert run(manager, new_request("second again", [*second[:13], 7])) == 0, "its middle went to others"
    assert run(manager, new_request("first once more", first)) == 9
    run(manager, new_request("third", list(range(200, 237))))
    assert run(manager, new_request("first at last", first)) == 9
    assert run(manager, new_request("second at last", second)) == 3, "behind which another one has ended since"


def test_where_its_system_prompt_ends_a_window_stays_longer_than_in_the_middle(manager):
    one = list(range(60))
    run(manager, new_request("one", one, turn_starts=[13, 40]))
    assert run(manager, new_request("other", [*one[:13], 99])) == 3
    assert run(manager, new_request("another", [*one[:21], 99])) == 3


def test_requests_that_see_too_much_for_the_slots_wait(manager):
    one, other = new_request("one", list(range(30))), new_request("other", list(range(100, 130)))
    begin(manager, one)
    assert manager.num_free == 6 < manager.pool.num_free
    assert not manager.admit(other, [], 30)
    begin(manager, other, one)
    held = {block for request in (one, other) for block in request.block_numbers[request.first_window :]}
    assert all(manager.windows.of[block] for block in held)
    assert manager.allocate(one, 3 * SIZE) is None
    check(manager, one, other)


def test_a_block_that_has_lost_its_slot_gets_that_of_its_copy(manager):
    tokens = list(range(29))
    run(manager, new_request("first", tokens))
    for start in (100, 200, 300):
        run(manager, new_request(f"from {start}", list(range(start, start + 37))))
    assert len(manager.known_prefix(new_request("again", tokens))) == 7
    assert run(manager, new_request("again", tokens)) == 0
    assert run(manager, new_request("once more", tokens)) == 7


def test_a_copy_that_was_not_loaded_gives_its_slot_to_nobody(manager):
    tokens = list(range(29))
    run(manager, new_request("first", tokens))
    for start in (100, 200, 300):
        run(manager, new_request(f"from {start}", list(range(start, start + 37))))
    again = new_request("again", tokens)
    assert manager.admit(again, [], 29, num_loaded=28)
    again.num_computed_tokens = 28
    manager.cache_full_blocks(again, 28)
    again.may_load = False  # as after a failure
    manager.free(again)
    check(manager)
    assert run(manager, new_request("once more", tokens)) == 0


def test_what_has_lost_its_block_is_overwritten_once(manager):
    request = new_request("secret", list(range(30)))
    run(manager, request)
    used = set(manager.windows.of.tolist()) - {0}
    blocks = [manager.pool.lookup(block_id) for block_id in request.chain]
    manager.pool.forget(blocks[0])
    manager.windows.drop(manager.pool.take_stale())
    assert used <= set(manager.windows.take_stale())
    assert not manager.windows.take_stale() and not manager.windows.of.any()
    check(manager)


def test_any_order_of_events_leaves_every_slot_with_one_block():
    for seed in range(30):
        rng = random.Random(seed)
        manager = KVCacheManager(BlockPool(24), SIZE, windows=WindowSlots(rng.randint(9, 24), 24, SPAN))
        running: list[Request] = []
        for step in range(120):
            event = rng.randrange(6)
            if event < 2:
                tokens = [rng.randrange(2)] * rng.randrange(1, 30)
                request = new_request(f"{step}", tokens, turn_starts=[rng.randrange(30)])
                loaded = rng.randrange(3) * SIZE
                hits = manager.match_prefix(request)
                left = len(tokens) - len(hits) * SIZE
                if left > loaded and manager.admit(request, hits, loaded + 1, loaded):
                    request.num_computed_tokens += loaded
                    manager.cache_full_blocks(request, request.num_computed_tokens)
                    request.num_computed_tokens += 1
                    running.append(request)
            elif event == 2 and running:
                manager.free(running.pop(rng.randrange(len(running))))
            elif event == 3 and running and (owner := rng.choice(running)).num_computed_tokens == owner.num_tokens:
                child = owner.sibling(step)
                manager.share(owner, child)
                running.append(child)
            elif event == 4 and (cached := manager.pool.cached_blocks()):
                manager.pool.forget(rng.choice(cached))
                manager.windows.drop(manager.pool.take_stale())
            for request in running:
                if request.num_computed_tokens == request.num_tokens:
                    request.append(rng.randrange(2))
                if manager.allocate(request, 1) is not None:
                    request.num_computed_tokens += 1
                    manager.cache_full_blocks(request, request.num_computed_tokens)
            check(manager, *running)
            manager.pool.check_integrity(idle=not running)
