"""Keeps what a store has learned of its traffic and its machine, and the history of its requests, across restarts.

If anything is wrong with the files, everything is learned anew. No request ever fails because of them.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

from kvstore.disk.learned import read_learned, write_learned
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.history import History

MOST_RATES = 15  # so many other models' rates are remembered


class Learned:
    """folder: None if nothing is to outlive the process. model: its name, by which rates are remembered."""

    def __init__(self, folder: Path | None, model: str, stats: StoreStats) -> None:
        self._folder, self._model, self._stats = folder, model, stats
        self.history = None if folder is None else History(folder)
        self._read: dict[str, object] = {}
        try:
            found = None if folder is None else read_learned(folder)
            if found is not None and not isinstance(found, dict):
                raise ValueError("not an object")
            self._read = found or {}
        except (OSError, ValueError):
            stats.policy_file_errors += 1
        rates = self._read.get("rates")
        self._rates: dict[str, object] = dict(rates) if isinstance(rates, dict) else {}

    @property
    def steering(self) -> object:
        """The steering's state from an earlier process."""
        return self._read.get("steering")

    def restore(self, planner: Planner) -> None:
        """Restore the rates of this model on this machine."""
        try:
            planner.restore(self._rates.get(self._model))
        except ValueError:
            self._stats.policy_file_errors += 1

    def write(self, steering: Steering, planner: Planner, lock: AbstractContextManager[object]) -> None:
        if self._folder is None:
            return
        try:
            with lock:
                self._rates.pop(self._model, None)
                rates = dict(list(self._rates.items())[-MOST_RATES:]) | {self._model: planner.state()}
                learned = {"steering": steering.state(), "rates": rates}
            write_learned(self._folder, learned)
        except (OSError, ValueError, TypeError):
            self._stats.policy_file_errors += 1

    def write_history(self, lock: AbstractContextManager[object], is_end: bool = False) -> None:
        if self.history is not None:
            with lock:
                lines = self.history.take_lines(time.time(), is_end)
            self.history.write(lines)
