"""What vLLM's KV depends on beside the tokens: weights, configuration, dtype, layout and sizes. Also warns of settings
that hurt.

vLLM's keys cover tokens, salt, adapters and images; everything else goes into the namespace of the blocks. Reads the
objects that vLLM hands over; imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from kvstore.disk.weights import weights_digest
from kvstore.errors import ConfigError, ModelError
from kvstore.hosts.model_folder import model_folder

FORMAT = "vllm 1"  # incremented when the meaning of a stored chunk changes
_COSMETIC = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "id2label", "label2id"}
_CPU_FLAGS = ("amx_tile", "avx512f", "avx2")  # they decide how vLLM's CPU attention lays out a page


def host_config() -> Any:
    """vLLM's configuration, taken from a caller's frame, as vLLM does not hand it to tiers. None if no frame has it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if hasattr(found, "model_config") and hasattr(found, "cache_config"):
            return found
        frame = frame.f_back
    return None


def store_folder(config: Any) -> Path | None:
    """The folder of the first KVStoreTier in this configuration."""
    extra = getattr(getattr(config, "kv_transfer_config", None), "kv_connector_extra_config", None) or {}
    paths = (tier.get("path") for tier in extra.get("secondary_tiers", ()) if tier.get("type") == "KVStoreTier")
    return next((Path(path).expanduser() for path in paths if path), None)


def check_hashes(config: Any) -> None:
    """Raises ConfigError if vLLM's keys would not identify their content."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash"):
        raise ConfigError(
            f"--prefix-caching-hash-algo is {algorithm}, which is seeded anew by every process and no proof against "
            f"collisions; KVStoreTier needs sha256_cbor (or sha256)"
        )


def warnings(config: Any, offload_prompt_only: bool) -> Iterator[str]:
    """Settings that spoil the reuse of conversations, each with advice."""
    if offload_prompt_only:
        yield (
            "offload_prompt_only is true, vLLM's default: answers are not kept, so every turn computes the last one "
            'again; set "offload_prompt_only": false in kv_connector_extra_config'
        )
    transfer = getattr(config, "kv_transfer_config", None)
    if getattr(transfer, "kv_load_failure_policy", None) == "fail":
        yield (
            'kv_load_failure_policy is "fail", vLLM\'s default: a request fails where its KV cannot be loaded; set '
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )


def namespace(spec: Any, config: Any, identity: str | None, row_bytes: int, folder: Path, version: str) -> bytes:
    """32 bytes that name what all blocks depend on. spec: vLLM's offloading spec. config: see `host_config`. identity:
    a name for the weights, if they are not safetensors files. folder: where digests of files are kept. version: vLLM's,
    since layouts may change with it.

    Raises ConfigError if neither tells what the weights are.
    """
    if identity is None:
        if config is None:
            raise ConfigError('this vLLM does not show its configuration; name the model\'s weights with "identity"')
        model = _model(config, folder)
    else:
        model = {"identity": identity}
    own = spec.config
    # vLLM also says so of its direct layout. But there a row has all layers of the first rank, then those of the next.
    is_agnostic = own.canonical_layout and own.parallel.is_parallelism_agnostic
    parts = {
        "format": FORMAT,
        "vllm": version,
        "model": model,
        "dtype": str(own.model.dtype),
        "layout": [own.kv_cache_layout, own.canonical_layout, own.replicated_layout],
        "groups": [asdict(group) for group in own.groups],
        "cache": asdict(own.cache),
        "parallel": "any" if is_agnostic else _shape(own.parallel),
        "row_bytes": row_bytes,
        "device": _device(config),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()


def _shape(parallel: Any) -> dict[str, int]:
    return {name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}


def _model(config: Any, folder: Path) -> dict[str, Any]:
    model = config.model_config
    cache = getattr(config.load_config, "download_dir", None)
    try:
        weights = weights_digest(model_folder(str(model.model), model.revision, cache), folder / "weights.json")
    except ModelError as error:
        raise ConfigError(f'{error}; give a text that changes with the weights as "identity" of the tier') from error
    found = {
        "weights": weights,
        "config": _plain(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
    }
    if "longrope" in json.dumps(found["config"], default=str):
        found["window"] = model.max_model_len  # frequencies depend on it
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _COSMETIC}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _device(config: Any) -> list[str]:
    """The device's kind; on a CPU also the features that decide how attention lays out its pages."""
    device = str(getattr(getattr(config, "device_config", None), "device_type", ""))
    if device != "cpu":
        return [device]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return [device, platform.machine(), *(flag for flag in _CPU_FLAGS if flag in flags)]
