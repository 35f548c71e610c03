"""A store for hosts whose threads may block: a call begins all of its blocks together, and returns when all have ended.

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
from kvstore.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)
STEP_S = 0.0005


@dataclass(frozen=True, slots=True)
class HostBlock:
    """parent: the key before it; position: that of its first token. Only writes use these two."""

    key: bytes
    parent: bytes | None
    position: int
    memory: memoryview


class WaitingStore:
    """Any thread may call it. timeout_s: how long a write is tried again while too many are waiting.

    No call returns while the disk still uses its memory. Otherwise a late read would overwrite whoever reused that
    memory, and a late write would store the wrong bytes. While a call takes longer than timeout_s, all other calls miss
    at once.
    """

    def __init__(self, store: BlockStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ended: dict[int, bool] = {}  # by ticket, until its caller has seen it
        self._num_open = 0
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
        """For each block, whether it is durable. They are begun in order, up to the first that is refused."""
        return self._run(blocks, self._write_when_it_may)

    def read(self, blocks: Sequence[HostBlock]) -> list[bool]:
        """For each block, whether its memory has what was stored; otherwise it may hold anything."""
        read = self._run(blocks, lambda block, until: self._begin(self._store.read_into, block.key, block.memory)[0])
        with suppress(StoreError):
            self._store.touch([block.key for block, ok in zip(blocks, read, strict=True) if ok])
        return read

    def _write_when_it_may(self, block: HostBlock, until: float) -> int | None:
        """The ticket. None if the write is refused, and waiting for others would not help or has not helped."""
        while True:
            ticket, num_open = self._begin(self._store.write, block.key, block.parent, block.position, block.memory)
            if ticket is not None or not num_open or self._store.is_degraded or time.monotonic() > until:
                return ticket
            self._collect()
            time.sleep(STEP_S)

    def _begin(self, what: Callable[..., int | None], *block: object) -> tuple[int | None, int]:
        """The ticket, and how many others had not ended before."""
        with self._lock:
            num_open, ticket = self._num_open, what(*block)
            self._num_open += ticket is not None
        return ticket, num_open

    def _run(self, blocks: Sequence[HostBlock], begin: Callable[[HostBlock, float], int | None]) -> list[bool]:
        until = time.monotonic() + self._timeout_s
        tickets: list[int] = []
        ended: list[bool] = []
        try:
            for block in blocks:
                ticket = None if self.is_late else begin(block, until)
                if ticket is None:
                    break
                tickets.append(ticket)
        except ConfigError as error:
            logger.warning("not stored: %s", error)
        except StoreError:
            pass  # closed
        with suppress(StoreError):  # the store was closed, which gave the memory back
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
        """Collect what has ended. Returns whether all of these have."""
        with self._lock:
            for done in self._store.poll():
                self._ended[done.ticket] = done.ok
                self._num_open -= 1
            return all(ticket in self._ended for ticket in tickets)

    def _count_late(self, change: int) -> None:
        with self._lock:
            self._num_late += change
