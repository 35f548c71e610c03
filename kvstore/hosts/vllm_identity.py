"""What vLLM's KV depends on beside the tokens: weights, configuration, dtype, layout and sizes. Also warns of settings
that hurt.

vLLM's keys cover tokens, salt, adapters and images; everything else goes into the namespace of the blocks. Reads the
objects that vLLM hands over, and no field of them is optional: one that a version of vLLM has renamed is an error that
names it. Imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.disk.weights import weights_digest
from kvstore.errors import ConfigError, ModelError
from kvstore.hosts.given import field as host_field
from kvstore.hosts.given import model_folder

FORMAT = "vllm 1"  # incremented when the meaning of a stored chunk changes
_COSMETIC = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "id2label", "label2id"}
_CPU_FLAGS = ("amx_tile", "avx512f", "avx2")  # they decide how vLLM's CPU attention lays out a page
_SHAPE = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")


field = partial(host_field, host="vLLM")


def store_folder(config: Any) -> Path | None:
    """The folder of the first KVStoreTier in this configuration."""
    tiers = field(config, "kv_transfer_config.kv_connector_extra_config").get("secondary_tiers", ())
    paths = (tier.get("path") for tier in tiers if tier.get("type") == "KVStoreTier")
    return next((Path(path).expanduser() for path in paths if path), None)


def check_hashes(config: Any) -> None:
    """Raises ConfigError if vLLM's keys would not identify their content."""
    algorithm = str(field(config, "cache_config.prefix_caching_hash_algo"))
    if algorithm.startswith("xxhash"):
        raise ConfigError(
            f"--prefix-caching-hash-algo is {algorithm}, which is seeded anew by every process and no proof against "
            f"collisions; KVStoreTier needs sha256_cbor (or sha256)"
        )


def check_steps(config: Any) -> None:
    """Raises ConfigError where vLLM would keep states that nobody finds: it has them at ends of steps, and looks for
    them at the ends of blocks.
    """
    step = field(config, "scheduler_config.max_num_batched_tokens")
    block = field(config, "cache_config.block_size")
    if field(config, "cache_config.mamba_cache_mode") == "align" and step % block:
        raise ConfigError(
            f"a step of vLLM has {step} tokens, and its blocks have {block} with this model's states, which come back "
            f"only where a step ends with a block; give --max-num-batched-tokens {-(-step // block) * block}"
        )


def warnings(config: Any, offload_prompt_only: bool) -> Iterator[str]:
    """Settings that spoil the reuse of conversations, each with advice."""
    if offload_prompt_only:
        yield (
            "offload_prompt_only is true, vLLM's default: answers are not kept, so every turn computes the last one "
            'again; set "offload_prompt_only": false in kv_connector_extra_config'
        )
    if field(config, "kv_transfer_config.kv_load_failure_policy") == "fail":
        yield (
            'kv_load_failure_policy is "fail", vLLM\'s default: a request fails where its KV cannot be loaded; set '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )


def namespace(spec: Any, config: Any, identity: str | None, row_bytes: int, folder: Path, version: str) -> bytes:
    """32 bytes that name what all blocks depend on. spec: vLLM's offloading spec. config: vLLM's configuration.
    identity: a name for the weights, if they are not safetensors files. folder: where digests of files are kept.
    version: vLLM's, since layouts may change with it.

    Raises ConfigError if nothing tells what the weights are, or if vLLM's objects lack a field.
    """
    own = field(spec, "config")
    is_canonical = field(own, "canonical_layout")
    # vLLM also says so of its direct layout. But there a row has all layers of the first rank, then those of the next.
    is_agnostic = field(own, "parallel.is_parallelism_agnostic") and is_canonical
    parts = {
        "format": FORMAT,
        "vllm": version,
        "model": _model(config, folder) if identity is None else {"identity": identity},
        "dtype": str(field(own, "model.dtype")),
        "layout": [field(own, "kv_cache_layout"), is_canonical, field(own, "replicated_layout")],
        "groups": [asdict(group) for group in field(own, "groups")],
        "cache": asdict(field(own, "cache")),
        "parallel": "any" if is_agnostic else {name: field(own, f"parallel.{name}") for name in _SHAPE},
        "row_bytes": row_bytes,
        "device": _device(str(field(config, "device_config.device_type"))),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _model(config: Any, folder: Path) -> dict[str, Any]:
    model, revision = str(field(config, "model_config.model")), field(config, "model_config.revision")
    cache = field(config, "load_config.download_dir")
    try:
        weights = weights_digest(model_folder(model, revision, cache), folder / "weights.json")
    except ModelError as error:
        raise ConfigError(f'{error}; give a text that changes with the weights as "identity" of the tier') from error
    found = {
        "weights": weights,
        "config": _plain(field(config, "model_config.hf_config").to_dict()),
        "dtype": str(field(config, "model_config.dtype")),
        "quantization": str(field(config, "model_config.quantization")),
    }
    if "longrope" in json.dumps(found["config"], default=str):
        found["window"] = field(config, "model_config.max_model_len")  # frequencies depend on it
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _COSMETIC}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _device(kind: str) -> list[str]:
    """The device's kind; on a CPU also the features that decide how attention lays out its pages."""
    if kind != "cpu":
        return [kind]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return [kind, platform.machine(), *(flag for flag in _CPU_FLAGS if flag in flags)]
