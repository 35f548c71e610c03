"""`kvstore vllm-config`: the flags under which vLLM keeps its KV in our store, each with its reason.

Knows flags and text; starts nothing, and needs no vLLM.
"""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config import FILE, SWITCH, ValueForm, parse_size
from kvstore.errors import ConfigError
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.engine_options import naming_flags
from kvstore.service.settings.options import STORE, Command, Option, default_store

CAPACITY = ValueForm("SIZE", parse_size, "a size above 0, such as 8GiB", low=1)
MODEL = Option(
    "--model", FILE, None, "the model's directory: flags for layers with states or windows, too", field="model"
)
COMMAND = Command(
    "vllm-config",
    {
        "flags": (
            STORE,
            Option("--cpu", CAPACITY, 8 << 30, "memory that vLLM keeps KV in before the disk", shown="8GiB"),
            Option("--disk", CAPACITY, 64 << 30, "what the store's file may take", shown="64GiB"),
            Option("--on-cpu", SWITCH, False, "the model itself runs on a CPU, too"),
            MODEL,
        )
    },
    "The store must not be one that `kvstore serve` has open, and each vLLM needs one of its own.\n\nexamples:\n"
    "  kvstore vllm-config --store ~/vllm-store --cpu 32GiB --disk 500GiB\n"
    "  kvstore vllm-config | grep -v '^#' | xargs vllm serve Qwen/Qwen3-8B\n"
    "  kvstore vllm-config --model ~/Qwen3.5-9B | grep -v '^#' | xargs vllm serve ~/Qwen3.5-9B",
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
GROUPED = "--no-disable-hybrid-kv-cache-manager"
GROUPED_REASON = "states and windows are kept apart from other KV; where vLLM cannot, it says so and does not start"
STATE_MARKS = ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "conv_L_cache")
KERNEL_TOKENS = {False: 16, True: 32}  # in a block of vLLM's attention: on a GPU, on a CPU
STEP_TOKENS = 2048
BYTES = 2  # of a number in bfloat16


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


def flags_for(folder: Path, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """As `model_flags`, for the model in a directory. Raises ConfigError."""
    try:
        config = dict(json.loads((folder / "config.json").read_bytes()))
        return model_flags(dict(config.get("text_config") or config), on_cpu)
    except KeyError as error:
        wrong = f"has no {error}"
    except (OSError, ValueError, TypeError) as error:
        wrong = f"cannot be read ({error})"
    value = f"{str(folder)!r}, whose config.json {wrong}"
    raise ConfigError("model", value, "give a directory with a model in it, such as a snapshot of the hub's")


def model_flags(config: Mapping[str, Any], on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """What vLLM needs for layers with states or windows, and why. Both are empty for a plain model."""
    has_states = any(config.get(mark) for mark in STATE_MARKS)
    has_windows = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    if not has_states and not has_windows:
        return [], {}
    flags, reasons = [GROUPED], {GROUPED: GROUPED_REASON}
    if has_states:
        reasons["mamba_cache_mode"] = "no flag: from 0.32 on --enable-prefix-caching alone makes it align"
    if state_bytes := _state_bytes(config, on_cpu):
        size = _unified_block(config, state_bytes, KERNEL_TOKENS[on_cpu])
        flags += ["--max-num-batched-tokens", str(size * math.ceil(STEP_TOKENS / size))]
        reasons["--max-num-batched-tokens"] = (
            f"states are kept at the ends of steps, and hit at borders of vLLM's blocks, here of {size:,} tokens: "
            "a step is of whole blocks; where vLLM makes blocks of another size, it does not start, and says what to "
            "give"
        )
        reasons["--block-size"] = "no flag: vLLM makes blocks of attention as large as one layer's state"
    return flags, reasons


def _state_bytes(config: Mapping[str, Any], on_cpu: bool) -> int:
    """What one layer's state takes in vLLM; 0 where it is a convolution's alone, which is small. vLLM's kernels of
    linear attention for CPUs want float32.
    """
    wide = 2 * BYTES if "float32" in (config.get("mamba_ssm_dtype"), config.get("mamba_ssm_cache_dtype")) else BYTES
    if heads := config.get("linear_num_value_heads"):
        wide = 2 * BYTES if on_cpu else wide
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        width, kernel = 2 * key * config["linear_num_key_heads"] + value * heads, config["linear_conv_kernel_dim"]
        return int(heads * value * key * wide + (kernel - 1) * width * BYTES)
    if heads := config.get("mamba_n_heads") or config.get("mamba_num_heads"):
        state = config.get("mamba_d_state") or config["ssm_state_size"]
        dim = config.get("mamba_head_dim") or config["mamba_d_head"]
        if dim == "auto":
            dim = config["mamba_expand"] * config["hidden_size"] // heads
        groups = config.get("mamba_n_groups") or config.get("n_groups", 1)
        kernel = config.get("mamba_d_conv") or config.get("conv_kernel", 4)
        return int(heads * dim * state * wide + (kernel - 1) * (heads * dim + 2 * groups * state) * BYTES)
    return 0


def _unified_block(config: Mapping[str, Any], state_bytes: int, kernel_tokens: int) -> int:
    """Tokens in a block whose KV of one layer takes as much as a layer's state."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * config["num_key_value_heads"] * dim * BYTES
    return int(kernel_tokens * math.ceil(state_bytes / (kernel_tokens * kv_bytes)))


def run(given: Told) -> int:
    """Raises ConfigError where there is no default store; returns the exit code."""
    values = given.values
    store = values["store"] or STORE.reads.read(STORE.flag, default_store())
    transfer = transfer_config(str(store), values["cpu"], values["disk"], values["on_cpu"])
    flags, reasons = list[str](), dict[str, str]()
    if values["model"] is not None:
        with naming_flags(given.settings):
            flags, reasons = flags_for(values["model"], values["on_cpu"])
    for name, reason in {**REASONS, **reasons}.items():
        print(f"# {name}: {reason}")
    own = ["--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor", *flags, "--kv-transfer-config"]
    print(" ".join([*own, shlex.quote(json.dumps(transfer, separators=(",", ":")))]))
    return 0
