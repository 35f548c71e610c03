"""TieredConnector: the CPU tier and the disk behind the engine's seam. Builds the parts and guards them with one lock.

A thread of its own collects what has ended while nobody steps the engine, so that writes go on between turns.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from kvstore.blocks.ids import BlockId, Lineage, lineage_root
from kvstore.blocks.records import Evict, Evicted, SaveFence, TransferPlan
from kvstore.config import CacheTiers
from kvstore.disk import env as disk_env
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.io_queue import BATCH_BYTES, IoQueue
from kvstore.disk.learned import read_learned, write_learned
from kvstore.disk.records import label
from kvstore.disk.tier import DiskTier
from kvstore.errors import DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.memory.arena import Arena
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout
from kvstore.memory.streams import CudaStreams
from kvstore.memory.tier import CpuTier
from kvstore.memory.transfer import Transfer
from kvstore.policy.conversation import Answer, Conversation, QueueKey
from kvstore.policy.planner import Planner
from kvstore.policy.steering import Steering
from kvstore.stats import StoreStats
from kvstore.store.history import History
from kvstore.store.lookup import Arrival, Identity, Match, Tracked
from kvstore.store.saving import StepSpan
from kvstore.store.store import KVStore
from kvstore.store.write_back import WriteBack

STAGING_BYTES = 64 << 20
DRAIN_S = 5.0  # for what is in flight when the store is closed
INDEX_S = 60.0  # for the index of a disk that was just opened, when blocks are to be chosen by it
_REST_S = 0.05  # between two rounds of the housekeeper: a step that runs meanwhile collects by itself
_ROUND_S = 0.25  # a round at the latest: what a step saved itself, writes that wait to be tried again
_TOUCHED_S = 2.0  # how often times of last use are handed to the writer
_LOOK_S = 0.5  # how often the store's files are looked for
_LEARNED_S = 60.0  # how often what was learned is written
_MOST_RATES = 15  # other models whose rates are remembered


class TieredConnector:
    """A `KVConnector` with tiers below HBM. Made by `open_connector`. directory: of the disk; it closes it."""

    def __init__(
        self,
        tiers: CacheTiers,
        layout: KVLayout,
        model: str,
        fingerprint: Callable[[Path | None], str],
        device: torch.device,
        load: str,
        least_slots: int,
        num_hbm_blocks: int,
        policy: str,
        directory: StoreDirectory | None,
    ) -> None:
        self.directory = directory
        with ExitStack() as opened:
            if self.directory is not None:
                opened.callback(self.directory.close)
            self._build(tiers, layout, model, fingerprint, device, load, least_slots, num_hbm_blocks, policy)
            opened.pop_all()

    def _build(
        self,
        tiers: CacheTiers,
        layout: KVLayout,
        model: str,
        fingerprint: Callable[[Path | None], str],
        device: torch.device,
        load: str,
        least_slots: int,
        num_hbm_blocks: int,
        policy: str,
    ) -> None:
        directory, clock = self.directory, time.time
        self._secret = os.urandom(32) if directory is None else directory.secret
        self._fingerprint = fingerprint(None if directory is None else directory.path / "weights.json")
        self._lock = threading.RLock()
        self._progress = threading.Condition()
        self._num_progress = self._num_seen = 0
        self._closed = False
        self._history = None if directory is None else History(directory.path)
        tiers.check_room(layout.block_bytes)
        num_slots = self._num_slots(tiers, layout, least_slots)
        self._arena = Arena(layout, num_slots, pin=device.type == "cuda")
        stats = StoreStats()
        capacities = {"hbm": num_hbm_blocks, "cpu": num_slots, "disk": int(tiers.disk) // layout.block_bytes}
        learned = self._read_learned(stats)
        self._steering = Steering(policy, clock, capacities, learned.get("steering"))
        stats.policy_file_errors += self._steering.state_was_bad
        self.hbm_order = self._steering.order("hbm")
        self._cpu = CpuTier(num_slots, self._arena.erase, bool(tiers.cpu), self._steering.order("cpu"))
        self._disk_tier = None
        if directory is not None:
            self._disk_tier = DiskTier(directory, int(tiers.disk), tiers.codec, itemsize=layout.dtype.itemsize)
        # Freed pages can be used two transactions later, so a batch must be small beside the file.
        batch_bytes = min(BATCH_BYTES, max(int(tiers.disk) // 32, layout.block_bytes))
        self._io = IoQueue(self._disk_tier, self._wake, batch_bytes=batch_bytes)
        disk = self._disk_tier
        write_back = None
        if disk is not None:
            tenant_bytes = None if tiers.disk_per_tenant is None else int(tiers.disk_per_tenant)
            write_back = WriteBack(
                disk, self._cpu, self._io, self._arena.view, stats, clock, self._steering, tenant_bytes
            )
        self._transfer = self._make_transfer(device)
        self._planner = Planner(layout.block_bytes, layout.block_size, always=load == "always")
        self._restore_rates(learned, stats)
        self.fingerprint = bytes.fromhex(self._fingerprint)
        identity = Identity(self.fingerprint, label(model), layout.block_size)
        self._store = KVStore(
            self._cpu, self._io, write_back, self._transfer, identity, self._secret, self._planner,
            self._arena.copy_tokens, stats, clock, self._steering,
        )  # fmt: skip
        self._housekeeper = threading.Thread(target=self._keep_house, name="kvstore-housekeeping", daemon=True)
        self._housekeeper.start()
        leave_to_parent(self, "the store", _closed=True)

    def _make_transfer(self, device: torch.device) -> Transfer | DeviceTransfer:
        if device.type == "cuda":
            return DeviceTransfer(self._arena, CudaStreams(device), self._wake)
        return Transfer(self._arena)

    # -- what was learned --------------------------------------------------------------------------------------------
    def _read_learned(self, stats: StoreStats) -> dict[str, object]:
        """Of an earlier process. Whatever is wrong with it, everything is learned anew."""
        try:
            found = None if self.directory is None else read_learned(self.directory.path)
            if found is not None and not isinstance(found, dict):
                raise ValueError("not an object")
        except (OSError, ValueError):
            stats.policy_file_errors += 1
            return {}
        return found or {}

    def _restore_rates(self, learned: dict[str, object], stats: StoreStats) -> None:
        """Rates are those of a model on this machine."""
        rates = learned.get("rates")
        self._rates: dict[str, object] = dict(rates) if isinstance(rates, dict) else {}
        try:
            self._planner.restore(self._rates.get(self._fingerprint))
        except ValueError:
            stats.policy_file_errors += 1

    def _write_learned(self) -> None:
        if self.directory is None:
            return
        try:
            with self._lock:
                self._rates.pop(self._fingerprint, None)
                rates = dict(list(self._rates.items())[-_MOST_RATES:]) | {self._fingerprint: self._planner.state()}
                learned = {"steering": self._steering.state(), "rates": rates}
            write_learned(self.directory.path, learned)
        except (OSError, ValueError, TypeError):
            self._store.stats.policy_file_errors += 1

    def _write_history(self, is_end: bool = False) -> None:
        if self._history is not None:
            with self._lock:
                lines = self._history.take_lines(time.time(), is_end)
            self._history.write(lines)

    @staticmethod
    def _num_slots(tiers: CacheTiers, layout: KVLayout, least_slots: int) -> int:
        if not tiers.cpu:
            return max(least_slots, STAGING_BYTES // layout.block_bytes)
        return int(tiers.cpu) // layout.block_bytes

    # -- waking and waiting ------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        """Called by worker threads."""
        with self._progress:
            self._num_progress += 1
            self._progress.notify_all()

    def _keep_house(self) -> None:
        seen, touched_s, learned_s = 0, time.monotonic(), time.monotonic()
        looked_s = learned_s
        while not self._closed:
            seen = self._wait_for_change(seen, _ROUND_S)
            time.sleep(_REST_S)
            if time.monotonic() - looked_s > _LOOK_S:
                self._look_for_files()
                looked_s = time.monotonic()
            with self._lock:
                try:
                    self._store.poll()
                    if (disk := self._store.disk) is not None and time.monotonic() - touched_s > _TOUCHED_S:
                        disk.persist_touched()
                        touched_s = time.monotonic()
                except Exception:  # the border of a thread: without it nothing would be written between turns
                    self._store.stats.housekeeping_errors += 1
            self._write_history()
            if time.monotonic() - learned_s > _LEARNED_S:
                self._write_learned()
                learned_s = time.monotonic()

    def _look_for_files(self) -> None:
        """Whether what is written can still be found by whoever opens the store next."""
        if self.directory is None:
            return
        if self._disk_tier is not None:
            self._disk_tier.file.look()
        if self._store.disk is not None and (loss := self.directory.loss()) is not None:
            self._store.disk.degraded = loss
        disk_env.tell_losses(self.directory.path)

    def _wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Returns the number of things that have ended, once it is not `seen` any more, or after the timeout."""
        with self._progress:
            self._progress.wait_for(lambda: self._closed or self._num_progress != seen, timeout_s)
            return self._num_progress

    def wait_for_progress(self, timeout_s: float) -> None:
        self._num_seen = self._wait_for_change(self._num_seen, timeout_s)
        with self._lock:
            self._store.poll()

    # -- scheduler side ----------------------------------------------------------------------------------------------
    def lineage_root(self, tenant: str, cache_salt: str) -> BlockId:
        return lineage_root(self._secret, self._fingerprint, tenant, cache_salt)

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
        with self._lock:
            self._store.poll(reads_ahead=False)
            is_stored = self._store.lookups.is_stored(chain, num_hbm_tokens)
            found = self._steering.arrive(chain, conversation, is_stored)
            request = Tracked(request_id, chain, token_ids, lineage, tenant, key, found, may_load)
            if self._history is not None and (conversation is None or self._history.is_back(request_id)):
                after = found.first_block if found.number < 0 else None
                self._history.arrived(request_id, time.time(), found.name, len(token_ids), after)
            return Arrival(self._store.arrive(request, num_hbm_tokens), found)

    def get_num_usable_blocks(self, request_id: str, num_hit_blocks: int) -> int:
        with self._lock:
            return self._store.num_usable(request_id, num_hit_blocks)

    def get_num_new_matched_tokens(self, request_id: str, num_computed_tokens: int, max_tokens: int) -> Match:
        with self._lock:
            return self._store.match(request_id, num_computed_tokens, max_tokens)

    def update_state_after_alloc(
        self, request_id: str, block_numbers: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        with self._lock:
            self._store.take(request_id, block_numbers, num_computed_tokens, num_external_tokens)

    def build_connector_meta(self, spans: Sequence[StepSpan]) -> TransferPlan | None:
        with self._lock:
            self._store.poll()
            return self._store.plan(spans)

    def request_finished(self, request_id: str, block_numbers: Sequence[int], answer: Answer | None = None) -> None:
        with self._lock:
            request = self._store.leave(request_id, answer)
            if request is not None and self._history is not None:
                tip = request.chain[-1] if request.chain else None
                calls_tool = answer is not None and answer.calls_tool
                self._history.left(request_id, time.time(), len(request.token_ids), tip, calls_tool)

    # -- worker side -------------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._transfer.register(kv_caches)

    def start_load_kv(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        self._transfer.begin(plan, row_starts)
        self._store.begun(plan.ticket)

    def wait_for_layer_load(self, layer: int) -> None:
        self._transfer.wait_for_layer(layer)

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        self._transfer.save_layer(layer, raw_key, value)

    def wait_for_save(self) -> SaveFence | None:
        return self._transfer.end()

    def step_failed(self, plan: TransferPlan | None) -> None:
        """Of whatever was planned: the step may have been cut off before its plan was known to anybody."""
        with self._lock:
            self._transfer.end(succeeded=False)  # does nothing when it never began
            self._store.drop_unbegun()
            self._store.drop_taken()
            self._store.poll()
            self._store.take_failed_blocks()  # of requests that have ended: others will have these blocks

    def get_finished(self) -> tuple[int, ...]:
        with self._lock:
            self._store.poll()
            return self._store.take_failed_blocks()

    def step_measured(self, num_prefill_tokens: int, seconds: float) -> None:
        self._planner.computed(num_prefill_tokens, seconds)

    # -- beside them -------------------------------------------------------------------------------------------------
    def prefetch(self, chain: Sequence[BlockId], token_ids: Sequence[int], lineage: Lineage, tenant: str) -> None:
        with self._lock:
            self._store.poll()
            self._store.prefetch(chain, token_ids, lineage, tenant)

    def pin(self, chain: Sequence[BlockId], seconds: float) -> None:
        with self._lock:
            found = self._store.find_conversation(chain)
            if found is not None:
                self._steering.pin(found, time.time() + seconds)

    def expire(self, chain: Sequence[BlockId], at_s: float | None) -> None:
        with self._lock:
            found = self._store.find_conversation(chain)
            if found is not None:
                self._steering.expire(found, math.inf if at_s is None else at_s)

    def splice(
        self,
        chain: Sequence[BlockId],
        token_ids: Sequence[int],
        lineage: Lineage,
        spans: Sequence[tuple[int, int]],
        tenant: str,
    ) -> tuple[list[BlockId], Lineage] | None:
        with self._lock:
            self._store.poll()
            spliced = self._store.splice(chain, token_ids, lineage, spans, tenant)
            self._store.poll()
            return spliced

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        with self._lock:
            found = self._store.forget(block_ids)
        self._wait_until(lambda: self._store.is_forgotten(found) or self._store.cannot_forget(found), timeout_s)
        with self._lock:
            return frozenset(found), self._store.is_forgotten(found)

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        disk = self._store.disk
        if disk is not None:  # waited for here, where nobody is held up
            self._wait_until(lambda: disk.index_loaded, INDEX_S)
        with self._lock:
            self._store.poll()
            return self._store.evict(what)

    def verify(self, delete: bool = False) -> dict[str, object]:
        if self._disk_tier is None:
            return {}
        report = self._disk_tier.verify()
        if delete and report.bad_ids:
            with self._lock:
                for block_id in report.bad_ids:
                    self._store.forget_tree(block_id)
        return report.as_dict()

    def compact(self) -> dict[str, object]:
        return {} if self._disk_tier is None else self._disk_tier.compact().as_dict()

    def flush(self) -> None:
        self._wait_until(lambda: self._store.is_idle or self._degraded is not None, None)
        if self._closed:
            raise StoreError("the store was closed; what was not on disk by then is computed again")
        if self._degraded is not None:
            raise DegradedError(f"the disk tier cannot write: {self._degraded}; what is in memory is kept and retried")
        if self._disk_tier is not None:
            self._disk_tier.sync()

    @property
    def _degraded(self) -> str | None:
        return None if self._store.disk is None else self._store.disk.degraded

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Poll until the condition holds; False when that took longer than given, or when the store was closed."""
        self._io.hurry()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._closed:
                return False
            with self._progress:
                seen = self._num_progress
            with self._lock:
                self._store.poll()
                if condition():
                    return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._io.hurry()
            self._wait_for_change(seen, 0.05)

    def stats(self) -> dict[str, object]:
        with self._lock:
            loss = None if self.directory is None else self.directory.loss()
            return {**self._store.as_dict(), "load_seconds": self._transfer.load_seconds.as_dict(), "lost": loss}

    def check_integrity(self, idle: bool) -> None:
        """With idle: waits for what is in flight first."""
        if idle:
            self._wait_until(lambda: self._store.is_idle, 10.0)
        with self._lock:
            self._store.check_integrity(idle)

    def close(self) -> None:
        """Write what is in flight, within DRAIN_S, and give the store back. Twice does no harm."""
        if self._closed:
            return
        self._transfer.close()
        self._write_learned()
        if self._store.disk is not None:
            with self._lock:
                self._store.finish()
        self._wait_until(lambda: self._store.is_idle or self._degraded is not None, DRAIN_S)
        with self._progress:
            self._closed = True
            self._progress.notify_all()
        self._housekeeper.join(DRAIN_S)
        self._write_history(is_end=True)
        ended = self._io.close(DRAIN_S)
        if self._disk_tier is not None and ended:
            self._disk_tier.close()
        if self.directory is not None and ended:  # else a write is stuck: nobody else may have the file meanwhile
            self.directory.close()
        self._arena.close()
