"""A device before the first step: which one a process computes on, how many HBM blocks it gets there, what warms it up.

Triton compiles a kernel for every form of its launches, which takes a second each, and keeps the result on disk. Loads
and saves are warmed up when the caches are registered, graphs when they are captured.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import psutil
import torch

from kvstore.config import MAX_SAVE_BYTES, format_size
from kvstore.connector import NullConnector
from kvstore.engine.config import EngineConfig, SchedulerConfig
from kvstore.engine.model.interception import KVCaches, PositionFreeModel
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.step.graphs import bytes_for_graphs
from kvstore.engine.model.step.sampler import Sampler
from kvstore.engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError, ModelError
from kvstore.kernels.paged_batch import PagedBatch

LOGGER = logging.getLogger("kvstore.engine")
CPU_FRACTION = 0.25  # of the memory that is available at the start
CPU_WINDOWS = 4  # at most so many times max_num_seqs full windows
CUDA_FRACTION = 0.92  # of the device's memory, weights and the largest step included
CUDA_WINDOWS = 16  # as CPU_WINDOWS: for a small model a card could hold millions of blocks, which it does not need
STATES_A_REQUEST = 8  # at most: its own, and checkpoints, most of them of conversations that wait
WINDOW_TOKENS = 4096  # for so many in HBM there is a window: a conversation of 8K keeps those of its last two turns
_MOST_TOKENS = 128  # attention has the same form for more tokens, as a tile has no more rows


def own_device(config: EngineConfig, rank: int = 0) -> str:
    """The device of a rank, also of one of several engines: each has a CUDA device of its own. Raises ConfigError."""
    size = config.num_processes
    if size == 1 or config.device == "cpu" or not torch.cuda.is_available():
        return config.device
    if config.num_ranks > 1 and config.distributed_executor != "here":
        value = f"{config.distributed_executor}, but a model on CUDA devices is served on one machine only"
        raise ConfigError("distributed_executor", value, "give here, or cpu as the device")
    num_devices = torch.cuda.device_count()
    if num_devices < size:
        names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
        name = max(names, key=lambda name: getattr(config, name))
        sizes = " x ".join(str(getattr(config, name)) for name in names if getattr(config, name) > 1)
        why = f"but this machine has {num_devices} CUDA devices for {sizes} processes, which need one each"
        raise ConfigError(name, f"{getattr(config, name)}, {why}", "give less, or cpu as the device")
    return f"cuda:{config.data_parallel_rank * config.num_ranks + rank}"


def num_hbm_blocks(
    model: PositionFreeModel, config: SchedulerConfig, hbm: int | str, has_graphs: bool = False, saves: bool = False,
    num_processes: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Blocks, and states of the model if it keeps some, or window slots if its layers have windows, that fit in `hbm`
    bytes, or in what "auto" finds, on each rank: all of them call this.

    Raises ConfigError when not even one block fits, or not two states.

    On CUDA, "auto" leaves room for what comes beside the pool. has_graphs: room for CUDA graphs, which are captured
    later. saves: room for activations that are kept until they are saved to a tier below HBM. num_processes: on this
    machine; on a CPU they divide its memory.
    """
    size_bytes = _auto_bytes(model, config, has_graphs, saves, num_processes) if hbm == "auto" else int(hbm)
    if hbm == "auto":
        LOGGER.info("hbm auto takes %s of memory on %s", format_size(size_bytes), model.device)
    num_slots, state_bytes = 0, 0 if model.spec.state is None else model.spec.state.num_bytes
    if state_bytes:
        num_slots = min(int(size_bytes * config.state_share) // state_bytes, STATES_A_REQUEST * config.max_num_seqs)
        if num_slots < 2:
            least = format_size(math.ceil(2 * state_bytes / config.state_share))
            needed = f"but two states of this model need {format_size(2 * state_bytes)}, {config.state_share:g} of it"
            raise ConfigError("hbm", f"{format_size(size_bytes)}, {needed} at most", {"hbm": least})
    room_bytes, block_bytes = size_bytes - num_slots * state_bytes, _pool_bytes(model, config, 1)
    bytes_of = partial(_pool_bytes, model, config)
    most = max(room_bytes, 0) // (config.block_size * model.spec.hbm_bytes_per_token[0])
    count = bisect_right(range(1, most + 1), room_bytes, key=bytes_of)
    if count < 1:
        needed = f"but one block of this model needs {format_size(block_bytes)}"
        raise ConfigError("hbm", f"{format_size(size_bytes)}, {needed}", "give more")
    part: Part = model.network.kvstore_carrier.part
    count = part.least(count)
    if model.spec.windows:
        num_slots = _num_window_slots(model, config, count)
    if count * config.block_size < config.max_model_len:
        warnings.warn(
            f"the HBM pool holds {count * config.block_size} tokens, fewer than max_model_len {config.max_model_len}: "
            "longer requests will be refused",
            stacklevel=4,  # points at the caller of Engine()
        )
    return count, num_slots


def _num_window_slots(model: PositionFreeModel, config: SchedulerConfig, num_blocks: int) -> int:
    """That so many blocks have: for the tokens of a step, and for what requests see, which run or are to come back; for
    as many as may run, if that takes half of the bytes at most. With a slot for each block, none ever lacks. The same
    on all ranks.
    """
    size, layout = config.block_size, model.layout(config.block_size)
    own = layout.window_blocks + 3  # of a request: the block before, the one that it fills, and a copy
    running = min(config.max_num_seqs * own, num_blocks * layout.block_bytes // layout.state_bytes)
    in_step = -(-config.max_num_batched_tokens // size)
    return min(num_blocks, in_step + max(own, running, num_blocks * size * own // WINDOW_TOKENS))


def _pool_bytes(model: PositionFreeModel, config: SchedulerConfig, num_blocks: int) -> int:
    """Of so many blocks with their window slots, on this rank."""
    full, windowed = model.spec.hbm_bytes_per_token
    num_slots = _num_window_slots(model, config, num_blocks) + 1 if windowed else 0
    return config.block_size * (num_blocks * full + num_slots * windowed)


def block_bytes_in_hbm(model: PositionFreeModel, config: SchedulerConfig, num_blocks: int) -> int:
    """Of one block of so many, with its share of the window slots, on all ranks."""
    if not model.spec.windows:
        return config.block_size * model.spec.kv_bytes_per_token
    layout, num_slots = model.layout(config.block_size), _num_window_slots(model, config, num_blocks) + 1
    return layout.block_bytes + num_slots * layout.state_bytes // num_blocks


def _auto_bytes(
    model: PositionFreeModel, config: SchedulerConfig, has_graphs: bool, saves: bool, num_processes: int
) -> int:
    window_bytes = _pool_bytes(model, config, config.max_num_seqs * config.max_model_len // config.block_size)
    if model.spec.state is not None:
        window_bytes += config.max_num_seqs * STATES_A_REQUEST * model.spec.state.num_bytes
    if model.device.type == "cuda":
        beside = (MAX_SAVE_BYTES if saves else 0) + (bytes_for_graphs(model, config) if has_graphs else 0)
        return min(max(_cuda_bytes(model, config) - beside, 0), CUDA_WINDOWS * window_bytes)
    available = psutil.virtual_memory().available // num_processes
    return min(int(available * CPU_FRACTION), CPU_WINDOWS * window_bytes)


def _cuda_bytes(model: PositionFreeModel, config: SchedulerConfig) -> int:
    """The memory that is left beside the weights and the peak of a maximal step, which is run to measure it."""
    gc.collect()  # a dropped engine may still hold its pool
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    with torch.inference_mode():
        _maximal_step(model, config)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device)
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    torch.cuda.empty_cache()
    return max(int(total * CUDA_FRACTION) - others - peak, 0)


def _maximal_step(model: PositionFreeModel, config: SchedulerConfig) -> None:
    """A step with as many tokens and requests as possible, each of which samples."""
    num_tokens = config.max_num_batched_tokens
    length = min(num_tokens, config.max_model_len - 1)
    lens = [min(length, num_tokens - start) for start in range(0, num_tokens, length)]
    caches = model.new_caches(1, config.block_size)
    logits = _made_up_step(model, caches, config.block_size, lens, lens, min(config.max_num_seqs, num_tokens))
    logits.float().sort(dim=-1)  # the sampler may need so much beside it


def _made_up_step(
    model: PositionFreeModel, caches: KVCaches, block_size: int, lens: Sequence[int], contexts: Sequence[int],
    num_samples: int,
) -> torch.Tensor:  # [num_samples, vocab_size]  # fmt: skip
    """A step of requests with so many new tokens and contexts. It samples the last tokens. All blocks are the first
    one, and nothing is written, as slots are -1.
    """
    device = model.device
    positions = torch.cat(
        [torch.arange(end - count, end, device=device) for count, end in zip(lens, contexts, strict=True)]
    )
    table = torch.zeros(len(lens), -(-max(contexts) // block_size), dtype=torch.int64)
    starts, slots = [0, *itertools.accumulate(lens)], torch.full_like(positions, -1)
    batch = PagedBatch(starts, list(contexts), table, slots, block_size)
    samples = torch.arange(starts[-1] - num_samples, starts[-1], device=device)
    return model.forward(torch.zeros_like(positions), positions, batch, caches, NullConnector(), samples)


@torch.inference_mode()
def warm_up(model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig) -> None:
    """Run steps of all forms, without writing to the caches. Raises ModelError with the form that failed.

    Call it in the thread that is going to step, because cuBLAS keeps a handle and a workspace for each thread.
    """
    LOGGER.info("warming up: kernels that were never compiled on this machine take a second each")
    started = time.perf_counter()
    logits = run_all_forms(model, caches, config)
    sampler, none = Sampler(1, model.spec.vocab_size, model.device), np.empty(0, np.int64)
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=40, top_p=0.9)):
        sampler.set_row(0, params, 0, (), none, none)
        sampler.sample(logits, np.zeros(1, np.int64))  # waits for the device
    LOGGER.info("warm after %.1f s", time.perf_counter() - started)


@torch.inference_mode()
def run_all_forms(model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig) -> torch.Tensor:
    """The steps of `warm_up` alone, which all ranks of a model run together. Returns what the last one gives."""
    for num_tokens, context_len in step_forms(config):
        try:
            out = _made_up_step(model, caches, config.block_size, [num_tokens], [context_len], 1)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of torch, or of Triton, which has its own classes of errors
            reason = str(error).strip().split("\n")[0]
            raise ModelError(
                f"a step of {num_tokens} tokens with a context of {context_len} fails on {model.device} in "
                f"{model.spec.dtype} with {type(error).__name__}: {reason}; give another dtype, or cpu as the device"
            ) from error
    return out


def step_forms(config: SchedulerConfig) -> Iterator[tuple[int, int]]:
    """Numbers of new tokens, from one to a whole step, and contexts: without a history, and with the longest."""
    longest = min(config.max_num_batched_tokens, config.max_model_len)
    yield longest, longest
    num_tokens = 1
    while num_tokens <= min(_MOST_TOKENS, longest):
        yield from ((num_tokens, num_tokens), (num_tokens, config.max_model_len))
        num_tokens *= 2
