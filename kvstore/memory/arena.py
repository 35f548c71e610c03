"""The CPU tier's memory: one mapping, seen as a tensor by transfers and as bytes by everything else."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvstore.config import format_size
from kvstore.errors import ConfigError
from kvstore.kernels.cpu.first_touch import FirstTouch
from kvstore.memory.layout import KVLayout

# Portable: pinned for every CUDA context of the process. Mapped: kernels read and write it over the bus. Where the
# device shares its addresses with the host, both are the default; here they are needed, so they are asked for.
_REGISTER_FLAGS = 1 | 2


class Arena:
    """[num_arena_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; index 0 of the third axis is raw keys.
    own: the part that this process moves to and from HBM, all of it or its layers and heads.

    Memory comes from mmap, exactly as much as asked for, and is registered with CUDA if the model runs there: torch's
    own pinned allocator rounds up to powers of two. Pages are touched when they are first used; registering touches and
    locks all of them in one call, so a large arena takes seconds to open, and all of its memory from the beginning.
    """

    def __init__(self, layout: KVLayout, num_arena_blocks: int, pin: bool, descriptor: int | None = None) -> None:
        """descriptor: of memory that other processes map, too. The first of them sets its size."""
        self.layout = layout
        self.num_arena_blocks = num_arena_blocks
        size_bytes = num_arena_blocks * layout.block_bytes
        try:
            self._memory = _private(size_bytes) if descriptor is None else _shared(size_bytes, descriptor)
        except (OSError, ValueError, OverflowError) as error:
            value = f"{format_size(size_bytes)}, which this machine does not give: {error}"
            raise ConfigError("cpu", value, "give less") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # whatever mode the caller is in: threads outside of it write here, too
            flat = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.tensor = flat.view(layout.dtype).view(num_arena_blocks, *layout.block_shape)
            self.own = self.tensor if layout.own_layers is None else self.tensor[:, layout.own_layers]
            self.own = self.own if layout.own_heads is None else self.own[..., layout.own_heads, :]
        self._bytes = memoryview(self._memory)
        self._unpin: weakref.finalize | None = None
        self._first_touch: FirstTouch | None = None
        if pin:
            self._pin(flat)
        else:
            self._first_touch = FirstTouch(self.tensor)

    def _pin(self, flat: torch.Tensor) -> None:
        """Pin it until `close`, or until the arena is collected: memory that is unmapped while registered stays
        locked.
        """
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(flat.data_ptr(), flat.numel(), _REGISTER_FLAGS))
        if code == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, flat.data_ptr())
            self._unpin.atexit = False  # a process that ends gives its memory back faster
        if code != 0 or not flat.is_pinned():
            self.close()
            _forget_cuda_error()
            raise ConfigError(
                f"CUDA cannot pin {format_size(flat.numel())} for the CPU tier (error {code}); give a smaller cpu, or "
                "raise what this process may lock (ulimit -l, a container's memory)"
            )

    def reach(self, arena_block: int) -> None:
        """Blocks up to this one are in use: make the memory behind them ready."""
        if self._first_touch is not None:
            self._first_touch.reach(arena_block)

    def view(self, arena_block: int) -> memoryview:
        """The bytes of one block, writable."""
        size = self.layout.block_bytes
        return self._bytes[arena_block * size : (arena_block + 1) * size]

    def erase(self, arena_blocks: Sequence[int]) -> None:
        for arena_block in arena_blocks:
            self.tensor[arena_block].zero_()

    def copy_tokens(self, pieces: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Copy runs of tokens in every layer: (source block, source offset, block, offset, number of tokens)."""
        for source, source_offset, arena_block, offset, count in pieces:
            run = self.tensor[source, :, :, source_offset : source_offset + count]
            self.tensor[arena_block, :, :, offset : offset + count] = run

    def close(self) -> None:
        """Unpin; no transfer may be running. The mapping goes when the last tensor and view of it are collected."""
        self._first_touch = None
        if self._unpin is not None:
            self._unpin()


def _private(size_bytes: int) -> mmap.mmap:
    """Private memory, for which Linux gives huge pages more readily than for shared memory: fewer to touch and lock.

    A forked child does not get it. Otherwise the parent's next write would go to a copy, and the device's to the
    original.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _shared(size_bytes: int, descriptor: int) -> mmap.mmap:
    """Shared memory: what one process writes, the others see."""
    if os.fstat(descriptor).st_size == 0:
        os.truncate(descriptor, size_bytes)
    memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _forget_cuda_error() -> None:
    """CUDA keeps the error of a failed call, and torch would raise it at the next kernel that anybody launches."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
