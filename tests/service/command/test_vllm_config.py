"""`kvstore vllm-config`: flags that a shell and vLLM can read, a reason for each, and what is wrong in one line."""

import json
import shlex

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
