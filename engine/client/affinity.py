"""Which engine has the KV of a prompt's beginning: where the conversation was last. Knows block ids, and no engine.

One thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId

MOST_BLOCKS = 1 << 18  # that are remembered: 4 million tokens in blocks of 16


@dataclass(slots=True)
class _Known:
    """A block. engine: the one that had it last. goes_on: some block builds on it. is_shared: several do, on it or on a
    block after it.
    """

    engine: int
    goes_on: bool = False
    is_shared: bool = False


class Whereabouts:
    """Chains of prompts and answers, each with its engine. The least recently used blocks are forgotten."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._known: OrderedDict[BlockId, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def engine_of(self, chain: Sequence[BlockId]) -> int | None:
        """The engine of the conversation that this chain continues; None if it continues none."""
        last = next((known for one in reversed(chain) if (known := self._known.get(one)) is not None), None)
        return None if last is None or last.is_shared else last.engine

    def note(self, chain: Sequence[BlockId], engine: int) -> None:
        """This engine has the chain, or is about to compute it."""
        blocks = [self._known.get(one) for one in chain]
        num_known = next((i for i, known in enumerate(blocks) if known is None), len(chain))
        before = blocks[num_known - 1] if num_known else None
        if before is not None and before.goes_on and num_known < len(chain):  # another one goes on differently
            for known in blocks[:num_known]:
                if known is not None:
                    known.is_shared = True
        for index, (one, known) in enumerate(zip(chain, blocks, strict=True)):
            block = self._known.setdefault(one, _Known(engine)) if known is None else known
            block.engine = engine
            block.goes_on = block.goes_on or index < len(chain) - 1
        for one in reversed(chain):  # heads are forgotten last
            self._known.move_to_end(one)
        while len(self._known) > self._most_blocks:
            self._known.popitem(last=False)
