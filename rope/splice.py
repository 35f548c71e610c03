"""Which tokens survive a truncation or an edit, and where they go, as copies between blocks.

Knows only token positions and block indices, no ids and no tensors. Kept tokens get new positions; raw keys have none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Old token positions [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SplicePiece:
    """Tokens [source_offset, source_offset + length) of old block `source_block` go to `offset` of a new block."""

    source_block: int
    source_offset: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SplicedBlock:
    """Block `index` of the new sequence, filled by `pieces` in order, from offset 0 to the block size."""

    index: int
    pieces: tuple[SplicePiece, ...]


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """The first blocks of the new sequence."""

    num_exact_blocks: int  # these are the old ones
    blocks: tuple[SplicedBlock, ...]  # the following ones, to be copied
    num_tokens: int  # that all of these cover; further kept tokens must be computed


def plan_splice(
    spans: Iterable[tuple[int, int]], block_size: int, num_source_blocks: int, most_exact: int | None = None
) -> SplicePlan:
    """The copies that put the kept `spans` of old tokens, [start, end), one after the other.

    spans: in order, not overlapping. num_source_blocks: the old blocks below it are full and may be copied from.
    Blocks before the first moved token stay as they are, at most `most_exact` of them. Only full blocks are made. The
    first block that needs another source ends the list, as a chain has no holes.
    """
    merged = _merge(spans)
    head = merged[0].end if merged and merged[0].start == 0 else 0
    num_exact = min(head // block_size, num_source_blocks)
    num_exact = num_exact if most_exact is None else min(num_exact, most_exact)
    blocks: list[SplicedBlock] = []
    for index, pieces in enumerate(_fill(_drop(merged, num_exact * block_size), block_size), start=num_exact):
        if any(piece.source_block >= num_source_blocks for piece in pieces):
            break
        blocks.append(SplicedBlock(index, tuple(pieces)))
    return SplicePlan(num_exact, tuple(blocks), (num_exact + len(blocks)) * block_size)


def _merge(spans: Iterable[tuple[int, int]]) -> list[Span]:
    """The spans without empty ones, and with adjacent ones joined."""
    merged: list[Span] = []
    last_end = 0
    for start, end in spans:
        assert last_end <= start <= end, "spans are in order and do not overlap"
        last_end = end
        if start == end:
            continue
        if merged and merged[-1].end == start:
            merged[-1] = Span(merged[-1].start, end)
        else:
            merged.append(Span(start, end))
    return merged


def _drop(spans: Sequence[Span], num_tokens: int) -> Iterable[Span]:
    """The spans without their first `num_tokens` tokens, all of which lie in the first span."""
    for i, span in enumerate(spans):
        yield span if i else Span(span.start + num_tokens, span.end)


def _fill(spans: Iterable[Span], block_size: int) -> Iterable[list[SplicePiece]]:
    """The pieces of each full new block in turn. A piece ends where its source block or its own block ends."""
    pieces: list[SplicePiece] = []
    offset = 0
    for start, end in spans:
        position = start
        while position < end:
            source_block, source_offset = divmod(position, block_size)
            length = min(end - position, block_size - source_offset, block_size - offset)
            pieces.append(SplicePiece(source_block, source_offset, offset, length))
            position += length
            offset += length
            if offset == block_size:
                yield pieces
                pieces, offset = [], 0
