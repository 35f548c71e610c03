"""A step between its launch and its end: what must be read of it, and how long the device took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.core.scheduler import Scheduled, SchedulerOutput
from kvstore.engine.model.step.drawing import Drawn
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
    drawn: Drawn | None = None
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
        event = torch.cuda.Event(enable_timing=True)
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
