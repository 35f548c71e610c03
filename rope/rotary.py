"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864) as pure math on raw queries and keys.

A table holds cos and sin of every position in the model's dtype; `rotate` rounds as the model's own code does, so that
a key rotated here is bit-identical to one that the model rotates. Knows no model and no cache.
"""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Style(Enum):
    """Which two elements of a head form a pair: HALF (i, i + d/2) as in GPT-NeoX and Llama, or neighbours."""

    HALF = "half"
    INTERLEAVED = "interleaved"


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, style: Style, upcast: bool = False
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate the first 2 * cos.shape[-1] elements of each head; the rest passes through.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, rotary_dim / 2] at each token's position, in the dtype
    of x. Each product is rounded to that dtype, then the sum. upcast: the model multiplies and adds in float32 and
    rounds once.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if style is Style.HALF:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    a, b = x[..., first], x[..., second]
    if upcast:
        a, b, cos, sin = a.float(), b.float(), cos.float(), sin.float()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


class TableLayout(Enum):
    """How a model's cos and sin, [..., width], hold one value per pair."""

    HALVES = "each half holds all pairs"
    REPEATED = "each value stands twice"
    SINGLE = "each value stands once"

    def pick(self, table: Tensor) -> Tensor:
        if self is TableLayout.HALVES:
            table = table[..., : table.shape[-1] // 2]
        elif self is TableLayout.REPEATED:
            table = table[..., ::2]
        return table.contiguous()


@dataclass(frozen=True, slots=True)
class Spread:
    """Cos and signed sin of every element of a head, for compiled code that rotates halves by additions only.

    That gives the same bits, because a - b is a + (-b), and rounding is symmetric.
    """

    cos: Tensor  # [num_tokens, 1, rotary_dim]
    sin: Tensor  # the same, negative where the product is subtracted


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of layers that share frequencies."""

    cos: Tensor  # [max_positions, rotary_dim / 2]
    sin: Tensor
    style: Style
    upcast: bool = False  # see `rotate`
    layout: TableLayout = TableLayout.HALVES  # of the model's own cos and sin
    spread: Spread | None = None  # of a step's tokens on a CPU, see `spread_out`

    def at(self, positions: Tensor) -> "Rotation":
        """The same rotation for the tokens of one step: rows of the table at `positions` [num_tokens]."""
        return replace(self, cos=self.cos[positions], sin=self.sin[positions], spread=None)

    def spread_out(self) -> "Rotation":
        """The same with `spread`, if compiled code knows the style and the tables are on a CPU."""
        if self.upcast or self.style is not Style.HALF or self.cos.device.type != "cpu":
            return self
        cos, sin = torch.cat([self.cos, self.cos], -1), torch.cat([-self.sin, self.sin], -1)
        return replace(self, spread=Spread(cos.unsqueeze(1), sin.unsqueeze(1)))

    def rounds_once(self, dtype: torch.dtype) -> bool:
        """Whether rotating elements of this dtype rounds only the sum, as torch's type promotion does."""
        return self.upcast or torch.promote_types(self.cos.dtype, dtype) == torch.float32

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [num_tokens, num_heads, head_dim]; the table must have one row per token (see `at`)."""
        return rotate(x, self.cos, self.sin, self.style, self.upcast)

    def turn(self, x: Tensor, positions: Tensor, to: Tensor) -> Tensor:
        """Rotated x [num_tokens, num_heads, head_dim] of these positions as if it had stood at others. The table must
        be the full one. Computed in float32, and rounded once more than at its own place.
        """
        old_cos, old_sin, cos, sin = (
            table[rows].to(x.device, torch.float32) for rows in (positions, to) for table in (self.cos, self.sin)
        )
        scale = old_cos * old_cos + old_sin * old_sin
        return rotate(
            x, (cos * old_cos + sin * old_sin) / scale, (sin * old_cos - cos * old_sin) / scale, self.style, True
        )


def match_rotation(raw: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor) -> "Rotation | None":
    """Find the rotation that turns `raw` into `rotated`, both [num_tokens, num_heads, head_dim], bit for bit.

    cos, sin: [num_tokens, width], one row per token as the model's rotary module returned them, in whichever layout it
    uses. Returns the rotation with these rows as its table, or None.
    """
    for layout in TableLayout:
        half_cos, half_sin = layout.pick(cos), layout.pick(sin)
        if 2 * half_cos.shape[-1] > raw.shape[-1]:
            continue
        for style in Style:
            for upcast in (False, True):
                rotation = Rotation(half_cos, half_sin, style, upcast, layout)
                if torch.equal(rotation.apply(raw), rotated):
                    return rotation
    return None
