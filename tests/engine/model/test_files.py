"""Files of models: what is loaded; what cannot be served is one line with the remedy, before anything is fetched."""

import http.server
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.model.files import check_speaks, find_model, template_text
from kvstore.engine.model.loading import _device, load
from kvstore.errors import ConfigError, ModelError, UnsupportedModelError
from kvstore.service.command import cli
from tests.support.engines import bare_copy, save_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
LLAMA = '{"model_type": "llama", "num_attention_heads": 4}'
AWQ = '{"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}'
NESTED = '{"model_type": "llava", "text_config": {"quantization_config": {"quant_method": "awq"}}}'
GPTQ = '{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}'
BAD = [
    ({"model.safetensors": POINTER, "config.json": LLAMA}, r"model\.safetensors is a Git LFS pointer.*`git lfs pull`"),
    ({"model.safetensors": "x", "tokenizer.json": POINTER, "config.json": LLAMA}, r"tokenizer\.json is a Git LFS"),
    ({"model.safetensors": "x", "config.json": AWQ}, r"is quantized \(AWQ\).*give the model it was made from"),
    ({"model.safetensors": "x", "config.json": NESTED}, r"is quantized \(AWQ\)"),
    ({"model.safetensors": "x", "config.json": GPTQ}, r"is quantized \(GPTQ\).*give the model it was made from"),
    ({"model.safetensors": "x", "config.json": LLAMA, "quantize_config.json": "{}"}, r"is quantized \(GPTQ\)"),
    ({"model-q4_k_m.gguf": "GGUF"}, r"GGUF format.*give the model it was made from"),
    ({"pytorch_model.bin": "x", "config.json": LLAMA}, r"weights as \*\.bin.*convert: python -c .*save_pretrained"),
    ({"model.safetensors": "x", "config.json": '{"model_type": "mamba"}'}, r"is a mamba, which has no attention"),
    ({}, r"no \*\.safetensors"),
    ({"pytorch_model.bin": "x"}, r"only safetensors weights are loaded"),
    ({"model.safetensors": "x"}, r"no config\.json"),
    ({"model.safetensors": "x", "config.json": "{"}, r"cannot read the configuration"),
    ({"model.safetensors": "x", "config.json": "[]"}, r"configuration of .*: config\.json holds no object of JSON"),
    ({"model.safetensors": "x", "config.json": '{"model_type": "llama", "num_hidden_layers": "four"}'},
     r"configuration of .*'num_hidden_layers'.*expected int, got str"),
    ({"model.safetensors": "x", "config.json": '{"model_type": "nosuch"}'}, r"cannot read the configuration"),
    ({"model.safetensors": "x", "config.json": '{"model_type": "t5"}'}, r"encoder-decoder"),
    ({"model.safetensors": "x", "config.json": '{"model_type": "vit"}'}, r"no causal language model"),
]  # fmt: skip


def folder(path: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (path / name).write_text(content)
    return path


def test_what_the_models_own_code_does_not_expect_is_one_line(tmp_path):
    model = Path(save_model(tmp_path))
    config = {"model_type": "hunyuan_v1_dense", "hidden_size": 64, "num_attention_heads": 4, "head_dim": None}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"cannot load .*unsupported operand") as caught:
        load(str(model), "cpu", "auto", None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("files", "message"), BAD)
def test_what_cannot_be_served_is_one_line_with_the_remedy(tmp_path, files, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_cpu(folder(tmp_path, files))
    assert "\n" not in str(caught.value) and tmp_path.name in str(caught.value)
    is_unsupported = any(word in message for word in ("mamba", "encoder-decoder", "no causal"))
    assert isinstance(caught.value, UnsupportedModelError) == is_unsupported


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu"])
def test_latent_attention_is_refused_in_words(tmp_path, family, sees):
    config = getattr(transformers, f"{family}Config")().to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if sees else config))
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(UnsupportedModelError, match="multi-head latent attention is not served here; under vLLM or"):
        find_model(tmp_path)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_commands_find_it_before_anything_is_loaded(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    given = ["--disk", "0", *(["--port", "0"] if command == "serve" else [])]
    (tmp_path / "m").mkdir()
    assert cli.main([command, str(folder(tmp_path / "m", {"a.gguf": "GGUF"})), *given]) == 2
    *_, last = capsys.readouterr().err.strip().split("\n")
    assert last.startswith(f"kvstore: {tmp_path / 'm'} is in the GGUF format")


def test_the_given_conversion_makes_a_model_that_is_found(tmp_path):
    path = Path(save_model(tmp_path / "m"))
    weights = load_file(path / "model.safetensors")
    torch.save(weights, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        find_model(path)
    (tmp_path / "convert.py").write_text(str(caught.value).partition('python -c "')[2].removesuffix('"'))
    runpy.run_path(str(tmp_path / "convert.py"))
    assert find_model(path) == path
    assert all(torch.equal(weights[name], found) for name, found in load_file(path / "model.safetensors").items())


def test_what_this_user_may_not_read():
    """As another user where root runs the test, whom modes do not stop."""
    root = Path(tempfile.mkdtemp())
    mine = os.geteuid()
    try:
        root.chmod(0o755)
        (root / "m").mkdir()
        file = folder(root / "m", {"model.safetensors": "x", "config.json": LLAMA}) / "model.safetensors"
        file.chmod(0)
        if mine == 0:
            os.seteuid(65534)
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: Permission denied"):
            find_model(root / "m")
        os.seteuid(mine)
        (root / "m").chmod(0)
        if mine == 0:
            os.seteuid(65534)
        for path in (root / "m", root / "m" / "inside"):
            with pytest.raises(ModelError, match="cannot be read: Permission denied; give a directory that this user"):
                find_model(path)
    finally:
        os.seteuid(mine)
        (root / "m").chmod(0o700)
        shutil.rmtree(root)


def test_who_talks_needs_a_tokenizer_and_who_chats_a_template(tmp_path):
    check_speaks(None, {}, chats=True)
    no_template = bare_copy(tmp_path / "t", "chat_template.jinja")
    check_speaks(no_template, {}, chats=False)
    with pytest.raises(ModelError, match=r"has no chat template; give a file with one as --chat-template"):
        check_speaks(no_template, {}, chats=True)
    check_speaks(no_template, {"chat_template": str(MODEL_DIR / "chat_template.jinja")}, chats=True)
    check_speaks(no_template, {"tokenizer": str(MODEL_DIR)}, chats=True)
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    (no_template / "tokenizer_config.json").unlink()
    (no_template / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    check_speaks(no_template, {}, chats=True)
    mute = bare_copy(tmp_path / "n", "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(ModelError, match=r"has no tokenizer.*--tokenizer"):
        check_speaks(mute, {}, chats=False)


def test_a_template_is_a_text_or_a_file(tmp_path):
    assert template_text("{{ messages }}") == "{{ messages }}"
    (tmp_path / "a.jinja").write_text("{% for m in messages %}{% endfor %}")
    assert template_text(str(tmp_path / "a.jinja")).startswith("{% for")
    with pytest.raises(ConfigError, match=r"chat_template is .*b\.jinja, which cannot be read: No such file"):
        template_text(str(tmp_path / "b.jinja"))


# -- the hub ---------------------------------------------------------------------------------------------------------
class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one repository."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        sha, headers = "a" * 40, {"X-Repo-Commit": "a" * 40}
        if not path.startswith(("/api/models/some/model", "/some/model/")):
            self.send_response(404)
            headers["X-Error-Code"] = "RepoNotFound"
            body = b"{}"
        elif "/resolve/" in path:
            body = self.files[path.rpartition("/")[2]]
            headers["ETag"] = f'"{abs(hash(body)):040x}"'
            self.send_response(200)
        else:
            listed = [{"type": "file", "path": name, "size": len(b), "oid": "b" * 40} for name, b in self.files.items()]
            known = {"id": "some/model", "sha": sha, "siblings": [{"rfilename": name} for name in self.files]}
            body = json.dumps(listed if "/tree/" in path else known).encode()
            self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"files": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(tmp_path: Path, endpoint: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "none")
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True,
        timeout=300, input="",
    )  # fmt: skip


FIND = """
from kvstore.engine.model.files import find_model
from kvstore.errors import ModelError
for name, revision in (("some/model", None), ("no/model", None)):
    try:
        print(sorted(file.name for file in find_model(name, revision).iterdir()))
    except ModelError as error:
        print(error)
"""


def test_a_model_of_the_hub_is_fetched_once_it_is_known_to_be_one(tmp_path, hub):
    handler, endpoint = hub
    handler.files = {"config.json": LLAMA.encode(), "pytorch_model.bin": b"x", "tokenizer.json": b"{}"}
    first, second = run(tmp_path, endpoint, "-c", FIND).stdout.splitlines()
    assert "some/model has weights as *.bin" in first and "no/model is no directory here, and no model of" in second
    assert run(tmp_path, endpoint, "-m", "kvstore", "chat", "no/model").returncode == 2
    assert not any("/resolve/" in path for path in handler.asked)  # nothing was fetched for that
    handler.files = {"config.json": AWQ.encode(), "model.safetensors": b"x" * 100}
    assert "some/model is quantized (AWQ)" in run(tmp_path, endpoint, "-c", FIND).stdout
    assert not any(path.endswith(".safetensors") for path in handler.asked)


def test_a_model_of_the_hub_is_found_again_without_network(tmp_path, hub):
    handler, endpoint = hub
    handler.files = {"config.json": LLAMA.encode(), "model.safetensors": b"x" * 100, "consolidated.safetensors": b"y"}
    assert "['config.json', 'model.safetensors']" in run(tmp_path, endpoint, "-c", FIND).stdout
    first, second = run(tmp_path, "http://127.0.0.1:9", "-c", FIND).stdout.splitlines()
    assert first == "['config.json', 'model.safetensors']"
    assert "no/model is no directory here and not complete in the hub's cache, and the hub cannot be reached" in second


def test_a_window_is_refused_where_the_file_alone_says_that_it_is_too_large(tmp_path):
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": 512}
    file.write_text(json.dumps(config))
    check_speaks(tmp_path / "model", {"max_model_len": 512}, chats=False)
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model was made for 512 tokens"):
        check_speaks(tmp_path / "model", {"max_model_len": 513}, chats=False)
    file.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    check_speaks(tmp_path / "model", {"max_model_len": 1024}, chats=False)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}  # as Qwen's cards say to add it
    file.write_text(json.dumps(config | {"rope_scaling": yarn}))
    check_speaks(tmp_path / "model", {"max_model_len": 2000}, chats=False)
    with pytest.raises(ConfigError, match="max_model_len is 2001, but the model was made for 2000 tokens"):
        check_speaks(tmp_path / "model", {"max_model_len": 2001}, chats=False)
    file.write_text(json.dumps(config | {"rope_scaling": {**yarn, "original_max_position_embeddings": 128}}))
    with pytest.raises(ConfigError, match="made for 512 tokens"):  # which has the factor in it
        check_speaks(tmp_path / "model", {"max_model_len": 513}, chats=False)


def load_cpu(model, dtype="auto", max_model_len=None):
    return load(model, "cpu", dtype, max_model_len)


def test_a_directory_is_loaded_as_it_was_saved(tmp_path):
    loaded = load_cpu(save_model(tmp_path / "tiny-model"))
    assert (loaded.name, loaded.tokenizer, loaded.max_model_len) == ("tiny-model", None, 256)
    assert loaded.model.dtype == torch.float32 and loaded.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert load_cpu(tmp_path / "tiny-model", dtype="bfloat16").model.dtype == torch.bfloat16


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
    file = Path(save_model(tmp_path / "m")) / "model.safetensors"
    capsys.readouterr()
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:-3].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"the weight {name} has shape \[\d+, \d+\], but config") as caught:
        load_cpu(file.parent)
    assert "\n" not in str(caught.value) and capsys.readouterr().err == ""  # no table of transformers


def test_a_checkpoint_with_weights_missing_is_refused(tmp_path):
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
