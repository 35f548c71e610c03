"""How the transfers of several steps end: none before an earlier one, whatever their blocks still wait for."""

import pytest

from tests.support.store.prefetch_bench import SIZE
from tests.support.store.save_bench import SaveBench


@pytest.fixture(params=[True, False], ids=["kept", "staged"])
def made(request):
    return SaveBench(8, keep=request.param)


def answering(made: SaveBench):
    """A request whose last block is full in the next step, but has no name yet; and the function that names it."""
    request, named = made.computed(1, num_named=0), made.request(1, stored=False)
    made.save((request, 0, SIZE - 1))
    return request, lambda: request.chain.extend(named.chain)


def test_what_builds_on_a_block_that_is_lost_is_lost_while_another_block_of_its_step_waits_for_its_name(made):
    """A step with a request whose token is not known yet: it is left out of the steps that follow."""
    answer, name = answering(made)
    prompt = made.computed(2)
    made.save((answer, SIZE - 1, 1), (prompt, 0, SIZE), succeeded=False)
    made.save((prompt, SIZE, SIZE))
    name()
    made.saver.name_full_blocks()
    made.steps.end_steps()
    assert made.landed == [] and made.is_saved(prompt) == [False, False]
    for request in (answer, prompt):
        made.ended(request)
    made.check_idle()


def test_a_block_is_not_saved_if_a_step_that_computed_some_of_it_has_failed_beside_a_nameless_one(made):
    answer, name = answering(made)
    prompt = made.computed(1)
    made.save((answer, SIZE - 1, 1), (prompt, 0, SIZE - 1), succeeded=False)
    made.save((prompt, SIZE - 1, 1))
    name()
    made.saver.name_full_blocks()
    made.steps.end_steps()
    assert made.landed == [] and made.is_saved(prompt) == [False]
    for request in (answer, prompt):
        made.ended(request)
    made.check_idle()


def test_others_do_not_wait_for_the_name_of_a_block(made):
    answer, name = answering(made)
    prompt = made.computed(1)
    made.save((answer, SIZE - 1, 1), (prompt, 0, SIZE))
    assert made.landed == prompt.chain
    name()
    made.saver.name_full_blocks()
    made.steps.end_steps()
    assert made.landed == [*prompt.chain, *answer.chain] and len(made.landed) == 2
    for request in (answer, prompt):
        made.ended(request)
    made.check_idle()
