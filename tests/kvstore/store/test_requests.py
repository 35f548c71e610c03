"""What of a request is stored, that only its own blocks are, and that what is held for it is given back."""

import pytest

from kvstore.store.requests import Tracked
from tests.support.store.prefetch_bench import Bench


class Part(Bench):
    """A CPU tier of eight arena blocks, and what requests hold of it."""

    def arrived(self, num_blocks: int, num_hbm: int = 0, num_ready: int | None = None) -> Tracked:
        """A request that is stored here; of its blocks so many have landed."""
        request = self.request(num_blocks, stored=False)
        self.in_memory(request, num_ready)
        self.requests.arrive(request, num_hbm)
        return request

    def end(self, request: Tracked) -> None:
        self.requests.remove(request.request_id)
        self.cpu.check_integrity()


@pytest.fixture
def part() -> Part:
    return Part(8)


def test_what_is_stored_is_held_until_it_is_handed_out(part):
    request = part.arrived(3)
    assert request.arrival == ["cpu"] * 3 and part.cpu.pool.num_in_use == 0
    assert part.requests.ask(request, 0, 3) and not part.requests.ask(request, 0, 3)
    assert (request.wanted.front, request.wanted.end) == (3, 3) and part.cpu.pool.num_in_use == 3
    loads = part.requests.hand_out(request, [7, 8, 9], 0, 3)
    assert [(load.block_number, load.position) for load in loads] == [(7, 0), (8, 4), (9, 8)]
    assert not request.wanted.arena_blocks and part.cpu.pool.num_in_use == 3, "the loads hold them now"
    for load in loads:
        part.cpu.release(load.arena_block)
    part.end(request)


def test_a_request_gives_back_what_hbm_has_got_meanwhile(part):
    request = part.arrived(3)
    part.requests.hold(request, 0, 3)
    part.requests.ask(request, 2, 3)
    assert sorted(request.wanted.arena_blocks) == [2] and request.wanted.is_ready()
    part.requests.ask(request, 3, 3)
    assert part.cpu.pool.num_in_use == 0 and request.wanted.front == request.wanted.end == 3
    part.end(request)


def test_what_is_wanted_may_begin_earlier_than_it_did(part):
    request = part.arrived(4, num_hbm=2)
    part.requests.hold(request, 2, 4)
    part.requests.ask(request, 0, 4)
    assert sorted(request.wanted.arena_blocks) == [0, 1, 2, 3] and request.wanted.front == request.wanted.end == 4
    part.end(request)


@pytest.mark.parametrize(("is_hint", "given_up"), [(False, 2 * 4), (True, 0)])
def test_a_block_that_fails_ends_what_may_be_loaded_which_is_counted_but_for_a_hint(part, is_hint, given_up):
    request = part.arrived(3, num_ready=1)
    request.key = None if is_hint else request.key
    part.requests.hold(request, 0, 3)
    part.cpu.fail(part.cpu.arena_block_of(request.chain[1]))
    part.requests.advance(request, 0)
    assert sorted(request.wanted.arena_blocks) == [0] and request.wanted.front == request.wanted.end == 1
    assert part.stats.given_up_tokens == given_up
    part.end(request)


def test_a_block_of_another_history_is_no_hit(part):
    stored, forged = part.arrived(2), part.request(2, stored=False)
    forged.chain[:] = stored.chain
    part.requests.hold(forged, 0, 2)
    assert forged.wanted.end == 0 and not forged.wanted.arena_blocks and part.cpu.pool.num_in_use == 0
    assert part.stats.identity_mismatches == 1
