"""What a request may load, and that it holds slots only while it waits for them."""

from kvstore.block import Lineage, extend_chain
from kvstore.cpu_tier import CpuTier
from kvstore.lookup import MAX_WAIT_S, Identity, Lookup, Lookups, Match, Tracked
from kvstore.stats import StoreStats

ROOT = b"r" * 32


class OneDisk:
    """Every block is on disk, and no read ever ends."""

    def contains(self, block_id):
        return True

    def is_reading(self, slot):
        return True

    def start_read(self, slot, record):
        pass


def made(num_slots: int, disk: OneDisk | None, now: list[float]) -> tuple[CpuTier, Lookups]:
    cpu = CpuTier(num_slots)
    return cpu, Lookups(cpu, disk, Identity(b"f" * 32, "model", 4), StoreStats(), lambda: now[0])


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


def test_a_request_gives_back_what_hbm_has_got_meanwhile():
    cpu, lookups = made(8, None, [0.0])
    request = tracked("a", 0, 3)
    store(cpu, lookups, request)
    lookups.arrive(request, 0, 3)
    assert request.arrival == ["cpu"] * 3 and cpu.pool.num_in_use == 3
    assert lookups.match(request, 3, 3) == Match(Lookup.MISS)
    assert cpu.pool.num_in_use == 0
    lookups.leave("a")
    cpu.check_integrity()


def test_a_request_waits_for_slots_of_others_for_a_while_only():
    now = [0.0]
    cpu, lookups = made(4, None, now)
    holder = tracked("holder", 0, 3)
    store(cpu, lookups, holder)
    lookups.requests["holder"] = holder
    assert lookups.match(holder, 0, 3).lookup is Lookup.HIT
    lookups._reader = OneDisk()
    waiting = tracked("waiting", 100, 3)
    lookups.requests["waiting"] = waiting
    assert lookups.match(waiting, 0, 3).lookup is Lookup.PENDING and not waiting.slots
    now[0] = MAX_WAIT_S + 1
    lookups.match(waiting, 0, 3)
    assert len(waiting.slots) == 1, "it goes on with the slot that there is"


def test_a_block_of_another_history_is_no_hit():
    cpu, lookups = made(8, None, [0.0])
    stored = tracked("a", 0, 2)
    store(cpu, lookups, stored)
    forged = tracked("b", 50, 2)
    forged.chain[:] = stored.chain
    lookups.arrive(forged, 0, 2)
    assert lookups.match(forged, 0, 2) == Match(Lookup.MISS)
    assert cpu.pool.num_in_use == 0
