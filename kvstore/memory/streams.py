"""A device's queues of work and the events between them. Knows no block and no tensor.

Work in one queue runs in order. Between queues there is no order except by waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch


class Queue(Enum):
    """COMPUTE is the stream that the model runs in: the current one when a method is called."""

    COMPUTE = "compute"
    LOAD = "load"
    SAVE = "save"


class Event(Protocol):
    """A place in a queue. It is reached when all earlier work of the queue has ended.

    Every method may raise RuntimeError if the device has failed: then nothing on it will ever end.
    """

    def query(self) -> bool:
        """Whether it was reached."""
        ...

    def synchronize(self) -> None:
        """Returns when it was reached. Other threads run meanwhile."""
        ...

    def seconds_until(self, end: Any) -> float:
        """The time between this event and a later one, by the device's clock, after both were reached."""
        ...


class Streams(Protocol):
    """Every method returns at once, and may raise RuntimeError."""

    def record(self, queue: Queue) -> Event:
        """An event after all work that the queue has been given so far."""
        ...

    def wait(self, queue: Queue, event: Event) -> None:
        """Work that the queue is given from now on begins after the event."""
        ...

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        """Give the queue the device work that `work` starts. What it raises itself is raised here."""
        ...


def await_event(event: Event) -> None:
    """Returns when the event was reached or the device has failed: whoever asks for the outcome gets the same error."""
    with suppress(RuntimeError):
        event.synchronize()


def is_reached(event: Event) -> bool:
    """Whether it was reached, or the device has failed: then nothing reads or writes there any more."""
    try:
        return event.query()
    except RuntimeError:
        return True


class EventWatcher:
    """A thread that waits for events, one after the other. on_reached: called in this thread after each."""

    def __init__(self, name: str, on_reached: Callable[[], None]) -> None:
        self._on_reached = on_reached
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        """Returns when everything given to `watch` was reached. The watcher's own thread does not wait."""
        self._events.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while (event := self._events.get()) is not None:
            await_event(event)
            self._on_reached()


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: Any  # a torch.cuda.Event
    device: torch.device

    # A thread that never chose a device would make a context on the first one, which may not be ours.
    def query(self) -> bool:
        with torch.cuda.device(self.device):
            return self.event.query()

    def synchronize(self) -> None:
        with torch.cuda.device(self.device):
            self.event.synchronize()

    def seconds_until(self, end: _CudaEvent) -> float:
        with torch.cuda.device(self.device):
            return self.event.elapsed_time(end.event) / 1000.0


class CudaStreams:
    """Streams of one CUDA device. Loads go first where both want a multiprocessor: the computation waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = {
            Queue.LOAD: torch.cuda.Stream(device, priority=-1),
            Queue.SAVE: torch.cuda.Stream(device),
        }

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if queue is Queue.COMPUTE else self._own[queue]

    def record(self, queue: Queue) -> _CudaEvent:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # blocking: a waiting thread sleeps
        event.record(self._stream(queue))
        return _CudaEvent(event, self._device)

    def wait(self, queue: Queue, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream(queue).wait_event(event.event)

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream(queue)):
            work()
