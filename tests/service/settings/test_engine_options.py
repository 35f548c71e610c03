"""Flags of the engine: refusals name them, and not Python's arguments."""

import pytest

from kvstore.errors import ConfigError, ModelError, UnsupportedModelError
from kvstore.service.command import cli
from kvstore.service.settings.config_file import told
from kvstore.service.settings.engine_options import engine_command, naming_flags


@pytest.mark.parametrize("refusal, line", [
    (ConfigError("cpu", "1.0 KiB", "give more"), "--cpu is 1.0 KiB; give more"),
    (ConfigError("max_num_seqs", "2", "give more"), "KVSTORE_MAX_NUM_SEQS is 2; give more"),
    (ConfigError("dtype", "float16", {"device": "cpu"}), "dtype in FILE is float16; give --device cpu"),
    (ConfigError("eviction", "'x' in /a/max_model_len, not disk or seed=3", "give one=two"),
     "--policy is 'x' in /a/max_model_len, not disk or seed=3; give one=two"),
    (ConfigError("cpu is no model"), "cpu is no model"),
    (UnsupportedModelError("cpu has 4 heads", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
     "cpu has 4 heads; give --tensor-parallel-size 1 and --pipeline-parallel-size 2"),
    (ModelError("cpu has no tokenizer; give --tokenizer (in Python, tokenizer=)"),  # a model of this name
     "cpu has no tokenizer; give --tokenizer (in Python, tokenizer=)"),
])  # fmt: skip
def test_refusals_name_what_was_given(tmp_path, refusal, line):
    file = tmp_path / "file.toml"
    file.write_text('dtype = "float16"\n')
    environment = {"KVSTORE_CONFIG": str(file), "KVSTORE_MAX_NUM_SEQS": "2"}
    settings = told(engine_command("serve"), ["--cpu", "1KiB"], environment).settings
    with pytest.raises(type(refusal)) as caught, naming_flags(settings):
        raise refusal
    assert str(caught.value) == line.replace("FILE", str(file))


@pytest.mark.parametrize("command", ["chat", "serve", "stats", "plan", "vllm-config"])
def test_a_store_that_is_a_file_is_refused(tmp_path, no_settings, capsys, command):
    (tmp_path / "file").write_text("x")
    assert cli.main([command, "--store", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"kvstore: --store is '{tmp_path}/file', which is a file; give the directory of the store\n"
    )
