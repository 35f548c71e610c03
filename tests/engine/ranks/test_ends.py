"""A rank ends or hangs, or a step fails: who ends with it, and what goes on.

`--long` ends each rank in both ways, of both sizes.
"""

import os
import signal
from functools import partial

import pytest

from kvstore import SamplingParams
from kvstore.engine.remote_engine import RemoteEngine
from kvstore.errors import EngineDiedError
from tests.support.engines import ask, cached, greedy, open_engine, settle, tokens
from tests.support.faults import before_each
from tests.support.ranks import SIZES, children, end_while_it_answers, is_gone, rank_of, ranks_of
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPTS = [tokens(seed, 30 + 9 * seed) for seed in range(6)]
SILENCE_S = 10.0  # a busy machine lets no process wait so long
START_S = 300.0  # importing torch beside other tests
SHORT = [("tensor", 0, signal.SIGKILL), ("pipeline", 1, signal.SIGSTOP)]
CASES = [(size, rank, sign) for size in SIZES for rank in (0, 1) for sign in (signal.SIGKILL, signal.SIGSTOP)]


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


def ended_with(engine, handle, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(engine.stream(handle))


# -- a rank that ends, or hangs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_an_engine_whose_rank_ends_says_so_and_leaves_nothing(model, plain, tmp_path, size):
    before = children(os.getpid())
    with open_engine(model, tmp_path / "store", **SIZES[size]) as engine:
        ask(engine, PROMPTS[0])
        settle(engine)
        rank = rank_of(os.getpid())
        end_while_it_answers(engine, rank, signal.SIGKILL)
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match="rank 1 of 2 ended"):
            ask(engine, PROMPTS[1])
    assert is_gone(rank) and children(os.getpid()) <= before
    with open_engine(model, tmp_path / "store") as engine:
        out = ask(engine, PROMPTS[0])
        assert out.token_ids == plain(PROMPTS[0], 4) and cached(out)[2] > 0


@pytest.mark.parametrize(("size", "rank", "sign"), CASES)
def test_all_ranks_are_started_again(model, size, rank, sign, request):
    if (size, rank, sign) not in SHORT and not request.config.getoption("--long"):
        pytest.skip("needs --long")
    with RemoteEngine(model, {"hbm": "2MiB"}, device="cpu", silence_s=SILENCE_S, **SIZES[size]) as engine:
        expected = engine.generate([PROMPTS[1]], greedy(8))[0].token_ids
        first, other = engine.pid, rank_of(engine.pid)
        end_while_it_answers(engine, (first, other)[rank], sign)
        wait_until(lambda: engine.state == "running" and engine.pid != first, "the restart", START_S)
        wait_until(lambda: is_gone(first) and is_gone(other), "their end")
        assert engine.generate([PROMPTS[1]], greedy(8))[0].token_ids == expected
        now = engine.pid, rank_of(engine.pid)
    wait_until(lambda: all(is_gone(pid) for pid in now), "their end")


# -- a step that fails -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["launch", "draw"])
def test_an_error_outside_a_forward_ends_the_requests_alone(model, plain, tmp_path, name):
    """While other steps of the pipeline are in flight."""
    with open_engine(model, tmp_path / "store", max_num_batched_tokens=48, pipeline_parallel_size=2) as engine:
        rank, runner = rank_of(os.getpid()), engine.loop.runner
        with before_each(runner if name == "launch" else runner.sampler, name, Once(12)):
            handles = [engine.submit(prompt, LONG) for prompt in PROMPTS]
            for handle in handles:
                ended_with(engine, handle, RuntimeError)
        assert [out.token_ids for out in engine.generate(PROMPTS, greedy(12))] == [plain(p, 12) for p in PROMPTS]
        settle(engine)
        assert rank_of(os.getpid()) == rank


@pytest.mark.parametrize("size", SIZES)
def test_an_error_within_a_forward_ends_all_ranks(model, size):
    """The others may wait for this one for ever: what it has not sent, or summed, nobody can send in its place."""
    with open_engine(model, **SIZES[size]) as engine:
        with before_each(engine.loop.runner.model, "begin", Once(4)):
            handle = engine.submit(PROMPTS[2], LONG)
            ended_with(engine, handle, RuntimeError)
        wait_until(lambda: engine.closed)
        with pytest.raises(EngineDiedError, match="rank 1 of 2 ended"):
            ask(engine, PROMPTS[1])
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize("size", SIZES)
def test_aborted_requests_leave_nothing_behind(model, plain, tmp_path, size):
    """Also of the steps that were in flight, which nobody reads before the next request."""
    with open_engine(model, tmp_path / "store", max_num_batched_tokens=32, **SIZES[size]) as engine:
        for count in range(4):
            handles = [engine.submit(prompt, LONG) for prompt in PROMPTS]
            wait_until(partial(has_said, handles, count))
            for handle in handles:
                engine.abort(handle)
            settle(engine)
            assert [ask(engine, prompt, 12).token_ids for prompt in PROMPTS[:3]] == [plain(p, 12) for p in PROMPTS[:3]]
            settle(engine)
