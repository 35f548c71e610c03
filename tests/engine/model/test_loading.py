"""Loading: what is refused and how it is said, which window and which end tokens a model has."""

import json
from pathlib import Path

import pytest
import torch

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.model.loading import _call_token_ids, _device, load
from kvstore.errors import ConfigError, ModelError
from tests.support.engines import save_model


def load_cpu(model, dtype="auto", max_model_len=None):
    return load(model, "cpu", dtype, max_model_len)


def test_a_directory_is_loaded_as_it_was_saved(tmp_path):
    loaded = load_cpu(save_model(tmp_path / "tiny-model"))
    assert (loaded.name, loaded.tokenizer, loaded.max_model_len) == ("tiny-model", None, 256)
    assert loaded.model.dtype == torch.float32 and loaded.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert load_cpu(tmp_path / "tiny-model", dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no \*\.safetensors"),
        ({"pytorch_model.bin": "x"}, r"only safetensors weights are loaded"),
        ({"model.safetensors": "x"}, r"no config\.json"),
        ({"model.safetensors": "x", "config.json": "{"}, r"cannot read the configuration"),
        ({"model.safetensors": "x", "config.json": "[]"}, r"configuration of .*: config\.json holds no object of JSON"),
        (
            {"model.safetensors": "x", "config.json": '{"model_type": "llama", "num_hidden_layers": "four"}'},
            r"configuration of .*'num_hidden_layers'.*expected int, got str",
        ),
        ({"model.safetensors": "x", "config.json": '{"model_type": "nosuch"}'}, r"cannot read the configuration"),
        ({"model.safetensors": "x", "config.json": '{"model_type": "t5"}'}, r"encoder-decoder"),
        ({"model.safetensors": "x", "config.json": '{"model_type": "vit"}'}, r"no causal language model"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_cpu(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path):
    folder = Path(save_model(tmp_path / "m"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"m/model\.safetensors is incomplete or damaged; fetch it again") as caught:
        load_cpu(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_one_clear_line(tmp_path):
    folder = Path(save_model(tmp_path / "m"))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match=r"cannot load the tokenizer of .*/m: it lacks 'added_tokens'"):
        load_cpu(folder)


def test_weights_of_a_wrong_shape_are_one_clear_line(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    file = Path(save_model(tmp_path / "m")) / "model.safetensors"
    capsys.readouterr()
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:-3].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"the weight {name} has shape \[\d+, \d+\], but config") as caught:
        load_cpu(file.parent)
    assert "\n" not in str(caught.value) and capsys.readouterr().err == ""  # no table of transformers


def test_a_checkpoint_with_weights_missing_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    file = Path(save_model(tmp_path / "m")) / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_cpu(file.parent)


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing-model", "a b", "nobody/nosuch/model"])
def test_names_that_are_no_model(name):
    with pytest.raises(ModelError, match="is not a directory"):
        load_cpu(name)


def test_a_hub_id_that_cannot_be_fetched_is_one_clear_line():
    with pytest.raises(ModelError, match=r"nobody/nosuch is no directory here.*HF_HUB_OFFLINE is set") as caught:
        load_cpu("nobody/nosuch")
    assert "\n" not in str(caught.value)


def test_the_window(tmp_path):
    folder = save_model(tmp_path / "m")
    assert load_cpu(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="257"):
        load_cpu(folder, max_model_len=257)
    stretched = save_model(
        tmp_path / "s", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    )
    assert load_cpu(stretched, max_model_len=1024).max_model_len == 1024
    with pytest.raises(ConfigError, match="1025"):
        load_cpu(stretched, max_model_len=1025)


def test_end_tokens_of_every_place_count(tmp_path):
    folder = Path(save_model(tmp_path / "m", tokenizer=True))
    known = load_cpu(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_cpu(folder).eos_token_ids == known.eos_token_ids | {5, 6}


def test_tokens_that_stand_for_calls_of_tools_are_known_by_their_names():
    tokenizer = load_cpu(MODEL_DIR).tokenizer
    calls = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|eom_id|>", "<｜tool▁calls▁begin｜>"]
    others = ["<tool_response>", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "<|im_end|>", "<|eot_id|>"]
    assert _call_token_ids(tokenizer) == _call_token_ids(None) == frozenset()
    tokenizer.add_tokens(calls + others)
    assert _call_token_ids(tokenizer) == frozenset(tokenizer.convert_tokens_to_ids(calls))


def test_a_cuda_device_has_its_number_and_exists(monkeypatch):
    """The current one is asked for once: it is that of a thread, and steps run in others."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert _device("auto") == _device("cuda") == torch.device("cuda", 1)
    assert _device("cuda:0") == torch.device("cuda", 0) and _device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda:2, but torch sees 2 CUDA devices"):
        _device("cuda:2")


def test_another_tokenizer_may_be_named(tmp_path):
    folder = save_model(tmp_path / "m", vocab_size=2048)
    assert load_cpu(folder).tokenizer is None
    loaded = load(folder, "cpu", "auto", None, tokenizer_of=str(MODEL_DIR))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello")).endswith("Hello")
    assert (loaded.name, loaded.source) == ("m", str(folder))  # what names its KV: a tokenizer changes none


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    folder = save_model(tmp_path / "m")
    with pytest.raises(ModelError, match=r"has no tokenizer; give a directory"):
        load(folder, "cpu", "auto", None, tokenizer_of=str(folder))
    with pytest.raises(ModelError, match=r"has [0-9,]+ tokens, but the model knows [0-9,]+"):
        load(folder, "cpu", "auto", None, tokenizer_of=str(MODEL_DIR))


def test_a_revision_is_the_hubs_and_is_loaded_from_its_own_directory(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "snapshots" / "abc")
    with pytest.raises(ConfigError, match=r"revision is 'v1', which is for a hub id"):
        load(folder, "cpu", "auto", None, revision="v1")
    asked = []

    def snapshot_download(hub_id, revision, allow_patterns, ignore_patterns):
        asked.append((hub_id, revision))
        if revision == "gone":
            raise OSError("no such revision\nat all")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    loaded = load("some/model", "cpu", "auto", None, revision="v1")
    assert (loaded.name, loaded.source, {*asked}) == ("some/model", str(folder), {("some/model", "v1")})
    with pytest.raises(ModelError, match=r"cannot get some/model from the hub: no such revision$"):
        load("some/model", "cpu", "auto", None, revision="gone")
