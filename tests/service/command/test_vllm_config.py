"""`kvstore vllm-config`: flags that a shell and vLLM can read, a reason for each, and what is wrong in one line."""

import json
import shlex

import pytest

from kvstore.service.command.cli import main


def told(capsys, *flags):
    assert main(["vllm-config", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = shlex.split(" ".join(line for line in lines if not line.startswith("#")))
    return [line for line in lines if line.startswith("#")], words, json.loads(words[-1])


def test_every_default_that_is_changed_has_a_reason(capsys, tmp_path):
    reasons, words, transfer = told(capsys, "--store", str(tmp_path), "--cpu", "2GiB", "--disk", "10GB")
    assert words[:3] == ["--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
    extra = transfer["kv_connector_extra_config"]
    assert (transfer["kv_load_failure_policy"], extra["offload_prompt_only"]) == ("recompute", False)
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 2 << 30)
    tier = {"type": "KVStoreTier", "module_path": "kvstore.hosts.vllm", "path": str(tmp_path), "disk": 10**10}
    assert extra["secondary_tiers"] == [tier]
    assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == (
        "KVStoreConnector",
        "kvstore.hosts.vllm",
    )
    for name in ("kv_load_failure_policy", "offload_prompt_only", "eviction_policy", "--prefix-caching-hash-algo"):
        assert any(line.startswith(f"# {name}: ") for line in reasons)


def test_on_a_cpu_our_spec_takes_the_place_of_vllms(capsys, tmp_path):
    _, _, transfer = told(capsys, "--store", str(tmp_path), "--on-cpu")
    extra = transfer["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["spec_module_path"]) == ("CPUTieringSpec", "kvstore.hosts.vllm_cpu")


def test_a_size_of_nothing_is_refused(capsys, tmp_path):
    assert main(["vllm-config", "--store", str(tmp_path), "--cpu", "0"]) == 2
    assert "--cpu" in capsys.readouterr().err


GROUPED = "--no-disable-hybrid-kv-cache-manager"
QWEN_SMALL = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "num_key_value_heads": 2, "head_dim": 256,
}  # fmt: skip
QWEN_LARGE = {**QWEN_SMALL, "linear_num_value_heads": 48, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "flags"),
    [  # vLLM's own blocks of these two: 544 and 784 tokens
        ({"text_config": QWEN_SMALL}, [GROUPED, "--max-num-batched-tokens", str(544 * 4)]),
        (QWEN_LARGE, [GROUPED, "--max-num-batched-tokens", str(784 * 3)]),
        ({"mamba_n_heads": 48, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
          "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4},
         [GROUPED, "--max-num-batched-tokens", "2400"]),  # 400 tokens
        ({"conv_L_cache": 3, "num_key_value_heads": 8}, [GROUPED]),
        ({"sliding_window": 128, "head_dim": 64}, [GROUPED]),
        ({"sliding_window": 4096, "use_sliding_window": False}, []),
        ({"hidden_size": 64}, []),
    ],
)  # fmt: skip
def test_states_and_windows_of_a_model_have_flags_of_their_own(capsys, tmp_path, config, flags):
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, _, _ = told(capsys, "--store", str(tmp_path))
    reasons, words, _ = told(capsys, "--store", str(tmp_path), "--model", str(tmp_path))
    assert words[3:-2] == flags and reasons[: len(plain)] == plain
    assert {one for one in flags if one.startswith("--")} <= {line[2:].split(":")[0] for line in reasons}


def test_on_a_cpu_states_are_wide_and_blocks_multiples_of_32(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_SMALL, "mamba_ssm_dtype": None}))
    sizes = [
        told(capsys, "--store", str(tmp_path), "--model", str(tmp_path), *more)[1][-3] for more in ((), ("--on-cpu",))
    ]
    assert sizes == [str(288 * 8), str(544 * 4)]


@pytest.mark.parametrize("text", [None, "{", "[1]", json.dumps({"linear_num_value_heads": 2})])
def test_a_configuration_that_cannot_be_read_is_one_line(capsys, tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["vllm-config", "--store", str(tmp_path), "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "config.json" in error and str(tmp_path) in error
    assert error.startswith("kvstore: --model is ")
