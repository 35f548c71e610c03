"""The service's own counters and the engine's, in Prometheus' text format.

A metric that vLLM has, too, has vLLM's name and meaning. Counters begin anew with the engine, as Prometheus expects.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvstore.engine.async_engine import AsyncEngine
from kvstore.service.http.telling import PHASES, Labels, Metrics
from kvstore.stats import Histogram

WAIT_S = 0.5
STUCK_S = 10.0  # longer than any step, unless the device is far too small for its model
FAILING_S = 60.0
PREFIX = "kvstore:"
VLLM_PREFIX = "vllm:"
VLLM_NAMES = frozenset({  # of what means the same there
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
})  # fmt: skip
TIERS = ("hbm", "cpu", "disk", "remote")
POLICIES = ("fifo", "lru", "return")
READ_FAILURES = ("corrupt", "mismatch", "missing", "failed")  # shown from the start, so that the first one is a rise
PREFILL_FAILURES = ("late", "unreachable", "down", "busy")
STEP_PHASES = ("schedule", "build", "forward", "sample", "update")
Values = Mapping[Any, float]  # by tuples of as many texts as there are labels, a type that mypy cannot infer
Stats = Mapping[str, Any]
OWN_PROCESS = CollectorRegistry()
ProcessCollector(registry=OWN_PROCESS)  # memory, descriptors, CPU time, under their standard names


# -- families --------------------------------------------------------------------------------------------------------
def counter(name: str, text: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    """One number, or one for each combination of labels."""
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), value)


def gauge(name: str, text: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), value)


def _filled(family: Any, value: float | Values) -> Metric:
    for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
        family.add_metric(labels, number)
    return family


def histogram(name: str, text: str, found: Mapping[Any, Stats], labels: Sequence[str] = ()) -> Metric:
    """found: what `kvstore.stats.Histogram.as_dict` returned, for each combination of labels."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for values, one in found.items():
        bounds = [*map(str, map(float, one["bounds"])), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(one["counts"]), strict=True)), one["sum"])
    return family


def as_vllm_shows(families: Sequence[Metric], model_name: str) -> Iterator[Metric]:
    """Those that vLLM has, too, under its names and with its label `model_name` beside ours."""
    for family in families:
        name = family.name.removeprefix(PREFIX)
        if name in VLLM_NAMES:
            shown = Metric(VLLM_PREFIX + name, family.documentation, family.type)
            for sample in family.samples:
                labels = {"model_name": model_name, **sample.labels}
                shown.add_sample(VLLM_PREFIX + sample.name.removeprefix(PREFIX), labels, sample.value)
            yield shown


# -- what an engine shows --------------------------------------------------------------------------------------------
def engine_families(stats: Stats) -> Iterator[Metric]:
    """stats: empty while no engine can be asked."""
    yield gauge("engine_up", "1 when the engine answers, 0 when it is gone or begins again.", float(bool(stats)))
    if not stats:
        return
    restarts = stats.get("process", {}).get("restarts", 0)
    yield counter("engine_restarts", "How often the engine's own process was started again.", restarts)
    if "replicas" in stats:
        up = {(str(one["rank"]),): float(one["process"]["state"] == "running") for one in stats["replicas"]}
        open_ones = {(str(one["rank"]),): one["process"]["requests"] for one in stats["replicas"]}
        yield gauge("replica_up", "1 while this engine of --data-parallel-size answers.", up, ["replica"])
        yield gauge("replica_requests", "Requests that run or wait in this engine.", open_ones, ["replica"])
    yield gauge("engine_info", "The model that is served.", {(stats["model"],): 1.0}, ["model"])
    yield from _loop(stats)
    yield from _hits(stats["tokens"])
    yield from _policy(stats["policy"])
    yield from _capacity(stats)
    yield from _sessions(stats["sessions"])
    answers = {(outcome,): stats["answers"][outcome] for outcome in ("committed", "dropped", "evicted", "failed")}
    yield counter("answer_changes", "Answers to know again in histories; failed: tries.", answers, ["outcome"])
    if "store" in stats:
        yield from _traffic(stats)
        yield from _failures(stats)
        yield from _latencies(stats)
    if "disk" in stats:
        yield from _disk(stats["disk"])
    if "remote" in stats:
        yield from _remote(stats["remote"])
    if "kv_events" in stats:
        yield from _events(stats["kv_events"])
    troubles = [stats.get("lost"), *(stats.get("disk", {}).get(name) for name in ("degraded", "broken", "lost"))]
    troubles += [stats["sessions"].get(name) for name in ("lost", "missing", "unreachable")]
    said = "1 when the disk tier cannot write at the moment, files of the store were lost, or shared sessions are away."
    yield gauge("degraded", said, float(any(troubles)))


def _loop(stats: Stats) -> Iterator[Metric]:
    requests, hbm, step = stats["requests"], stats["hbm"], stats["step"]
    in_use = hbm["blocks"] - hbm["free_blocks"]
    yield gauge("num_requests_running", "Requests in the running batch.", requests["running"])
    yield gauge("num_requests_waiting", "Requests waiting to be scheduled.", requests["waiting"])
    yield gauge("kv_cache_usage_perc", "Share of HBM blocks that requests hold; 1 is all.", in_use / hbm["blocks"])
    yield counter("num_preemptions", "Requests put back for HBM or another tenant.", requests["preemptions"])
    yield counter("requests_finished", "Requests that ended by themselves.", requests["finished"])
    yield counter("requests_aborted", "Requests that were ended early.", requests["aborted"])
    yield counter("engine_steps", "Steps of the engine.", step["num_steps"])
    seconds = {(phase,): step[f"{phase}_s"] for phase in STEP_PHASES}
    yield counter("engine_step_seconds", "Time in each phase of the steps.", seconds, ["phase"])


def _hits(tokens: Stats) -> Iterator[Metric]:
    """By the tier that held the block when the request arrived. A tier is queried for what the tiers above it did not
    have.
    """
    hits, prompt = tokens["cached_by_tier"], tokens["prompt_tokens"]
    asked, left = {}, prompt
    for tier in TIERS:
        asked[tier] = left
        left -= hits[tier]
    yield counter("prompt_tokens", "Prompt tokens of finished requests, cached ones included.", prompt)
    yield counter("generation_tokens", "Tokens generated for finished requests.", tokens["completion_tokens"])
    yield counter("cached_prompt_tokens", "Prompt tokens that no step had to compute.", tokens["cached_tokens"])
    yield counter("reencoded_tokens", "Prompt tokens reused at another position.", hits["reencoded"])
    yield counter("quantised_tokens", "Prompt tokens reused as quantised copies, or behind some.", hits["quantised"])
    yield counter("prefix_cache_queries", "Prompt tokens looked up in HBM.", asked["hbm"])
    yield counter("prefix_cache_hits", "Prompt tokens found in HBM.", hits["hbm"])
    yield counter("external_prefix_cache_queries", "Prompt tokens looked up below HBM.", asked["cpu"])
    yield counter("external_prefix_cache_hits", "Prompt tokens found below HBM.", sum(hits[tier] for tier in TIERS[1:]))
    queries = {(tier,): asked[tier] for tier in TIERS}
    yield counter("tier_query_tokens", "Prompt tokens that a tier was asked for.", queries, ["tier"])
    found = {(tier,): hits[tier] for tier in TIERS}
    yield counter("tier_hit_tokens", "Prompt tokens whose block a tier held on arrival.", found, ["tier"])


def _policy(policy: Stats) -> Iterator[Metric]:
    in_force = policy["in_force"].items()
    states = {(tier, name): float(name == used) for tier, used in in_force for name in POLICIES}
    yield gauge("eviction_policy", "1 for the policy of eviction in force on a tier.", states, ["tier", "policy"])
    yield gauge("conversations", "Conversations that eviction knows.", policy["num_conversations"])


def _capacity(stats: Stats) -> Iterator[Metric]:
    used, limit = {}, {}
    for tier in ("hbm", "cpu"):
        if pool := stats.get(tier):
            limit[(tier,)] = pool["blocks"] * pool["block_bytes"]
            used[(tier,)] = pool["cached_blocks"] * pool["block_bytes"] if pool["blocks"] else 0
    if disk := stats.get("disk"):
        limit[("disk",)], used[("disk",)] = disk["capacity_bytes"], disk["bytes"]
    yield gauge("tier_used_bytes", "Bytes of blocks that a tier holds.", used, ["tier"])
    yield gauge("tier_limit_bytes", "Bytes that a tier may take.", limit, ["tier"])
    evicted = {(tier, "room"): stats[tier]["evicted_blocks"] for tier in ("hbm", "cpu") if tier in stats}
    evicted |= {(tier, "removed"): stats[tier]["removed_blocks"] for tier in ("hbm", "cpu") if tier in stats}
    if disk:
        evicted[("disk", "room")] = stats["store"]["disk_evictions"]
        evicted[("disk", "removed")] = stats["store"]["disk_removals"]
    text = "Blocks given up: for room, or since they were deleted, damaged or gone from below."
    yield counter("tier_evicted_blocks", text, evicted, ["tier", "reason"])


def _traffic(stats: Stats) -> Iterator[Metric]:
    """In bytes of KV: a block on disk may be smaller, where it is compressed."""
    store, size = stats["store"], stats["cpu"]["block_bytes"]
    read = {("cpu",): store["loaded"] * size, ("disk",): store["read"] * size}
    into_cpu = store["saved"] + store["read"] + store["remote_read"] + store["spliced"]
    written = {("cpu",): into_cpu * size, ("disk",): store["written"] * size}
    if remote := stats.get("remote"):
        read[("remote",)], written[("remote",)] = remote["read_bytes"], remote["stored_bytes"]
    yield counter("tier_read_bytes", "KV read: from CPU into HBM, from disk or remote into CPU.", read, ["tier"])
    yield counter("tier_write_bytes", "KV written into the tier.", written, ["tier"])
    yield counter("loaded_tokens", "Tokens loaded into HBM.", store["loaded_tokens"])
    yield counter("spliced_blocks", "Blocks made of parts of others after a truncation.", store["spliced"])
    yield counter("prefetched_blocks", "Blocks read ahead of their request.", store["prefetched"])
    yield counter("prefetch_hit_blocks", "Of these, in memory when they were asked for.", store["prefetch_hits"])
    yield counter("prefetch_wasted_blocks", "Of these, not loaded by their request.", store["prefetch_wasted"])
    yield counter("split_prefills", "Requests whose head was computed and tail read.", store["split_prefills"])


def _failures(stats: Stats) -> Iterator[Metric]:
    store, block_tokens = stats["store"], stats["hbm"]["block_size"]
    dropped = {("full",): store["dropped_saves"], ("orphan",): store["orphan_saves"]}
    failed = {("cpu", "failed"): store["load_failures"]}
    failed |= {("disk", cause): 0 for cause in READ_FAILURES}
    failed |= {("disk", cause): count for cause, count in store["read_failures"].items()}
    if "remote" in stats:
        failed |= {("remote", cause): 0 for cause in READ_FAILURES}
        failed |= {("remote", cause): count for cause, count in store["remote_read_failures"].items()}
    lost = store["given_up_tokens"] + store["load_failures"] * block_tokens
    yield counter("dropped_saves", "Blocks not saved: no room, or their parent is not stored.", dropped, ["reason"])
    yield counter("dropped_writes", "Blocks whose write to disk failed, each try.", store["dropped_writes"])
    yield counter("refused_writes", "Blocks not written: their tenant may have no more.", store["refused_writes"])
    text = 'Blocks that did not come, and were computed; "corrupt": a checksum did not match.'
    yield counter("tier_read_failures", text, failed, ["tier", "cause"])
    yield counter("recomputed_tokens", "Tokens computed although stored, since a block did not come.", lost)
    yield counter("identity_mismatches", "Blocks that were not what their id says.", store["identity_mismatches"])
    yield counter("housekeeping_errors", "Rounds in the background that failed.", store["housekeeping_errors"])


def _latencies(stats: Stats) -> Iterator[Metric]:
    found = {("cpu",): stats["load_seconds"]}
    if "disk" in stats:
        found[("disk",)] = stats["disk"]["read_seconds"]
    if "remote" in stats:
        found[("remote",)] = stats["remote"]["read_seconds"]
    text = "Time of a load: all of a step from CPU into HBM, one block from disk, a batch of them from remote into CPU."
    yield histogram("tier_load_seconds", text, found, ["tier"])


def _disk(disk: Stats) -> Iterator[Metric]:
    causes = {tuple(_operation_and_cause(name)): count for name, count in disk["failures"].items()}
    yield histogram("disk_write_seconds", "Time of a transaction on disk.", {(): disk["write_seconds"]})
    yield gauge("disk_file_bytes", "Size of the data file.", disk["file_bytes"])
    yield gauge("disk_queued_write_bytes", "Handed to the writer, not durable yet.", disk["queued_write_bytes"])
    yield gauge("disk_dirty_blocks", "Blocks that wait to be handed to the writer.", disk["dirty_blocks"])
    yield gauge("disk_reads_in_flight", "Reads that are queued or running.", disk["reads_in_flight"])
    yield counter("disk_errors", "Operations on the disk tier that failed.", causes, ["operation", "cause"])


def _remote(remote: Stats) -> Iterator[Metric]:
    causes = {tuple(_operation_and_cause(name)): count for name, count in remote["failures"].items()}
    yield gauge(
        "remote_up", "1 while the remote tier answers, 0 while it is left alone.", float(not remote["degraded"])
    )
    yield gauge("remote_full", "1 after the remote tier took no more.", float(remote["full"]))
    yield counter("remote_breaks", "Times that the remote tier stopped answering.", remote["breaks"])
    yield histogram("remote_ask_seconds", "Time to hear which blocks of a chain it has.", {(): remote["ask_seconds"]})
    yield counter("remote_stored_blocks", "Blocks sent to the remote tier.", remote["stored"])
    yield gauge("remote_waiting_blocks", "Blocks that wait to be sent.", remote["waiting_blocks"])
    yield counter("remote_dropped_blocks", "Blocks not sent; they are offered again.", remote["dropped_blocks"])
    yield counter("remote_errors", "Operations on the remote tier that failed.", causes, ["operation", "cause"])
    if prefill := remote.get("prefill"):
        yield from _prefill(prefill)


def _prefill(prefill: Stats) -> Iterator[Metric]:
    """Of the server that computes prompts for this one."""
    up = float(not prefill["degraded"])
    yield gauge("prefill_up", "1 while the server of --prefill-url answers, 0 while all is computed here.", up)
    yield counter("prefill_computed", "Prompts that it has computed.", prefill["computed"])
    yield counter("prefill_blocks", "Their blocks that were in the shared tier then.", prefill["blocks"])
    failed = {(cause,): 0 for cause in PREFILL_FAILURES} | {(c,): n for c, n in prefill["failures"].items()}
    yield counter("prefill_failures", "Prompts that were computed here instead, and failed probes.", failed, ["cause"])
    yield histogram("prefill_seconds", "Time until a prompt was computed and stored there.", {(): prefill["seconds"]})


def _events(events: Stats) -> Iterator[Metric]:
    blocks = {(kind,): events[kind] for kind in ("stored", "removed")}
    requests = {("answered",): events["replays"], ("refused",): events["bad_replay_requests"]}
    yield counter("kv_event_batches", "Messages to routers.", events["batches"])
    yield counter("kv_event_blocks", "Blocks that routers were told of, by what became of them.", blocks, ["event"])
    yield counter("kv_event_pictures", "Times that readers were sent all that is held.", events["pictures"])
    yield counter("kv_event_replays", "Requests for messages that a reader missed.", requests, ["outcome"])


def _operation_and_cause(name: str) -> list[str]:
    """Of "write: no space", say; "sync" has one cause only."""
    operation, _, cause = name.partition(": ")
    return [operation, cause or "failed"]


def _sessions(sessions: Stats) -> Iterator[Metric]:
    changes = {(outcome,): sessions[outcome] for outcome in ("committed", "refused", "failed")}
    yield gauge("sessions", "Sessions that are stored.", sessions["sessions"])
    yield gauge("session_turns", "Turns of all stored sessions.", sessions["turns"])
    yield gauge("session_bytes", "What the records of the session store take.", sessions["bytes"])
    yield gauge("session_queue", "Changes of sessions that are not durable yet.", sessions["queued"])
    yield counter("session_commits", "Transactions of the session store.", sessions["commits"])
    yield counter("session_changes", "Changes of sessions, by how they ended.", changes, ["outcome"])
    if "servers" in sessions:
        yield gauge("session_servers", "Servers that share the sessions.", sessions["servers"])
        yield counter("session_conflicts", "Transactions on shared sessions that ran again.", sessions["conflicts"])
        yield counter(
            "session_store_failures", "Calls of the shared sessions' server that failed.", sessions["failures"]
        )
    yield gauge("damaged_sessions", "Sessions in which damage was found.", sessions["damaged"])


# -- the engine's counters ------------------------------------------------------------------------------------------
class RecentStats:
    """The counters of one engine. Used in the server's event loop only.

    failing_s: for so long a failure is told, unless something is stored sooner.
    """

    def __init__(self, engine: AsyncEngine, failing_s: float = FAILING_S) -> None:
        self._engine, self._failing_s = engine, failing_s
        self._known: dict[str, Any] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0  # when the last question was put, on the monotonic clock
        self._outcomes = (0, 0)  # of changes to sessions: failed, stored
        self._failing_until_s = 0.0  # monotonic

    async def get(self) -> dict[str, Any]:
        """The counters; older ones while a long step keeps the engine from answering."""
        if self._asking is None or self._asking.done():
            self._asking, self._asked_s = asyncio.create_task(self._ask()), time.monotonic()
        await asyncio.wait({self._asking}, timeout=WAIT_S)
        return self._known

    @property
    def is_stuck(self) -> bool:
        """Whether a query has been open for longer than any step takes."""
        is_open = self._asking is not None and not self._asking.done()
        return is_open and time.monotonic() > self._asked_s + STUCK_S

    @property
    def sessions_fail(self) -> bool:
        """Whether turns recently could not be stored."""
        return time.monotonic() < self._failing_until_s

    async def _ask(self) -> None:
        try:
            self._known = {**await self._engine.call(self._engine.engine.stats)}
        except Exception as error:  # whatever it is, it must not be /health that fails
            self._known = {"error": type(error).__name__}
            return
        sessions = self._known.get("sessions") or {}
        before, self._outcomes = self._outcomes, (sessions.get("failed", 0), sessions.get("committed", 0))
        if self._outcomes[0] > before[0]:
            self._failing_until_s = time.monotonic() + self._failing_s
        elif self._outcomes[1] > before[1]:
            self._failing_until_s = 0.0


# -- the page --------------------------------------------------------------------------------------------------------
def metrics_page(counts: Metrics, stats: Stats, vllm_model: str | None = None) -> bytes:
    """The page. stats: `Engine.stats()`, empty when no engine answers. vllm_model: the model's name, where vLLM's names
    are shown, too.
    """
    families = [*_of_requests(counts), *engine_families(stats)]
    if vllm_model is not None:
        families += as_vllm_shows(families, vllm_model)
    families += OWN_PROCESS.collect()
    return generate_latest(SimpleNamespace(collect=lambda: families))


def _of_requests(counts: Metrics) -> Iterator[Metric]:
    yield counter("http_requests", "HTTP requests.", counts.requests, ["route", "method", "status"])
    yield _shown("http_request_duration_seconds", "Until the answer's end.", counts.http_s, ["route", "method"])
    yield counter("refused_requests", "Requests turned away, by reason.", counts.refusals, ["reason"])
    yield counter("request_success", "Answers, by how they ended.", counts.finished, ["finished_reason"])
    text = "Prompt tokens that were computed although an earlier request of their conversation had them."
    yield counter("miss_tokens", text, counts.misses, ["cause"])
    yield _shown("time_to_first_token_seconds", "From arrival to the first token.", counts.ttft_s, ["route"])
    yield _shown("inter_token_latency_seconds", "Between two pieces of an answer.", counts.itl_s, ["route"])
    text = "Mean time of a token after the first, of each answer."
    yield _shown("request_time_per_output_token_seconds", text, counts.per_token_s, ["route"])
    yield _shown("e2e_request_latency_seconds", "From arrival to the last token.", counts.e2e_s, ["route"])
    for phase, found in counts.phases.items():
        yield histogram(f"request_{phase}_time_seconds", PHASES[phase], {(): found.as_dict()})
    yield histogram("request_prompt_tokens", "Prompt tokens of an answer.", {(): counts.prompt_tokens.as_dict()})
    text = "Tokens generated for an answer."
    yield histogram("request_generation_tokens", text, {(): counts.generation_tokens.as_dict()})


def _shown(name: str, text: str, found: dict[Labels, Histogram], labels: Sequence[str]) -> Metric:
    return histogram(name, text, {values: one.as_dict() for values, one in found.items()}, labels)
