"""The demonstration: a conversation over `kill -9`, with the engine's process for real."""

import dataclasses

import pytest

from bench import demo
from bench.demo_worker import Processors, warm_up
from kvstore import Engine, SamplingParams
from kvstore.admin.control import ask
from tests.support.faults import before_each
from tests.support.waiting import TIMEOUT_S, wait_until


def test_the_conversation_goes_on_after_the_kill(capsys, tmp_path):
    def is_written() -> bool:
        disk = ask(tmp_path / "store", "stats", {}, TIMEOUT_S)["disk"]
        return disk["blocks"] > 0 and disk["queued_write_bytes"] == 0

    before = ("My name is Marta.", "I live in Lisbon.", "What is my name?")
    with before_each(demo.Worker, "kill", lambda: wait_until(is_written)):  # longer than the demonstration does
        costs = demo.run_demo(None, str(tmp_path / "store"), before, ("Where do I live?",))
    shown = capsys.readouterr().out
    assert "kill -9" in shown and shown.count("Lisbon") >= 3
    assert [cost.note for cost in costs] == ["cold", "warm", "warm", "after kill -9"]
    assert costs[0].cached_tokens == 0 and costs[1].hbm > 0
    assert costs[3].disk == costs[3].cached_tokens > 0
    assert costs[3].disk > costs[3].computed_tokens, "the turn computes what is new"
    assert all(0 <= cost.others_share <= 1 for cost in costs)
    demo.print_table(costs)
    assert "after kill -9" in capsys.readouterr().out


def test_rows_that_other_programs_disturbed_say_so(capsys):
    """One of three processors' work for a second was somebody else's, half a one was idle."""
    before = Processors(10.0, 100.0, 5.0)
    assert Processors(11.0, 100.5, 6.5).others_share(before, 3) == pytest.approx(1 / 3)
    assert Processors(11.0, 103.5, 5.0).others_share(before, 3) == 0.0
    quiet = demo.TurnCost(1, "cold", 100, 0, 0, 0, 0, 100, 0.05, 0.05, 0, 0.02)
    demo.print_table([quiet])
    assert "*" not in capsys.readouterr().out
    demo.print_table([quiet, dataclasses.replace(quiet, turn=2, others_share=1 / 3)])
    shown = capsys.readouterr().out
    assert shown.count("1.0x *") == 1 and "* Other programs took more than 25% of the processors" in shown


def test_the_first_turn_comes_after_one_like_it_that_leaves_nothing():
    with Engine() as engine:
        asked = []
        engine.generate = lambda prompts, *given, **named: asked.append((prompts[0], named))
        warm_up(engine, SamplingParams(max_tokens=4, temperature=0.0), None)
        assert engine.stats()["sessions"]["sessions"] == 0
        first = engine.chat("demo", system=demo.SYSTEM).send(demo.BEFORE[0], SamplingParams(max_tokens=1))
        assert asked[0][0] == first.prompt_token_ids and asked[0][1]["tenant"] == "warm-up"  # of the same length, too
        assert first.usage.cached_tokens == 0


def test_it_says_why_a_model_does_not_load(capsys):
    assert demo.main(["--model", "missing/"]) == 1
    error = capsys.readouterr().err
    assert "kvstore: missing/ is not a directory" in error and "Traceback" not in error
