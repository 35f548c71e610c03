"""The scheduler asks again for a running request: loads in the middle of a prefill, on the model of keys of `house`."""

import pytest

from kvstore.engine.core.request import Status
from kvstore.engine.outputs import CachedTokensDetails
from kvstore.store.seam import Arrival, Lookup, Match
from tests.kvstore.test_connector import stored
from tests.support.house import FakeStore, House, steps_of

PROMPT = list(range(50))


class LateStore(FakeStore):
    """Blocks before `split` are to be computed; the others come `num_waits` questions after the first one there."""

    def __init__(self, split: int, chunk: int, num_waits: int = 0) -> None:
        super().__init__()
        self.split, self.chunk, self.num_waits = split, chunk, num_waits
        self.questions: list[int] = []

    def on_new_request(self, request_id, chain, *rest):
        found = super().on_new_request(request_id, chain, *rest)
        return Arrival(["disk"] * sum(block_id in self.loadable for block_id in chain), found.conversation)

    def get_num_new_matched_tokens(self, request_id, num_computed_tokens, max_tokens):
        first = num_computed_tokens // self.block_size
        self.questions.append(first)
        if first < self.split:
            return Match(Lookup.MISS, 0, min(self.chunk, self.split - first) * self.block_size)
        if self.num_waits:
            self.num_waits -= 1
            return Match(Lookup.PENDING)
        return super().get_num_new_matched_tokens(request_id, num_computed_tokens, max_tokens)


def made(split: int = 6, chunk: int = 4, num_waits: int = 0, **options) -> tuple[LateStore, House]:
    store = LateStore(split, chunk, num_waits)
    house = House(store=store, **options)
    store.loadable = stored(PROMPT, 12)
    return store, house


def test_the_head_is_computed_in_chunks_and_the_tail_is_loaded_in_the_step_that_goes_on():
    store, house = made()
    request = house.add("a", PROMPT)
    assert steps_of(house.step()) == {"a": (0, 16, 0)}
    assert request.cached == CachedTokensDetails()
    assert steps_of(house.step()) == {"a": (16, 8, 0)}
    output = house.step()
    assert steps_of(output) == {"a": (48, 2, 1)} and len(output.plan.loads) == 6
    assert request.cached == CachedTokensDetails(disk=24) and store.questions == [0, 4, 6]
    house.run()
    house.check_answer("a", PROMPT)
    assert house.computed == {"a": 24 + 2 + 2}


def test_one_that_waits_at_its_frontier_blocks_nobody():
    store, house = made(split=4, num_waits=3)
    waiting = house.add("a", PROMPT)
    house.step()
    assert steps_of(house.scheduler.schedule()) == {}, "it waits for its tail"
    assert waiting.status is Status.RUNNING and waiting.num_computed_tokens == 16 and waiting.block_numbers
    while store.num_waits:
        assert steps_of(house.scheduler.schedule()) == {}
    house.run()
    house.check_answer("a", PROMPT)


@pytest.mark.parametrize("split", [1, 4, 6, 11])
def test_a_load_that_fails_in_the_middle_is_computed_and_nothing_counts_as_cached(split):
    _, house = made(split=split, chunk=100)
    request = house.add("a", PROMPT)
    house.step()
    output = house.scheduler.schedule()
    failed = [load.block_number for load in output.plan.loads]
    assert len(failed) == 12 - split and request.cached.disk == 4 * (12 - split)
    house.scheduler.update(output, [[0]], failed)
    assert request.status is Status.WAITING and not request.may_load
    assert request.cached == CachedTokensDetails()
    house.run()
    house.check_answer("a", PROMPT)
    assert request.cached == CachedTokensDetails(), "what it found again in HBM it had computed itself"


def test_preempted_before_its_tail_came_it_counts_what_it_loads_later():
    _, house = made(split=6, chunk=4)
    request = house.add("a", PROMPT)
    house.step()
    house.scheduler.roster.preempt(request)
    assert request.ask_at is None and not request.block_numbers
    house.run()
    house.check_answer("a", PROMPT)
    assert request.cached == CachedTokensDetails(disk=24)
    assert house.computed == {"a": 24 + 2 + 2}, "and computes its head once"


def test_a_middle_load_that_finds_no_room_preempts_the_latest():
    """`b` comes later and has filled the pool when `a` wants room for its tail."""
    store, house = made(split=4, chunk=4, num_blocks=16, budget=40)
    house.add("a", PROMPT)
    house.step()
    store.split = 0
    other = house.add("b", [200 + i for i in range(30)], 8)
    house.run()
    house.check_answer("a", PROMPT)
    house.check_answer("b", [200 + i for i in range(30)], 8)
    assert other.num_preemptions <= 2
