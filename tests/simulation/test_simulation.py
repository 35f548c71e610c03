"""Days of traffic with faults, by seed (`tests.simulation.run`), and bugs planted to see that the simulation finds
them.

`--long` runs hundreds of seeds. A failure says how to replay it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

import kvstore.policy.policies
from kvstore.blocks.forest import EvictionTree
from kvstore.blocks.records import ReadResult
from kvstore.disk.io_queue import IoQueue, ReadDone, WriteDone
from kvstore.engine.core.request import Request
from kvstore.engine.core.request_blocks import RequestBlocks
from kvstore.engine.core.roster import Roster
from kvstore.memory.tier import CpuTier
from kvstore.store.control_plane import KVStore
from kvstore.store.disk_space import DiskSpace
from kvstore.store.requests import Requests
from kvstore.store.steps import StepsInFlight
from kvstore.store.write_back import WriteBack
from tests.simulation.run import CONFIGS, Simulation

NUM_LONG_SEEDS, LONG_HOURS = 40, 72.0
MORE = ("queue", "restarts", "bad-disk", "tiny-cpu", "tiny-disk", "everything", "everything")
BY_NAME = {config.name: config for config in CONFIGS}
RUNS = [(config.name, 1) for config in CONFIGS] + [(name, 2 + i) for i, name in enumerate(MORE)]

# What the runs together must have reached, or they say little.
REACHED = (
    "aborted: decode", "aborted: prefill", "aborted: waiting", "blocks found again", "bursts", "crashes", "cut",
    "edits", "evict commands", "expiries", "failed steps", "finished", "forgotten at once",
    "hints", "hit cpu", "hit disk", "hit hbm", "hit reencoded", "loads failed", "loads landed", "pins",
    "pins of everything", "preempted", "published by read", "published by save", "published by splice", "quarantine",
    "reads cancelled", "reads failed", "restarts", "rolled back", "saves dropped", "saves failed", "splices given up",
    "spliced", "victims while somebody waits", "write error: broken", "write error: i/o error",
    "write error: map full", "prefetched", "prefetch hits", "writes dropped", "injected: scheduled", "injected: plan",
    "injected: reserve", "injected: began", "injected: computed", "injected: executed",
    "writes refused", "ran ahead", "computed for nothing",
)  # fmt: skip

reached: Counter[str] = Counter()
done: set[tuple[str, int]] = set()


@pytest.mark.parametrize(("name", "seed"), RUNS, ids=lambda value: str(value))
def test_days_of_traffic(name, seed):
    reached.update(Simulation(BY_NAME[name], seed).run())
    done.add((name, seed))


def test_the_runs_have_reached_everything():
    if len(done) < len(RUNS):
        pytest.skip("not all runs were made, or not all were sound")
    assert [what for what in REACHED if not reached[what]] == []
    assert reached["hit hbm"] + reached["hit cpu"] + reached["hit disk"] > reached["prompt"] / 3


def test_a_seed_replays():
    config = replace(BY_NAME["everything"], hours=6.0)
    first, second = Simulation(config, 5), Simulation(config, 5)
    assert first.run() == second.run()
    assert list(first.events) == list(second.events) and first.clock.now_s == second.clock.now_s


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_many_seeds(config, request):
    if not request.config.getoption("--long"):
        pytest.skip("needs --long")
    for seed in range(1000, 1000 + NUM_LONG_SEEDS):
        Simulation(replace(config, hours=LONG_HOURS), seed).run()


# -- planted bugs ------------------------------------------------------------------------------------------------------
Plant = Callable[[pytest.MonkeyPatch], None]


def load_of_a_wrong_slot(patch: pytest.MonkeyPatch) -> None:
    hand_out = Requests.hand_out

    def swapped(self, *given):
        loads = hand_out(self, *given)
        if len(loads) > 1:
            loads[:2] = [replace(loads[0], slot=loads[1].slot), replace(loads[1], slot=loads[0].slot)]
        return loads

    patch.setattr(Requests, "hand_out", swapped)


def slot_given_back_before_its_load(patch: pytest.MonkeyPatch) -> None:
    hand_out, end = Requests.hand_out, StepsInFlight.transferred

    def early(self, *given):
        loads = hand_out(self, *given)
        for load in reversed(loads):
            self._cpu.release(load.slot)
        return loads

    def late(self, done):
        for load in self.by_ticket[done.ticket].loads if done.is_load else ():
            self._cpu.acquire(load.slot)
        end(self, done)

    patch.setattr(Requests, "hand_out", early)
    patch.setattr(StepsInFlight, "transferred", late)


def write_that_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    write_done = WriteBack.write_done

    def uncounted(self, done: WriteDone):
        write_done(self, done)
        self._stats.written -= done.error is None and len(done.writes) > 3

    patch.setattr(WriteBack, "write_done", uncounted)


def save_that_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    landed = KVStore._landed

    def twice(self, slot):
        self.stats.saved += self.stats.saved == 7
        landed(self, slot)

    patch.setattr(KVStore, "_landed", twice)


def parent_evicted_before_its_child(patch: pytest.MonkeyPatch) -> None:
    following = EvictionTree.next

    def parent(self):
        key = following(self)
        above = self._parents.get(key)
        return above if above in self._keys and not self._is_held(above) else key

    patch.setattr(EvictionTree, "next", parent)


def parent_deleted_below_a_dirty_child(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskSpace, "_is_pinned", lambda self, block_id: False)


def failed_load_that_nobody_is_told_of(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "roll_back", lambda self, failed: None)


def read_that_is_lost_with_its_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IoQueue, "rank_read", lambda self, slot, rank: self.cancel_read(slot))


def corrupt_block_that_is_served(patch: pytest.MonkeyPatch) -> None:
    read_done = WriteBack.read_done

    def trusting(self, done: ReadDone):
        read_done(self, replace(done, result=ReadResult.OK))

    patch.setattr(WriteBack, "read_done", trusting)


def deletion_that_leaves_the_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuTier, "erase_stale", lambda self: None)


def waiting_requests_that_do_not_count(patch: pytest.MonkeyPatch) -> None:
    queue_for = kvstore.policy.policies.EvictionOrder._queue_for

    def blind(self, conversation, now_s):
        return queue_for(self, replace(conversation, wanted=None, num_running=0), now_s)

    patch.setattr(kvstore.policy.policies.EvictionOrder, "_queue_for", blind)


def cached_tokens_counted_again(patch: pytest.MonkeyPatch) -> None:
    count = RequestBlocks._count_cached

    def again(self, request, num_hit, num_cached):
        request.num_seen_tokens = 0
        count(self, request, num_hit, num_cached)

    patch.setattr(RequestBlocks, "_count_cached", again)


def request_that_keeps_its_slots(patch: pytest.MonkeyPatch) -> None:
    remove = Requests.remove

    def holding(self, request_id):
        request = self.by_id.get(request_id)
        if request is not None:
            for slot in request.wanted.slots.values():
                self._cpu.acquire(slot)
        return remove(self, request_id)

    patch.setattr(Requests, "remove", holding)


def choices_that_keep_a_splice(patch: pytest.MonkeyPatch) -> None:
    """As it was until the simulation found it."""

    def alone(self):
        self.lineage = self.lineage.exact
        self.chain.clear()
        self.extend_chain()

    patch.setattr(Request, "give_up_splice", alone)


def quarantine_that_keeps_orphans(patch: pytest.MonkeyPatch) -> None:
    """As it was until the simulation found it."""
    patch.setattr(DiskSpace, "begin_anew", lambda self: self._contents.begin_anew())


# The bug, the configuration that is to find it, and what is to be said of it.
PLANTS: list[tuple[Plant, str, str]] = [
    (load_of_a_wrong_slot, "plain", "a load of another block"),
    (slot_given_back_before_its_load, "tiny-cpu", "a load of another block|during a load|a load of a slot that is"),
    (write_that_is_not_counted, "plain", "written blocks are miscounted"),
    (save_that_is_counted_twice, "plain", "saved [0-9]+, seen"),
    (parent_evicted_before_its_child, "plain", "a parent is evicted before its child"),
    (parent_deleted_below_a_dirty_child, "tiny-disk", "lost its parent"),
    (failed_load_that_nobody_is_told_of, "bad-transfers", "another history|is not what its id says"),
    (read_that_is_lost_with_its_rank, "queue", "nothing was scheduled for"),
    (corrupt_block_that_is_served, "bad-disk", "does not hold what its record says"),
    (deletion_that_leaves_the_bytes, "plain", "still holds what was deleted"),
    (waiting_requests_that_do_not_count, "queue", "evicted is what is worth"),
    (cached_tokens_counted_again, "queue", "usage says"),
    (request_that_keeps_its_slots, "queue", "CPU slots are held while nothing runs"),
    (choices_that_keep_a_splice, "plain", "another history"),
    (quarantine_that_keeps_orphans, "bad-disk", "lost its parent"),
]


@pytest.mark.parametrize(("plant", "name", "words"), PLANTS, ids=[row[0].__name__ for row in PLANTS])
def test_a_planted_bug_is_found(plant, name, words, monkeypatch):
    plant(monkeypatch)
    for seed in range(1, 9):
        try:
            Simulation(BY_NAME[name], seed).run()
        except AssertionError as error:
            assert re.search(words, str(error).splitlines()[0]), error
            assert f"replay: python -m tests.simulation.run {name} {seed}" in str(error)
            return
    raise AssertionError("eight seeds have not found it")
