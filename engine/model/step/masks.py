"""Which tokens the grammars of a batch's rows allow next, as numbers to add to logits.

Knows rows and matchers; the requests, which outlive their rows, keep the matchers up to date.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from kvstore.kernels.paged_batch import to_device

# For each byte of a mask, what to add to the logits of its eight tokens: [256, 8].
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)


class GrammarMasks:
    """The matchers of the rows that have one."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.matchers: dict[int, LLMatcher] = {}  # by row
        self._vocab_size = vocab_size
        self._device = device
        self._executor: LLExecutor | None = None  # its threads begin with the first mask
        self._added = _ADDED.astype(np.float32)
        self._added_there: Tensor | None = None
        self._edited = torch.empty(0, vocab_size, device=device)
        self._buffer = np.empty((0, 0, 8), np.float32)  # what `added` returned last; new pages cost more than the work

    def constrained(self, rows: np.ndarray) -> np.ndarray:
        """The indices in `rows` [R] of those that have a matcher."""
        return np.array([index for index, row in enumerate(rows.tolist()) if row in self.matchers], np.int64)

    def masks(self, rows: np.ndarray) -> np.ndarray:
        """One bit per token of each of these rows [C], which may occur repeatedly: [C, W] int32."""
        if self._executor is None:
            self._executor = LLExecutor()
        distinct, where = np.unique(rows, return_inverse=True)
        masks = allocate_token_bitmask(len(distinct), self._vocab_size)
        matchers = [(self.matchers[row], index) for index, row in enumerate(distinct.tolist())]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        return masks[where]

    def added(self, masks: np.ndarray) -> Tensor:
        """What to add to the logits of these rows: 0 where a token is allowed, else -inf. [C, V] float32.

        On a CPU the next call overwrites it.
        """
        packed = masks.view(np.uint8)
        if self._device.type == "cpu":  # numpy's take needs half of the time
            if len(self._buffer) < len(masks):
                self._buffer = np.empty((len(masks), packed.shape[1], 8), np.float32)
            out = self._buffer[: len(masks)]
            added = torch.from_numpy(np.take(self._added, packed, axis=0, out=out, mode="clip"))
        else:
            if self._added_there is None:
                self._added_there = to_device(torch.from_numpy(self._added), self._device)
            there = to_device(torch.from_numpy(packed), self._device)
            added = self._added_there[there.int()]
        return added.view(len(masks), -1)[:, : self._vocab_size]

    def copied(self, raw: Tensor) -> Tensor:
        """A copy of logits in float32; on a CPU where the last one was, because new pages cost more than the copy."""
        if raw.device.type != "cpu":
            return raw.to(torch.float32, copy=True)
        if len(self._edited) < len(raw):
            self._edited = torch.empty(raw.shape, dtype=torch.float32)
        return self._edited[: len(raw)].copy_(raw)


def allows_others(mask: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> bool:
    """Whether a row's mask [W] allows a token beside these."""
    left = mask.view(np.uint8).copy()
    for token_id in token_ids:
        left[token_id // 8] &= ~np.uint8(1 << token_id % 8)
    return bool(left.any())
