"""KVStoreTier: the store as a secondary tier of vLLM's tiered offloading. KVStoreConnector: vLLM's offloading itself,
which shows the tier vLLM's configuration.

vLLM loads both by name (`module_path`, `kv_connector_module_path`). It asks the tier, in its scheduler's process, for
chunks, by keys and from rows of its primary tier's memory. Nothing here waits for the disk except `drain_jobs` and
`shutdown`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm import __version__
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.block_store import BlockStore, check_block_bytes
from kvstore.config import parse_size
from kvstore.errors import ConfigError, StoreLockedError
from kvstore.hosts import vllm_identity
from kvstore.hosts.jobs import HostBlock, HostJob, HostJobs
from kvstore.hosts.read_ahead import ReadAhead
from kvstore.hosts.vllm_keys import RequestKeys, chain_of, end_of
from kvstore.hosts.vllm_memory import remove_left_memory
from kvstore.hosts.vllm_metrics import FAILED_LOADS, FAILED_STORES, METRICS, RECOMPUTED, TierCounts
from kvstore.hosts.wishes import Wishes, read_wishes
from kvstore.policy.planner import Planner

logger = init_logger("vllm.kvstore")
DRAIN_STEP_S = 0.001
MAX_FAILED = 1 << 16  # keys that are remembered
LOADS = ("auto", "always")


class KVStoreConnector(OffloadingConnector):
    """vLLM's own, unchanged. vLLM builds tiers without its configuration, which says what their KV depends on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


@dataclass(slots=True)
class _Asked:
    """A request as far as a tier sees it. name: its conversation's. first: how many tokens come before the first key
    looked up.
    """

    context: ReqContext
    keys: RequestKeys
    wishes: Wishes
    name: str
    is_known: bool = False  # to the store's order of eviction
    first: int | None = None
    scheduled_s: float | None = None


class KVStoreTier(SecondaryTierManager):
    """path: the store's directory, owned by this process. disk: its capacity. policy: the order of eviction. identity:
    a name for the weights, if they are not safetensors files. load: "auto", or "always" to load whatever it costs.

    Raises ConfigError and StoreError before vLLM serves.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
        path: str, disk: int | str, policy: str = "return", identity: str | None = None, load: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if load not in LOADS:
            raise ConfigError(f'"load" of KVStoreTier is {load!r}; give one of {", ".join(LOADS)}')
        folder = Path(path).expanduser()
        self._tokens = {  # in a chunk, by group
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._store = _open_store(offloading_spec, folder, disk, policy, identity, self.block_size_bytes)
        self._jobs = HostJobs(self._store)
        self._rows = primary_kv_view.cast("B")
        self._failed: dict[bytes, None] = {}  # could not be read, in this order, and were not written since
        self._ahead = ReadAhead(self._store, folder)
        self._chunk_tokens = min(self._tokens.values())
        self._planner = Planner(self.block_size_bytes, self._chunk_tokens, always=load == "always")
        self._counts = TierCounts(self._store)
        self._asked: dict[str, _Asked] = {}
        self._results: list[JobResult] = []

    # -- what is stored ----------------------------------------------------------------------------------------------
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        asked = self._of(req_context)
        self._tell_of(asked)
        if key in self._failed or not self._store.lookup((key,))[0]:
            return LookupResult.MISS
        end = end_of(key, req_context)
        begin = end - self._tokens_of(key)
        if asked.first is None:
            asked.first = begin
        num_blocks = max(0, end - asked.first) // self._chunk_tokens
        is_first = begin == asked.first  # a disk is tried for those of which nothing else would be loaded
        if self._planner.should_read(num_blocks, num_blocks, self._jobs.num_reading, may_try=is_first):
            return LookupResult.HIT
        self._counts.counted[RECOMPUTED] += 1
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Keys come in any order. Each block names the one before it, which may belong to an earlier job."""
        asked = self._of(job_metadata.req_context)
        if asked.scheduled_s is not None:
            num_tokens = sum(map(self._tokens_of, job_metadata.keys)) // len(self._tokens)
            if num_tokens:
                self._planner.computed(num_tokens, time.perf_counter() - asked.scheduled_s)
            asked.scheduled_s = None  # later blocks are decoded
        rows = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        self._jobs.write(job_metadata.job_id, self._in_order(rows, asked))

    def submit_load(self, job_metadata: TransferJob) -> None:
        rows = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
        self._jobs.read(job_metadata.job_id, [HostBlock(key, None, 0, self._row(row)) for key, row in rows])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def _collect(self) -> None:
        for job in self._jobs.collect():
            if job.is_load and job.num_bytes:
                self._planner.read(job.num_bytes, job.seconds)
            self._note_failures(job)
            is_whole = all(job.ok)
            if not is_whole:
                self._counts.counted[FAILED_LOADS if job.is_load else FAILED_STORES] += 1
            loaded = None
            if job.is_load and not is_whole:
                loaded = tuple(key for key, ok in zip(job.keys, job.ok, strict=True) if ok)
            self._results.append(JobResult(job.job_id, is_whole, loaded, job.seconds, job.num_bytes))

    def _note_failures(self, job: HostJob) -> None:
        for key, ok in zip(job.keys, job.ok, strict=True):
            if ok and not job.is_load:
                self._failed.pop(key, None)  # the next read shows whether it is sound
            elif not ok and job.is_load:
                self._failed[key] = None
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _in_order(self, rows: dict[OffloadKey, int], asked: _Asked) -> list[HostBlock]:
        return [
            HostBlock(
                key, parent, max(0, end_of(key, asked.context) - self._tokens_of(key)), self._row(rows[key]),
                _of_group(asked.name, get_offload_group_idx(key)),
            )
            for key, parent in asked.keys.before(rows).items()
        ]  # fmt: skip

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self.block_size_bytes : (row + 1) * self.block_size_bytes]

    def _tokens_of(self, key: OffloadKey) -> int:
        return self._tokens[get_offload_group_idx(key)]

    # -- requests ----------------------------------------------------------------------------------------------------
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """vLLM asks for its keys when it has reached the head of the queue. Until then its session's history is read
        ahead.
        """
        session = self._of(req_context).wishes.session
        if session is not None:
            self._ahead.arrives(session)
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id in context.new_req_ids:
            asked = self._asked.get(req_id)
            if asked is not None:
                self._tell_of(asked)
                asked.scheduled_s = time.perf_counter()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """vLLM submits nothing more for it; what it has submitted may still be in flight."""
        asked = self._asked.pop(req_context.req_id, None)
        if asked is None:
            return
        wishes, chains = asked.wishes, [chain_of(req_context, group) for group in self._tokens]
        for group, chain in zip(self._tokens, chains, strict=True):
            self._store.finish(_of_group(asked.name, group), chain)
            if chain and wishes.pin_s is not None:
                self._store.pin(chain, wishes.pin_s)
            if chain and wishes.ttl_s is not None:
                self._store.expire(chain, wishes.ttl_s)
        if not any(chains):
            return
        if wishes.session is not None and not wishes.prefetch:
            self._ahead.ended(wishes.session, chains)
        if wishes.forget:
            self._forget(req_context, wishes.session)

    def _forget(self, context: ReqContext, session: str | None) -> None:
        if session is not None:
            self._ahead.forget(session)
        chains = [chain_of(context, group) for group in self._tokens]
        unwanted = frozenset(key for chain in chains for key in chain)
        self._jobs.give_up(lambda job, key: key in unwanted)
        for chain in chains:
            self._store.forget(chain)

    def _of(self, context: ReqContext) -> _Asked:
        asked = self._asked.get(context.req_id)
        if asked is None:
            wishes, problem = read_wishes(context.kv_transfer_params, context.kv_hints)
            if problem:
                logger.warning("request %s: %s", context.req_id, problem)
            asked = _Asked(context, RequestKeys(context), wishes, self._name(wishes, context))
            self._asked[context.req_id] = asked
        return asked

    def _name(self, wishes: Wishes, context: ReqContext) -> str:
        """The name of the request's conversation. One name stands for one open request, whose end frees its blocks: a
        second one of the same session goes by its own.
        """
        session = None if wishes.prefetch else wishes.session
        if session is None or any(one.name == session for one in self._asked.values()):
            return context.req_id
        return session

    def _tell_of(self, asked: _Asked) -> None:
        """Tell the store of it once its keys are known, so that blocks of waiting and running requests stay."""
        if not asked.is_known:
            for group in self._tokens:
                if chain := chain_of(asked.context, group):
                    self._store.arrive(_of_group(asked.name, group), chain)
                    asked.is_known = True

    # -- looking after -----------------------------------------------------------------------------------------------
    def drain_jobs(self) -> None:
        while not self._jobs.is_idle:
            self._collect()
            time.sleep(DRAIN_STEP_S)
        self._collect()

    def shutdown(self) -> None:
        self._ahead.close()
        self._jobs.give_up(lambda job, key: True)  # the memory cannot be unmapped while there is a view of it
        self._store.close()
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return METRICS

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counts.stats()


def _of_group(name: str, group: int) -> str:
    """What the store calls a conversation's chain of this group of layers: each is one of its own."""
    return f"{name}\0{group}" if group else name


def _open_store(
    spec: Any, folder: Path, disk: int | str, policy: str, identity: str | None, row_bytes: int
) -> BlockStore:
    config = get_current_vllm_config_or_none()
    if config is None:
        raise ConfigError(
            'KVStoreTier does not see vLLM\'s configuration; in --kv-transfer-config, give "kv_connector": '
            '"KVStoreConnector" and "kv_connector_module_path": "kvstore.hosts.vllm", as `kvstore vllm-config` does'
        )
    vllm_identity.check_hashes(config)
    vllm_identity.check_steps(config)
    for text in vllm_identity.warnings(config, spec.offload_prompt_only):
        logger.warning("KVStoreTier: %s", text)
    check_block_bytes(row_bytes, parse_size(disk, "disk"))
    namespace = vllm_identity.namespace(spec, config, identity, row_bytes, folder, __version__)
    owner = f"vLLM with {spec.config.model.name}"
    try:
        store = BlockStore(folder, namespace=namespace, capacity=disk, policy=policy, owner=owner)
    except StoreLockedError as error:
        raise StoreLockedError(
            f'{error}. A store has one owner: give each vLLM a "path" of its own in its secondary tier', error.pid
        ) from error
    try:
        left = remove_left_memory(folder, spec.config.engine_id)
    except OSError as error:
        logger.warning("what a vLLM that was killed has left in /dev/shm stays there: %s", error)
    else:
        if left is not None:
            logger.info("removed %s, which a vLLM that was killed had left", left)
    return store
