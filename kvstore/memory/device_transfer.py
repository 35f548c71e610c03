"""Moves KV between HBM and the arena in queues of a device, as `transfer` does on a CPU.

Nothing here waits for the device, except `end` after a failure, and torch where a rank copies its heads of states: they
lie apart in the arena. Only events keep the order:

- A load begins after all computation of earlier steps, which may still read the HBM blocks or copy them. One event is
  enough for this, even for layers that are launched during the step's own computation. The engine reads its samples
  back in every step that has some, so a load hardly ever has to wait, and events per block would only be more to get
  wrong.
- The computation of a layer waits for the load of that layer. After a step, the computation waits for all of its loads,
  because a forward that raised half-way must not leave a load behind that writes to a block of the next step.
- A save begins when the keys and values of its layers exist. These tensors are kept here until it has ended, so they
  are freed after the save, also in the computation's memory pool.
- `completed` names a step when its last event is reached. Only then may its arena blocks be read, written or reused.
- Buffers that are written in every step (those of a CUDA graph) are written after `SaveFence.order`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from kvstore.blocks.records import SaveFence, TransferPlan, Transferred
from kvstore.config import MAX_SAVE_BYTES
from kvstore.kernels.kv import BlockLoad, RawLayer, has_triton, save_layers, save_to_arena
from kvstore.kernels.paged_batch import to_device
from kvstore.memory.layout import States
from kvstore.memory.streams import Event, EventWatcher, Queue, Streams, await_event, is_reached
from kvstore.memory.transfer import Arena, block_load, token_places
from kvstore.stats import Histogram


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is launched at once, and how much may wait."""

    layers_ahead: int = 4  # loads are launched so many layers before the one that attends; all at once would delay it
    group_bytes: int = 8 << 20  # a save begins when so much waits for it, at the latest after the forward
    max_save_bytes: int = MAX_SAVE_BYTES  # of activations that are kept until they are saved


@dataclass(slots=True, eq=False)
class _Load:
    """The loads of one step."""

    ticket: int
    num_bytes: int
    blocks: BlockLoad | None = None
    start: Event | None = None
    landed: list[Event] = field(default_factory=list)  # one per launched layer
    num_first: int = 0  # layers of the first launch
    end: Event | None = None  # after all of them; None if the device has failed
    failed: bool = True  # also during a launch


@dataclass(slots=True, eq=False)
class _Save:
    """The saves of one step."""

    ticket: int
    places: torch.Tensor  # [2, num_tokens] int64: row in the step, place in the arena; moved to the device at first use
    waiting: list[RawLayer] = field(default_factory=list)  # layers that were not handed over yet
    num_waiting_bytes: int = 0
    end: Event | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """Tensors that a save reads."""

    layers: list[RawLayer]
    num_bytes: int
    made: Event  # reached when they exist
    saved: Event  # reached when nobody reads them any more


class _HeldTensors:
    """Keeps what saves read until they have ended. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: deque[_Held] = deque()
        self._num_bytes = 0

    def add(self, held: _Held) -> None:
        with self._lock:
            self._held.append(held)
            self._num_bytes += held.num_bytes

    def drop_beyond(self, max_bytes: int) -> list[Event]:
        """Drop the oldest down to max_bytes, but never the last. Their memory may be reused after these events."""
        dropped = []
        with self._lock:
            while self._num_bytes > max_bytes and len(self._held) > 1:
                dropped.append(self._drop_oldest())
        return dropped

    def drop_saved(self) -> None:
        with self._lock:
            while self._held and is_reached(self._held[0].saved):
                self._drop_oldest()

    def _drop_oldest(self) -> Event:
        oldest = self._held.popleft()
        self._num_bytes -= oldest.num_bytes
        return oldest.saved

    @property
    def num_made_bytes(self) -> int:
        """Of the tensors that exist by now."""
        with self._lock:
            return sum(held.num_bytes for held in self._held if is_reached(held.made))


@dataclass(frozen=True, slots=True)
class _Fence:
    """A `SaveFence`."""

    streams: Streams
    saved: Event

    def order(self) -> None:
        self.streams.wait(Queue.COMPUTE, self.saved)


class DeviceTransfer:
    """on_progress: called in a thread of its own when loads or saves have ended; if it raises, never again."""

    def __init__(
        self, arena: Arena, streams: Streams, on_progress: Callable[[], None], pace: Pace | None = None
    ) -> None:
        self.arena, self.pace = arena, Pace() if pace is None else pace
        self._streams = streams
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._states: States | None = None
        self._load: _Load | None = None
        self._save: _Save | None = None
        self._lock = threading.Lock()
        self._in_flight: list[_Load | _Save] = []  # loads and saves of steps whose forward has ended
        self._held = _HeldTensors()
        self.load_seconds = Histogram()  # that all loads of a step took
        self._watcher = EventWatcher("kvstore-transfers", on_progress)

    def register(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], states: States | None = None) -> None:
        """See `KVConnector.register_kv_caches`. The caches are still unused.

        Compiles the kernels and waits for that, else the first load would take, and be measured, so much longer.
        """
        self._caches, self._states = caches, states
        streams = self._streams
        blank = [
            (layer, *(cache.new_zeros(1, *cache.shape[2:]) for cache in pair)) for layer, pair in enumerate(caches)
        ]
        blocks = BlockLoad(self.arena.layers, [0], [0], [0], self.arena.layout.own_rotations)
        ahead = self.pace.layers_ahead
        for first, end in [(0, ahead), *((layer, layer + 1) for layer in range(ahead, len(caches)))]:
            streams.launch(Queue.LOAD, partial(blocks.load_layers, first, caches[first:end]))
        save = _Save(0, torch.tensor([[0], [-1]]))  # a place that is skipped
        streams.launch(Queue.SAVE, partial(self._copy, save, blank))
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
            if self._states is not None:  # the first layer may already need them
                streams.launch(Queue.LOAD, partial(self.arena.load_states, plan.states, self._states))
                streams.wait(Queue.COMPUTE, streams.record(Queue.LOAD))
            load.start = streams.record(Queue.LOAD)
        except Exception:  # out of memory, or the device has failed: these blocks are computed instead
            return
        load.failed = False
        self._launch_loads(load, self.pace.layers_ahead)
        load.num_first = len(load.landed)

    def save_states(self, plan: TransferPlan) -> None:
        """Save the plan's states. Called between two steps: the next one waits for it, as it may change them."""
        assert self._states is not None
        streams, job = self._streams, _Save(plan.ticket, torch.empty(2, 0, dtype=torch.int64), failed=True)
        with suppress(Exception):  # as for loads: the turn has no checkpoint
            streams.wait(Queue.SAVE, streams.record(Queue.COMPUTE))
            streams.launch(Queue.SAVE, partial(self.arena.save_states, plan.states, self._states))
            job.failed = False
        job.end = self._mark(Queue.SAVE)  # also where only some of its copies were queued
        with self._lock:
            self._in_flight.append(job)
        if job.end is None:
            job.failed = True
            return
        streams.wait(Queue.COMPUTE, job.end)
        self._watcher.watch(job.end)

    def _launch_loads(self, load: _Load, end: int) -> None:
        """Launch the loads of layers before `end` that were not launched yet, in one launch."""
        first, caches = len(load.landed), self._caches[len(load.landed) : end]
        if load.failed or load.blocks is None or not caches:
            return
        load.failed = True  # until the launch has succeeded
        with suppress(Exception):  # for example, a kernel does not compile
            self._streams.launch(Queue.LOAD, partial(load.blocks.load_layers, first, caches))
            load.landed += [self._streams.record(Queue.LOAD)] * len(caches)
            load.failed = False

    def _mark(self, place: Queue) -> Event | None:
        """An event at the end of this queue; None if the device has failed, as nothing runs there any more."""
        try:
            return self._streams.record(place)
        except RuntimeError:
            return None

    def wait_for_layer_load(self, layer: int) -> None:
        """Order the computation after the loads of this layer, and launch those of a later one."""
        if self._load is None:
            return
        self._launch_loads(self._load, layer + 1 + self.pace.layers_ahead)
        if layer < len(self._load.landed):
            self._streams.wait(Queue.COMPUTE, self._load.landed[layer])

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        """Save a step's raw keys and values, [num_tokens, num_kv_heads, head_dim]. Nobody changes them later."""
        step = self._save
        if step is None or step.failed:
            return
        step.waiting.append((layer, raw_key, value))
        step.num_waiting_bytes += raw_key.nbytes + value.nbytes
        if step.num_waiting_bytes >= self.pace.group_bytes:
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
            finally:  # also if an error came after the start
                self._held.add(_Held(layers, _held_bytes(layers), made, streams.record(Queue.SAVE)))
                # The host runs ahead of the device: it sees no save end before it has handed over the whole step.
                for saved in self._held.drop_beyond(self.pace.max_save_bytes):
                    streams.wait(Queue.COMPUTE, saved)
        except Exception:  # as for loads; the step's blocks are computed and saved again later
            step.failed = True

    def _copy(self, step: _Save, layers: Sequence[RawLayer]) -> None:
        """Copy these layers to the arena. Runs in the queue of saves."""
        device = layers[0][1].device
        if device.type == "cuda" and not has_triton():  # the host waits for each layer
            save_layers(self.arena.layers, layers, *step.places)
            return
        step.places = to_device(step.places, device)
        save_to_arena(self.arena.layers, layers, *step.places)

    def end(self, succeeded: bool = True) -> SaveFence | None:
        """The forward has ended: hand over the rest of its saves. If it has not succeeded, none of them counts.

        Returns a fence that orders the next write to tensors that were given to `save_kv_layer`; None if nothing was
        saved. After a failure it waits: the blocks of the step may be given to others at once, and failed loads are
        known.
        """
        load, step = self._load, self._save
        jobs: list[_Load | _Save] = []
        if step is not None:
            step.failed = step.failed or not succeeded
            self._hand_over(step)
            step.end = self._mark(Queue.SAVE)
            jobs.append(step)
        if load is not None:
            self._launch_loads(load, len(self._caches))  # the map already says that the HBM blocks hold this KV
            load.end = self._mark(Queue.LOAD)
            self._order_after(load)
            jobs.append(load)
        has_failed = not succeeded or any(job.end is None for job in jobs) or (load is not None and load.failed)
        for job in jobs:
            job.failed = job.failed or job.end is None
            if has_failed and job.end is not None:
                await_event(job.end)
        with self._lock:
            self._in_flight += jobs
            self._load = self._save = None
        for job in jobs:
            if job.end is not None:
                self._watcher.watch(job.end)
        return None if step is None or step.end is None else _Fence(self._streams, step.end)

    def _order_after(self, load: _Load) -> None:
        """Order the computation of the next step after all loads of this one, whatever its forward has waited for."""
        try:
            if load.end is not None:
                self._streams.wait(Queue.COMPUTE, load.end)
        except RuntimeError:
            load.failed = True

    # -- the control plane's side ------------------------------------------------------------------------------------
    @property
    def can_save(self) -> bool:
        """Whether saves keep up: not too much of what is already computed waits for the bus."""
        return self._held.num_made_bytes < self.pace.max_save_bytes // 2

    def completed(self) -> list[Transferred]:
        """Steps whose loads or saves have ended since the last call. One thread at a time calls it."""
        self._held.drop_saved()
        with self._lock:
            outcomes = [(job, self._outcome(job)) for job in self._in_flight]
            self._in_flight = [job for job, ended in outcomes if ended is None]
        return [ended for _, ended in outcomes if ended is not None]

    def _outcome(self, job: _Load | _Save) -> Transferred | None:
        """How the job has ended; None while it is in flight. If the device has failed, all jobs end and have failed."""
        seconds = 0.0
        try:
            if job.end is not None and not job.end.query():
                return None
            if isinstance(job, _Load) and not job.failed:
                assert job.start is not None  # only the first launch: later ones may have waited for the host
                seconds = job.start.seconds_until(job.landed[0]) * len(job.landed) / job.num_first
        except RuntimeError:
            job.failed = True
        if not isinstance(job, _Load):
            return Transferred(job.ticket, False, not job.failed)
        self.load_seconds.observe(seconds)
        return Transferred(job.ticket, True, not job.failed, job.num_bytes, seconds)

    def close(self) -> None:
        """End the step, wait until everything that was handed over has ended, and forget the caches."""
        self.end(succeeded=False)
        self._watcher.close()
        self._caches, self._states = (), None  # HBM is free once nobody refers to it


def _held_bytes(layers: Sequence[RawLayer]) -> int:
    """The memory that these layers keep alive. Keys and values may be views of one product of all projections."""
    storages = [tensor.untyped_storage() for _, *pair in layers for tensor in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
