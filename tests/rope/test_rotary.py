"""Rotation as math: angles, styles, rounding, and the search for a model's own rotation."""

import pytest
import torch

from kvstore.rope.rotary import Rotation, Style, TableLayout, match_rotation, rotate


def tables(num_positions=64, half=8, dtype=torch.float32):
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("style", Style)
def test_scores_depend_on_distance_only(style):
    cos, sin = tables()
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, generator=generator)

    def score(query_position, key_position):
        q = rotate(query, cos[[query_position]], sin[[query_position]], style)
        k = rotate(key, cos[[key_position]], sin[[key_position]], style)
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(50, 45), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize("style", Style)
def test_each_pair_turns_by_its_angle(style):
    cos, sin = tables(half=2)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])  # the fifth element has no partner and passes through
    pairs = [(0, 2), (1, 3)] if style is Style.HALF else [(0, 1), (2, 3)]
    out = rotate(x, cos[[7]], sin[[7]], style)[0, 0]
    for i, (a, b) in enumerate(pairs):
        turned = torch.complex(x[0, 0, a], x[0, 0, b]) * torch.complex(cos[7, i], sin[7, i])
        assert torch.allclose(torch.stack([turned.real, turned.imag]), out[[a, b]])
    assert out[4] == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_product_is_rounded_before_the_sum(dtype):
    """As eager model code does; a rotation in float32 that rounds once is another number in many elements."""
    cos, sin = tables(dtype=dtype)
    x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    a, b = x[..., :8], x[..., 8:]
    c, s = cos[:, None], sin[:, None]
    expected = torch.cat([a * c + (-b) * s, b * c + a * s], dim=-1)
    assert torch.equal(rotate(x, cos, sin, Style.HALF), expected)
    assert not torch.equal(rotate(x, cos, sin, Style.HALF, upcast=True), expected)


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("layout", TableLayout)
def test_the_models_rotation_is_found(style, upcast, layout):
    dtype = torch.bfloat16
    cos, sin = tables(dtype=dtype)
    x = torch.randn(64, 2, 20, generator=torch.Generator().manual_seed(2)).to(dtype)
    rotated = rotate(x, cos, sin, style, upcast)

    def spread(table):
        if layout is TableLayout.HALVES:
            return torch.cat([table, table], -1)
        return table.repeat_interleave(2, -1) if layout is TableLayout.REPEATED else table

    found = match_rotation(x, rotated, spread(cos), spread(sin))
    assert (found.style, found.upcast, found.layout) == (style, upcast, layout)
    assert torch.equal(found.layout.pick(spread(cos)), cos)


def test_an_unknown_rotation_is_not_found():
    cos, sin = tables()
    x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(3))
    wide = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    assert match_rotation(x, rotate(x, cos, sin, Style.HALF) * 1.5, *wide) is None


def test_rows_of_a_table_at_positions():
    cos, sin = tables()
    rotation = Rotation(cos, sin, Style.HALF)
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([5, 0, 63])
    at = rotation.at(positions)
    for i, position in enumerate(positions.tolist()):
        one = rotate(x[i : i + 1], cos[[position]], sin[[position]], Style.HALF)
        assert torch.equal(at.apply(x)[i : i + 1], one)
    assert torch.equal(at.apply(x)[1], x[1])
