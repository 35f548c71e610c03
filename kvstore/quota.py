"""Limits of disk bytes per tenant: which write must make room among its own tenant's blocks, and who has too much.

Control plane, one thread. Counts and decides; which of a tenant's blocks go is the index's concern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.cpu_tier import CpuTier
from kvstore.disk_index import DiskIndex, IndexEntry, Stored
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.write_back import WriteBack

TRIM_BLOCKS = 256  # evicted in one round of the background's work: some milliseconds
MOST_FOR_ONE = 8  # blocks of the tenant that go for one that comes, while a limit that was lowered is not reached yet


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What is stored of a tenant's blocks. limit_bytes: of the disk; None: no limit."""

    disk_blocks: int = 0
    disk_bytes: int = 0
    cpu_blocks: int = 0
    limit_bytes: int | None = None


class Quotas:
    """Keeps each tenant's blocks on disk within its limit, at the cost of that tenant only.

    Blocks on their way to the disk can not be evicted, so a tenant may exceed its limit by what is queued (at most
    `write_back.MAX_QUEUED_BYTES`) until that is written and the next round of `trim`; and until the index of a disk
    that was just opened is loaded nothing is held to a limit. evict: gives up at least so many bytes of this tenant, or
    as many as may go, in the order of eviction. index: of the disk, None until it is loaded.
    """

    def __init__(
        self, evict: Callable[[DiskIndex, int, str], Sequence[IndexEntry]], index: Callable[[], DiskIndex | None]
    ) -> None:
        self._evict = evict
        self._index = index
        self._default: int | None = None
        self._own: dict[str, int] = {}
        self._queued: Counter[str] = Counter()  # bytes on their way to the disk
        self._suspects: dict[str, None] = {}  # who may have too much; the longest waiting first
        self.num_evicted = 0
        self.num_dropped = 0

    # -- limits ------------------------------------------------------------------------------------------------------
    def limit_of(self, tenant: str) -> int | None:
        """May be called from any thread."""
        return self._own.get(tenant, self._default)

    def is_limited(self, tenant: str) -> bool:
        return self.limit_of(tenant) is not None

    def set_limit(self, tenant: str | None, max_bytes: int | None) -> None:
        """tenant None: of all that have none of their own. max_bytes None takes a limit back. Raises ConfigError."""
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"the limit of a tenant is {max_bytes} bytes; give 0 or more, or None for no limit")
        if tenant is None:
            self._default = max_bytes
        elif max_bytes is None:
            self._own.pop(tenant, None)
        else:
            self._own[tenant] = max_bytes
        if (index := self._index()) is not None:
            self.suspect(index, list(index.stored()))

    # -- writes ------------------------------------------------------------------------------------------------------
    def admits(self, tenant: str, num_bytes: int) -> bool:
        """Whether a block of this size may be written; evicts others of its tenant for it. False: drop it."""
        limit, index = self.limit_of(tenant), self._index()
        if limit is None or index is None:
            return True
        excess = index.bytes_of(tenant) + self._queued[tenant] + num_bytes - limit
        if excess <= 0:
            return True
        freed = self._give_up(index, min(excess, MOST_FOR_ONE * num_bytes), tenant)
        if sum(entry.stored_bytes for entry in freed) >= num_bytes or index.bytes_of(tenant) + num_bytes <= limit:
            return True  # what exceeds the limit is being written, and is trimmed later
        self.num_dropped += 1
        return False

    def submitted(self, tenant: str, num_bytes: int) -> None:
        """A block is on its way to the disk."""
        self._queued[tenant] += num_bytes

    def ended(self, tenant: str, num_bytes: int) -> None:
        """Its write has ended, well or not."""
        self._queued[tenant] -= num_bytes
        if not self._queued[tenant]:
            del self._queued[tenant]

    # -- who has too much --------------------------------------------------------------------------------------------
    def suspect(self, index: DiskIndex, tenants: Iterable[str]) -> None:
        """Look at these: they may have more than they may."""
        self._suspects |= {tenant: None for tenant in tenants if self._excess(index, tenant) > 0}

    def trim(self, index: DiskIndex) -> None:
        """Evict from those that have too much: about TRIM_BLOCKS at most, the rest in later rounds."""
        left = TRIM_BLOCKS
        for tenant in list(self._suspects):
            if left <= 0:
                return
            del self._suspects[tenant]
            left -= 1 + self._trim_one(index, tenant, left)
            self.suspect(index, (tenant,))  # behind the others

    def _trim_one(self, index: DiskIndex, tenant: str, most: int) -> int:
        excess = self._excess(index, tenant)
        if excess <= 0:
            return 0
        stored = index.stored()[tenant]
        return len(self._give_up(index, min(excess, most * stored.num_bytes // stored.num_blocks), tenant))

    def _give_up(self, index: DiskIndex, num_bytes: int, tenant: str) -> Sequence[IndexEntry]:
        gone = self._evict(index, num_bytes, tenant)
        self.num_evicted += len(gone)
        return gone

    def _excess(self, index: DiskIndex, tenant: str) -> int:
        limit = self.limit_of(tenant)
        return 0 if limit is None else index.bytes_of(tenant) - limit

    # -- numbers -----------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, object]:
        """Counters; no tenant is named."""
        return {"limit_evictions": self.num_evicted, "limit_dropped_writes": self.num_dropped}

    def usage(self, cpu_blocks: Mapping[str, int]) -> dict[str, TenantUsage]:
        """Of every tenant with a block or a limit of its own."""
        index, found = self._index(), {}
        stored = {} if index is None else index.stored()
        for tenant in sorted({*stored, *cpu_blocks, *self._own}):
            on_disk = stored.get(tenant, Stored())
            found[tenant] = TenantUsage(
                on_disk.num_blocks, on_disk.num_bytes, cpu_blocks.get(tenant, 0), self.limit_of(tenant)
            )
        return found


def usage_of(cpu: CpuTier, disk: WriteBack | None) -> dict[str, TenantUsage]:
    """By tenant. What is on disk is known once its index is loaded. O(slots of the CPU tier)."""
    records = map(cpu.record, cpu.blocks())
    cpu_blocks = Counter(record.tenant for record in records if record is not None)
    if disk is not None:
        return disk.quotas.usage(cpu_blocks)
    return {tenant: TenantUsage(cpu_blocks=cpu_blocks[tenant]) for tenant in sorted(cpu_blocks)}
