"""Fingerprints: what changes a key or a value changes them, nothing else does; weights are hashed once."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from kvstore.engine.model import fingerprint as module
from kvstore.engine.model.fingerprint import fingerprint, weights_digest
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept
from kvstore.errors import ModelError
from tests.support.engines import save_model
from tests.support.models import make_model

LONGROPE = {"rope_type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "rope_theta": 10000.0,
            "original_max_position_embeddings": 64, "factor": 4.0}  # fmt: skip


def of(name: str = "Llama", max_model_len: int = 64, digest: str = "d", block_size: int = 16, **changes) -> str:
    return fingerprint(intercept(make_model(name, **changes), max_model_len), digest, block_size)


def rope(**parameters) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **parameters}}


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "SmolLM3", "GptOss", "Cohere"])
def test_the_same_model_has_the_same_fingerprint(name):
    first = of(name)
    assert first == of(name)
    assert len(bytes.fromhex(first)) == 32


def test_what_decides_about_keys_and_values_changes_it():
    variants = [
        of(),
        of("Qwen2"),
        of(digest="e"),
        of(block_size=8),
        of(dtype=torch.bfloat16),
        of(dtype=torch.float16),
        of(**rope(rope_theta=10001.0)),
        of(**rope(rope_type="linear", factor=2.0)),
        of(**rope(rope_type="linear", factor=2.5)),
        of(**rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
        of(**rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)),
        of(rms_norm_eps=1e-4),
        of(num_hidden_layers=2),
        of(num_key_value_heads=4),
        of("Gemma3"),
        of("Gemma3", layer_types=["sliding_attention", "full_attention", "full_attention"]),
        of("Mistral"),
        of("Mistral", sliding_window=25),
    ]
    assert len(set(variants)) == len(variants)


def test_rotations_count_by_layer_beside_the_configuration():
    """A table, a style or a scaling that differs is seen even when the configuration says the same."""
    model = intercept(make_model("SmolLM3"), 64)
    before = fingerprint(model, "d", 16)
    assert None in model.rotations
    model.rotations = model.rotations[::-1]
    assert fingerprint(model, "d", 16) != before
    network = make_model()
    network.model.rotary_emb.inv_freq *= 1.0001
    assert fingerprint(intercept(network, 64), "d", 16) != of()
    network = make_model()
    network.model.rotary_emb.attention_scaling = 1.001
    assert fingerprint(intercept(network, 64), "d", 16) != of()


def test_the_window_counts_only_where_frequencies_depend_on_it():
    assert of(max_model_len=64) == of(max_model_len=128)
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert of(max_model_len=64, **yarn) == of(max_model_len=200, **yarn)
    dynamic = rope(rope_type="dynamic", factor=2.0)
    assert of(max_model_len=64, **dynamic) == of(max_model_len=256, **dynamic) != of(max_model_len=400, **dynamic)
    for dtype in (torch.float32, torch.bfloat16):  # of near windows too, whose tables begin alike in bf16
        close = [of(max_model_len=length, dtype=dtype, **dynamic) for length in (400, 401)]
        assert close[0] != close[1]
    longrope = {"rope_parameters": LONGROPE}
    assert of(max_model_len=60, **longrope) == of(max_model_len=64, **longrope) != of(max_model_len=65, **longrope)
    assert of(max_model_len=65, **longrope) == of(max_model_len=256, **longrope)


def test_reloading_and_moving_a_model_changes_nothing(tmp_path):
    first = save_model(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")

    def from_disk(folder, dtype="auto"):
        loaded = load(folder, "cpu", dtype, 64)
        source = loaded.model.config._name_or_path
        assert Path(source) == Path(folder)
        return fingerprint(intercept(loaded.model, loaded.max_model_len), weights_digest(source), 16)

    assert from_disk(first) == from_disk(first) == from_disk(tmp_path / "b")
    assert from_disk(first, "bfloat16") != from_disk(first)
    config = Path(first) / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "transformers_version": "0.0.1", "use_cache": False}))
    assert from_disk(first) == from_disk(tmp_path / "b")
    config.write_text(json.dumps({**content, "rms_norm_eps": 1e-3}))
    assert from_disk(first) != from_disk(tmp_path / "b")


# -- weights ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path) -> Path:
    """Weights in two files; the digest does not care what stands in them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "model-2.safetensors").write_bytes(b"two" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the files that were hashed."""
    names: list[str] = []
    original = module._hash_file

    def counted(file):
        names.append(file.name)
        return original(file)

    monkeypatch.setattr(module, "_hash_file", counted)
    return names


def test_identical_files_elsewhere_have_the_same_digest(folder, tmp_path):
    first = weights_digest(folder)
    assert first == weights_digest(str(folder)) == weights_digest(shutil.copytree(folder, tmp_path / "copy"))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.glob("*.safetensors"):
        (linked / file.name).symlink_to(file)
    assert weights_digest(linked) == first


def test_contents_names_and_number_of_files_count(folder):
    digests = [weights_digest(folder)]
    (folder / "model-2.safetensors").write_bytes(b"owt" * 1000)
    digests.append(weights_digest(folder))
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")
    digests.append(weights_digest(folder))
    (folder / "model-3.safetensors").unlink()
    digests.append(weights_digest(folder))
    assert len(set(digests)) == 4


def test_a_cached_digest_reads_no_weights(folder, tmp_path, reads):
    cache = tmp_path / "new" / "weights.json"
    first = weights_digest(folder, cache)
    assert sorted(reads) == ["model-1.safetensors", "model-2.safetensors"]
    reads.clear()
    assert weights_digest(folder, cache) == first
    assert reads == []
    assert cache.stat().st_mode & 0o777 == 0o600
    assert os.listdir(cache.parent) == ["weights.json"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_weights_changed_in_place_are_read_again(folder, tmp_path, reads, keep_time):
    cache, file = tmp_path / "weights.json", folder / "model-2.safetensors"
    first, stat = weights_digest(folder, cache), file.stat()
    reads.clear()
    file.write_bytes(b"TWO" * 1000)
    time_ns = stat.st_mtime_ns + (0 if keep_time else 1)
    os.utime(file, ns=(time_ns, time_ns))
    second = weights_digest(folder, cache)
    assert second == weights_digest(folder) != first
    reads.clear()
    assert weights_digest(folder, cache) == second
    assert reads == []
    assert len(json.loads(cache.read_text())["files"]) == 2  # the old state is gone


def test_one_cache_serves_several_models(folder, tmp_path, reads):
    other, cache = shutil.copytree(folder, tmp_path / "other"), tmp_path / "weights.json"
    weights_digest(folder, cache)
    weights_digest(other, cache)
    reads.clear()
    assert weights_digest(folder, cache) == weights_digest(other, cache)
    assert reads == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff\xfe\x00",
        lambda text: b"[]",
        lambda text: b'{"version": 1}',
        lambda text: b'{"version": 1, "files": 3}',
        lambda text: b'{"version": 1, "files": [[[], "00"]]}',
        lambda text: b'{"version": 1, "files": [[["x", 1, 2, 3, 4], 5]]}',
        lambda text: b'{"version": 1, "files": [[["x", 1, 2, 3, 4], "abc"]]}',
        lambda text: b"[" * 100_000,
        lambda text: text.replace(b'"version":1', b'"version":0'),
    ],
)
def test_a_damaged_cache_is_ignored_and_written_anew(folder, tmp_path, reads, damage):
    cache = tmp_path / "weights.json"
    first = weights_digest(folder, cache)
    intact = cache.read_bytes()
    cache.write_bytes(damage(intact))
    reads.clear()
    assert weights_digest(folder, cache) == first
    assert len(reads) == 2 and cache.read_bytes() == intact


def test_a_cache_that_cannot_be_written_costs_only_time(folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for cache in (tmp_path / "file" / "weights.json", tmp_path / "folder"):
        assert weights_digest(folder, cache) == weights_digest(folder)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "model"]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(folder, tmp_path, monkeypatch):
    original, file = module._hash_file, folder / "model-2.safetensors"

    def changed(path):
        digest = original(path)
        if path == file:
            file.write_bytes(b"later")
        return digest

    monkeypatch.setattr(module, "_hash_file", changed)
    weights_digest(folder, tmp_path / "weights.json")
    monkeypatch.setattr(module, "_hash_file", original)
    assert weights_digest(folder, tmp_path / "weights.json") == weights_digest(folder)


def test_weights_that_cannot_be_read_are_one_clear_line(tmp_path):
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="cannot read the weights"):
        weights_digest(tmp_path)
