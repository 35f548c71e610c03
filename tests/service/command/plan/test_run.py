"""`kvstore plan` from end to end: files and stores, tables, JSON, pictures, and what may be wrong."""

import itertools
import json
import os
import re
import sys
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
from rich.console import Console

from kvstore.admin.control import ControlServer
from kvstore.disk.directory import StoreDirectory
from kvstore.planning.replay import replay
from kvstore.planning.replay_config import ServiceModel
from kvstore.service.command.plan import tables as plan_tables
from kvstore.store.history import FILE, OLDER_FILE
from tests.support.store.small_store import BLOCK_SIZE, PAYLOAD_BYTES

KV_BYTES = 1000
STATS = {  # of an owner that has measured some of its rates
    "hbm": {"blocks": 300, "block_bytes": 16 * KV_BYTES, "block_size": 16},
    "store": {"prefill_tokens_per_s": 5000.0, "load_bytes_per_s": None},
    "tokens": {"prompt_tokens": 9000, "cached_tokens": 500},
    "disk": {"blocks": 100, "bytes": 100 * 16 * KV_BYTES // 2, "read_bytes_per_s": 4e8, "write_bytes_per_s": 2e8},
}


def turns(num_sessions=10, num_turns=4, gap_s=50.0):
    """Lines of a trace of sessions whose turns come one after the other, mixed."""
    found = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            time_s = turn * gap_s + session
            found.append((time_s, {"session": f"s{session}", "timestamp": time_s, "new_tokens": 300 + 10 * session,
                                   "output_length": 40}))  # fmt: skip
    return "".join(json.dumps(line) + "\n" for _, line in sorted(found, key=lambda pair: pair[0]))


def history_lines(num_sessions=10, num_turns=3, start_s=0.0):
    found = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            found.append({
                "session": f"s{session}", "timestamp": start_s + 100 * turn + session,
                "input_length": 100 + 150 * turn, "output_length": 50, "tip": f"{session}-{turn}",
            })  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in found)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(turns())
    return path


@pytest.fixture
def run(run):
    return partial(run, "plan")


@pytest.fixture
def replay_trace(run, trace):
    """Runs it on the trace of sessions, at a few sizes."""

    def call(*argv):
        return run("--trace", trace, "--format", "sessions", "--kv-bytes-per-token", KV_BYTES, *argv)

    return call


# -- a file ----------------------------------------------------------------------------------------------------------
def test_json_of_a_grid(replay_trace):
    code, out, err = replay_trace("--hbm", "2MB", "--cpu", "0,4MB", "--disk", "4MB,40MB", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert found.keys() == {"trace", "assumptions", "no_cache", "ideal", "points", "knee", "is_complete"}
    assert found["trace"]["requests"] == 40 and found["trace"]["conversations"] == 10
    assert found["trace"]["block_size"] == 128 and found["is_complete"]
    sizes = [(row["hbm_bytes"], row["cpu_bytes"], row["disk_bytes"]) for row in found["points"]]
    assert sizes == [(2 * 10**6, cpu * 10**6, disk * 10**6) for cpu in (0, 4) for disk in (4, 40)]
    for row in found["points"]:
        assert row["total_bytes"] == row["hbm_bytes"] + row["cpu_bytes"] + row["disk_bytes"]
        assert row["token_hit_rate"] == pytest.approx(sum(row["hit_rate_by_tier"].values()))
        assert 0 <= row["token_hit_rate"] <= found["ideal"]["token_hit_rate"] + 0.01 < 1
        assert row["ttft_mean_s"] <= found["no_cache"]["ttft_mean_s"]
    assert found["no_cache"]["token_hit_rate"] == 0
    assert found["points"][1]["token_hit_rate"] > found["points"][0]["token_hit_rate"]


def test_without_sizes_the_disk_grows_until_it_holds_everything(replay_trace):
    code, out, _ = replay_trace("--batch", "2", "--json")
    found = json.loads(out)
    disks = [row["disk_bytes"] for row in found["points"]]
    assert code == 0 and disks[0] == 0 and len(disks) > 3
    assert all(b == 2 * a for a, b in itertools.pairwise(disks[1:]))
    assert disks[-1] >= found["trace"]["working_set_bytes"] > disks[-2]
    assert found["points"][-1]["token_hit_rate"] == pytest.approx(found["ideal"]["token_hit_rate"], abs=0.01)
    assert "disk up to the working set" in " ".join(found["assumptions"]["sizes"])


def test_what_a_person_sees(replay_trace):
    code, out, err = replay_trace("--batch", "2", "--prefill-rate", "1000")
    assert (code, err) == (0, "")
    assert re.search(
        r"trace.jsonl: 40 requests, 10 conversations, [0-9.]+ minutes, [0-9,]+ prompt and 1,600 output", out
    )
    assert "working set" in out and "HBM is what serves a full batch" in out
    assert "prefill 1,000 tokens/s" in out and "measured" not in out
    for word in ("HBM", "CPU", "disk", "hit rate", "TTFT", "P90", "no cache", "unlimited", "knee"):
        assert word in out
    assert "┤" in out and "●" in out and "└" in out
    assert re.search(r"reach(es)? [0-9.]+% of [0-9.]+% possible", out) and "without a cache" in out
    assert max(map(len, out.splitlines())) <= 160


def test_more_work_than_can_be_done_is_told(replay_trace):
    _, out, _ = replay_trace("--hbm", "8MB", "--prefill-rate", "10")
    assert "note: more is asked of the service than it can do everywhere" in out
    _, out, _ = replay_trace("--hbm", "8MB", "--write-bandwidth", "10KB", "--cpu", "1MB", "--disk", "20MB")
    assert "of what was computed was not saved" in out
    _, out, _ = replay_trace("--hbm", "1MB")
    assert "requests did not fit in the smallest HBM and were refused" in out


def test_the_name_of_a_model_stands_for_its_size(run, trace):
    _, out, _ = run(
        "--trace", trace, "--format", "sessions", "--kv-bytes-per-token", "Llama-3.1-8B", "--hbm", "1GB", "--json"
    )
    assert json.loads(out)["assumptions"]["kv_bytes_per_token"] == 131_072


def test_sizes_of_an_engine_in_the_environment_are_not_those_of_a_plan(replay_trace, monkeypatch):
    for name, value in {"HBM": "auto", "CPU": "1GiB", "DISK": "1GiB", "BLOCK_SIZE": "16", "PATH": "/nowhere"}.items():
        monkeypatch.setenv("KVSTORE_" + name, value)
    monkeypatch.setenv("KVSTORE_POLICY", "lru")
    _, out, _ = replay_trace("--batch", "2", "--json")
    found = json.loads(out)
    assert found["trace"]["block_size"] == 128 and len(found["points"]) > 3
    assert found["assumptions"]["policy"] == "lru"


@pytest.fixture
def owned(tmp_path):
    """Makes the store of an owner that answers these statistics."""
    with ExitStack() as stack:

        def make(stats, name="owned"):
            directory = stack.enter_context(StoreDirectory.open(tmp_path / name))
            stack.callback(ControlServer(directory, lambda command, arguments: stats).close)
            return directory.path

        yield make


# -- a store ---------------------------------------------------------------------------------------------------------
def test_the_history_of_a_store(run, store):
    (store.path / OLDER_FILE).write_text(history_lines())
    (store.path / FILE).write_text(history_lines(start_s=1000.0) + '{"session": "cut of')
    code, out, err = run("--store", store.path, "--hbm", "40MB", "--disk", "40MB", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["trace"]["requests"] == 60 and found["trace"]["block_size"] == 16
    assert found["assumptions"]["kv_bytes_per_token"] == PAYLOAD_BYTES / BLOCK_SIZE
    assert found["assumptions"]["disk_bytes_per_token"] > PAYLOAD_BYTES / BLOCK_SIZE  # headers, and whole pages
    assert found["ideal"]["token_hit_rate"] > 0.2
    code, out, _ = run("--store", store.path, "--requests", "10", "--hbm", "40MB", "--json")
    assert json.loads(out)["trace"]["requests"] == 10


def test_checkpoints_of_the_owners_model_take_room(run, owned):
    """A state of 40 blocks of 16 tokens is five of 128. Twenty turns of 2,000 new tokens each, in HBM that forgets."""
    lines = history_lines(num_sessions=4, num_turns=4).replace('"input_length": ', '"input_length": 1')
    rates = []
    for number, store_stats in enumerate(({}, {"state_blocks": 40, "window_blocks": 0})):
        store = owned({**STATS, "cpu": {"block_bytes": 8 * KV_BYTES}, "store": store_stats}, f"{number}")
        (store / FILE).write_text(lines)
        code, out, err = run("--store", store, "--hbm", "2MB", "--cpu", "1MB", "--disk", "3MB", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assumptions = found["assumptions"]
        assert assumptions["kv_bytes_per_token"] == KV_BYTES / 2, "in HBM, layers with a window have KV, too"
        assert assumptions["checkpoint_bytes"] == number * 40 * 8 * KV_BYTES
        rates.append(found["points"][0]["token_hit_rate"])
    assert rates[1] < rates[0]
    _, out, _ = run("--store", store, "--disk", "3MB")
    assert "a checkpoint" in " ".join(out.split())
    found = json.loads(run("--store", store, "--hbm", "2MB", "--disk", "100MB", "--json")[1])
    assert found["ideal"]["token_hit_rate"] >= found["points"][0]["token_hit_rate"] > 0


def test_what_the_owner_has_measured_counts_until_a_flag_says_otherwise(run, owned):
    store = owned(STATS)
    (store / FILE).write_text(history_lines())
    code, out, err = run("--store", store, "--read-bandwidth", "1GB", "--json")
    assert (code, err) == (0, "")
    assumptions = json.loads(out)["assumptions"]
    assert assumptions["measured"] == ["prefill_tokens_per_s", "write_bytes_per_s"]
    rates, default = assumptions["service"], ServiceModel()
    assert (rates["prefill_tokens_per_s"], rates["write_bytes_per_s"], rates["read_bytes_per_s"]) == (5000, 2e8, 1e9)
    assert rates["load_bytes_per_s"] == default.load_bytes_per_s
    assert (assumptions["kv_bytes_per_token"], assumptions["disk_bytes_per_token"]) == (KV_BYTES, KV_BYTES / 2)
    assert {row["hbm_bytes"] for row in json.loads(out)["points"]} == {300 * 16 * KV_BYTES}
    _, out, _ = run("--store", store)
    out = " ".join(out.split())
    prefill = "prefill 5,000 tokens/s (from 8,500 computed tokens)"
    assert f"measured by the store: {prefill}, read 0.4 GB/s, write 0.2 GB/s" in out
    assert "HBM is that of the engine which owns the store" in out and "500 B on disk" in out


@pytest.mark.parametrize(("cached", "source"), [(400, "from 100 computed tokens"), (500, "by an earlier engine")])
def test_a_small_store_is_planned_with_what_it_measured_and_from_how_much(run, owned, cached, source):
    small = STATS | {"tokens": {"prompt_tokens": 500, "cached_tokens": cached}}
    store = owned(small)
    (store / FILE).write_text(history_lines())
    assert json.loads(run("--store", store, "--json")[1])["assumptions"]["service"]["prefill_tokens_per_s"] == 5000
    shown = " ".join(run("--store", store)[1].split())
    assert f"measured by the store: prefill 5,000 tokens/s ({source})" in shown


def test_an_engine_that_has_hardly_begun_has_measured_nothing(run, owned):
    young = STATS | {"store": {}, "disk": {"blocks": 3, "bytes": 1 << 20}}
    store = owned(young)
    (store / FILE).write_text(history_lines())
    assumptions = json.loads(run("--store", store, "--json")[1])["assumptions"]
    assert assumptions["measured"] == [] and assumptions["disk_bytes_per_token"] == KV_BYTES


def test_long_prompts_are_replayed_in_larger_blocks(run, owned):
    store = owned(STATS)
    lines = [{"session": "s", "timestamp": t, "input_length": 3000 * (t + 1), "output_length": 9} for t in range(3)]
    (store / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for flags, expected in (((), 128), (("--block-size", "32"), 32)):
        _, out, _ = run("--store", store, "--hbm", "1GB", "--json", *flags)
        assert json.loads(out)["trace"]["block_size"] == expected


def test_a_store_without_history_says_how_it_comes_about(run, store):
    code, out, err = run("--store", store.path)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "has no history yet; it records one while an engine serves with a disk tier" in err


def test_a_store_that_cannot_say_how_large_its_kv_is(run, owned):
    store = owned({"disk": {"models": {}}})
    (store / FILE).write_text(history_lines())
    code, _, err = run("--store", store)
    assert code == 2 and "give --kv-bytes-per-token, a size or one of" in err
    assert run("--store", store, "--kv-bytes-per-token", "1KB", "--hbm", "10MB")[0] == 0


# -- what may be wrong -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("argv", "words"), [
    (["--servers", "10"], "unknown flag '--servers', as it has been removed: docs/fleet.md has what simulated fleets"),
    (["--polciy", "lru"], "unknown flag '--polciy'; did you mean '--policy'?"),
    (["--policy", "belady"], "--policy is 'belady'; give one of auto, fifo, lru, return"),
    (["--format", "mooncake"], "--format is that of a file"),
    (["--trace", "TRACE"], "--trace needs --format, one of mooncake, sessions"),
    (["--trace", "TRACE", "--format", "sessions"], "--trace needs --kv-bytes-per-token, a size or one of llama"),
    (["--trace", "TRACE", "--store", "x"], "--trace and --store are two traffics"),
    (["--trace", "gone", "--format", "sessions", "--kv-bytes-per-token", "1"], "the trace gone cannot be read"),
    (["--trace", "TRACE", "--format", "mooncake", "--kv-bytes-per-token", "1"], "line 1"),
    (["--hbm", "3 M tokens"], "--hbm is '3 M tokens'; give a number of bytes"),
    (["--disk", "1GB,,2GB"], "--disk is ''; give"),
    (["--hbm", "1,2,3,4,5,6,7,8,9,10,11", "--cpu", "1,2,3,4,5,6,7,8,9,10"], "110 combinations of sizes"),
    (["--kv-bytes-per-token", "gpt-9"], "--kv-bytes-per-token is 'gpt-9'; give a size such as 128KiB, or one of"),
    (["--prefill-rate", "0"], "--prefill-rate is '0'; give tokens a second"),
    (["--plot", "plan.pdf"], "give a file that ends in .png or .svg"),
    (["--plot", "gone/plan.png"], "but there is no directory gone"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_2(run, trace, argv, words):
    code, out, err = run(*[str(trace) if word == "TRACE" else word for word in argv])
    assert (code, out) == (2, "")
    assert words in err and err.startswith("kvstore: ") and err.count("\n") == 1


def test_hbm_that_holds_no_block(replay_trace):
    code, out, err = replay_trace("--hbm", "1KB")
    assert (code, out) == (2, "") and "HBM of 1,000 bytes holds less than one block of 128,000 bytes" in err


def replay_that(fails_at: int, error: BaseException):
    """In here the replay of this number fails."""
    numbers = itertools.count(1)

    def failing(*arguments):
        if next(numbers) == fails_at:
            raise error
        return replay(*arguments)

    return mock.patch("kvstore.planning.replay.replay", failing)


def test_a_defect_in_the_replay_is_one_line(replay_trace):
    with replay_that(1, AssertionError("requests were left over")):
        code, out, err = replay_trace("--hbm", "8MB")
    assert (code, out, err) == (1, "", "kvstore: AssertionError: requests were left over\n")


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupt_shows_what_is_done(replay_trace, as_json):
    with replay_that(4, KeyboardInterrupt()):
        code, out, err = replay_trace("--hbm", "8MB", "--disk", "8MB,16MB,32MB", *(["--json"] if as_json else []))
    assert (code, err) == (130, "kvstore: interrupted\n")
    if as_json:
        assert not json.loads(out)["is_complete"] and len(json.loads(out)["points"]) == 1
    else:
        assert "note: interrupted: not all sizes were replayed" in out and "7.6 MiB" in out


def test_an_interrupt_before_anything_is_done(replay_trace):
    with replay_that(1, KeyboardInterrupt()):
        assert replay_trace("--hbm", "8MB") == (130, "", "kvstore: interrupted\n")


# -- pictures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(replay_trace, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    code, out, _ = replay_trace("--batch", "2", "--plot", tmp_path / f"plan{suffix}")
    assert code == 0 and "hit rate" in out
    assert (tmp_path / f"plan{suffix}").read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_picture_that_cannot_be_written(replay_trace, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "plan.png").mkdir()
    code, out, err = replay_trace("--hbm", "8MB", "--plot", tmp_path / "plan.png")
    assert code == 1 and "hit rate" in out and "plan.png cannot be written" in err and err.count("\n") == 1


def test_a_picture_without_matplotlib_says_what_to_install(replay_trace, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as the import system notes a package that is not there
    code, out, err = replay_trace("--plot", tmp_path / "plan.png")
    assert (code, out) == (2, "")
    assert err == f"kvstore: --plot is '{tmp_path}/plan.png', which needs matplotlib; pip install matplotlib\n"


# -- the chart and the advice, on made-up plans ----------------------------------------------------------------------
def row(total, rate, cpu=0, disk=None, hbm=0, ttft_s=1.0):
    gib = 1 << 30
    disk = total - cpu - hbm if disk is None else disk
    shares = {"hbm": rate, "cpu": 0.0, "disk": 0.0}
    return {
        "hbm_bytes": hbm * gib, "cpu_bytes": cpu * gib, "disk_bytes": disk * gib, "total_bytes": total * gib,
        "token_hit_rate": rate, "hit_rate_by_tier": shares, "ttft_mean_s": ttft_s, "ttft_p90_s": 2 * ttft_s,
        "load": 0.5, "dropped_share": 0.0, "num_refused": 0,
    }  # fmt: skip


def made_up(*rows, knee=None, ideal=0.8):
    return {"points": list(rows), "knee": knee, "ideal": row(0, ideal), "no_cache": row(0, 0.0, ttft_s=3.0)}


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_chart_keeps_to_its_width(width):
    rows = [row(1 << i, rate) for i, rate in enumerate((0.1, 0.4, 0.6, 0.7, 0.7))]
    lines = plan_tables.chart(made_up(*rows, knee=rows[2]), width)
    assert max(map(len, lines), default=0) <= width
    if width < 33:
        assert lines == []
        return
    text = "\n".join(lines)
    picture = "".join(line for line in lines if "┤" in line)
    assert picture.count("●") == 4 and picture.count("◆") == 1
    assert "16 GiB" in text and "80% ┤" in text and "0% ┤" in text


def test_a_plain_chart_is_ascii():
    rows = [row(1 << i, rate) for i, rate in enumerate((0.1, 0.4, 0.6))]
    text = "\n".join(plan_tables.chart(made_up(*rows, knee=rows[1]), 80, plain=True))
    assert text.isascii() and "o" in text and "#" in text


def test_no_chart_of_one_capacity():
    assert plan_tables.chart(made_up(row(4, 0.3), row(4, 0.5)), 80) == []


def test_a_higher_point_stands_higher():
    rows = [row(1 << i, rate) for i, rate in enumerate((0.1, 0.4, 0.79))]
    lines = plan_tables.chart(made_up(*rows), 60)[:-1]
    heights = {line.index("●"): -number for number, line in enumerate(lines) if "●" in line}
    assert [heights[place] for place in sorted(heights)] == sorted(heights.values()) and len(heights) == 3


def test_the_advice_at_a_knee():
    rows = [row(total, rate, cpu=total // 8) for total, rate in ((8, 0.3), (16, 0.71), (32, 0.72), (64, 0.73))]
    first, second = plan_tables.advice(made_up(*rows, knee=rows[1]))
    assert first == "CPU 2 GiB and disk 14 GiB reach 71.0% of 80.0% possible; twice as much adds 1.0 point."
    assert second == "The mean TTFT is 1.00 s there, and 3.00 s without a cache."
    rows[2]["token_hit_rate"] = 0.71
    assert "twice as much adds nothing." in plan_tables.advice(made_up(*rows, knee=rows[1]))[0]


@pytest.mark.parametrize(("rates", "words"), [
    ((0.5,), "disk 1 GiB reaches 50.0% of 80.0% possible; a knee needs three capacities or more."),
    ((0.5, 0.5), "No knee: more brings nothing; disk 1 GiB reaches 50.0%"),
    ((0.5, 0.501, 0.502), "No knee: more brings nothing; disk 1 GiB reaches 50.0%"),
    ((0.2, 0.4, 0.6), "disk 4 GiB reaches 60.0% of 80.0% possible, and still more would bring more."),
    ((0.2, 0.5, 0.79), "disk 4 GiB reaches 79.0% of 80.0% possible, which is all there is."),
])  # fmt: skip
def test_the_advice_without_a_knee(rates, words):
    assert words in plan_tables.advice(made_up(*[row(1 << i, rate) for i, rate in enumerate(rates)]))[0]


def test_names_from_files_are_printed_as_text():
    out = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    with out.file:
        found = made_up(row(4, 0.3)) | {"is_complete": True}
        found["trace"] = {
            "name": "[bold]\x1b[31mx", "requests": 1, "conversations": 1, "hours": 50.0, "prompt_tokens": 1,
            "output_tokens": 1, "block_size": 1, "working_set_blocks": 1, "working_set_bytes": 1, "notes": ["odd"],
        }  # fmt: skip
        found["assumptions"] = {
            "policy": "lru", "kv_bytes_per_token": 1.0, "disk_bytes_per_token": 1.0, "measured": [], "sizes": [],
            "computed_tokens": 0, "checkpoint_bytes": 0,
            "service": dict.fromkeys(plan_tables.RATES, 1),
        }  # fmt: skip
        plan_tables.show_plan(found, out)
        text = out.export_text()
    assert "[bold][31mx: 1 request, 1 conversation, 2.1 days" in text and "note: odd" in text
