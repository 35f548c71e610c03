"""The scheduler, driven in a house without a model that checks every step (see tests/support/house.py).

Turns between tenants are counted in steps: in the queue, in the running set, in HBM, and in the tokens of a step.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks.ids import Lineage
from kvstore.engine.core.request import CachedCount, Request, Status
from kvstore.engine.core.tenants import TenantQueues
from kvstore.engine.sampling_params import SamplingParams
from tests.support.house import ROOT, FakeStore, House, expected_answer, steps_of

# -- the budget ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_goes_in_chunks_and_samples_only_at_its_end():
    house, prompt = House(budget=16), list(range(50))
    house.add("a", prompt, 2)
    assert [steps_of(house.step())["a"] for _ in range(5)] == [
        (0, 16, 0), (16, 16, 0), (32, 16, 0), (48, 2, 1), (50, 1, 1),
    ]  # fmt: skip
    house.run()
    house.check_answer("a", prompt, 2)


def test_decode_and_prefill_share_one_budget():
    house = House(budget=16)
    house.add("a", list(range(5)), 9)
    house.step()
    house.add("b", list(range(50, 80)), 3)
    assert steps_of(house.step()) == {"a": (5, 1, 1), "b": (0, 15, 0)}
    assert steps_of(house.step()) == {"a": (6, 1, 1), "b": (15, 15, 1)}
    house.run()
    house.check_answer("a", list(range(5)), 9)
    house.check_answer("b", list(range(50, 80)), 3)


# -- order -----------------------------------------------------------------------------------------------------------
def admission_order(policy: str) -> list[str]:
    house = House(seqs=1, policy=policy)
    for i, priority in enumerate([2, 0, 1, 0]):
        house.add(f"r{i}", [i] * 3, 2, priority=priority)
    house.run()
    return [request.request_id for output in house.outputs for request in output.joined]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "0123"), ("priority", "1320")])
def test_requests_are_taken_as_they_came_or_the_lowest_value_first(policy, order):
    assert admission_order(policy) == [f"r{number}" for number in order]


def test_a_request_that_does_not_fit_is_not_overtaken():
    house = House(num_blocks=6)
    house.add("runs", [1] * 8, 6)
    house.step()
    house.add("big", list(range(50, 67)), 2)
    house.add("small", [5, 6], 2)
    assert list(steps_of(house.step())) == ["runs"]
    house.run()
    assert [request.request_id for output in house.outputs for request in output.joined] == ["runs", "big", "small"]


# -- preemption ------------------------------------------------------------------------------------------------------
def test_the_latest_is_preempted_and_hits_its_own_blocks_when_it_resumes():
    house = House(num_blocks=8, block_size=4)
    prompts = {"first": list(range(8)), "second": list(range(50, 62))}
    house.add("first", prompts["first"], 14)
    house.add("second", prompts["second"], 6)
    while not house.scheduler.roster.num_preemptions:
        output = house.step()
    assert output.left == ("second",)
    victim = house.requests["second"]
    assert (victim.status, victim.block_numbers, victim.num_preemptions) == (Status.WAITING, [], 1)
    # All of its full blocks stay findable but the one that was given away.
    assert [house.pool.lookup(i) is not None for i in victim.chain[:3]] == [True, True, True]
    house.run()
    joins = [request.request_id for output in house.outputs for request in output.joined]
    assert joins == ["first", "second", "second"]
    resumed = next(s for o in house.outputs if o.joined[:1] and o is not house.outputs[0] for s in o.scheduled[-1:])
    assert resumed.request_id == "second"
    assert resumed.num_computed_tokens > 0, "a resumed request hits what it had computed"
    for name, num_output in (("first", 14), ("second", 6)):
        house.check_answer(name, prompts[name], num_output)
    assert victim.cached.details.total == 0, "what it hit of its own is no saved prompt token"


def test_a_preempted_request_of_low_priority_is_not_the_latest_arrival():
    house = House(num_blocks=8, policy="priority")
    house.add("low", list(range(50, 62)), 6, priority=5)
    house.add("high", list(range(8)), 14, priority=1)
    house.run()
    assert house.requests["low"].num_preemptions > 0
    assert house.requests["high"].num_preemptions == 0
    house.check_answer("low", list(range(50, 62)), 6)
    house.check_answer("high", list(range(8)), 14)


# -- abort -----------------------------------------------------------------------------------------------------------


def test_abort_between_schedule_and_update():
    house = House()
    house.add("a", list(range(6)), 5)
    house.step()
    output = house.scheduler.schedule()
    house.scheduler.roster.finish("a", "abort")
    assert house.scheduler.update(output, [[5]]) == []
    assert house.requests["a"].num_output_tokens == 1
    assert house.scheduler.schedule().left == ("a",)
    house.pool.check_integrity()


def test_abort_of_a_choice_that_is_not_born_yet():
    house, prompt = House(budget=4), list(range(10))
    house.add("a", prompt, 4, n=3)
    house.step()
    house.scheduler.roster.finish("a/1", "abort")
    assert house.scheduler.num_waiting == 0
    house.run()
    assert "a/1" not in house.answers
    assert house.answers["a"] == expected_answer(prompt, 4)
    assert house.answers["a/2"] == expected_answer(prompt, 4, 2)


def test_abort_of_the_first_choice_before_its_prompt_is_computed_ends_all():
    house = House(budget=4)
    house.add("a", list(range(10)), 4, n=3)
    house.step()
    house.scheduler.roster.finish("a", "abort")
    assert house.scheduler.roster.requests == {}
    assert [house.requests[i].finish_reason for i in ("a", "a/1", "a/2")] == ["abort"] * 3
    house.run()


def test_ending_what_has_ended_or_never_was_does_nothing():
    house = House()
    house.add("a", [1, 2], 2)
    house.run()
    house.scheduler.roster.finish("a", "abort")
    house.scheduler.roster.finish("nobody", "abort")
    house.check_idle()
    assert house.requests["a"].finish_reason == "length"


# -- n > 1 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [3, 5, 64])
@pytest.mark.parametrize("num_prompt", [1, 4, 10, 12])
def test_the_prompt_of_n_choices_is_computed_once(num_prompt, budget):
    house, prompt, n, num_output = House(budget=budget), list(range(num_prompt)), 5, 4
    house.add("a", prompt, num_output, n=n)
    house.run()
    assert house.computed == {"a": num_prompt + n * (num_output - 1)}
    house.check_answer("a", prompt, num_output, n=n)


def test_choices_share_full_blocks_and_copy_the_partial_tail_but_once_each():
    house, prompt, n = House(), list(range(10)), 4
    house.add("a", prompt, 6, n=n)
    house.step()
    choices = [request for name, request in house.requests.items() if name.startswith("a")]
    assert {tuple(choice.block_numbers) for choice in choices} == {tuple(choices[0].block_numbers)}
    tail = choices[0].block_numbers[2]
    house.step()
    assert [source for source, _ in house.copies] == [tail] * (n - 1), "the last owner writes in place"
    assert [choice.block_numbers[:2] for choice in choices] == [choices[0].block_numbers[:2]] * n
    assert len({choice.block_numbers[2] for choice in choices}) == n
    assert choices[-1].block_numbers[2] == tail
    house.run()
    assert len(house.copies) == n - 1
    house.check_answer("a", prompt, 6, n=n)


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy():
    house = House()
    house.add("a", list(range(8)), 5, n=4)
    house.run()
    assert house.copies == []
    house.check_answer("a", list(range(8)), 5, n=4)


def test_a_block_that_comes_to_hbm_and_one_that_is_stored_while_a_request_waits_count_where_they_are():
    cached = CachedCount()
    cached.note_arrival([])
    cached.note_late(1, ["disk", "disk"])
    cached.count(12, 4, 4, Lineage(b"root"))
    assert (cached.details.hbm, cached.details.cpu, cached.details.disk) == (4, 0, 8)


def test_every_choice_reports_the_tokens_that_its_prompt_hit():
    house = House()
    house.add("warm", list(range(9)), 2)
    house.run()
    house.add("a", [*range(8), 70, 71], 3, n=3)
    house.run()
    assert [house.requests[i].cached.details.hbm for i in ("a", "a/1", "a/2")] == [8, 8, 8]
    assert house.computed["a"] == 2 + 3 * 2


def test_waiting_choices_give_back_their_blocks_for_a_request_that_runs():
    """The older request needs the whole pool while choices of the younger one wait with a share of theirs."""
    house = House(num_blocks=6, block_size=4, seqs=2)
    house.add("old", list(range(8)), 16)
    house.add("young", list(range(50, 56)), 9, n=3)
    dropped = False
    while house.scheduler.has_work:
        house.step()
        born = [house.requests[f"young/{i}"] for i in (1, 2)]
        dropped |= any(c.status is Status.WAITING and c.num_output_tokens and not c.block_numbers for c in born)
    assert dropped
    assert house.requests["old"].num_preemptions == 0
    house.check_idle()
    house.check_answer("old", list(range(8)), 16)
    house.check_answer("young", list(range(50, 56)), 9, n=3)


# -- invariants ------------------------------------------------------------------------------------------------------


def test_invariant_7_what_waits_and_is_aborted_leaves_nothing_behind():
    """A server under load takes and loses requests for days while the queue never runs empty."""
    house = House(seqs=1, window=4000, num_blocks=2000)
    house.add("runs", [1, 2, 3], 3000)
    house.add("waits", [1, 2, 3], 2)
    house.step()
    for i in range(2000):
        house.add(f"r{i}", [i % 90] * 3, 2, n=2)
        house.scheduler.roster.finish(f"r{i}", "abort")
        assert house.scheduler.num_waiting == 1
        assert set(house.scheduler.roster.requests) == {"runs", "waits"}
    house.scheduler.roster.finish("runs", "abort")
    house.run()
    house.check_answer("waits", [1, 2, 3], 2)


# -- at random -------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 24),
    block_size=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    policy=st.sampled_from(["fcfs", "priority"]),
    tenants=st.sampled_from(["a", "abc"]),
)
def test_random_arrivals_and_aborts_give_what_the_plain_loop_gives(
    seed, num_blocks, block_size, seqs, budget, policy, tenants
):
    rng = random.Random(seed)
    house = House(num_blocks, block_size, seqs, budget, policy=policy)
    stems = [[rng.randrange(9) for _ in range(12)] for _ in range(2)]
    room = num_blocks * block_size
    asked, aborted = {}, set()
    for i in range(rng.randrange(1, 12)):
        for _ in range(rng.randrange(4)):
            house.step()
        if asked and rng.random() < 0.3:
            victim = rng.choice(sorted(asked))
            aborted.add(victim)
            for name in [name for name in house.requests if name.split("/")[0] == victim]:
                house.scheduler.roster.finish(name, "abort")
            house.check()
        prompt = (rng.choice(stems)[: rng.randrange(1, 13)] + [rng.randrange(9) for _ in range(rng.randrange(6))])[
            : room - 1
        ]
        num_output = rng.randrange(1, min(12, room - len(prompt)) + 1)
        asked[f"r{i}"] = (prompt, num_output, rng.choice([1, 1, 2, 4]))
        house.add(f"r{i}", prompt, num_output, asked[f"r{i}"][2], rng.randrange(3), rng.choice(tenants))
    house.run()
    for name, (prompt, num_output, n) in asked.items():
        for i in range(n):
            request_id = f"{name}/{i}" if i else name
            answer = house.answers.get(request_id, [])
            expected = expected_answer(prompt, num_output, i)
            assert answer == (expected[: len(answer)] if name in aborted else expected), request_id


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
        joins = [request.request_id for output in house.outputs for request in output.joined]
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
