"""`kvstore vllm-config`: the flags under which vLLM keeps its KV in our store, each with its reason.

Knows flags and text; starts nothing, and needs no vLLM.
"""

import json
import shlex
from typing import Any

from kvstore.config import SWITCH, ValueForm, parse_size
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.options import STORE, Command, Option, default_store

CAPACITY = ValueForm("SIZE", parse_size, "a size above 0, such as 8GiB", low=1)
COMMAND = Command(
    "vllm-config",
    {
        "flags": (
            STORE,
            Option("--cpu", CAPACITY, 8 << 30, "memory that vLLM keeps KV in before the disk", shown="8GiB"),
            Option("--disk", CAPACITY, 64 << 30, "what the store's file may take", shown="64GiB"),
            Option("--on-cpu", SWITCH, False, "the model itself runs on a CPU, too"),
        )
    },
    "The store must not be one that `kvstore serve` has open, and each vLLM needs one of its own.\n\nexamples:\n"
    "  kvstore vllm-config --store ~/vllm-store --cpu 32GiB --disk 500GiB\n"
    "  kvstore vllm-config | grep -v '^#' | xargs vllm serve Qwen/Qwen3-8B",
)
REASONS = {
    "--enable-prefix-caching": "what was loaded is shared by all requests that begin alike",
    "--prefix-caching-hash-algo": "sha256_cbor names the same tokens alike in every process; xxhash does not",
    "kv_connector": "vLLM's own, which also shows our tier the configuration: what KV depends on is in there",
    "kv_load_failure_policy": "what cannot be loaded is computed; by default the request fails",
    "offload_prompt_only": "answers are kept, too: they are part of the next prompt; by default they are not",
    "eviction_policy": "memory gives up first what is least likely to return; by default the least recently used",
    "secondary_tiers": "below memory comes our store: bounded, checked, and there after a restart; by default nothing",
    "spec_name": "the tiers' spec; on a CPU ours, since vLLM's own takes GPUs alone",
}


def transfer_config(store: str, cpu_bytes: int, disk_bytes: int, on_cpu: bool) -> dict[str, Any]:
    """The value of --kv-transfer-config."""
    spec = {"spec_name": "TieringOffloadingSpec"}
    if on_cpu:
        spec = {"spec_name": "CPUTieringSpec", "spec_module_path": "kvstore.hosts.vllm_cpu"}
    tier = {"type": "KVStoreTier", "module_path": "kvstore.hosts.vllm", "path": store, "disk": disk_bytes}
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.hosts.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **spec,
            "cpu_bytes_to_use": cpu_bytes,
            "offload_prompt_only": False,
            "eviction_policy": "KVStorePolicy",
            "cache_policy_module_path": "kvstore.hosts.vllm_policy",
            "secondary_tiers": [tier],
        },
    }


def run_vllm_config(given: Told) -> int:
    """Raises ConfigError where there is no default store; returns the exit code."""
    values = given.values
    store = values["store"] or STORE.reads.read(STORE.flag, default_store())
    transfer = transfer_config(str(store), values["cpu"], values["disk"], values["on_cpu"])
    for name, reason in REASONS.items():
        print(f"# {name}: {reason}")
    print(
        "--enable-prefix-caching --prefix-caching-hash-algo sha256_cbor --kv-transfer-config "
        + shlex.quote(json.dumps(transfer, separators=(",", ":")))
    )
    return 0
