"""TieredConnector: the CPU tier and the disk behind the engine's seam, guarded by one lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.blocks.holdings import Holdings
from kvstore.blocks.ids import BlockId, Lineage, quantised_id, token_bytes
from kvstore.blocks.records import Loss, SaveFence, TransferPlan
from kvstore.forks import leave_to_parent
from kvstore.memory.tier import CpuTier
from kvstore.policy.conversation import Answer
from kvstore.stats import Losses
from kvstore.store.control_plane import KVStore
from kvstore.store.parts import DRAIN_S, DiskParts
from kvstore.store.requests import Tracked
from kvstore.store.seam import Arrival, Match, NewRequest, Prefilled, StepSpan, Upkeep
from kvstore.store.stored import ChainContent

if TYPE_CHECKING:
    from kvstore.memory.ranked import DataPlane, RankedTransfer


@dataclass(eq=False)
class StoreParts(DiskParts[KVStore]):
    """The parts of a store with memory between HBM and the disk. They end like DiskParts, `transfer` before and `arena`
    after those.
    """

    secret: bytes
    cpu: CpuTier
    arena: Any  # a `kvstore.memory.transfer.Arena`
    transfer: DataPlane | RankedTransfer
    holdings: Holdings | None = None

    def stats(self) -> dict[str, object]:
        return {**DiskParts.stats(self), "load_seconds": self.transfer.load_seconds.as_dict()}

    def share(self, chain: Sequence[BlockId], timeout_s: float) -> int:
        if (remote := self.store.remote) is None:
            return 0
        self.wait_until(lambda: not remote.stores.is_storing(set(chain)), timeout_s)
        with self.lock:
            return remote.num_shared(chain)


class TieredConnector:
    """A `KVConnector` with tiers below HBM. Made by `open_tiered`; it closes the parts that it is given."""

    def __init__(self, parts: StoreParts, fingerprint: str) -> None:
        self.parts = parts
        self.compute_price = parts.store.planner.compute_price
        self.fingerprint = bytes.fromhex(fingerprint)
        self.root_secret = parts.secret
        self.hbm_order = parts.store.steering.order("hbm")
        self.upkeep: Upkeep = parts
        self.holdings = parts.holdings
        self.hbm_losses: Losses | None = None
        self.register_kv_caches = parts.transfer.register
        self.wait_for_layer_load = parts.transfer.wait_for_layer_load
        self.save_kv_layer = parts.transfer.save_kv_layer
        self._num_seen = 0
        self._closed = False
        parts.keep_house()
        leave_to_parent(self, "the store", _closed=True)

    # -- scheduler side ----------------------------------------------------------------------------------------------
    def find_copies(
        self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, is_in_hbm: Callable[[BlockId], bool]
    ) -> Lineage | None:
        if not chain:
            return None
        with self.parts.lock:
            first = quantised_id(chain[0])
            if not (is_in_hbm(first) or self.parts.store.stored.holds(first)):
                return None
            content = ChainContent(list(chain), token_bytes(token_ids), lineage, "")
            return self.parts.store.find_copies(content, is_in_hbm)

    def on_new_request(self, request: NewRequest) -> Arrival:
        with self.parts.lock:
            store, history = self.parts.store, self.parts.learned.history
            store.poll(reads_ahead=False)
            is_stored = store.stored.has_end(request.chain, request.num_hbm_tokens)
            found = store.steering.arrive(request.chain, request.conversation, is_stored, request.name)
            if history is not None and (request.conversation is None or history.is_back(request.request_id)):
                after = found.first_block if found.number < 0 else None
                history.arrived(request.request_id, time.time(), found.name, len(request.token_ids), after)
            arrived = Tracked(
                list(request.chain), bytearray(token_bytes(request.token_ids)), request.lineage, request.tenant,
                request.request_id, request.key, found, request.may_load, request.turn_starts,
                request.shared_ends,
            )  # fmt: skip
            return Arrival(store.arrive(arrived, request.num_hbm_tokens), found, arrived.num_known)

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        with self.parts.lock:
            return self.parts.store.match(request_id, num_computed_tokens, max_tokens)

    def update_state_after_alloc(
        self, request_id: str, block_numbers: Sequence[int], num_computed_tokens: int, num_external_tokens: int,
        rows: Sequence[int] = (),
    ) -> None:  # fmt: skip
        with self.parts.lock:
            self.parts.store.load(request_id, block_numbers, num_computed_tokens, num_external_tokens, rows)

    def build_connector_meta(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        with self.parts.lock:
            for span in spans:
                if span.new_ids:
                    self.parts.store.extend(span.request_id, span.new_ids, span.new_tokens)
            self.parts.store.poll()
            return self.parts.store.plan(spans)

    def request_finished(
        self,
        request_id: str,
        answer: Answer | None = None,
        new_ids: Sequence[BlockId] = (),
        new_tokens: Sequence[int] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> None:
        with self.parts.lock:
            self.parts.store.extend(request_id, new_ids, new_tokens)
            request, history = self.parts.store.remove(request_id, answer), self.parts.learned.history
            if request is not None and states and (plan := self.parts.store.save_states(request, states)) is not None:
                self.parts.transfer.save_states(plan)
            if request is not None and (remote := self.parts.store.remote) is not None:
                remote.offer(request, states)
            if request is not None and history is not None:
                tip = request.chain[-1] if request.chain else None
                history.left(request_id, time.time(), answer or Answer(0), tip)

    def take_num_saved(self, request_id: str) -> int:
        with self.parts.lock:
            return self.parts.store.requests.take_num_saved(request_id)

    def why_missing(self, request_id: str, block_id: BlockId, since_s: float) -> Loss:
        with self.parts.lock:
            return self.parts.store.why_missing(request_id, block_id, since_s)

    # -- worker side -------------------------------------------------------------------------------------------------
    def start_load_kv(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self.parts.transfer.begin(plan, row_starts)
        self.parts.store.steps.begun(plan.ticket)

    def wait_for_save(self) -> SaveFence | None:
        return self.parts.transfer.end()

    def step_failed(self) -> None:
        """Drop whatever was planned: the step may have been cut off before anybody knew its plan."""
        with self.parts.lock:
            self.parts.transfer.end(succeeded=False)  # does nothing if it never began
            self.parts.store.steps.drop_unbegun()
            self.parts.store.poll()
            self.parts.store.steps.pop_failed_blocks()  # their requests have ended: others will get these blocks

    def get_finished(self, prefilled: Sequence[Prefilled] = ()) -> tuple[int, ...]:
        with self.parts.lock:
            for step in prefilled:
                self.parts.store.planner.computed(step.num_tokens, step.seconds)
            self.parts.store.poll()
            return self.parts.store.steps.pop_failed_blocks()

    def wait_for_progress(self, timeout_s: float) -> None:
        self._num_seen = self.parts.progress.wait(self._num_seen, timeout_s)
        with self.parts.lock:
            self.parts.store.poll()

    # -- beside them -------------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        content = ChainContent(list(chain), token_bytes(token_ids), lineage, tenant)
        with self.parts.lock:
            self.parts.store.poll()
            found = self.parts.store.find_copies(content, lambda _: False)
            if found is not None:
                content = ChainContent(found.with_copies(found.sources), content.tokens, found, tenant)
            self.parts.store.prefetch(content)

    def pin(
        self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        with self.parts.lock:
            self.parts.store.pin(chain, seconds, expires_s, tenant)

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
        head: tuple[Sequence[BlockId], Lineage] | None = None,
    ) -> tuple[list[BlockId], Lineage] | None:
        content = ChainContent(list(chain), token_bytes(token_ids), lineage, tenant)
        with self.parts.lock:
            self.parts.store.poll()
            spliced = self.parts.store.splice(content, spans, self.parts.secret, head)
            self.parts.store.poll()
            return spliced

    def close(self) -> None:
        """Write what is in flight, within DRAIN_S, and release the store. May be called twice."""
        if self._closed:
            return
        self.parts.transfer.close()
        self.parts.drain()
        self._closed = True
        remote = self.parts.store.remote
        has_ended = remote is None or remote.close(DRAIN_S)
        self.parts.close()
        if has_ended:  # otherwise something is still being read into it
            self.parts.arena.close()
