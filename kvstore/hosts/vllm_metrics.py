"""What the tier reports to vLLM's own metrics: a few counters, and every few seconds the store's gauges."""

from __future__ import annotations

import time
from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvstore.block_store import BlockStore

GAUGES_EVERY_S = 5.0
BYTES, BLOCKS, CAPACITY = "vllm:kvstore_disk_bytes", "vllm:kvstore_disk_blocks", "vllm:kvstore_disk_capacity_bytes"
DEGRADED = "vllm:kvstore_degraded"
FAILED_LOADS, FAILED_STORES = "vllm:kvstore_failed_loads", "vllm:kvstore_failed_stores"
RECOMPUTED = "vllm:kvstore_recomputed_chunks"
METRICS: dict[str, OffloadingMetricMetadata] = {
    BYTES: OffloadingGaugeMetadata("Bytes in use in the store's file."),
    BLOCKS: OffloadingGaugeMetadata("Chunks in the store."),
    CAPACITY: OffloadingGaugeMetadata("What the store's file may take."),
    DEGRADED: OffloadingGaugeMetadata("1 while the store cannot write: chunks are computed again instead of kept."),
    FAILED_LOADS: OffloadingCounterMetadata("Jobs of which a chunk was missing, damaged or not readable."),
    FAILED_STORES: OffloadingCounterMetadata("Jobs of which a chunk was not stored."),
    RECOMPUTED: OffloadingCounterMetadata("Lookups of stored chunks that were predicted to be computed sooner."),
}


class TierCounts:
    """counted: since the last call of `stats`, by the names of counters above."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._gauges_at = 0.0
        self.counted = Counter[str]()

    def stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call. vLLM asks at every step."""
        now = time.monotonic()
        if not self.counted and now < self._gauges_at:
            return None
        stats = OffloadingConnectorStats()
        for name, count in self.counted.items():
            stats.increase_counter(name, count)
        self.counted.clear()
        if now >= self._gauges_at:
            self._gauges_at = now + GAUGES_EVERY_S
            disk = self._store.stats()["disk"]
            for name, key in ((BYTES, "bytes"), (BLOCKS, "blocks"), (CAPACITY, "capacity_bytes")):
                stats.set_gauge(name, disk[key])
            stats.set_gauge(DEGRADED, int(self._store.is_degraded))
        return stats
