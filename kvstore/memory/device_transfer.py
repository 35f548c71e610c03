"""Moves KV between HBM and the arena in queues of a device: what `transfer` does on a CPU.

Nothing here waits for the device but `end` after a failure. Order is kept by events alone:

- A load begins after what the computation was given before the step: that may still read the HBM blocks, or copy them.
  One event for all of it is enough, also for layers that are launched while the step's own computation is. The engine
  reads its samples back in every step that has some, so there is hardly ever anything left to wait for, and events per
  block would only be more to get wrong.
- The computation of a layer waits for the load of that layer, and after a step for all of its loads: a forward that
  raised half-way must not leave a load behind that writes into a block of the next step.
- A save begins after the keys and values of its layers exist; these tensors are kept here until it has ended. So what
  frees them, also in the computation's memory pool, comes after the save.
- `completed` names a step when its last event is reached. Only then are its arena slots read, written or reused.
- Buffers that are written in every step (those of a CUDA graph) are written after `SaveFence.order`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from kvstore.blocks.records import SaveFence, TransferPlan, Transferred
from kvstore.config import MAX_SAVE_BYTES
from kvstore.kernels.block_copy import BlockLoad, RawLayer, save_layers, save_to_arena
from kvstore.kernels.cuda.triton_support import has_triton
from kvstore.kernels.device import to_device
from kvstore.memory.arena import Arena
from kvstore.memory.streams import Event, Queue, Streams
from kvstore.memory.transfer import block_load, token_places
from kvstore.stats import Histogram

LAYERS_AHEAD = 4  # whose loads are launched before the layer that attends: all of them first would keep it waiting
GROUP_BYTES = 8 << 20  # of keys and values that wait before a save of them begins, at the latest after the forward


@dataclass(slots=True, eq=False)
class _Load:
    """Loads of one step. landed: an event per layer that was launched; num_first: layers of the first launch.
    end: behind all of them, None where the device has failed. failed: also while something is being launched.
    """

    ticket: int
    num_bytes: int
    blocks: BlockLoad | None = None
    start: Event | None = None
    landed: list[Event] = field(default_factory=list)
    num_first: int = 0
    end: Event | None = None
    failed: bool = True


@dataclass(slots=True, eq=False)
class _Save:
    """Saves of one step: `places` are rows of the step and token slots, [2, num_tokens] int64, on the device at last.

    waiting: layers that were not handed over yet.
    """

    ticket: int
    places: torch.Tensor
    waiting: list[RawLayer] = field(default_factory=list)
    num_waiting_bytes: int = 0
    end: Event | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """Tensors that a save reads. made: when they exist; saved: when nobody reads them any more."""

    layers: list[RawLayer]
    num_bytes: int
    made: Event
    saved: Event


@dataclass(frozen=True, slots=True)
class _Fence:
    """A `SaveFence`."""

    streams: Streams
    saved: Event

    def order(self) -> None:
        self.streams.wait(Queue.COMPUTE, self.saved)


class DeviceTransfer:
    """on_progress: called in a thread of its own after something ended; it may only wake somebody."""

    def __init__(self, arena: Arena, streams: Streams, on_progress: Callable[[], None]) -> None:
        self.arena = arena
        self._streams = streams
        self._on_progress = on_progress
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._load: _Load | None = None
        self._save: _Save | None = None
        self._lock = threading.Lock()
        self._in_flight: list[_Load | _Save] = []  # of steps whose forward has ended
        self._held: deque[_Held] = deque()
        self._num_held_bytes = 0
        self.load_seconds = Histogram()  # of all loads of a step
        self._ends: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="kvstore-transfers", daemon=True)
        self._watcher.start()

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Key and value cache of each layer, [num_blocks, block_size, num_kv_heads, head_dim]. Nobody uses them yet.

        Has the kernels compiled, and waits for it: else the first load would take so much longer, and be measured so.
        """
        self._caches = caches
        layout, streams = self.arena.layout, self._streams
        blank = torch.zeros(1, layout.num_kv_heads, layout.head_dim, dtype=layout.dtype, device=caches[0][0].device)
        blocks = BlockLoad(self.arena.tensor, [0], [0], [0], layout.rotations)
        for first, end in [(0, LAYERS_AHEAD), *((layer, layer + 1) for layer in range(LAYERS_AHEAD, len(caches)))]:
            streams.launch(Queue.LOAD, partial(blocks.load_layers, first, caches[first:end]))
        save = _Save(0, torch.tensor([[0], [-1]]))  # a slot that is skipped
        streams.launch(Queue.SAVE, partial(self._copy, save, [(layer, blank, blank) for layer in range(len(caches))]))
        for place in (Queue.LOAD, Queue.SAVE):
            streams.record(place).synchronize()

    # -- one step, beside the forward --------------------------------------------------------------------------------
    def begin(self, plan: TransferPlan, row_starts: Sequence[int]) -> None:
        """Start the plan's loads and prepare its saves. row_starts: first token of each scheduled request's part."""
        save = None
        if plan.saves:
            places = token_places(plan.saves, row_starts, self.arena.layout.block_size)
            save = _Save(plan.ticket, torch.from_numpy(places))
        if plan.loads:
            self._begin_loads(plan)
        self._save = save

    def _begin_loads(self, plan: TransferPlan) -> None:
        streams = self._streams
        load = self._load = _Load(plan.ticket, len(plan.loads) * self.arena.layout.block_bytes)
        try:
            load.blocks = block_load(self.arena, plan.loads)
            streams.wait(Queue.LOAD, streams.record(Queue.COMPUTE))
            load.start = streams.record(Queue.LOAD)
        except Exception:  # out of memory, a device that has failed: these blocks are computed instead
            return
        load.failed = False
        self._launch_loads(load, LAYERS_AHEAD)
        load.num_first = len(load.landed)

    def _launch_loads(self, load: _Load, end: int) -> None:
        """Of the layers before `end` that were not launched yet, in one launch."""
        first, caches = len(load.landed), self._caches[len(load.landed) : end]
        if load.failed or load.blocks is None or not caches:
            return
        load.failed = True  # unless what follows is through with it
        with suppress(Exception):  # a kernel that does not compile, for instance
            self._streams.launch(Queue.LOAD, partial(load.blocks.load_layers, first, caches))
            load.landed += [self._streams.record(Queue.LOAD)] * len(caches)
            load.failed = False

    def _mark(self, place: Queue) -> Event | None:
        """An event of its end, None where the device has failed: nothing runs there any more."""
        try:
            return self._streams.record(place)
        except RuntimeError:
            return None

    def wait_for_layer(self, layer: int) -> None:
        """Order the computation after the loads of this layer, and launch those of a later one."""
        if self._load is None:
            return
        self._launch_loads(self._load, layer + 1 + LAYERS_AHEAD)
        if layer < len(self._load.landed):
            self._streams.wait(Queue.COMPUTE, self._load.landed[layer])

    def save_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Raw keys and values of the step's tokens, [num_tokens, num_kv_heads, head_dim], which nobody writes again."""
        step = self._save
        if step is None or step.failed:
            return
        step.waiting.append((layer, raw_key, value))
        step.num_waiting_bytes += raw_key.nbytes + value.nbytes
        if step.num_waiting_bytes >= GROUP_BYTES:
            self._hand_over(step)

    def _hand_over(self, step: _Save) -> None:
        layers, step.waiting, step.num_waiting_bytes = step.waiting, [], 0
        if not layers or step.failed:
            return
        streams = self._streams
        try:
            made = streams.record(Queue.COMPUTE)
            streams.wait(Queue.SAVE, made)
            try:
                streams.launch(Queue.SAVE, partial(self._copy, step, layers))
            finally:  # also of what was started before an error
                held = _Held(layers, _held_bytes(layers), made, streams.record(Queue.SAVE))
                self._hold(held)
        except Exception:  # as for loads; the step's blocks are computed and saved again later
            step.failed = True

    def _copy(self, step: _Save, layers: Sequence[RawLayer]) -> None:
        """In the queue of saves."""
        device = layers[0][1].device
        if device.type == "cuda" and not has_triton():  # the host waits for each layer
            save_layers(self.arena.tensor, layers, *step.places)
            return
        step.places = to_device(step.places, device)
        save_to_arena(self.arena.tensor, layers, *step.places)

    def _hold(self, held: _Held) -> None:
        """Beyond MAX_SAVE_BYTES the computation waits for the oldest saves: then their tensors may be freed.

        The host runs ahead of the device, so it can see none of them end before it has handed over the whole step.
        """
        with self._lock:
            self._held.append(held)
            self._num_held_bytes += held.num_bytes
            while self._num_held_bytes > MAX_SAVE_BYTES and len(self._held) > 1:
                oldest = self._held.popleft()
                self._num_held_bytes -= oldest.num_bytes
                self._streams.wait(Queue.COMPUTE, oldest.saved)

    def end(self, succeeded: bool = True) -> SaveFence | None:
        """The forward has ended: hand over what is left of its saves; not succeeded: none of them is to count.

        Returns what orders the next writing of tensors that were given to `save_layer`, None when nothing was saved.
        After a failure it waits: whatever the step touched may be given to others at once, and failed loads are told.
        """
        load, step = self._load, self._save
        jobs: list[_Load | _Save] = []
        if step is not None:
            step.failed = step.failed or not succeeded
            self._hand_over(step)
            step.end = self._mark(Queue.SAVE)
            jobs.append(step)
        if load is not None:
            self._launch_loads(load, len(self._caches))  # the HBM blocks are in the map as if they held it
            load.end = self._mark(Queue.LOAD)
            load.failed = load.failed or load.end is None
            self._order_after(load)
            jobs.append(load)
        has_failed = not succeeded or any(job.end is None for job in jobs) or (load is not None and load.failed)
        for job in jobs:
            job.failed = job.failed or job.end is None
            if has_failed and job.end is not None:
                _synchronize(job.end)
        with self._lock:
            self._in_flight += jobs
            self._load = self._save = None
        for job in jobs:
            if job.end is not None:
                self._ends.put(job.end)
        return None if step is None or step.end is None else _Fence(self._streams, step.end)

    def _order_after(self, load: _Load) -> None:
        """The computation of the next step comes after all loads of this one, whatever its forward has waited for."""
        try:
            if load.end is not None:
                self._streams.wait(Queue.COMPUTE, load.end)
        except RuntimeError:
            load.failed = True

    # -- the control plane's side ------------------------------------------------------------------------------------
    @property
    def can_save(self) -> bool:
        """Whether the saves keep up: of what is computed already, not too much waits for the bus."""
        with self._lock:
            return sum(held.num_bytes for held in self._held if _is_reached(held.made)) < MAX_SAVE_BYTES // 2

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended since the last call. One thread at a time calls it."""
        with self._lock:
            while self._held and _is_reached(self._held[0].saved):
                self._num_held_bytes -= self._held.popleft().num_bytes
            outcomes = [(job, self._outcome(job)) for job in self._in_flight]
            self._in_flight = [job for job, ended in outcomes if ended is None]
        return [ended for _, ended in outcomes if ended is not None]

    def _outcome(self, job: _Load | _Save) -> Transferred | None:
        """None while it is in flight. Where the device has failed, everything ends, and has failed."""
        seconds = 0.0
        try:
            if job.end is not None and not job.end.query():
                return None
            if isinstance(job, _Load) and not job.failed:
                assert job.start is not None  # later launches may have waited for the host: they say nothing of the bus
                seconds = job.start.seconds_until(job.landed[0]) * len(job.landed) / job.num_first
        except RuntimeError:
            job.failed = True
        if not isinstance(job, _Load):
            return Transferred(job.ticket, False, not job.failed)
        self.load_seconds.observe(seconds)
        return Transferred(job.ticket, True, not job.failed, job.num_bytes, seconds)

    def close(self) -> None:
        """Returns when all that was handed over has ended."""
        self.end(succeeded=False)
        self._ends.put(None)
        if self._watcher is not threading.current_thread():
            self._watcher.join()

    # -- the thread --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while (event := self._ends.get()) is not None:
            _synchronize(event)
            self._on_progress()


def _synchronize(event: Event) -> None:
    with suppress(RuntimeError):  # the device has failed; `completed` meets the same error, and tells it
        event.synchronize()


def _is_reached(event: Event) -> bool:
    """Also where the device has failed: nothing reads or writes there any more."""
    try:
        return event.query()
    except RuntimeError:
        return True


def _held_bytes(layers: Sequence[RawLayer]) -> int:
    """Memory that these keep alive: keys and values may be views of one product of all projections."""
    storages = [tensor.untyped_storage() for _, *pair in layers for tensor in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
