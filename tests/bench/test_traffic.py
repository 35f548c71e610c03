"""Made-up traffic: the same seed gives the same, every kind has what it is made for."""

import pytest

from bench.traffic import KINDS, MAX_CONTEXT, generate
from kvstore.errors import ConfigError


def shown(trace):
    return [
        (list(r.chain), r.num_tokens, r.num_output_tokens, r.arrival_s, r.after, r.calls_tool) for r in trace.requests
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_sound_trace(kind):
    trace = generate(1500, 3, 64, kind)
    assert shown(trace) == shown(generate(1500, 3, 64, kind)) != shown(generate(1500, 4, 64, kind))
    assert len(trace.requests) == 1500 and trace.block_size == 64
    for index, request in enumerate(trace.requests):
        assert request.num_tokens + request.num_output_tokens <= MAX_CONTEXT
        assert len(request.chain) == (request.num_tokens + request.num_output_tokens) // 64
        if request.after >= 0:
            assert request.after < index
            before = trace.requests[request.after].chain
            goes_on = request.chain[len(before) - 1 : len(before)] == before[-1:]
            assert not goes_on or list(request.chain[: len(before)]) == list(before)


def gaps(trace, after_call):
    """Times away, behind calls of tools or behind other answers."""
    requests = trace.requests
    return [r.arrival_s for r in requests if r.after >= 0 and requests[r.after].calls_tool is after_call]


def test_people_think_pause_and_sleep_and_leave_by_what_they_were_told():
    trace = generate(6000, 1, 128, "people")
    assert not any(request.calls_tool for request in trace.requests)
    away = sorted(gaps(trace, False))
    assert 15 < away[len(away) // 2] < 90 and away[-1] > 10 * 3600
    followed = {request.after for request in trace.requests}
    leaving = [
        sum(i not in followed for i in some) / len(some)
        for some in (
            [i for i, r in enumerate(trace.requests) if r.num_output_tokens < 40],
            [i for i, r in enumerate(trace.requests) if 150 < r.num_output_tokens < 350],
        )
    ]
    assert leaving[0] > leaving[1] + 0.08


def test_agents_go_on_at_once_behind_a_call():
    trace = generate(4000, 1, 128, "agents")
    loop, task = sorted(gaps(trace, True)), sorted(gaps(trace, False))
    assert len(loop) > 2000 and len(task) > 100
    assert loop[len(loop) // 2] < 4 < 60 < task[len(task) // 2]
    assert loop[-1] > 60, "some tools take long"


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="0 requests"):
        generate(0)
    with pytest.raises(ConfigError, match="known are people, agents"):
        generate(5, kind="dogs")
