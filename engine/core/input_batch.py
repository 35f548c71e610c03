"""The persistent batch: arrays that live from step to step, in which requests join and leave in place.

Turns a SchedulerOutput into the flat arrays of one forward pass, without Python per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import Scheduled

Copies = Sequence[tuple[int, int]]  # of whole HBM blocks or window slots: source, destination


def slot_mapping(
    block_table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:  # [num_tokens]
    """Slot of each token: `block_table[row, position // block_size] * block_size + position % block_size`.

    block_table: [num_rows, max_blocks] block numbers; rows, positions: [num_tokens].
    """
    return block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flat arrays of one step, tokens of one request side by side; single-token requests come first.

    token_ids, positions, slots: [num_tokens]. query_start: [num_requests + 1], first token of each request.
    context_lens: [num_requests], tokens of each request after the step. rows: its row in the batch. sample_tokens:
    index of the token whose logits are sampled, one per request that samples; sample_rows: its row. order: the step's
    requests are `scheduled[order[i]]`. A token id of -1 - i stands for sample i of the previous step, whose id is only
    on the device.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    rows: np.ndarray
    sample_tokens: np.ndarray
    sample_rows: np.ndarray
    order: np.ndarray


class InputBatch:
    """Rows 0 .. num_rows - 1, one per running request; the last row moves into a hole."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.max_rows = max_num_seqs
        self.reset()

    def reset(self) -> None:
        """Remove all rows."""
        self.num_rows = 0
        self._row_of: dict[str, int] = {}
        self._id_of: list[str] = []

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def has(self, request_id: str) -> bool:
        return request_id in self._row_of

    def join(self, request: Request) -> int:
        """Add a request as the last row; returns its row."""
        row = self.num_rows
        self.num_rows += 1
        self._row_of[request.request_id] = row
        self._id_of.append(request.request_id)
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.block_table[row, : len(request.block_numbers)] = request.block_numbers
        return row

    def remove(self, request_id: str) -> tuple[int, int]:
        """Remove a request; returns (hole, last): what was in row `last` is now in row `hole` (maybe the same)."""
        hole, last = self._row_of.pop(request_id), self.num_rows - 1
        last_id = self._id_of.pop()
        self.num_rows = last
        if hole != last:
            count = self.num_tokens[last]
            self.token_ids[hole, :count] = self.token_ids[last, :count]
            self.num_tokens[hole] = count
            self.block_table[hole] = self.block_table[last]
            self._row_of[last_id] = hole
            self._id_of[hole] = last_id
        return hole, last

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def fill_in(self, request_ids: Sequence[str], positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Replace the placeholders of these tokens, one per request, by their ids. Requests that have left are
        skipped.
        """
        rows = np.fromiter((self._row_of.get(request_id, -1) for request_id in request_ids), np.int64, len(request_ids))
        found = rows >= 0
        self.token_ids[rows[found], positions[found]] = token_ids[found]

    def build(self, scheduled: tuple[Scheduled, ...]) -> StepInputs:
        """The arrays of this step. New blocks must have been applied (see `apply_allocations`)."""
        counts = np.fromiter((s.num_tokens for s in scheduled), np.int64, len(scheduled))
        order = np.argsort(counts > 1, kind="stable")
        rows = np.fromiter((self._row_of[s.request_id] for s in scheduled), np.int64, len(scheduled))[order]
        starts = np.fromiter((s.num_computed_tokens for s in scheduled), np.int64, len(scheduled))[order]
        samples = np.fromiter((s.num_samples > 0 for s in scheduled), np.bool_, len(scheduled))[order]
        counts = counts[order]
        query_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        return StepInputs(
            token_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slots=slot_mapping(self.block_table, token_rows, positions, self.block_size),
            query_start=query_start,
            context_lens=starts + counts,
            rows=rows,
            sample_tokens=(query_start[1:] - 1)[samples],
            sample_rows=rows[samples],
            order=order,
        )

    def table_of(self, inputs: StepInputs) -> np.ndarray:
        """The block table of a step's requests, [num_requests, width], wide enough for the longest context."""
        width = -(-int(inputs.context_lens.max()) // self.block_size)
        return self.block_table[inputs.rows, :width]

    def apply_allocations(self, scheduled: tuple[Scheduled, ...]) -> Copies:
        """Write the new block numbers into the table; returns the block copies of the step."""
        copies = []
        for step in scheduled:
            allocation = step.allocation
            if allocation.block_numbers:
                first, row = allocation.first_index, self._row_of[step.request_id]
                self.block_table[row, first : first + len(allocation.block_numbers)] = allocation.block_numbers
                if allocation.copy is not None:
                    copies.append(allocation.copy)
        return copies
