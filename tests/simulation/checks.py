"""What must hold in a simulated engine and store at any time, and what when nothing runs. Knows their private parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.blocks.forest import EvictionTree
from kvstore.blocks.ids import BlockId, quantised_id, state_chain
from kvstore.memory.tier import ArenaBlockState
from kvstore.policy.conversation import Conversation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


SHARE_OF_VICTIMS = 0.02  # that are looked at


# -- the order of eviction ---------------------------------------------------------------------------------------------
def watch_order(sim: Simulation, tree: EvictionTree, name_of: Callable[[Any], BlockId | None]) -> None:
    """Now and then compare what goes next with everything that could; always with what is left of evicted states."""
    original, left = tree.next, watch_states(sim, tree, name_of)

    def watched() -> Hashable | None:
        key = original()
        if key is not None and sim.orders_rng.random() < SHARE_OF_VICTIMS:
            check_victim(tree, key, sim.clock.now_s)
            count_wanted(sim, tree, key, name_of)
        is_some_left = any(is_next(tree, one) for one in left)
        assert not is_some_left or key not in tree.owner_of, "KV is left without its state"
        sim.counts["KV that went with its state"] += key in left and name_of(key) not in sim.book.states
        return key

    tree.next = watched  # type: ignore[method-assign]


def watch_states(sim: Simulation, tree: EvictionTree, name_of: Callable[[Any], BlockId | None]) -> set[Hashable]:
    """What goes next here: ends of chains that a state stood behind, until they are used again."""
    left: set[Hashable] = set()
    remove, add, claim = tree.remove, tree.add, tree.claim

    def removed(key: Hashable) -> None:
        parent = tree.links.parents.get(key)
        owners = [tree.owner_of[one] for one in (key, parent) if one in tree.owner_of]
        is_state = name_of(key) in sim.book.states
        is_left = not any(one.num_running for one in owners) if is_state else key in left and not owners
        left.discard(key)
        remove(key)
        if is_left and parent in tree.links.parents and parent not in tree.links.children_of:
            left.add(parent)

    def added(key: Hashable, parent: Hashable | None, *given: Any) -> None:
        left.difference_update((key, parent))  # it itself is here again: what was left went with a whole disk
        add(key, parent, *given)

    def claimed(conversation: Conversation, key: Hashable, keeps_pin: bool = False) -> None:
        left.discard(key)
        claim(conversation, key, keeps_pin)

    tree.remove, tree.add, tree.claim = removed, added, claimed  # type: ignore[method-assign]
    return left


def count_wanted(sim: Simulation, tree: EvictionTree, victim: Hashable, name_of: Callable) -> None:
    """How often something goes that is in the chain of a request which waits, beside something that is in none."""
    tenants = sim.scheduler.roster.tenants.waiting()
    wanted = {block_id for tenant in tenants for r in tenant.waiting for block_id in r.chain}
    if not wanted:
        return
    sim.counts["victims while somebody waits"] += 1
    if name_of(victim) in wanted:
        others = [key for key in may_go(tree) if name_of(key) not in wanted]
        sim.counts["victims that somebody waits for, beside others"] += bool(others)


def may_go(tree: EvictionTree) -> list[Hashable]:
    """Leaves that nobody holds, and that were not put aside."""
    return [key for key in tree.links.parents if is_next(tree, key)]


def is_next(tree: EvictionTree, key: Hashable) -> bool:
    """Whether this block may go."""
    is_leaf = key in tree.links.parents and key not in tree.links.children_of
    return is_leaf and tree._is_free(key) and (key in tree._unowned or tree.owner_of.get(key) in tree.order)


def check_victim(tree: EvictionTree, victim: Hashable, now_s: float) -> None:
    """No cached child, nobody who holds it, and nothing of lower value that may go."""
    assert victim not in tree.links.children_of, "a parent is evicted before its child"
    assert tree._is_free(victim), "a block in use is evicted"
    value = value_of(tree, victim, now_s)
    for key in may_go(tree):
        other = value_of(tree, key, now_s)
        assert value <= other, f"evicted is what is worth {value}, beside {other}"


def value_of(tree: EvictionTree, key: Hashable, now_s: float) -> tuple[int, ...]:
    """0 nobody's, 1 expired, 2 ordinary, 3 pinned, 4 waiting, the later the less, 5 running."""
    owner = tree.owner_of.get(key)
    if owner is None:
        return (0,)
    if owner.num_running:
        return (5,)
    if owner.wanted is not None:
        return (4, *(-part for part in owner.wanted))
    if owner.expires_s <= now_s and owner.prefix_at(tree._id_of(key)) is None:
        return (1,)  # a prefix does not expire
    return (3,) if owner.pinned_until_s > now_s else (2,)


# -- always ------------------------------------------------------------------------------------------------------------
def check_always(sim: Simulation) -> None:
    """Counts, contents, closure and bounds, whatever is going on."""
    sim.scheduler.roster.check_integrity()
    sim.store.check_integrity(idle=False)
    sim.pool.check_content(sim.transfers.failed_blocks)
    if sim.config.window_blocks:
        sim.windows.check_content(sim.pool, sim.transfers.failed_blocks)
    for arena_block in sim.cpu.pool.cached_blocks():
        if sim.cpu.state(arena_block) is ArenaBlockState.READY:
            sim.cpu.check_content(arena_block)
    held = held_arena_blocks(sim)
    for arena_block in range(sim.cpu.pool.num_blocks):
        count = sim.cpu.pool.ref_count(arena_block)
        assert count >= held.get(arena_block, 0), f"arena block {arena_block} is held by fewer than use it"
    check_bounds(sim)
    check_closed(sim)
    check_reads(sim)


def held_arena_blocks(sim: Simulation) -> dict[int, int]:
    """How many references to each arena block are known to the requests."""
    held: dict[int, int] = {}
    for request in sim.store.requests.by_id.values():
        for arena_block in request.wanted.arena_blocks.values():
            held[arena_block] = held.get(arena_block, 0) + 1
        if request.partial is not None:
            held[request.partial[1]] = held.get(request.partial[1], 0) + 1
    return held


def check_bounds(sim: Simulation) -> None:
    """Invariant 7: queues are no longer than the arena has blocks, records are of requests that there are."""
    num_arena_blocks, io = sim.cpu.pool.num_blocks, sim.connector.parts.io
    assert len(io._reads) <= num_arena_blocks + len(sim.store.splicer.jobs), f"{len(io._reads)} reads are queued"
    assert len(io._pending) <= num_arena_blocks, f"{len(io._pending)} writes are queued"
    known = sim.scheduler.roster.requests.keys()
    assert sim.store.requests.by_id.keys() <= known, "the store tracks a request that ended"
    assert len(sim.store.steps.by_ticket) <= 32, f"{len(sim.store.steps.by_ticket)} steps are in flight"
    if (disk := sim.store.disk) is not None:
        assert len(disk.dirty) + len(disk.submitted) <= num_arena_blocks, "more is dirty than there is"
        assert disk.queued.total <= sim.config.max_queued_bytes + 4096, f"{disk.queued.total} bytes are queued"
        assert disk.queued.total >= 0
        assert len(sim.store.reads) <= num_arena_blocks


def on_disk(sim: Simulation) -> dict[BlockId, BlockId]:
    """Blocks of the index and their parents; what is being deleted is not there."""
    disk = sim.store.disk
    if disk is None:
        return {}
    entries, removing = disk.contents.index._entries, disk.contents.removing.sizes
    return {key: entry.parent_id for key, entry in entries.items() if key not in removing}


def check_closed(sim: Simulation) -> None:
    """Invariant 8: what CPU and disk hold together is closed under parents, of which the disk may have copies."""
    disk = sim.store.disk
    if disk is not None:
        if disk.file.broken:
            return
        disk.contents.index.check_integrity()
    stored = on_disk(sim)
    records = [sim.cpu.record(arena_block) for arena_block in sim.cpu.pool.cached_blocks()]
    in_cpu = {record.block_id: record.parent_id for record in records if record is not None}
    for where, blocks in (("cpu", in_cpu), ("disk", stored)):
        for block_id, parent_id in blocks.items():
            is_there = parent_id in sim.book.roots or parent_id in in_cpu or parent_id in stored
            is_there = is_there or (where == "cpu" and quantised_id(parent_id) in stored)
            assert is_there, f"a block on {where} lost its parent: {sim.describe(block_id)}"


def check_reads(sim: Simulation) -> None:
    """Every read that was submitted has ended, was cancelled, or is on its way."""
    stats, disk = sim.store.stats, sim.store.disk
    if disk is None:
        return
    ended = stats.read + sum(stats.read_failures.values()) + stats.cancelled_reads
    known = ended + len(sim.store.reads)
    submitted = sim.connector.parts.io.num_reads_submitted
    assert known == submitted, f"{submitted} reads: {ended} ended and {len(sim.store.reads)} are known"


# -- when nothing runs -------------------------------------------------------------------------------------------------
def check_idle(sim: Simulation, is_thorough: bool) -> None:
    """Invariant 6, and counters against what was seen to happen since the store was opened."""
    assert not sim.scheduler.roster.requests and not sim.runner.rows.keys() - set(sim.scheduler.roster.left)
    assert sim.pool.num_in_use == 0, f"{sim.pool.num_in_use} HBM blocks are held while nothing runs"
    assert sim.cpu.pool.num_in_use == 0, f"{sim.cpu.pool.num_in_use} arena blocks are held while nothing runs"
    assert not sim.arena.busy, f"while idle: {dict(sim.arena.busy)}"
    assert not sim.store.requests.by_id
    assert all(one.wanted is None for one in conversations(sim)), "nobody waits, and something is wanted"
    assert all(one.num_open == 0 for one in conversations(sim)), "no request, and a conversation has one"
    check_counters(sim)
    check_restorable(sim)
    if is_thorough:
        check_always(sim)
        sim.store.check_integrity(idle=True)
        check_disk(sim)
        check_forgotten(sim)


def in_flight(sim: Simulation) -> str:
    """What keeps the store from being idle."""
    store, disk = sim.store, sim.store.disk
    found = [f"steps {list(store.steps.by_ticket)}", f"ended {len(store.ended)}", f"splices {store.splicer.jobs}"]
    found += [f"hints {list(store.prefetcher.hints)}"]
    if disk is not None:
        found += [f"dirty {len(disk.dirty)}", f"deleting {len(disk.contents.removing.sizes)}"]
        found += [
            f"reads {len(sim.store.reads)}",
            f"degraded {disk.health.error}",
        ]
        found += [f"queue is idle: {sim.connector.parts.io.is_idle}"]
    return ", ".join(found)


def conversations(sim: Simulation) -> Iterable:
    return list(sim.connector.parts.store.steering._conversations._tips_of)


def check_counters(sim: Simulation) -> None:
    stats, seen = sim.store.stats, sim.counts_of_store
    assert stats.saved == seen["published by save"], f"saved {stats.saved}, seen {seen['published by save']}"
    assert stats.spliced == seen["published by splice"], f"spliced {stats.spliced} {seen['published by splice']}"
    landed, failed = seen["loads landed"], seen["loads failed"]
    assert stats.loaded == landed, f"loaded {stats.loaded}, landed {landed}"
    assert stats.load_failures == failed, f"load failures {stats.load_failures}, seen {failed}"
    assert stats.loaded_tokens == seen["loads taken"] * sim.config.block_size, "tokens of loads"
    assert seen["loads planned"] == landed + failed
    assert seen["loads taken"] + seen["states taken"] >= seen["loads planned"]
    assert stats.prefetch_wasted <= stats.prefetched
    assert stats.prefetched <= sim.connector.parts.io.num_reads_submitted
    assert stats.read >= seen["published by read"], "published is only what was read"
    assert stats.identity_mismatches == 0, "a block of another history was found under an id"
    if not sim.config.cpu_blocks or not sim.config.disk_blocks:
        assert sim.store.disk is not None or stats.written == stats.read == 0


def check_disk(sim: Simulation) -> None:
    """The index is what is on disk, and what the tier counts as written is or was there."""
    disk = sim.store.disk
    if disk is None or disk.health.error is not None or disk.file.broken:
        return
    values = sim.platter.values
    assert disk.contents.index._entries.keys() == values.keys(), "the index and the disk disagree"
    assert sim.store.stats.written == sim.counts_of_store["blocks written"], "written blocks are miscounted"
    assert not disk.queued.of_tenants, "bytes of tenants are counted as queued while idle"
    if sim.limit_bytes is not None:
        most = max(disk.contents.index.bytes.of_tenants.values(), default=0)
        assert most <= sim.limit_bytes, f"{most} bytes of a tenant that may have {sim.limit_bytes}"
    assert disk.queued.total == 0 and not disk.dirty and not disk._cpu.parents_in_flight and not disk.submitted
    for block_id, (_, _, value) in values.items():
        assert value == sim.book.blocks[block_id]


def check_forgotten(sim: Simulation) -> None:
    """What was deleted is nowhere below HBM, and not in the arena's bytes either."""
    if not sim.forgotten:
        return
    disk = sim.store.disk
    if disk is not None and (disk.health.error is not None or disk.file.broken):
        return
    contents = {sim.book.blocks[block_id] for block_id in sim.forgotten}
    contents = {content for content in contents if len(sim.book.names[content]) == 1}
    for arena_block in range(sim.cpu.pool.num_blocks):
        assert sim.arena.content(arena_block) not in contents, f"arena block {arena_block} still holds what was deleted"
    found = sim.forgotten.intersection(sim.platter.values)
    assert not found or disk is None, f"{len(found)} deleted blocks are still on disk"


def check_restorable(sim: Simulation) -> None:
    """After a turn that has finished the next one finds a state, or it is known what became of it."""
    finished, sim.finished = [request for request in sim.finished if request.chain], []
    if not sim.book.num_state_blocks or not finished:
        return
    records = map(sim.cpu.record, sim.cpu.pool.cached_blocks())
    stored = {record.block_id for record in records if record is not None}.union(on_disk(sim))
    for number, request in enumerate(finished):
        num_seen = max(sim.config.window_blocks, 1) - 1  # blocks before its last that its window has
        computed = (len(request.token_ids) - 1) // sim.config.block_size  # its last token may have no KV
        begin = request.chain[: max(1, computed - num_seen)]
        if any(other.chain[: len(begin)] == begin for other in finished[number + 1 :]):
            continue  # these left states behind it, or parted there as after an edit, which replace its own
        ends = [needed_behind(sim, request.chain[:end]) for end in {computed, len(request.chain)}]
        sim.counts["turns with a state"] += (has_one := any(map(stored.issuperset, ends)))
        losses = sim.store.stats.losses
        is_known = any(one in sim.forgotten or losses.get(one) is not None for one in set().union(*ends))
        is_saved = stored.issuperset(request.chain[:computed][-1:])
        is_known |= not (is_saved or sim.config.faults.are_none)
        assert has_one or is_known, f"nobody can go on behind {sim.describe(request.chain[-1])}"


def check_replaced(sim: Simulation, state: Sequence[BlockId]) -> None:
    """A whole state goes only when one behind it is on disk, so that a crash leaves one."""
    if sim.store.disk is None or not on_disk(sim).keys() >= set(state):  # or its last block is being evicted
        return
    before, size, num_blocks = sim.book.parents[state[0]], sim.config.block_size, sim.book.num_state_blocks
    behind = sim.store.disk.contents.index.links.descendants(before)[1:]
    whole = (one for one in behind if sim.platter.values.keys() >= set(state_chain(one, num_blocks, size)))
    assert any(whole), f"a state is deleted before one behind it is on disk: {sim.describe(before)}"
    sim.counts["states replaced"] += 1


def needed_behind(sim: Simulation, chain: list[BlockId]) -> set[BlockId]:
    """All that a turn begins with behind this chain."""
    seen = chain[max(0, len(chain) - max(sim.config.window_blocks, 1)) :]
    size, num_blocks = sim.config.block_size, sim.book.num_state_blocks
    return {*chain, *(one for block_id in seen for one in state_chain(block_id, num_blocks, size))}


# -- requests ----------------------------------------------------------------------------------------------------------
def check_arrival(
    sim: Simulation, tiers: list[str], chain: list[BlockId], num_hbm: int, in_arena: set[BlockId]
) -> None:  # fmt: skip
    """A tier that is said to have a block has it, or had it before reads for other requests took its place."""
    for index, tier in enumerate(tiers):
        block_id = chain[index]
        if index < num_hbm:
            assert tier == "hbm"
        elif tier == "cpu":
            assert sim.config.cpu_blocks and block_id in in_arena, "a hit in the CPU tier that is none"
        else:
            assert tier == "disk" and sim.store.disk is not None
            assert block_id in in_arena or block_id in sim.platter.values, "a hit on disk that is none"
