"""Counts what happens in a replay after its warm-up."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable

from kvstore.planning.jobs import Job
from kvstore.planning.replay_config import TIERS, ReplayConfig, ReplayResult


class Counting:
    """The counts of one replay. moved: returns how many blocks were moved and evicted so far, by kind."""

    def __init__(self, config: ReplayConfig, block_size: int, moved: Callable[[], Counter[str]]) -> None:
        self._config, self._block_size, self._moved = config, block_size, moved
        self._num_refused = self._num_prompt_tokens = self._num_blocks = self._num_hit_blocks = 0
        self._hits = Counter[str](), Counter[str]()  # tokens by tier: at arrival, and at schedule
        self._ttft_s = array("d")
        self._times_s: tuple[float, float] | None = None  # when the counting began, and when the last request ended
        self._before = Counter[str]()  # what was moved until it began

    def begin(self, now_s: float) -> None:
        self._times_s = (now_s, now_s)
        self._before = self._moved()

    def count_refused(self, number: int) -> None:
        self._num_refused += number >= self._config.warm_up

    def count_end(self, now_s: float) -> None:
        if self._times_s is not None:
            self._times_s = (self._times_s[0], now_s)

    def count_start(self, job: Job, num_hbm: int, ttft_s: float) -> None:
        """Count a request that starts with so many hits in HBM, unless it belongs to the warm-up."""
        if job.number < self._config.warm_up:
            return
        size = self._block_size
        self._num_prompt_tokens += job.request.num_tokens
        self._num_blocks += job.request.num_tokens // size
        self._num_hit_blocks += job.num_hit
        self._ttft_s.append(ttft_s)
        in_between = ["hbm"] * num_hbm + ["cpu"] * (job.num_hit - num_hbm)  # of what was not there before
        assert job.schedule is not None
        for hits, seen in zip(self._hits, (job.arrival, job.schedule), strict=True):
            for tier in (*seen[: job.num_hit], *in_between[len(seen) :]):
                hits[tier] += size

    def result(self) -> ReplayResult:
        assert self._times_s is not None, "the warm-up never ended"
        moved = self._moved()
        moved.subtract(self._before)
        ttft_s = sorted(self._ttft_s)
        at_arrival, at_schedule = ({tier: hits[tier] for tier in TIERS} for hits in self._hits)
        return ReplayResult(
            num_requests=len(ttft_s), num_refused=self._num_refused, num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_blocks * self._block_size, num_blocks=self._num_blocks,
            num_hit_blocks=self._num_hit_blocks, hits_at_arrival=at_arrival, hits_at_schedule=at_schedule,
            bytes_moved={way: moved[way] * self._config.block_bytes for way in ("save", "load", "write", "read")},
            num_evicted={tier: moved[tier] for tier in TIERS}, num_dropped_saves=moved["unsaved"],
            num_dropped_writes=moved["unwritten"], ttft_mean_s=math.fsum(ttft_s) / len(ttft_s) if ttft_s else 0.0,
            ttft_p90_s=ttft_s[-(-9 * len(ttft_s) // 10) - 1] if ttft_s else 0.0,
            duration_s=self._times_s[1] - self._times_s[0],
        )  # fmt: skip
