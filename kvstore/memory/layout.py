"""The shape of a model's KV as it is stored. Plain numbers; the dtype and the rotations are only carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvstore.rope.rotary import Rotation


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One token's keys, [num_kv_heads, key_dim], and values, [num_kv_heads, value_dim], in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> tuple[int, int]:
        """How many numbers keys have, and values."""
        return self.num_kv_heads * self.key_dim, self.num_kv_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a rank has of each block: layers and KV heads, [start, stop) each. All layers have one shape.

    windows: which layers with a window it has, counted among these.
    """

    layers: tuple[int, int]
    heads: tuple[int, int]
    windows: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a model's KV as it is stored: a block is one layer after the other, in each the keys of all tokens, then
    their values. rotations: per layer the full table, None where keys are not rotated.

    own: what this process moves, None for all. Blocks have all heads and layers.
    state_bytes: of what is kept behind a block beside its KV, 0 for nothing; it is stored in blocks of the same size.
    window_blocks: behind so many blocks before it a border needs that; 0: it needs one. windowed: of layers with a
    window, whose KV of one block, with rotated keys, is then such a state.
    """

    shapes: tuple[LayerShape, ...]  # of the layers
    block_size: int
    dtype: torch.dtype
    rotations: tuple[Rotation | None, ...]
    own: OwnPart | None = None
    state_bytes: int = 0
    window_blocks: int = 0
    windowed: KVLayout | None = None

    @property
    def num_state_blocks(self) -> int:
        """The blocks that one state takes."""
        return -(-self.state_bytes // self.block_bytes)

    @property
    def checkpoint_blocks(self) -> int:
        """The blocks that a request needs beside its KV to begin somewhere."""
        return self.num_state_blocks * max(self.window_blocks, 1)

    @property
    def own_rotations(self) -> tuple[Rotation | None, ...]:
        return self.rotations if self.own is None else self.rotations[slice(*self.own.layers)]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many numbers a token has in each part of a block: the keys and the values of each layer."""
        return tuple(width for shape in self.shapes for width in shape.widths)

    @property
    def block_numbers(self) -> int:
        """How many numbers a block has."""
        return self.block_size * sum(self.widths)

    @property
    def block_bytes(self) -> int:
        return self.block_numbers * self.dtype.itemsize


class States(Protocol):
    """The engine's states, in rows: of requests, or of blocks before a border."""

    def packed(self, rows: Sequence[int], /) -> torch.Tensor:
        """A copy of some as they are stored, [num_rows, state_bytes] uint8."""
        ...

    def blank(self, num_rows: int, /) -> torch.Tensor:
        """The same of no states yet."""
        ...

    def unpack(self, rows: Sequence[int], packed: torch.Tensor, /) -> None:
        """Take in states as they are stored."""
        ...
