"""bench.codecs runs, and what it shows of each codec can be true: lossless ones are exact, fewer bits change more."""

import json

from bench import codecs
from bench.common import LlamaShape, random_qwen

TINY = LlamaShape(
    hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, vocab_size=256,
    max_position_embeddings=1024,
)  # fmt: skip


def rows(tmp_path, *flags):
    file = tmp_path / "found.json"
    once = ["--repeats", "1", "--restarts", "1", "--threads", "1"]
    assert codecs.main([*once, "--dir", str(tmp_path), "--json", str(file), *flags]) == 0
    return json.loads(file.read_text())["results"]


def test_sizes_and_what_quantised_keys_change(tmp_path):
    found = rows(tmp_path, "--part", "rates", "--part", "quality", "--conversations", "1")
    ratio = {row["codec"]: row["ratio"] for row in found if "ratio" in row}
    assert (
        0.515 < ratio["int8"] < 0.53 < ratio["split-zstd"] < ratio["exact12"] < 0.78 < ratio["zstd"] < 1 < ratio["raw"]
    )
    assert 0.25 < ratio["int4, keys raw"] < 0.5 < ratio["int8, keys raw"] < 0.6
    quality = {row["codec"]: row for row in found if row["part"] == "quality"}
    exact, coarse, coarser = quality["exact"], quality["int8, keys raw"], quality["int4, keys raw"]
    assert (exact["kl"], exact["same_top"]) == (0, 1) and 0 < coarse["kl"] < coarser["kl"]
    assert 0 < quality["int8, as stored"]["kl"] < coarser["kl"]
    assert 1 < exact["perplexity"] < 2


def test_returning_turns_of_another_model_from_the_disk(tmp_path):
    only = ["--codec", "raw", "--codec", "exact12"]
    with random_qwen(TINY) as (model, _):
        found = rows(tmp_path, "--model", str(model), "--history", "128", "--part", "ttft", *only)
    warm = [row for row in found if row["state"] == "page cache warm"]
    assert [row["codec"] for row in warm] == ["raw", "exact12"] and all(row["ttft_ms"] > 0 for row in warm)
