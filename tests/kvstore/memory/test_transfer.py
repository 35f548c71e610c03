"""Transfers on a CPU: layers land before they are attended to, and what was cut off in its end can be ended again."""

import pytest

from kvstore.blocks.records import TransferPlan
from kvstore.memory.transfer import Transfer
from tests.support.arenas import LOADS, NUM_LAYERS, ROW_STARTS, SAVES, SmallArena
from tests.support.faults import before_each_load


class Part(SmallArena):
    """Whose loads and saves have begun."""

    def __init__(self) -> None:
        super().__init__(Transfer)
        self.transfer.begin(TransferPlan(LOADS, SAVES, 9), ROW_STARTS)

    def save(self) -> None:
        for layer, pair in enumerate(self.step):
            self.transfer.save_kv_layer(layer, *pair)


@pytest.fixture
def part() -> Part:
    return Part()


def test_a_layer_lands_when_it_is_asked_for_and_the_rest_at_the_end(part):
    assert part.landed() == [False, False, False] and not any(cache.any() for pair in part.caches for cache in pair)
    part.transfer.wait_for_layer_load(0)
    assert part.landed() == [True, False, False]
    part.transfer.wait_for_layer_load(0)
    part.transfer.wait_for_layer_load(1)
    assert part.landed() == [True, True, False] and part.outcomes() == {}
    part.save()
    part.transfer.end()
    assert part.landed() == [True] * 3 and part.has_saved() and part.outcomes() == {"load": True, "save": True}
    part.transfer.end()
    assert part.outcomes() == {}


def test_of_a_forward_that_failed_the_loads_count_and_the_saves_do_not(part):
    part.save()
    part.transfer.end(succeeded=False)
    assert part.landed() == [True] * 3 and part.outcomes() == {"load": True, "save": False}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_load_that_fails_is_told_once_and_not_tried_again(part, layer):
    asked = []

    def fault(this, tear):
        asked.append(this)
        if this == layer:
            raise MemoryError

    with before_each_load(fault):
        for this in range(NUM_LAYERS):
            part.transfer.wait_for_layer_load(this)
        part.transfer.end()
    assert asked == list(range(layer + 1)) and part.outcomes()["load"] is False


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_an_end_that_was_interrupted_can_be_repeated(part, layer):
    part.save()

    def fault(this, tear):
        if this == layer:
            raise KeyboardInterrupt

    with before_each_load(fault), pytest.raises(KeyboardInterrupt):
        part.transfer.end()
    assert part.outcomes() == {}
    part.transfer.end(succeeded=False)
    assert part.landed() == [True] * 3 and part.outcomes() == {"load": True, "save": False}
