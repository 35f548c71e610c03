"""What of a request is stored, that only its own blocks are, and that what is held for it is given back."""

from kvstore.blocks.ids import Lineage, extend_chain
from kvstore.memory.tier import CpuTier, SlotState
from kvstore.stats import StoreStats
from kvstore.store.lookup import Identity, Lookups, Tracked

ROOT = b"r" * 32


def made(num_slots: int) -> tuple[CpuTier, Lookups]:
    cpu = CpuTier(num_slots)
    return cpu, Lookups(cpu, None, Identity(b"f" * 32, "model", 4), StoreStats(), lambda: 0.0)


def tracked(name: str, first: int, num_blocks: int) -> Tracked:
    tokens = list(range(first, first + 4 * num_blocks + 1))
    chain: list[bytes] = []
    extend_chain(chain, ROOT, tokens, 4)
    return Tracked(name, chain, tokens, Lineage(ROOT), "")


def store(cpu: CpuTier, lookups: Lookups, request: Tracked) -> None:
    for index in range(len(request.chain)):
        slot = cpu.reserve()
        cpu.announce(slot, lookups.record(request, index), 0.0)
        cpu.publish(slot)
        cpu.release(slot)


def test_what_is_stored_is_held_until_it_is_taken():
    cpu, lookups = made(8)
    request = tracked("a", 0, 3)
    store(cpu, lookups, request)
    lookups.arrive(request, 0, 3)
    assert request.arrival == ["cpu"] * 3 and cpu.pool.num_in_use == 0
    lookups.hold(request, 0, 3)
    lookups.advance(request, 0)
    assert (request.front, request.end) == (3, 3) and cpu.pool.num_in_use == 3
    loads = lookups.take(request, [7, 8, 9], 0, 3)
    assert [(load.block_number, load.position) for load in loads] == [(7, 0), (8, 4), (9, 8)]
    assert not request.slots and cpu.pool.num_in_use == 3, "the loads hold them now"
    for load in loads:
        cpu.release(load.slot)
    lookups.leave("a")
    cpu.check_integrity()


def test_a_request_gives_back_what_hbm_has_got_meanwhile():
    cpu, lookups = made(8)
    request = tracked("a", 0, 3)
    store(cpu, lookups, request)
    lookups.arrive(request, 0, 3)
    lookups.hold(request, 0, 3)
    lookups.advance(request, 2)
    assert sorted(request.slots) == [2] and (request.front, request.end) == (3, 3)
    lookups.advance(request, 3)
    assert cpu.pool.num_in_use == 0 and (request.front, request.end) == (3, 3)
    lookups.leave("a")
    cpu.check_integrity()


def test_what_is_wanted_may_begin_earlier_than_it_did():
    cpu, lookups = made(8)
    request = tracked("a", 0, 4)
    store(cpu, lookups, request)
    lookups.arrive(request, 2, 4)
    lookups.hold(request, 2, 4)
    lookups.hold_before(request, 0)
    lookups.advance(request, 0)
    assert sorted(request.slots) == [0, 1, 2, 3] and request.front == request.end == 4
    lookups.leave("a")
    cpu.check_integrity()


def test_a_block_that_fails_ends_what_may_be_loaded():
    cpu, lookups = made(8)
    request = tracked("a", 0, 4)
    store(cpu, lookups, request)
    slot = cpu.find(request.chain[2])
    lookups.arrive(request, 0, 4)
    lookups.hold(request, 0, 4)
    cpu._states[slot] = SlotState.FAILED
    lookups.advance(request, 0)
    assert sorted(request.slots) == [0, 1] and request.front == request.end == 2
    cpu._states[slot] = SlotState.READY
    lookups.leave("a")
    cpu.check_integrity()


def test_a_block_of_another_history_is_no_hit():
    cpu, lookups = made(8)
    stored = tracked("a", 0, 2)
    store(cpu, lookups, stored)
    forged = tracked("b", 50, 2)
    forged.chain[:] = stored.chain
    lookups.arrive(forged, 0, 2)
    lookups.hold(forged, 0, 2)
    assert forged.end == 0 and not forged.slots and cpu.pool.num_in_use == 0


def test_what_a_failed_block_takes_along_is_counted_but_not_for_a_hint():
    for is_hint, given_up in ((False, 2 * 4), (True, 0)):
        cpu, lookups = made(8)
        request = tracked("a", 0, 3)
        request.is_hint = is_hint
        store(cpu, lookups, request)
        lookups.arrive(request, 0, 3)
        lookups.hold(request, 0, 3)
        slot = request.slots[1]
        cpu._states[slot] = SlotState.FAILED
        lookups.advance(request, 0)
        assert (request.front, request.end, lookups._stats.given_up_tokens) == (1, 1, given_up)
        lookups.leave("a")
