"""Opens the core that an engine has: in this process, in a process of its own, or several.

Loads no torch before that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.disk.directory import StoreDirectory
from kvstore.disk.env import LossWatch
from kvstore.disk.opening import OpeningDisk
from kvstore.engine.client.messages import Core
from kvstore.engine.client.remote import RemoteCore
from kvstore.engine.client.several import SeveralCores
from kvstore.engine.config import MIN_SILENCE_S, EngineConfig
from kvstore.engine.model.files import find_model
from kvstore.engine.model.tokenizer import load_tokenizer
from kvstore.engine.process import SLOW_FACTOR, Child, Heart, Start
from kvstore.engine.progress import begin
from kvstore.errors import ConfigError
from kvstore.owned_disk import OwnedDisk, owner_folder, owner_path

THREADS = "OMP_NUM_THREADS"
AHEAD_SHARE = 8  # an engine that has this part of a batch more to do than another gives its conversations to that


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
        raise ConfigError("remote", value, {"disk": 0})


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


def check_process(config: EngineConfig, process: str, silence_s: float) -> None:
    """Raises ConfigError, and ModelError if a process would be started in vain."""
    if process not in ("here", "own"):
        raise ConfigError("process", repr(process), "give here or own")
    if not silence_s >= MIN_SILENCE_S:
        raise ConfigError("silence_s", repr(silence_s), f"give seconds from {MIN_SILENCE_S:g}")
    if process == "own":
        check_divisible(config)
        find_model(config.model, config.revision, with_weights=False)
    elif config.data_parallel_size > 1:
        size = config.data_parallel_size
        value = f"{size}, and each engine has a process of its own"
        raise ConfigError("data_parallel_size", value, {"process": "own"})


def open_here(
    config: EngineConfig, directory: StoreDirectory | None, silence_s: float, opened: ExitStack
) -> tuple[Core, Any]:
    """The core in this process, and the tokenizer."""
    from kvstore.engine.client.local import LocalCore  # loads torch

    heart = Heart(None, SLOW_FACTOR * silence_s)
    opened.callback(heart.close)
    core = LocalCore(config, None if directory is None else directory.share(), heart, silence_s)
    opened.callback(core.close)
    return core, core.tokenizer


def open_own(
    config: EngineConfig, directory: StoreDirectory | None, silence_s: float, shutdown_s: float, max_restarts: int,
    opened: ExitStack,
) -> tuple[Core, Any]:  # fmt: skip
    """The core in a process of its own, or in several, and the tokenizer."""
    store, size, disk, each = None, config.data_parallel_size, None, [config]
    if directory is not None:
        opened.callback(LossWatch(directory.path).close)
        store = (str(directory.path), *directory.descriptors)
    settings, cores = environment_of_each(size), list[RemoteCore]()
    with ExitStack() as held:  # the disk of several engines, until its owner has it: it is read while they load
        reading = folder = None
        if size > 1:
            if directory is not None:
                folder, store = owner_folder(), None
                held.callback(folder.remove)
                reading = OpeningDisk(directory.share(), int(config.tiers.disk), config.tiers.codec, tell=begin)
                held.callback(reading.close)
            secret = config.fleet_root() or (os.urandom(32) if directory is None else directory.secret)
            each = divided(config, secret, None if folder is None else owner_path(folder))
        for one in each:
            start = partial(Child, Start(silence_s, one.arguments(), store), settings)
            cores.append(RemoteCore(start, max_restarts, shutdown_s))
            opened.callback(cores[-1].close)
        # While the processes load.
        tokenizer = load_tokenizer(config.model, config.tokenizer, config.revision, config.chat_template)
        for core in cores:
            core.started.result()
        if size == 1:
            return cores[0], tokenizer
        config.tiers.check_room(cores[0].facts.block_bytes)
        held.pop_all()
    if reading is not None and folder is not None:
        disk = OwnedDisk(reading, folder, config.tiers, config.eviction)
        opened.callback(disk.close)
    several = SeveralCores(cores, disk, max(1, config.max_num_seqs // AHEAD_SHARE))
    opened.callback(several.close)
    return several, tokenizer
