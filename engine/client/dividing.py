"""One configuration for several engines on a machine becomes one for each. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError

THREADS = "OMP_NUM_THREADS"


def check_divisible(config: EngineConfig) -> None:
    """Raises ConfigError for what several engines cannot share."""
    size, tiers = config.data_parallel_size, config.tiers
    if size == 1:
        return
    if config.kv_events is not None:
        raise ConfigError("kv_events", "set, but routers follow one engine", {"data_parallel_size": 1})
    if config.distributed_executor != "here":
        value = f"{config.distributed_executor}, which starts one engine, not {size}"
        raise ConfigError("distributed_executor", value, {"data_parallel_size": 1})
    if tiers.disk and not tiers.cpu:
        value = f"0, but {size} engines that share a disk read from it into the CPU tier"
        raise ConfigError("cpu", value, "give it a size")
    if tiers.disk and tiers.remote is not None:
        value = f"set, but so is a disk, and {size} engines share one of them"
        raise ConfigError("remote", value, "give disk 0, or one server to each disk")


def divided(config: EngineConfig, root_secret: bytes, disk_owner: str | None) -> list[EngineConfig]:
    """Each has its part of the CPU tier, and no disk but the owner's. root_secret: of their lineage roots."""
    tiers = replace(config.tiers, cpu=int(config.tiers.cpu) // config.data_parallel_size, disk=0)
    shared = replace(config, tiers=tiers, root_secret=root_secret.hex(), disk_owner=disk_owner)
    return [replace(shared, data_parallel_rank=rank) for rank in range(config.data_parallel_size)]


def environment_of_each(size: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Divides the processors among the computing threads of the engines, unless the user has said how many."""
    if size == 1 or THREADS in environment:
        return {}
    return {THREADS: str(max(1, len(os.sched_getaffinity(0)) // size))}
