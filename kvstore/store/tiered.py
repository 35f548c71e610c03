"""TieredConnector: the CPU tier and the disk behind the engine's seam, guarded by one lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.blocks.forest import Order
from kvstore.blocks.ids import BlockId, Lineage, lineage_root, token_bytes
from kvstore.blocks.records import SaveFence, TransferPlan
from kvstore.forks import leave_to_parent
from kvstore.policy.conversation import Answer, Conversation, QueueKey
from kvstore.store.housekeeping import Housekeeper
from kvstore.store.parts import StoreParts
from kvstore.store.requests import Tracked
from kvstore.store.seam import Arrival, Match, StepSpan, Upkeep
from kvstore.store.stored import ChainContent
from kvstore.store.upkeep import TieredUpkeep


class TieredConnector:
    """A `KVConnector` with tiers below HBM. Made by `open_connector`; it closes the parts that it is given."""

    def __init__(self, parts: StoreParts, fingerprint: str) -> None:
        self.parts = parts
        self.directory = parts.directory
        self.fingerprint = bytes.fromhex(fingerprint)
        self.lineage_root: Callable[[str, str], BlockId] = partial(lineage_root, parts.secret, fingerprint)
        self.hbm_order: Order = parts.store.steering.order("hbm")
        self.upkeep: Upkeep = TieredUpkeep(parts)
        self.register_kv_caches = parts.transfer.register
        self.wait_for_layer_load = parts.transfer.wait_for_layer
        self.save_kv_layer = parts.transfer.save_layer
        self._num_seen = 0
        self._closed = False
        self._housekeeper = Housekeeper(parts)
        leave_to_parent(self, "the store", _closed=True)

    # -- scheduler side ----------------------------------------------------------------------------------------------
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
        with self.parts.lock:
            store, history = self.parts.store, self.parts.learned.history
            store.poll(reads_ahead=False)
            found = store.steering.arrive(chain, conversation, store.stored.has_end(chain, num_hbm_tokens))
            tokens = bytearray(token_bytes(token_ids))
            request = Tracked(list(chain), tokens, lineage, tenant, request_id, key, found, may_load)
            if history is not None and (conversation is None or history.is_back(request_id)):
                after = found.first_block if found.number < 0 else None
                history.arrived(request_id, time.time(), found.name, len(token_ids), after)
            return Arrival(store.arrive(request, num_hbm_tokens), found)

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        with self.parts.lock:
            return self.parts.store.match(request_id, num_computed_tokens, max_tokens)

    def update_state_after_alloc(
        self, request_id: str, block_numbers: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        with self.parts.lock:
            self.parts.store.load(request_id, block_numbers, num_computed_tokens, num_external_tokens)

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
    ) -> None:
        with self.parts.lock:
            self.parts.store.extend(request_id, new_ids, new_tokens)
            request, history = self.parts.store.remove(request_id, answer), self.parts.learned.history
            if request is not None and history is not None:
                tip = request.chain[-1] if request.chain else None
                history.left(request_id, time.time(), answer or Answer(0), tip)

    # -- worker side -------------------------------------------------------------------------------------------------
    def start_load_kv(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self.parts.transfer.begin(plan, row_starts)
        self.parts.store.steps.begun(plan.ticket)

    def wait_for_save(self) -> SaveFence | None:
        return self.parts.transfer.end()

    def step_failed(self) -> None:
        """Of whatever was planned: the step may have been cut off before its plan was known to anybody."""
        with self.parts.lock:
            self.parts.transfer.end(succeeded=False)  # does nothing when it never began
            self.parts.store.steps.drop_unbegun()
            self.parts.store.poll()
            self.parts.store.steps.pop_failed_blocks()  # of requests that have ended: others will have these blocks

    def get_finished(self) -> tuple[int, ...]:
        with self.parts.lock:
            self.parts.store.poll()
            return self.parts.store.steps.pop_failed_blocks()

    def wait_for_progress(self, timeout_s: float) -> None:
        self._num_seen = self.parts.progress.wait(self._num_seen, timeout_s)
        with self.parts.lock:
            self.parts.store.poll()

    def step_measured(self, num_prefill_tokens: int, seconds: float) -> None:
        self.parts.store.planner.computed(num_prefill_tokens, seconds)

    # -- beside them -------------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        hint = Tracked(list(chain), token_bytes(token_ids), lineage, tenant)
        with self.parts.lock:
            self.parts.store.poll()
            self.parts.store.prefetch(hint)

    def pin(self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None) -> None:
        with self.parts.lock:
            self.parts.store.pin(chain, seconds, expires_s)

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        content = ChainContent(list(chain), token_bytes(token_ids), lineage, tenant)
        with self.parts.lock:
            self.parts.store.poll()
            spliced = self.parts.store.splice(content, spans, self.parts.secret)
            self.parts.store.poll()
            return spliced

    def stats(self) -> dict[str, object]:
        with self.parts.lock:
            loss = None if self.directory is None else self.directory.loss()
            load_seconds = self.parts.transfer.load_seconds.as_dict()
            return {**self.parts.store.as_dict(), "load_seconds": load_seconds, "lost": loss}

    def close(self) -> None:
        """Write what is in flight, within DRAIN_S, and give the store back. Twice does no harm."""
        if self._closed:
            return
        self.parts.transfer.close()
        self.parts.drain()
        self._closed = True
        self._housekeeper.join()
        self.parts.close()
        self.parts.arena.close()
