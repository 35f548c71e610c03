"""One believed tier over several servers: each has a part of all blocks, and a worker of its own. And what such a tier
is thought to have: what it has answered, and what was stored there; only a read finds out.

A block's id alone decides where it is, by rendezvous hashing: with one server more or fewer, only that one's part
moves. While one does not answer, its blocks are not there; the others are asked as ever. Control plane, one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import xxhash

from kvstore.blocks.ids import BlockId
from kvstore.tiers.port import Asked, Chain, Done, WriteJob
from kvstore.tiers.worker import TierWorker

MOST_KNOWN = 1 << 18  # blocks of a believed tier
KNOWN_S = 300.0  # how long its answers are believed
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
        return {
            one: (Chain(chain.root, tuple(chain.ids[at] for at in some), (), chain.behind), some)
            for one, some in places.items()
        }

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


class BelievedContents:
    """name: the tier's."""

    def __init__(self, tier: Believed, clock: Callable[[], float]) -> None:
        self.name, self._tier, self._clock = tier.name, tier, clock
        self._known: OrderedDict[BlockId, float] = OrderedDict()  # when each was last heard of

    def __len__(self) -> int:
        return len(self._known)

    def contains(self, block_id: BlockId) -> bool:
        """Whether the block is worth reading from there."""
        heard_s = self._known.get(block_id)
        return heard_s is not None and self._clock() - heard_s < KNOWN_S and not self.is_away(block_id)

    def is_away(self, block_id: BlockId) -> bool:
        """Whether the server that has the block, if any has, does not answer."""
        return self._tier.home(block_id).is_away

    def has_had(self, block_id: BlockId) -> bool:
        """Whether the block was there when it was last heard of, however long ago."""
        return block_id in self._known

    def answered(self, asked: Asked) -> None:
        for block_id, is_there in zip(asked.chain.ids, asked.there or (), strict=False):
            if is_there:
                self.learn(block_id)
            elif is_there is not None:
                self._known.pop(block_id, None)

    def learn(self, block_id: BlockId) -> None:
        """Note that a block is there."""
        self._known[block_id] = self._clock()
        self._known.move_to_end(block_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def lose(self, block_ids: Iterable[BlockId]) -> None:
        """Note that these are not there, or are about to be deleted."""
        for block_id in block_ids:
            self._known.pop(block_id, None)
