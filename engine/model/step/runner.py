"""Executes steps: batch rows, tensors, forward pass, sampling. Owns the HBM caches; decides nothing.

A step is launched, and its tokens are read: at once, or after the launch of the next step, which then takes them from
the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvstore.blocks.records import TransferPlan
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import InputBatch, StepInputs
from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import NewRow, SchedulerOutput
from kvstore.engine.core.step_loop import StepResult, StepTimes
from kvstore.engine.model.interception import KVCaches, PositionFreeModel
from kvstore.engine.model.step.drawing import SampledTokens
from kvstore.engine.model.step.graphs import Capturer, StepGraphs, capture_graphs
from kvstore.engine.model.step.launched import Launched, StepClock
from kvstore.engine.model.step.others import Flight, NoOthers, Others
from kvstore.engine.model.step.sampler import Sampler
from kvstore.engine.model.step.tensors import fill_in, step_tensors
from kvstore.engine.model.step.waiting import WAITING
from kvstore.engine.model.step.warm_up import warm_up
from kvstore.engine.outputs import TokenLogprob
from kvstore.kernels.cpu.threads import Team
from kvstore.kernels.device import start_to_host, to_device


class ModelRunner:
    """One model, its caches and its persistent batch.

    capturer: makes the graphs of decode steps; None: no graphs. others: the ranks with the other parts of the model.
    """

    def __init__(
        self, model: PositionFreeModel, config: SchedulerConfig, num_blocks: int, connector: KVConnector,
        capturer: Capturer | None = None, others: Others | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.connector = connector
        self.caches = model.new_caches(num_blocks, config.block_size)
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.sampler = Sampler(config.max_num_seqs, model.spec.vocab_size, model.device)
        self.times = StepTimes()
        self.clock = StepClock(model.device)
        self._unread: Launched | None = None  # the last step, until its tokens are read or the next step has taken them
        self._team = Team(model.is_native) if model.device.type == "cpu" else None
        connector.register_kv_caches(self.caches)
        self._prepared = partial(_prepared, model, self.caches, config, capturer)
        self._flight = Flight(lambda num_samples: self.model.end(num_samples), others or NoOthers())
        self.graphs: StepGraphs | None = None

    def prepare(self) -> None:
        """Called once, in the thread that is going to step: CUDA keeps a device and handles for each thread."""
        with WAITING.allowed():
            self.graphs = self._prepared()
        self._flight.others.check()
        self.times.num_graphs = 0 if self.graphs is None else self.graphs.num_graphs

    @contextmanager
    def working(self) -> Iterator[None]:
        """A step may run in this context. Trials that refuse to wait for the device run alone."""
        with WAITING.allowed(), self._flight.others.blamed():
            yield

    def rest(self) -> None:
        """No step is expected for a while."""
        if self._team is not None:
            self._team.rest()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> Launched:
        """Compute the scheduled tokens, and sample requests whose tokens are complete.

        The tokens of the previous step may be unread; then no request that sampled in it leaves or joins.
        """
        started = time.perf_counter()
        sampled = self._go_on_unread()
        self._update_rows(output)
        copies = self.batch.apply_allocations(output.scheduled)
        if not output.scheduled:
            return Launched(())
        inputs = self.batch.build(output.scheduled)
        if copies:
            copy_blocks(self.caches, copies, self.model.device)
        if output.plan is not None:
            row_starts = np.empty(len(inputs.order), dtype=np.int64)
            row_starts[inputs.order] = inputs.query_start[:-1]
            self.connector.start_load_kv(output.plan, row_starts.tolist())
        launched = Launched(output.scheduled, start=self.clock.mark())
        self._flight.begin(inputs, self.batch.block_table, copies)
        built = time.perf_counter()
        with nullcontext() if self._team is None else self._team.step(output.num_tokens):
            logits = self._forward(inputs, output.plan, sampled)
            computed = time.perf_counter()
            launched.note_samples(inputs)
            self._flight.computed(launched, logits)
            if logits is not None:
                self._draw(launched, inputs.sample_rows, logits)
        times, ended = self.times, time.perf_counter()
        self.clock.end(launched, output, ended - built)
        times.num_steps += 1
        times.build_s += built - started
        times.forward_s += computed - built
        times.sample_s += ended - computed
        self._unread = None if logits is None else launched
        return launched

    @torch.inference_mode()
    def read(self, launched: Launched) -> StepResult:
        """Wait for the tokens of a step, if it has sampled any."""
        if launched.is_open:
            self._end(launched)
        started = time.perf_counter()
        drawn, rows = launched.drawn, launched.rows
        if launched.end is None:
            self.clock.note(launched)
        if drawn is None or rows is None or launched.on_host is None or launched.positions is None:
            return StepResult([()] * len(launched.scheduled), {}, prefilled=self.clock.take_prefilled())
        if launched.end is not None:
            self.clock.wait(launched)
            self._flight.others.check()
        sampled = drawn.read(launched.on_host.numpy())
        first = np.cumsum([0, *launched.num_samples[:-1]])
        firsts = sampled.token_ids[first]
        ids = launched.sampling_ids
        if launched is self._unread:
            self._unread = None
            self.sampler.append(rows, firsts)
            self.batch.append(rows, firsts)
        else:
            self.batch.fill_in(ids, launched.positions, firsts)
        token_ids, logprobs = _by_request(launched, sampled, first.tolist())
        self.times.sample_s += time.perf_counter() - started
        undrawn = tuple(ids[i] for i in np.flatnonzero(firsts < 0))
        return StepResult(token_ids, logprobs, undrawn, self.clock.take_prefilled())

    def _end(self, launched: Launched) -> None:
        """Wait for the logits that a pipeline's last stage sends back, and sample requests that are still running."""
        started = time.perf_counter()
        ids = launched.sampling_ids
        with nullcontext() if self._team is None else self._team.step(len(ids)):
            logits = self._flight.end()
        launched.is_open = False
        computed = time.perf_counter()
        if kept := [index for index, request_id in enumerate(ids) if self.batch.has(request_id)]:
            launched.keep(kept)
            rows = np.array([self.batch.row(ids[index]) for index in kept])
            self._draw(launched, rows, logits if len(kept) == len(ids) else logits[kept])
            self._unread = launched
        launched.end = self.clock.mark()
        launched.seconds += computed - started
        self.times.forward_s += computed - started
        self.times.sample_s += time.perf_counter() - computed

    def _go_on_unread(self) -> Tensor | None:
        """Called before a launch. Returns the tokens of the previous step if they are unread: numbers below 0 stand for
        them. If that step has no tokens, wait for it, because what it saves is kept until it is computed.
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
        """Empty the batch after an error, as its rows cannot be trusted. The caches stay; nobody refers to them."""
        self._unread = None
        with torch.inference_mode():
            self._flight.reset()
        self.batch.reset()
        for row in range(self.batch.max_rows):
            self.sampler.clear_row(row)

    def close(self) -> None:
        """Drop the pool. Its memory is freed when nobody refers to it any more."""
        self.caches.clear()

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.left:
            hole, last = self.batch.remove(request_id)
            if hole != last:
                self.sampler.move_row(last, hole)
            self.sampler.clear_row(last)
        rows = [self.batch.join(new) for new in output.new_rows]  # all of them, before the sampler can fail
        for row, new in zip(rows, output.new_rows, strict=True):
            _set_sampling(self.sampler, row, new, self.batch.token_ids[row, : len(new.token_ids)])

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Overwrite these blocks with zeros. Does nothing after `close`."""
        overwrite_blocks(self.caches, blocks, self.model.device)
        self._flight.others.overwrite(blocks)

    def _forward(self, inputs: StepInputs, plan: TransferPlan | None, sampled: Tensor | None) -> Tensor | None:
        """The logits; None on the first stage of a pipeline, where they come later."""
        width = -(-int(inputs.context_lens.max()) // self.batch.block_size)
        table = self.batch.block_table[inputs.rows, :width]
        has_loads = plan is not None and bool(plan.loads)  # a graph does not wait for them layer by layer
        form = None if self.graphs is None or has_loads else self.graphs.form_of(inputs)
        if self.graphs is not None and form is not None:
            self.times.num_replays += 1
            return self.graphs.run(form, inputs, table, plan, self.connector, sampled)
        step = step_tensors(inputs, table, self.batch.block_size, self.model.device)
        if sampled is not None:
            fill_in(step.token_ids, sampled)
        logits = self.model.begin(
            step.token_ids, step.positions, step.batch, self.caches, self.connector, step.sample_tokens
        )
        self.connector.wait_for_save()
        return logits

    def _draw(self, launched: Launched, rows: np.ndarray, logits: Tensor) -> None:
        """Draw the step's tokens, and send them to the host. rows: of the batch, for each row of the logits."""
        if not len(rows):
            return
        launched.rows, counts, offsets = rows, launched.num_samples, None
        if max(counts) > 1:  # choices of one request have the same logits, but each has a random stream of its own
            source = np.repeat(np.arange(len(counts)), counts)
            offsets = np.concatenate([np.arange(count) for count in counts])
            rows = rows[source]
            logits = logits[to_device(torch.from_numpy(source), logits.device)]
        launched.drawn = self.sampler.draw(logits, rows, offsets)
        launched.on_host = start_to_host(launched.drawn.tokens)


def _set_sampling(sampler: Sampler, row: int, new: NewRow, tokens: np.ndarray) -> None:
    request = new.request
    prompt, answer = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
    sampler.set_row(row, request.params, request.seed, stop_ids(request), prompt, answer)


def _by_request(
    launched: Launched, sampled: SampledTokens, firsts: Sequence[int]
) -> tuple[list[Sequence[int]], dict[int, list[TokenLogprob | None]]]:
    """Tokens and logprobs for a `StepResult`. firsts: index of each request's first sample."""
    token_ids: list[Sequence[int]] = [()] * len(launched.scheduled)
    logprobs: dict[int, list[TokenLogprob | None]] = {}
    tokens = sampled.token_ids.tolist()
    for i, start, count in zip(launched.sampling, firsts, launched.num_samples, strict=True):
        token_ids[i] = tokens[start : start + count]
        if sampled.logprobs is not None:
            logprobs[i] = sampled.logprobs[start : start + count]
    return token_ids, logprobs


def _prepared(
    model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig, capturer: Capturer | None
) -> StepGraphs | None:
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
        warm_up(model, caches, config)
    return None if capturer is None else capture_graphs(model, caches, config, capturer)


def overwrite_blocks(caches: KVCaches, blocks: Sequence[int], device: torch.device) -> None:
    """Overwrite these blocks with zeros."""
    where = to_device(torch.tensor(blocks), device)
    for layer in caches:
        for cache in layer:
            cache.index_fill_(0, where, 0)


def copy_blocks(caches: KVCaches, copies: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Copy whole blocks, (source, destination). All sources are read before any destination is written."""
    source, destination = to_device(torch.tensor(copies).T.contiguous(), device)
    for layer in caches:
        for cache in layer:
            cache.index_copy_(0, destination, cache.index_select(0, source))


def stop_ids(request: Request) -> list[int]:
    """The ids that end a request. min_tokens forbids them for a while."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return [*eos, *request.params.stop_token_ids]
