"""A device's queues of work and the events between them. Knows no block and no tensor.

What is given to one queue runs in its order; between queues there is no order but that of waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch


class Queue(Enum):
    """COMPUTE is the stream that the model runs in: whichever is current where a method is called."""

    COMPUTE = "compute"
    LOAD = "load"
    SAVE = "save"


class Event(Protocol):
    """A place in a queue: reached when all that was given to the queue before it has ended.

    Every method may raise RuntimeError: the device has failed, and nothing on it will ever end.
    """

    def query(self) -> bool:
        """Whether it is reached."""
        ...

    def synchronize(self) -> None:
        """Returns when it is reached; other threads run meanwhile."""
        ...

    def seconds_until(self, end: Any) -> float:
        """Between this event and a later one of the same streams, on the device's clock, when both are reached."""
        ...


class Streams(Protocol):
    """Every method returns at once, and may raise RuntimeError."""

    def record(self, queue: Queue) -> Event:
        """An event behind all that the queue was given so far."""
        ...

    def wait(self, queue: Queue, event: Event) -> None:
        """What the queue is given from now on begins after the event is reached."""
        ...

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        """Give the queue the device work that `work` starts. What it raises itself is raised here."""
        ...


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
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # blocking: a thread that waits sleeps
        event.record(self._stream(queue))
        return _CudaEvent(event, self._device)

    def wait(self, queue: Queue, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream(queue).wait_event(event.event)

    def launch(self, queue: Queue, work: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream(queue)):
            work()
