"""The seam between engine and store: ids, hashes and tensors cross it, never the engine's Request.

Verbs and meanings are those of vLLM's V1 KV connector, so that an adapter stays small.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvstore.block import BlockId, lineage_root

if TYPE_CHECKING:
    import torch


class Lookup(Enum):
    """What a connector says of the blocks behind those already in HBM."""

    MISS = "miss"  # nothing more; compute
    HIT = "hit"  # `num_tokens` more can be loaded at once
    PENDING = "pending"  # on their way from a slower tier: leave the request waiting, take the next


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of `get_num_new_matched_tokens`: `num_tokens` is a multiple of the block size, 0 unless HIT."""

    lookup: Lookup
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Loads of one step: (HBM block, block id) in chain order, for all requests of the step."""

    loads: tuple[tuple[int, BlockId], ...]


class KVConnector(Protocol):
    """Scheduler side runs in the control plane's thread; worker side beside the model's forward."""

    def lineage_root(self, tenant: str, cache_salt: str) -> BlockId:
        """Root of this owner's chains. Called once per request."""
        ...

    # -- scheduler side --------------------------------------------------------------------------------------------
    def on_new_request(self, request_id: str, chain: Sequence[BlockId]) -> None:
        """A request was queued (not yet scheduled): prefetch may begin."""
        ...

    def get_num_new_matched_tokens(
        self, request_id: str, chain: Sequence[BlockId], num_computed_tokens: int, max_tokens: int
    ) -> Match:
        """How many tokens after `num_computed_tokens` can be loaded, at most `max_tokens`. Called when scheduling."""
        ...

    def update_state_after_alloc(self, request_id: str, block_numbers: Sequence[int], num_external_tokens: int) -> None:
        """HBM blocks were allocated for a hit of `num_external_tokens`; they go into the next plan."""
        ...

    def build_connector_meta(self) -> TransferPlan | None:
        """The loads of this step, or None when there are none. Called once, at the end of scheduling."""
        ...

    def request_finished(self, request_id: str, block_numbers: Sequence[int]) -> None:
        """The request ended, was aborted or preempted; its HBM blocks are about to be released."""
        ...

    # -- worker side -----------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Key and value cache of each layer, [num_blocks, block_size, num_kv_heads, head_dim]. Called once."""
        ...

    def start_load_kv(self, plan: TransferPlan) -> None:
        """Begin the loads of a step; returns at once. Called before the forward pass."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Returns when (on CUDA: orders the stream after) the loads of this layer have landed."""
        ...

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of this step's tokens, [num_tokens, num_kv_heads, head_dim]; returns at once."""
        ...

    def wait_for_save(self) -> None:
        """The forward pass has ended: hand over what was saved. Never waits for a slow tier."""
        ...

    def get_finished(self) -> tuple[int, ...]:
        """HBM blocks whose load failed since the last call: they hold nothing and are to be recomputed."""
        ...

    # -- beside them -----------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId]) -> None:
        """Somebody is likely to ask for this chain soon."""
        ...

    def flush(self) -> None:
        """Returns when every finished block is synced on disk."""
        ...

    def stats(self) -> dict[str, object]: ...

    def close(self) -> None: ...


class NullConnector:
    """No store: every lookup is a miss and nothing is kept beyond HBM."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def lineage_root(self, tenant: str, cache_salt: str) -> BlockId:
        return lineage_root(self._secret, "", tenant, cache_salt)

    def on_new_request(self, request_id: str, chain: Sequence[BlockId]) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request_id: str, chain: Sequence[BlockId], num_computed_tokens: int, max_tokens: int
    ) -> Match:
        return Match(Lookup.MISS)

    def update_state_after_alloc(self, request_id: str, block_numbers: Sequence[int], num_external_tokens: int) -> None:
        raise AssertionError("NullConnector never reports a hit")

    def build_connector_meta(self) -> TransferPlan | None:
        return None

    def request_finished(self, request_id: str, block_numbers: Sequence[int]) -> None:
        pass

    def register_kv_caches(self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pass

    def start_load_kv(self, plan: TransferPlan) -> None:
        raise AssertionError("NullConnector never plans a load")

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self) -> tuple[int, ...]:
        return ()

    def prefetch(self, chain: Sequence[BlockId]) -> None:
        pass

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass
