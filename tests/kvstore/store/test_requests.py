"""What of a request is stored, that only its own blocks are, and that what is held for it is given back."""

import pytest

from kvstore.blocks.ids import Lineage, extend_chain, token_bytes
from kvstore.memory.tier import CpuTier
from kvstore.stats import StoreStats
from kvstore.store.requests import Requests, Tracked
from kvstore.store.stored import Identity, StoredBlocks

ROOT = b"r" * 32


class Part:
    """A CPU tier of eight arena blocks, and what requests hold of it."""

    def __init__(self) -> None:
        self.stats, self.cpu = StoreStats(), CpuTier(8)
        identity = Identity(b"f" * 32, "model", 4)
        self.stored = StoredBlocks(self.cpu, None, None, identity, self.stats, lambda: 0.0)
        self.requests = Requests(self.cpu, self.stored, None, self.stats)

    def request(self, name: str, first: int, num_blocks: int, num_hbm: int = 0, num_ready: int = 99) -> Tracked:
        """One that has arrived, and is stored; of its blocks so many have landed."""
        request = tracked(name, first, num_blocks)
        for index in range(len(request.chain)):
            arena_block = self.cpu.reserve()
            self.cpu.announce(arena_block, self.stored.record(request, index))
            if index < num_ready:
                self.cpu.publish(arena_block)
            self.cpu.release(arena_block)
        self.requests.arrive(request, num_hbm)
        return request

    def fail(self, request: Tracked, index: int) -> None:
        self.cpu.fail(self.cpu.arena_block_of(request.chain[index]))

    def end(self) -> None:
        self.requests.remove("a")
        self.cpu.check_integrity()


def tracked(name: str, first: int, num_blocks: int) -> Tracked:
    tokens = list(range(first, first + 4 * num_blocks + 1))
    chain: list[bytes] = []
    extend_chain(chain, ROOT, tokens, 4)
    return Tracked(chain, bytearray(token_bytes(tokens)), Lineage(ROOT), "", name, (0, 0))


@pytest.fixture
def part() -> Part:
    return Part()


def test_what_is_stored_is_held_until_it_is_handed_out(part):
    request = part.request("a", 0, 3)
    assert request.arrival == ["cpu"] * 3 and part.cpu.pool.num_in_use == 0
    assert part.requests.ask(request, 0, 3) and not part.requests.ask(request, 0, 3)
    assert (request.wanted.front, request.wanted.end) == (3, 3) and part.cpu.pool.num_in_use == 3
    loads = part.requests.hand_out(request, [7, 8, 9], 0, 3)
    assert [(load.block_number, load.position) for load in loads] == [(7, 0), (8, 4), (9, 8)]
    assert not request.wanted.arena_blocks and part.cpu.pool.num_in_use == 3, "the loads hold them now"
    for load in loads:
        part.cpu.release(load.arena_block)
    part.end()


def test_a_request_gives_back_what_hbm_has_got_meanwhile(part):
    request = part.request("a", 0, 3)
    part.requests.hold(request, 0, 3)
    part.requests.ask(request, 2, 3)
    assert sorted(request.wanted.arena_blocks) == [2] and request.wanted.is_ready()
    part.requests.ask(request, 3, 3)
    assert part.cpu.pool.num_in_use == 0 and request.wanted.front == request.wanted.end == 3
    part.end()


def test_what_is_wanted_may_begin_earlier_than_it_did(part):
    request = part.request("a", 0, 4, num_hbm=2)
    part.requests.hold(request, 2, 4)
    part.requests.ask(request, 0, 4)
    assert sorted(request.wanted.arena_blocks) == [0, 1, 2, 3] and request.wanted.front == request.wanted.end == 4
    part.end()


@pytest.mark.parametrize(("is_hint", "given_up"), [(False, 2 * 4), (True, 0)])
def test_a_block_that_fails_ends_what_may_be_loaded_which_is_counted_but_for_a_hint(part, is_hint, given_up):
    request = part.request("a", 0, 3, num_ready=1)
    request.key = None if is_hint else request.key
    part.requests.hold(request, 0, 3)
    part.fail(request, 1)
    part.requests.advance(request, 0)
    assert sorted(request.wanted.arena_blocks) == [0] and request.wanted.front == request.wanted.end == 1
    assert part.stats.given_up_tokens == given_up
    part.end()


def test_a_block_of_another_history_is_no_hit(part):
    stored, forged = part.request("a", 0, 2), tracked("b", 50, 2)
    forged.chain[:] = stored.chain
    part.requests.hold(forged, 0, 2)
    assert forged.wanted.end == 0 and not forged.wanted.arena_blocks and part.cpu.pool.num_in_use == 0
    assert part.stats.identity_mismatches == 1
