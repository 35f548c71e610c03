"""A shared store in memory: every block that was put, and what a test wants to go wrong."""

import threading
from collections.abc import Sequence

from kvstore.blocks.records import ReadResult
from kvstore.errors import RemoteError
from kvstore.tiers.port import Chain, Done, Keeps, ReadJob, Stored, WriteBatch, Written
from kvstore.tiers.worker import TierWorker, WorkerLimits
from tests.support.waiting import wait_until


class MemoryShared:
    """fails: what every question raises. may_answer: while it is not set, nothing is answered. batches: of each batch
    of writes, which blocks of their chain came.
    """

    keeps, most_read_bytes = Keeps.BELIEVED, 4 << 20

    def __init__(self, url: str = "memory://") -> None:
        self._url = url
        self.blocks: dict[bytes, bytes] = {}
        self.fails: str | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.batches: list[list[int]] = []

    def __str__(self) -> str:
        return self._url

    def session(self) -> "MemoryShared":
        return self

    def ping(self) -> None:
        self.may_answer.wait()
        if self.fails is not None:
            raise RemoteError(self.fails)

    def ask(self, chain: Chain) -> list[bool]:
        self.ping()
        return [one in self.blocks for one in chain.ids]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        self.ping()
        results = []
        for job in jobs:
            found = self.blocks.get(job.record.block_id)
            if found is not None:
                job.view[:] = found
            results.append(ReadResult.MISSING if found is None else ReadResult.OK)
        return results

    def write(self, batch: WriteBatch) -> Written:
        self.ping()
        if batch.jobs:
            self.batches.append([job.index for job in batch.jobs])
        stored = []
        for job in batch.jobs:
            payload = job.fetch()
            if payload is not None:
                self.blocks[job.record.block_id] = bytes(payload)
            stored.append(Stored(job.record.block_id, "gone" if payload is None else None, 1))
        for one in batch.deletes:
            self.blocks.pop(one, None)
        return Written(stored)

    def close(self) -> None:
        """There is nothing to end."""


def worker_of(shared: MemoryShared) -> TierWorker:
    return TierWorker("remote", shared, lambda: None, WorkerLimits(gather_s=0.0))


def ended(tier: TierWorker, kind: type, count: int = 1) -> list[Done]:
    """What has ended, when so much has."""
    found: list[Done] = []

    def have_come() -> bool:
        found.extend(tier.completed())
        return len(found) >= count

    wait_until(have_come, f"{count} x {kind.__name__}")
    assert all(isinstance(one, kind) for one in found)
    return found
