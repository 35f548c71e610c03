"""The rehearsal of bench.gpu on a CPU: every part runs, goals are judged, and nothing claims to be of a GPU."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import kernels as gpu_kernels
from bench.gpu.case import CASES, Clock, OutOfTimeError, Weights, _config, _parameter_shapes
from bench.gpu.engines import decode_limit
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "bench.gpu", "--device", "cpu", "--quick", "--threads", "1", "--model-shape", "qwen-2.5-0.5b"]
GOALS = {"copy": ">= 0.9", "prefill": ">= 1.1", "decode": ">= 0.7", "overlap": "<= 1.15", "saving": "<= 1.03"}


def start(file, *flags):
    command = [sys.executable, *COMMAND, "--json", str(file), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of everything: its document, what it printed, and what it said meanwhile."""
    file = tmp_path_factory.mktemp("gpu") / "found.json"
    process = start(file)
    out, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return json.loads(file.read_text()), out, said


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command line in this process: its exit code, its rows, and what it said."""

    def command(*flags):
        file = tmp_path / "found.json"
        threads = torch.get_num_threads()
        try:
            code = gpu.main([*COMMAND[2:], "--json", str(file), *flags])
        finally:
            torch.set_num_threads(threads)
        return code, json.loads(file.read_text())["results"], capsys.readouterr()

    return command


def test_every_part_has_rows_and_none_failed(whole):
    rows = whole[0]["results"]
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert {row["result"] for row in rows} <= {None, "ok", "reached", "missed"}


def test_goals_are_judged_by_the_ratio_beside_them(whole):
    rows = [row for row in whole[0]["results"] if row.get("goal")]
    assert {row["part"]: row["goal"] for row in rows} == GOALS
    for row in rows:
        kind, limit = row["goal"].split()
        holds = row["ratio"] <= float(limit) if kind == "<=" else row["ratio"] >= float(limit)
        assert row["result"] == ("reached" if holds else "missed")


def test_no_row_claims_a_gpu(whole):
    document, out, said = whole
    assert said.startswith(gpu.REHEARSAL) and gpu.REHEARSAL in out
    assert {row["device"] for row in document["results"]} == {"cpu (rehearsal)"}
    assert {row["model"] for row in document["results"]} == {"tiny qwen2"}
    assert "H200" not in json.dumps(document) and "cuda" not in json.dumps(document["results"]).lower()


def test_a_wrong_kernel_is_seen_and_is_the_exit_code(bench, monkeypatch):
    def one_off(key, value, key_cache, value_cache, slots):
        key_cache.view(-1, *key_cache.shape[2:])[slots.clamp(min=0)] = key
        value_cache.view(-1, *value_cache.shape[2:])[slots.clamp(min=0)] = value

    monkeypatch.setattr(gpu_kernels, "write_kv", one_off)
    code, rows, _ = bench("--part", "check")
    assert code == 1
    assert [row["measure"] for row in rows if row["result"] == "MISMATCH"] == ["write_kv"]


def test_a_part_that_raises_is_a_row_and_the_next_one_runs(bench, monkeypatch):
    def broken(machine):
        raise RuntimeError("no such kernel\nsecond line")

    following = []
    monkeypatch.setitem(gpu.MODEL_PARTS, "prefill", broken)
    monkeypatch.setitem(gpu.MODEL_PARTS, "decode", following.append)
    code, rows, said = bench("--part", "prefill", "--part", "decode")
    assert code == 1 and "second line" in said.err
    assert [(row["part"], row["result"]) for row in rows] == [("prefill", "FAILED")]
    assert rows[0]["note"] == "RuntimeError: no such kernel" and len(following) == 1


def test_the_budget_ends_what_is_being_measured():
    clock = Clock(100.0)
    assert clock.timely(lambda: 3.0)() == 3.0
    clock.started_s -= 96.0
    with pytest.raises(OutOfTimeError):
        clock.timely(lambda: 3.0)()


def test_a_kill_leaves_the_results_so_far(tmp_path):
    file = tmp_path / "found.json"
    process = start(file)
    wait_until(file.exists)
    assert json.loads(file.read_text())["results"]  # what SIGKILL would leave
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert json.loads(file.read_text())["results"]
    assert process.returncode == 130 and gpu.REHEARSAL in out  # the table


def test_sizes_of_the_models_and_the_limit_of_their_decoding():
    found = {case.name: sum(shape.numel() for shape in _parameter_shapes(_config(case)).values()) for case in CASES}
    assert {name: round(count / 1e6) for name, count in found.items()} == {"Qwen-2.5-0.5B": 494, "Llama-3.1-8B": 8030}
    assert [case.kv_bytes_per_token for case in CASES] == [12288, 131072]
    weights = Weights(Path(), 8_030_000_000, 15_000_000_000)
    assert decode_limit(CASES[1], weights, 1, 15e12) == pytest.approx(1000, rel=0.002)
    assert decode_limit(CASES[1], weights, 64, 15e12) == pytest.approx(64_000 / (1 + 64 * 160 * 131072 / 15e9))
