"""The thread that polls a store while nobody steps its engine, so that writes go on between turns.

It also checks that the store's files are still there, and writes what was learned.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kvstore.disk import env as disk_env
from kvstore.store.parts import DRAIN_S, DiskParts

REST_S = 0.05  # between two rounds; a step that runs meanwhile collects by itself
ROUND_S = 0.25  # the longest pause between rounds, for writes that are to be tried again
TOUCHED_S = 2.0  # how often times of last use are handed to the writer
LOOK_S = 0.5  # how often the store's files are looked for
LEARNED_S = 60.0  # how often what was learned is written


class Housekeeper:
    """Starts at once. Ends when the parts' progress is closed."""

    def __init__(self, parts: DiskParts[Any]) -> None:
        self._parts = parts
        self._thread = threading.Thread(target=self._keep_house, name="kvstore-housekeeping", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(DRAIN_S)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _keep_house(self) -> None:
        parts, seen = self._parts, 0
        touched_s = learned_s = looked_s = time.monotonic()
        while not parts.progress.closed:
            seen = parts.progress.wait(seen, ROUND_S)
            time.sleep(REST_S)
            if time.monotonic() - looked_s > LOOK_S:
                self._look_for_files()
                looked_s = time.monotonic()
            with parts.lock:
                try:
                    parts.store.poll()
                    if parts.store.disk is not None and time.monotonic() - touched_s > TOUCHED_S:
                        parts.store.disk.persist_touched()
                        touched_s = time.monotonic()
                except Exception:  # the top of a thread: without this, nothing more would be written between turns
                    parts.store.stats.housekeeping_errors += 1
            parts.learned.write_history(parts.lock)
            if time.monotonic() - learned_s > LEARNED_S:
                parts.write_learned()
                learned_s = time.monotonic()

    def _look_for_files(self) -> None:
        """Check that whoever opens the store next will find what is written."""
        parts = self._parts
        if parts.directory is None:
            return
        if parts.disk is not None:
            parts.disk.file.look()
        if parts.store.disk is not None and (loss := parts.directory.loss()) is not None:
            parts.store.disk.health.error = loss
        disk_env.tell_losses(parts.directory.path)
