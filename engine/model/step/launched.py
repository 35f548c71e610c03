"""A step between its launch and its end: what is to be read of it, and how long the device took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.connector import KVConnector
from kvstore.engine.core.scheduler import Scheduled, SchedulerOutput
from kvstore.engine.model.step.drawing import Drawn


@dataclass(slots=True)
class Launched:
    """A step that the device may still be computing. num_prefill_tokens: 0: its time is not to be told.

    sampling: indices in `scheduled` of those that sample, num_samples: how many each; rows: theirs in the batch, until
    the next launch; positions: of their tokens. on_host: where the tokens are when `end` is reached.
    start, end: None on a CPU, where it has taken `seconds`.
    """

    scheduled: tuple[Scheduled, ...]
    num_prefill_tokens: int = 0
    start: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None
    seconds: float = 0.0
    sampling: Sequence[int] = ()
    num_samples: Sequence[int] = ()
    rows: np.ndarray | None = None
    positions: np.ndarray | None = None
    drawn: Drawn | None = None
    on_host: torch.Tensor | None = None


class StepClock:
    """Times steps on their device, and tells the connector how fast prompts are computed."""

    def __init__(self, device: torch.device, connector: KVConnector) -> None:
        self._device = device
        self._index = device.index if device.type == "cuda" else -1  # -1: no device is set
        self._connector = connector
        self._is_warm = False

    def mark(self) -> torch.cuda.Event | None:
        """A time on the device's clock; None on a CPU, where a step has ended when its call returns."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, launched: Launched, output: SchedulerOutput, seconds: float) -> None:
        """The launch took so many seconds, which on a CPU is the step."""
        launched.end, launched.seconds = self.mark(), seconds
        count = sum(s.num_tokens for s in output.scheduled if s.num_tokens > 1)
        has_loaded = output.plan is not None and bool(output.plan.loads)  # then the step has waited for its loads, too
        if 2 * count > output.num_tokens and not has_loaded and self._is_warm:  # the first step is slow
            launched.num_prefill_tokens = count
        self._is_warm = True

    def wait(self, launched: Launched) -> None:
        """Until it has ended. On CUDA."""
        assert launched.end is not None
        with torch.cuda.device(self._index):  # see `kvstore.memory.streams`
            launched.end.synchronize()
        self.tell(launched)

    def tell(self, launched: Launched) -> None:
        if launched.num_prefill_tokens:
            seconds = launched.seconds
            if launched.start is not None and launched.end is not None:
                seconds = launched.start.elapsed_time(launched.end) / 1000
            self._connector.step_measured(launched.num_prefill_tokens, seconds)
