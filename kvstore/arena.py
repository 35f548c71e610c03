"""The CPU tier's memory: one mapping, seen as a tensor by transfers and as bytes by everything else."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from kvstore.config import format_size
from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

_CUDA_HOST_REGISTER_PORTABLE = 1


class Arena:
    """[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]; index 0 of the third axis is raw keys.

    Memory is taken by mmap, exactly as much as asked for, and registered with CUDA when the model runs there: torch's
    own pinned allocator rounds up to powers of two. Pages are touched when they are first used.
    """

    def __init__(self, layout: KVLayout, num_slots: int, pin: bool) -> None:
        self.layout = layout
        self.num_slots = num_slots
        size_bytes = num_slots * layout.block_bytes
        try:
            self._memory = mmap.mmap(-1, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cpu is {format_size(size_bytes)}, which this machine does not give: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # whatever its caller is in: threads outside of it write here too
            flat = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.tensor = flat.view(layout.dtype).view(num_slots, *layout.block_shape)
        self._bytes = memoryview(self._memory)
        self._pinned = pin
        if pin:
            self._register(flat)

    def _register(self, flat: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(flat.data_ptr(), flat.numel(), _CUDA_HOST_REGISTER_PORTABLE)
        if int(code) != 0:
            raise ConfigError(f"CUDA cannot pin {format_size(flat.numel())} for the CPU tier (error {int(code)})")

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        size = self.layout.block_bytes
        return self._bytes[slot * size : (slot + 1) * size]

    def erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.tensor[slot].zero_()

    def copy_tokens(self, pieces: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Copy runs of tokens in every layer: (source slot, source offset, slot, offset, number of tokens)."""
        for source, source_offset, slot, offset, count in pieces:
            run = self.tensor[source, :, :, source_offset : source_offset + count]
            self.tensor[slot, :, :, offset : offset + count] = run

    def close(self) -> None:
        """Unpin. The mapping goes when the last tensor and view of it are collected."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
