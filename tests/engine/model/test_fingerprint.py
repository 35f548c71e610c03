"""Fingerprints: what changes a key or a value changes them, nothing else does."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvstore.disk.weights import weights_digest
from kvstore.engine.model.loading import fingerprint, load
from kvstore.engine.model.probe import intercept
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
