"""The demonstration: a conversation over `kill -9`, with the engine's process for real."""

import json

from service import demo


def test_the_conversation_goes_on_after_the_kill(capsys, tmp_path):
    before = ("My name is Marta. I live in Lisbon.", "What is my name?")
    costs = demo.run_demo(None, str(tmp_path / "store"), before, ("Where do I live?",))
    shown = capsys.readouterr().out
    assert "kill -9" in shown and shown.count("Lisbon") >= 3
    assert [cost.note for cost in costs] == ["cold", "warm", "after kill -9"]
    assert costs[0].cached_tokens == 0 and costs[1].hbm > 0
    assert costs[2].disk == costs[2].cached_tokens > 0
    assert costs[2].disk > costs[2].computed_tokens, "the turn computes what is new"
    demo.print_table(costs)
    assert "after kill -9" in capsys.readouterr().out


def test_the_numbers_go_to_a_file(monkeypatch, capsys, tmp_path):
    row = demo.TurnCost(1, "cold", 100, 16, 0, 32, 0, 52, 0.01, 0.05, 0)
    monkeypatch.setattr(demo, "run_demo", lambda model, path: [row])
    file = tmp_path / "demo.json"
    assert demo.main(["--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["results"]
    assert (found["disk"], found["computed_tokens"]) == (32, 52)
    assert "48 of 100 prompt tokens were not computed (48%)" in capsys.readouterr().out


def test_it_says_why_a_model_does_not_load(capsys):
    assert demo.main(["--model", "missing/"]) == 1
    error = capsys.readouterr().err
    assert "kvstore: missing/ is not a directory" in error and "Traceback" not in error
