"""Which device a process computes on, where several compute on one machine."""

import torch

from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError


def own_device(config: EngineConfig, rank: int = 0) -> str:
    """The device of a rank, also of one of several engines: each has a CUDA device of its own. Raises ConfigError."""
    size = config.num_processes
    if size == 1 or config.device == "cpu" or not torch.cuda.is_available():
        return config.device
    if config.num_ranks > 1 and config.distributed_executor != "here":
        raise ConfigError(
            f"distributed_executor is {config.distributed_executor}, but a model on CUDA devices is served on one "
            "machine only; give distributed_executor=here, or device=cpu"
        )
    num_devices = torch.cuda.device_count()
    if num_devices < size:
        names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
        given = " and ".join(f"{name} is {value}" for name in names if (value := getattr(config, name)) > 1)
        raise ConfigError(
            f"{given}, but this machine has {num_devices} CUDA devices for {size} processes, which need one each: give "
            "fewer, or device=cpu"
        )
    return f"cuda:{config.data_parallel_rank * config.num_ranks + rank}"
