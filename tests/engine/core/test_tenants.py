"""Turns between tenants, counted in steps: in the queue, in the running set, in HBM, and in the tokens of a step."""

from collections import Counter

import pytest

from kvstore.blocks.ids import Lineage
from kvstore.engine.core.request import Request
from kvstore.engine.core.tenants import TenantQueues
from kvstore.engine.sampling_params import SamplingParams
from tests.support.house import ROOT, FakeStore, House, steps_of


def flood(house: House, num_prompts: int, n: int, num_output: int, prompt_tokens: int = 8, tenant: str = "many"):
    """A request of very many sequences, as the completions route submits it."""
    for i in range(num_prompts):
        house.add(f"{tenant}{i}", [i % 90] * prompt_tokens, num_output, n, tenant=tenant)


def num_running(house: House) -> Counter[str]:
    return Counter(request.tenant for request in house.scheduler.roster.tenants.running())


def steps_until_answered(house: House, name: str) -> int:
    steps = 0
    while name not in house.answers:
        house.step()
        steps += 1
    return steps


# -- the queue and the running set -----------------------------------------------------------------------------------
def test_a_newcomer_answers_in_its_first_step_beside_a_flood_of_sequences():
    house = House(num_blocks=3000, seqs=32, budget=128)
    flood(house, 256, 16, 40)
    for _ in range(20):
        house.step()
    assert num_running(house) == {"many": 32} and house.scheduler.num_waiting > 200
    house.add("one", list(range(40)), 3, tenant="few")
    assert steps_until_answered(house, "one") == 1
    assert num_running(house) == {"many": 31, "few": 1}


def test_places_are_shared_equally_once_several_have_enough_to_do():
    house = House(num_blocks=3000, seqs=12)
    flood(house, 12, 4, 60, tenant="a")
    house.step()
    flood(house, 12, 1, 60, tenant="b")
    flood(house, 2, 1, 60, tenant="c")
    for _ in range(8):
        house.step()
    assert num_running(house) == {"a": 5, "b": 5, "c": 2}
    preemptions = house.scheduler.roster.num_preemptions
    for _ in range(8):
        house.step()
    assert house.scheduler.roster.num_preemptions == preemptions, "what is shared equally stays as it is"
    house.run()
    for name, n in (("a", 4), ("b", 1)):
        for i in range(12):
            house.check_answer(f"{name}{i}", [i] * 8, 60, n)


def test_those_who_come_back_at_once_do_not_keep_out_one_who_waits():
    house = House(seqs=1)
    for i in range(4):
        house.add(f"a{i}", [i] * 3, 2, tenant="a")
    served = 0
    for _ in range(200):
        for tenant in ("b", "c"):
            if not any(request.tenant == tenant for request in house.scheduler.roster.requests.values()):
                house.add(f"{tenant}{served}", [30] * 3, 2, tenant=tenant)
                served += 1
        house.step()
        if "a3" in house.answers:
            break
    assert served <= 12, "one turn each for every turn of the one who waits"


def test_the_order_inside_a_tenant_stays_that_of_its_arrivals_or_priorities():
    for policy, expected in (("fcfs", ["b0", "b1", "b2"]), ("priority", ["b1", "b2", "b0"])):
        house = House(seqs=2, policy=policy)
        house.add("a", [1] * 3, 12, priority=-100, tenant="a")
        for i, priority in enumerate([2, 0, 1]):
            house.add(f"b{i}", [10 + i] * 3, 2, priority=priority, tenant="b")
        house.add("a2", [2] * 3, 2, priority=-100, tenant="a")
        house.run()
        joins = [row.request.request_id for output in house.outputs for row in output.new_rows]
        assert [name for name in joins if name[0] == "b"] == expected
        assert joins[-1] == "a2" or policy == "fcfs", "a priority is no means against other tenants"


# -- blocks ----------------------------------------------------------------------------------------------------------
def test_blocks_are_made_free_for_a_newcomer_when_others_hold_all_of_them():
    house = House(num_blocks=40, block_size=4, seqs=16)
    flood(house, 8, 1, 60, prompt_tokens=16)
    while house.pool.num_free > 2:
        house.step()
    house.add("one", list(range(30)), 3, tenant="few")
    assert steps_until_answered(house, "one") == 1
    assert house.requests["one"].num_preemptions == 0
    house.run()
    house.check_answer("one", list(range(30)), 3)


def test_who_has_most_gives_back_blocks_when_they_run_out_not_who_came_last():
    house = House(num_blocks=24, block_size=4, seqs=8)
    flood(house, 4, 1, 40, prompt_tokens=12)
    house.step()
    house.add("one", list(range(8)), 20, tenant="few")
    house.run()
    assert house.requests["one"].num_preemptions == 0
    assert house.scheduler.roster.num_preemptions > 0
    house.check_answer("one", list(range(8)), 20)
    for i in range(4):
        house.check_answer(f"many{i}", [i] * 12, 40)


def test_a_place_made_for_blocks_on_their_way_is_kept_until_they_come():
    store = FakeStore()
    house = House(num_blocks=600, seqs=4, store=store)
    flood(house, 12, 1, 80)
    house.step()
    one = house.add("one", list(range(9)), 2, tenant="few")
    store.pending = set(one.chain)
    for _ in range(6):
        house.step()
    assert house.scheduler.roster.num_preemptions == 1, "once, not in every step"
    assert num_running(house) == {"many": 3}
    store.pending = set()
    assert steps_until_answered(house, "one") == 1


# -- the tokens of a step --------------------------------------------------------------------------------------------
def test_two_prompts_of_two_tenants_share_the_tokens_of_each_step():
    house = House(num_blocks=200, budget=32, window=300)
    house.add("long", [1] * 200, 2, tenant="a")
    house.step()
    house.add("short", [2] * 40, 2, tenant="b")
    steps = [steps_of(house.step()) for _ in range(4)]
    assert steps[:2] == [{"long": (32 + 16 * i, 16, 0), "short": (16 * i, 16, 0)} for i in range(2)]
    assert steps[2] == {"long": (64, 24, 0), "short": (32, 8, 1)}, "what one does not need is the other's"
    assert steps[3] == {"long": (88, 31, 0), "short": (40, 1, 1)}
    house.run()


def test_decodes_of_one_tenant_do_not_take_the_whole_budget():
    house = House(num_blocks=400, seqs=17, budget=16)
    flood(house, 17, 1, 60, prompt_tokens=1)
    for _ in range(3):
        house.step()
    house.add("one", [5] * 40, 2, tenant="few")
    taken = [steps_of(house.step())["one"][1] for _ in range(5)]
    assert taken == [8] * 5
    house.run()


# -- the order in which the store expects requests -------------------------------------------------------------------
def test_the_store_expects_a_newcomer_next_and_others_in_between():
    tenants = TenantQueues(lambda request: (0, request.sequence))
    made = []

    def arrive(tenant):
        request = Request(f"{tenant}{len(made)}", [1], SamplingParams(), 2, Lineage(ROOT), 4, 0, tenant=tenant)
        request.sequence = len(made)
        made.append(request)
        tenants.arrive([request])
        tenants.queue(request)
        return request

    many = [arrive("many") for _ in range(8)]
    assert [request.place for request in many] == list(range(1, 9))
    for request in many[:3]:
        tenants.run(request)
    few = [arrive("few") for _ in range(3)]
    assert [request.place for request in few] == [4, 5, 6], "the k-th of each tenant is expected k-th"
    assert arrive("many").place == 9
    assert arrive("third").place == 4


@pytest.mark.parametrize("num_tenants", [2, 5])
def test_under_pressure_for_blocks_all_tenants_come_to_their_end(num_tenants):
    """Each preempts others for its turn: that must not go round for ever."""
    house = House(num_blocks=10, block_size=4, seqs=6, budget=12)
    for i in range(20):
        house.add(f"r{i}", [i] * (3 + i % 11), 14, tenant=f"t{i % num_tenants}")
    house.run()
    for i in range(20):
        house.check_answer(f"r{i}", [i] * (3 + i % 11), 14)
