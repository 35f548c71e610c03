"""The store's own history: what a line says, preemption, rotation, what a crash cuts off, and joining over restarts."""

import json

import pytest

from kvstore.planning.trace_formats import read_session_lines
from kvstore.policy.conversation import Answer
from kvstore.store.history import FILE, MAX_PENDING, OLDER_FILE, SETTLED_S, History, history_files, joined, short_id


def block_id(number):
    return number.to_bytes(32, "big")[::-1]


def serve(history, name, now_s, num_prompt, num_output, session="s", after=None, tip=None):
    history.arrived(name, now_s, session, num_prompt, after)
    history.left(name, now_s + 1, Answer(num_output), tip)


def lines_of(directory):
    return [line for path in history_files(directory) for line in path.read_text().splitlines()]


def line(session="s", timestamp=0.0, num_prompt=10, num_output=5, **more):
    entry = {"session": session, "timestamp": timestamp, "input_length": num_prompt, "output_length": num_output}
    return json.dumps(entry | more)


# -- lines -----------------------------------------------------------------------------------------------------------
def test_a_line_is_a_turn_of_the_sessions_format(tmp_path):
    history = History(tmp_path)
    serve(history, "r", 100.12345, 30, 12, "anna", after=block_id(1), tip=block_id(2))
    history.write(history.take_lines(200.0))
    (line,) = lines_of(tmp_path)
    assert json.loads(line) == {
        "session": "anna", "timestamp": 100.123, "input_length": 30, "output_length": 12,
        "tip": short_id(block_id(2)), "after": short_id(block_id(1)),
    }  # fmt: skip
    (request,) = read_session_lines(joined([line]), "history", 16).requests
    assert (request.num_tokens, request.num_output_tokens, request.arrival_s) == (30, 12, 100.123)


def test_nothing_of_the_file_can_be_read_by_others(tmp_path):
    history = History(tmp_path)
    serve(history, "r", 0.0, 1, 1)
    history.write(history.take_lines(0.0, all_of_them=True))
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_a_request_that_is_only_preempted_is_one_line(tmp_path):
    history = History(tmp_path)
    history.arrived("r", 0.0, "s", 10, None)
    history.left("r", 1.0, Answer(4), None)
    assert history.take_lines(1.0 + SETTLED_S / 2) == []
    history.arrived("r", 3.0, "s", 14, None)  # its prompt is what it was, not what it had become
    assert history.take_lines(100.0) == []
    history.left("r", 101.0, Answer(15), block_id(1))
    (line,) = history.take_lines(101.0 + SETTLED_S)
    found = json.loads(line)
    assert (found["timestamp"], found["input_length"], found["output_length"]) == (0.0, 10, 15)
    assert found["tip"] == short_id(block_id(1))


def test_a_call_of_a_tool_is_remembered_and_read_again(tmp_path):
    history = History(tmp_path)
    for name, calls_tool in (("a", True), ("b", False)):
        history.arrived(name, 0.0, name, 10, None)
        history.left(name, 1.0, Answer(4, calls_tool), None)
    lines = history.take_lines(0.0, all_of_them=True)
    assert ["calls_tool" in json.loads(line) for line in lines] == [True, False]
    lines.append(line("c", calls_tool="yes"))
    found = read_session_lines(joined(lines), "history", 16).requests
    assert [request.calls_tool for request in found] == [True, False], "a line that is not sound is left out"


def test_lines_come_when_they_are_settled_or_when_all_are_wanted(tmp_path):
    history = History(tmp_path)
    serve(history, "a", 0.0, 1, 1, "a")
    serve(history, "b", 4.0, 1, 1, "b")
    assert [json.loads(line)["session"] for line in history.take_lines(1.0 + SETTLED_S)] == ["a"]
    assert [json.loads(line)["session"] for line in history.take_lines(0.0, all_of_them=True)] == ["b"]
    assert history.take_lines(1000.0, all_of_them=True) == []


def test_who_leaves_without_having_arrived_is_nobody(tmp_path):
    history = History(tmp_path)
    history.left("r", 1.0, Answer(0), None)
    assert history.take_lines(10.0) == []


def test_what_nobody_takes_is_lost(tmp_path):
    history = History(tmp_path)
    for number in range(MAX_PENDING + 2):
        serve(history, f"r{number}", float(number), 1, 1, f"s{number}")
    kept = history.take_lines(1e9)
    assert len(kept) == MAX_PENDING and json.loads(kept[-1])["session"] == f"s{MAX_PENDING - 1}"


# -- files -----------------------------------------------------------------------------------------------------------
def test_a_full_file_replaces_the_older_one(tmp_path):
    history = History(tmp_path, max_file_bytes=500)
    for number in range(20):
        serve(history, "r", float(number), 10, 5)
        history.write(history.take_lines(100.0))
    times = [json.loads(one)["timestamp"] for one in lines_of(tmp_path)]
    assert [path.name for path in history_files(tmp_path)] == [OLDER_FILE, FILE]
    assert all(path.stat().st_size <= 500 for path in history_files(tmp_path))
    assert times == list(map(float, range(20 - len(times), 20))) and 5 < len(times) < 20


def test_a_restart_appends(tmp_path):
    for number in range(2):
        history = History(tmp_path)
        serve(history, "r", float(number), 10, 5)
        history.write(history.take_lines(0.0, all_of_them=True))
    assert [json.loads(one)["timestamp"] for one in lines_of(tmp_path)] == [0.0, 1.0]


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path):
    (tmp_path / FILE).write_text(line("a") + "\n" + line("b")[:20])
    history = History(tmp_path)
    serve(history, "r", 5.0, 10, 5, "c")
    history.write(history.take_lines(100.0))
    assert [json.loads(one)["session"] for one in joined(lines_of(tmp_path))] == ["a", "c"]


@pytest.mark.parametrize("obstacle", ["no directory", "a directory", "a link"])
def test_what_cannot_be_written_costs_no_more_than_lines(tmp_path, obstacle):
    directory = tmp_path / "store"
    if obstacle != "no directory":
        directory.mkdir()
    if obstacle == "a directory":
        (directory / FILE).mkdir()
    if obstacle == "a link":
        (tmp_path / "elsewhere").write_text("")
        (directory / FILE).symlink_to(tmp_path / "elsewhere")
    history = History(directory)
    serve(history, "a", 0.0, 1, 1)
    serve(history, "b", 0.0, 1, 1)
    history.write(history.take_lines(0.0, all_of_them=True))
    assert obstacle != "a link" or (tmp_path / "elsewhere").read_text() == ""
    assert history.take_lines(1e9, all_of_them=True) == []


# -- joining ---------------------------------------------------------------------------------------------------------
def sessions(lines):
    return [(entry["session"], entry["timestamp"]) for entry in map(json.loads, joined(lines))]


def test_what_goes_on_after_a_restart_is_one_session():
    lines = [
        line("before", 0, tip="t1"),
        line("other", 1, tip="t2"),
        line("new", 10, after="t1", tip="t3"),
        line("new", 20, tip="t4"),  # not recognised by a tip, and still the same
        line("newest", 30, after="t4"),
    ]
    expected = [("before", 0), ("other", 1), ("before", 10), ("before", 20), ("before", 30)]
    assert sessions(lines) == expected


def test_an_unknown_tip_leaves_a_session_as_it_is():
    assert sessions([line("a", 0, tip="t1"), line("b", 1, after="gone"), line("c", 2, tip="")]) == [
        ("a", 0), ("b", 1), ("c", 2),
    ]  # fmt: skip


def test_lines_stand_in_the_order_of_arrival_and_links_are_gone():
    lines = [line("b", 5, tip="t"), line("a", 1), line("b", 3, tip="u", after="x")]
    entries = list(map(json.loads, joined(lines)))
    assert [entry["timestamp"] for entry in entries] == [1, 3, 5]
    assert all(entry.keys() == {"session", "timestamp", "input_length", "output_length"} for entry in entries)


@pytest.mark.parametrize(
    "bad",
    [
        "", "{", "5", "null", "[1]", '"text"', "{}", "[" * 100_000, '{"session": "s"}',
        line(session=None), line(session=7), line(timestamp="1"), line(timestamp=True), line(timestamp=float("nan")),
        line(timestamp=float("inf")), line(timestamp=10**400), line(timestamp=None), line(num_prompt=0),
        line(num_prompt=True), line(num_prompt=1.5), line(num_output=-1), line(num_output=1 << 40), line(tip=[]),
        line(after={}),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_left_out(bad):
    found = list(joined([line("a", 0), bad, line("b", 1)]))
    assert [request.num_tokens for request in read_session_lines(found, "history").requests] == [10, 10]


def test_a_clock_that_was_set_back_holds_up_no_line(tmp_path):
    history = History(tmp_path)
    history.arrived("a", 1e9 + 1000.0, "s", 5, None)
    history.left("a", 1e9 + 1001.0, Answer(4), None)
    assert len(history.take_lines(1e9)) == 1
