"""From the engine's options and its model to the connector of the tiers below HBM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvstore.connector import KVConnector, open_connector
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.weights import weights_digest
from kvstore.engine.config import EngineConfig
from kvstore.engine.model.fingerprint import fingerprint
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import Loaded
from kvstore.memory.layout import KVLayout


def check_room(config: EngineConfig, network: Any) -> None:
    """Before weights are read: whether the tiers have room for blocks, as far as the model's configuration tells.

    Raises ConfigError.
    """
    text = network.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or (num_heads and text.hidden_size // num_heads)
    dtype = getattr(text, "dtype", None) if config.dtype == "auto" else getattr(torch, config.dtype)
    if num_kv_heads and head_dim:
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
        layer_bytes = 2 * config.block_size * num_kv_heads * head_dim * itemsize
        config.tiers.check_room(text.num_hidden_layers * layer_bytes)


def open_store(
    config: EngineConfig,
    loaded: Loaded,
    model: PositionFreeModel,
    num_hbm_blocks: int,
    directory: StoreDirectory | None,
) -> KVConnector:
    """The connector for `config.tiers`. num_hbm_blocks: of the engine's pool. directory: see `open_connector`.

    Raises ConfigError, ModelError, StoreError or StoreLockedError.
    """
    spec = model.spec

    def named(cache: Path | None) -> str:
        """Weights need a name only where their KV outlives the process."""
        return fingerprint(model, "" if cache is None else weights_digest(loaded.source, cache), config.block_size)

    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, spec.dtype, model.rotations)
    # Staging without a CPU tier: the longest request's loads, and for every running one a block that is being filled.
    least_slots = 2 * config.max_num_seqs + -(-loaded.max_model_len // config.block_size)
    name, device, load = loaded.name, loaded.device, config.load
    return open_connector(
        config.tiers, layout, name, named, device, load, least_slots, num_hbm_blocks, config.eviction, directory
    )
