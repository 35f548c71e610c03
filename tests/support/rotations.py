"""Rotations of every kind, three layers each, for the tests of what rotates."""

from dataclasses import replace

import torch

from kvstore.rope.rotary import Rotation, Style

MAX_LEN = 256


def rotation(
    dtype, style=Style.HALF, upcast=False, rotary_dim=32, base=10000.0, table_dtype=None, device="cpu"
) -> Rotation:
    half = rotary_dim // 2
    angles = torch.arange(MAX_LEN)[:, None] * base ** -(torch.arange(half) / half)
    cos, sin = (table.to(table_dtype or dtype).to(device) for table in (angles.cos(), angles.sin()))
    return Rotation(cos, sin, style, upcast)


def moved(turn: Rotation, device) -> Rotation:
    return replace(turn, cos=turn.cos.to(device), sin=turn.sin.to(device))


def kinds(dtype, head_dim=32, device="cpu") -> dict[str, list[Rotation | None]]:
    """By name, a rotation per layer."""

    def make(style=Style.HALF, upcast=False, rotary_dim=head_dim, **options) -> Rotation:
        return rotation(dtype, style, upcast, rotary_dim, device=device, **options)

    partial = head_dim * 3 // 8 // 2 * 2
    return {
        "half": [make()] * 3,
        "interleaved": [make(Style.INTERLEAVED)] * 3,
        "upcast": [make(upcast=True)] * 3,
        "interleaved upcast": [make(Style.INTERLEAVED, upcast=True)] * 3,
        "float32 table": [make(table_dtype=torch.float32)] * 3,
        "partial": [make(rotary_dim=partial)] * 3,
        "partial upcast": [make(Style.INTERLEAVED, True, rotary_dim=partial)] * 3,
        "none": [None] * 3,
        "per layer": [make(), None, make(base=500.0)],
    }


KINDS = list(kinds(torch.float32))
