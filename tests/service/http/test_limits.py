"""Who is let in and who is turned away; how long a request may take; counts that return to zero."""

import asyncio
import random
from contextlib import ExitStack

import pytest

from kvstore.service.http.errors import ApiError, unavailable
from kvstore.service.http.limits import Limits
from kvstore.service.settings.serve_options import ServeOptions
from tests.support.loops import in_loop
from tests.support.waiting import wait_in_loop


def limits(is_shared: bool = False, **options) -> Limits:
    return Limits(ServeOptions(**options), is_shared)


def idle(found: Limits) -> bool:
    return (found.num_admitted, sum(found.counts().values()), found.num_open, found.counts()) == (0, 0, 0, {})


def refusal(found: Limits, tenant: str, num_sequences: int = 1) -> ApiError | None:
    """What this request is told, if it is not let in."""
    try:
        with found.admit(tenant, num_sequences):
            return None
    except ApiError as error:
        return error


def test_the_server_turns_away_what_is_beyond_its_queue():
    found = limits(max_queue=2)
    with found.admit("a"), found.admit("b"):
        error = refusal(found, "c")
        assert (error.status, error.code) == (503, "server_overloaded")
        assert int(error.headers["Retry-After"]) > 0
        assert (found.num_admitted, found.counts()) == (2, {"a": 1, "b": 1})
    with found.admit("a", 64 - 8):
        assert refusal(found, "b", 9).status == 503 and refusal(found, "b", 8) is None
    assert idle(found)


def test_what_can_never_fit_is_a_wrong_request_and_not_tried_again():
    for found in (limits(max_queue=1), limits(is_shared=True, max_queue=2)):
        error = refusal(found, "a", 33)
        assert (error.status, error.code) == (400, "too_many_sequences")
        assert "33 sequences" in error.message and refusal(found, "a", 8) is None
    assert refusal(limits(is_shared=True), "a", 256 * 16) is None, "the largest request that any route takes"


def test_one_tenant_does_not_fill_the_queue_of_all():
    found = limits(is_shared=True, max_queue=12)
    with ExitStack() as running:
        for tenant, most in (("a", 6), ("b", 3), ("c", 1)):  # half of what the others leave
            for _ in range(most):
                running.enter_context(found.admit(tenant))
            error = refusal(found, tenant)
            assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
            assert int(error.headers["Retry-After"]) > 0
        assert refusal(found, "d") is None
    with found.admit("a", 32), found.admit("a", 5 * 32):
        assert refusal(found, "a").status == 429
        assert refusal(found, "b", 3 * 32) is None
    assert idle(found)


@pytest.mark.parametrize("seed", range(10))
def test_random_comings_and_goings_keep_the_limits(seed):
    chance, found = random.Random(seed), limits(is_shared=True, max_queue=12)
    running = list[tuple[str, int, ExitStack]]()
    for _ in range(300):
        tenant, size, place = chance.choice("abc"), chance.choice([1, 8, 60]), ExitStack()
        others = [other for name, other, _ in running if name != tenant]
        try:
            place.enter_context(found.admit(tenant, size))
            running.append((tenant, size, place))
            assert len(running) - len(others) <= (12 - len(others)) // 2
            assert found.counts()[tenant] <= (12 * 32 - sum(others)) // 2
        except ApiError as error:
            assert error.status in (429, 503)
        if running and chance.random() < 0.5:
            running.pop(chance.randrange(len(running)))[2].close()
        counts = {name: sum(one for other, one, _ in running if other == name) for name, *_ in running}
        assert (found.num_admitted, found.counts()) == (len(running), counts)
    for *_, place in running:
        place.close()
    assert idle(found)


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
    await wait_in_loop(lambda: found.num_open == 3)
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
