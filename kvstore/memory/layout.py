"""The shape of a model's KV as it is stored. Plain numbers; the dtype and the rotations are only carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvstore.rope.rotary import Rotation


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's KV as it is stored. rotations: per layer the full table, None where keys are not rotated.

    own_heads, own_layers: the heads and layers that this process moves, None for all. Blocks have all of them.
    state_bytes: of what a request keeps beside its KV, 0 for nothing; it is stored in blocks of the same size.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    rotations: tuple[Rotation | None, ...]
    own_heads: slice | None = None
    own_layers: slice | None = None
    state_bytes: int = 0

    @property
    def num_state_blocks(self) -> int:
        """The blocks that one state takes."""
        return -(-self.state_bytes // self.block_bytes)

    @property
    def own_rotations(self) -> tuple[Rotation | None, ...]:
        return self.rotations if self.own_layers is None else self.rotations[self.own_layers]

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class States(Protocol):
    """The engine's states of requests, in rows."""

    def packed(self, row: int, /) -> torch.Tensor:
        """One as it is stored, [state_bytes] uint8; the same memory, or a copy."""
        ...

    def unpack(self, row: int, packed: torch.Tensor, /) -> None:
        """Take in what `packed` gave, after it was overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What of each block a rank has: layers and KV heads, [start, stop)."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    @classmethod
    def of(cls, layout: KVLayout) -> OwnPart:
        layers = layout.own_layers or slice(0, layout.num_layers)
        heads = layout.own_heads or slice(0, layout.num_kv_heads)
        return cls((layers.start, layers.stop), (heads.start, heads.stop))
