"""Moves KV between HBM and the arena: loads layer by layer ahead of the computation, saves from its activations.

Loads have a worker thread, on CUDA with a stream. Saves on CUDA have a stream, and a thread that takes what arrived; on
a CPU the computing thread copies, since a third thread on its cores would cost it more. Knows slots and tensors, no
block id and no request, and decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.block_copy import BlockLoad, save_few, save_layers
from kvstore.arena import Arena
from kvstore.stats import Histogram
from kvstore.tier import Load, Save, TransferPlan, Transferred

GROUP_BYTES = 8 << 20  # saves are handed over when so many bytes of activations are waiting, at the latest after a step
FEW_TOKENS = 16  # a run of so many is saved token by token: what an indexed write costs before it begins is more
SMALL_STEP_TOKENS = 64  # steps of so many tokens are saved in one go, when their forward has ended
MAX_SAVE_BYTES = 512 << 20  # beyond so many bytes of activations kept alive, further steps are not saved


@dataclass(slots=True)
class _LoadJob:
    """Loads of one step; layers [0, num_layers_done) have landed, on CUDA in the order of their events."""

    ticket: int
    blocks: BlockLoad
    num_blocks: int
    start_event: torch.cuda.Event | None
    num_layers_done: int = 0
    events: list[torch.cuda.Event] = field(default_factory=list)
    failed: bool = False
    ended: bool = False  # its thread does not touch HBM any more


@dataclass(slots=True)
class _SaveStep:
    """Saves of one step: `rows` of its tokens (None: all, in order) go to the token slots `slots`."""

    ticket: int
    rows: torch.Tensor | None
    slots: torch.Tensor
    num_blocks: int
    run: slice | None = None  # the rows, where they are a run of a few
    failed: bool = False
    num_waiting_bytes: int = 0
    waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """Some layers of a step: (layer, raw keys, values). last: the step has no more."""

    step: _SaveStep
    layers: list[tuple[int, torch.Tensor, torch.Tensor]]
    num_bytes: int
    event: torch.cuda.Event | None
    last: bool


def start_alone(loops: Sequence[tuple[str, Callable[[], None]]]) -> list[threading.Thread]:
    """Start threads by name whose tensor operations get no helpers.

    OpenMP makes helpers for each thread that computes. Once there are more of them than cores, all of them go to sleep
    at every barrier, those of the model too: each step after a first load took 1.6 times as long (bench/LOG.md).
    """
    num_threads, settled = torch.get_num_threads(), threading.Barrier(len(loops) + 1)

    def begin(loop: Callable[[], None]) -> None:
        torch.get_num_threads()  # the first use in a thread takes what is set for all, and would come later
        torch.set_num_threads(1)
        settled.wait()
        loop()

    threads = [threading.Thread(target=begin, args=(loop,), name=name, daemon=True) for name, loop in loops]
    for thread in threads:
        thread.start()
    settled.wait()
    torch.set_num_threads(num_threads)  # that of threads to come, which the others have changed
    return threads


class Transfer:
    """on_progress: called in a worker thread after something ended; it may only wake somebody."""

    def __init__(self, arena: Arena, device: torch.device, on_progress: Callable[[], None]) -> None:
        self.arena = arena
        self.device = device
        self._on_progress = on_progress
        self._is_cuda = device.type == "cuda"
        self._load_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._save_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._load: _LoadJob | None = None
        self._save: _SaveStep | None = None
        self._lock = threading.Lock()
        self._layer_done = threading.Condition(self._lock)
        self._load_ready = threading.Condition(self._lock)
        self._save_ready = threading.Condition(self._lock)
        self._load_jobs: deque[_LoadJob] = deque()
        self._save_jobs: deque[_SaveJob] = deque()
        self._num_save_bytes = 0
        self.load_seconds = Histogram()  # of all loads of a step
        self._done: deque[Transferred] = deque()
        self._closing = False
        loops = (("kvstore-load", self._load_loop), ("kvstore-save", self._save_loop))
        self._threads = start_alone(loops)

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Key and value cache of each layer, [num_blocks, block_size, num_kv_heads, head_dim]."""
        self._caches = caches

    # -- one step, beside the forward --------------------------------------------------------------------------------
    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        """Start the plan's loads and prepare its saves. row_starts: first token of each scheduled request's part."""
        save = self._save_step(plan.ticket, plan.saves, row_starts) if plan.saves else None
        if plan.loads:
            self._begin_loads(plan.ticket, plan.loads)
        self._save = save

    def _begin_loads(self, ticket: int, loads: Sequence[Load]) -> None:
        blocks = BlockLoad(
            self.arena.tensor,
            [load.slot for load in loads],
            [load.block_number for load in loads],
            [load.position for load in loads],
            self.arena.layout.rotations,
        )
        event = None
        if self._is_cuda:  # the blocks may still be read by the last step
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        self._load = _LoadJob(ticket, blocks, len(loads), event)
        with self._lock:
            self._load_jobs.append(self._load)
            self._load_ready.notify()

    def _save_step(self, ticket: int, saves: Sequence[Save], row_starts: Sequence[int]) -> _SaveStep:
        size = self.arena.layout.block_size
        counts = np.fromiter((s.num_tokens for s in saves), np.int64, len(saves))
        rows = np.fromiter((row_starts[s.scheduled] + s.first for s in saves), np.int64, len(saves))
        slots = np.fromiter((s.slot * size + s.offset for s in saves), np.int64, len(saves))
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row_of, slot_of = np.repeat(rows, counts) + within, np.repeat(slots, counts) + within
        run = None
        if len(row_of) <= FEW_TOKENS and bool((np.diff(row_of) == 1).all()):
            run = slice(int(row_of[0]), int(row_of[-1]) + 1)
        return _SaveStep(ticket, torch.from_numpy(row_of), torch.from_numpy(slot_of), len(saves), run)

    def wait_for_layer(self, layer: int) -> None:
        """Returns when the loads of this layer have landed; on CUDA it orders the current stream after them."""
        job = self._load
        if job is None:
            return
        if job.num_layers_done <= layer:
            with self._layer_done:
                self._layer_done.wait_for(lambda: job.num_layers_done > layer)
        if job.events and layer < len(job.events):
            torch.cuda.current_stream(self.device).wait_event(job.events[layer])

    def save_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of the step's tokens, [num_tokens, num_kv_heads, head_dim], which nobody writes again."""
        step = self._save
        if step is None:
            return
        if self._is_cuda:
            raw_key, value = self._to_host(raw_key, step), self._to_host(value, step)
        step.waiting.append((layer, raw_key, value))
        if len(raw_key) <= SMALL_STEP_TOKENS:
            return
        step.num_waiting_bytes += _held_bytes(raw_key, value)
        # On a CPU at once: memory that is held back is memory that the next layer has to take anew.
        if step.num_waiting_bytes >= GROUP_BYTES or not self._is_cuda:
            self._hand_over(step, last=False)

    def _to_host(self, tensor: torch.Tensor, step: _SaveStep) -> torch.Tensor:
        """Copied on the save stream, after what the compute stream has been given so far."""
        assert self._save_stream is not None
        self._save_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._save_stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._save_stream)
        return host

    def end(self, succeeded: bool = True) -> None:
        """The forward has ended: hand over what is left of its saves; not succeeded: none of them is to count.

        Waits for the step's loads. After a forward they have landed, but only their end says whether they failed; one
        that raised may have left them behind, and the next step may give their HBM blocks to somebody else.
        """
        step, load, self._save, self._load = self._save, self._load, None, None
        if load is not None:
            with self._layer_done:
                self._layer_done.wait_for(lambda: load.ended)
        if step is not None:
            step.failed = step.failed or not succeeded
            self._hand_over(step, last=True)

    def _hand_over(self, step: _SaveStep, last: bool) -> None:
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record(self._save_stream)
        job = _SaveJob(step, step.waiting, step.num_waiting_bytes, event, last)
        step.waiting, step.num_waiting_bytes = [], 0
        if not self._is_cuda:
            self._copy(job)
            if last:
                self._done.append(Transferred(step.ticket, False, not step.failed))
            return
        with self._lock:
            self._num_save_bytes += job.num_bytes
            self._save_jobs.append(job)
            self._save_ready.notify()

    # -- the control plane's side ------------------------------------------------------------------------------------
    @property
    def can_save(self) -> bool:
        """Whether another step's activations may be kept alive until they are saved."""
        return self._num_save_bytes < MAX_SAVE_BYTES

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended since the last call."""
        done: list[Transferred] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Finish what was handed over and end the threads."""
        with self._lock:
            self._closing = True
            self._load_ready.notify_all()
            self._save_ready.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # -- threads -----------------------------------------------------------------------------------------------------
    def _load_loop(self) -> None:
        while True:
            with self._lock:
                while not self._load_jobs:
                    if self._closing:
                        return
                    self._load_ready.wait()
                job = self._load_jobs.popleft()
            started = time.perf_counter()
            with torch.inference_mode(), self._on(self._load_stream):
                try:
                    self._run_load(job)
                except Exception:  # out of memory, a lost device, a bug: whoever waits must not wait for ever
                    job.failed = True
            size, seconds = job.num_blocks * self.arena.layout.block_bytes, time.perf_counter() - started
            with self._layer_done:
                self.load_seconds.observe(seconds)
                self._done.append(Transferred(job.ticket, True, not job.failed, size, seconds))
                job.num_layers_done, job.ended = len(self._caches), True
                self._layer_done.notify_all()
            self._on_progress()

    def _run_load(self, job: _LoadJob) -> None:
        if self._load_stream is not None and job.start_event is not None:
            self._load_stream.wait_event(job.start_event)
        for layer, (key_cache, value_cache) in enumerate(self._caches):
            job.blocks.load_layer(layer, key_cache, value_cache)
            if self._load_stream is not None:
                event = torch.cuda.Event()
                event.record(self._load_stream)
                job.events.append(event)
            with self._layer_done:
                job.num_layers_done = layer + 1
                self._layer_done.notify_all()
        if job.events:
            job.events[-1].synchronize()

    def _save_loop(self) -> None:
        while True:
            with self._lock:
                while not self._save_jobs:
                    if self._closing:
                        return
                    self._save_ready.wait()
                job = self._save_jobs.popleft()
            self._copy(job)
            step, last, num_bytes = job.step, job.last, job.num_bytes
            del job  # and with it the activations
            with self._lock:
                if last:
                    self._done.append(Transferred(step.ticket, False, not step.failed))
                self._num_save_bytes -= num_bytes
            if last:
                self._on_progress()

    def _copy(self, job: _SaveJob) -> None:
        """Into the arena; a failure is the step's."""
        step = job.step
        try:
            with torch.inference_mode():
                if job.event is not None:
                    job.event.synchronize()
                if not job.layers or step.failed:
                    return
                if step.run is not None and len(job.layers) == self.arena.layout.num_layers:
                    save_few(self.arena.tensor, job.layers, step.run, step.slots.tolist())
                else:
                    save_layers(self.arena.tensor, job.layers, step.rows, step.slots)
        except Exception:  # as for loads; the step's blocks are computed and saved again later
            step.failed = True

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _held_bytes(*tensors: torch.Tensor) -> int:
    """Memory that these keep alive: keys and values may be views of one product of all projections."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
