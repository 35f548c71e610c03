"""The parts of a store with tiers, put together by `assembly`: what wakes those who wait for its worker threads, the
thread that polls it while nobody steps, and the order in which the parts end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvstore.disk import env as disk_env
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.history import Learned
from kvstore.store.write_back import WriteBack
from kvstore.tiers.worker import TierWorker

DRAIN_S = 5.0  # how long to wait for work in flight when the store is closed
REST_S = 0.05  # between two rounds; a step that runs meanwhile collects by itself
ROUND_S = 0.25  # the longest pause between rounds, for writes that are to be tried again
TOUCHED_S = 2.0  # how often times of last use are handed to the writer
LOOK_S = 0.5  # how often the store's files are looked for
LEARNED_S = 60.0  # how often what was learned is written

Stage = Callable[[], Iterable[Hashable]]


class StoreProgress:
    """Worker threads wake whoever waits, who then polls the store under its lock. num: how many things have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num = 0
        self.closed = False

    def wake(self) -> None:
        """Called by worker threads."""
        with self._changed:
            self.num += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the number of ended things is no longer `seen`, or for the timeout. Returns the number."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.num != seen, timeout_s)
            return self.num


class Fence:
    """Whether what is in flight at one moment has ended, while other things come after it.

    stages: each names what is in flight there now. What leaves a stage may go on in the next one, so a stage is
    looked at when all before it have ended.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = deque(stages)
        self._left: set[Hashable] | None = None  # of the first stage

    def has_ended(self) -> bool:
        """Called with the store's lock, as often as something may have ended."""
        while self._stages:
            now = set(self._stages[0]())
            self._left = now if self._left is None else self._left & now
            if self._left:
                return False
            self._stages.popleft()
            self._left = None
        return True


class ControlPlane(Protocol):
    """A store's work between its users' calls (`control_plane.KVStore`, `host_blocks.HostBlocks`)."""

    stats: StoreStats
    steering: Steering
    planner: Planner

    @property
    def disk(self) -> WriteBack | None: ...

    @property
    def is_idle(self) -> bool: ...

    def stages(self) -> Sequence[Stage]:
        """What is in flight, or waits to be written, in the order in which it goes on: see `Fence`."""
        ...

    def poll(self) -> bool: ...

    def as_dict(self) -> dict[str, object]: ...

    def finish(self) -> None: ...

    def check_integrity(self, idle: bool) -> None: ...


S = TypeVar("S", bound=ControlPlane)


@dataclass(frozen=True, slots=True)
class DiskParts(Generic[S]):
    """lock: the control plane's; callers of `store` hold it. disk, directory: None without a disk."""

    directory: StoreDirectory | None
    lock: AbstractContextManager[Any]
    progress: StoreProgress
    store: S
    disk: DiskTier | None
    io: TierWorker
    learned: Learned

    @property
    def degraded(self) -> str | None:
        """Why nothing can be written to disk; None if it can."""
        return None if self.store.disk is None else self.store.disk.health.error

    def as_dict(self) -> dict[str, object]:
        """Gauges and counters. lost: what has become of the store's files; None while they are there."""
        return {**self.store.as_dict(), "lost": None if self.directory is None else self.directory.loss()}

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Poll until it is so, and let no batch of writes wait to become full. Returns False after the timeout, or when
        the store was closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.progress.closed:
            seen = self.progress.num
            self.io.hurry()
            with self.lock:
                self.store.poll()
                if is_so():
                    return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            self.progress.wait(seen, 0.05)
        return False

    def wait_for_flight(self, timeout_s: float | None) -> bool:
        """Wait until all that is in flight now has ended, or the disk cannot be written. Returns False after the
        timeout, or when the store was closed.
        """
        with self.lock:
            self.store.poll()
            fence = Fence(self.store.stages())
        return self.wait_until(lambda: self.degraded is not None or fence.has_ended(), timeout_s)

    def write_learned(self) -> None:
        self.learned.write(self.store.steering, self.store.planner, self.lock)

    def drain(self) -> None:
        """Finish writes in flight, within DRAIN_S. After that, nobody waits for progress any more."""
        self.write_learned()
        with self.lock:
            self.store.finish()
        self.wait_until(lambda: self.store.is_idle or self.degraded is not None, DRAIN_S)
        self.progress.close()

    def close(self) -> None:
        """Release files and memory, after `drain`."""
        self.learned.write_history(self.lock, is_end=True)
        ended = self.io.close(DRAIN_S)
        if self.disk is not None and ended:
            self.disk.close()
        if self.directory is not None and ended:  # else a write is stuck, and nobody may open the file until it ends
            self.directory.close()


class Housekeeper:
    """The thread that polls a store while nobody steps its engine, so that writes go on between turns. It also checks
    that the store's files are still there, and writes what was learned.

    Starts at once. Ends when the parts' progress is closed."""

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
