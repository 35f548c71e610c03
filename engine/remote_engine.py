"""RemoteEngine: an engine whose core runs in a process of its own, or in several; sessions and text are here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.config import CacheTiers
from kvstore.connector import hold_store
from kvstore.disk.env import LossWatch
from kvstore.engine.config import MIN_SILENCE_S, EngineConfig
from kvstore.engine.data_parallel.core import CoreReplica, DataParallelCore
from kvstore.engine.data_parallel.dividing import check_divisible, divided, environment_of_each
from kvstore.engine.data_parallel.links import EngineLinks
from kvstore.engine.front import Front
from kvstore.engine.lifetime import open_waiting_for_lock
from kvstore.engine.model.files import find_model
from kvstore.engine.process.life import CoreProcess
from kvstore.engine.process.link import Link, State
from kvstore.engine.process.remote import RemoteCore
from kvstore.engine.progress import shown
from kvstore.engine.sessions.core import Core
from kvstore.errors import ConfigError
from kvstore.owned_disk import OwnedDisk
from kvstore.sessions.shared.opening import open_shared_sessions

AHEAD_SHARE = 8  # an engine that has this part of a batch more to do than another gives its conversations to that


class RemoteEngine(Front):
    """Takes the same arguments as `Engine` and is used the same way. A context manager.

    When the process ends, running requests end with EngineDiedError, and another process is started. Sessions are not
    in that process: they go on after a restart, and can be read during it.

    state: "running"; "restarting"; "failed" if the process has ended more than max_restarts times within an hour,
    failed restarts included; "closed". shutdown_s: how long `close` waits for the process before it kills it.
    silence_s: how long a running process may give no sign of life, at least 2 s; loading and a single step may take ten
    times as long. data_parallel_size: how many engines compute, each with the whole model. They share the disk tier and
    divide the CPU tier; hbm, and what concerns a batch, is of each. When one ends, the others go on, and `state` is
    that of the engine that is best off. link: the link to the process, or to all of them. Raises as Engine, and
    EngineDiedError if a process ends before the engine is ready. If another process holds the store, it waits a while,
    because that process may be about to end.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        cache_tiers: CacheTiers | Mapping[str, object] | None = None,
        *,
        shutdown_s: float = 10.0,
        silence_s: float = 30.0,
        max_restarts: int = 6,
        progress: bool = False,
        **options: Any,
    ) -> None:
        config = EngineConfig(model, CacheTiers.of(cache_tiers), **options)
        check_divisible(config)
        find_model(config.model, config.revision, with_weights=False)  # so that no process is started in vain
        if not silence_s >= MIN_SILENCE_S:
            raise ConfigError("silence_s", repr(silence_s), f"give seconds from {MIN_SILENCE_S:g}")
        with ExitStack() as opened, shown(progress):
            directory = open_waiting_for_lock(lambda: hold_store(config.tiers))
            store = None
            if directory is not None:
                opened.callback(directory.close)
                opened.callback(LossWatch(directory.path).close)
                store = (str(directory.path), *directory.descriptors)
            sessions = open_shared_sessions(config.shared_sessions(), directory)
            if sessions is not None:
                opened.callback(sessions.close)
            size, disk, each = config.data_parallel_size, None, [config]
            if size > 1:
                if directory is not None:
                    disk, store = OwnedDisk(directory, config.tiers, config.eviction), None
                    opened.callback(disk.close)
                secret = config.fleet_root() or (os.urandom(32) if directory is None else directory.secret)
                each = divided(config, secret, None if disk is None else disk.path)
            settings, links = environment_of_each(size), list[Link]()
            for one in each:
                start = partial(CoreProcess, one.arguments(), store, silence_s, shutdown_s, settings)
                links.append(Link(start, max_restarts))
                opened.callback(links[-1].close)
            from kvstore.engine.model.loading import load_tokenizer  # loads torch, while the processes do

            tokenizer = load_tokenizer(config.model, config.tokenizer, config.revision, config.chat_template)
            for link in links:
                link.started.result()
            backend, numbers = None if tokenizer is None else tokenizer.backend_tokenizer, itertools.count()
            cores = [RemoteCore(link, backend, numbers=numbers) for link in links]
            core: Core = cores[0]
            self.link: Link | EngineLinks = links[0]
            if size > 1:
                config.tiers.check_room(core.facts.block_bytes)
                replicas = [CoreReplica(rank, *one) for rank, one in enumerate(zip(links, cores, strict=True))]
                most_ahead = max(1, config.max_num_seqs // AHEAD_SHARE)
                core, self.link = DataParallelCore(replicas, disk, most_ahead, secret), EngineLinks(links)
            super().__init__(core, tokenizer, directory, opened, sessions)

    @property
    def state(self) -> State:
        return self.link.state

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's process gave its last sign of life, due every half second."""
        return self.link.silent_s

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None while there is none, or if there are several."""
        return self.link.pid
