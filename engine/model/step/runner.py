"""Executes steps: batch rows, tensors, forward pass, sampling. Owns the HBM caches; decides nothing.

A step is launched, and its tokens are read: at once, or after the launch of the next step, which then takes them from
the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import Copies, InputBatch, StepInputs
from kvstore.engine.core.scheduler import Scheduled, SchedulerOutput
from kvstore.engine.core.step_loop import StepResult, StepTimes
from kvstore.engine.model.devices import warm_up
from kvstore.engine.model.interception import KVCaches, PositionFreeModel
from kvstore.engine.model.states import Chunk, StatePool, StepStates
from kvstore.engine.model.step.graphs import Capturer, StepGraphs, capture_graphs
from kvstore.engine.model.step.sampler import Drawing, SampledTokens, Sampler
from kvstore.engine.model.step.tensors import fill_in, step_tensors
from kvstore.engine.model.windows import WindowStates
from kvstore.engine.outputs import TokenLogprob
from kvstore.errors import EngineDiedError
from kvstore.kernels.cpu.threads import Team
from kvstore.kernels.paged_batch import start_to_host, to_device
from kvstore.memory.layout import States
from kvstore.store.seam import Prefilled


@dataclass(slots=True)
class Launched:
    """A step that the device may still be computing."""

    scheduled: tuple[Scheduled, ...]
    num_prefill_tokens: int = 0  # 0 if its time is not to be noted
    start: torch.cuda.Event | None = None  # None on a CPU, as is `end`
    end: torch.cuda.Event | None = None
    seconds: float = 0.0  # that the launch took, which on a CPU computes the step
    sampling: Sequence[int] = ()  # indices in `scheduled` of the requests that sample
    num_samples: Sequence[int] = ()  # of each of these
    rows: np.ndarray | None = None  # their rows in the batch; valid until the next launch
    positions: np.ndarray | None = None  # of their tokens
    held: tuple[np.ndarray, torch.Tensor] | None = None  # rows and logits that are drawn later
    drawing: Drawing | None = None  # None also once the next step has taken its tokens
    on_host: torch.Tensor | None = None  # has the tokens once `end` is reached
    is_open: bool = False  # whether its logits still have to come back from a pipeline's last stage

    def note_samples(self, inputs: StepInputs) -> None:
        self.sampling = [i for i in inputs.order.tolist() if self.scheduled[i].num_samples]
        self.num_samples = [self.scheduled[i].num_samples for i in self.sampling]
        self.positions = inputs.positions[inputs.sample_tokens] + 1

    @property
    def sampling_ids(self) -> list[str]:
        return [self.scheduled[i].request_id for i in self.sampling]

    def keep(self, kept: Sequence[int]) -> None:
        """Only these of the requests that sample."""
        self.sampling = [self.sampling[index] for index in kept]
        self.num_samples = [self.num_samples[index] for index in kept]


class StepClock:
    """Times steps on their device, to know how fast prompts are computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.type == "cuda" else -1  # -1: no device is set
        self._prefilled: list[Prefilled] = []  # that nobody has asked for yet
        self._is_warm = False

    def mark(self) -> torch.cuda.Event | None:
        """An event on the device's clock; None on a CPU, where a step has ended when its call returns."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # else a wait takes a core for the whole step
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, launched: Launched, output: SchedulerOutput, seconds: float) -> None:
        """Note that the launch took so many seconds, which on a CPU is the time of the step."""
        launched.end, launched.seconds = self.mark(), seconds
        count = sum(s.num_tokens for s in output.scheduled if s.num_tokens > 1)
        has_loaded = output.plan is not None and bool(output.plan.loads)  # such a step has waited for its loads, too
        if 2 * count > output.num_tokens and not has_loaded and self._is_warm:  # the first step is slow
            launched.num_prefill_tokens = count
        self._is_warm = True

    def wait(self, launched: Launched) -> None:
        """Wait until the step has ended. For CUDA."""
        assert launched.end is not None
        with torch.cuda.device(self._index):  # see `kvstore.memory.streams`
            launched.end.synchronize()
        self.note(launched)

    def note(self, launched: Launched) -> None:
        """Note the time of a step that has ended."""
        if launched.num_prefill_tokens:
            seconds = launched.seconds
            if launched.start is not None and launched.end is not None:
                seconds = launched.start.elapsed_time(launched.end) / 1000
            self._prefilled.append(Prefilled(launched.num_prefill_tokens, seconds))

    def take_prefilled(self) -> Sequence[Prefilled]:
        """The times that were noted since the last call."""
        found, self._prefilled = self._prefilled, []
        return found


class Others(Protocol):
    """The other ranks. Only the thread that steps calls it. These methods do nothing."""

    def check(self) -> None:
        """Raises EngineDiedError if one has ended. A device does not notice that, and goes on with wrong sums."""
        return

    def blamed(self) -> AbstractContextManager[None]:
        """If another rank has caused an error in this context, raise that rank's error instead."""
        return nullcontext()

    def begin_step(
        self, inputs: StepInputs, table: np.ndarray, window_of: np.ndarray | None, copies: tuple[Copies, Copies]
    ) -> None:
        """Let them compute this step, too. table: its block table; window_of: see `WindowSlots.of`; copies:
        HBM blocks and window slots to copy first.
        """
        return

    def end_forward(self, num_samples: int) -> None:
        """Called on the first stage of a pipeline, before this rank waits for so many rows of the oldest step."""
        return

    def overwrite(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite these HBM blocks and window slots with zeros."""
        return

    def kill(self) -> None:
        """End them: this rank has left a forward, for which they may wait for ever."""
        return


class NoOthers(Others):
    """For a model that one rank computes."""


class Flight:
    """Steps between their launch and the end of their forward on all ranks. end: see `PositionFreeModel.end`."""

    def __init__(self, end: Callable[[int], Tensor], others: Others) -> None:
        self.others = others
        self._end = end
        self._open = deque[int]()  # samples of each step whose logits still have to come from the last stage
        self._is_in_forward = False

    def begin(
        self, inputs: StepInputs, table: np.ndarray, window_of: np.ndarray | None, copies: tuple[Copies, Copies]
    ) -> None:
        """A forward begins here; see `Others.begin_step`."""
        self.others.begin_step(inputs, table, window_of, copies)
        self._is_in_forward = True

    def computed(self, launched: Launched, logits: Tensor | None) -> None:
        """The forward has ended here. Notes whether the step is open."""
        self._is_in_forward = False
        launched.is_open = logits is None and bool(launched.sampling)
        if launched.is_open:
            self._open.append(len(launched.sampling))

    def end(self) -> Tensor:
        """Wait for the logits of the oldest open step."""
        num_samples = self._open.popleft()
        self.others.end_forward(num_samples)
        self._is_in_forward = True
        logits = self._end(num_samples)
        self._is_in_forward = False
        return logits

    def reset(self) -> None:
        """Called after an error. Waits for the steps in flight, unless this rank has left a forward."""
        with suppress(EngineDiedError):
            while self._open and not self._is_in_forward:
                self.end()
        if self._is_in_forward:
            self.others.kill()
        self._open.clear()
        self._is_in_forward = False


class HBMCaches:
    """This rank's pool. layers: the caches of its layers; emptied when the pool is dropped. blocks, slots: of HBM, and
    of windows.
    """

    def __init__(self, model: PositionFreeModel, num_blocks: int, block_size: int, num_window_slots: int) -> None:
        self.layers = model.new_caches(num_blocks, block_size, num_window_slots)
        self._numbers, self._device = model.spec.numbers, model.device

    def of(self, windowed: bool) -> KVCaches:
        """The caches whose blocks are window slots, or those whose blocks are HBM blocks."""
        own = zip(self._numbers, self.layers, strict=False)
        return [cache for number, cache in own if (number is None) == windowed]

    @property
    def windows(self) -> States | None:
        """None if no layer has a window."""
        windowed = self.of(windowed=True)
        return WindowStates(windowed) if windowed else None

    def copy(self, blocks: Copies, slots: Copies) -> None:
        """Copy whole ones. All sources are read before any destination is written."""
        for windowed, copies in ((False, blocks), (True, slots)):
            if copies:
                source, destination = to_device(torch.tensor(copies).T.contiguous(), self._device)
                for layer in self.of(windowed):
                    for cache in layer:
                        cache.index_copy_(0, destination, cache.index_select(0, source))

    def overwrite(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite these with zeros."""
        for windowed, numbers in ((False, blocks), (True, slots)):
            where = to_device(torch.tensor(numbers, dtype=torch.int64), self._device)
            for layer in self.of(windowed):
                for cache in layer:
                    cache.index_fill_(0, where, 0)


class ModelRunner:
    """One model, its caches and its persistent batch.

    capturer: makes the graphs of decode steps; None: no graphs. others: the ranks with the other parts of the model.
    window_of: see `WindowSlots.of`; the scheduler changes it between launches.
    """

    def __init__(
        self, model: PositionFreeModel, config: SchedulerConfig, num_blocks: int, connector: KVConnector,
        capturer: Capturer | None = None, others: Others | None = None, window_of: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.connector = connector
        self._hbm = HBMCaches(model, num_blocks, config.block_size, config.num_window_slots)
        self.caches = self._hbm.layers
        self._window_of = window_of
        self.states = (
            None if model.spec.state is None else StatePool(model.spec.state, config.num_state_slots, model.device)
        )
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.sampler = Sampler(config.max_num_seqs, model.spec.vocab_size, model.device)
        self.times = StepTimes()
        self.clock = StepClock(model.device)
        self._unread: Launched | None = None  # the last step, until its tokens are read or the next step has taken them
        self._team = Team(model.is_native) if model.device.type == "cpu" else None
        connector.register_kv_caches(self._hbm.of(windowed=False), self._hbm.windows or self.states)
        self._config, self._capturer = config, capturer
        self._flight = Flight(lambda num_samples: self.model.end(num_samples), others or NoOthers())
        self.graphs: StepGraphs | None = None

    def prepare(self) -> None:
        """Called once, in the thread that is going to step: CUDA keeps a device and handles for each thread."""
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
            warm_up(self.model, self.caches, self._config)
        if self._capturer is not None:
            self.graphs = capture_graphs(self.model, self.caches, self._config, self._capturer)
        self._flight.others.check()
        self.times.num_graphs = 0 if self.graphs is None else self.graphs.num_graphs

    def working(self) -> AbstractContextManager[None]:
        """A step may run in this context. An error that another rank has caused is raised as that rank's."""
        if self._team is not None:
            self._team.gather()
        return self._flight.others.blamed()

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
        found = (step.allocation.window_copy for step in output.scheduled)
        copies = self.batch.apply_allocations(output.scheduled), [copy for copy in found if copy is not None]
        if self.states is not None and output.states is not None:  # before others are loaded to where these are
            self.states.copy(output.states.before)
        if not output.scheduled:
            return Launched(())
        inputs = self.batch.build(output.scheduled)
        self._hbm.copy(*copies)
        if output.plan is not None:
            row_starts = np.empty(len(inputs.order), dtype=np.int64)
            row_starts[inputs.order] = inputs.query_start[:-1]
            self.connector.start_load_kv(output.plan, row_starts.tolist())
        launched = Launched(output.scheduled, start=self.clock.mark())
        table = self.batch.table_of(inputs)
        self._flight.begin(inputs, table, self._window_of, copies)
        built = time.perf_counter()
        with nullcontext() if self._team is None else self._team.step(output.num_tokens):
            logits = self._forward(inputs, table, output, sampled)
            computed = time.perf_counter()
            launched.note_samples(inputs)
            self._flight.computed(launched, logits)
            if logits is not None and sampled is not None and self.sampler.is_constrained(inputs.sample_rows):
                launched.held = (inputs.sample_rows, logits)
            elif logits is not None:
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
        self._draw_held(launched)
        started = time.perf_counter()
        rows = launched.rows
        if launched.end is None:
            self.clock.note(launched)
        if rows is None or launched.on_host is None or launched.positions is None:
            return StepResult([()] * len(launched.scheduled), {}, prefilled=self.clock.take_prefilled())
        if launched.end is not None:
            self.clock.wait(launched)
            self._flight.others.check()
        tokens, drawing = launched.on_host.numpy(), launched.drawing
        sampled = SampledTokens(tokens, None) if drawing is None else drawing.read(tokens)
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
        if last is not None:
            self._draw_held(last)
        if last is None or last.drawing is None or last.rows is None:
            if last is not None and last.end is not None:
                self.clock.wait(last)
            return None
        tokens, last.drawing = last.drawing.tokens, None
        self.sampler.append(last.rows, tokens)
        self.batch.append(last.rows, -1 - np.arange(len(last.rows)))
        return tokens

    def _draw_held(self, launched: Launched) -> None:
        """Draw a step's tokens that a grammar could not allow before the tokens of the step before it were read."""
        if launched.held is None:
            return
        started = time.perf_counter()
        (rows, logits), launched.held = launched.held, None
        self._draw(launched, rows, logits)
        launched.end = self.clock.mark()
        self.times.sample_s += time.perf_counter() - started

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
        self.states = self.graphs = None

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.left:
            hole, last = self.batch.remove(request_id)
            if hole != last:
                self.sampler.move_row(last, hole)
            self.sampler.clear_row(last)
        rows = [self.batch.join(request) for request in output.joined]  # all of them, before the sampler can fail
        for row, request in zip(rows, output.joined, strict=True):
            tokens = self.batch.token_ids[row, : len(request.token_ids)]
            prompt, answer = np.split(tokens, [request.num_prompt_tokens])
            self.sampler.set_row(row, request.params, request.seed, request.stop_ids, prompt, answer, request.matcher)

    def overwrite(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite these blocks, and these slots of states or windows, with zeros. Does nothing after `close`."""
        self._hbm.overwrite(blocks, slots)
        if self.states is not None:
            self.states.overwrite(slots)
        self._flight.others.overwrite(blocks, slots)

    def _forward(
        self, inputs: StepInputs, table: np.ndarray, output: SchedulerOutput, sampled: Tensor | None
    ) -> Tensor | None:
        """The logits; None on the first stage of a pipeline, where they come later."""
        plan = output.plan
        has_loads = plan is not None and bool(plan.loads)  # a graph does not wait for them layer by layer
        form = None if self.graphs is None or has_loads else self.graphs.form_of(inputs)
        if self.graphs is not None and form is not None:
            self.times.num_replays += 1
            return self.graphs.run(form, inputs, table, plan, self.connector, self._window_of, sampled)
        step = step_tensors(inputs, table, self.batch.block_size, self.model.device, self._window_of)
        if sampled is not None:
            fill_in(step.token_ids, sampled)
        states = self._states(inputs, output)
        logits = self.model.begin(
            step.token_ids, step.positions, step.batch, self.caches, self.connector, step.sample_tokens, states
        )
        self.connector.wait_for_save()
        if self.states is not None and output.states is not None:
            self.states.copy(output.states.after)
        return logits

    def _states(self, inputs: StepInputs, output: SchedulerOutput) -> StepStates | None:
        if self.states is None or output.states is None:
            return None
        starts, chunks = inputs.query_start.tolist(), []
        for number, index in enumerate(inputs.order.tolist()):
            step = output.scheduled[index]
            slot = output.states.slots[step.request_id]
            chunks.append(Chunk(starts[number], starts[number + 1], slot, step.num_computed_tokens == 0))
        return StepStates(self.states, chunks)

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
        launched.drawing = self.sampler.draw(logits, rows, offsets)
        launched.on_host = start_to_host(launched.drawing.tokens)


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
