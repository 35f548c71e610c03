"""The parts of a store with tiers, put together by `assembly`, and the order in which they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier
from kvstore.policy.planner import Planner
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats
from kvstore.store.history import Learned
from kvstore.store.progress import Fence, Stage, StoreProgress
from kvstore.store.write_back import WriteBack
from kvstore.tiers.worker import TierWorker

DRAIN_S = 5.0  # how long to wait for work in flight when the store is closed


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
        """Poll until the condition holds. Returns False after the timeout, or when the store was closed."""

        def polled() -> bool:
            with self.lock:
                self.store.poll()
                return is_so()

        return self.progress.wait_until(polled, self.io.hurry, timeout_s)

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
