"""Counters of a store, by what happened, how long its transfers took, and what became of blocks that it lost.

Knows nobody who shows them.

What is in `StoreStats` is written by the control plane's thread only.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Loss

LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip


class Histogram:
    """How many observations were at most each bound, and their sum. One thread at a time observes."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_dict(self) -> dict[str, object]:
        """For each bound how many were at most that, and above the one before; a last count of what is above all."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class Counts:
    """Numbers, times and rates, by the names of their entries, and failures by their cause. Any thread may count."""

    def __init__(self, numbers: Sequence[str], times: Sequence[str], rates: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = dict.fromkeys(numbers, 0)
        self._times = {name: Histogram() for name in times}
        self.rates: dict[str, float | None] = dict.fromkeys(rates)  # running means
        self._failures: Counter[str] = Counter()

    def add(self, **entries: float) -> None:
        with self._lock:
            for name, value in entries.items():
                if name in self._times:
                    self._times[name].observe(value)
                elif name in self.rates:
                    known = self.rates[name]
                    self.rates[name] = value if known is None else 0.8 * known + 0.2 * value
                else:
                    self._numbers[name] += value

    def failed(self, cause: str) -> None:
        with self._lock:
            self._failures[cause] += 1

    def as_dict(self) -> dict[str, object]:
        with self._lock:
            times = {name: seconds.as_dict() for name, seconds in self._times.items()}
            return {**self._numbers, **times, **self.rates, "failures": dict(self._failures)}


MOST_LOSSES = 1 << 16  # blocks, at about 200 bytes each


class Losses:
    """What became of the blocks that were lost last. One thread at a time. most: how many; 0 keeps nothing.

    opened_s: since when it knows.
    """

    def __init__(self, most: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._most, self._clock = most, clock
        self._known: OrderedDict[BlockId, Loss] = OrderedDict()
        self.opened_s = clock()

    def note(self, cause: str, tier: str | None, *block_ids: BlockId, why: str | None = None) -> None:
        """These are lost. What is noted last counts."""
        if not self._most:
            return
        loss = Loss(cause, tier, self._clock(), why)
        for block_id in block_ids:
            self._known[block_id] = loss
            self._known.move_to_end(block_id)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def stored(self, block_id: BlockId) -> None:
        """It is there again."""
        self._known.pop(block_id, None)

    def get(self, block_id: BlockId) -> Loss | None:
        return self._known.get(block_id)

    def why(self, block_id: BlockId, since_s: float, has_disk: bool) -> Loss:
        """Why a block is nowhere that was there at `since_s`. has_disk: it could have outlived the process."""
        if (known := self.get(block_id)) is not None:
            return known
        if since_s >= self.opened_s:
            return Loss("unknown")
        cause, what = ("unknown", "") if has_disk else ("not_written", "no disk, and ")
        return Loss(cause, None, self.opened_s, f"{what}the engine has started since")


@dataclass(slots=True)
class StoreStats:
    """Running totals since the store was opened; blocks unless the name says otherwise.

    losses: what became of blocks that are gone.
    """

    saved: int = 0
    loaded: int = 0
    written: int = 0
    read: int = 0
    remote_read: int = 0
    spliced: int = 0
    prefetched: int = 0  # reads begun before the request could start, or on a hint
    prefetch_hits: int = 0  # on disk when their request came, and in memory when it was first asked for
    prefetch_wasted: int = 0  # read ahead and not loaded by the request that they were read for
    cancelled_reads: int = 0  # dropped before they began
    split_prefills: int = 0  # requests whose head was computed while their tail was read
    dropped_saves: int = 0  # the CPU tier or the save queue was full
    orphan_saves: int = 0  # not saved because their parent is stored nowhere
    dropped_writes: int = 0  # failed; tried again, but for what does not fit on the disk at all
    refused_writes: int = 0  # not written, nor kept in the CPU tier: their tenant has on disk what it may have
    disk_evictions: int = 0  # to make room
    disk_removals: int = 0  # deleted by hand or with their session, or damaged
    forgotten: int = 0
    given_up_splices: int = 0
    identity_mismatches: int = 0
    load_failures: int = 0  # computed instead
    read_failures: dict[str, int] = field(default_factory=dict)  # by cause; computed instead
    remote_read_failures: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int = 0  # from the CPU tier, where those of the disk had been read to
    given_up_tokens: int = 0  # were to be loaded, until a block of them did not come
    housekeeping_errors: int = 0  # rounds of work in the background that ended in an error which nobody had foreseen
    policy_file_errors: int = 0  # what was learned earlier could not be read or written
    losses: Losses = field(default_factory=Losses)

    def as_dict(self) -> dict[str, object]:
        counts = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "losses"}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in counts.items()}
