"""Does at the start what a first request on CUDA would wait for: compiles and loads kernels, makes workspaces.

Triton compiles a kernel for every form of its launches, which takes a second each, and keeps the result on disk. Loads
and saves are warmed up when the caches are registered, graphs when they are captured.
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
_MOST_TOKENS = 128  # attention has the same form for more tokens, as a tile has no more rows


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
            out = _step(model, caches, config.block_size, num_tokens, context_len)
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


def _step(
    model: PositionFreeModel, caches: KVCaches, block_size: int, num_tokens: int, context_len: int
) -> torch.Tensor:  # [1, vocab_size]
    """A step of one request, all of whose blocks are the first one. Nothing is written, as its slots are -1."""
    device = model.device
    positions = torch.arange(context_len - num_tokens, context_len, device=device)
    table = torch.zeros(1, -(-context_len // block_size), dtype=torch.int64)
    slots = torch.full_like(positions, -1)
    batch = PagedBatch([0, num_tokens], [context_len], table, slots, block_size)
    last = torch.full((1,), num_tokens - 1, device=device)
    return model.forward(torch.zeros_like(positions), positions, batch, caches, NullConnector(), last)
