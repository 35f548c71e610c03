"""Which quantised copies a chain can begin with.

A copy is on disk under an id of its own, in the place of its block, and is read to where exact blocks are. What is
computed behind it builds on its id, so it is never mixed with exact KV. A chain has copies from its beginning on, or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.blocks.ids import TOKEN_BYTES, BlockId, Lineage, SpliceRun, child_block_id, quantised_id
from kvstore.memory.tier import CpuTier
from kvstore.policy.planner import Planner
from kvstore.store.stored import ChainContent, StoredBlocks

IsHeld = Callable[[BlockId], bool]  # whether HBM or a tier below it has this block


def find_copies(
    content: ChainContent, is_in_hbm: IsHeld, stored: StoredBlocks, cpu: CpuTier, planner: Planner
) -> Lineage | None:
    """The lineage of a chain that begins with copies, if more of it is held so and that is worth reading."""
    size = stored.block_size
    most = min((len(content.tokens) // TOKEN_BYTES - 1) // size, len(content.chain))
    found = with_copies(content, most, size, lambda one: is_in_hbm(one) or stored.holds(one))
    if found is None:
        return None
    loaded = [one for one in found.with_copies(found.sources) if not is_in_hbm(one)]
    num_unread = sum(cpu.arena_block_of(one) is None for one in loaded)
    return found if planner.should_read(len(loaded), num_unread) else None


def with_copies(content: ChainContent, most: int, block_size: int, is_held: IsHeld) -> Lineage | None:
    """The lineage with which more of this chain's first `most` blocks are held, as it begins with copies; None if
    there is none. The last blocks may be held as computed behind the copies.
    """
    if most <= 0 or not is_held(quantised_id(content.chain[0])):
        return None
    num_held = next((index for index in range(most) if not is_held(content.chain[index])), most)
    if num_held == most:
        return None
    sources = list[BlockId]()
    behind: tuple[int, int] | None = None  # copies, and how far blocks that were computed behind them reach
    for source in _sources(content, most, block_size, is_held):
        sources.append(source)
        if behind is None and len(sources) < most:
            reach = _reach(content, len(sources), quantised_id(source), most, block_size, is_held)
            behind = (len(sources), reach) if reach > len(sources) else None
    num_copies, reach = len(sources), len(sources)
    if behind is not None and behind[1] >= reach:
        num_copies, reach = behind
    if reach <= num_held:
        return None
    pairs = zip(sources[:num_copies], _known(content), strict=False)
    parts = next((index for index, (source, known) in enumerate(pairs) if source != known), num_copies)
    root, runs = content.lineage.root, [run for run in content.lineage.splices if run.first < parts]
    *before, last = runs or [SpliceRun(0, root, num_copies)]
    runs = [*before, last._replace(end=num_copies)]
    splices = tuple(run._replace(parent=quantised_id(run.parent)) for run in runs)
    return Lineage(root, splices, tuple(sources[:num_copies]))


def _known(content: ChainContent) -> list[BlockId]:
    """The chain with the sources of its copies."""
    return [*content.lineage.sources, *content.chain[len(content.lineage.sources) :]]


def _sources(content: ChainContent, most: int, block_size: int, is_held: IsHeld) -> Iterator[BlockId]:
    """The blocks, from the first on, whose copies are held: those of the chain, or computed behind earlier copies."""
    known = _known(content)
    source = known[0]
    for index in range(most):
        if index:
            tokens = _tokens(content, index, block_size)
            before = child_block_id(source, tokens) if source != known[index - 1] else known[index]
            found = (before, child_block_id(quantised_id(source), tokens))
            source = next((one for one in found if is_held(quantised_id(one))), b"")
            if not source:
                return
        yield source


def _reach(content: ChainContent, index: int, parent_id: BlockId, most: int, block_size: int, is_held: IsHeld) -> int:
    """How far blocks are held that were computed behind this one, from block `index` on."""
    while index < most and is_held(parent_id := child_block_id(parent_id, _tokens(content, index, block_size))):
        index += 1
    return index


def _tokens(content: ChainContent, index: int, block_size: int) -> bytes:
    size = block_size * TOKEN_BYTES
    return bytes(content.tokens[index * size : (index + 1) * size])
