"""vLLM's tiered offloading on its CPU backend: a spec whose worker copies from memory to memory.

vLLM loads it (`spec_module_path`), and it imports vLLM. vLLM's own spec only takes GPUs. The rest of it (the primary
tier's memory, its manager, and the tiers behind it) is used here unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


@dataclass(frozen=True, slots=True)
class Pages:
    """One tensor of the model's cache and its place in the chunks.

    cache: [num_blocks, page bytes]. chunks: [num_chunks, blocks per chunk, page bytes]. num_bytes: how many bytes of a
    page are not padding.
    """

    cache: Any
    chunks: Any
    num_bytes: int


class MemcpyWorker(OffloadingWorker):
    """Copies at once, in the thread that computes: nothing else runs there at the start of a step.

    groups: the pages of each group of layers.
    """

    def __init__(self, region: SharedOffloadRegion, groups: Sequence[Sequence[Pages]], blocks_per_chunk: int) -> None:
        self._region = region
        self._groups = groups
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        started, num_bytes = time.perf_counter(), 0
        for pages, block, chunk, place in self._copies(src_spec, dst_spec.block_ids):
            np.copyto(pages.chunks[chunk, place, : pages.num_bytes], pages.cache[block, : pages.num_bytes])
            num_bytes += pages.num_bytes
        return self._finish(job_id, num_bytes, started)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        """expedited: since 0.33, vLLM waits for such a load within the step. Here every load is done at once."""
        started, num_bytes = time.perf_counter(), 0
        for pages, block, chunk, place in self._copies(dst_spec, src_spec.block_ids):
            np.copyto(pages.cache[block, : pages.num_bytes], pages.chunks[chunk, place, : pages.num_bytes])
            num_bytes += pages.num_bytes
        return self._finish(job_id, num_bytes, started)

    def _copies(self, blocks: GPULoadStoreSpec, chunk_ids: Any) -> Iterator[tuple[Pages, int, int, int]]:
        """For each page, the block, the chunk, and the block's place in the chunk.

        A group's blocks follow each other in the request from `block_indices` on. The first may lie in the middle of a
        chunk.
        """
        block_ids, chunk_list = blocks.block_ids.tolist(), chunk_ids.tolist()
        first_block = first_chunk = 0
        for group, num_blocks, index in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if not num_blocks:
                continue
            skipped = index % self._blocks_per_chunk
            for i in range(num_blocks):
                chunk, place = divmod(skipped + i, self._blocks_per_chunk)
                for pages in group:
                    yield pages, block_ids[first_block + i], chunk_list[first_chunk + chunk], place
            first_block += num_blocks
            first_chunk += -(-(skipped + num_blocks) // self._blocks_per_chunk)

    def _finish(self, job_id: int, num_bytes: int, started: float) -> bool:
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - started))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: every job is done when its submission returns."""

    def shutdown(self) -> None:
        self._groups = ()  # the region cannot be unmapped while there is a view of it
        self._region.cleanup()


class CPUTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` for models that run on a CPU."""

    _worker: MemcpyWorker | None

    def create_worker(self, kv_caches: CanonicalKVCaches) -> MemcpyWorker:
        if self.config.canonical_layout:
            raise ValueError(
                "canonical_layout is true in kv_connector_extra_config, which CPUTieringSpec cannot serve; remove it"
            )
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        caches, chunks = [], []
        for one in kv_caches.tensors:
            view = region.create_next_worker_view(one.page_size_bytes * self.blocks_per_chunk).numpy()
            caches.append(one.tensor.numpy())
            chunks.append(view.reshape(self.num_chunks, self.blocks_per_chunk, one.page_size_bytes))
            assert np.shares_memory(chunks[-1], view), "the chunks were copied instead of looked into"
        groups = [
            [Pages(caches[ref.tensor_idx], chunks[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        return MemcpyWorker(region, groups, self.blocks_per_chunk)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker
