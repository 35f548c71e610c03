"""What the ranks with the other parts of a model are told of a step; see `kvstore.engine.ranks`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import numpy as np
from torch import Tensor

from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.step.launched import Launched
from kvstore.errors import EngineDiedError


class Others(Protocol):
    """The other ranks. Only the thread that steps calls it. These methods do nothing."""

    def check(self) -> None:
        """Raises EngineDiedError if one has ended. A device does not notice that, and goes on with wrong sums."""
        return

    def blamed(self) -> AbstractContextManager[None]:
        """If another rank has caused an error in this context, raise that rank's error instead."""
        return nullcontext()

    def begin_step(self, inputs: StepInputs, block_table: np.ndarray, copies: Sequence[tuple[int, int]]) -> None:
        """Let them compute this step, too. block_table: of all rows of the batch; copies: HBM blocks to copy first."""
        return

    def end_forward(self, num_samples: int) -> None:
        """Called on the first stage of a pipeline, before this rank waits for so many rows of the oldest step."""
        return

    def end_step(self) -> None:
        """The forward has ended in this rank."""
        return

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Overwrite these HBM blocks with zeros."""
        return

    def reset(self) -> None:
        """Called after an error. Steps that have begun and not ended will never end."""
        return


class NoOthers(Others):
    """For a model that one rank computes."""


class Flight:
    """Steps between their launch and the end of their forward on all ranks. end: see `PositionFreeModel.end`."""

    def __init__(self, end: Callable[[int], Tensor], others: Others) -> None:
        self.others = others
        self._end = end
        self._open = deque[int]()  # samples of each step whose logits still have to come from the last stage
        self._is_in_forward = False

    def begin(self, inputs: StepInputs, block_table: np.ndarray, copies: Sequence[tuple[int, int]]) -> None:
        """A forward begins here; see `Others.begin_step`."""
        self._is_in_forward = True
        self.others.begin_step(inputs, block_table, copies)

    def computed(self, launched: Launched, logits: Tensor | None) -> None:
        """The forward has ended here. Notes whether the step is open."""
        launched.is_open = logits is None and bool(launched.sampling)
        if launched.is_open:
            self._open.append(len(launched.sampling))
        else:
            self.others.end_step()
        self._is_in_forward = False

    def end(self) -> Tensor:
        """Wait for the logits of the oldest open step."""
        num_samples = self._open.popleft()
        self.others.end_forward(num_samples)
        logits = self._end(num_samples)
        self.others.end_step()
        return logits

    def reset(self) -> None:
        """Called after an error. Waits for the steps in flight, unless this rank has left a forward."""
        with suppress(EngineDiedError):
            while self._open and not self._is_in_forward:
                self.end()
        self._open.clear()
        self._is_in_forward = False
        self.others.reset()
