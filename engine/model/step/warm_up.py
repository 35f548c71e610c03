"""What a first request on CUDA would wait for, done at the start: kernels are compiled and loaded, workspaces made.

Triton compiles a kernel for every form of its launches, which takes a second each, and keeps what comes out on disk.
Loads and saves are warmed up where they are registered, graphs where they are captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from kvstore.connector import NullConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.model.interception import KVCaches, PositionFreeModel
from kvstore.engine.model.step.sampler import Sampler
from kvstore.engine.sampling_params import SamplingParams
from kvstore.errors import ModelError
from kvstore.kernels.paged_batch import PagedBatch

LOGGER = logging.getLogger("kvstore.engine")
_MOST_TOKENS = 128  # attention has no other forms for more: a tile has no more rows


@torch.inference_mode()
def warm_up(model: PositionFreeModel, caches: KVCaches, config: SchedulerConfig) -> None:
    """Steps of all forms; nothing is written to the caches. In the thread that is going to step: cuBLAS keeps a handle
    and a workspace for each.

    Raises ModelError with the form that failed.
    """
    LOGGER.info("warming up: kernels that were never compiled on this machine take a second each")
    started = time.perf_counter()
    for num_tokens, context_len in step_forms(config):
        try:
            logits = _step(model, caches, config.block_size, num_tokens, context_len)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of torch or Triton, which has errors of its own
            reason = str(error).strip().split("\n")[0]
            raise ModelError(
                f"a step of {num_tokens} tokens with a context of {context_len} fails on {model.device} in "
                f"{model.spec.dtype} with {type(error).__name__}: {reason}; give another dtype, or device=cpu"
            ) from error
    sampler, none = Sampler(1, model.spec.vocab_size, model.device), np.empty(0, np.int64)
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=40, top_p=0.9)):
        sampler.set_row(0, params, 0, (), none, none)
        sampler.sample(logits, np.zeros(1, np.int64))  # waits for the device
    LOGGER.info("warm after %.1f s", time.perf_counter() - started)


def step_forms(config: SchedulerConfig) -> Iterator[tuple[int, int]]:
    """New tokens of a request, from one to a whole step, and its context: without a history, and with the longest."""
    longest = min(config.max_num_batched_tokens, config.max_model_len)
    yield longest, longest
    num_tokens = 1
    while num_tokens <= min(_MOST_TOKENS, longest):
        yield from ((num_tokens, num_tokens), (num_tokens, config.max_model_len))
        num_tokens *= 2


def _step(
    model: PositionFreeModel, caches: KVCaches, block_size: int, num_tokens: int, context_len: int
) -> torch.Tensor:  # [1, vocab_size]
    """One request whose blocks are all the first one; a slot of -1 is not written."""
    device = model.device
    positions = torch.arange(context_len - num_tokens, context_len, device=device)
    table = torch.zeros(1, -(-context_len // block_size), dtype=torch.int64)
    slots = torch.full_like(positions, -1)
    batch = PagedBatch([0, num_tokens], [context_len], table, slots, block_size)
    last = torch.full((1,), num_tokens - 1, device=device)
    return model.forward(torch.zeros_like(positions), positions, batch, caches, NullConnector(), last)
