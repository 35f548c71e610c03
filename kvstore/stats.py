"""Counters of a store, by what happened. Plain integers, written by the control plane's thread only."""

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class StoreStats:
    """Running totals since the store was opened; blocks unless the name says otherwise.

    dropped_saves: blocks that were not saved because the CPU tier or the save queue was full. orphan_saves: not saved
    because their parent is stored nowhere. dropped_writes: writes that failed; they are tried again, but for what does
    not fit on the disk at all.
    prefetched: reads begun before the request could start, or on a hint; prefetch_hits: blocks that were on disk when
    their request came, and in memory when it was first asked for; prefetch_wasted: read ahead and not loaded by the
    request that they were read for. cancelled_reads: dropped before they began. split_prefills: requests whose head was
    computed while their tail was read.
    load_failures, read_failures (by cause): all of them were computed instead. loaded_tokens: from the CPU tier, where
    those of the disk had been read to. housekeeping_errors: rounds of work in the background that ended in an error
    which nobody had foreseen. policy_file_errors: what was learned earlier could not be read or written.
    """

    saved: int = 0
    loaded: int = 0
    written: int = 0
    read: int = 0
    spliced: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
    prefetch_wasted: int = 0
    cancelled_reads: int = 0
    split_prefills: int = 0
    dropped_saves: int = 0
    orphan_saves: int = 0
    dropped_writes: int = 0
    disk_evictions: int = 0
    forgotten: int = 0
    given_up_splices: int = 0
    identity_mismatches: int = 0
    load_failures: int = 0
    read_failures: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int = 0
    housekeeping_errors: int = 0
    policy_file_errors: int = 0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
