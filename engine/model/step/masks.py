"""Which tokens the grammars of a batch's rows allow next.

Knows rows and matchers; the requests, which outlive their rows, keep the matchers up to date.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par


class GrammarMasks:
    """The matchers of the rows that have one."""

    def __init__(self, vocab_size: int) -> None:
        self.matchers: dict[int, LLMatcher] = {}  # by row
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None  # its threads begin with the first mask
        self._bits = np.empty((0, 0), np.int32)  # what `masks` returned last; new pages cost more than the work

    def constrained(self, rows: np.ndarray) -> np.ndarray:
        """The indices in `rows` [R] of those that have a matcher."""
        return np.array([index for index, row in enumerate(rows.tolist()) if row in self.matchers], np.int64)

    def masks(self, rows: np.ndarray) -> np.ndarray:
        """One bit per token of each of these rows [C], which may occur repeatedly: [C, W] int32.

        The next call overwrites it.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        if len(self._bits) < len(rows):
            self._bits = allocate_token_bitmask(len(rows), self._vocab_size)
        masks, first = self._bits[: len(rows)], dict[int, int]()
        indices = [first.setdefault(row, index) for index, row in enumerate(rows.tolist())]
        matchers = [(self.matchers[row], index) for row, index in first.items()]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        return masks if len(first) == len(rows) else masks[indices]


def allows_others(mask: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> bool:
    """Whether a row's mask [W] allows a token beside these."""
    left = mask.view(np.uint8).copy()
    for token_id in token_ids:
        left[token_id // 8] &= ~np.uint8(1 << token_id % 8)
    return bool(left.any())
