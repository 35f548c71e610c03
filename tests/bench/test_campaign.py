"""bench.campaign plays rounds, goes on where it was, and says which round went wrong and how to see it again."""

import json

import pytest

from bench.campaign.__main__ import COLUMNS, main
from bench.campaign.reference import Reference
from bench.campaign.rounds import ARMS, NUM_CLIENTS, Script
from bench.campaign.talks import Talk, Told


def test_a_killed_server_is_right_and_what_its_clients_were_told_stays_known(tmp_path, capsys):
    """Then one of them has noted something else, so that the next round finds an answer lost."""
    file, state = tmp_path / "found.json", tmp_path / "state.json"
    flags = ("--quick", "--arms", "plain", "--threads", "1", "--seed", "98", "--dir", str(tmp_path))
    assert main([*flags, "--rounds", "1", "--json", str(file)]) == 0
    killed, total = json.loads(file.read_text())["results"]
    assert set(total) == {"fault", *COLUMNS} and killed["fault"] == "kill"
    assert (total["rounds"], total["kills"], total["starts"]) == (1, 1, 2)
    assert total["compared"] == total["turns"] >= NUM_CLIENTS
    known = json.loads(state.read_text())
    known["talks"]["plain"][0]["turns"][0]["answer"]["content"] += "."
    state.write_text(json.dumps(known))
    assert main(flags) == 1
    said = capsys.readouterr().err
    assert "FAILED: store: 98-0-" in said and f"its stores: {tmp_path}" in said
    assert json.loads(state.read_text())["number"] == 1
    assert (tmp_path / "plain" / "store" / "sessions").is_dir()


def test_a_round_s_script_follows_from_seed_and_number():
    of = [Script.of(1, number, list(ARMS), 8) for number in range(200)]
    assert of == [Script.of(1, number, list(ARMS), 8) for number in range(200)]
    assert of[0] != Script.of(2, 0, list(ARMS), 8)
    assert {script.arm for script in of} == set(ARMS)


def test_an_answer_that_an_engine_without_tiers_does_not_give_is_wrong():
    reference = Reference(None, 1024)
    said = [{"role": "user", "content": "the sea"}]
    try:
        wrong = Talk("wrong", None, "exact", [Told(said, 4, False, "key", {"role": "assistant", "content": "No."})])
        with pytest.raises(AssertionError, match="a wrong answer: turn 1 of wrong"):
            reference.check(wrong)
    finally:
        reference.close()


def test_arms_that_do_not_exist_are_refused(refused):
    assert "--arms cats; known: plain, short" in refused(main, "--arms", "cats")
