"""How many HBM blocks the engine's pool gets: a given size, or with `auto` what is free on the device."""

from __future__ import annotations

import gc
import itertools
import logging
import warnings

import psutil
import torch

from kvstore.config import MAX_SAVE_BYTES, format_size
from kvstore.connector import NullConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.step.graphs import bytes_for_graphs
from kvstore.errors import ConfigError
from kvstore.kernels.paged_batch import PagedBatch

LOGGER = logging.getLogger("kvstore.engine")
CPU_FRACTION = 0.25  # of the memory that is available at the start
CPU_WINDOWS = 4  # at most so many times max_num_seqs full windows
CUDA_FRACTION = 0.92  # of the device's memory, weights and the largest step included
CUDA_WINDOWS = 16  # as CPU_WINDOWS: for a small model a card could hold millions of blocks, which it does not need


def num_hbm_blocks(
    model: PositionFreeModel, config: SchedulerConfig, hbm: int | str, has_graphs: bool = False, saves: bool = False,
    num_processes: int = 1,
) -> int:  # fmt: skip
    """Blocks that fit in `hbm` bytes, or in what "auto" finds. Raises ConfigError when not even one fits.

    On CUDA, "auto" leaves room for what comes beside the pool. has_graphs: room for CUDA graphs, which are captured
    later. saves: room for activations that are kept until they are saved to a tier below HBM. num_processes: on this
    machine; on a CPU they divide its memory.
    """
    block_bytes = config.block_size * model.spec.hbm_bytes_per_token
    size_bytes = _auto_bytes(model, config, has_graphs, saves, num_processes) if hbm == "auto" else int(hbm)
    if hbm == "auto":
        LOGGER.info("hbm auto takes %s of memory on %s", format_size(size_bytes), model.device)
    count = size_bytes // block_bytes
    if count < 1:
        needed = f"but one block of this model needs {format_size(block_bytes)}"
        raise ConfigError("hbm", f"{format_size(size_bytes)}, {needed}", "give more")
    if count * config.block_size < config.max_model_len:
        warnings.warn(
            f"the HBM pool holds {count * config.block_size} tokens, fewer than max_model_len {config.max_model_len}: "
            "longer requests will be refused",
            stacklevel=4,  # points at the caller of Engine()
        )
    return count


def _auto_bytes(
    model: PositionFreeModel, config: SchedulerConfig, has_graphs: bool, saves: bool, num_processes: int
) -> int:
    window_bytes = config.max_num_seqs * config.max_model_len * model.spec.hbm_bytes_per_token
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
    length = min(config.max_num_batched_tokens, config.max_model_len - 1)
    starts = [*range(0, config.max_num_batched_tokens, length), config.max_num_batched_tokens]
    lens = [end - start for start, end in itertools.pairwise(starts)]
    width = -(-length // config.block_size)
    caches = model.new_caches(width, config.block_size)
    device = model.device
    positions = torch.cat([torch.arange(n, device=device) for n in lens])
    batch = PagedBatch(starts, lens, torch.arange(width).expand(len(lens), -1), positions, config.block_size)
    samples = torch.arange(min(config.max_num_seqs, len(positions)), device=device)
    logits = model.forward(torch.zeros_like(positions), positions, batch, caches, NullConnector(), samples)
    logits.float().sort(dim=-1)  # the sampler may need so much beside it
