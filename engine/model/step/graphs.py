"""Decode steps and short prompts as CUDA graphs: captured at start for some sizes, and replayed with padding.

Knows a step's arrays and the connector's worker side, no request.
"""

from __future__ import annotations

import bisect
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvstore.blocks.records import SaveFence, TransferPlan
from kvstore.connector import KVConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.model.interception import KVCaches, PositionFreeModel
from kvstore.engine.model.step.tensors import Form, FormTensors, StepTensors
from kvstore.errors import KVStoreError

LOGGER = logging.getLogger("kvstore.engine")
PREFILL_SIZES = (16, 32, 64, 128)  # tokens of a turn after a hit: launching its kernels takes longer than running them
MAX_SIZE = 512  # larger decode batches compute so long that launching their kernels one by one costs little
GRAPH_BYTES = 16 << 20  # memory of the driver for one graph of a thousand kernels: a guess on the safe side
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "is_nonzero",
    "equal",
}
_TOLERANCE = {torch.float32: 1e-3}  # relative error of the logits; 16-bit models get the coarser one below
_TOLERANCE_16_BIT = 0.01  # the same kernels over the same tensors round the same way


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step. The next replay overwrites those of a replay."""

    logits: Tensor  # [num_requests, vocab_size]
    layers: list[tuple[Tensor, Tensor]]  # per layer: raw keys and values, [num_tokens, num_kv_heads, head_dim] each


Work = Callable[[StepTensors], StepOutput]


class Capturer(Protocol):
    """Turns work over fixed tensors into a function that repeats it over their new contents."""

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        """Raises RuntimeError when the work waits for the device, or does anything else that cannot be replayed."""
        ...


class NoWaits(TorchDispatchMode):
    """In this context, operations raise RuntimeError for whose results this thread would wait, as routing that counts
    tokens does. Other threads may wait: torch's own refusal would be the whole process's.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        to_host = name in ("_to_copy", "copy_") and _is_to_host(name, args, kwargs or {})
        by_mask = by_mask and (name == "index" or args[2].numel() > 1)
        if name in _WAITS or by_mask or to_host or (name == "_grouped_mm" and _counts_on_host(args[0])):
            raise RuntimeError(f"{name} waits for the device")
        return operation(*args, **(kwargs or {}))


def _is_to_host(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether this copies from the device."""
    source, target = (args[1], args[0].device) if name == "copy_" else (args[0], options.get("device"))
    return source.is_cuda and target is not None and torch.device(target).type == "cpu"


def _counts_on_host(tokens: Tensor) -> bool:
    """Whether torch multiplies each expert's tokens on its own: its kernel is for bfloat16 on Hopper and Blackwell."""
    has_kernel = tokens.dtype is torch.bfloat16 and torch.cuda.get_device_capability(tokens.device)[0] in (9, 10)
    return tokens.is_cuda and not has_kernel


class CudaCapturer:
    """CUDA graphs of one device, in one memory pool: a replay may overwrite the outputs of every other graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # if graphs of a dropped engine were freed during a capture, they would break it

    def capture(self, work: Work, tensors: StepTensors) -> Callable[[], StepOutput]:
        # The inner context puts the current stream back: a capture that fails at its end leaves its own there.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    work(tensors)  # compiles and loads kernels and makes workspaces, which a capture must not do
                    with NoWaits():
                        work(tensors)
            finally:  # if it is refused, its blocks are overwritten next
                torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with ExitStack() as failed:
                failed.callback(self._end_capture)
                # Other threads may go on with CUDA meanwhile. With "global" they could break the capture.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    output = work(tensors)
                failed.pop_all()

        def replay() -> StepOutput:
            graph.replay()
            return output

        return replay

    def _end_capture(self) -> None:
        """End a capture that has failed. The driver's call raises before torch takes its allocator and generator out of
        the capture; memory that other streams give back would then never be used again, and nobody could draw.
        """
        with suppress(RuntimeError):  # torch has already taken it out
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        try:
            generator = torch.cuda.default_generators[self._device.index]
            generator.graphsafe_set_state(generator.clone_state())
            torch.empty(1, device=self._device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise KVStoreError(
                f"a CUDA graph could not be captured, and the device does not work any more ({error}); "
                "start again with enforce_eager=True (--enforce-eager)"
            ) from error


class _Kept:
    """Replaces the connector in a capture: loads nothing, and keeps what would be saved."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int, raw_key: Tensor, value: Tensor) -> None:
        self.layers[layer] = (raw_key, value)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture. A step is padded to the next of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_SIZE + 1, 32)]
    last = min(max_num_seqs, MAX_SIZE)
    return [*(size for size in sizes if size < last), last]


class StepGraphs:
    """Graphs for all forms. Made by `capture_graphs`.

    They run steps in which every request computes and samples one token, and steps that compute the last few tokens of
    one prompt; but no step whose plan loads.
    """

    def __init__(self, model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig) -> None:
        self._model, self._caches = model, caches
        self._config = config
        longest = min(config.max_num_batched_tokens, config.max_model_len)
        self.decodes = [Form(size, size) for size in graph_sizes(config.max_num_seqs)]
        self.prefills = [Form(size, 1) for size in PREFILL_SIZES if size <= longest]
        self.tensors = FormTensors([*self.decodes, *self.prefills], config, model.device)
        self._slots = np.arange(min(len(keys) for keys, _ in caches))  # made-up steps have a window slot for each block
        self._replays: dict[Form, Callable[[], StepOutput]] = {}
        self._fence: SaveFence | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    def run_once(self, form: Form) -> StepOutput:
        """Run a made-up step eagerly."""
        return self._eager(form, *self._trial(form, 0))

    def capture_all(self, capturer: Capturer, forms: Sequence[Form]) -> None:
        """Capture the largest first, so that the others fit into its memory. Raises an error if a capture fails."""
        with ExitStack() as failed:
            failed.callback(self._forget, forms)
            try:
                self.run_once(self.decodes[-1])  # so that the logits are made in the stream of the steps
                for form in reversed(forms):
                    self.tensors.load(form, *self._trial(form, 0), self._slots)
                    self._replays[form] = capturer.capture(self._work, self.tensors.of(form))
                    self._check(form)
            finally:
                self._erase(len(self._slots))
            failed.pop_all()

    def _forget(self, forms: Sequence[Form]) -> None:
        for form in forms:
            self._replays.pop(form, None)

    def _trial(self, form: Form, shift: int) -> tuple[StepInputs, np.ndarray]:
        """Arrays and block table of a made-up step with a row of padding: requests that share the first block, or one
        request in the first blocks, after `shift` tokens that nobody has written.

        Tokens are written, and attend to earlier tokens of the same block and step.
        """
        size, longest, vocab_size = self._config.block_size, self._config.max_model_len, self._model.spec.vocab_size
        num_blocks, within = len(self._slots), min(size, longest)
        ordinals = np.arange(form.num_tokens + 1)
        if not form.is_decode:
            count = max(min(form.num_tokens, num_blocks * size, longest) - 1, 1)
            positions = shift + ordinals[:count]
            one, last = ordinals[:1], ordinals[count - 1 : count]
            table = np.arange(-(-(shift + count) // size))[None]
            tokens = (positions * 7 + shift) % vocab_size
            start = np.array([0, count])
            return StepInputs(tokens, positions, positions, start, positions[-1:] + 1, one, last, one, one), table
        count = min(max(form.num_requests - 1, 1), num_blocks * within)
        index = np.roll(np.arange(count), shift)
        blocks, offsets = index // within, index % within
        inputs = StepInputs(
            (index * 7 + shift) % vocab_size, offsets, blocks * size + offsets, ordinals[: count + 1], offsets + 1,
            index, ordinals[:count], index, index,
        )  # fmt: skip
        return inputs, blocks[:, None].astype(np.int32)

    def _check(self, form: Form) -> None:
        """Check that a replay gives the logits of the same work done eagerly, on inputs other than the capture's."""
        inputs, table = self._trial(form, 1)
        count, blocks = len(inputs.rows), int(table.max()) + 1
        self._erase(blocks)
        output = self._eager(form, inputs, table).logits
        expected = output[:count].to(torch.float32, copy=True)
        output.fill_(torch.nan)  # so that whatever a replay leaves out is noticed, also in the cache
        self._erase(blocks)
        got = self._replays[form]().logits[:count].float()
        error = float((got - expected).norm() / expected.norm().clamp_min(1e-9))
        if not error <= _TOLERANCE.get(self._model.spec.dtype, _TOLERANCE_16_BIT):
            raise RuntimeError(f"a replay of {form} gives logits that differ by {error:.2g} of their size")

    def _erase(self, num_blocks: int) -> None:
        for layer in self._caches:
            for cache in layer:
                cache[:num_blocks].zero_()

    def _eager(self, form: Form, inputs: StepInputs, table: np.ndarray) -> StepOutput:
        """Run a step eagerly, padded to the form, over the tensors that the graphs read."""
        self.tensors.load(form, inputs, table, self._slots)
        return self._work(self.tensors.of(form, inputs, table))

    def _work(self, tensors: StepTensors) -> StepOutput:
        kept, samples = _Kept(), tensors.sample_tokens
        found = self._model.forward(tensors.token_ids, tensors.positions, tensors.batch, self._caches, kept, samples)
        logits = self.tensors.share(found)
        return StepOutput(logits, [kept.layers[layer] for layer in sorted(kept.layers)])

    def form_of(self, inputs: StepInputs) -> Form | None:
        """The form for a step in which each request computes and samples one token, or one request ends its prompt."""
        num_tokens, count = len(inputs.token_ids), len(inputs.rows)
        forms = self.decodes if count == num_tokens else self.prefills if count == 1 else []
        index = bisect.bisect_left(forms, num_tokens, key=lambda form: form.num_tokens)
        found = forms[index] if index < len(forms) else None
        return found if found in self._replays and count == len(inputs.sample_rows) else None

    def run(
        self, form: Form, inputs: StepInputs, table: np.ndarray, plan: TransferPlan | None, connector: KVConnector,
        window_of: np.ndarray | None = None, sampled: Tensor | None = None,
    ) -> Tensor:  # [num_requests, vocab_size]  # fmt: skip
        """Run a step. Returns its logits, which the next step overwrites. Hands its saves to the connector, ends them.

        table: [num_requests, width] block numbers. window_of, sampled: see `kvstore.engine.model.step.tensors`.
        """
        if self._fence is not None:  # the save of an earlier step may still read what this replay overwrites
            self._fence.order()
            self._fence = None
        count = len(inputs.token_ids)
        self.tensors.load(form, inputs, table, window_of, sampled)
        output = self._replays[form]()
        if plan is not None and plan.saves:
            for layer, (key, value) in enumerate(output.layers):
                connector.save_kv_layer(layer, key[:count], value[:count])
        self._fence = connector.wait_for_save()
        return output.logits[: len(inputs.rows)]


@torch.inference_mode()
def bytes_for_graphs(model: PositionFreeModel, config: SchedulerConfig) -> int:
    """The memory that `capture_graphs` will take of a CUDA device, measured by steps of the largest forms.

    The peak of these steps is that of the memory pool that all graphs share. Keys and values are left by each graph
    for its own tokens.
    """
    device, sizes = model.device, graph_sizes(config.max_num_seqs)
    config = replace(config, num_window_slots=len(model.spec.windows))  # whether there are any is what counts here
    within = min(config.block_size, config.max_model_len)
    num_blocks = max(-(-sizes[-1] // within), -(-PREFILL_SIZES[-1] // config.block_size))
    graphs = StepGraphs(model, model.new_caches(num_blocks, config.block_size), config)
    kinds = [forms for forms in (graphs.decodes, graphs.prefills) if forms]
    for forms in kinds:
        graphs.run_once(forms[-1])  # compiles kernels, makes workspaces
    torch.cuda.synchronize(device)
    peak = left = 0
    for forms in kinds:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output = graphs.run_once(forms[-1])
        kept = torch.cuda.memory_allocated(device) - before
        peak = max(peak, torch.cuda.max_memory_allocated(device) - before)
        left += kept * sum(form.num_tokens for form in forms) // forms[-1].num_tokens
        del output
    torch.cuda.empty_cache()
    return peak + left + graphs.tensors.num_bytes + sum(map(len, kinds)) * GRAPH_BYTES


@torch.inference_mode()
def capture_graphs(
    model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig, capturer: Capturer
) -> StepGraphs | None:
    """Capture the graphs of a model, over caches that are not in use yet. None, with a line in the log, if that fails.

    Models that route tokens by counting them cannot be captured. `kvstore.engine.model.devices` reserves the memory; if
    it is missing, steps run without graphs, too.
    """
    graphs = StepGraphs(model, caches, config)
    for forms, what in ((graphs.decodes, "decode runs"), (graphs.prefills, "short prompts are computed")):
        try:
            graphs.capture_all(capturer, forms)
        except KVStoreError:
            raise
        except Exception as error:  # of torch, Triton or the model: steps run eagerly instead
            first = error.__context__ or error  # ending a broken capture raises an error of its own
            reason = str(first).strip().split("\n")[0]
            LOGGER.warning("%s without CUDA graphs: %s: %s", what, type(first).__name__, reason)
            if forms is graphs.decodes:
                return None  # then prompts cannot be captured either
    return graphs
