"""From the engine's options and its model to the connector of the tiers below HBM."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.fingerprint import fingerprint, weights_digest
from engine.loading import Loaded
from engine.model import PositionFreeModel
from kvstore.connector import KVConnector, KVLayout, open_connector


def open_store(
    config: EngineConfig, loaded: Loaded, model: PositionFreeModel, num_hbm_blocks: int
) -> KVConnector:
    """The connector for `config.tiers`. num_hbm_blocks: of the engine's pool.

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
        config.tiers, layout, name, named, device, load, least_slots, num_hbm_blocks, config.eviction
    )
