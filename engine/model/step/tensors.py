"""A step's arrays as tensors: on a CPU in place, on CUDA after one copy of all arrays.

Knows numbers and tensors, no request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.engine.core.input_batch import StepInputs
from kvstore.kernels.paged_batch import DeviceBatch, PagedBatch

_UNIT = 4  # int32 numbers: every array begins at a multiple of 16 bytes, else Triton compiles another kernel
_PADDING = (0, 0, -1, 0, 0, 0, 0)  # of each array below; nothing is written to slot -1


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's arrays, all int64."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    sample_tokens: Tensor  # [num_samples], tokens whose logits are wanted
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where a step's arrays are in one int32 buffer: token ids, positions, slots and sample tokens as int64, then query
    start, context lengths and the block table.
    """

    num_tokens: int
    num_requests: int
    num_samples: int
    width: int  # of the block table, in blocks

    def places(self) -> list[slice]:
        tokens, samples, requests = 2 * self.num_tokens, 2 * self.num_samples, self.num_requests
        counts = (tokens, tokens, tokens, samples, requests + 1, requests, requests * self.width)
        starts = itertools.accumulate((-(-count // _UNIT) * _UNIT for count in counts), initial=0)
        return [slice(start, start + count) for start, count in zip(starts, counts, strict=False)]

    def pack(self, inputs: StepInputs, table: np.ndarray, pinned: bool) -> Tensor:
        """The arrays in a buffer on the host, a new one for every step.

        table: [requests of the step, width]. If the layout has more requests than the step, padding follows. Torch
        reuses pinned memory only when the copies from it have ended, so nobody overwrites a buffer that is still read.
        """
        places = self.places()
        buffer = torch.empty(places[-1].stop, dtype=torch.int32, pin_memory=pinned)
        numbers = buffer.numpy()
        arrays = (
            inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_tokens,
            inputs.query_start, inputs.context_lens, table.reshape(-1),
        )  # fmt: skip
        for i, (place, array, padding) in enumerate(zip(places, arrays, _PADDING, strict=True)):
            part = numbers[place].view(np.int64) if i < 4 else numbers[place]
            part[: len(array)] = array
            part[len(array) :] = padding
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The arrays in this order, as views of a buffer on any device. The block table is [num_requests, width]."""
        parts = [buffer[place] for place in self.places()]
        wide = [part.view(torch.int64) for part in parts[:4]]
        return [*wide, *parts[4:6], parts[6].view(self.num_requests, self.width)]


def fill_in(token_ids: Tensor, sampled: Tensor) -> None:
    """Replace the numbers below 0 in `StepInputs` by the previous step's samples [num_samples]. Waits for nothing.

    A sample below 0 was not drawn yet. Whatever is computed from it is thrown away.
    """
    known = sampled.clamp(min=0)[(-1 - token_ids).clamp_(min=0)]
    token_ids.copy_(torch.where(token_ids < 0, known, token_ids))


def step_tensors(inputs: StepInputs, table: np.ndarray, block_size: int, device: torch.device) -> StepTensors:
    """The step's tensors. table: [num_requests, width] block numbers, wide enough for the longest context."""
    host_table = torch.from_numpy(table.astype(np.int64))
    query_start, context_lens = inputs.query_start.tolist(), inputs.context_lens.tolist()
    if device.type != "cuda":
        token_ids, positions, slots, sample_tokens = (
            torch.from_numpy(array).to(device)
            for array in (inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_tokens)
        )
        batch = PagedBatch(query_start, context_lens, host_table, slots, block_size)
        return StepTensors(token_ids, positions, sample_tokens, batch)
    layout = StepLayout(len(inputs.token_ids), len(inputs.rows), len(inputs.sample_tokens), table.shape[1])
    buffer = layout.pack(inputs, table, pinned=True).to(device, non_blocking=True)
    token_ids, positions, slots, sample_tokens, starts, lens, blocks = layout.unpack(buffer)
    counts = np.diff(inputs.query_start)
    num_decodes = int((counts == 1).sum())
    on_device = DeviceBatch(starts, lens, blocks, num_decodes, int(counts.max()), max(context_lens))
    batch = PagedBatch(query_start, context_lens, host_table, slots, block_size, on_device)
    return StepTensors(token_ids, positions, sample_tokens, batch)
