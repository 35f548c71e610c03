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
        (first, last), heads = part.layers, slice(*part.heads)
        return bytes_of(self.arena.tensor[load.arena_block, first:last, :, :, heads] for load in loads)

    def put(self, part: OwnPart, saves: Sequence[Save], data: bytes) -> None:
        """Write what a rank has saved, in the order of `saves`, into its part of their blocks."""
        (first, last), heads = part.layers, slice(*part.heads)
        values = torch.frombuffer(bytearray(data), dtype=self.arena.layout.dtype)
        for save in saves:
            block = self.arena.tensor[save.arena_block]
            place = block[first:last, :, save.offset : save.offset + save.num_tokens, heads]
            own, values = values[: place.numel()], values[place.numel() :]
            place.copy_(own.view(place.shape))


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
