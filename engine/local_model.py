"""The model in this process, whole or the first rank's part: loads and intercepts it, and sizes its pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.engine.config import EngineConfig, SchedulerConfig
from kvstore.engine.model.devices import own_device
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import Loaded, load
from kvstore.engine.model.memory import num_hbm_blocks
from kvstore.engine.model.parallel.group import Part
from kvstore.engine.model.parallel.nccl import part_of_process
from kvstore.engine.model.probe import intercept
from kvstore.engine.progress import PROBE, WEIGHTS, begin
from kvstore.engine.ranks.launch import started_here
from kvstore.engine.ranks.on_ray import others_on_ray
from kvstore.engine.ranks.ranks import Ranks
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.errors import ConfigError
from kvstore.kernels.cuda.triton_support import has_triton


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is ready to run, and its sizes."""

    loaded: Loaded
    model: PositionFreeModel
    limits: SchedulerConfig
    num_blocks: int  # of the HBM pool
    has_graphs: bool  # whether decode steps will be CUDA graphs


def open_model(config: EngineConfig, ranks: Ranks | None) -> OpenedModel:
    """ranks: load the other parts meanwhile. Raises as `load` and `intercept`, and the errors of these ranks."""

    def check(network: Any, tokenizer: Any) -> None:
        check_room(config, network)
        template = None if config.chat_template is None else ChatTemplate.of(tokenizer)
        if template is not None and (fault := template.fault()) is not None:
            raise ConfigError("chat_template", f"one that cannot be used: {fault}", "give another one")

    device, part = own_device(config), None
    if ranks is not None:
        part = part_of_process(0, config.tensor_parallel_size, config.pipeline_parallel_size, device)
    begin(WEIGHTS)
    loaded = load(
        config.model, device, config.dtype, config.max_model_len, config.tokenizer, config.revision,
        config.chat_template, check, part,
    )  # fmt: skip
    limits = config.scheduler(loaded.max_model_len)
    has_graphs = loaded.device.type == "cuda" and has_triton() and not config.enforce_eager and ranks is None
    has_store = bool(config.tiers.cpu or config.tiers.disk)
    with nullcontext() if ranks is None else ranks.blamed():
        if ranks is not None and part is not None:
            ranks.wait_loaded()
            _join(part, ranks)
            for other in ranks.others:
                other.child.when_ended(part.cut)
        begin(PROBE)
        model = intercept(loaded.model, loaded.max_model_len, True, part)
        num_blocks = num_hbm_blocks(model, limits, config.tiers.hbm, has_graphs, has_store, config.num_processes)
        if part is not None:
            num_blocks = part.least(num_blocks)
    return OpenedModel(loaded, model, limits, num_blocks, has_graphs)


def _join(part: Part, ranks: Ranks) -> None:
    """Join the groups of all ranks. In a thread, as nothing ends its wait for one that has ended before it has joined.

    Raises EngineDiedError.
    """
    joined, is_over = Future[None](), threading.Event()

    def join() -> None:
        try:
            part.join(ranks.rendezvous, ranks.host)
            joined.set_result(None)
        except Exception as error:
            joined.set_exception(error)
        is_over.set()

    for other in ranks.others:
        other.child.when_ended(is_over.set)
    threading.Thread(target=join, name="kvstore-join", daemon=True).start()
    is_over.wait()
    if not joined.done():
        ranks.check()
    joined.result()


def check_room(config: EngineConfig, network: Any) -> None:
    """Check before weights are read that the tiers have room for blocks, as far as the model's configuration tells.

    Raises ConfigError.
    """
    text = network.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or (num_heads and text.hidden_size // num_heads)
    dtype = getattr(text, "dtype", None) if config.dtype == "auto" else getattr(torch, config.dtype)
    if num_kv_heads and head_dim:
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
        layer_bytes = 2 * config.block_size * num_kv_heads * head_dim * itemsize
        config.tiers.check_room(text.num_hidden_layers * layer_bytes)


@contextmanager
def open_ranks(config: EngineConfig, silence_s: float) -> Iterator[Ranks]:
    """Start the other ranks. Raises ConfigError, also if there are too few devices, and
    EngineDiedError if one does not come. On one machine all ranks get the same number of threads.
    """
    own_device(config)  # there must be one, before anything is started
    size, device = config.num_ranks, config.device if config.distributed_executor == "here" else "cpu"
    arguments = [{**config.arguments(), "device": device}] * (size - 1)
    if config.distributed_executor == "ray":
        launching = others_on_ray(arguments, silence_s, torch.get_num_threads())
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        launching = started_here(arguments, silence_s, {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    with launching as launch:
        yield Ranks(launch, config.block_size, config.tensor_parallel_size - 1)
