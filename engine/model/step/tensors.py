"""A step's arrays as tensors: on a CPU in place, on CUDA after one copy of all arrays.

And for CUDA graphs what each computes (its form), and the tensors that all of them read and write. Knows no request and
no graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvstore.engine.config import SchedulerConfig
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


def for_windows(
    inputs: StepInputs, table: np.ndarray, window_of: np.ndarray, block_size: int
) -> tuple[StepInputs, np.ndarray]:
    """The step's arrays for layers with a window. window_of: see `WindowSlots.of`."""
    blocks, offsets = np.divmod(inputs.slots, block_size)
    return replace(inputs, slots=window_of[blocks].astype(np.int64) * block_size + offsets), window_of[table]


def step_tensors(
    inputs: StepInputs, table: np.ndarray, block_size: int, device: torch.device, window_of: np.ndarray | None = None
) -> StepTensors:
    """The step's tensors. table: [num_requests, width] block numbers, wide enough for the longest context. window_of:
    see `WindowSlots.of`; None: layers with a window have as many blocks as others.
    """
    windowed = None
    if window_of is not None:
        windowed = step_tensors(*for_windows(inputs, table, window_of, block_size), block_size, device).batch
    host_table = torch.from_numpy(table.astype(np.int64))
    query_start, context_lens = inputs.query_start.tolist(), inputs.context_lens.tolist()
    if device.type != "cuda":
        token_ids, positions, slots, sample_tokens = (
            torch.from_numpy(array).to(device)
            for array in (inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_tokens)
        )
        batch = PagedBatch(query_start, context_lens, host_table, slots, block_size, None, windowed)
        return StepTensors(token_ids, positions, sample_tokens, batch)
    layout = StepLayout(len(inputs.token_ids), len(inputs.rows), len(inputs.sample_tokens), table.shape[1])
    buffer = layout.pack(inputs, table, pinned=True).to(device, non_blocking=True)
    token_ids, positions, slots, sample_tokens, starts, lens, blocks = layout.unpack(buffer)
    counts = np.diff(inputs.query_start)
    num_decodes = int((counts == 1).sum())
    on_device = DeviceBatch(starts, lens, blocks, num_decodes, int(counts.max()), max(context_lens))
    batch = PagedBatch(query_start, context_lens, host_table, slots, block_size, on_device, windowed)
    return StepTensors(token_ids, positions, sample_tokens, batch)


@dataclass(frozen=True, slots=True)
class Form:
    """What a graph computes: one token each of several requests, or tokens of one, of which the last is sampled.

    Smaller steps are padded.
    """

    num_tokens: int
    num_requests: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests

    @property
    def layout(self) -> StepLayout:
        """The layout of a step's arrays without the block table, which has a place of its own."""
        return StepLayout(self.num_tokens, self.num_requests, self.num_requests, 0)

    def __str__(self) -> str:
        return f"{self.num_requests} requests" if self.is_decode else f"{self.num_tokens} tokens of a prompt"


class FormTensors:
    """Tensors that all forms share, because forms run one after the other. They are not in the graphs' own memory.

    windowed: those of layers with a window, which have slots and a block table of their own; None without any.
    """

    def __init__(self, forms: Sequence[Form], config: SchedulerConfig, device: torch.device) -> None:
        self.windowed: FormTensors | None = None
        if config.num_window_slots:
            self.windowed = FormTensors(forms, replace(config, num_window_slots=0), device)
        self._block_size, self._max_model_len = config.block_size, config.max_model_len
        self._pinned = device.type == "cuda"
        max_tokens, max_requests = (max(f.num_tokens for f in forms), max(f.num_requests for f in forms))
        self._ordinals = np.arange(max_tokens + 1)
        max_blocks = -(-config.max_model_len // config.block_size)
        places = StepLayout(max_tokens, max_requests, max_requests, max_blocks).places()
        self._arrived = torch.zeros(places[-1].stop, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=device)
        self._logits: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; complete once a step has run."""
        shared = [self._arrived, self._table, *([] if self._logits is None else [self._logits])]
        return sum(tensor.nbytes for tensor in shared) + (0 if self.windowed is None else self.windowed.num_bytes)

    def load(
        self, form: Form, inputs: StepInputs, table: np.ndarray, window_of: np.ndarray | None,
        sampled: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Copy a step's arrays, padded to the form, to where the graphs read them.

        Tokens that pad a prompt belong to no request: no token attends to them, and they attend to none. window_of: see
        `WindowSlots.of`. sampled: see `tensors.fill_in`."""
        if self.windowed is not None and window_of is not None:
            self.windowed.load(form, *for_windows(inputs, table, window_of, self._block_size), None, sampled)
        size, ordinals = form.num_requests, self._ordinals
        if form.is_decode:
            inputs = replace(inputs, query_start=ordinals[: size + 1], sample_tokens=ordinals[:size])
        layout = replace(form.layout, width=table.shape[1])
        buffer = layout.pack(inputs, table, self._pinned)
        self._arrived[: len(buffer)].copy_(buffer, non_blocking=True)
        token_ids, *_, blocks = layout.unpack(self._arrived)
        self._table[:size, : table.shape[1]].copy_(blocks)  # on the device; the rest of a row is not read
        if sampled is not None:
            fill_in(token_ids, sampled)

    def of(self, form: Form, inputs: StepInputs | None = None, table: np.ndarray | None = None) -> StepTensors:
        """The tensors that `load` has filled.

        Lists for the host come from the step's own arrays. In a capture there are none, as every replay would see those
        of the capture. Layers with a window get these for the arrays as they are.
        """
        windowed = None if self.windowed is None else self.windowed.of(form, inputs, table).batch
        token_ids, positions, slots, samples, query_start, lens, _ = form.layout.unpack(self._arrived)
        num_decodes, longest = (form.num_requests, 1) if form.is_decode else (0, form.num_tokens)
        blocks = self._table[: form.num_requests]
        on_device = DeviceBatch(query_start, lens, blocks, num_decodes, longest, self._max_model_len)
        host_table, host_lens = torch.zeros(0, 0, dtype=torch.int64), []
        host_start = [0, form.num_tokens] if not form.is_decode else self._ordinals[: form.num_requests + 1].tolist()
        if inputs is not None and table is not None:
            host_table = torch.zeros(form.num_requests, table.shape[1], dtype=torch.int64)
            host_table[: len(table)] = torch.from_numpy(table)
            host_lens = [*inputs.context_lens.tolist(), *[1] * (form.num_requests - len(table))]  # padding sees block 0
            host_start = host_start if form.is_decode else inputs.query_start.tolist()
        batch = PagedBatch(host_start, host_lens, host_table, slots, self._block_size, on_device, windowed)
        return StepTensors(token_ids, positions, samples, batch)

    def share(self, logits: Tensor) -> Tensor:
        """Copy the logits to where all forms leave theirs. A step reads them before the next one begins."""
        if self._logits is None:
            self._logits = logits.new_empty((len(self._table), logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)
