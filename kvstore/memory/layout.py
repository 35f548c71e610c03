"""The shape of a model's KV as it is stored. Plain numbers; the dtype and the rotations are only carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvstore.rope.rotary import Rotation


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's KV as it is stored. rotations: per layer the full table, None where keys are not rotated."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    rotations: tuple[Rotation | None, ...]

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
