"""A store for hosts whose threads wait: blocks of one call are begun together, and told of when all have ended.

Knows no host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.block_store import BlockStore
from kvstore.errors import StoreError

logger = logging.getLogger(__name__)
STEP_S = 0.0005


@dataclass(frozen=True, slots=True)
class HostBlock:
    """parent: the key before it; position: of its first token. Both count for writes alone."""

    key: bytes
    parent: bytes | None
    position: int
    memory: memoryview


class WaitingStore:
    """Any thread may call. timeout_s: how long a write may be refused because too much waits.

    No call returns while the disk still has its memory: whoever reused it would be written over, or store what it is
    not. A call that takes longer than timeout_s makes everything else miss at once, until it has ended.
    """

    def __init__(self, store: BlockStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ended: dict[int, bool] = {}  # by ticket, until its caller has seen it
        self._num_late = 0

    @property
    def is_late(self) -> bool:
        return self._num_late > 0

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with suppress(StoreError):  # closed
            if not self.is_late:
                return self._store.lookup(keys)
        return [False] * len(keys)

    def write(self, blocks: Sequence[HostBlock]) -> list[bool]:
        """Of each, whether it is durable. In their order; nothing is begun after the first that is refused."""
        return self._run(blocks, self._begin_write)

    def read(self, blocks: Sequence[HostBlock]) -> list[bool]:
        """Of each, whether its memory has what was stored; that of others may hold anything."""
        read = self._run(blocks, lambda block, until: self._store.read_into(block.key, block.memory))
        with suppress(StoreError):
            self._store.touch([block.key for block, ok in zip(blocks, read, strict=True) if ok])
        return read

    def _begin_write(self, block: HostBlock, until: float) -> int | None:
        while True:
            ticket = self._store.write(block.key, block.parent, block.position, block.memory)
            if ticket is not None or self._store.is_degraded or time.monotonic() > until:
                return ticket
            self._collect()
            time.sleep(STEP_S)

    def _run(self, blocks: Sequence[HostBlock], begin: Callable[[HostBlock, float], int | None]) -> list[bool]:
        until = time.monotonic() + self._timeout_s
        tickets: list[int] = []
        ended: list[bool] = []
        with suppress(StoreError):  # closed
            for block in blocks:
                ticket = None if self.is_late else begin(block, until)
                if ticket is None:
                    break
                tickets.append(ticket)
        with suppress(StoreError):  # closed, which gave the memory back
            ended = self._wait(tickets, until)
        return ended + [False] * (len(blocks) - len(ended))

    def _wait(self, tickets: list[int], until: float) -> list[bool]:
        is_late = False
        try:
            while not self._collect(tickets):
                if not is_late and time.monotonic() > until:
                    is_late = True
                    self._count_late(1)
                    logger.warning("the disk is silent for %g s; until it answers, KV is computed", self._timeout_s)
                time.sleep(STEP_S)
        finally:
            if is_late:
                self._count_late(-1)
        with self._lock:
            return [self._ended.pop(ticket) for ticket in tickets]

    def _collect(self, tickets: Sequence[int] = ()) -> bool:
        """Whether all of these have ended."""
        with self._lock:
            for done in self._store.poll():
                self._ended[done.ticket] = done.ok
            return all(ticket in self._ended for ticket in tickets)

    def _count_late(self, change: int) -> None:
        with self._lock:
            self._num_late += change
