"""On a CPU in the place of CUDA's graphs: what replays a step, and a connector that saves as late as a device may."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kvstore.blocks.records import TransferPlan
from kvstore.engine.model.step.graphs import StepOutput, Work
from kvstore.engine.model.step.tensors import StepTensors
from kvstore.kernels.paged_batch import PagedBatch

SPOILT = -7  # no token, no block and no length


def live(tensors: StepTensors) -> StepTensors:
    """What attention on a CPU reads from the host's lists, taken from the tensors as they are now."""
    at, slots = tensors.batch.device_batch, tensors.batch.slots
    lens, padding, starts = at.context_lens, at.context_lens == 0, at.query_start.tolist()
    is_padding = torch.arange(len(slots)) >= starts[-1] if at.num_decodes == 0 else padding
    assert at.num_decodes == 0 or starts == tensors.batch.query_start == list(range(len(slots) + 1))
    for array, expected in ((tensors.token_ids, 0), (tensors.positions, 0), (slots, -1)):
        assert (array[is_padding] == expected).all()
    table = at.block_table.long().masked_fill(padding[:, None], 0)  # padding sees block 0; nobody sees its result
    width = -(-int(lens.max()) // tensors.batch.block_size)
    windowed = tensors.batch.windowed
    batch = PagedBatch(
        starts, lens.clamp(min=1).tolist(), table[:, :width], slots, tensors.batch.block_size,
        windowed=None if windowed is None else live(replace(tensors, batch=windowed)).batch,
    )  # fmt: skip
    return replace(tensors, batch=batch)


class Rerun:
    """In the place of CUDA's graphs: computes again over the same tensors.

    num_replays: of decode steps, by requests; num_prompts: of prompts, by tokens.
    """

    def __init__(self) -> None:
        self.num_replays: Counter[int] = Counter()
        self.num_prompts: Counter[int] = Counter()
        self.fault: Callable[[], object] = lambda: None  # called before each replay; what it raises, the replay raises

    def count(self, tensors: StepTensors) -> None:
        is_decode = len(tensors.sample_tokens) == len(tensors.token_ids)
        (self.num_replays if is_decode else self.num_prompts)[len(tensors.token_ids)] += 1

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        self.begin(work(live(tensors)))

        def replay() -> StepOutput:
            self.fault()
            self.count(tensors)
            return self.again(work, tensors)

        return replay

    def begin(self, output: StepOutput) -> None:
        pass

    def again(self, work: Work, tensors: StepTensors) -> StepOutput:
        return work(live(tensors))


class Spoiling(Rerun):
    """Outputs stay where they were at the capture, and a replay spoils all that any graph has left before it begins.

    After it, inputs are spoilt too: what is not brought anew for the next one is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[tuple[int, int], StepOutput] = {}

    def begin(self, output: StepOutput) -> None:
        self.left[len(output.logits), len(output.layers[0][0])] = output

    def again(self, work: Work, tensors: StepTensors) -> StepOutput:
        for output in self.left.values():
            for tensor in (output.logits, *(t for layer in output.layers for t in layer)):
                tensor.fill_(torch.nan)
        new, place = work(live(tensors)), self.left[len(tensors.sample_tokens), len(tensors.token_ids)]
        for old_layer, new_layer in zip(place.layers, new.layers, strict=True):
            for old, found in zip(old_layer, new_layer, strict=True):
                old.copy_(found)
        arrays = [tensors.token_ids, tensors.positions]
        for batch in filter(None, (tensors.batch, tensors.batch.windowed)):
            arrays += [batch.slots, batch.device_batch.context_lens, batch.device_batch.block_table]
        for array in arrays:
            array.fill_(SPOILT)
        return place


class LateFence:
    def __init__(self, connector: "LateSaves") -> None:
        self._connector = connector

    def order(self) -> None:
        if self._connector.obeys:
            self._connector.catch_up()


class LateSaves:
    """A connector that saves as late as a device may: when the fence is ordered, or else behind the next step.

    obeys: False for a fence that orders nothing, which the tests must see.
    """

    def __init__(self, inner, obeys: bool = True) -> None:
        self._inner, self.obeys = inner, obeys
        self._calls: list[Callable[[], object]] = []
        self._num_old = 0
        self.num_late = 0

    def __getattr__(self, name: str):
        if name in ("flush", "close", "upkeep", "wait_for_progress", "step_failed"):
            self.catch_up()
        return getattr(self._inner, name)

    def catch_up(self, count: int | None = None) -> None:
        calls = self._calls[:count]
        del self._calls[:count]
        self._num_old = 0
        for call in calls:
            call()

    def start_load_kv(self, plan: TransferPlan, row_starts: list[int]) -> None:
        self._calls.append(partial(self._inner.start_load_kv, plan, row_starts))
        if plan.loads:
            self.catch_up()

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        self._calls.append(partial(self._inner.save_kv_layer, layer, raw_key, value))

    def wait_for_save(self) -> LateFence:
        self.num_late += bool(self._num_old)
        if self._num_old:
            new = self._calls[self._num_old :]
            self.catch_up(self._num_old)
            self._calls = new
        self._calls.append(self._inner.wait_for_save)
        self._num_old = len(self._calls)
        return LateFence(self)
