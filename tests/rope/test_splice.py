"""The plan of a splice against slicing a plain list of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rope.splice import Span, SplicedBlock, SplicePiece, SplicePlan, plan_splice


@st.composite
def cases(draw):
    """(number of old tokens, kept spans, block size, number of source blocks)."""
    block_size = draw(st.sampled_from([1, 2, 4, 7, 16]))
    num_tokens = draw(st.integers(0, 12 * block_size))
    aligned = st.integers(0, num_tokens // block_size).map(lambda i: i * block_size)
    edges = sorted(draw(st.lists(aligned | st.integers(0, num_tokens), max_size=8)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    full = num_tokens // block_size
    return num_tokens, spans, block_size, draw(st.just(full) | st.integers(0, full))


def apply(plan: SplicePlan, old: list[int], block_size: int) -> list[int]:
    """The new sequence, token by token from the plan's pieces."""
    new = old[: plan.num_exact_blocks * block_size]
    for block in plan.blocks:
        assert block.index * block_size == len(new)
        for piece in block.pieces:
            assert piece.offset == len(new) % block_size
            start = piece.source_block * block_size + piece.source_offset
            assert 0 < piece.length <= block_size - piece.source_offset
            new += old[start : start + piece.length]
        assert sum(piece.length for piece in block.pieces) == block_size
    return new


@given(cases())
def test_the_pieces_give_what_slicing_gives(case):
    num_tokens, spans, block_size, num_source_blocks = case
    old = [7 * i + 3 for i in range(num_tokens)]
    kept = [token for start, end in spans for token in old[start:end]]
    plan = plan_splice(spans, block_size, num_source_blocks)
    new = apply(plan, old, block_size)
    assert new == kept[: plan.num_tokens] and len(new) == plan.num_tokens


@given(cases())
def test_exactly_the_possible_blocks_are_covered(case):
    """Exact are the blocks that did not move; listed are the next ones up to the first that cannot be made."""
    _, spans, block_size, num_source_blocks = case
    kept = [position for start, end in spans for position in range(start, end)]
    plan = plan_splice(spans, block_size, num_source_blocks)
    blocks = [kept[i : i + block_size] for i in range(0, len(kept) - block_size + 1, block_size)]
    possible = [all(position // block_size < num_source_blocks for position in block) for block in blocks]
    unmoved = [block == list(range(i * block_size, (i + 1) * block_size)) for i, block in enumerate(blocks)]
    covered = [*possible, False].index(False)
    assert plan.num_tokens == covered * block_size
    assert plan.num_exact_blocks == min([*unmoved, False].index(False), covered)


@given(cases())
def test_pieces_are_few(case):
    """Pieces that follow each other in a block cannot be merged: their sources do not, or lie in two blocks."""
    _, spans, block_size, num_source_blocks = case
    for block in plan_splice(spans, block_size, num_source_blocks).blocks:
        for a, b in zip(block.pieces, block.pieces[1:], strict=False):
            assert a.source_block != b.source_block or a.source_offset + a.length != b.source_offset


def test_a_cut_inside_blocks_puts_pieces_together():
    plan = plan_splice([(0, 2), (5, 16)], 4, 4)
    first = SplicedBlock(0, (SplicePiece(0, 0, 0, 2), SplicePiece(1, 1, 2, 2)))
    second = SplicedBlock(1, (SplicePiece(1, 3, 0, 1), SplicePiece(2, 0, 1, 3)))
    third = SplicedBlock(2, (SplicePiece(2, 3, 0, 1), SplicePiece(3, 0, 1, 3)))
    assert plan == SplicePlan(0, (first, second, third), 12)


@pytest.mark.parametrize(
    ("spans", "num_source_blocks", "expected"),
    [
        ([], 5, (0, 0)),
        ([(0, 20)], 5, (5, 0)),
        ([(0, 8), (8, 20)], 5, (5, 0)),  # nothing was cut
        ([(0, 8)], 5, (2, 0)),  # empty tail
        ([(0, 8), (17, 20)], 5, (2, 0)),  # the tail is shorter than a block
        ([(8, 20)], 5, (0, 3)),  # empty head
        ([(0, 4), (8, 20)], 3, (1, 1)),  # old block 3 is not there
        ([(0, 20)], 0, (0, 0)),
        ([Span(0, 3), Span(5, 5), Span(6, 9), Span(11, 20)], 5, (0, 3)),
    ],
)
def test_edges(spans, num_source_blocks, expected):
    plan = plan_splice(spans, 4, num_source_blocks)
    assert (plan.num_exact_blocks, len(plan.blocks)) == expected


def test_blocks_from_an_earlier_splice_on_are_made_anew():
    whole = plan_splice([(0, 12), (14, 20)], 4, 5)
    assert (whole.num_exact_blocks, [block.index for block in whole.blocks]) == (3, [3])
    plan = plan_splice([(0, 12), (14, 20)], 4, 5, most_exact=1)
    assert plan.num_exact_blocks == 1 and plan.num_tokens == whole.num_tokens
    assert plan.blocks[:2] == (SplicedBlock(1, (SplicePiece(1, 0, 0, 4),)), SplicedBlock(2, (SplicePiece(2, 0, 0, 4),)))
    assert plan_splice([(0, 3), (5, 20)], 4, 5, most_exact=1) == plan_splice([(0, 3), (5, 20)], 4, 5)


@pytest.mark.parametrize("spans", [[(4, 2)], [(0, 4), (3, 6)], [(5, 6), (0, 2)]])
def test_spans_out_of_order_are_a_bug(spans):
    with pytest.raises(AssertionError):
        plan_splice(spans, 4, 4)
