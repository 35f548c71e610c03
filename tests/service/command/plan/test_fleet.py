"""`kvstore plan --servers` from end to end."""

import json
from functools import partial

import pytest

SIZES = ["--hbm", "1MB", "--cpu", "4MB", "--disk", "0", "--kv-bytes-per-token", "100"]


@pytest.fixture
def run(run, tmp_path):
    """On a trace of forty sessions."""
    lines = [
        {"session": f"s{one}", "timestamp": turn * 50.0 + one, "new_tokens": 300 + 10 * one, "output_length": 40}
        for turn in range(4) for one in range(40)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return partial(run, "plan", "--trace", path, "--format", "sessions")


def test_fleets_are_told_by_size_and_routing(run):
    code, out, _ = run(*SIZES, "--servers", "2,10", "--routing", "sticky,random", "--remote", "1GB", "--json")
    rows = json.loads(out)["fleets"]
    assert code == 0
    assert [(row["servers"], row["routing"]) for row in rows] == [
        (2, "sticky"), (2, "random"), (10, "sticky"), (10, "random")
    ]  # fmt: skip
    assert rows[3]["hit_rate_by_tier"]["remote"] > rows[2]["hit_rate_by_tier"]["remote"]


def test_people_get_a_table_and_advice(run):
    code, out, _ = run(
        *SIZES, "--servers", "10", "--routing", "random", "--remote", "1GB", "--restart", "without-disks"
    )
    assert code == 0
    assert "hits" in out and "random" in out and "the shared tier's bandwidth is enough for" in out
    assert "after the restart" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--servers", "0"], "--servers"),
        (["--servers", "1001"], "from 1 to 1000"),
        (["--servers", "2", "--routing", "round"], "--routing"),
        (["--servers", "2"], "one size each"),
        ([*SIZES, "--remote", "1GB"], "--remote is of a fleet"),
        ([*SIZES, "--cpu", "0", "--servers", "2", "--remote", "1GB"], "--cpu"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(run, flags, said):
    code, out, err = run(*(flags if "--kv-bytes-per-token" in flags else [*flags, "--kv-bytes-per-token", "100"]))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
