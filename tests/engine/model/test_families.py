"""Families whose layers keep states, or have windows or shapes of their own, in every situation of a request."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvstore import CacheTiers, Engine, SamplingParams
from tests.support.by_hand import by_hand
from tests.support.engines import evict_hbm, greedy, open_engine, settle, tokens
from tests.support.models import ARCHITECTURES_WITH_STATES, ARCHITECTURES_WITH_WINDOWS, check_answer, network_of
from tests.support.waiting import wait_until

BLOCK = 16
PROMPTS = [tokens(seed, count) for seed, count in enumerate((70, 33, 5, 64))]
CHUNKS = 48  # of the longer prompts, and beside others' tokens
FAMILIES = [*ARCHITECTURES_WITH_STATES, *ARCHITECTURES_WITH_WINDOWS]
CASES = [(name, process) for process in ("here", "own") for name in FAMILIES]
KILLED = ("Qwen3_5Text",)  # others with --long
# One of each kind of state, of windows and of shapes; others with --long. They are rows of slots when preempted, or
# when they come from the CPU tier.
PREEMPTED = ("Qwen3_5Text", "FalconH1", "Lfm2", "Zamba2", "Gemma3", "GptOss", "Gemma3nText", "MiMoV2Flash")


def needs_long(request: pytest.FixtureRequest, is_usual: bool) -> None:
    if not (is_usual or request.config.getoption("--long")):
        pytest.skip("needs --long")


def next_turn(asked: list[int], answer: list[int]) -> list[int]:
    return asked + answer + tokens(9, 4)


def num_known(history: list[int]) -> int:
    """Of a next turn: the last token of the answer before was never computed."""
    return (len(history) - 5) // BLOCK * BLOCK


def check_answers(model: str, asked: list[list[int]], answers: list[list[int]]) -> None:
    network = network_of(model)
    for token_ids, answer in zip(asked, answers, strict=True):
        check_answer(network, token_ids, answer)


@pytest.mark.parametrize(("name", "process"), CASES)
def test_cold_in_a_batch_and_in_chunks_then_warm_forked_and_from_disk(name, process, saved_model, tmp_path, request):
    """Without a CPU tier. Where the engine has a process, that is killed before the disk is needed."""
    needs_long(request, process == "here" or name in KILLED)
    tiers = CacheTiers("4MiB", 0, "64MiB", tmp_path / "store")
    options = {"load": "always", "dtype": "float32", "max_num_batched_tokens": CHUNKS, "process": process}
    with ExitStack() as opened:
        engine = opened.enter_context(Engine(saved_model(name), tiers, device="cpu", **options))
        answers = [made.token_ids for made in engine.generate(PROMPTS, greedy(18))]
        histories = [next_turn(*turn) for turn in zip(PROMPTS, answers, strict=True)]
        warm = engine.generate(histories, greedy(10))
        forked(engine)
        engine.flush()
        if process == "own":
            kill(engine)
        else:
            engine.check_integrity()
            opened.close()
            engine = opened.enter_context(Engine(saved_model(name), tiers, device="cpu", **options))
        cold = engine.generate(histories, greedy(10))
    for history, before, after in zip(histories, warm, cold, strict=True):
        assert after.token_ids == before.token_ids
        assert before.usage.cached_tokens_details.hbm == before.usage.cached_tokens == num_known(history)
        details = after.usage.cached_tokens_details
        assert details.disk == after.usage.cached_tokens >= num_known(history)
        assert name in ARCHITECTURES_WITH_WINDOWS or details.disk == num_known(history)
    check_answers(saved_model(name), [*PROMPTS, *histories], [*answers, *(made.token_ids for made in cold)])


def kill(engine: Engine) -> None:
    killed = engine.core.pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: engine.core.pid not in (killed, None) and engine.core.state == "running", "it runs again")


def forked(engine: Engine) -> None:
    """Three answers to one prompt are those of three requests that know nothing of each other."""
    params = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=8, ignore_eos=True)
    (together,) = engine.generate([PROMPTS[0]], params, cache_salt="together")
    lone = [replace(params, n=1, seed=5 + i) for i in range(3)]
    alone = [engine.submit(PROMPTS[0], one, cache_salt=f"{i}") for i, one in enumerate(lone)]
    for handle in alone:
        list(engine.stream(handle))
    assert [choice.token_ids for choice in together.choices] == [handle.output.token_ids for handle in alone]


@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_for_another_tenant_and_then_from_the_cpu_tier(name, saved_model, tmp_path, request):
    needs_long(request, name in PREEMPTED)
    engine = open_engine(
        saved_model(name), tmp_path / "store", "4MiB", "8MiB", 0, dtype="float32", max_num_batched_tokens=CHUNKS,
        max_num_seqs=2,
    )  # fmt: skip
    with by_hand(engine):
        handles = [engine.submit(asked, greedy(24)) for asked in PROMPTS[:2]]
        for _ in range(15):
            engine.step()
        handles.append(engine.submit(PROMPTS[3], greedy(2), tenant="another"))
        while engine.has_work:
            engine.step()
        assert engine.loop.scheduler.roster.num_preemptions > 0
        answers = [handle.output.token_ids for handle in handles]
        history = next_turn(PROMPTS[1], answers[1])  # of the one that was preempted
        if (states := engine.loop.scheduler.manager.states) is None:
            evict_hbm(engine)
        else:  # the KV alone is of no use
            settle(engine)
            states.reset()
        (again,) = engine.generate([history], greedy(8))
        engine.check_integrity()
    assert again.usage.cached_tokens_details.cpu == again.usage.cached_tokens == num_known(history)
    check_answers(saved_model(name), [*PROMPTS[:2], PROMPTS[3], history], [*answers, again.token_ids])
