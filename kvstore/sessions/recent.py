"""Limits the sessions that a store keeps in memory: the least recently used are dropped."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvstore.sessions import tables
from kvstore.sessions.record import SessionHead, SessionKey, Tombstone
from kvstore.sessions.storage import MemoryTables


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
