"""Queues of a device, each a thread that works in order, as slowly as a seed says: without a wait between them two
really run at once.

May break its promises: `Broken` says which waits do nothing, and of which events it claims too early that they are
reached.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvstore.memory.streams import Queue
from tests.support.waiting import TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Broken:
    """waits: (who waits, for whom), which are dropped. reached: queues whose events are always said to be reached."""

    waits: frozenset[tuple[Queue, Queue]] = frozenset()
    reached: frozenset[Queue] = frozenset()


class SimulatedEvent:
    """A `kvstore.memory.streams.Event`."""

    def __init__(self, streams: SimulatedStreams, place: Queue) -> None:
        self.streams, self.place = streams, place
        self.flag, self.at_s = threading.Event(), 0.0

    def query(self) -> bool:
        self.streams.check()
        return self.flag.is_set() or self.place in self.streams.broken.reached

    def synchronize(self) -> None:
        assert self.flag.wait(TIMEOUT_S), f"an event of {self.place.value} is never reached"
        self.streams.check()

    def seconds_until(self, end: SimulatedEvent) -> float:
        assert self.streams.broken.reached or (self.flag.is_set() and end.flag.is_set())
        return end.at_s - self.at_s


class SimulatedStreams:
    """`kvstore.memory.streams.Streams` on CPU tensors. most_delay_s: before each piece of work; 0 for none. slow: a
    queue that is always slower than the others.

    fail_launch: called before work is taken, with its queue; what it raises, `launch` raises. Work that raises is a
    device that fails: nothing runs any more, and whatever asks for an event gets an error.
    """

    def __init__(
        self, seed: int = 0, most_delay_s: float = 0.001, broken: Broken | None = None, slow: Queue | None = None
    ) -> None:
        self.broken = broken or Broken()
        self.error: Exception | None = None
        self.fail_launch: Callable[[Queue], None] = lambda place: None
        self._most_delay_s, self._slow = most_delay_s, slow
        self._queues: dict[Queue, queue.SimpleQueue[Callable[[], object] | None]] = {
            place: queue.SimpleQueue() for place in Queue
        }
        self._threads = [
            threading.Thread(target=self._run, args=(place, random.Random(f"{seed} {place.value}")), daemon=True)
            for place in Queue
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError("the device has failed") from self.error

    def record(self, place: Queue) -> SimulatedEvent:
        self.check()
        event = SimulatedEvent(self, place)
        self._queues[place].put(lambda: self._reach(event))
        return event

    @staticmethod
    def _reach(event: SimulatedEvent) -> None:
        event.at_s = time.perf_counter()
        event.flag.set()

    def wait(self, place: Queue, event: SimulatedEvent) -> None:
        self.check()
        if (place, event.place) not in self.broken.waits:
            self._queues[place].put(lambda: event.flag.wait(TIMEOUT_S))

    def launch(self, place: Queue, work: Callable[[], object]) -> None:
        self.check()
        self.fail_launch(place)
        self._queues[place].put(lambda: self._work(work))

    def synchronize(self) -> None:
        """Returns when all that was given so far has ended."""
        for event in [self.record(place) for place in Queue]:
            event.synchronize()

    def close(self) -> None:
        for place in Queue:
            self._queues[place].put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    # -- threads -----------------------------------------------------------------------------------------------------
    def _run(self, place: Queue, rng: random.Random) -> None:
        torch.set_num_threads(1)
        pace, delayed = 1.0, 0
        with torch.inference_mode():
            while (item := self._queues[place].get()) is not None:
                if self._most_delay_s and delayed <= 0:  # a queue is fast for a while, and slow for a while
                    paces = (1.0, 2.0, 4.0) if place is self._slow else (0.0, 0.0, 0.3, 1.0)
                    pace, delayed = rng.choice(paces), rng.randrange(5, 40)
                delayed -= 1
                if pace:
                    time.sleep(pace * rng.random() * self._most_delay_s)
                item()
                item = None  # what it refers to is gone, as it is where a launch is over at once

    def _work(self, work: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            work()
        except Exception as error:
            self.error = error
