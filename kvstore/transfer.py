"""Moves KV between HBM and the arena on a CPU: loads layer by layer ahead of the computation, saves as it is computed.

Loads have a worker thread; the computing thread copies what is saved, since a third thread on its cores would cost it
more. Knows slots and tensors, no block id and no request, and decides nothing. On CUDA: `device_transfer`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.block_copy import BlockLoad, save_few, save_layers
from kvstore.arena import Arena
from kvstore.stats import Histogram
from kvstore.tier import Load, Save, SaveFence, TransferPlan, Transferred

FEW_TOKENS = 16  # a run of so many is saved token by token: what an indexed write costs before it begins is more
SMALL_STEP_TOKENS = 64  # steps of so many tokens are saved in one go, when their forward has ended


@dataclass(slots=True)
class _LoadJob:
    """Loads of one step; layers [0, num_layers_done) have landed."""

    ticket: int
    blocks: BlockLoad
    num_blocks: int
    num_layers_done: int = 0
    failed: bool = False
    ended: bool = False  # its thread does not touch HBM any more


@dataclass(slots=True)
class _SaveStep:
    """Saves of one step: `rows` of its tokens go to the token slots `slots`."""

    ticket: int
    rows: torch.Tensor
    slots: torch.Tensor
    run: slice | None = None  # the rows, where they are a run of a few
    failed: bool = False
    waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # layer, raw keys, values


def token_places(saves: Sequence[Save], row_starts: Sequence[int], block_size: int) -> np.ndarray:
    """Of every token that a step saves, its row in the step and its slot in the arena: [2, num_tokens] int64."""
    counts = np.fromiter((s.num_tokens for s in saves), np.int64, len(saves))
    rows = np.fromiter((row_starts[s.scheduled] + s.first for s in saves), np.int64, len(saves))
    slots = np.fromiter((s.slot * block_size + s.offset for s in saves), np.int64, len(saves))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([np.repeat(rows, counts) + within, np.repeat(slots, counts) + within])


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
    """on_progress: called in the worker thread after loads have ended; it may only wake somebody."""

    def __init__(self, arena: Arena, on_progress: Callable[[], None]) -> None:
        self.arena = arena
        self._on_progress = on_progress
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._load: _LoadJob | None = None
        self._save: _SaveStep | None = None
        self._lock = threading.Lock()
        self._layer_done = threading.Condition(self._lock)
        self._load_ready = threading.Condition(self._lock)
        self._load_jobs: deque[_LoadJob] = deque()
        self.load_seconds = Histogram()  # of all loads of a step
        self._done: deque[Transferred] = deque()
        self._closing = False
        self._threads = start_alone([("kvstore-load", self._load_loop)])

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
        self._load = _LoadJob(ticket, blocks, len(loads))
        with self._lock:
            self._load_jobs.append(self._load)
            self._load_ready.notify()

    def _save_step(self, ticket: int, saves: Sequence[Save], row_starts: Sequence[int]) -> _SaveStep:
        rows, slots = token_places(saves, row_starts, self.arena.layout.block_size)
        run = None
        if len(rows) <= FEW_TOKENS and bool((np.diff(rows) == 1).all()):
            run = slice(int(rows[0]), int(rows[-1]) + 1)
        return _SaveStep(ticket, torch.from_numpy(rows), torch.from_numpy(slots), run)

    def wait_for_layer(self, layer: int) -> None:
        """Returns when the loads of this layer have landed."""
        job = self._load
        if job is not None and job.num_layers_done <= layer:
            with self._layer_done:
                self._layer_done.wait_for(lambda: job.num_layers_done > layer)

    def save_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of the step's tokens, [num_tokens, num_kv_heads, head_dim], which nobody writes again."""
        step = self._save
        if step is None:
            return
        step.waiting.append((layer, raw_key, value))
        if len(raw_key) > SMALL_STEP_TOKENS:  # at once: memory that is held back the next layer has to take anew
            self._copy(step)

    def end(self, succeeded: bool = True) -> SaveFence | None:
        """The forward has ended: save what is left of it; not succeeded: none of its saves is to count.

        Waits for the step's loads. After a forward they have landed, but only their end says whether they failed; one
        that raised may have left them behind, and the next step may give their HBM blocks to somebody else.
        """
        step, load, self._save, self._load = self._save, self._load, None, None
        if load is not None:
            with self._layer_done:
                self._layer_done.wait_for(lambda: load.ended)
        if step is not None:
            step.failed = step.failed or not succeeded
            self._copy(step)
            self._done.append(Transferred(step.ticket, False, not step.failed))
        return None

    def _copy(self, step: _SaveStep) -> None:
        """Into the arena; a failure is the step's."""
        layers, step.waiting = step.waiting, []
        if not layers or step.failed:
            return
        try:
            with torch.inference_mode():
                if step.run is not None and len(layers) == self.arena.layout.num_layers:
                    save_few(self.arena.tensor, layers, step.run, step.slots.tolist())
                else:
                    save_layers(self.arena.tensor, layers, step.rows, step.slots)
        except Exception:  # as for loads; the step's blocks are computed and saved again later
            step.failed = True

    # -- the control plane's side ------------------------------------------------------------------------------------
    @property
    def can_save(self) -> bool:
        """Nothing is kept back: what is saved is copied where it is computed."""
        return True

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended since the last call."""
        done: list[Transferred] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Finish what was handed over and end the thread."""
        with self._lock:
            self._closing = True
            self._load_ready.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------
    def _load_loop(self) -> None:
        while True:
            with self._lock:
                while not self._load_jobs:
                    if self._closing:
                        return
                    self._load_ready.wait()
                job = self._load_jobs.popleft()
            started = time.perf_counter()
            with torch.inference_mode():
                try:
                    self._run_load(job)
                except Exception:  # out of memory, a bug: whoever waits must not wait for ever
                    job.failed = True
            size, seconds = job.num_blocks * self.arena.layout.block_bytes, time.perf_counter() - started
            with self._layer_done:
                self.load_seconds.observe(seconds)
                self._done.append(Transferred(job.ticket, True, not job.failed, size, seconds))
                job.num_layers_done, job.ended = len(self._caches), True
                self._layer_done.notify_all()
            self._on_progress()

    def _run_load(self, job: _LoadJob) -> None:
        for layer, (key_cache, value_cache) in enumerate(self._caches):
            job.blocks.load_layer(layer, key_cache, value_cache)
            with self._layer_done:
                job.num_layers_done = layer + 1
                self._layer_done.notify_all()
