"""The shape of `Engine.stats()`. Loads nothing."""

from typing import Any, NotRequired, TypedDict


class HistogramStats(TypedDict):
    """counts: for each of the bounds, in seconds, how many were at most that and above the one before; a last one of
    what is above all.
    """

    bounds: list[float]
    counts: list[int]
    sum: float


class TokenStats(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]


class HbmStats(TypedDict):
    """What is not required is there for models whose layers have windows."""

    blocks: int
    free_blocks: int
    cached_blocks: int
    evicted_blocks: int
    removed_blocks: int
    block_bytes: int
    block_size: int
    is_auto: bool
    window_slots: NotRequired[int]
    free_window_slots: NotRequired[int]


class CpuStats(TypedDict):
    blocks: int
    staging_blocks: int
    cached_blocks: int
    free_blocks: int
    evicted_blocks: int
    removed_blocks: int
    block_bytes: int


class DiskStats(TypedDict):
    """degraded: why nothing can be written; None if it can."""

    blocks: int
    bytes: int
    file_bytes: int
    capacity_bytes: int
    capacity: str
    broken: bool
    was_reset: bool
    lost: str | None
    codec: str
    reads: int
    writes: int
    failures: dict[str, int]
    read_seconds: HistogramStats
    write_seconds: HistogramStats
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    dirty_blocks: int
    queued_write_bytes: int
    reads_in_flight: int
    degraded: str | None


class SessionStats(TypedDict):
    """What is not required is there when several servers share the sessions."""

    dropped: int
    sessions: int
    turns: int
    refs: int
    pending_deletions: int
    damaged: int
    bytes: int
    commits: int
    committed: int
    refused: int
    failed: int
    largest_group: int
    queued: int
    lost: int
    last_failure: str | None
    missing: int
    servers: NotRequired[int]
    leases: NotRequired[int]
    conflicts: NotRequired[int]
    failures: NotRequired[int]
    unreachable: NotRequired[int]


class ProcessStats(TypedDict):
    state: str
    pid: int | None
    restarts: int
    requests: int


class EngineStats(TypedDict):
    """A tier that is not there has no entry. step: running totals in seconds. answers: see `AnswerStore.stats`. lost:
    what has become of the store's files; None while they are there. process: of an engine in a process of its own.
    replicas: the counters of each of several engines, whose totals the others are.
    """

    model: str
    requests: dict[str, int]
    tokens: TokenStats
    hbm: HbmStats
    step: dict[str, float]
    policy: dict[str, Any]
    sessions: SessionStats
    answers: dict[str, Any]
    cpu: NotRequired[CpuStats]
    disk: NotRequired[DiskStats]
    remote: NotRequired[dict[str, Any]]
    store: NotRequired[dict[str, Any]]
    lost: NotRequired[str | None]
    load_seconds: NotRequired[HistogramStats]
    kv_events: NotRequired[dict[str, int]]
    process: NotRequired[ProcessStats]
    replicas: NotRequired[list[dict[str, Any]]]
