"""Tables in memory, for stores without files, and which sessions stay in them."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.sessions import tables
from kvstore.sessions.record import SessionHead, SessionKey, Tombstone
from kvstore.sessions.sharing import Sharing
from kvstore.sessions.tables import View

ENTRY_BYTES = 200  # what a record takes beside its bytes


class _MemoryTable:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []  # sorted


class MemoryTables(View):
    """As `DiskTables`, one transaction at a time. Nothing fails in here, so nothing is rolled back."""

    sharing = Sharing()

    def __init__(self, names: Sequence[str]) -> None:
        self._tables = {name: _MemoryTable() for name in names}
        self._num_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[View]:
        with self._lock:
            yield self

    write = read

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._tables[table].values.get(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self.delete(table, key)
        it = self._tables[table]
        insort(it.keys, key)
        it.values[key] = value
        self._num_bytes += len(key) + len(value) + ENTRY_BYTES

    def delete(self, table: str, key: bytes) -> None:
        it = self._tables[table]
        value = it.values.pop(key, None)
        if value is not None:
            del it.keys[bisect_left(it.keys, key)]
            self._num_bytes -= len(key) + len(value) + ENTRY_BYTES

    def count(self, table: str) -> int:
        return len(self._tables[table].keys)

    def num_bytes(self) -> int:
        return self._num_bytes

    def scan(
        self, table: str, prefix: bytes = b"", reverse: bool = False, before: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        it = self._tables[table]
        step = -1 if reverse else 1
        end = prefix + b"\xff" * 32 if before is None else before
        at = bisect_left(it.keys, end) - 1 if reverse else bisect_left(it.keys, prefix)
        while 0 <= at < len(it.keys) and it.keys[at].startswith(prefix):
            yield it.keys[at], it.values[it.keys[at]]
            at += step

    def compact(self) -> None:
        """There is no file."""

    reopen = close = compact

    def is_lost(self) -> bool:
        return False


class RecentSessions:
    """The order in which sessions in memory were used. Any thread may note a use; one thread changes the tables."""

    def __init__(self, storage: MemoryTables, max_sessions: int) -> None:
        self.num_dropped = 0
        self._storage, self._max_sessions = storage, max_sessions
        self._keys: OrderedDict[SessionKey, None] = OrderedDict()  # the oldest use first
        self._lock = threading.Lock()

    def note_use(self, key: SessionKey) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)

    def keep_within(self, outcomes: Sequence[object]) -> None:
        """Called after each group of changes. Drops sessions over the limit; their blocks age out of the cache by
        themselves.
        """
        for outcome in outcomes:
            if isinstance(outcome, SessionHead):
                self.note_use(outcome.key)
            elif isinstance(outcome, Tombstone):
                with self._lock:
                    self._keys.pop(outcome.key, None)
        with self._storage.write() as view, self._lock:
            while view.count(tables.HEADS) > self._max_sessions:
                key, _ = self._keys.popitem(last=False)
                number = tables.number_of(view, key)
                if number is not None:  # else it was deleted while it was being read
                    tables.remove(view, key, number)
                    self.num_dropped += 1
