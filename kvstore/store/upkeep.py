"""What an operator asks of a store: figures, eviction by hand, checks, compaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.blocks.ids import BlockId
from kvstore.blocks.records import Evict, Evicted
from kvstore.errors import DegradedError, StoreError
from kvstore.forks import leave_to_parent
from kvstore.store.deletion import Deletion
from kvstore.store.host_blocks import HostBlocks
from kvstore.store.parts import DiskParts


class TieredUpkeep:
    """See `kvstore.store.seam.Upkeep`."""

    def __init__(self, parts: DiskParts[Any], deletion: Deletion | HostBlocks) -> None:
        self._parts, self._deletion = parts, deletion
        leave_to_parent(self, "the store")

    def stats(self) -> dict[str, object]:
        with self._parts.lock:
            return self._parts.as_dict()

    def evict(self, what: Evict) -> tuple[dict[str, Evicted], frozenset[BlockId]]:
        with self._parts.lock:
            self._parts.store.poll()
            return self._deletion.evict(what)

    def forget(self, block_ids: Sequence[BlockId], timeout_s: float = 60.0) -> tuple[frozenset[BlockId], bool]:
        deletion = self._deletion
        with self._parts.lock:
            found = deletion.forget(block_ids)
        self._parts.wait_until(lambda: deletion.is_forgotten(found) or deletion.cannot_forget(found), timeout_s)
        with self._parts.lock:
            return frozenset(found), deletion.is_forgotten(found)

    def share(self, chain: Sequence[BlockId], timeout_s: float) -> int:
        remote = self._parts.store.remote
        if remote is None:
            return 0
        self._parts.wait_until(lambda: not remote.is_sharing(chain), timeout_s)
        with self._parts.lock:
            return remote.num_shared(chain)

    def flush(self, timeout_s: float | None = None) -> None:
        """See `Upkeep`. timeout_s: raises StoreError if it takes longer."""
        parts = self._parts
        has_ended = parts.wait_for_flight(timeout_s)
        if parts.progress.closed:
            raise StoreError("the store was closed; what was not on disk by then is computed again")
        if parts.degraded is not None:
            raise DegradedError(f"the disk tier cannot write: {parts.degraded}; what is in memory is kept and retried")
        if not has_ended:
            raise StoreError(f"what is written is not on disk after {timeout_s:g} s")
        if parts.disk is not None:
            parts.disk.sync()

    def verify(self, delete: bool = False) -> dict[str, object]:
        if self._parts.disk is None:
            return {}
        report = self._parts.disk.verify()
        if delete and report.bad_ids:
            with self._parts.lock:
                for block_id in report.bad_ids:
                    self._parts.store.disk.delete_tree(block_id)
        return report.as_dict()

    def compact(self, codec: str | None = None) -> dict[str, object]:
        disk = self._parts.disk
        if disk is None:
            return {}
        report = disk.compact(codec)
        for entries in disk.scan() if codec is not None else ():
            with self._parts.lock:
                for entry in entries:
                    self._parts.store.disk.contents.index.resize(entry.block_id, entry.stored_bytes)
        return report.as_dict()

    def check_integrity(self, idle: bool) -> None:
        store = self._parts.store
        if idle:
            self._parts.wait_until(lambda: store.is_idle, 10.0)
        with self._parts.lock:
            store.check_integrity(idle)
