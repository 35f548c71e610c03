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
