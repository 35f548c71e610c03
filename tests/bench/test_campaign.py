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


def test_a_transcript_is_what_edits_have_left():
    def turn(number):
        said = [{"role": "user", "content": f"question {number}"}]
        return Told(said, 4, False, "key", {"role": "assistant", "content": f"answer {number}"})

    taken_back = {"edits": [{"type": "remove", "index": 1}, {"type": "remove", "index": 2}], "reuse": "exact"}
    changed = {"edits": [{"type": "replace", "index": 1, "content": "another"}], "reuse": "forget"}
    talk = Talk("edited", "You are kind.", "exact", [turn(1), turn(2), Told([], 0, False, "", edit=taken_back)])
    assert [message["content"] for message in talk.transcript] == ["question 2", "answer 2"] and talk.may_be_forked
    talk.turns += [turn(3), Told([], 0, False, "", edit=changed)]
    assert [message["content"] for message in talk.transcript] == ["another", "answer 2", "question 3", "answer 3"]
    assert not talk.may_be_forked, "a fork would show what was deleted from its turns, too"
