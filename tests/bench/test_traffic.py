"""Made-up traffic: the same seed gives the same, every kind has what it is made for."""

import pytest

from bench.traffic import KINDS, MAX_CONTEXT, generate
from kvstore.errors import ConfigError
from kvstore.planning.traces import CHAIN_STRIDE


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


def test_documents_stand_under_many_conversations():
    trace = generate(3000, 1, 128, "documents")
    first = [r for r in trace.requests if r.after < 0]
    uses: dict[int, int] = {}
    for request in first:
        uses[request.chain[0] // CHAIN_STRIDE] = uses.get(request.chain[0] // CHAIN_STRIDE, 0) + 1
    counts = sorted(uses.values())
    assert counts.count(1) > 100 and counts[-1] > 20
    assert sum(r.num_tokens for r in first) / len(first) > 5000


def test_by_night_few_come():
    times = [r.arrival_s % 86400 for r in generate(20_000, 2, 128, "documents").requests if r.after < 0]
    assert sum(17 * 3600 < at < 23 * 3600 for at in times) * 3 < sum(5 * 3600 < at < 11 * 3600 for at in times)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="0 requests"):
        generate(0)
    with pytest.raises(ConfigError, match="known are people, agents"):
        generate(5, kind="dogs")
