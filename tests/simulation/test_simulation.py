"""Days of traffic with faults, by seed (`tests.simulation.run`), and bugs planted to see that the simulation finds
them.

`--long` runs hundreds of seeds. A failure says how to replay it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstore.blocks.forest import EvictionTree
from kvstore.blocks.ids import is_quantised
from kvstore.blocks.records import ReadResult
from kvstore.engine.core.kv_cache_manager import KVCacheManager, RequestBlocks
from kvstore.engine.core.request import CachedCount, Request
from kvstore.engine.core.scheduler import Roster
from kvstore.engine.core.state_slots import StateSlots
from kvstore.engine.core.window_slots import WindowSlots
from kvstore.memory.tier import CpuTier
from kvstore.policy.policies import EvictionOrder
from kvstore.store.control_plane import KVStore
from kvstore.store.deletion import Deletion
from kvstore.store.old_states import OldStates
from kvstore.store.requests import Requests
from kvstore.store.saving import StepsInFlight
from kvstore.store.write_back import WriteBack
from kvstore.tiers.port import WriteDone
from kvstore.tiers.worker import TierWorker
from tests.simulation.configs import CONFIGS
from tests.simulation.run import Simulation

NUM_LONG_SEEDS, LONG_HOURS = 40, 72.0
BY_NAME = {config.name: config for config in CONFIGS}
FOUND = [("states", 14), ("states-ahead", 0), ("int8-and-raw", 33)]  # long runs have found faults there
RUNS = [(config.name, 1) for config in CONFIGS] + FOUND

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
    "hit quantised", "exact", "states planned", "states saved", "writes refused", "ran ahead", "computed for nothing",
    "KV that went with its state", "turns with a state", "states replaced",
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
Method = Callable[..., Any]
Plant = Callable[[], dict[tuple[type, str], Callable[[Method], Method]]]  # methods, and what makes them wrong ones


def load_of_a_wrong_arena_block():
    def swapped(hand_out):
        def handed(self, *given):
            loads = hand_out(self, *given)
            if len(loads) > 1:
                one, other = loads[:2]
                loads[0] = replace(one, arena_block=other.arena_block)
                loads[1] = replace(other, arena_block=one.arena_block)
            return loads

        return handed

    return {(Requests, "hand_out"): swapped}


def arena_block_given_back_before_its_load():
    def early(hand_out):
        def handed(self, *given):
            loads = hand_out(self, *given)
            for load in reversed(loads):
                self._cpu.release(load.arena_block)
            return loads

        return handed

    def late(end):
        def ended(self, done):
            for load in self.by_ticket[done.ticket].loads if done.is_load else ():
                self._cpu.acquire(load.arena_block)
            end(self, done)

        return ended

    return {(Requests, "hand_out"): early, (StepsInFlight, "transferred"): late}


def write_that_is_not_counted():
    def uncounted(write_done):
        def done(self, done: WriteDone):
            write_done(self, done)
            self._stats.written -= done.error is None and len(done.batch.jobs) > 3

        return done

    return {(WriteBack, "write_done"): uncounted}


def save_that_is_counted_twice():
    def twice(landed):
        def lands(self, arena_block):
            self._stats.saved += self._stats.saved == 7
            landed(self, arena_block)

        return lands

    return {(WriteBack, "add_dirty"): twice}


def parent_evicted_before_its_child():
    def above(following):
        def next_one(self):
            key = following(self)
            parent = self.links.parents.get(key)
            return parent if parent in self.links and self._is_free(parent) else key

        return next_one

    return {(EvictionTree, "next"): above}


def parent_deleted_below_a_dirty_child():
    return {(CpuTier, "is_needed"): lambda _: lambda self, block_id: False}


def failed_load_that_nobody_is_told_of():
    return {(Roster, "roll_back"): lambda _: lambda self, failed: None}


def read_that_is_lost_with_its_rank():
    return {(TierWorker, "change_rank"): lambda _: lambda self, handle, rank: self.cancel(handle)}


def corrupt_block_that_is_served():
    def trusting(read_done):
        return lambda self, done, reads: read_done(self, replace(done, result=ReadResult.OK), reads)

    return {(WriteBack, "read_done"): trusting}


def deletion_that_leaves_the_bytes():
    return {(CpuTier, "erase_stale"): lambda _: lambda self: None}


def waiting_requests_that_do_not_count():
    def blind(value_of):
        def value(self, conversation, now_s):
            return value_of(self, replace(conversation, wanted=None, num_running=0), now_s)

        return value

    return {(EvictionOrder, "_value"): blind}


def cached_tokens_counted_again():
    def again(count):
        def counted(self, *args):
            self.num_seen = 0
            count(self, *args)

        return counted

    return {(CachedCount, "count"): again}


def request_that_keeps_its_arena_blocks():
    def holding(remove):
        def removed(self, request_id):
            request = self.by_id.get(request_id)
            if request is not None:
                for arena_block in request.wanted.arena_blocks.values():
                    self._cpu.acquire(arena_block)
            return remove(self, request_id)

        return removed

    return {(Requests, "remove"): holding}


def choices_that_keep_a_splice():
    """As it was until the simulation found it."""

    def alone(self):
        self.lineage = self.lineage.exact
        self.chain.clear()
        self.extend_chain()

    return {(Request, "give_up_splice"): lambda _: alone}


def quarantine_that_keeps_orphans():
    """As it was until the simulation found it."""
    return {(WriteBack, "_forget_tails"): lambda _: lambda self: None}


def hit_behind_which_there_is_no_state():
    return {(KVCacheManager, "up_to_checkpoint"): lambda _: lambda self, request, hits: hits}


def kv_that_outlives_its_state():
    return {(CpuTier, "_holds_state"): lambda _: lambda self, arena_block: False}


def part_of_a_state_that_outlives_the_rest():
    """As it was until it was counted here."""

    def kept(remove):
        def removed(self, key):
            parent, is_state = self.links.parents.get(key), self._is_state
            self._is_state = lambda one: is_state(one) and not is_state(parent)
            remove(self, key)
            self._is_state = is_state

        return removed

    return {(EvictionTree, "remove"): kept}


def prompt_of_whole_blocks_that_leaves_no_state():
    """As it was until the simulation found it."""

    def forgetful(scheduled):
        def noted(self, request, num_tokens):
            if num_tokens == 1 or request.num_computed_tokens + num_tokens < request.num_tokens:
                scheduled(self, request, num_tokens)

        return noted

    return {(RequestBlocks, "scheduled"): forgetful}


def state_that_is_deleted_as_soon_as_it_is_saved():
    def deleting(save_states):
        def saved(self, request, states):
            plan = save_states(self, request, states)
            for border in {num_tokens // self.stored.block_size for num_tokens, _ in states}:
                self.old_states.delete([record.block_id for record in self.stored.state_records(request, border)])
            return plan

        return saved

    return {(KVStore, "save_states"): deleting}


def state_that_goes_before_the_one_that_replaces_it_is_on_disk():
    """As it was until a server was killed at once after two quick turns."""

    def early(replace):
        def replaced(self, request, borders):
            replace(self, request, borders)
            for state in [state for _, old in self.waiting for state in old]:
                self.delete(state)
            self.waiting.clear()

        return replaced

    return {(OldStates, "replace"): early}


def state_that_is_saved_from_another_row():
    def another(slot_of):
        def slot(self, block_id):
            found = slot_of(self, block_id)
            return None if found is None else (found + 1) % self.num_slots

        return slot

    return {(StateSlots, "slot_of"): another}


def state_that_is_loaded_in_part():
    return {(Requests, "hand_out_states"): lambda hand_out: lambda self, *given: hand_out(self, *given)[1:]}


def window_slot_of_a_block_that_was_loaded_without():
    def whole(take):
        return lambda self, count, num_bare=0: take(self, count, 0)

    return {(KVCacheManager, "_take_blocks"): whole}


def window_slot_that_is_given_away_while_it_is_held():
    def held(acquire):
        def acquired(self, blocks):
            acquire(self, blocks)
            self._middle.update(dict.fromkeys(filter(None, self._of(blocks))))

        return acquired

    return {(WindowSlots, "acquire"): held, (WindowSlots, "check_integrity"): lambda _: lambda self, held: None}


def window_that_is_not_copied_before_it_is_written():
    def forgetful(allocate):
        def allocated(self, *given):
            found = allocate(self, *given)
            return found if found is None else replace(found, window_copy=None)

        return allocated

    return {(KVCacheManager, "allocate"): forgetful}


def window_slot_that_is_released_too_early():
    return {(WindowSlots, "first_held"): lambda first: lambda self, *given: first(self, *given) + 3}


def copy_behind_an_exact_block():
    """Its id would not say what came before it."""
    return {(WriteBack, "_will_have"): lambda _: lambda self, block_id: False}


def copies_under_the_ids_of_exact_blocks():
    def passed_off(build_on):
        def built(self, lineage):
            build_on(self, lineage.exact)
            self.chain[: len(lineage.sources)] = lineage.with_copies(lineage.sources)

        return built

    return {(Request, "build_on"): passed_off}


def deletion_that_leaves_copies():
    return {(Deletion, "_is_meant"): lambda _: lambda self, block_id: not is_quantised(block_id)}


# The bug, the configuration that is to find it, what is to be said of it, and the first seed that finds it, if not 1.
PLANTS: list[tuple[Plant, str, str] | tuple[Plant, str, str, int]] = [
    (load_of_a_wrong_arena_block, "plain", "a load of another block"),
    (
        arena_block_given_back_before_its_load,
        "tiny-cpu",
        "a load of another block|during a load|a load of an arena block that is",
    ),
    (write_that_is_not_counted, "plain", "written blocks are miscounted"),
    (save_that_is_counted_twice, "plain", "saved [0-9]+, seen"),
    (parent_evicted_before_its_child, "plain", "a parent is evicted before its child"),
    (parent_deleted_below_a_dirty_child, "tiny-disk", "lost its parent"),
    (failed_load_that_nobody_is_told_of, "bad-transfers", "another history|is not what its id says"),
    (read_that_is_lost_with_its_rank, "slow-disk", "work in flight for ever"),
    (corrupt_block_that_is_served, "bad-disk", "does not hold what its record says"),
    (deletion_that_leaves_the_bytes, "plain", "still holds what was deleted"),
    (waiting_requests_that_do_not_count, "queue", "evicted is what is worth"),
    (cached_tokens_counted_again, "queue", "usage says"),
    (request_that_keeps_its_arena_blocks, "queue", "arena blocks are held while nothing runs"),
    (choices_that_keep_a_splice, "bad-disk", "another history", 3),
    (quarantine_that_keeps_orphans, "everything", "lost its parent"),
    (copy_behind_an_exact_block, "int8-and-raw", "lost its parent|another", 3),
    (copies_under_the_ids_of_exact_blocks, "int8", "another|one id for two contents|what its id says|lost its parent"),
    (deletion_that_leaves_copies, "int8", "deleted"),
    (hit_behind_which_there_is_no_state, "states", "goes on from another state|KeyError"),
    (kv_that_outlives_its_state, "states", "left without its state"),
    (part_of_a_state_that_outlives_the_rest, "states", "left without its state"),
    (prompt_of_whole_blocks_that_leaves_no_state, "states", "nobody can go on"),
    (state_that_is_deleted_as_soon_as_it_is_saved, "states", "nobody can go on"),
    (state_that_goes_before_the_one_that_replaces_it_is_on_disk, "states", "deleted before one behind it"),
    (state_that_is_saved_from_another_row, "states", "does not hold what its record says"),
    (state_that_is_loaded_in_part, "states", "goes on from another state|held while nothing runs|states"),
    (hit_behind_which_there_is_no_state, "windows", "sees another window"),
    (window_slot_of_a_block_that_was_loaded_without, "windows", "somebody holds it|held by others|what its id says"),
    (window_slot_that_is_given_away_while_it_is_held, "windows", "another window|others see|what its id says", 2),
    (window_that_is_not_copied_before_it_is_written, "windows", "another window|what its id says"),
    (window_slot_that_is_released_too_early, "windows", "another window|held by others"),
    (state_that_is_loaded_in_part, "windows", "sees another window|held while nothing runs|states|its record says"),
]


@pytest.mark.parametrize("row", PLANTS, ids=[f"{row[0].__name__}-{row[1]}" for row in PLANTS])
def test_a_planted_bug_is_found(row, monkeypatch):
    plant, name, words, *first = row
    for (owner, method), bug in plant().items():
        monkeypatch.setattr(owner, method, bug(getattr(owner, method)))
    for seed in range(*first or [1], 33):
        try:
            Simulation(BY_NAME[name], seed).run()
        except AssertionError as error:
            assert re.search(words, str(error).splitlines()[0]), error
            assert f"replay: python -m tests.simulation.run {name} {seed}" in str(error)
            return
    raise AssertionError("no seed has found it")
