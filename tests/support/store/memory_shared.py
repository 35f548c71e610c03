"""A shared store in memory: every block that was put, and what a test wants to go wrong."""

import threading
from collections.abc import Sequence

from kvstore.blocks.records import ReadResult
from kvstore.disk.io_queue import Read
from kvstore.errors import RemoteError
from kvstore.remote.shared import Put, PutResult, SharedChain
from kvstore.remote.tier import RemoteDone, RemoteTier
from tests.support.waiting import wait_until


class MemoryShared:
    """fails: what every question raises. may_answer: while it is not set, nothing is answered. batches: of each put,
    which blocks of their chain came.
    """

    most_read_bytes = 4 << 20

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.fails: str | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.batches: list[list[int]] = []

    def __str__(self) -> str:
        return "memory://"

    def session(self) -> "MemoryShared":
        return self

    def ping(self) -> None:
        self.may_answer.wait()
        if self.fails is not None:
            raise RemoteError(self.fails)

    def ask(self, chain: SharedChain) -> list[bool]:
        self.ping()
        return [one in self.blocks for one in chain.ids]

    def read(self, reads: Sequence[Read]) -> list[ReadResult]:
        self.ping()
        results = []
        for read in reads:
            found = self.blocks.get(read.record.block_id)
            if found is not None:
                read.view[:] = found
            results.append(ReadResult.MISSING if found is None else ReadResult.OK)
        return results

    def put(self, chain: SharedChain, puts: Sequence[Put]) -> list[PutResult]:
        self.ping()
        self.batches.append([put.index for put in puts])
        results = []
        for put in puts:
            payload = put.fetch()
            if payload is not None:
                self.blocks[put.record.block_id] = bytes(payload)
            results.append(PutResult(put.record.block_id, "gone" if payload is None else None, 1))
        return results

    def delete(self, block_ids: Sequence[bytes]) -> None:
        self.ping()
        for one in block_ids:
            self.blocks.pop(one, None)

    def close(self) -> None:
        """There is nothing to end."""


def ended(tier: RemoteTier, kind: type, count: int = 1) -> list[RemoteDone]:
    """What has ended, when so much has."""
    found: list[RemoteDone] = []

    def have_come() -> bool:
        found.extend(tier.completed())
        return len(found) >= count

    wait_until(have_come, f"{count} x {kind.__name__}")
    assert all(isinstance(one, kind) for one in found)
    return found
