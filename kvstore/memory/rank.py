"""The KV of a rank without a store: it moves its own heads to and from the first rank's arena, or as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvstore.blocks.records import Save, TransferPlan, Transferred
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.layout import KVLayout, OwnPart
from kvstore.memory.ranked import DataPlane, bytes_of
from kvstore.memory.streams import CudaStreams
from kvstore.memory.transfer import Arena, Transfer

LEAST_ARENA_BLOCKS = 16  # of a rank's own memory


def rank_transfer(
    layout: KVLayout, descriptor: int, device: torch.device, on_progress: Callable[[], None]
) -> DataPlane:
    """Moves KV of a share of the first rank's arena. descriptor: of its memory, whose size the first rank has set.
    on_progress: on CUDA, called in a thread of its own when loads or saves have ended.
    """
    num_arena_blocks = os.fstat(descriptor).st_size // layout.block_bytes
    if device.type == "cuda":
        arena = Arena(layout, num_arena_blocks, pin=True, descriptor=descriptor)
        return DeviceTransfer(arena, CudaStreams(device), on_progress)
    return Transfer(Arena(layout, num_arena_blocks, pin=False, descriptor=descriptor))


class FarTransfer:
    """The same for a rank that has no share of the arena: it has memory of its own, for the blocks of one step."""

    def __init__(self, layout: KVLayout) -> None:
        part = OwnPart.of(layout)
        shapes = (replace(layout.shapes[0], num_kv_heads=part.heads[1] - part.heads[0]),) * len(layout.own_rotations)
        self._layout = KVLayout(shapes, layout.block_size, layout.dtype, layout.own_rotations)
        self._own = Transfer(Arena(self._layout, LEAST_ARENA_BLOCKS, pin=False))
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._saves: Sequence[Save] = ()

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._caches = caches
        self._own.register(caches)

    def begin(self, plan: TransferPlan, row_starts: Sequence[int], loaded: bytes) -> None:
        """loaded: see `FarBlocks.loaded`."""
        num_loads, num_arena_blocks = len(plan.loads), len(plan.loads) + len(plan.saves)
        if num_arena_blocks > self._own.arena.num_arena_blocks:
            self._own = Transfer(Arena(self._layout, num_arena_blocks, pin=False))
            self._own.register(self._caches)
        arena = self._own.arena
        if num_loads:
            arena.reach(num_loads - 1)
            values = torch.frombuffer(bytearray(loaded), dtype=self._layout.dtype)
            arena.tensor[:num_loads] = values.view(num_loads, -1)
        loads = tuple(replace(load, arena_block=index) for index, load in enumerate(plan.loads))
        self._saves = tuple(replace(save, arena_block=index) for index, save in enumerate(plan.saves, num_loads))
        self._own.begin(TransferPlan(loads, self._saves, plan.ticket), row_starts)

    def wait_for_layer_load(self, layer: int) -> None:
        self._own.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        self._own.save_kv_layer(layer, raw_key, value)

    def end(self) -> None:
        """The forward has ended, and its loads and saves with it."""
        self._own.end()

    def completed(self) -> list[Transferred]:
        """How they ended."""
        return self._own.completed()

    def saved(self) -> bytes:
        """What the last step has saved; see `FarBlocks.put`."""
        [run] = self._own.arena.runs  # all layers have one shape
        return bytes_of(run[s.arena_block, :, s.offset : s.offset + s.num_tokens] for s in self._saves)
