"""A rank ends or hangs, or a step fails: who ends with it, and what goes on.

`--long` ends each rank in both ways, of both sizes.
"""

import os
import signal
from collections.abc import Iterable
from functools import partial

import pytest

from kvstore import Engine, SamplingParams
from kvstore.engine.client import opening
from kvstore.engine.process import Child
from kvstore.errors import EngineDiedError
from tests.support.by_hand import held
from tests.support.engines import ask, cached, greedy, open_engine, settle
from tests.support.faults import before_each, constants
from tests.support.ranks import BOTH, PROMPTS, SIZES, children, end_while_it_answers, is_gone, rank_of, ranks_of
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PATIENCE_S = 10.0  # a busy machine lets no process wait so long
START_S = 300.0  # importing torch beside other tests
ALL_ENDS = [(rank, sign) for rank in (0, 1) for sign in (signal.SIGKILL, signal.SIGSTOP)]


class Once:
    """Raises when it is called for the first time after `count` calls."""

    def __init__(self, count: int) -> None:
        self.num_left = count

    def __call__(self) -> None:
        self.num_left -= 1
        if self.num_left == -1:
            raise RuntimeError("injected")


def has_said(handles, count: int) -> bool:
    return sum(len(handle.pieces) for handle in handles) > count


def is_another(engine, pid: int) -> bool:
    return engine.core.state == "running" and engine.core.pid != pid


def are_gone(pids: Iterable[int]) -> bool:
    return all(is_gone(pid) for pid in pids)


def ended_with(engine, handle, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(engine.stream(handle))


# -- a rank that ends, or hangs ----------------------------------------------------------------------------------------
def test_an_engine_whose_rank_ends_names_it_and_leaves_nothing(model, plain, tmp_path):
    """Rank 3 has stage and pipe in common with one other each, so the first rank hears of it from these."""
    before = children(os.getpid())
    with open_engine(model, tmp_path / "store", **BOTH) as engine:
        ask(engine, PROMPTS[0])
        settle(engine)
        ranks = ranks_of(os.getpid())
        end_while_it_answers(engine, ranks[2], signal.SIGKILL, "rank 3 of 4 ended .signal 9")
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match="rank 3 of 4 ended"):
            ask(engine, PROMPTS[1])
    assert are_gone(ranks) and children(os.getpid()) <= before
    with open_engine(model, tmp_path / "store") as engine:
        out = ask(engine, PROMPTS[0])
        assert out.token_ids == plain(PROMPTS[0], 4) and cached(out)[2] > 0


def test_ranks_that_wait_for_what_never_comes_show_where_and_end(model, capfd):
    """A message of a step is lost on its way, so nobody goes on, and each process is alive."""
    with constants(opening, SLOW_FACTOR=0.5), open_engine(model, silence_s=10.0, **SIZES["pipeline"]) as engine:
        ask(engine, PROMPTS[0])
        with (
            constants(Child, send=lambda child, message, waits: None),
            pytest.raises(EngineDiedError, match=r"rank 1 of 2 ended .killed: a step of the engine has taken 5"),
        ):
            ask(engine, PROMPTS[1])
    said = capfd.readouterr().err
    assert "follower.py" in said and "step_loop.py" in said, "where both of them were"
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_are_started_again(model, size, request):
    """The first one is killed. With `--long` each is, and hangs, of both sizes."""
    is_long = request.config.getoption("--long")
    if size != "pipeline" and not is_long:
        pytest.skip("needs --long")
    with Engine(model, {"hbm": "2MiB"}, device="cpu", process="own", silence_s=PATIENCE_S, **SIZES[size]) as engine:
        expected = engine.generate([PROMPTS[1]], greedy(8))[0].token_ids
        for rank, sign in ALL_ENDS if is_long else ALL_ENDS[:1]:
            before = engine.core.pid, rank_of(engine.core.pid)
            end_while_it_answers(engine, before[rank], sign)
            wait_until(partial(is_another, engine, before[0]), "the restart", START_S)
            wait_until(partial(are_gone, before), "their end")
            assert engine.generate([PROMPTS[1]], greedy(8))[0].token_ids == expected
        now = engine.core.pid, rank_of(engine.core.pid)
    wait_until(partial(are_gone, now), "their end")


# -- requests that end early ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_who_ends_with_a_request(model, plain, tmp_path, size):
    """One engine: requests are aborted, then fail outside a forward and end alone, then within one."""
    with open_engine(model, tmp_path / "store", max_num_batched_tokens=32, **SIZES[size]) as engine:
        expected = [plain(prompt, 12) for prompt in PROMPTS]
        aborted_requests_leave_nothing_behind(engine, expected)
        for owner, name in ((engine.loop.runner, "launch"), (engine.loop.runner.sampler, "draw")):
            an_error_outside_a_forward_ends_the_requests_alone(engine, expected, owner, name)
        an_error_within_a_forward_ends_all_ranks(engine)
    assert not ranks_of(os.getpid())


def aborted_requests_leave_nothing_behind(engine, expected):
    """Also of the steps that were in flight, which nobody reads before the next request."""
    for count in range(4):
        handles = [engine.submit(prompt, LONG) for prompt in PROMPTS]
        wait_until(partial(has_said, handles, count))
        for handle in handles:
            engine.abort(handle)
        settle(engine)
        assert [ask(engine, prompt, 12).token_ids for prompt in PROMPTS[:3]] == expected[:3]
        settle(engine)


def an_error_outside_a_forward_ends_the_requests_alone(engine, expected, owner, name):
    """While other steps of the pipeline are in flight."""
    rank = rank_of(os.getpid())
    with before_each(owner, name, Once(12)):
        with held(engine):  # all are there before the first step
            handles = [engine.submit(prompt, LONG) for prompt in PROMPTS]
        for handle in handles:
            ended_with(engine, handle, RuntimeError)
    assert [out.token_ids for out in engine.generate(PROMPTS, greedy(12))] == expected
    settle(engine)
    assert rank_of(os.getpid()) == rank


def an_error_within_a_forward_ends_all_ranks(engine):
    """The others may wait for this one for ever: what it has not sent, or summed, nobody can send in its place."""
    with before_each(engine.loop.runner.model, "begin", Once(4)):
        handle = engine.submit(PROMPTS[2], LONG)
        ended_with(engine, handle, RuntimeError)
    wait_until(lambda: engine.closed)
    with pytest.raises(EngineDiedError, match="rank 1 of 2 ended"):
        ask(engine, PROMPTS[1])
