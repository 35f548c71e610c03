"""Decode steps as CUDA graphs: captured at start for some batch sizes, and replayed with padding instead of a forward.

Owns the tensors that the graphs read and write. Knows a step's arrays and the connector's worker side, no request.
"""

from __future__ import annotations

import bisect
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from engine.config import SchedulerConfig
from engine.input_batch import StepInputs
from engine.model import KVCaches, PositionFreeModel
from engine.step_tensors import Layout, StepTensors
from engine.waiting import WAITING
from kernels.paged_batch import DeviceBatch, PagedBatch
from kvstore.connector import KVConnector, SaveFence, TransferPlan
from kvstore.errors import KVStoreError

LOGGER = logging.getLogger("kvstore.engine")
MAX_SIZE = 512  # larger decode batches compute for so long that launching their kernels one by one costs little
GRAPH_BYTES = 16 << 20  # of the driver, for one graph of a thousand kernels: a guess on the safe side
_TOLERANCE = {torch.float32: 1e-3}  # relative error of the logits; 16-bit models get the coarser one below
_TOLERANCE_16_BIT = 0.01  # the same kernels over the same tensors: nothing is rounded otherwise


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a decode step leaves: logits, [size, vocab_size], and raw keys and values per layer, [size, num_kv_heads,
    head_dim] each. Of a replay they hold until the next one."""

    logits: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]


Work = Callable[[StepTensors], StepOutput]


class Capturer(Protocol):
    """Makes of work over tensors that stay where they are something that does it again over their new contents."""

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        """Raises RuntimeError when the work waits for the device, or does anything else that cannot be replayed."""
        ...


class CudaCapturer:
    """CUDA graphs of one device, in one memory pool: a replay may overwrite the outputs of every other graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # graphs of an engine that was dropped, if they ended in the middle of a capture, would break it

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        # The inner context puts the current stream back: a capture that fails at its end leaves its own there.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work(tensors)  # kernels are compiled and loaded, workspaces made: none of it may happen in a capture
                with WAITING.refused():
                    work(tensors)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on with CUDA meanwhile: with "global" what they do could break the capture.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    output = work(tensors)
            except BaseException:
                self._leave()
                raise

        def replay() -> StepOutput:
            graph.replay()
            return output

        return replay

    def _leave(self) -> None:
        """Of a capture that failed, the driver's end raises before torch takes its allocator out of it: then memory
        that other streams give back would never be used again.
        """
        with suppress(RuntimeError):  # it has taken it out
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        try:
            torch.empty(1, device=self._device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise KVStoreError(
                f"a CUDA graph could not be captured, and the device does not work any more ({error}); "
                "start again with enforce_eager=True (--enforce-eager)"
            ) from error


class _Kept:
    """Stands where the connector does in a capture: loads nothing, and keeps what would be saved."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        self.layers[layer] = (raw_key, value)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are captured; a step is padded to the next."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_SIZE + 1, 32)]
    last = min(max_num_seqs, MAX_SIZE)
    return [*(size for size in sizes if size < last), last]


class DecodeGraphs:
    """Graphs for all sizes. Made by `capture_graphs`.

    A step of up to `max_size` requests that compute one token each and sample may be run here, unless its plan loads.
    """

    def __init__(self, model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig) -> None:
        self._model, self._caches = model, caches
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._sizes = graph_sizes(config.max_num_seqs)
        self.max_size = self._sizes[-1]
        self._pinned = model.device.type == "cuda"
        self._ordinals = np.arange(self.max_size + 1)
        max_blocks = -(-config.max_model_len // config.block_size)
        places = Layout(self.max_size, self.max_size, self.max_size, max_blocks).places()
        # Outside of the graphs' pool, and shared by all sizes: they run one after the other.
        self._arrived = torch.zeros(places[-1].stop, dtype=torch.int32, device=model.device)
        self._table = torch.zeros(self.max_size, max_blocks, dtype=torch.int32, device=model.device)
        self._logits: torch.Tensor | None = None
        self._replays: dict[int, Callable[[], StepOutput]] = {}
        self._fence: SaveFence | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    @property
    def num_bytes(self) -> int:
        """Of what all sizes share, once a step has run."""
        shared = [self._arrived, self._table, *([] if self._logits is None else [self._logits])]
        return sum(tensor.nbytes for tensor in shared)

    def run_once(self) -> StepOutput:
        """Made-up requests of the largest size, eagerly."""
        return self._eager(self.max_size, *self._trial(self.max_size, 0))

    def capture_all(self, capturer: Capturer) -> None:
        """Largest first, so that the others fit into its memory. Raises whatever says that one cannot be captured."""
        try:
            self.run_once()  # logits are made in the stream that steps run in
            for size in reversed(self._sizes):
                self._load(size, *self._trial(size, 0))
                self._replays[size] = capturer.capture(self._work, self._tensors(size))
                self._check(size)
        finally:
            for layer in self._caches:  # what the trials wrote
                for cache in layer:
                    cache.zero_()

    def _trial(self, size: int, shift: int) -> tuple[StepInputs, np.ndarray]:
        """Arrays and block table of made-up requests within the first block each, with a row of padding behind them.

        They write their token and see what those before them in the same block write in the same step.
        """
        num_blocks, within = len(self._caches[0][0]), min(self._block_size, self._max_model_len)
        count = min(max(size - 1, 1), num_blocks * within)
        index = np.roll(np.arange(count), shift)
        blocks, offsets = index // within, index % within
        token_ids = (index * 7 + shift) % self._model.spec.vocab_size
        slots, ordinals = blocks * self._block_size + offsets, self._ordinals
        inputs = StepInputs(
            token_ids, offsets, slots, ordinals[: count + 1], offsets + 1, index, ordinals[:count], index, index
        )
        return inputs, blocks[:, None].astype(np.int32)

    def _check(self, size: int) -> None:
        """A replay must give the logits of the same work done eagerly, on other inputs than those of the capture."""
        inputs, table = self._trial(size, 1)
        count, blocks = len(inputs.rows), int(table.max()) + 1
        output = self._eager(size, inputs, table).logits
        expected = output[:count].to(torch.float32, copy=True)
        output.fill_(torch.nan)  # what a replay leaves out is seen, also in the cache
        for layer in self._caches:
            for cache in layer:
                cache[:blocks].zero_()
        got = self._replays[size]().logits[:count].float()
        error = float((got - expected).norm() / expected.norm().clamp_min(1e-9))
        if not error <= _TOLERANCE.get(self._model.spec.dtype, _TOLERANCE_16_BIT):
            raise RuntimeError(f"a replay of {size} requests gives logits that differ by {error:.2g} of their size")

    def _eager(self, size: int, inputs: StepInputs, table: np.ndarray) -> StepOutput:
        """A step over the tensors that the graphs read, padded to `size` requests."""
        self._load(size, inputs, table)
        return self._work(self._tensors(size, inputs.context_lens.tolist(), table))

    def _tensors(self, size: int, context_lens: Sequence[int] = (), table: np.ndarray | None = None) -> StepTensors:
        """What `_load` has brought. Lists for the host come from the step's arrays alone: in a capture there are none,
        since they would be those of the capture in every replay.
        """
        layout = Layout(size, size, size, 0)
        token_ids, positions, slots, samples, query_start, lens, _ = layout.unpack(self._arrived)
        on_device = DeviceBatch(query_start, lens, self._table[:size], size, 1, self._max_model_len)
        host_table, host_lens = torch.zeros(0, 0, dtype=torch.int64), []
        if table is not None:
            host_table = torch.zeros(size, table.shape[1], dtype=torch.int64)
            host_table[: len(table)] = torch.from_numpy(table)
            host_lens = [*context_lens, *[1] * (size - len(context_lens))]  # padding sees a token of block 0
        batch = PagedBatch(list(range(size + 1)), host_lens, host_table, slots, self._block_size, on_device)
        return StepTensors(token_ids, positions, samples, batch)

    def _work(self, tensors: StepTensors) -> StepOutput:
        kept, samples = _Kept(), tensors.sample_tokens
        found = self._model.forward(tensors.token_ids, tensors.positions, tensors.batch, self._caches, kept, samples)
        logits = self._share(found)
        return StepOutput(logits, [kept.layers[layer] for layer in sorted(kept.layers)])

    def _share(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits to where those of all sizes are left: a step reads them before the next one begins."""
        if self._logits is None:
            self._logits = logits.new_empty((self.max_size, logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)

    def _load(self, size: int, inputs: StepInputs, table: np.ndarray) -> None:
        """Bring a step's arrays, padded to `size` requests, to where the graphs read them."""
        ordinals = self._ordinals
        padded = replace(inputs, query_start=ordinals[: size + 1], sample_tokens=ordinals[:size])
        layout = Layout(size, size, size, table.shape[1])
        buffer = layout.pack(padded, table, self._pinned)
        self._arrived[: len(buffer)].copy_(buffer, non_blocking=True)
        blocks = layout.unpack(self._arrived)[-1]
        self._table[:size, : table.shape[1]].copy_(blocks)  # on the device; the rest of a row is not looked at

    def fits(self, inputs: StepInputs) -> bool:
        """Whether all of the step's requests compute one token and sample it, and are not too many."""
        count = len(inputs.rows)
        return count == len(inputs.token_ids) == len(inputs.sample_rows) and count <= self.max_size

    def run(
        self, inputs: StepInputs, table: np.ndarray, plan: TransferPlan | None, connector: KVConnector
    ) -> torch.Tensor:  # [num_requests, vocab_size]
        """The step's logits, which hold until the next step; its saves are handed to the connector, and ended.

        table: [num_requests, width] block numbers.
        """
        if self._fence is not None:  # any graph's replay overwrites what the save of another one's step may still read
            self._fence.order()
            self._fence = None
        count = len(inputs.rows)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        self._load(size, inputs, table)
        output = self._replays[size]()
        if plan is not None and plan.saves:
            for layer, (key, value) in enumerate(output.layers):
                connector.save_kv_layer(layer, key[:count], value[:count])
        self._fence = connector.wait_for_save()
        return output.logits[:count]


@torch.inference_mode()
def bytes_for_graphs(model: PositionFreeModel, config: SchedulerConfig) -> int:
    """What `capture_graphs` is going to take of a CUDA device beside the pool: found by a step of the largest size.

    Its peak is that of the pool that all graphs share; what it leaves (logits, keys and values) each graph has for its
    own size.
    """
    device, sizes = model.device, graph_sizes(config.max_num_seqs)
    within = min(config.block_size, config.max_model_len)
    caches = model.new_caches(-(-sizes[-1] // within), config.block_size)
    graphs = DecodeGraphs(model, caches, config)
    graphs.run_once()  # compiles kernels, makes workspaces
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = graphs.run_once()
    left = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    del output
    torch.cuda.empty_cache()
    return peak + left * sum(sizes) // sizes[-1] + graphs.num_bytes + len(sizes) * GRAPH_BYTES


@torch.inference_mode()
def capture_graphs(
    model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig, capturer: Capturer
) -> DecodeGraphs | None:
    """The graphs of a model, over caches that nobody uses yet; None, and a line in the log, when it has to do without.

    Models that route tokens by counting them cannot be captured. What is taken of the device's memory is foreseen by
    `engine.memory`; where it is not there, steps run without graphs too.
    """
    graphs = DecodeGraphs(model, caches, config)
    try:
        graphs.capture_all(capturer)
    except KVStoreError:
        raise
    except Exception as error:  # whatever torch, Triton and the model raise: it is done eagerly instead
        first = error.__context__ or error  # the end of a broken capture has an error of its own
        reason = str(first).strip().split("\n")[0]
        LOGGER.warning("decode runs without CUDA graphs: %s: %s", type(first).__name__, reason)
        return None
    return graphs
