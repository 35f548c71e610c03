"""vLLM with what keeps its KV, against a stand-in: every arm is asked the same, and compared with ours."""

import json
import subprocess
import sys

import pytest

from bench import host_traffic, hosts
from bench.common import resident_bytes
from bench.hosts import kv_bytes
from bench.peers.__main__ import MODELS
from bench.peers.load import Answer, PeerError, drop_all
from tests.bench import peer_standin


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """One run of everything: its rows by name."""
    folder = tmp_path_factory.mktemp("hosts")
    python, found = peer_standin.install(folder), folder / "found.json"
    parts = "speed,turns,cold,traffic" + (",full" if may_mount() else "")
    command = [sys.executable, "-m", "bench.hosts", "--peer-python", python, "--models", "tiny", "--quick",
               "--threads", "1", "--logs", folder, "--json", found, "--parts", parts]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {row["measure"]: row for row in json.loads(found.read_text())["results"]}


def may_mount():
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_all_arms_are_measured_warm_and_after_a_restart(table):
    for name in ("prefill 128", "decode, batch 2", "turn 4, warm", "last turn, after a restart"):
        assert all(table[name][arm] > 0 for arm in ("vllm", "lmcache", "fs", "kvstore")), name
    assert table["turn 4, warm"]["cached"]["kvstore"] > table["last turn, after a restart"]["cached"]["kvstore"] == 0
    returned, ratio = table["last turn, after a restart"], table["after a restart: ours / lmcache"]
    assert ratio["ratio"] == pytest.approx(returned["kvstore"] / returned["lmcache"]) and ratio["goal"] == "<= 0.5"
    assert table["after a restart: ours / vllm warm"]["goal"] == "<= 1.3"
    assert table["prefill 128: ours / fs"]["goal"] == ">= 1"
    assert table["on disk"]["fs"] == table["on disk"]["kvstore"] == pytest.approx(1, abs=0.1)
    assert table["on disk"]["vllm"] == 0


def test_with_cold_files_the_restart_is_measured_by_itself(table):
    assert table["last turn, after a restart, cold files"]["kvstore"] > 0
    assert table["after a restart, cold files: ours / fs"]["goal"] == "-"


def test_policies_and_full_disks_have_arms_of_their_own(table):
    for kind in ("people", "mixed"):
        row = table[f"found in memory, {kind}"]
        assert row["lru"] == row["arc"] == row["return"] > 0  # the stand-in remembers everything
        assert table[f"found in memory, {kind}: ours / best"]["ratio"] == 1
        assert not may_mount() or table[f"found, disk full, {kind}"]["fs"] == row["lru"]


def test_files_leave_the_page_cache_or_it_is_said(tmp_path):
    (tmp_path / "deep").mkdir()
    big, empty = tmp_path / "deep" / "big", tmp_path / "empty"
    big.write_bytes(b"x" * (8 << 20))
    empty.touch()
    assert resident_bytes(big) > 0
    try:
        drop_all(tmp_path)
    except PeerError as error:
        assert str(big) in str(error)  # a file system in memory
    else:
        assert resident_bytes(big) <= 1 << 20


class Remembering:
    """A side that finds whatever it has answered before, and nothing else."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []

    def ask(self, prompts, max_tokens, talk=""):
        [prompt] = prompts
        cached = max((len(one) for one in self.known if prompt[: len(one)] == one), default=0)
        self.known.append(prompt + [1] * max_tokens)
        return [Answer(0.1, 0.1, [1] * max_tokens, cached)]


class Forgetting(Remembering):
    def ask(self, prompts, max_tokens, talk=""):
        self.known = []
        return super().ask(prompts, max_tokens, talk)


def test_traffic_counts_what_was_found_of_prompts_that_go_on():
    traffic = host_traffic.make("people", 30, 0, vocab=500, chunk_bytes=8192)
    ends = dict(traffic.requests)
    assert len(ends) == 30 and max(ends.values()) <= 4096
    assert traffic.needed_bytes == 8192 * sum(tokens // 32 for tokens in ends.values())
    histories, new, asked = {}, 0, 0
    for number, (talk, tokens) in enumerate(traffic.requests):
        if 4 * number >= len(traffic.requests):
            new, asked = new + tokens - 8 - histories.get(talk, 0), asked + tokens - 8
        histories[talk] = tokens
    assert host_traffic.found_share(Remembering(), traffic) == pytest.approx(1 - new / asked)
    assert host_traffic.found_share(Forgetting(), traffic) == 0


def test_a_block_of_the_model_has_so_many_bytes():
    assert kv_bytes(MODELS["tiny"].shape) == 2 * 32 * 2 * 32 * 2  # keys and values, head, layers, tokens, 16 bits


@pytest.mark.parametrize(
    ("flags", "said"), [(["--arms", "x"], "--arms 'x'; known: vllm, lmcache"), (["--arms", "fs"], "without kvstore")]
)
def test_arms_that_cannot_be_compared_are_refused(flags, said, refused):
    assert said in refused(hosts.main, "--peer-python", sys.executable, *flags)
