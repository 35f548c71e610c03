"""vLLM with what keeps its KV, against a stand-in: every arm is asked the same, and compared with ours."""

import json
import subprocess
import sys

import pytest

from tests.bench import peer_standin


def bench(*flags):
    command = [sys.executable, "-m", "bench.hosts", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_all_arms_are_measured_warm_and_after_a_restart(tmp_path):
    python, found = peer_standin.install(tmp_path), tmp_path / "found.json"
    done = bench(
        "--peer-python", python, "--models", "tiny", "--quick", "--threads", 1, "--logs", tmp_path, "--json", found
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = {row["measure"]: row for row in json.loads(found.read_text())["results"]}
    for name in ("prefill 128", "decode, batch 2", "turn 4, warm", "last turn, after a restart"):
        assert all(table[name][arm] > 0 for arm in ("vllm", "lmcache", "fs", "kvstore")), name
    assert table["turn 4, warm"]["cached"]["kvstore"] > table["last turn, after a restart"]["cached"]["kvstore"] == 0
    returned, ratio = table["last turn, after a restart"], table["after a restart: ours / lmcache"]
    assert ratio["ratio"] == pytest.approx(returned["kvstore"] / returned["lmcache"]) and ratio["goal"] == "<= 0.5"
    assert table["after a restart: ours / vllm warm"]["goal"] == "<= 1.3"
    assert table["prefill 128: ours / fs"]["goal"] == ">= 1"
    assert table["on disk"]["fs"] == table["on disk"]["kvstore"] == pytest.approx(1, abs=0.1)
    assert table["on disk"]["vllm"] == 0


@pytest.mark.parametrize(
    ("flags", "said"), [(["--arms", "x"], "--arms 'x'; known: vllm, lmcache"), (["--arms", "fs"], "without kvstore")]
)
def test_arms_that_cannot_be_compared_are_refused(flags, said):
    done = bench("--peer-python", sys.executable, *flags)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
