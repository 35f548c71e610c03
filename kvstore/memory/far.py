"""Parts of blocks as bytes, for ranks that have no share of the arena: the first rank's side of `rank`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvstore.blocks.records import Load, Save
from kvstore.memory.layout import OwnPart
from kvstore.memory.transfer import Arena


@dataclass(frozen=True, slots=True)
class FarBlocks:
    """The first rank's side: parts of blocks out of the arena, and into it."""

    arena: Arena

    def loaded(self, part: OwnPart, loads: Sequence[Load]) -> bytes:
        """This part of the blocks that a step loads, one after the other."""
        own_part = self._part(part)
        return bytes_of(own_part[load.arena_block] for load in loads)

    def put(self, part: OwnPart, saves: Sequence[Save], data: bytes) -> None:
        """Write what a rank has saved, in the order of `saves`, into its part of their blocks."""
        own_part = self._part(part)
        values = torch.frombuffer(bytearray(data), dtype=self.arena.layout.dtype)
        for save in saves:
            place = own_part[save.arena_block, :, save.offset : save.offset + save.num_tokens]
            own, values = values[: place.numel()], values[place.numel() :]
            place.copy_(own.view(place.shape))

    def _part(self, part: OwnPart) -> torch.Tensor:
        """This part of all blocks: [num_arena_blocks, 2 * num_layers, block_size, num_heads, head_dim]."""
        [run], (first, last) = self.arena.runs, part.layers  # all layers have one shape
        heads = run.unflatten(3, (self.arena.layout.shapes[0].num_kv_heads, -1))
        return heads[:, 2 * first : 2 * last, :, slice(*part.heads)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
