"""The parts of a store with tiers: what wakes those who wait for its worker threads, the thread that polls it while
nobody steps, what an operator asks of it, and the order in which the parts end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.disk import env as disk_env
from kvstore.disk.directory import StoreDirectory
from kvstore.disk.tier import DiskTier
from kvstore.errors import DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.store.context import Stage
from kvstore.store.history import Learned
from kvstore.tiers.worker import TierWorker

if TYPE_CHECKING:
    from kvstore.store.control_plane import KVStore
    from kvstore.store.host_blocks import HostBlocks

DRAIN_S = 5.0  # how long to wait for work in flight when the store is closed
REST_S = 0.05  # between two rounds; a step that runs meanwhile collects by itself
ROUND_S = 0.25  # the longest pause between rounds, for writes that are to be tried again
TOUCHED_S = 2.0  # how often times of last use are handed to the writer
LOOK_S = 0.5  # how often the store's files are looked for
LEARNED_S = 60.0  # how often what was learned is written
S = TypeVar("S", bound="KVStore | HostBlocks")


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


@dataclass(eq=False)
class DiskParts(Generic[S]):
    """See `kvstore.store.seam.Upkeep`. lock: the control plane's; callers of `store` hold it. directory: None without a
    disk.
    """

    directory: StoreDirectory | None
    lock: AbstractContextManager[Any]
    progress: StoreProgress
    store: S
    io: TierWorker
    learned: Learned

    def __post_init__(self) -> None:
        self.housekeeping: threading.Thread | None = None
        leave_to_parent(self, "the store")

    @property
    def disk(self) -> DiskTier | None:
        return None if self.store.disk is None else self.store.disk.tier

    @property
    def degraded(self) -> str | None:
        """Why nothing can be written to disk; None if it can."""
        return None if self.store.disk is None else self.store.disk.health.error

    # -- waiting -----------------------------------------------------------------------------------------------------
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

    # -- what an operator asks ---------------------------------------------------------------------------------------
    def stats(self) -> dict[str, object]:
        """Gauges and counters. lost: what has become of the store's files; None while they are there."""
        with self.lock:
            return {**self.store.as_dict(), "lost": None if self.directory is None else self.directory.loss()}

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        with self.lock:
            self.store.poll()
            return self.store.deletion.evict(what)

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        deletion = self.store.deletion
        with self.lock:
            found = deletion.forget(block_ids)
        self.wait_until(lambda: deletion.is_forgotten(found) or deletion.cannot_forget(found), timeout_s)
        with self.lock:
            return frozenset(found), deletion.is_forgotten(found)

    def flush(self, timeout_s: float | None = None) -> None:
        """See `Upkeep`. timeout_s: raises StoreError if it takes longer."""
        with self.lock:
            self.store.poll()
            fence = Fence(self.store.stages())
        has_ended = self.wait_until(lambda: self.degraded is not None or fence.has_ended(), timeout_s)
        if self.progress.closed:
            raise StoreError("the store was closed; what was not on disk by then is computed again")
        if self.degraded is not None:
            raise DegradedError(f"the disk tier cannot write: {self.degraded}; what is in memory is kept and retried")
        if not has_ended:
            raise StoreError(f"what is written is not on disk after {timeout_s:g} s")
        if self.disk is not None:
            self.disk.sync()

    def verify(self, delete: bool = False) -> dict[str, object]:
        if (disk := self.store.disk) is None:
            return {}
        report = disk.tier.verify()
        if delete:
            with self.lock:
                report.num_deleted = len({lost for bad in report.bad_ids for lost in disk.delete_tree(bad)})
        return report.as_dict()

    def compact(self, codec: str | None = None) -> dict[str, object]:
        if (disk := self.store.disk) is None:
            return {}
        report = disk.tier.compact(codec)
        for entries in disk.tier.scan() if codec is not None else ():
            with self.lock:
                for entry in entries:
                    disk.contents.index.resize(entry.block_id, entry.stored_bytes)
        return report.as_dict()

    def check_integrity(self, idle: bool) -> None:
        if idle:
            self.wait_until(lambda: self.store.is_idle, 10.0)
        with self.lock:
            self.store.check_integrity(idle)

    # -- while nobody steps ------------------------------------------------------------------------------------------
    def keep_house(self) -> None:
        """Start the thread that polls the store while nobody steps its engine, so that writes go on between turns. It
        also checks that the store's files are still there, and writes what was learned. It ends with `drain`.
        """
        self.housekeeping = threading.Thread(target=self._keep_house, name="kvstore-housekeeping", daemon=True)
        self.housekeeping.start()

    def _keep_house(self) -> None:
        seen = 0
        touched_s = learned_s = looked_s = time.monotonic()
        while not self.progress.closed:
            seen = self.progress.wait(seen, ROUND_S)
            time.sleep(REST_S)
            if time.monotonic() - looked_s > LOOK_S:
                self._look_for_files()
                looked_s = time.monotonic()
            with self.lock:
                try:
                    self.store.poll()
                    if self.store.disk is not None and time.monotonic() - touched_s > TOUCHED_S:
                        self.store.disk.persist_touched()
                        touched_s = time.monotonic()
                except Exception:  # the top of a thread: without this, nothing more would be written between turns
                    self.store.stats.housekeeping_errors += 1
            self.learned.write_history(self.lock)
            if time.monotonic() - learned_s > LEARNED_S:
                self.write_learned()
                learned_s = time.monotonic()

    def _look_for_files(self) -> None:
        """Check that whoever opens the store next will find what is written."""
        if self.directory is None:
            return
        if (disk := self.store.disk) is not None:
            disk.file.look()
            if (loss := self.directory.loss()) is not None:
                disk.health.error = loss
        disk_env.tell_losses(self.directory.path)

    def write_learned(self) -> None:
        self.learned.write(self.store.steering, self.store.planner, self.lock)

    # -- the end -----------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Finish writes in flight, within DRAIN_S. After that, nobody waits for progress any more."""
        self.write_learned()
        with self.lock:
            self.store.finish()
        self.wait_until(lambda: self.store.is_idle or self.degraded is not None, DRAIN_S)
        self.progress.close()
        if self.housekeeping is not None:
            self.housekeeping.join(DRAIN_S)

    def close(self) -> None:
        """Release files and memory, after `drain`."""
        self.learned.write_history(self.lock, is_end=True)
        ended = self.io.close(DRAIN_S)
        if self.disk is not None and ended:
            self.disk.close()
        if self.directory is not None and ended:  # else a write is stuck, and nobody may open the file until it ends
            self.directory.close()
