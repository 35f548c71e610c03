"""What each graph computes, and the tensors on the device that all of them read and write. Knows no graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.step.tensors import StepLayout, StepTensors, fill_in
from kvstore.kernels.paged_batch import DeviceBatch, PagedBatch


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
    """Tensors that all forms share, because forms run one after the other. They are not in the graphs' own memory."""

    def __init__(self, forms: Sequence[Form], config: SchedulerConfig, device: torch.device) -> None:
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
        return sum(tensor.nbytes for tensor in shared)

    def load(self, form: Form, inputs: StepInputs, table: np.ndarray, sampled: Tensor | None = None) -> None:
        """Copy a step's arrays, padded to the form, to where the graphs read them.

        Tokens that pad a prompt belong to no request: no token attends to them, and they attend to none. sampled: see
        `tensors.fill_in`."""
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
        of the capture.
        """
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
        batch = PagedBatch(host_start, host_lens, host_table, slots, self._block_size, on_device)
        return StepTensors(token_ids, positions, samples, batch)

    def share(self, logits: Tensor) -> Tensor:
        """Copy the logits to where all forms leave theirs. A step reads them before the next one begins."""
        if self._logits is None:
            self._logits = logits.new_empty((len(self._table), logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)
