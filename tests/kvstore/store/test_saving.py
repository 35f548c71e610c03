"""Which tokens of a step are saved and where to, how holes of what was not saved are closed, and how steps end."""

import pytest

from kvstore.blocks.records import Load, Transferred
from kvstore.memory.tier import ArenaBlockState
from kvstore.stats import Losses
from tests.support.store.prefetch_bench import SIZE
from tests.support.store.save_bench import SaveBench


@pytest.fixture
def made():
    return SaveBench(8)


def test_every_token_of_a_step_goes_to_the_place_of_its_block(made):
    one, two = made.computed(2), made.computed(1)
    saves = made.save((one, 0, 2 * SIZE), (two, 0, 3))
    places = [(save.scheduled, save.first, save.num_tokens, save.offset) for save in saves]
    assert places == [(0, 0, SIZE, 0), (0, SIZE, SIZE, 0), (1, 0, 3, 0)]
    assert len({save.arena_block for save in saves}) == 3
    assert made.is_saved(one) == [True, True] and made.is_saved(two) == [False]


def test_a_block_that_is_filled_over_steps_stays_in_its_arena_block_and_is_found_when_it_is_full(made):
    request = made.computed(1)
    first, second = made.save((request, 0, 3)), made.save((request, 3, 1))
    assert (first[0].arena_block, first[0].offset) == (second[0].arena_block, 0) and second[0].offset == 3
    assert made.is_saved(request) == [True] and made.stats.saved == 1
    made.ended(request)
    made.check_idle()


def test_a_full_block_is_pending_until_its_step_has_ended(made):
    request = made.computed(1)
    plan = made.plan((request, 0, SIZE))
    arena_block = made.cpu.arena_block_of(request.chain[0])
    assert made.cpu.state(arena_block) is ArenaBlockState.PENDING
    made.end(plan)
    assert made.cpu.state(arena_block) is ArenaBlockState.READY


def test_a_block_that_does_not_become_full_gives_its_arena_block_back(made):
    request = made.computed(1)
    made.save((request, 0, 3))
    assert made.cpu.pool.num_in_use == 1
    made.ended(request)
    made.check_idle()


def test_what_is_stored_is_not_saved_again(made):
    one = made.computed(2)
    made.save((one, 0, 2 * SIZE))
    two = made.arrive(made.same(one, "again", (0, 9)))
    assert made.save((two, 0, 2 * SIZE)) == [] and made.stats.saved == 2


def test_of_two_that_fill_the_same_block_over_the_same_steps_one_is_found(made):
    one = made.computed(1)
    two = made.arrive(made.same(one, "twin", (0, 9)))
    made.save((one, 0, 3), (two, 0, 3))
    made.save((one, 3, 1), (two, 3, 1))
    assert made.stats.saved == 1 and made.cpu.pool.num_cached == 1
    for request in (one, two):
        made.ended(request)
    made.check_idle()


# -- blocks without a name -------------------------------------------------------------------------------------------
def test_a_block_is_saved_when_its_last_token_is_known(made):
    request, named = made.computed(1, num_named=0), made.request(1, stored=False)
    made.save((request, 0, SIZE))
    assert made.cpu.pool.num_cached == 0
    request.chain += named.chain
    made.steps.name_full_blocks()
    made.steps.end_steps()
    assert made.is_saved(request) == [True] and made.stats.saved == 1


def test_a_request_that_leaves_before_its_block_has_a_name_saves_nothing(made):
    request = made.computed(1, num_named=0)
    made.save((request, 0, SIZE))
    made.steps.name_full_blocks(ending=request)
    made.ended(request)
    made.steps.name_full_blocks()
    made.steps.end_steps()
    assert made.cpu.pool.num_cached == 0
    made.check_idle()


# -- what is not saved -----------------------------------------------------------------------------------------------
def test_a_full_tier_ends_the_saving_of_a_request_until_there_is_room_for_its_hole():
    made = SaveBench(2)
    holder = made.computed(1)
    made.save((holder, 0, 1))  # holds one of the two arena blocks
    request = made.computed(3)
    made.save((request, 0, 3 * SIZE))
    assert made.is_saved(request) == [True, False, False] and made.stats.dropped_saves == 1
    made.ended(request)
    assert made.steps.num_usable(request, 3) == 3, "computing again would not help while the tier is full"
    made.ended(holder)
    again = made.arrive(made.same(request, "again", (0, 9)), num_hbm_blocks=3)
    assert made.steps.num_unsaved == 1 and made.steps.num_usable(again, 3) == 1
    made.cpu.forget(request.chain[0])
    assert made.steps.num_usable(again, 3) == 3, "its parent is gone: it could not be saved"


def test_a_later_request_stops_before_a_hole_computes_it_and_closes_it(made):
    request = made.computed(3)
    made.save((request, 0, SIZE))
    made.save((request, SIZE, 2 * SIZE), may_save=False)
    assert made.is_saved(request) == [True, False, False] and made.steps.num_unsaved == 1
    made.ended(request)
    again = made.arrive(made.same(request, "again", (0, 9)), num_hbm_blocks=3)
    assert made.steps.num_usable(again, 3) == 1
    made.save((again, SIZE, 2 * SIZE))
    assert made.is_saved(again) == [True, True, True] and made.steps.num_unsaved == 0
    assert made.steps.num_usable(again, 3) == 3


def test_a_hole_that_somebody_else_has_closed_is_none(made):
    request = made.computed(2)
    made.save((request, 0, 2 * SIZE), may_save=False)
    made.disk.stored.add(request.chain[0])
    assert made.steps.num_unsaved == 1
    assert made.steps.num_usable(request, 2) == 2 and made.steps.num_unsaved == 0


@pytest.mark.parametrize(("has_disk", "usable"), [(True, 1), (False, 3)])
def test_a_block_whose_parent_is_stored_nowhere_is_not_saved(has_disk, usable):
    """Where there is a disk it is worth computing again from where something is stored."""
    made = SaveBench(8, has_disk)
    request = made.computed(3)
    made.save((request, 0, 2 * SIZE))
    made.cpu.forget(request.chain[1])
    assert made.save((request, 2 * SIZE, SIZE)) == []
    assert (made.stats.orphan_saves, made.stats.dropped_saves) == (1, 0)
    assert made.steps.num_usable(request, 3) == usable


def test_nothing_is_computed_again_for_a_block_that_the_disk_refuses():
    made = SaveBench(8)
    request = made.computed(3)
    made.save((request, 0, 2 * SIZE))
    made.cpu.forget(request.chain[1])
    made.stats.losses = Losses(8)
    made.stats.losses.note("not_written", "disk", request.chain[1], why="the quota is reached")
    assert made.save((request, 2 * SIZE, SIZE)) == []
    assert made.stats.orphan_saves == 1 and made.steps.num_usable(request, 3) == 3


def test_a_parent_that_is_deleted_while_its_child_is_filled_takes_the_child_along(made):
    request = made.computed(2)
    made.save((request, 0, SIZE + 1))
    made.cpu.forget(request.chain[0])
    made.save((request, SIZE + 1, SIZE - 1))
    assert made.is_saved(request) == [False, False] and made.stats.orphan_saves == 1
    made.ended(request)
    made.check_idle()


def test_a_block_whose_first_tokens_another_choice_has_computed_is_not_saved(made):
    request = made.computed(2)
    assert made.save((request, 1, 2 * SIZE - 1)) == []
    assert made.steps.num_unsaved == 1 and (made.stats.dropped_saves, made.stats.orphan_saves) == (0, 0)


def test_a_save_that_fails_is_a_hole(made):
    request = made.computed(2)
    made.save((request, 0, SIZE))
    made.save((request, SIZE, SIZE), succeeded=False)
    assert made.is_saved(request) == [True, False] and made.steps.num_unsaved == 1
    made.ended(request)
    assert made.steps.num_usable(request, 2) == 1
    made.check_idle()


def test_a_state_goes_with_the_block_whose_save_failed_and_it_is_known_why():
    made = SaveBench(8)
    made.stats.losses, made.stored.num_state_blocks = Losses(9), 2
    request = made.computed(1)
    step = made.plan((request, 0, SIZE))
    parts = [one.block_id for one in made.stored.state_records(request, 1)]
    made.steps.plan_states([(0, made.stored.state_records(request, 1))], None)
    made.end(step, succeeded=False)
    assert not made.stored.has_state(request.chain[0])
    assert [made.stats.losses.get(one).why for one in (*request.chain, *parts)] == ["its save failed"] * 3


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_state_behind_what_was_loaded_in_vain_is_not_kept(made, succeeded):
    """It was saved as its request left, before its step had told that."""
    made.stored.num_state_blocks = 2
    request = made.computed(1)
    made.save((request, 0, SIZE))
    arena_block = made.cpu.arena_block_of(request.chain[0])
    made.cpu.acquire(arena_block)
    made.steps.add_loads([Load(1, arena_block, 0, request.chain[0])])
    step, state = made.plan(), made.steps.plan_states([(0, made.stored.state_records(request, 1))], None)
    made.steps.begun(step.ticket)
    for done in (Transferred(state.ticket, False, True), Transferred(step.ticket, True, succeeded)):
        made.steps.transferred(done)
    made.steps.end_steps()
    assert made.stored.has_state(request.chain[0]) == succeeded
    made.ended(request)
    made.check_idle()


def test_a_block_that_was_begun_in_a_step_that_failed_is_dropped(made):
    request = made.computed(1)
    made.save((request, 0, 3), succeeded=False)
    assert made.save((request, 3, 1)) == [] and made.stats.dropped_saves == 1
    made.ended(request)
    made.check_idle()


# -- steps in flight: none ends before an earlier one, whatever its blocks still wait for ----------------------------
@pytest.fixture(params=[True, False], ids=["kept", "staged"])
def steps(request):
    return SaveBench(8, keep=request.param)


def answering(made: SaveBench):
    """A request whose last block is full in the next step, but has no name yet; and the function that names it."""
    request, named = made.computed(1, num_named=0), made.request(1, stored=False)
    made.save((request, 0, SIZE - 1))

    def name() -> None:
        request.chain.extend(named.chain)
        made.steps.name_full_blocks()
        made.steps.end_steps()

    return request, name


def all_end(made: SaveBench, *requests) -> None:
    for request in requests:
        made.ended(request)
    made.check_idle()


def test_what_builds_on_a_block_that_is_lost_is_lost_while_another_block_of_its_step_waits_for_its_name(steps):
    """A step with a request whose token is not known yet: it is left out of the steps that follow."""
    answer, name = answering(steps)
    prompt = steps.computed(2)
    steps.save((answer, SIZE - 1, 1), (prompt, 0, SIZE), succeeded=False)
    steps.save((prompt, SIZE, SIZE))
    name()
    assert steps.landed == [] and steps.is_saved(prompt) == [False, False]
    all_end(steps, answer, prompt)


def test_a_block_is_not_saved_if_a_step_that_computed_some_of_it_has_failed_beside_a_nameless_one(steps):
    answer, name = answering(steps)
    prompt = steps.computed(1)
    steps.save((answer, SIZE - 1, 1), (prompt, 0, SIZE - 1), succeeded=False)
    steps.save((prompt, SIZE - 1, 1))
    name()
    assert steps.landed == [] and steps.is_saved(prompt) == [False]
    all_end(steps, answer, prompt)


def test_others_do_not_wait_for_the_name_of_a_block(steps):
    answer, name = answering(steps)
    prompt = steps.computed(1)
    steps.save((answer, SIZE - 1, 1), (prompt, 0, SIZE))
    assert steps.landed == prompt.chain
    name()
    assert steps.landed == [*prompt.chain, *answer.chain] and len(steps.landed) == 2
    all_end(steps, answer, prompt)
