"""RemoteEngine: an engine whose core runs in a process of its own; sessions and text are here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.config import CacheTiers
from kvstore.connector import hold_store
from kvstore.disk.env import LossWatch
from kvstore.engine.config import MIN_SILENCE_S, EngineConfig
from kvstore.engine.front import Front
from kvstore.engine.lifetime import open_waiting_for_lock
from kvstore.engine.model.files import find_model
from kvstore.engine.model.loading import load_tokenizer
from kvstore.engine.process.link import Link, State
from kvstore.engine.process.remote import RemoteCore
from kvstore.errors import ConfigError


class RemoteEngine(Front):
    """Takes what `Engine` takes, and is used as it is. A context manager.

    state: "running"; "restarting" after the process has ended, which ends all that ran with EngineDiedError; "failed"
    when that has happened more than max_restarts times within an hour, where a restart that fails counts as well;
    "closed". Sessions are not in that process: they go on after a restart, and can be read during it.
    shutdown_s: how long `close` waits for the process before it kills it. silence_s: the same while it runs and gives
    no sign of life, from 2 s; loading may take ten times as long without one, and so may one step. link: to it.
    Raises as Engine, and EngineDiedError when the process ends before the engine is there. A store that another process
    has is waited for, as its owner may be about to end.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        cache_tiers: CacheTiers | Mapping[str, object] | None = None,
        *,
        shutdown_s: float = 10.0,
        silence_s: float = 30.0,
        max_restarts: int = 6,
        **options: Any,
    ) -> None:
        config = EngineConfig(model, CacheTiers.of(cache_tiers), **options)
        find_model(config.model, config.revision, with_weights=False)  # before a process is started for nothing
        if not silence_s >= MIN_SILENCE_S:
            raise ConfigError(f"silence_s is {silence_s!r}; give seconds from {MIN_SILENCE_S:g}")
        with ExitStack() as opened:
            directory = open_waiting_for_lock(lambda: hold_store(config.tiers))
            store = None
            if directory is not None:
                opened.callback(directory.close)
                opened.callback(LossWatch(directory.path).close)
                store = (str(directory.path), *directory.descriptors)
            self.link = Link(_arguments(config), store, shutdown_s, silence_s, max_restarts)
            opened.callback(self.link.close)
            tokenizer = load_tokenizer(config.model, config.tokenizer, config.revision, config.chat_template)
            self.link.started.result()
            core = RemoteCore(self.link, None if tokenizer is None else tokenizer.backend_tokenizer)
            super().__init__(core, tokenizer, directory, opened)

    @property
    def state(self) -> State:
        return self.link.state

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's process gave a sign of life, which comes every half second."""
        return self.link.silent_s

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None while there is none."""
        return self.link.pid


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """Of `Engine`, as JSON can say them."""
    arguments = asdict(config)
    tiers = arguments.pop("tiers")
    arguments["cache_tiers"] = {**tiers, "path": None if tiers["path"] is None else str(tiers["path"])}
    arguments["model"] = None if config.model is None else str(config.model)
    return arguments
