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
        # What `masks` and `added` returned last; new pages cost more than the work.
        self._bits, self._buffer = np.empty((0, 0), np.int32), np.empty((0, 0, 8), np.float32)

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

    def masked(self, logits: Tensor, masks: np.ndarray) -> Tensor:
        """These logits [C, V] in float32, with `added` to them; see there."""
        added = self.added(masks)
        if self._device.type != "cpu":
            return added.add_(logits)
        with np.errstate(all="ignore"):  # as quick, and waits for no helper whose processor others use
            np.add(added.numpy(), logits.float().numpy(), out=added.numpy())
        return added

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
