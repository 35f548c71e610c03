"""A pipeline in one process: steps whose logits come back later."""

from collections import deque
from dataclasses import replace

import torch

from kvstore.engine.core.step_loop import Steps


class FirstStage:
    """A model whose logits come back later, in the order of its forwards."""

    def __init__(self, model) -> None:
        self._model, self._logits = model, deque()
        self.most_in_flight = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def begin(self, *args) -> None:
        if len(logits := self._model.begin(*args)):
            self._logits.append(logits)
            self.most_in_flight = max(self.most_in_flight, len(self._logits))

    def end(self, num_samples: int) -> torch.Tensor:
        logits = self._logits.popleft()
        assert len(logits) == num_samples
        return logits


def pipelined(engine, num_steps: int) -> FirstStage:
    """From now on, so many steps of this engine are in flight at once."""
    loop = engine.loop
    loop.runner.model = stage = FirstStage(loop.runner.model)
    loop.scheduler.config = replace(loop.scheduler.config, steps_in_flight=num_steps)
    loop.steps = Steps(loop.scheduler, loop.runner)
    return stage
