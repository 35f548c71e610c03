"""Executes steps: batch rows, tensors, forward pass, sampling. Owns the HBM caches; decides nothing.

A step is launched, and its tokens are read: at once, or behind the launch of the next one, which then takes them on the
device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from kvstore.blocks.records import TransferPlan
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import InputBatch, StepInputs
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import NewRow, SchedulerOutput
from kvstore.engine.core.steps import StepResult, StepTimes
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.step.graphs import Capturer, StepGraphs, capture_graphs
from kvstore.engine.model.step.launched import Launched, StepClock
from kvstore.engine.model.step.sampler import Sampler
from kvstore.engine.model.step.tensors import fill_in, step_tensors
from kvstore.engine.model.step.waiting import WAITING
from kvstore.engine.model.step.warm_up import warm_up
from kvstore.engine.outputs import TokenLogprob
from kvstore.kernels.cpu.threads import Team
from kvstore.kernels.device import start_to_host, to_device


class ModelRunner:
    """One model, its caches and its persistent batch. capturer: makes the graphs of decode steps, None for none."""

    def __init__(
        self, model: PositionFreeModel, config: SchedulerConfig, num_blocks: int, connector: KVConnector,
        capturer: Capturer | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.connector = connector
        self.caches = model.new_caches(num_blocks, config.block_size)
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.sampler = Sampler(config.max_num_seqs, model.spec.vocab_size, model.device)
        self.times = StepTimes()
        self.clock = StepClock(model.device, connector)
        self._unread: Launched | None = None  # the last step, until its tokens are read or stand in the next one
        self._team = Team(model.is_native) if model.device.type == "cpu" else None
        connector.register_kv_caches(self.caches)
        self._config = config
        self._capturer = capturer
        self.graphs: StepGraphs | None = None

    def prepare(self) -> None:
        """In the thread that is going to step, before it does: CUDA keeps a device and handles for each thread."""
        with WAITING.allowed():
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
                warm_up(self.model, self.caches, self._config)
            if self._capturer is not None:
                self.graphs = capture_graphs(self.model, self.caches, self._config, self._capturer)
        self.times.num_graphs = 0 if self.graphs is None else self.graphs.num_graphs

    def working(self) -> AbstractContextManager[None]:
        """In here a step may run; trials that refuse to wait for the device run alone."""
        return WAITING.allowed()

    def rest(self) -> None:
        """No step is expected for a while."""
        if self._team is not None:
            self._team.rest()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> Launched:
        """Run the scheduled tokens and sample where a request's tokens are complete. Tokens of the step before may not
        have been read; then nobody leaves or joins who sampled in it.
        """
        started = time.perf_counter()
        sampled = self._go_on_unread()
        self._update_rows(output)
        copies = self.batch.apply_allocations(output.scheduled)
        if not output.scheduled:
            return Launched(())
        inputs = self.batch.build(output.scheduled)
        if copies:
            self._copy_blocks(copies)
        if output.plan is not None:
            row_starts = np.empty(len(inputs.order), dtype=np.int64)
            row_starts[inputs.order] = inputs.query_start[:-1]
            self.connector.start_load_kv(output.plan, row_starts.tolist())
        launched = Launched(output.scheduled, start=self.clock.mark())
        built = time.perf_counter()
        with nullcontext() if self._team is None else self._team.step(output.num_tokens):
            logits = self._forward(inputs, output.plan, sampled)
            computed = time.perf_counter()
            self._draw(inputs, launched, logits)
        times, ended = self.times, time.perf_counter()
        self.clock.end(launched, output, ended - built)
        times.num_steps += 1
        times.build_s += built - started
        times.forward_s += computed - built
        times.sample_s += ended - computed
        self._unread = launched
        return launched

    @torch.inference_mode()
    def read(self, launched: Launched) -> StepResult:
        """Waits for the tokens of a step, if it has sampled any."""
        started = time.perf_counter()
        token_ids: list[Sequence[int]] = [()] * len(launched.scheduled)
        drawn, rows = launched.drawn, launched.rows
        if launched.end is None:
            self.clock.tell(launched)
        if drawn is None or rows is None or launched.on_host is None or launched.positions is None:
            return StepResult(token_ids, {})
        if launched.end is not None:
            self.clock.wait(launched)
        sampled = drawn.read(launched.on_host.numpy())
        first = np.cumsum([0, *launched.num_samples[:-1]])
        firsts = sampled.token_ids[first]
        ids = [launched.scheduled[i].request_id for i in launched.sampling]
        if launched is self._unread:
            self._unread = None
            self.sampler.append(rows, firsts)
            self.batch.append(rows, firsts)
        else:
            self.batch.fill_in(ids, launched.positions, firsts)
        tokens = sampled.token_ids.tolist()
        logprobs: dict[int, list[TokenLogprob | None]] = {}
        for i, start, count in zip(launched.sampling, first.tolist(), launched.num_samples, strict=True):
            token_ids[i] = tokens[start : start + count]
            if sampled.logprobs is not None:
                logprobs[i] = sampled.logprobs[start : start + count]
        self.times.sample_s += time.perf_counter() - started
        return StepResult(token_ids, logprobs, tuple(ids[i] for i in np.flatnonzero(firsts < 0)))

    def _go_on_unread(self) -> Tensor | None:
        """Before a launch. Returns the tokens of the step before, if they have not been read: numbers below 0 stand for
        them. Where it has none it is waited for: what is to be saved of a step is kept until it is computed.
        """
        last, self._unread = self._unread, None
        if last is None or last.drawn is None or last.rows is None:
            if last is not None and last.end is not None:
                self.clock.wait(last)
            return None
        tokens, last.drawn.drawing = last.drawn.tokens, None
        self.sampler.append(last.rows, tokens)
        self.batch.append(last.rows, -1 - np.arange(len(last.rows)))
        return tokens

    def reset(self) -> None:
        """Empty the batch: after an error left rows that cannot be trusted. The caches stay; nobody refers to them."""
        self._unread = None
        self.batch.reset()
        for row in range(self.batch.max_rows):
            self.sampler.clear_row(row)

    def close(self) -> None:
        """The pool's memory goes with whoever looks at it last."""
        self.caches.clear()

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.left:
            hole, last = self.batch.remove(request_id)
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

    def overwrite(self, blocks: Sequence[int]) -> None:
        """With zeros. Nothing, once the caches are given up."""
        where = to_device(torch.tensor(blocks), self.model.device)
        for layer in self.caches:
            for cache in layer:
                cache.index_fill_(0, where, 0)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy on write: whole blocks, all sources read before any destination is written."""
        source, destination = to_device(torch.tensor(copies).T.contiguous(), self.model.device)
        for layer in self.caches:
            for cache in layer:
                cache.index_copy_(0, destination, cache.index_select(0, source))

    def _forward(self, inputs: StepInputs, plan: TransferPlan | None, sampled: Tensor | None) -> Tensor:
        width = -(-int(inputs.context_lens.max()) // self._config.block_size)
        table = self.batch.block_table[inputs.rows, :width]
        has_loads = plan is not None and bool(plan.loads)  # layer by layer, which a graph does not wait for
        form = None if self.graphs is None or has_loads else self.graphs.form_of(inputs)
        if self.graphs is not None and form is not None:
            self.times.num_replays += 1
            return self.graphs.run(form, inputs, table, plan, self.connector, sampled)
        step = step_tensors(inputs, table, self._config.block_size, self.model.device)
        if sampled is not None:
            fill_in(step.token_ids, sampled)
        logits = self.model.forward(
            step.token_ids, step.positions, step.batch, self.caches, self.connector, step.sample_tokens
        )
        self.connector.wait_for_save()
        return logits

    def _draw(self, inputs: StepInputs, launched: Launched, logits: Tensor) -> None:
        """The step's tokens, on their way to the host."""
        if not len(inputs.sample_rows):
            return
        scheduled = launched.scheduled
        sampling = [i for i in inputs.order.tolist() if scheduled[i].num_samples]
        counts = [scheduled[i].num_samples for i in sampling]
        rows, offsets = inputs.sample_rows, None
        if max(counts) > 1:  # choices of one request: the same logits, one random stream each
            source = np.repeat(np.arange(len(counts)), counts)
            offsets = np.concatenate([np.arange(count) for count in counts])
            rows = rows[source]
            logits = logits[to_device(torch.from_numpy(source), logits.device)]
        drawn = self.sampler.draw(logits, rows, offsets)
        launched.sampling, launched.num_samples, launched.drawn = sampling, counts, drawn
        launched.rows, launched.positions = inputs.sample_rows, inputs.positions[inputs.sample_tokens] + 1
        launched.on_host = start_to_host(drawn.tokens)


def stop_ids(request: Request) -> list[int]:
    """Ids that end a request, which min_tokens forbids until then."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return [*eos, *request.params.stop_token_ids]
