"""One believed tier over several servers: each has a part of all blocks, and a worker of its own.

A block's id alone decides where it is, by rendezvous hashing: with one server more or fewer, only that one's part
moves. While one does not answer, its blocks are not there; the others are asked as ever. Control plane, one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import xxhash

from kvstore.blocks.ids import BlockId
from kvstore.tiers.port import Chain, Done, WriteJob
from kvstore.tiers.worker import TierWorker

MOST_CHAINS = 32  # whose parts are remembered: each is stored in many batches

Believed: TypeAlias = "TierWorker | SpreadTier"


class SpreadTier:
    """What it does is what `TierWorker` does; reads and deletions are given to a block's `home`.

    workers: at least two, of one name, which count together from now on.
    """

    is_believed = True

    def __init__(self, workers: Sequence[TierWorker]) -> None:
        self.name, self.counts, self._workers = workers[0].name, workers[0].counts, workers
        self._seeds = [xxhash.xxh3_64_intdigest(str(worker.tier).encode()) for worker in workers]
        for worker in workers:
            worker.counts = self.counts
        self._parts = lru_cache(MOST_CHAINS)(self._split)

    def home(self, block_id: BlockId) -> TierWorker:
        """The worker of the server that has this block, if any has."""
        scores = [xxhash.xxh3_64_intdigest(block_id, seed) for seed in self._seeds]
        return self._workers[scores.index(max(scores))]

    def _split(self, chain: Chain) -> dict[TierWorker, tuple[Chain, list[int]]]:
        """What each server has of a chain, and the places of that."""
        places: dict[TierWorker, list[int]] = {}
        for at, block_id in enumerate(chain.ids):
            places.setdefault(self.home(block_id), []).append(at)
        return {one: (Chain(chain.root, tuple(chain.ids[at] for at in some)), some) for one, some in places.items()}

    def ask(self, number: int, chain: Chain) -> int:
        """Returns how many answers will come, each of them for a part."""
        return sum(worker.ask(number, part) for worker, (part, _) in self._parts(chain).items())

    def submit_writes(self, jobs: Sequence[WriteJob], chain: Chain) -> None:
        """Each server's part ends by itself."""
        for worker, (part, places) in self._parts(chain).items():
            own = [job for job in jobs if self.home(job.record.block_id) is worker]
            if own:
                worker.submit_writes([replace(job, index=bisect_left(places, job.index)) for job in own], part)

    def completed(self) -> list[Done]:
        return [done for worker in self._workers for done in worker.completed()]

    @property
    def error(self) -> str | None:
        """How many servers do not answer, and why; None if all do."""
        errors = [error for worker in self._workers if (error := worker.health.error) is not None]
        return f"{len(errors)} of {len(self._workers)}: {'; '.join(errors)}" if errors else None

    @property
    def is_refusing(self) -> bool:
        return all(worker.is_refusing for worker in self._workers)

    @property
    def stalled_s(self) -> float:
        return max(worker.stalled_s for worker in self._workers)

    @property
    def asking_s(self) -> float:
        return max(worker.asking_s for worker in self._workers)

    def as_dict(self) -> dict[str, object]:
        return {
            "url": ",".join(str(worker.tier) for worker in self._workers),
            "degraded": self.error,
            "full": any(worker.is_full for worker in self._workers),
            "breaks": sum(worker.health.num_failures for worker in self._workers),
            **self.counts.as_dict(),
        }

    def close(self, timeout_s: float) -> bool:
        have_ended = [worker.close(timeout_s) for worker in self._workers]
        return all(have_ended)
