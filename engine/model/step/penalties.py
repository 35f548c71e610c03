"""Repetition, presence and frequency penalties: what each row that uses them has seen.

Knows rows and token ids; must not know requests.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvstore.kernels.paged_batch import to_device


class Penalties:
    """Token counts of the rows that use penalties, in a pool of dense rows that grows when it must."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in the prompt or the answer
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # in the answer
        self._free: list[int] = []

    def acquire(self, prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        output = torch.from_numpy(np.asarray(output_token_ids, np.int64))
        prompt = torch.from_numpy(np.unique(np.asarray(prompt_token_ids, np.int64)))
        counts = torch.bincount(output, minlength=self._vocab_size).to(self._counts.dtype)
        self._counts[row] = to_device(counts, self._counts.device)
        self._seen[row] = self._counts[row] > 0
        self._seen[row].index_fill_(0, to_device(prompt, self._seen.device), True)
        return row

    def release(self, row: int) -> None:
        self._free.append(row)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=self._counts.device)
        self._counts.index_put_((rows, token_ids), one, accumulate=True)
        self._seen.index_put_((rows, token_ids), one.bool())

    def apply(self, logits: Tensor, indices: np.ndarray, state: np.ndarray) -> None:
        """Penalise the tokens that were seen in rows `indices` [P] of logits float32, whose state is `state` [P]."""
        names = ("penalty_row", "repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = np.stack([indices, *(state[name] for name in names)]).astype(np.float64)
        packed = to_device(torch.from_numpy(columns), logits.device)
        rows, penalty_rows, factors = packed[0].long(), packed[1].long(), packed[2:].float()
        if logits.device.type == "cuda":  # over the whole vocabulary: finding the seen tokens would wait
            values = logits[rows]
            changed = _penalised(values, self._counts[penalty_rows], *factors.unsqueeze(-1))
            logits[rows] = torch.where(self._seen[penalty_rows], changed, values)
            return
        # One entry per distinct token, few compared with V.
        which, ids = self._seen[penalty_rows].nonzero(as_tuple=True)
        values = logits[rows[which], ids]
        logits[rows[which], ids] = _penalised(values, self._counts[penalty_rows[which], ids], *factors[:, which])

    def _grow(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, 4), self._max_rows)
        assert new > old, "more rows with penalties than rows"
        self._seen = F.pad(self._seen, (0, 0, 0, new - old))
        self._counts = F.pad(self._counts, (0, 0, 0, new - old))
        self._free.extend(range(new - 1, old - 1, -1))


def _penalised(values: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Penalties as in vLLM: repetition is a factor that makes the logit smaller; then come frequency and presence."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)
