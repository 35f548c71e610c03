"""Who may run, who waits and who is turned away; how long a request may take; counts that return to zero."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from kvstore.service.http.errors import ApiError, unavailable
from kvstore.service.http.limits import Limits
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.loops import in_loop


def limits(is_shared: bool = False, **options) -> Limits:
    return Limits(ServeOptions(**options), is_shared)


def idle(found: Limits) -> bool:
    return (found.num_admitted, found.num_sequences, found.num_open, found.counts()) == (0, 0, 0, {})


async def settled():
    """Everything that can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


def held(
    found: Limits, tenant: str, log: list[str], name: str, num_sequences: int = 1
) -> tuple[asyncio.Task, asyncio.Event]:
    """A request that runs until its event is set."""
    ended = asyncio.Event()

    async def run():
        async with found.admit(tenant, num_sequences):
            log.append(name)
            await ended.wait()

    return asyncio.create_task(run()), ended


@in_loop
async def test_the_server_turns_away_what_is_beyond_its_queue():
    found = limits(max_queue=2)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(found.admit("a"))
        await stack.enter_async_context(found.admit("b"))
        with pytest.raises(ApiError) as caught:
            await stack.enter_async_context(found.admit("c"))
        assert (caught.value.status, caught.value.code) == (503, "server_overloaded")
        assert int(caught.value.headers["Retry-After"]) > 0
        assert found.num_admitted == 2
    async with found.admit("c"):
        pass
    assert idle(found)


@in_loop
async def test_a_tenant_has_its_own_limit_and_others_do_not_feel_it():
    found = limits(max_concurrent_per_key=1)
    async with found.admit("a"), found.admit("b"):
        with pytest.raises(ApiError) as caught:
            async with found.admit("a"):
                pass
        assert (caught.value.status, caught.value.type) == (429, "rate_limit_error")
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.headers["Retry-After"]) > 0
        assert found.counts() == {"a": (1, 0), "b": (1, 0)}
    assert idle(found)


@in_loop
async def test_those_who_wait_run_in_the_order_they_came():
    found, log = limits(max_concurrent_per_key=2, max_queue_per_key=3), []
    runs = [held(found, "a", log, str(i)) for i in range(5)]
    await settled()
    assert (log, found.counts()) == (["0", "1"], {"a": (2, 3)})
    with pytest.raises(ApiError):
        async with found.admit("a"):
            pass
    for i, (task, ended) in enumerate(runs):
        ended.set()
        await task
        await settled()
        assert log == [str(j) for j in range(min(5, i + 3))]
    assert idle(found)


@in_loop
async def test_a_turn_that_came_to_one_who_had_just_left_goes_on():
    found, log = limits(max_concurrent_per_key=1, max_queue_per_key=9), []
    runs = [held(found, "a", log, str(i)) for i in range(3)]
    await settled()
    runs[0][1].set()
    await asyncio.sleep(0)  # the first has ended and handed over; the second has not run since
    assert runs[0][0].done()
    runs[1][0].cancel()
    await settled()
    assert log == ["0", "2"]
    runs[2][1].set()
    await asyncio.gather(*(task for task, _ in runs), return_exceptions=True)
    assert idle(found)


@in_loop
async def test_waiting_has_an_end():
    found, log = limits(max_concurrent_per_key=1, max_queue_per_key=1, queue_timeout_s=0.01), []
    task, ended = held(found, "a", log, "0")
    await settled()
    with pytest.raises(ApiError) as caught:
        async with found.admit("a"):
            pass
    assert caught.value.status == 429
    assert found.counts() == {"a": (1, 0)}
    ended.set()
    await task
    assert idle(found)


def refusal(found: Limits, tenant: str, num_sequences: int = 1) -> ApiError | None:
    """What this request is told at once, if it is not let in."""

    async def enter():
        async with found.admit(tenant, num_sequences):
            pass

    try:
        enter().send(None)
    except StopIteration:
        return None
    except ApiError as error:
        return error
    raise AssertionError("it waits")


@in_loop
async def test_a_key_is_limited_in_sequences_not_in_requests():
    found, log = limits(max_concurrent_per_key=8, max_queue_per_key=12), []
    runs = [held(found, "a", log, name, size) for name, size in (("six", 6), ("seven", 7), ("one", 1))]
    await settled()
    assert (log, found.counts()) == (["six"], {"a": (6, 8)}), "nobody overtakes one that needs more room"
    assert refusal(found, "a", 5).code == "rate_limit_exceeded"
    assert refusal(found, "b", 8) is None
    runs[0][1].set()
    await settled()
    assert (log, found.counts()) == (["six", "seven", "one"], {"a": (8, 0)})
    for task, ended in runs:
        ended.set()
        await task
    assert idle(found)


@in_loop
async def test_who_stood_behind_a_larger_one_that_left_is_let_in():
    found, log = limits(max_concurrent_per_key=8, max_queue_per_key=12), []
    runs = [held(found, "a", log, name, size) for name, size in (("six", 6), ("seven", 7), ("one", 1))]
    await settled()
    runs[1][0].cancel()
    await settled()
    assert (log, found.counts()) == (["six", "one"], {"a": (7, 0)})
    for task, ended in runs:
        ended.set()
        with suppress(asyncio.CancelledError):
            await task
    assert idle(found)


def test_what_can_never_fit_is_a_wrong_request_and_not_tried_again():
    for found in (limits(max_concurrent_per_key=8), limits(max_queue=1), limits(is_shared=True, max_queue=2)):
        error = refusal(found, "a", 33)
        assert (error.status, error.code) == (400, "too_many_sequences")
        assert "33 sequences" in error.message and refusal(found, "a", 8) is None
    assert refusal(limits(is_shared=True), "a", 256 * 16) is None, "the largest request that any route takes"


@in_loop
async def test_one_tenant_does_not_fill_the_queue_of_all():
    found, log = limits(is_shared=True, max_queue=12), []
    runs = []
    for tenant, most in (("a", 6), ("b", 3), ("c", 1)):  # half of what the others leave
        for i in range(most):
            assert refusal(found, tenant) is None
            runs.append(held(found, tenant, log, f"{tenant}{i}"))
            await settled()
        assert refusal(found, tenant).status == 429
    assert refusal(found, "d") is None
    for task, ended in runs:
        ended.set()
        await task
    big = held(found, "a", log, "big", 6 * 32)
    await settled()
    assert refusal(found, "a").status == 429
    assert refusal(found, "b", 3 * 32) is None
    big[1].set()
    await big[0]
    assert idle(found)


def test_random_comings_and_goings_keep_the_limits():
    async def scenario(seed):
        import random

        chance = random.Random(seed)
        found = limits(max_queue=12, max_concurrent_per_key=2, max_queue_per_key=3)
        running = dict.fromkeys("abc", 0)

        async def one(tenant, size):
            try:
                async with found.admit(tenant, size):
                    running[tenant] += size
                    assert running[tenant] <= 2 and found.num_admitted <= 12
                    try:
                        for _ in range(chance.randrange(6)):
                            await asyncio.sleep(0)
                    finally:
                        running[tenant] -= size
            except ApiError as error:
                assert error.status in (429, 503)

        tasks = []
        for _ in range(300):
            tasks.append(asyncio.create_task(one(chance.choice("abc"), chance.choice([1, 1, 2]))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.6:
                await asyncio.sleep(0)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        assert idle(found) and set(running.values()) == {0}

    for seed in range(10):
        asyncio.run(scenario(seed))


# -- time ------------------------------------------------------------------------------------------------------------
@in_loop
async def test_a_request_has_so_much_time():
    found = limits(request_timeout_s=0.01)
    with pytest.raises(ApiError) as caught:
        async with found.deadline() as deadline:
            assert deadline.error is None
            await asyncio.Event().wait()
    assert (caught.value.status, caught.value.code) == (504, "request_timeout")
    assert caught.value.headers["x-should-retry"] == "false"
    assert idle(found)


@in_loop
async def test_all_requests_can_be_ended():
    found = limits()
    seen = []

    async def one():
        async with found.deadline() as deadline:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(deadline.error.code)
                raise

    tasks = [asyncio.create_task(one()) for _ in range(3)]
    await settled()
    assert found.num_open == 3
    found.end_all(unavailable("the server is shutting down", "stopping"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(error.status, error.code) for error in outcomes] == [(503, "stopping")] * 3
    assert seen == ["stopping"] * 3
    assert idle(found)


@in_loop
async def test_a_timeout_of_the_handler_itself_is_not_taken_for_the_requests():
    found = limits()
    with pytest.raises(TimeoutError):
        async with found.deadline():
            raise TimeoutError
