"""Executes one step: batch rows, tensors, forward pass, sampling. Owns the HBM caches; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import SchedulerConfig
from engine.input_batch import InputBatch, StepInputs
from engine.model import PositionFreeModel
from engine.outputs import TokenLogprob
from engine.request import Request
from engine.sampler import Sampler
from engine.scheduler import NewRow, Scheduled, SchedulerOutput
from kernels.attention import PagedBatch
from kvstore.connector import KVConnector


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per scheduled request, in order: its sampled tokens (none, one, or n) and, where asked, their logprobs."""

    token_ids: list[Sequence[int]]
    logprobs: dict[int, list[TokenLogprob | None]]  # index in `scheduled` -> one per sampled token


@dataclass(slots=True)
class StepTimes:
    """Running totals in seconds, and how often; where a step's time goes."""

    num_steps: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0


class ModelRunner:
    """One model, its caches and its persistent batch."""

    def __init__(
        self, model: PositionFreeModel, config: SchedulerConfig, num_blocks: int, connector: KVConnector
    ) -> None:
        self.model = model
        self.block_size = config.block_size
        self.connector = connector
        self.caches = model.new_caches(num_blocks, config.block_size)
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.sampler = Sampler(config.max_num_seqs, model.spec.vocab_size, model.device)
        self.times = StepTimes()
        connector.register_kv_caches(self.caches)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run the scheduled tokens and sample where a request's tokens are complete."""
        started = time.perf_counter()
        self._update_rows(output)
        copies = self.batch.apply_allocations(output.scheduled)
        if not output.scheduled:
            return StepResult([], {})
        inputs = self.batch.build(output.scheduled)
        if copies:
            self._copy_blocks(copies)
        if output.plan is not None:
            row_starts = np.empty(len(inputs.order), dtype=np.int64)
            row_starts[inputs.order] = inputs.query_start[:-1]
            self.connector.start_load_kv(output.plan, row_starts.tolist())
        built = time.perf_counter()
        logits = self._forward(inputs)
        self.connector.wait_for_save()
        computed = time.perf_counter()
        result = self._sample(inputs, output.scheduled, logits)
        times = self.times
        times.num_steps += 1
        times.build_s += built - started
        times.forward_s += computed - built
        sampled = time.perf_counter()
        times.sample_s += sampled - computed
        num_prefill_tokens = sum(s.num_tokens for s in output.scheduled if s.num_tokens > 1)
        has_loaded = output.plan is not None and bool(output.plan.loads)  # then the step has waited for its loads, too
        if 2 * num_prefill_tokens > output.num_tokens and not has_loaded and times.num_steps > 1:  # the first is slow
            self.connector.step_measured(num_prefill_tokens, sampled - built)
        return result

    def reset(self) -> None:
        """Empty the batch: after an error left rows that cannot be trusted. The caches stay; nobody refers to them."""
        self.batch.reset()
        for row in range(self.batch.max_rows):
            self.sampler.clear_row(row)

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.left:
            hole, last = self.batch.leave(request_id)
            if hole != last:
                self.sampler.move_row(last, hole)
            self.sampler.clear_row(last)
        rows = [self.batch.join(new) for new in output.new_rows]  # all, before anything of the sampler can fail
        for row, new in zip(rows, output.new_rows, strict=True):
            self._set_sampling(row, new)

    def _set_sampling(self, row: int, new: NewRow) -> None:
        request = new.request
        tokens = self.batch.token_ids[row, : len(new.token_ids)]
        prompt, answer = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
        self.sampler.set_row(row, request.params, request.seed, stop_ids(request), prompt, answer)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy on write: whole blocks, all sources read before any destination is written."""
        source, destination = (torch.tensor(side, device=self.model.device) for side in zip(*copies, strict=True))
        for layer in self.caches:
            for cache in layer:
                cache.index_copy_(0, destination, cache.index_select(0, source))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        device = self.model.device
        width = -(-int(inputs.context_lens.max()) // self.block_size)
        table = torch.from_numpy(self.batch.block_table[inputs.rows, :width].astype(np.int64))
        batch = PagedBatch(
            inputs.query_start.tolist(),
            inputs.context_lens.tolist(),
            table,
            torch.from_numpy(inputs.slots).to(device),
            self.block_size,
        )
        return self.model.forward(
            torch.from_numpy(inputs.token_ids).to(device),
            torch.from_numpy(inputs.positions).to(device),
            batch,
            self.caches,
            self.connector,
            torch.from_numpy(inputs.sample_tokens).to(device),
        )

    def _sample(self, inputs: StepInputs, scheduled: tuple[Scheduled, ...], logits: torch.Tensor) -> StepResult:
        token_ids: list[Sequence[int]] = [()] * len(scheduled)
        if not len(inputs.sample_rows):
            return StepResult(token_ids, {})
        sampling = [i for i in inputs.order.tolist() if scheduled[i].num_samples]
        counts = [scheduled[i].num_samples for i in sampling]
        rows, offsets = inputs.sample_rows, None
        if max(counts) > 1:  # choices of one request: the same logits, one random stream each
            source = np.repeat(np.arange(len(counts)), counts)
            offsets = np.concatenate([np.arange(count) for count in counts])
            rows = rows[source]
            logits = logits[torch.from_numpy(source).to(logits.device)]
        sampled = self.sampler.sample(logits, rows, offsets)
        first = np.cumsum([0, *counts[:-1]])
        firsts = sampled.token_ids[first]
        self.sampler.append(inputs.sample_rows, firsts)
        self.batch.append(inputs.sample_rows, firsts)
        tokens = sampled.token_ids.tolist()
        logprobs: dict[int, list[TokenLogprob | None]] = {}
        for i, start, count in zip(sampling, first.tolist(), counts, strict=True):
            token_ids[i] = tokens[start : start + count]
            if sampled.logprobs is not None and scheduled[i].num_samples:
                logprobs[i] = sampled.logprobs[start : start + count]
        return StepResult(token_ids, logprobs)


def stop_ids(request: Request) -> list[int]:
    """Ids that end a request, which min_tokens forbids until then."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return [*eos, *request.params.stop_token_ids]
