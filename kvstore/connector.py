"""The seam between engine and store: ids, hashes and tensors cross it, never the engine's Request.

Verbs and meanings are those of vLLM's V1 KV connector, so that an adapter stays small.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvstore.blocks.forest import Order
from kvstore.blocks.ids import BlockId, Lineage, lineage_root
from kvstore.blocks.records import SaveFence, TransferPlan
from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.memory.layout import KVLayout
from kvstore.policy.conversation import Answer, Conversation, QueueKey
from kvstore.policy.lookahead import LookAhead
from kvstore.policy.steering import Steering
from kvstore.store.seam import Arrival, Lookup, Match, StepSpan, Upkeep

if TYPE_CHECKING:
    import torch


class KVConnector(Protocol):
    """Scheduler side runs in the control plane's thread; worker side beside the model's forward.

    Without a store, whatever returns None does nothing.
    """

    directory: StoreDirectory | None  # the store's files, None when there are none
    fingerprint: bytes  # names the model and layout whose KV is stored; empty without a store
    hbm_order: Order  # of conversations in the engine's pool; its owner is the engine's thread
    lineage_root: Callable[[str, str], BlockId]  # of the chains of a tenant with a cache salt; asked once per request
    upkeep: Upkeep

    # -- scheduler side --------------------------------------------------------------------------------------------
    def on_new_request(
        self,
        request_id: str,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        tenant: str,
        num_hbm_tokens: int,
        key: QueueKey,
        conversation: Conversation | None = None,
        may_load: bool = True,
    ) -> Arrival:
        """A request was queued (not yet scheduled): prefetch may begin. Called again after a preemption.

        chain, token_ids: all that is known now; later ones come with `StepSpan`. key: its place in the queue.
        conversation: what was returned for the same request before, or for another choice of its prompt. may_load
        False: a load for it failed, so compute.
        """
        ...

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        """How many tokens after `num_computed_tokens` can be loaded, at most `max_tokens`. Called when scheduling.

        When the answer says to compute some tokens first, it is asked again for the running request after these.
        """
        return Match(Lookup.MISS)

    def update_state_after_alloc(
        self, request_id: str, block_numbers: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """HBM blocks were allocated for a hit of `num_external_tokens`; they go into the next plan."""
        return

    def build_connector_meta(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        """The transfers of this step, or None when there are none. Called once, at the end of scheduling.

        spans: what each scheduled request computes, in order. Never waits; what cannot be saved is dropped and counted.
        """
        ...

    def request_finished(
        self,
        request_id: str,
        answer: Answer | None = None,
        new_ids: Sequence[BlockId] = (),
        new_tokens: Sequence[int] = (),
    ) -> None:
        """The request ended, was aborted or preempted; its HBM blocks are about to be released.

        answer: how far it came and how it ended, for what is learned of returns. new_ids, new_tokens: see `StepSpan`,
        but to its very end.
        """

    # -- worker side -----------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Key and value cache of each layer, [num_blocks, block_size, num_kv_heads, head_dim]. Called once."""
        return

    def start_load_kv(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        """Begin (on a CPU: prepare) the loads of a step, prepare its saves; returns at once. Called before the forward.

        row_starts: per scheduled request, the index of its first token in the step's flat row.
        """
        return

    def wait_for_layer_load(self, layer: int) -> None:
        """Before this layer attends: on a CPU loads what it needs, on CUDA orders the stream after its loads."""
        return

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of this step's tokens, [num_tokens, num_kv_heads, head_dim]; returns at once.

        The tensors are kept until they are saved, and must not be written again but behind `wait_for_save`'s fence.
        """
        return

    def wait_for_save(self) -> SaveFence | None:
        """The forward pass has ended: hand over what was saved. Never waits for a slow tier.

        Returns what orders the next writing of this step's saved tensors; None when they may be written at once.
        """
        return None

    def step_failed(self) -> None:
        """Something raised while a step was planned or run: nothing of what is planned or running is to be kept."""
        return

    def get_finished(self) -> tuple[int, ...]:
        """HBM blocks whose load failed since the last call: they hold nothing and are to be recomputed."""
        return ()

    def wait_for_progress(self, timeout_s: float) -> None:
        """Returns when something in flight has ended since the last call: all requests wait for their blocks."""
        return

    def step_measured(self, num_prefill_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens of prompts took so long: what a load is weighed against."""
        return

    # -- beside them -----------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        """Somebody is likely to ask for this chain soon."""
        return

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None) -> None:
        """Keep the conversation of this chain longer than others for so long; 0 ends a pin.

        A priority, not a lock: when there is nothing else to evict, pinned blocks go too. expires_s: of `time.time()`;
        from then on it is evicted first; math.inf takes that back. None: as it was.
        """

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        """A chain for the kept `spans` of `token_ids` that reuses their KV; None when it has to be computed."""
        return None

    def stats(self) -> dict[str, object]: ...

    def close(self) -> None:
        return


class _NothingKept(Upkeep):
    """Of no store."""


class NullConnector(KVConnector):
    """No store: every lookup is a miss and nothing is kept beyond HBM. What is not said here does nothing.

    num_hbm_blocks: of the engine's pool, whose order of eviction is given here too. policy: see
    `kvstore.policy.policies`.
    """

    def __init__(self, num_hbm_blocks: int = 0, policy: str = "auto", clock: Callable[[], float] = time.time) -> None:
        self.directory, self.fingerprint = None, b""
        self.lineage_root = partial(lineage_root, secrets.token_bytes(32), "")
        self.upkeep = _NothingKept()
        self._steering = Steering(policy, clock, {"hbm": num_hbm_blocks})
        self._look_ahead = LookAhead(num_hbm_blocks, 0, self._steering.refresh)
        self._requests: dict[str, tuple[Conversation, list[BlockId]]] = {}
        self.hbm_order = self._steering.order("hbm")

    def on_new_request(
        self,
        request_id: str,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        tenant: str,
        num_hbm_tokens: int,
        key: QueueKey,
        conversation: Conversation | None = None,
        may_load: bool = True,
    ) -> Arrival:
        # All its full blocks are there, if what is left is less than one of them.
        is_stored = bool(chain) and len(token_ids) - num_hbm_tokens < num_hbm_tokens / len(chain)
        found = self._steering.arrive(chain, conversation, is_stored)
        self._requests[request_id] = (found, list(chain))
        num_hit = round(num_hbm_tokens * len(chain) / max(len(token_ids), 1))
        self._look_ahead.add(request_id, key, found, num_hit)
        return Arrival([], found)

    def build_connector_meta(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        for span in spans:
            self._look_ahead.start(span.request_id)
            if span.new_ids:
                self._requests[span.request_id][1].extend(span.new_ids)
        self._steering.poll()
        return None

    def request_finished(
        self,
        request_id: str,
        answer: Answer | None = None,
        new_ids: Sequence[BlockId] = (),
        new_tokens: Sequence[int] = (),
    ) -> None:
        conversation, chain = self._requests.pop(request_id, (None, []))
        if conversation is not None:
            self._look_ahead.remove(request_id)
            self._steering.leave(conversation, [*chain, *new_ids], answer)

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None) -> None:
        if (found := self._steering.find(chain)) is not None:
            self._steering.pin(found, seconds, expires_s)

    def stats(self) -> dict[str, object]:
        return {"policy": self._steering.as_dict()}


def hold_store(tiers: CacheTiers) -> StoreDirectory | None:
    """Become the owner of the store of these tiers, None where there is no disk tier: in a moment, without any model.

    Raises StoreError or StoreLockedError.
    """
    if not tiers.disk or tiers.path is None:
        return None
    from kvstore.disk.env import check_map_bytes  # loads lmdb

    check_map_bytes(Path(tiers.path), int(tiers.disk))
    return StoreDirectory.open(tiers.path)


def open_connector(
    tiers: CacheTiers,
    layout: KVLayout,
    model: str,
    fingerprint: Callable[[Path | None], str],
    device: torch.device,
    load: str = "auto",
    least_slots: int = 1,
    num_hbm_blocks: int = 0,
    policy: str = "auto",
    directory: StoreDirectory | None = None,
) -> KVConnector:
    """The connector for these tiers: none below HBM gives a NullConnector.

    fingerprint: 64 hexadecimal digits that name weights, rotation and layout; called with the file in which digests of
    weights may be cached. least_slots: blocks that the staging area needs when the CPU tier is off but the disk is on.
    num_hbm_blocks: of the engine's pool. policy: of eviction. directory: from `hold_store`, which is called here
    otherwise; the connector closes it, also when this raises.
    Raises ConfigError, StoreError or StoreLockedError.
    """
    if not tiers.cpu and not tiers.disk:
        return NullConnector(num_hbm_blocks, policy)
    from kvstore.store.assembly import open_tiered  # loads torch, lmdb and all that

    owned = hold_store(tiers) if directory is None else directory
    return open_tiered(tiers, layout, model, fingerprint, device, load, least_slots, num_hbm_blocks, policy, owned)
