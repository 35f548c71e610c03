"""The seam between engine and store: ids, hashes and tensors cross it, never the engine's Request.

Verbs and meanings are those of vLLM's V1 KV connector, so that an adapter stays small.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore.blocks.holdings import Holdings
from kvstore.blocks.ids import BlockId, Lineage, lineage_root
from kvstore.blocks.records import Loss, SaveFence, TransferPlan
from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.memory.layout import States
from kvstore.policy.conversation import Answer, Conversation
from kvstore.policy.planner import ASSUMED_PRICE, LookAhead
from kvstore.policy.policies import EvictionOrder, Steering
from kvstore.stats import MOST_LOSSES, Losses
from kvstore.store.seam import Arrival, Lookup, Match, NewRequest, Prefilled, StepSpan, Upkeep

if TYPE_CHECKING:
    import torch


class KVConnector(Protocol):
    """The scheduler's verbs run in the control plane's thread, the worker's beside the model's forward.

    Without a store, verbs that return None do nothing.
    """

    compute_price: float  # of a token, in loads of one; as it was known when this was opened
    fingerprint: bytes  # names the model and layout whose KV is stored; empty without a store
    hbm_order: EvictionOrder  # of conversations in the engine's pool; its owner is the engine's thread
    root_secret: bytes  # with the fingerprint it makes lineage roots
    upkeep: Upkeep
    holdings: Holdings | None  # where all tiers, HBM included, report what they hold; None when no events are wanted
    hbm_losses: Losses | None  # where the engine's pool notes what it gives up; None where tiers below have that

    # -- scheduler side --------------------------------------------------------------------------------------------
    def find_copies(
        self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, is_in_hbm: Callable[[BlockId], bool]
    ) -> Lineage | None:
        """The lineage of the same tokens that begins with quantised copies; None unless more is stored with it. Called
        before a request is queued, if it may have inexact KV.
        """
        return None

    def on_new_request(self, request: NewRequest) -> Arrival:
        """A request was queued (not yet scheduled): prefetch may begin. Called again after a preemption."""
        ...

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        """How many tokens after `num_computed_tokens` can be loaded, at most `max_tokens`.

        Called when scheduling. If the answer says to compute some tokens first, it is called again for the running
        request after these.
        """
        return Match(Lookup.MISS)

    def update_state_after_alloc(
        self, request_id: str, block_numbers: Sequence[int], num_computed_tokens: int, num_external_tokens: int,
        rows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """HBM blocks were allocated for a hit of `num_external_tokens`; they go into the next plan.

        rows: of the engine's states, where those behind them go: the one, or of each of these blocks, 0 without any.
        """
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
        states: Sequence[tuple[int, int]] = (),
    ) -> None:
        """The request ended, was aborted or preempted; its HBM blocks are about to be released.

        answer: its length and end, from which returns are learned. new_ids, new_tokens: see `StepSpan`, but to its very
        end. states: to be saved, each behind so many of its tokens and in this row, which nobody changes before the
        next step.
        """

    def take_num_saved(self, request_id: str) -> int:
        """How many tokens of a running request are on their way to the tiers below since the last call: whole blocks
        that these did not have.
        """
        return 0

    def why_missing(self, request_id: str, block_id: BlockId, since_s: float) -> Loss:
        """Why a request is to compute a block that another one had at `since_s`, in seconds since the epoch."""
        ...

    # -- worker side -----------------------------------------------------------------------------------------------
    def register_kv_caches(
        self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]], states: States | None = None
    ) -> None:
        """Key and value cache of each layer, [num_blocks, block_size, num_kv_heads, head_dim]. Called once.

        states: of a model that keeps some.
        """
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
        """The forward pass has ended: hand over the saves.

        Never waits for a slow tier. Returns a fence for the next write to this step's saved tensors; None when they may
        be written at once.
        """
        return None

    def step_failed(self) -> None:
        """A step failed while it was planned or run: drop its transfers."""
        return

    def get_finished(self, prefilled: Sequence[Prefilled] = ()) -> tuple[int, ...]:
        """A step has ended. Returns HBM blocks whose load failed since the last call: they must be recomputed.

        prefilled: steps that were timed since, against which loads are weighed.
        """
        return ()

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until a transfer has ended since the last call. Called when all requests wait for their blocks."""
        return

    # -- beside them -----------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        """Hint that this chain is likely to be needed soon."""
        return

    def pin(
        self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        """Keep the conversation of this chain longer than others for this time; 0 ends a pin.

        A pin is a priority, not a lock: when nothing else is left, pinned blocks are evicted, too. expires_s: of
        `time.time()`; from then on it is evicted first; math.inf takes that back. None: as it was. tenant: whose pins
        may take half of the largest tier together; beyond that, the earlier ones end. None: they have no limit.
        """

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
        head: tuple[Sequence[BlockId], Lineage] | None = None,
    ) -> tuple[list[BlockId], Lineage] | None:
        """A chain for the kept `spans` of `token_ids` that reuses their KV; None when it has to be computed.

        head: the whole blocks that stand before the spans; none of these is exact then. If a tier does not have them,
        the answer is None.
        """
        return None

    def close(self) -> None:
        return


class _NothingKept(Upkeep):
    """The upkeep of no store: only what was learned can be shown."""

    def __init__(self, steering: Steering, losses: Losses) -> None:
        self._steering, self._losses = steering, losses

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        self._losses.note("deleted", None, *block_ids)
        return frozenset(block_ids), True

    def stats(self) -> dict[str, object]:
        return {"policy": self._steering.as_dict()}


class NullConnector(KVConnector):
    """No store: every lookup is a miss, and nothing is kept beyond HBM. Inherited verbs do nothing.

    num_hbm_blocks: of the engine's pool, whose order of eviction is given here too. policy: see
    `kvstore.policy.policies`.
    """

    def __init__(self, num_hbm_blocks: int = 0, policy: str = "auto", reports: bool = False) -> None:
        self.compute_price = ASSUMED_PRICE
        self.fingerprint = b""
        self.root_secret = secrets.token_bytes(32)
        self.holdings = Holdings(self._root) if reports else None
        self._steering = Steering(policy, time.time, {"hbm": num_hbm_blocks})
        self.hbm_losses = Losses(MOST_LOSSES)
        self.upkeep = _NothingKept(self._steering, self.hbm_losses)
        self._look_ahead = LookAhead(num_hbm_blocks, 0, self._steering.refresh)
        self._requests: dict[str, tuple[Conversation, list[BlockId]]] = {}
        self.hbm_order = self._steering.order("hbm")

    def _root(self, tenant: str) -> BlockId:
        return lineage_root(self.root_secret, self.fingerprint.hex(), tenant)

    def on_new_request(self, request: NewRequest) -> Arrival:
        chain, num_tokens, num_hit = request.chain, len(request.token_ids), request.num_hbm_tokens
        # All its full blocks are there, if what is left is less than one of them.
        is_stored = bool(chain) and num_tokens - num_hit < num_hit / len(chain)
        found = self._steering.arrive(chain, request.conversation, is_stored, request.name)
        self._requests[request.request_id] = (found, list(chain))
        self._look_ahead.add(request.request_id, request.key, found, round(num_hit * len(chain) / max(num_tokens, 1)))
        return Arrival((), found)

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
        states: Sequence[tuple[int, int]] = (),
    ) -> None:
        conversation, chain = self._requests.pop(request_id, (None, []))
        if conversation is not None:
            self._look_ahead.remove(request_id)
            self._steering.end_request(conversation, [*chain, *new_ids], answer)

    def why_missing(self, request_id: str, block_id: BlockId, since_s: float) -> Loss:
        return self.hbm_losses.why(block_id, since_s, has_disk=False)

    def pin(
        self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        if (found := self._steering.conversation_of(chain)) is not None:
            self._steering.pin(found, seconds, expires_s, tenant, len(chain))


def hold_store(tiers: CacheTiers) -> StoreDirectory | None:
    """Become the owner of these tiers' store, quickly and without a model; None if there is no disk tier.

    Raises ConfigError for a size that no disk tier can have, StoreError or StoreLockedError.
    """
    tiers.check_disk()
    return StoreDirectory.open(tiers.path) if tiers.disk and tiers.path is not None else None
