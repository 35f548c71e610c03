"""Starts the other ranks of a model on this machine, or waits for those that Ray starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.engine.process.pulse import SLOW_FACTOR
from kvstore.engine.ranks.door import Door
from kvstore.engine.ranks.far import FarRank
from kvstore.engine.ranks.process import RankProcess
from kvstore.engine.ranks.wire import StartRank
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """The other ranks, in the order of their numbers, and where all meet.

    arena: descriptor of the memory that all of them map; None: they have no share of it. host: address of this machine
    for the others; None: all are on one.
    """

    others: Sequence[RankProcess | FarRank]
    rendezvous: str
    arena: int | None = None
    host: str | None = None


@contextmanager
def started_here(
    arguments: Sequence[Mapping[str, Any]], silence_s: float, settings: Mapping[str, str]
) -> Iterator[Launch]:
    """Start processes, which end with this context. arguments: those of `Engine` for each other rank. settings:
    environment variables for them. Raises ConfigError where processes cannot share memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a model in several processes needs Linux, where they can share memory")
    with ExitStack() as opened:
        folder = tempfile.mkdtemp(prefix="kvstore-ranks-")
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        arena = os.memfd_create("kvstore-arena")
        opened.callback(os.close, arena)
        others, rendezvous = list[RankProcess](), str(Path(folder) / "rendezvous")
        for rank, each in enumerate(arguments, 1):
            start = StartRank(rank, len(arguments) + 1, arena, silence_s, rendezvous, dict(each))
            others.append(RankProcess(start, settings))
            opened.callback(others[-1].close)
        yield Launch(others, rendezvous, arena)


@contextmanager
def awaited(
    door: Door, arguments: Sequence[Mapping[str, Any]], silence_s: float, rendezvous: str,
    invite: Callable[[Door], object], check: Callable[[], object] = lambda: None,
) -> Iterator[Launch]:  # fmt: skip
    """Wait for ranks that others start. They end with this context. invite: tells them where the door is. check: called
    while one is missing; may raise.

    Raises EngineDiedError if one does not come in time: ten times the silence that is allowed to a rank that runs.
    """
    size = len(arguments) + 1
    with ExitStack() as opened:
        with door:
            invite(door)
            found = door.others(size, SLOW_FACTOR * silence_s, check)
        others: list[FarRank] = []
        for rank, each in enumerate(arguments, 1):
            others.append(FarRank(StartRank(rank, size, None, silence_s, rendezvous, dict(each)), found[rank]))
            opened.callback(others[-1].close)
        yield Launch(others, rendezvous, host=door.host)
